"""Dispatch and combine of decode-sized batches by lax collectives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_ep.core import fp8
from jax_ep.core import layout as rows
from jax_ep.core.collectives import all_gather, exchange, rank_on, sum_in_order
from jax_ep.core.dtypes import accumulation_dtype
from jax_ep.types import Array, Layout, LowLatencyHandle, Options, QuantizedExperts, Tokens


def fuses(layout: Layout, lhs: jax.ShapeDtypeStruct, rhs: Array | QuantizedExperts, dtype: DTypeLike) -> bool:
    """Whether a product sends its rows itself: no, exchanges and products are separate here."""
    return False


def low_latency_dispatch(
    options: Options, x: Tokens, topk_idx: Array, num_tokens: Array | None, layout: Layout, group_size: int | None
) -> tuple[Array, Array | None, Array, LowLatencyHandle]:
    """`[T, H]` tokens and `[T, K]` ids to packed rows per expert.

    Args:
      options: of the call.
      x: tokens, or a quantised pair; T is at most the `num_tokens` of the layout, M.
      topk_idx: expert ids.
      num_tokens: `[]` int32, how many tokens count; None: all.
      layout: static sizes.
      group_size: columns per FP8 scale, or None to send x as it is.

    Returns:
      tokens `[L, W * M, H]`, scales `[L, W * M, H // group_size]` or None, rows of each expert `[L]`, and the handle.
    """
    if group_size is not None and not isinstance(x, tuple):
        x = fp8.quantize_rows(x, group_size=group_size)
    if num_tokens is not None:
        index = jnp.arange(topk_idx.shape[0], dtype=jnp.int32)
        topk_idx = jnp.where((index < num_tokens)[:, None], topk_idx, -1)
    handle = _plan(options, _pad_rows(topk_idx, layout.num_tokens, -1), layout)
    values, scales = x if isinstance(x, tuple) else (x, None)
    tokens = dispatch_rows(options, values, handle)
    group_sizes = jnp.sum(handle.source_count, axis=1, dtype=jnp.int32)
    return tokens, None if scales is None else dispatch_rows(options, scales, handle), group_sizes, handle


def _plan(options: Options, topk_idx: Array, layout: Layout) -> LowLatencyHandle:
    """`[max_tokens_per_rank, K]` ids of this rank to a handle in which a token has at most one row per expert."""
    num_local, num_ranks, block = layout.num_local_experts, layout.num_ranks, layout.num_ranks * layout.num_tokens
    all_idx = all_gather(topk_idx, options.axis)
    # Every slot uses the row of the first slot of its token that names the same expert.
    same = all_idx[..., :, None] == all_idx[..., None, :]
    first_k = jnp.argmax(same, axis=-1).astype(jnp.int32)
    is_first = first_k == lax.broadcasted_iota(jnp.int32, first_k.shape, 2)
    groups = rows.local_groups(all_idx, rank_on(options.axis) * num_local, num_local)
    order = rows.sort_by_group(jnp.where(is_first.reshape(-1), groups, num_local), num_local)
    used = order.groups < num_local
    row = jnp.where(used, order.groups * block + order.ranks_in_group, layout.capacity)
    row_slot = jnp.full_like(row, -1, shape=(layout.capacity,)).at[row].set(order.slots, mode="drop")
    slot_row = jnp.full_like(row, -1).at[order.slots].set(jnp.where(used, row, -1), unique_indices=True)
    slot_row = jnp.take_along_axis(slot_row.reshape(all_idx.shape), first_k, axis=-1)
    source = jnp.where(used, order.slots // (layout.num_tokens * layout.top_k), 0)
    cell = jnp.where(used, order.groups * num_ranks + source, num_local * num_ranks)
    count = jnp.zeros_like(row, shape=(num_local * num_ranks,)).at[cell].add(1, mode="drop")
    count = count.reshape(num_local, num_ranks)
    start = jnp.cumsum(count, axis=1, dtype=jnp.int32) - count
    source_token = jnp.where(row_slot < 0, -1, row_slot // layout.top_k % layout.num_tokens)
    num_invalid = rows.count_invalid(topk_idx, layout.num_experts)
    return LowLatencyHandle(source_token.reshape(num_local, block), start, count, slot_row, num_invalid, layout)


def dispatch_rows(options: Options, x: Array, handle: LowLatencyHandle) -> Array:
    """`[T, ...]` per token to `[L, W * max_tokens_per_rank, ...]`, bit for bit; zero elsewhere."""
    layout = handle.layout
    position = jnp.arange(handle.source_token.shape[1], dtype=jnp.int32)[None, :]
    ends = handle.source_start + handle.source_count
    source = jnp.sum(position[:, :, None] >= ends[:, None, :], axis=-1, dtype=jnp.int32)
    index = jnp.where(handle.source_token < 0, -1, source * layout.num_tokens + handle.source_token)
    x = _pad_rows(x, layout.num_tokens, 0)
    return rows.gather_rows(all_gather(x, options.axis).reshape(-1, *x.shape[1:]), index)


def low_latency_combine(options: Options, y: Array, topk_weights: Array, handle: LowLatencyHandle) -> Array:
    """`[L, W * max_tokens_per_rank, H]` rows and `[T, K]` weights to `[T, H]` weighted sums per token.

    Rounding to the wire format applies to each row; the weighted sums of a rank then travel in float32.
    """
    dtype = accumulation_dtype(y.dtype)
    flat = y.reshape(-1, y.shape[-1])
    if options.wire_dtype is not None:
        flat = fp8.dequantize_rows(*fp8.quantize_rows(flat), y.dtype)
    weights = all_gather(_pad_rows(topk_weights.astype(dtype), handle.layout.num_tokens, 0), options.axis)
    partial = jnp.zeros((), dtype)
    for k in range(handle.layout.top_k):
        row = rows.gather_rows(flat, handle.slot_row[:, :, k]).astype(dtype)
        # The weight of a slot without a row here may be anything.
        weight = jnp.where(handle.slot_row[:, :, k] < 0, jnp.zeros((), dtype), weights[:, :, k])
        partial = partial + row * weight[:, :, None]
    return sum_in_order(exchange(partial, options.axis)).astype(options.sum_dtype or y.dtype)[: topk_weights.shape[0]]


def _pad_rows(x: Array, num_rows: int, fill: int) -> Array:
    """Extends the first axis of a matrix to `num_rows`."""
    if x.shape[0] == 0:  # XLA's partitioner fails at programs all of whose operands are empty
        return jnp.full_like(x, fill, shape=(num_rows, x.shape[1]))
    value = jnp.asarray(fill, x.dtype)
    return jnp.pad(x, ((0, num_rows - x.shape[0]), (0, 0)), constant_values=value) if num_rows > x.shape[0] else x
