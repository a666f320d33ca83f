"""Column-wise FP8 quantization with one scale per 128 rows, for weight gradients, which sum over rows.

Tensor cores need the contracted axis of 8-bit operands last, so `[R, H]` becomes the transpose `[H, P]`. Each group is
padded with zeros to a multiple of 128 of the P positions, so that no scale block spans two groups.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from jax_ep.core import fp8
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.layout import block_owners, gather_rows
from jax_ep.types import Array, Quantized


def num_blocks(num_rows: int, num_groups: int) -> int:
    """Return the number of 128-row blocks that hold any split of `num_rows` rows into groups."""
    return (num_rows + min(num_rows, num_groups) * (GROUP_SIZE - 1)) // GROUP_SIZE


class RowBlocks(NamedTuple):
    """The first row of each block `[P / 128]`, and the end of its group's rows; both 0 past the last block in use."""

    starts: Array
    ends: Array


def blocks_until(group_sizes: Array) -> Array:
    """Return the inclusive cumulative number of blocks per group, `[G]` int32."""
    return jnp.cumsum(-(-jnp.maximum(group_sizes, 0) // GROUP_SIZE), dtype=jnp.int32)


def row_blocks(group_sizes: Array, num_rows: int) -> RowBlocks:
    """Return the first row and the end of the group for each block."""
    sizes, last_blocks = jnp.maximum(group_sizes, 0), blocks_until(group_sizes)
    blocks = -(-sizes // GROUP_SIZE)
    number = num_blocks(num_rows, group_sizes.shape[0])
    owners = block_owners(blocks * GROUP_SIZE, number, GROUP_SIZE)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    first_rows, first_blocks = ends - sizes, last_blocks - blocks
    starts = first_rows[owners] + (jnp.arange(number, dtype=jnp.int32) - first_blocks[owners]) * GROUP_SIZE
    return RowBlocks(jnp.where(owners < 0, 0, starts), jnp.where(owners < 0, 0, ends[owners]))


def quantize_columns(x: Array, group_sizes: Array) -> Quantized:
    """Quantize grouped rows `[R, H]` column-wise to FP8 values `[H, P]` and scales `[P / 128, H]`."""
    blocks = row_blocks(group_sizes, x.shape[0])
    rows = blocks.starts[:, None] + jnp.arange(GROUP_SIZE, dtype=jnp.int32)[None]
    index = jnp.where(rows < jnp.minimum(blocks.ends, x.shape[0])[:, None], rows, -1)
    values, scales = fp8.quantize(gather_rows(x, index), (1,))
    return values.reshape(index.size, x.shape[1]).T, scales
