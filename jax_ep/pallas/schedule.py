"""Which rows the tiles of a grouped product have: plain JAX, before the kernel.

Written so that XLA makes few launches of it: two sums over pairs, and what is computed for each element between them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_ep.pallas.tiling import ALIGNMENT, FP8_HEIGHTS, ROW_UNIT, TILE, ForwardTiles
from jax_ep.types import Array
from jax_ep.xla.grouped_gemm import locate_groups

_MOST_EQUAL_TILES = 3


class RowTiles(NamedTuple):
    """Tiles of rows, all of a group one after another; the rows past the groups are one more group, G.

    Attributes:
      group: `[P]` int32.
      row: `[P]` int32, first row, which may be one of another tile or group.
      height: `[P]` int32, place in `ForwardTiles.heights`, or in `FP8_HEIGHTS`.
      start, end: `[P]` int32, rows that are the tile's, but for those behind its height.
      band, band_size: `[P]` int32, first tile of those that are visited together, all of one group, and how many.
      total: `[1]` int32, how many tiles there are; those behind hold anything.
    """

    group: Any
    row: Any
    height: Any
    start: Any
    end: Any
    band: Any
    band_size: Any
    total: Any


def row_tiles(group_sizes: Array, num_rows: int, tiles: ForwardTiles) -> RowTiles:
    """Tiles for groups of `group_sizes [G]` int32.

    A group has as few tiles as possible. Up to three are of one height: they read the same matrix, and stay in step
    only where they take equally long. The last one then begins up to two units within the one before, which stores
    these rows. Tiles of more than three differ by a unit of rows at most.

    Groups with the tallest tiles come first, so that programs which run at the same time have tiles of like heights.
    """
    starts, ends, origins = _bounds(group_sizes, num_rows)
    units = jnp.where(ends > starts, _divide(ends - origins, ROW_UNIT), 0)
    counts = _divide(units, tiles.heights[-1] // ROW_UNIT)
    first = _first_tiles(counts, _divide(units, jnp.maximum(counts, 1)))

    most = (num_rows + starts.shape[0] * (tiles.heights[-1] + ALIGNMENT - 2)) // tiles.heights[-1]
    group, number = _tiles_of(first, counts, most)
    count, unit = jnp.maximum(counts, 1)[group], units[group]
    equal, tallest, more = count <= _MOST_EQUAL_TILES, _divide(unit, count), unit % count
    shorter = ~equal & (more > 0) & (number >= more)
    height = tallest - shorter.astype(jnp.int32)
    above = number * tallest - jnp.where(shorter, number - more, 0)
    row = origins[group] + jnp.minimum(above, unit - height) * ROW_UNIT
    start = jnp.maximum(starts[group], origins[group] + above * ROW_UNIT)
    kind = jnp.zeros_like(height)
    for limit in tiles.heights[:-1]:
        kind += (height > limit // ROW_UNIT).astype(jnp.int32)
    total = jnp.sum(counts, keepdims=True, dtype=jnp.int32)
    return RowTiles(group, row, kind, start, ends[group], *_bands(number, count, tiles.band), total)


def whole_tiles(group_sizes: Array, num_rows: int, band: int) -> RowTiles:
    """Tiles of the larger of `FP8_HEIGHTS`, and of the smaller one where that is enough for the end of a group."""
    starts, ends, origins = _bounds(group_sizes, num_rows)
    counts = jnp.where(ends > starts, _divide(ends - origins, TILE), 0)
    most = (num_rows + starts.shape[0] * (TILE + ALIGNMENT - 2)) // TILE
    behind = jnp.cumsum(counts, dtype=jnp.int32)
    group, number = _tiles_of(behind - counts, counts, most)
    row = origins[group] + number * TILE
    is_tall = ends[group] - row > FP8_HEIGHTS[0]
    bands = _bands(number, jnp.maximum(counts, 1)[group], band)
    start = jnp.maximum(starts[group], row)
    return RowTiles(group, row, is_tall.astype(jnp.int32), start, ends[group], *bands, behind[-1:])


def _bounds(group_sizes: Array, num_rows: int) -> tuple[Array, Array, Array]:
    """`[G + 1]` first rows and ends of groups, of which the last are the rows past them, and where tiles may begin."""
    groups = locate_groups(group_sizes, num_rows)
    starts = jnp.concatenate([groups.starts, groups.ends[-1:]])
    ends = jnp.concatenate([groups.ends, jnp.full_like(groups.ends[-1:], num_rows)])
    return starts, ends, starts & -ALIGNMENT


def _first_tiles(counts: Array, keys: Array) -> Array:
    """`[G + 1]` the first tile of each group, of groups in decreasing order of `keys`.

    By a comparison of all pairs, which is one launch; a sort and sums along its order would be several.
    """
    place = jnp.arange(keys.shape[0], dtype=jnp.int32)
    is_earlier = (keys[None] > keys[:, None]) | ((keys[None] == keys[:, None]) & (place[None] < place[:, None]))
    return jnp.sum(jnp.where(is_earlier, counts[None], 0), axis=1, dtype=jnp.int32)


def _tiles_of(first: Array, counts: Array, most: int) -> tuple[Array, Array]:
    """`[P]` group of each tile, and its number there, for groups of `counts` tiles."""
    tile = jnp.arange(most, dtype=jnp.int32)
    is_own = (tile[:, None] >= first[None]) & (tile[:, None] < (first + counts)[None])
    group = jnp.sum(jnp.where(is_own, jnp.arange(first.shape[0], dtype=jnp.int32)[None], 0), axis=1, dtype=jnp.int32)
    return group, tile - first[group]


def _bands(number: Array, count: Array, band: int) -> tuple[Array, Array]:
    """First tile of each tile's band, and how many are in it, by its number in its group and their count."""
    first = number // band * band
    tile = jnp.arange(number.shape[0], dtype=jnp.int32)
    return tile - number + first, jnp.minimum(count - first, band)


def _divide(a: Array, b: Any) -> Array:
    """Rounded up."""
    return (a + (b - 1)) // b
