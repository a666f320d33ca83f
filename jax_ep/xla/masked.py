"""Masked grouped GEMM and activation of the serving path, in plain XLA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_ep.core import fp8
from jax_ep.core.activations import activate
from jax_ep.core.dtypes import accumulation_dtype
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.types import Array, Experts
from jax_ep.xla import grouped_gemm


@functools.partial(jax.jit, static_argnames=("out_dtype", "expected_rows"))  # one compilation for eager callers
def masked_grouped_gemm(
    lhs: Array, rhs: Array, group_sizes: Array, *scales: Array | None, out_dtype: DTypeLike, expected_rows: int | None
) -> Array:
    """Compute `out[g, i] = lhs[g, i] @ rhs[g].T` for rows below the sizes: a loop over groups, with tiles of rows.

    FP8 operands are dequantized to float32.

    Args:
      lhs: `[G, M, K]`.
      rhs: `[G, N, K]`.
      group_sizes: `[G]` int32.
      *scales: scales of lhs, `[G, M, K / 128]`, and of rhs, `[G, ceil(N / 128), K / 128]`; None if not FP8.
      out_dtype: dtype of the result; accumulates in float32 (float64 for float64).
      expected_rows: unused.

    Returns:
      `[G, M, N]`, zero past the sizes.
    """
    (num_groups, num_rows, depth), columns = lhs.shape, rhs.shape[1]
    flat = num_groups * num_rows
    lhs_scales, rhs_scales = scales
    operands = (lhs, rhs, group_sizes, lhs_scales, rhs_scales, jnp.zeros((flat, columns), out_dtype))
    lhs, rhs, group_sizes, lhs_scales, rhs_scales, out = vary_alike(operands)
    if 0 in (flat, columns, depth):
        return out.reshape(num_groups, num_rows, columns)
    starts = jnp.arange(num_groups, dtype=jnp.int32) * num_rows
    groups = grouped_gemm.order_groups(starts, starts + jnp.clip(group_sizes, 0, num_rows))
    rows = lhs.reshape(flat, depth)
    row_scales = None if lhs_scales is None else lhs_scales.reshape(flat, -1)

    def matrix_of(group: Array) -> Array:
        matrix = lax.dynamic_index_in_dim(rhs, group, keepdims=False)
        if rhs_scales is None:
            return matrix
        scales = lax.dynamic_index_in_dim(rhs_scales, group, keepdims=False)
        return fp8.dequantize_matrices(matrix, scales, jnp.float32)

    def rows_of(tile: grouped_gemm.Tile) -> Array:
        if row_scales is None:
            return tile.rows(rows)
        return fp8.dequantize_rows(tile.rows(rows), tile.rows(row_scales), jnp.float32)

    product = grouped_gemm.multiply_groups(groups, rows_of, matrix_of, out, transpose_rhs=True)
    return product.reshape(num_groups, num_rows, columns)


@functools.partial(jax.jit, static_argnums=0, static_argnames="quantize")
def masked_gated_activation(
    experts: Experts, hidden: Array, group_sizes: Array, bias: Array | None, *, quantize: bool
) -> tuple[Array, Array | None]:
    """Activate all rows, valid or not; skipping rows would cost XLA more.

    Args:
      experts: the activation.
      hidden: `[G, M, 2 * I]`, or `[G, M, I]` without gates.
      group_sizes: `[G]` int32.
      bias: one value per column of `hidden` and group, or None.
      quantize: round to FP8, with one scale per 128 columns.

    Returns:
      `[G, M, I]` in FP8 or the dtype of hidden, and scales `[G, M, I / 128]` or None.
    """
    wide = hidden.astype(accumulation_dtype(hidden.dtype))
    if bias is not None:
        wide = wide + bias.astype(wide.dtype)[:, None, :]
    rows = activate(experts, wide)
    return fp8.quantize_rows(rows) if quantize else (rows.astype(hidden.dtype), None)
