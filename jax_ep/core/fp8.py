"""FP8 with one float32 scale per scale block: the arithmetic of the wire format and of FP8 operands.

Values are float8_e4m3fn (largest finite 448), scaled so that the largest magnitude of each block maps to 448, as in
DeepSeek-V3 (arXiv:2412.19437, section 3.3). `jax_ep.quantization` has the public functions, which check arguments.

Column-wise quantization has one scale per 128 rows, for weight gradients, which sum over rows. Tensor cores need the
contracted axis of 8-bit operands last, so `[R, H]` becomes the transpose `[H, P]`. Each group is padded with zeros to a
multiple of 128 of the P positions, so that no scale block spans two groups.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_ep.core.dtypes import FP8
from jax_ep.core.layout import block_owners, gather_rows, repeat
from jax_ep.types import Array, Quantized, Tokens

GROUP_SIZE = 128
"""Size of a scale block: 128 columns of a row, or 128 by 128 elements of a matrix."""
FP8_MAX = 448.0
# Scale of an all-zero block, and the lower bound of scales: float32 can divide by it.
MIN_SCALE = 2.0**-120


def split_rows(rows: Tokens) -> tuple[Array, Array | None]:
    """Return the values of rows, and their scales or None."""
    return rows if isinstance(rows, tuple) else (rows, None)


def quantize_rows(x: Array, group_size: int = GROUP_SIZE) -> Quantized:
    """Quantize `[..., H]` to FP8 values and scales `[..., H // group_size]`."""
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)
    values, scales = quantize(groups, (-1,))
    return values.reshape(x.shape), scales


def dequantize_rows(values: Array, scales: Array, dtype: DTypeLike) -> Array:
    """Multiply `values [..., H]` by their scales in float32 and cast to `dtype`."""
    groups = values.reshape(*scales.shape, values.shape[-1] // scales.shape[-1]).astype(jnp.float32)
    return (groups * scales[..., None]).astype(dtype).reshape(values.shape)


def quantize_matrices(w: Array, *, transpose: bool = True) -> Quantized:
    """Quantize `[..., K, N]` to FP8 `[..., N, K]` with scales `[..., ceil(N / 128), K / 128]` per 128 x 128 block.

    With `transpose=False`, quantize the same layout `[..., K, N]`, with scales `[..., ceil(K / 128), N / 128]`.
    """
    w = w if transpose else jnp.swapaxes(w, -1, -2)
    depth, columns = w.shape[-2:]
    column_blocks = -(-columns // GROUP_SIZE)
    missing = column_blocks * GROUP_SIZE - columns
    padded = jnp.pad(jnp.swapaxes(w, -1, -2), [(0, 0)] * (w.ndim - 2) + [(0, missing), (0, 0)])
    # Split one axis per reshape: JAX infers the sharding of explicit mesh axes only then.
    rows = padded.reshape(*w.shape[:-2], column_blocks, GROUP_SIZE, depth)
    blocks = rows.reshape(*rows.shape[:-1], depth // GROUP_SIZE, GROUP_SIZE)
    values, scales = quantize(blocks, (-3, -1))
    # Eager indexing would be a gather, which has no sharding rule for explicit mesh axes.
    return lax.slice_in_dim(values.reshape(rows.shape).reshape(padded.shape), 0, columns, axis=-2), scales


def dequantize_matrices(values: Array, scales: Array, dtype: DTypeLike) -> Array:
    """Multiply `values [..., N, K]` by the scales of their blocks in float32 and cast to `dtype`."""
    scales = lax.slice_in_dim(repeat(scales, GROUP_SIZE, axis=-2), 0, values.shape[-2], axis=-2)
    groups = values.reshape(*scales.shape, GROUP_SIZE).astype(jnp.float32)
    return (groups * scales[..., None]).astype(dtype).reshape(values.shape)


def quantize(groups: Array, axes: tuple[int, ...]) -> Quantized:
    """Quantize to FP8 with one scale for all elements along `axes`, which are removed from the scales."""
    groups = groups.astype(jnp.float32)
    scales = scales_of(groups, axes, FP8_MAX)
    # Divide once per block, as the kernels do, so that the bits agree. The scaled value may round just past 448, which
    # the cast would turn into NaN; NaN inputs stay NaN through the clip.
    values = jnp.clip(groups * (1 / scales), -FP8_MAX, FP8_MAX).astype(FP8)
    # Without a barrier XLA may drop the rounding when quantization and dequantization meet in one program, because it
    # treats the rounding as excess precision.
    return lax.optimization_barrier((values, jnp.squeeze(scales, axes)))


def largest_magnitudes(groups: Array, axes: tuple[int, ...]) -> Array:
    """Return the largest magnitudes of float32 values along `axes`, which keep size 1; NaN counts as the largest."""
    # As integers, magnitudes keep their order and NaN is the largest. XLA's float maximum on the CPU loses NaN.
    bits = lax.bitcast_convert_type(groups, jnp.int32) & jnp.int32(0x7FFFFFFF)
    return lax.bitcast_convert_type(jnp.max(bits, axis=axes, keepdims=True), jnp.float32)


def scales_of(groups: Array, axes: tuple[int, ...], limit: float) -> Array:
    """Return scales that bring float32 values along `axes`, which keep size 1, to at most `limit`."""
    return jnp.maximum(largest_magnitudes(groups, axes) * jnp.float32(1 / limit), jnp.float32(MIN_SCALE))


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
    values, scales = quantize(gather_rows(x, index), (1,))
    return values.reshape(index.size, x.shape[1]).T, scales
