"""Grouped GEMMs with quantized weights in plain XLA: weights are dequantized per group with rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep.core import fp8
from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_matrices import QuantizedWeights
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.formats import weight_at
from jax_ep.types import Array
from jax_ep.xla import grouped_gemm as loops


@functools.partial(jax.jit, static_argnames=("out_dtype",))  # one compilation for eager callers
def grouped_gemm(
    lhs: Array, rhs: QuantizedWeights, group_sizes: Array, row_scales: Array | None, *, out_dtype: DTypeLike
) -> Array:
    """Compute `out[rows of g] = lhs[rows of g] @ rhs[g]`, with weights dequantized to the dtype of lhs.

    Args:
      lhs: `[M, K]`; int8 or FP8 if rows have scales.
      rhs: `[G, K, N]`.
      group_sizes: `[G]` int32.
      row_scales: float32 `[M]` for int8, `[M, K / 128]` for FP8, which compute in float32; or None.
      out_dtype: dtype of the result; accumulates in float32 (float64 for float64).

    Returns:
      `[M, N]`, zero past the groups.
    """
    groups = loops.locate_groups(group_sizes, lhs.shape[0])
    return _multiply(lhs, rhs, groups, row_scales, out_dtype)


@functools.partial(jax.jit, static_argnames=("out_dtype", "expected_rows"))
def masked_grouped_gemm(
    lhs: Array,
    rhs: QuantizedWeights,
    group_sizes: Array,
    row_scales: Array | None,
    *,
    out_dtype: DTypeLike,
    expected_rows: int | None,
) -> Array:
    """Compute `out[g, i] = lhs[g, i] @ rhs[g]` for rows below the sizes.

    Args:
      lhs: `[G, M, K]`.
      rhs: `[G, K, N]`.
      group_sizes: `[G]` int32.
      row_scales: `[G, M]` or `[G, M, K / 128]`, or None; see `grouped_gemm`.
      out_dtype: dtype of the result.
      expected_rows: unused.

    Returns:
      `[G, M, N]`, zero past the sizes.
    """
    num_groups, num_rows, depth = lhs.shape
    starts = jnp.arange(num_groups, dtype=jnp.int32) * num_rows
    groups = loops.order_groups(starts, starts + jnp.clip(group_sizes, 0, num_rows))
    rows, scales = lhs.reshape(num_groups * num_rows, depth), row_scales
    if scales is not None:
        scales = scales.reshape(num_groups * num_rows, *scales.shape[2:])
    product = _multiply(rows, rhs, groups, scales, out_dtype)
    return product.reshape(num_groups, num_rows, rhs.shape[2])


def _multiply(
    rows: Array, rhs: QuantizedWeights, groups: loops.Groups, row_scales: Array | None, out_dtype: DTypeLike
) -> Array:
    out = jnp.zeros((rows.shape[0], rhs.shape[2]), out_dtype)
    rows, rhs, groups, row_scales, out = vary_alike((rows, rhs, groups, row_scales, out))
    if 0 in (*rows.shape, *rhs.shape):
        return out
    matrix_of = functools.partial(weight_at, rhs, dtype=rows.dtype if row_scales is None else jnp.float32)

    def rows_of(tile: loops.Tile) -> Array:
        if row_scales is None:
            return tile.rows(rows)
        if rows.dtype == FP8:
            return fp8.dequantize_rows(tile.rows(rows), tile.rows(row_scales), jnp.float32)
        return tile.rows(rows).astype(jnp.float32) * tile.rows(row_scales)[:, None]

    return loops.multiply_groups(groups, rows_of, matrix_of, out, transpose_rhs=True)
