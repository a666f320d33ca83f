"""Which rows the tiles of a grouped product have: plain JAX, before the kernel."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from jax_ep.pallas.tiling import ALIGNMENT
from jax_ep.tiled_gemm import locate_groups
from jax_ep.types import Array


class RowTiles(NamedTuple):
    """Tiles of rows, group after group; the rows past the groups are one more group, G.

    Attributes:
      group: `[P]` int32.
      row: `[P]` int32, first row: the first tile of a group begins up to `ALIGNMENT - 1` rows before it.
      start, end: `[P]` int32, rows of the group.
      total: `[1]` int32, how many tiles there are; those behind hold anything.
    """

    group: Array
    row: Array
    start: Array
    end: Array
    total: Array


def row_tiles(group_sizes: Array, num_rows: int, tile: int) -> RowTiles:
    """Tiles of `tile` rows for groups of `group_sizes [G]` int32."""
    groups = locate_groups(group_sizes, num_rows)
    starts = jnp.concatenate([groups.starts, groups.ends[-1:]])
    ends = jnp.concatenate([groups.ends, jnp.full_like(groups.ends[-1:], num_rows)])
    rows = starts & -ALIGNMENT
    num_tiles = jnp.where(ends > starts, (ends - rows + (tile - 1)) // tile, 0)
    behind = jnp.cumsum(num_tiles, dtype=jnp.int32)
    most = (num_rows + starts.shape[0] * (tile + ALIGNMENT - 2)) // tile
    index = jnp.arange(most, dtype=jnp.int32)
    group = jnp.sum(index[:, None] >= behind[None, :-1], axis=1, dtype=jnp.int32)
    first = (behind - num_tiles)[group]
    return RowTiles(group, rows[group] + (index - first) * tile, starts[group], ends[group], behind[-1:])
