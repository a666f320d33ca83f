"""Inputs of the grouped GEMM benchmarks, and checks of their results."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax


def group_sizes(distribution: str, rows: int, groups: int) -> Array:
    """Return `[groups]` int32 sizes with sum `rows`; Zipf has exponent 1 and groups in random order."""
    rng = np.random.default_rng(groups)
    share = np.full(groups, 1 / groups) if distribution == "multinomial" else 1 / (1 + rng.permutation(groups))
    if distribution == "equal":
        sizes = np.full(groups, rows // groups) + (np.arange(groups) < rows % groups)
    else:
        sizes = rng.multinomial(rows, share / share.sum())
    return jnp.asarray(sizes, jnp.int32)


def make_operands(rows: int, k: int, n: int, groups: int, dtype: Any, distribution: str) -> tuple[Array, Array, Array]:
    """Make `lhs [rows, k]`, `rhs [groups, k, n]` and sizes, with random numbers, because zeros draw less power."""
    keys = jax.random.split(jax.random.key(0), 2)
    lhs = jax.random.normal(keys[0], (rows, k), dtype)
    rhs = jax.jit(lambda key: jax.random.normal(key, (groups, k, n), dtype) / np.sqrt(k).astype(dtype))(keys[1])
    return lhs, rhs, group_sizes(distribution, rows, groups)


class Sample(NamedTuple):
    """Some rows of the expected result, float32."""

    rows: Array
    expected: Array


@jax.jit
def make_sample(lhs: Array, rhs: Array, sizes: Array) -> Sample:
    """Compute 16 rows of the expected result, in float32."""
    rows = jnp.linspace(0, lhs.shape[0] - 1, 16).astype(jnp.int32)
    groups = jnp.searchsorted(jnp.cumsum(sizes), rows, side="right")

    def product(pair: tuple[Array, Array]) -> Array:
        row, matrix = lhs[pair[0]].astype(jnp.float32), rhs[pair[1]].astype(jnp.float32)
        return jnp.dot(row, matrix, precision=lax.Precision.HIGHEST)

    return Sample(rows, lax.map(product, (rows, groups)))


def check(name: str, out: Array, sample: Sample) -> float:
    """Return the largest error of the sampled rows, in units of their root mean square; raise if it is too large."""
    expected = np.asarray(sample.expected)
    error = float(np.abs(np.asarray(out[sample.rows], np.float32) - expected).max() / np.sqrt(np.mean(expected**2)))
    limit = 1e-4 if out.dtype.itemsize >= 4 else 0.05
    if not error < limit:
        raise RuntimeError(f"{name} is wrong: error {error:.2g} of the root mean square, limit {limit}.")
    return error
