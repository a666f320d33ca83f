"""Sorting of the assignments of one device by expert, in plain XLA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_ep.core.layout import SortSizes, block_owners, dropless_capacity, gather_rows, local_groups, map_rows
from jax_ep.types import Array, SortedTokens


@functools.partial(jax.jit, static_argnames="sizes")
def moe_sort(topk_idx: Array, topk_weights: Array | None, num_tokens: Array | None, sizes: SortSizes) -> SortedTokens:
    """Sort the ids `[T, K]` of one device into block-aligned expert-major rows.

    Args:
      topk_idx: `[T, K]` int32.
      topk_weights: `[T, K]` float32, or None.
      num_tokens: `[]` int32, tokens from this index on have no row; None: all tokens have rows.
      sizes: of the sort.
    """
    first_expert, num_local_experts, block_size = sizes
    if num_tokens is not None:
        counts = jnp.arange(topk_idx.shape[0], dtype=jnp.int32)[:, None] < num_tokens
        topk_idx = jnp.where(counts, topk_idx, -1)
    capacity = dropless_capacity(topk_idx.size, num_local_experts, block_size)
    groups = local_groups(topk_idx, first_expert, num_local_experts)
    rows = map_rows(groups, num_local_experts, capacity, block_size)
    block_expert = block_owners(rows.group_sizes, capacity // block_size, block_size)
    weights = None if topk_weights is None else gather_rows(topk_weights.reshape(-1), rows.row_to_assignment)
    used = jnp.sum(rows.group_sizes, dtype=jnp.int32)
    return SortedTokens(rows.row_to_assignment, weights, block_expert, rows.group_sizes, used)
