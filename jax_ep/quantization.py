"""FP8 with one float32 scale per group of columns: the wire format of tokens.

Values are float8_e4m3fn (largest finite 448), scaled so that the largest magnitude of each group maps to 448, as in
DeepSeek-V3 (arXiv:2412.19437, section 3.3).
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_ep import validation as check
from jax_ep.dtypes import FP8
from jax_ep.masked_validation import matrices as check_matrices
from jax_ep.masked_validation import quantized_matrices, whole_blocks_per_device
from jax_ep.named_scopes import operation
from jax_ep.no_gradient import call_without_gradient
from jax_ep.types import Array, Quantized

GROUP_SIZE = 128
_FP8_MAX = 448.0
# A group of zeros, or of values that float32 cannot divide by, gets this scale instead of zero.
_MIN_SCALE = 2.0**-120


@operation
def quantize_fp8(x: Array, *, group_size: int = GROUP_SIZE) -> Quantized:
    """Quantises rows to FP8, one scale per row and `group_size` columns.

    Args:
      x: `[..., H]` bfloat16, float16, float32 or float64, `H % group_size == 0`.
      group_size: columns that share a scale.

    Returns:
      `(values [..., H] float8_e4m3fn, scales [..., H // group_size] float32)` with `values * scale` within
      `max(|x| * 2**-4, scale * 2**-10)` of `x`, up to float32 rounding. An infinity or NaN spoils its whole group.

    Raises:
      ValueError: H is not a multiple of `group_size`.
      TypeError: x is not floating; also by the gradient, which would not be that of quantisation.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep.quantization import quantize_fp8
      >>> values, scales = quantize_fp8(jnp.ones((2, 256)))
      >>> values.dtype.name, scales.shape
      ('float8_e4m3fn', (2, 2))
    """
    x = check.floating("quantize_fp8", "x", check.rows("quantize_fp8", "x", x, "[..., H]"))
    check.fp8_columns("quantize_fp8", x.shape[-1], group_size)
    remedy = "quantize_fp8 has no gradient: dispatch and combine with wire_dtype=float8_e4m3fn have one."
    return call_without_gradient(remedy, partial(_quantize_rows, group_size), x)


def _quantize_rows(group_size: int, x: Array) -> Quantized:
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)
    values, scales = _quantize(groups, (-1,))
    return values.reshape(x.shape), scales


def _quantize(groups: Array, axes: tuple[int, ...]) -> Quantized:
    """FP8 values and one scale for all elements along `axes`, which the scales lack."""
    groups = groups.astype(jnp.float32)
    # As integers, magnitudes keep their order and NaN is the largest. As floats, XLA's maximum on the CPU loses NaN.
    bits = lax.bitcast_convert_type(groups, jnp.int32) & jnp.int32(0x7FFFFFFF)
    largest = lax.bitcast_convert_type(jnp.max(bits, axis=axes, keepdims=True), jnp.float32)
    scales = jnp.maximum(largest * jnp.float32(1 / _FP8_MAX), jnp.float32(_MIN_SCALE))
    # One division per group: kernels do the same, for the same bits. The product may round just past 448, which the
    # cast would turn into NaN; NaN inputs stay NaN through the clip.
    values = jnp.clip(groups * (1 / scales), -_FP8_MAX, _FP8_MAX).astype(FP8)
    # Without a barrier XLA may drop the rounding where both directions meet in one program: it counts as excess
    # precision.
    return lax.optimization_barrier((values, jnp.squeeze(scales, axes)))


@operation
def dequantize_fp8(values: Array, scales: Array, dtype: DTypeLike) -> Array:
    """`values * scales` in `dtype`; the group size is `H // scales.shape[-1]`.

    Args:
      values: `[..., H]` float8_e4m3fn.
      scales: `[..., H // group_size]` float32.
      dtype: dtype of the result.

    Returns:
      `[..., H]` array of `dtype`, multiplied in float32.

    Raises:
      ValueError: shapes that do not fit together.
      TypeError: other dtypes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep.quantization import dequantize_fp8, quantize_fp8
      >>> float(dequantize_fp8(*quantize_fp8(jnp.ones((2, 128))), jnp.float32)[0, 0])
      1.0
    """
    values = check.rows("dequantize_fp8", "values", values, "[..., H]")
    values, scales = check.quantized("dequantize_fp8", values, scales, values.ndim)
    dtype = check.dtype("dequantize_fp8", "dtype", dtype, "one of the result, as jnp.bfloat16")
    groups = values.reshape(*scales.shape, values.shape[-1] // scales.shape[-1]).astype(jnp.float32)
    return (groups * scales[..., None]).astype(dtype).reshape(values.shape)


@operation
def quantize_fp8_weights(w: Array) -> Quantized:
    """Quantises expert matrices to FP8 for `masked_grouped_gemm`: transposed, one scale per block of 128 by 128.

    Args:
      w: `[..., K, N]` bfloat16, float16, float32 or float64, as `moe` takes them; `K % 128 == 0`.

    Returns:
      `(values [..., N, K] float8_e4m3fn, scales [..., ceil(N / 128), K / 128] float32)`, with the error of
      `quantize_fp8`. An infinity or NaN spoils its whole block.

    Raises:
      ValueError: K is not a multiple of 128; on explicit mesh axes, devices hold no whole blocks.
      TypeError: w is not floating; also by the gradient, which would not be that of quantisation.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep.quantization import quantize_fp8_weights
      >>> values, scales = quantize_fp8_weights(jnp.ones((4, 256, 384)))
      >>> values.shape, scales.shape
      ((4, 384, 256), (4, 3, 2))

    Source: blocks as in DeepSeek-V3 (arXiv:2412.19437, section 3.3).
    """
    function = "quantize_fp8_weights"
    w = check_matrices(function, "w", w)
    whole_blocks_per_device(function, "w", w)
    remedy = "quantize_fp8_weights has no gradient: train with the weights as they are."
    return call_without_gradient(remedy, _quantize_blocks, w)


def _quantize_blocks(w: Array) -> Quantized:
    depth, columns = w.shape[-2:]
    column_blocks = -(-columns // GROUP_SIZE)
    missing = column_blocks * GROUP_SIZE - columns
    padded = jnp.pad(jnp.swapaxes(w, -1, -2), [(0, 0)] * (w.ndim - 2) + [(0, missing), (0, 0)])
    # One axis per reshape: on explicit mesh axes JAX infers the sharding of no other.
    rows = padded.reshape(*w.shape[:-2], column_blocks, GROUP_SIZE, depth)
    blocks = rows.reshape(*rows.shape[:-1], depth // GROUP_SIZE, GROUP_SIZE)
    values, scales = _quantize(blocks, (-3, -1))
    return values.reshape(rows.shape).reshape(padded.shape)[..., :columns, :], scales


@operation
def dequantize_fp8_weights(values: Array, scales: Array, dtype: DTypeLike) -> Array:
    """`values * scales` in `dtype`, each scale for a block of 128 by 128.

    Args:
      values: `[..., N, K]` float8_e4m3fn.
      scales: `[..., ceil(N / 128), K / 128]` float32.
      dtype: dtype of the result.

    Returns:
      `[..., N, K]` array of `dtype`, multiplied in float32.

    Raises:
      ValueError: shapes that do not fit together.
      TypeError: other dtypes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep.quantization import dequantize_fp8_weights, quantize_fp8_weights
      >>> float(dequantize_fp8_weights(*quantize_fp8_weights(jnp.ones((128, 2))), jnp.float32)[0, 0])
      1.0
    """
    values, scales = quantized_matrices("dequantize_fp8_weights", values, scales)
    dtype = check.dtype("dequantize_fp8_weights", "dtype", dtype, "one of the result, as jnp.bfloat16")
    columns = values.shape[-2]
    scales = jnp.repeat(scales, GROUP_SIZE, axis=-2)[..., :columns, :]
    groups = values.reshape(*scales.shape, GROUP_SIZE).astype(jnp.float32)
    return (groups * scales[..., None]).astype(dtype).reshape(values.shape)
