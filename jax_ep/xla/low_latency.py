"""Dispatch and combine of decode-sized batches by lax collectives: all tokens go to all ranks.

The result of a dispatch has room for all tokens on each expert, so those of all ranks take little memory next to it.
"""

from __future__ import annotations

from typing import cast

import jax.numpy as jnp
from jax import lax

from jax_ep.core import fp8
from jax_ep.core import layout as rows
from jax_ep.core.dtypes import accumulation_dtype
from jax_ep.core.mesh_axes import all_gather, exchange, rank_on, sum_in_order
from jax_ep.types import Array, Layout, LowLatencyHandle, Options, Tokens


def low_latency_dispatch(
    options: Options, x: Tokens, topk_idx: Array, num_tokens: Array | None, layout: Layout, group_size: int | None
) -> tuple[Array, Array | None, Array, LowLatencyHandle]:
    """Dispatch tokens `[T, H]` with ids `[T, K]` to fixed blocks of rows per expert.

    Args:
      options: settings of the call.
      x: tokens, or a quantized pair; T is at most `num_tokens` of the layout, M.
      topk_idx: expert ids.
      num_tokens: `[]` int32, number of valid tokens; None: all.
      layout: static sizes.
      group_size: columns per FP8 scale, or None to send x unchanged.

    Returns:
      tokens `[L, W * M, H]`, scales `[L, W * M, H // group_size]` or None, rows of each expert `[L]`, and the handle.
    """
    if group_size is not None and not isinstance(x, tuple):
        x = fp8.quantize_rows(x, group_size=group_size)
    if num_tokens is not None:
        index = jnp.arange(topk_idx.shape[0], dtype=jnp.int32)
        topk_idx = jnp.where((index < num_tokens)[:, None], topk_idx, -1)
    handle = _plan(options, _pad_rows(topk_idx, layout.num_tokens, -1), layout)
    tokens, scales = (_dispatch_rows(options, part, handle) for part in fp8.split_rows(x))
    return cast(Array, tokens), scales, jnp.sum(handle.source_count, axis=1, dtype=jnp.int32), handle


def _plan(options: Options, topk_idx: Array, layout: Layout) -> LowLatencyHandle:
    """Build the handle from this rank's ids `[max_tokens_per_rank, K]`; a token has at most one row per expert."""
    num_local, num_ranks, block = layout.num_local_experts, layout.num_ranks, layout.num_ranks * layout.num_tokens
    all_idx = all_gather(topk_idx, options.axis)
    # Every assignment uses the row of its token's first assignment to the same expert.
    same = all_idx[..., :, None] == all_idx[..., None, :]
    first_k = jnp.argmax(same, axis=-1).astype(jnp.int32)
    is_first = first_k == lax.broadcasted_iota(jnp.int32, first_k.shape, 2)
    groups = rows.local_groups(all_idx, rank_on(options.axis) * num_local, num_local)
    order = rows.sort_by_group(jnp.where(is_first.reshape(-1), groups, num_local), num_local)
    used = order.groups < num_local
    row = jnp.where(used, order.groups * block + order.ranks_in_group, layout.capacity)
    row_to_assignment = jnp.full_like(row, -1, shape=(layout.capacity,)).at[row].set(order.slots, mode="drop")
    assignment_to_row = jnp.full_like(row, -1).at[order.slots].set(jnp.where(used, row, -1), unique_indices=True)
    assignment_to_row = jnp.take_along_axis(assignment_to_row.reshape(all_idx.shape), first_k, axis=-1)
    source = jnp.where(used, order.slots // (layout.num_tokens * layout.top_k), 0)
    cell = jnp.where(used, order.groups * num_ranks + source, num_local * num_ranks)
    count = jnp.zeros_like(row, shape=(num_local * num_ranks,)).at[cell].add(1, mode="drop")
    count = count.reshape(num_local, num_ranks)
    start = jnp.cumsum(count, axis=1, dtype=jnp.int32) - count
    source_token = jnp.where(row_to_assignment < 0, -1, row_to_assignment // layout.top_k % layout.num_tokens)
    num_invalid = rows.count_invalid(topk_idx, layout.num_experts)
    return LowLatencyHandle(
        source_token.reshape(num_local, block), start, count, assignment_to_row, num_invalid, layout
    )


def _dispatch_rows(options: Options, x: Array | None, handle: LowLatencyHandle) -> Array | None:
    """Dispatch `[T, ...]` to `[L, W * max_tokens_per_rank, ...]`, bit for bit; unused rows are zero."""
    if x is None:
        return None
    everywhere = all_gather(_pad_rows(x, handle.layout.num_tokens, 0), options.axis)
    return rows.gather_rows(everywhere.reshape(-1, x.shape[1]), _row_tokens(handle))


def _row_tokens(handle: LowLatencyHandle) -> Array:
    """Return `source_rank * M + token` of each row, `[L, W * M]` int32; -1 for none."""
    position = jnp.arange(handle.source_token.shape[1], dtype=jnp.int32)[None, :]
    ends = handle.source_start + handle.source_count
    source = jnp.sum(position[:, :, None] >= ends[:, None, :], axis=-1, dtype=jnp.int32)
    return jnp.where(handle.source_token < 0, -1, source * handle.layout.num_tokens + handle.source_token)


def low_latency_combine(options: Options, y: Array, topk_weights: Array, handle: LowLatencyHandle) -> Array:
    """Combine rows `[L, W * max_tokens_per_rank, H]` with weights `[T, K]` to weighted sums `[T, H]`.

    Each row is rounded to the wire format; the weighted sums of a rank are then sent in float32.
    """
    dtype, layout = accumulation_dtype(y.dtype), handle.layout
    weights = all_gather(_pad_rows(topk_weights.astype(dtype), layout.num_tokens, 0), options.axis)
    # The weight of an assignment without a row here is undefined.
    weights = jnp.where(handle.assignment_to_row < 0, jnp.zeros((), dtype), weights)
    flat, sums = y.reshape(-1, y.shape[-1]), jnp.zeros((), dtype)
    for k in range(layout.top_k):
        row = rows.gather_rows(flat, handle.assignment_to_row[..., k])
        if options.wire_dtype is not None:
            row = fp8.dequantize_rows(*fp8.quantize_rows(row), y.dtype)
        sums = sums + row.astype(dtype) * weights[..., k, None]
    total = sum_in_order(exchange(sums, options.axis))
    return total.astype(options.sum_dtype or y.dtype)[: topk_weights.shape[0]]


def _pad_rows(x: Array, num_rows: int, fill: int) -> Array:
    """Pad the first axis of a matrix to `num_rows`."""
    if x.shape[0] == 0:  # XLA's partitioner fails on programs whose operands are all empty.
        return jnp.full_like(x, fill, shape=(num_rows, x.shape[1]))
    value = jnp.asarray(fill, x.dtype)
    return jnp.pad(x, ((0, num_rows - x.shape[0]), (0, 0)), constant_values=value) if num_rows > x.shape[0] else x
