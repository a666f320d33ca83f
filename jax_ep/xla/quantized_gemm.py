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
from jax_ep.types import Array, Tokens
from jax_ep.xla import grouped_gemm as loops


@functools.partial(jax.jit, static_argnames=("out_dtype",))  # one compilation for eager callers
def grouped_gemm(rows: Tokens, rhs: QuantizedWeights, group_sizes: Array, *, out_dtype: DTypeLike) -> Array:
    """Compute `out[rows of g] = rows[rows of g] @ rhs[g]`, with weights dequantized to the dtype of the rows.

    Args:
      rows: `[M, K]`; int8 with float32 scales `[M]` and FP8 with scales `[M, K / 128]` compute in float32.
      rhs: `[G, K, N]`.
      group_sizes: `[G]` int32.
      out_dtype: dtype of the result; accumulates in float32 (float64 for float64).

    Returns:
      `[M, N]`, zero past the groups.
    """
    groups = loops.locate_groups(group_sizes, fp8.split_rows(rows)[0].shape[0])
    return _multiply(rows, rhs, groups, out_dtype)


@functools.partial(jax.jit, static_argnames=("out_dtype", "expected_rows"))
def masked_grouped_gemm(
    rows: Tokens, rhs: QuantizedWeights, group_sizes: Array, *, out_dtype: DTypeLike, expected_rows: int | None
) -> Array:
    """Compute `out[g, i] = rows[g, i] @ rhs[g]` for rows below the sizes.

    Args:
      rows: `[G, M, K]`, or with scales `[G, M]` or `[G, M, K / 128]`; see `grouped_gemm`.
      rhs: `[G, K, N]`.
      group_sizes: `[G]` int32.
      out_dtype: dtype of the result.
      expected_rows: unused.

    Returns:
      `[G, M, N]`, zero past the sizes.
    """
    num_groups, num_rows, _ = fp8.split_rows(rows)[0].shape
    starts = jnp.arange(num_groups, dtype=jnp.int32) * num_rows
    groups = loops.order_groups(starts, starts + jnp.clip(group_sizes, 0, num_rows))
    flat = jax.tree.map(lambda x: x.reshape(num_groups * num_rows, *x.shape[2:]), rows)
    product = _multiply(flat, rhs, groups, out_dtype)
    return product.reshape(num_groups, num_rows, rhs.shape[2])


def _multiply(tokens: Tokens, rhs: QuantizedWeights, groups: loops.Groups, out_dtype: DTypeLike) -> Array:
    rows, row_scales = fp8.split_rows(tokens)
    out = jnp.zeros((rows.shape[0], rhs.shape[2]), out_dtype)
    rows, rhs, groups, row_scales, out = vary_alike((rows, rhs, groups, row_scales, out))
    if 0 in (*rows.shape, *rhs.shape):
        return out
    matrix_of = functools.partial(weight_at, rhs, dtype=rows.dtype if row_scales is None else jnp.float32)

    def read(tokens: tuple[Array, Array | None]) -> Array:
        rows, row_scales = tokens
        if row_scales is None:
            return rows
        if rows.dtype == FP8:
            return fp8.dequantize_rows(rows, row_scales, jnp.float32)
        return rows.astype(jnp.float32) * row_scales[:, None]

    return loops.multiply_groups(groups, (rows, row_scales), read, matrix_of, out, transpose=True)
