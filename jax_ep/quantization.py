"""FP8 with one float32 scale per group of columns, or per block of a matrix: quantising and back."""

from __future__ import annotations

from functools import partial

from jax.typing import DTypeLike

from jax_ep.core import check, fp8
from jax_ep.core.check_fp8 import matrices as check_matrices
from jax_ep.core.check_fp8 import quantized_matrices, whole_blocks_per_device
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.named_scopes import operation
from jax_ep.core.no_gradient import call_without_gradient
from jax_ep.types import Array, Quantized


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
    return call_without_gradient(remedy, partial(fp8.quantize_rows, group_size=group_size), x)


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
    return fp8.dequantize_rows(values, scales, dtype)


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
    return call_without_gradient(remedy, fp8.quantize_matrices, w)


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
      ValueError, TypeError: as `dequantize_fp8` does.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep.quantization import dequantize_fp8_weights, quantize_fp8_weights
      >>> float(dequantize_fp8_weights(*quantize_fp8_weights(jnp.ones((128, 2))), jnp.float32)[0, 0])
      1.0
    """
    values, scales = quantized_matrices("dequantize_fp8_weights", values, scales)
    dtype = check.dtype("dequantize_fp8_weights", "dtype", dtype, "one of the result, as jnp.bfloat16")
    return fp8.dequantize_matrices(values, scales, dtype)
