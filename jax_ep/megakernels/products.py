"""Products that run between exchanges, not in their launches: by the fastest kernel there is."""

from __future__ import annotations

import jax
from jax.typing import DTypeLike

from jax_ep.megakernels import gemm
from jax_ep.pallas import requirements
from jax_ep.types import Array


def grouped_gemm(lhs: Array, rhs: Array, group_sizes: Array, *, transpose_rhs: bool, out_dtype: DTypeLike) -> Array:
    """See `megakernels.gemm.grouped_gemm`."""
    num_rows, depth = lhs.shape
    groups, columns = rhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    if jax.default_backend() == "gpu" and requirements.is_fastest(num_rows, depth, columns, groups):
        from jax_ep.pallas.gemm import grouped_gemm as run

        return run(lhs, rhs, group_sizes, transpose_rhs=transpose_rhs, out_dtype=out_dtype)
    return gemm.grouped_gemm(lhs, rhs, group_sizes, transpose_rhs=transpose_rhs, out_dtype=out_dtype)
