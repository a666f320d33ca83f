"""Biases of products whose rows are grouped by expert, in plain JAX."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from jax_ep.core.dtypes import accumulation_dtype
from jax_ep.core.layout import gather_rows, row_groups
from jax_ep.types import Array


class Bias(NamedTuple):
    """What is added to the rows of a product: to each the bias of its group, times the row's own scale if it has one.

    Attributes:
      values: `[G, N]`.
      scales: `[R]`, or None.
    """

    values: Array
    scales: Array | None = None


def add_bias(rows: Array, bias: Bias, group_sizes: Array) -> Array:
    """Rows of a product `[R, N]` with their bias, rounded once more; those past the groups as they are."""
    wide = rows.astype(accumulation_dtype(rows.dtype))
    return (wide + bias_rows(bias, group_sizes, rows.shape[0], wide.dtype)).astype(rows.dtype)


def add_bias_of_blocks(blocks: Array, values: Array) -> Array:
    """Blocks of rows `[G, M, N]`, each with its bias of `[G, N]`, rounded once more."""
    wide = accumulation_dtype(blocks.dtype)
    return (blocks.astype(wide) + values.astype(wide)[:, None, :]).astype(blocks.dtype)


def bias_rows(bias: Bias, group_sizes: Array, num_rows: int, dtype: jnp.dtype) -> Array:
    """`[R, N]` that are added; zeros past the groups."""
    groups = row_groups(group_sizes, num_rows)
    rows = gather_rows(bias.values.astype(dtype), groups)
    if bias.scales is None:
        return rows
    # The scale of a row past the groups may be anything.
    return rows * jnp.where(groups < 0, 0, bias.scales.astype(dtype))[:, None]
