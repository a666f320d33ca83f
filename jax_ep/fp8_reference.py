"""Products in FP8 on consecutive groups of rows in plain XLA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_ep import activations, tiled_gemm
from jax_ep.mesh_axes import vary_alike
from jax_ep.quantization import dequantize_fp8, dequantize_fp8_weights, quantize_fp8, quantize_fp8_weights
from jax_ep.types import Array, Quantized


@functools.partial(jax.jit, static_argnames=("out_dtype",))  # one compilation for eager callers
def grouped_gemm_fp8(
    lhs: Array, rhs: Array, group_sizes: Array, lhs_scales: Array, rhs_scales: Array, *, out_dtype: DTypeLike
) -> Array:
    """`out[rows of g] = lhs[rows of g] @ rhs[g].T` of the float32 values for which the operands stand.

    Each element has the error of one float32 product of length K: about `K * 2**-24` of the sum of magnitudes.

    Args:
      lhs: `[M, K]` float8_e4m3fn.
      rhs: `[G, N, K]` float8_e4m3fn.
      group_sizes: `[G]` int32.
      lhs_scales: `[M, K / 128]`.
      rhs_scales: `[G, ceil(N / 128), K / 128]`.
      out_dtype: dtype of the result.

    Returns:
      `[M, N]`, zero past the groups.
    """
    num_rows, columns = lhs.shape[0], rhs.shape[1]
    operands = (lhs, rhs, group_sizes, lhs_scales, rhs_scales, jnp.zeros((num_rows, columns), out_dtype))
    lhs, rhs, group_sizes, lhs_scales, rhs_scales, out = vary_alike(operands)
    if 0 in (*lhs.shape, *rhs.shape):
        return out

    def matrix_of(group: Array) -> Array:
        matrix, scales = (lax.dynamic_index_in_dim(x, group, keepdims=False) for x in (rhs, rhs_scales))
        return dequantize_fp8_weights(matrix, scales, jnp.float32)

    def rows_of(tile: tiled_gemm.Tile) -> Array:
        return dequantize_fp8(tile.rows(lhs), tile.rows(lhs_scales), jnp.float32)

    groups = tiled_gemm.locate_groups(group_sizes, num_rows)
    return tiled_gemm.multiply_groups(groups, rows_of, matrix_of, out, transpose_rhs=True)


def quantize_rows(x: Array, group_sizes: Array) -> Quantized:
    """`[R, H]` rows, in use or not, to FP8 values and their scales `[R, H / 128]`."""
    return quantize_fp8(x)


def dequantize_rows(values: Array, scales: Array, group_sizes: Array, *, dtype: DTypeLike) -> Array:
    """The inverse of `quantize_rows`, rounded to `dtype`."""
    return dequantize_fp8(values, scales, dtype)


def quantize_matrices(w: Array) -> Quantized:
    """`[G, K, N]` to FP8 `[G, N, K]` and scales `[G, ceil(N / 128), K / 128]`."""
    return quantize_fp8_weights(w)


def activate_quantized(
    hidden: Array, weights: Array, group_sizes: Array, *, activation: str, gated: bool, keep: bool
) -> tuple[Array, Array, Array | None]:
    """Activated and weighted rows, rounded once: in FP8, and with `keep` also in the dtype of `hidden`.

    Args:
      hidden: `[R, 2 * I]`, or `[R, I]` where not gated.
      weights: `[R]`.
      group_sizes: `[L]` int32.
      activation: its name.
      gated: whether the last I columns are factors of the activated first.
      keep: return the rows too.

    Returns:
      values `[R, I]`, scales `[R, I / 128]`, and rows `[R, I]` or None.
    """
    rows = activations.weighted_wide(hidden, weights, activation, gated)
    return *quantize_fp8(rows), rows.astype(hidden.dtype) if keep else None
