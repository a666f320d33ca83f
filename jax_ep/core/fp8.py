"""FP8 with one float32 scale per group of columns: the arithmetic of the wire format and of FP8 operands.

Values are float8_e4m3fn (largest finite 448), scaled so that the largest magnitude of each group maps to 448, as in
DeepSeek-V3 (arXiv:2412.19437, section 3.3). `jax_ep.quantization` has the public functions, which check arguments.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_ep.core.dtypes import FP8
from jax_ep.types import Array, Quantized

GROUP_SIZE = 128
"""Columns of a row, or rows and columns of a block of a matrix, that share a scale."""
FP8_MAX = 448.0
# A group of zeros, or of values that float32 cannot divide by, gets this scale instead of zero.
MIN_SCALE = 2.0**-120


def quantize_rows(x: Array, group_size: int = GROUP_SIZE) -> Quantized:
    """`[..., H]` to FP8 values and scales `[..., H // group_size]`."""
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)
    values, scales = quantize(groups, (-1,))
    return values.reshape(x.shape), scales


def dequantize_rows(values: Array, scales: Array, dtype: DTypeLike) -> Array:
    """`values [..., H]` times their scales, multiplied in float32, as `dtype`."""
    groups = values.reshape(*scales.shape, values.shape[-1] // scales.shape[-1]).astype(jnp.float32)
    return (groups * scales[..., None]).astype(dtype).reshape(values.shape)


def quantize_matrices(w: Array, *, transpose: bool = True) -> Quantized:
    """`[..., K, N]` to FP8 `[..., N, K]` and scales `[..., ceil(N / 128), K / 128]` of blocks of 128 by 128.

    Without `transpose` to the same numbers `[..., K, N]` and scales `[..., ceil(K / 128), N / 128]`.
    """
    w = w if transpose else jnp.swapaxes(w, -1, -2)
    depth, columns = w.shape[-2:]
    column_blocks = -(-columns // GROUP_SIZE)
    missing = column_blocks * GROUP_SIZE - columns
    padded = jnp.pad(jnp.swapaxes(w, -1, -2), [(0, 0)] * (w.ndim - 2) + [(0, missing), (0, 0)])
    # One axis per reshape: on explicit mesh axes JAX infers the sharding of no other.
    rows = padded.reshape(*w.shape[:-2], column_blocks, GROUP_SIZE, depth)
    blocks = rows.reshape(*rows.shape[:-1], depth // GROUP_SIZE, GROUP_SIZE)
    values, scales = quantize(blocks, (-3, -1))
    return values.reshape(rows.shape).reshape(padded.shape)[..., :columns, :], scales


def dequantize_matrices(values: Array, scales: Array, dtype: DTypeLike) -> Array:
    """`values [..., N, K]` times the scale of their block, multiplied in float32, as `dtype`."""
    scales = jnp.repeat(scales, GROUP_SIZE, axis=-2)[..., : values.shape[-2], :]
    groups = values.reshape(*scales.shape, GROUP_SIZE).astype(jnp.float32)
    return (groups * scales[..., None]).astype(dtype).reshape(values.shape)


def quantize(groups: Array, axes: tuple[int, ...]) -> Quantized:
    """FP8 values and one scale for all elements along `axes`, which the scales lack."""
    groups = groups.astype(jnp.float32)
    scales = scales_of(groups, axes, FP8_MAX)
    # One division per group: kernels do the same, for the same bits. The product may round just past 448, which the
    # cast would turn into NaN; NaN inputs stay NaN through the clip.
    values = jnp.clip(groups * (1 / scales), -FP8_MAX, FP8_MAX).astype(FP8)
    # Without a barrier XLA may drop the rounding where both directions meet in one program: it counts as excess
    # precision.
    return lax.optimization_barrier((values, jnp.squeeze(scales, axes)))


def largest_magnitudes(groups: Array, axes: tuple[int, ...]) -> Array:
    """Of float32 numbers along axes, which stay with one element; NaN is the largest of all."""
    # As integers, magnitudes keep their order and NaN is the largest. As floats, XLA's maximum on the CPU loses NaN.
    bits = lax.bitcast_convert_type(groups, jnp.int32) & jnp.int32(0x7FFFFFFF)
    return lax.bitcast_convert_type(jnp.max(bits, axis=axes, keepdims=True), jnp.float32)


def scales_of(groups: Array, axes: tuple[int, ...], limit: float) -> Array:
    """Scales by which float32 numbers along axes, which stay with one element, are at most `limit`."""
    return jnp.maximum(largest_magnitudes(groups, axes) * jnp.float32(1 / limit), jnp.float32(MIN_SCALE))
