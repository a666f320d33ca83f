"""Products that run between exchanges, not in their launches: by the fastest kernel there is."""

from __future__ import annotations

import jax
from jax.typing import DTypeLike

from jax_ep.core import layout
from jax_ep.megakernels import gemm
from jax_ep.megakernels.rows import gather_rows
from jax_ep.pallas import requirements
from jax_ep.types import Array


def grouped_gemm(lhs: Array, rhs: Array, group_sizes: Array, *, transpose_rhs: bool, out_dtype: DTypeLike) -> Array:
    """See `megakernels.gemm.grouped_gemm`."""
    num_rows, depth = lhs.shape
    groups, columns = rhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    if is_from_pallas(num_rows, depth, columns, groups):
        from jax_ep.pallas.gemm import grouped_gemm as run

        return run(lhs, rhs, group_sizes, transpose_rhs=transpose_rhs, out_dtype=out_dtype)
    return gemm.grouped_gemm(lhs, rhs, group_sizes, transpose_rhs=transpose_rhs, out_dtype=out_dtype)


def grouped_gemm_weights(lhs: Array, rhs: Array, group_sizes: Array, *, out_dtype: DTypeLike) -> Array:
    """See `megakernels.gemm.grouped_gemm_weights`."""
    num_rows, depth = lhs.shape
    if is_from_pallas(num_rows, depth, rhs.shape[1], group_sizes.shape[0]):
        from jax_ep.pallas.gemm import grouped_gemm_weights as run

        return run(lhs, rhs, group_sizes, out_dtype=out_dtype)
    return gemm.grouped_gemm_weights(lhs, rhs, group_sizes, out_dtype=out_dtype)


def gathered_gemm_weights(
    tokens: Array,
    index: Array,
    rows: Array,
    group_sizes: Array,
    *,
    transpose: bool,
    out_dtype: DTypeLike,
) -> Array:
    """`out[g] = tokens[index of g's rows].T @ rows[rows of g]`, or its transpose.

    The tokens of the rows in use are copied into expert order first, in one pass: products that read them where they
    lie were slower by more than that (docs/performance.md).

    Args:
      tokens: `[S, H]`, in any order; what no row names may hold anything.
      index: `[M]` int32, the token of each row; -1: zero.
      rows: `[M, N]`.
      group_sizes: `[G]` int32.
      transpose: rows first.
      out_dtype: dtype of the result; sums run in float32 (float64 for float64).

    Returns:
      `[G, H, N]`, or `[G, N, H]` with `transpose`; zero for empty groups.
    """
    if gemm.has_kernel(rows, tokens, group_sizes, out_dtype):
        gathered = gather_rows(gemm.pad(tokens, 1), index, group_sizes)[:, : tokens.shape[1]]
    else:
        gathered = layout.gather_rows(tokens, index)
    lhs, rhs = (rows, gathered) if transpose else (gathered, rows)
    return grouped_gemm_weights(lhs, rhs, group_sizes, out_dtype=out_dtype)


def is_from_pallas(num_rows: int, depth: int, columns: int, groups: int) -> bool:
    """Whether a product of these sizes, and the gradient of its matrices, come from there."""
    return jax.default_backend() == "gpu" and requirements.is_fastest(num_rows, depth, columns, groups)
