"""Biases of grouped GEMMs, in plain JAX."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from jax_ep.core.dtypes import accumulation_dtype
from jax_ep.core.layout import gather_rows, row_groups
from jax_ep.types import Array


class Bias(NamedTuple):
    """A bias per group, optionally scaled per row, that is added to the rows of a grouped GEMM.

    Attributes:
      values: `[G, N]`.
      scales: `[R]` factor of each row, or None.
    """

    values: Array
    scales: Array | None = None


def add_bias(rows: Array, bias: Bias, group_sizes: Array) -> Array:
    """Add the bias to rows `[R, N]` with one more rounding; rows past the groups stay unchanged."""
    wide = rows.astype(accumulation_dtype(rows.dtype))
    return (wide + bias_rows(bias, group_sizes, rows.shape[0], wide.dtype)).astype(rows.dtype)


def add_bias_of_blocks(blocks: Array, values: Array) -> Array:
    """Add bias `[G, N]` to blocks of rows `[G, M, N]`, with one more rounding."""
    wide = accumulation_dtype(blocks.dtype)
    return (blocks.astype(wide) + values.astype(wide)[:, None, :]).astype(blocks.dtype)


def bias_rows(bias: Bias, group_sizes: Array, num_rows: int, dtype: jnp.dtype) -> Array:
    """Expand the bias to `[R, N]`, with zeros past the groups."""
    groups = row_groups(group_sizes, num_rows)
    rows = gather_rows(bias.values.astype(dtype), groups)
    if bias.scales is None:
        return rows
    # The scale of a row past the groups is undefined.
    return rows * jnp.where(groups < 0, 0, bias.scales.astype(dtype))[:, None]
