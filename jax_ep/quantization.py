"""FP8 with one float32 scale per group of columns: the wire format of tokens.

Values are float8_e4m3fn (largest finite 448), scaled so that the largest magnitude of each group maps to 448, as in
DeepSeek-V3 (arXiv:2412.19437, section 3.3).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_ep import validation as check
from jax_ep.dtypes import FP8
from jax_ep.no_gradient import without_gradient
from jax_ep.types import Array, Quantized

GROUP_SIZE = 128
_FP8_MAX = 448.0
# A group of zeros, or of values that float32 cannot divide by, gets this scale instead of zero.
_MIN_SCALE = 2.0**-120


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
    x = check.floating("quantize_fp8", "x", x)
    check.fp8_columns("quantize_fp8", x.shape[-1], group_size)
    x = without_gradient(
        "quantize_fp8 has no gradient: dispatch and combine with wire_dtype=float8_e4m3fn have one.", x
    )
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size).astype(jnp.float32)
    largest = jnp.max(jnp.abs(groups), axis=-1)
    scales = jnp.maximum(largest * jnp.float32(1 / _FP8_MAX), jnp.float32(_MIN_SCALE))
    # One division per group: kernels do the same, for the same bits. The product may round just past 448, which the
    # cast would turn into NaN; NaN inputs stay NaN through the clip.
    values = jnp.clip(groups * (1 / scales)[..., None], -_FP8_MAX, _FP8_MAX).astype(FP8)
    # Without a barrier XLA may drop the rounding where both directions meet in one program: it counts as excess
    # precision.
    return lax.optimization_barrier((values.reshape(x.shape), scales))


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
    values, scales = check.quantized("dequantize_fp8", values, scales, jnp.ndim(values))
    groups = values.reshape(*scales.shape, values.shape[-1] // scales.shape[-1]).astype(jnp.float32)
    return (groups * scales[..., None]).astype(dtype).reshape(values.shape)
