"""Dispatch and combine of decode-sized batches by lax collectives, with the algorithms of exchange.py.

Fixed blocks of rows have room for any routing, so arriving tokens are written to their rows without a staging buffer.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_ep.core import fp8
from jax_ep.core import layout as rows
from jax_ep.core.dtypes import accumulation_dtype
from jax_ep.core.mesh_axes import all_gather, exchange, rank_on, sum_in_order
from jax_ep.types import Array, Layout, LowLatencyHandle, Options, Tokens
from jax_ep.xla import exchange as portable
from jax_ep.xla import rounds, segments


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
    tokens, scales = dispatch_rows(options, fp8.split_rows(x), handle)
    return tokens, scales, jnp.sum(handle.source_count, axis=1, dtype=jnp.int32), handle


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


def dispatch_rows[Tree](options: Options, x: Tree, handle: LowLatencyHandle) -> Tree:
    """Dispatch `[T, ...]` to `[L, W * max_tokens_per_rank, ...]`, bit for bit; unused rows are zero."""
    layout, axis = handle.layout, options.axis

    def to_all(handle: LowLatencyHandle) -> Tree:
        index = _row_tokens(handle).reshape(-1)
        everywhere = jax.tree.map(lambda part: all_gather(_pad_rows(part, layout.num_tokens, 0), axis), x)
        return portable.pick(jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), everywhere), index)

    def in_segments(handle: LowLatencyHandle) -> Tree:
        places = segments.places(handle, axis)
        token = segments.to_sources(places, layout).sent
        there = segments.to_experts(places, layout)
        filled = rows.gather_rows(_rows_of_tokens(handle) + 1, token) - 1
        return rounds.send(partial(portable.pick, x), there, layout.capacity, axis, layout, filled)

    flat = portable.choose(layout, portable.token_bytes(x), to_all, in_segments, handle)
    return jax.tree.map(lambda part: part.reshape(layout.num_local_experts, -1, *part.shape[1:]), flat)


def _row_tokens(handle: LowLatencyHandle) -> Array:
    """Return `source_rank * M + token` of each row, `[L, W * M]` int32; -1 for none."""
    position = jnp.arange(handle.source_token.shape[1], dtype=jnp.int32)[None, :]
    ends = handle.source_start + handle.source_count
    source = jnp.sum(position[:, :, None] >= ends[:, None, :], axis=-1, dtype=jnp.int32)
    return jnp.where(handle.source_token < 0, -1, source * handle.layout.num_tokens + handle.source_token)


def _is_first(handle: LowLatencyHandle) -> Array:
    """Return whether an assignment is its token's first one with its row here, `[W, M, K]`."""
    assignment_to_row, earlier = handle.assignment_to_row, jnp.tri(handle.layout.top_k, k=-1, dtype=jnp.bool_)
    same = (assignment_to_row[..., :, None] == assignment_to_row[..., None, :]) & earlier[None, None]
    return (assignment_to_row >= 0) & ~jnp.any(same, axis=-1)


def _rows_of_tokens(handle: LowLatencyHandle) -> Array:
    """Return the distinct rows of each token here, `[W * M, min(K, L)]` int32; -1 for none."""
    assignment_to_row = jnp.where(_is_first(handle), handle.assignment_to_row, -1).reshape(-1, handle.layout.top_k)
    return lax.top_k(assignment_to_row, min(handle.layout.top_k, handle.layout.num_local_experts))[0]


def dispatch_weights(options: Options, weights: Array, handle: LowLatencyHandle) -> Array:
    """Dispatch per-assignment values `[T, K]` to `[L, W * max_tokens_per_rank]`, summed per row."""
    layout = handle.layout
    everywhere = all_gather(_pad_rows(weights, layout.num_tokens, 0), options.axis)
    assignment_to_row = jnp.where(handle.assignment_to_row < 0, layout.capacity, handle.assignment_to_row)
    sums = jnp.zeros_like(everywhere, shape=(layout.capacity,)).at[assignment_to_row].add(everywhere, mode="drop")
    return sums.reshape(layout.num_local_experts, -1)


def combine_weights(options: Options, row_values: Array, handle: LowLatencyHandle) -> Array:
    """Send row values `[L, W * max_tokens_per_rank]` back to their assignments `[max_tokens_per_rank, K]`."""
    values = rows.gather_rows(row_values.reshape(-1), handle.assignment_to_row)
    return sum_in_order(exchange(values, options.axis))


def low_latency_combine(options: Options, y: Array, topk_weights: Array, handle: LowLatencyHandle) -> Array:
    """Combine rows `[L, W * max_tokens_per_rank, H]` with weights `[T, K]` to weighted sums `[T, H]`.

    Each row is rounded to the wire format; the weighted sums of a rank are then sent in float32.
    """
    dtype = accumulation_dtype(y.dtype)
    weights = all_gather(_pad_rows(topk_weights.astype(dtype), handle.layout.num_tokens, 0), options.axis)
    # The weight of an assignment without a row here is undefined.
    weights = jnp.where(handle.assignment_to_row < 0, jnp.zeros((), dtype), weights)
    sums = _combine(options, y, weights, handle, dtype)
    return sums.astype(options.sum_dtype or y.dtype)[: topk_weights.shape[0]]


def combine_rows(options: Options, y: Array, handle: LowLatencyHandle) -> Array:
    """Sum rows `[L, W * max_tokens_per_rank, H]`, each once, to `[max_tokens_per_rank, H]` per token.

    Sums of a rank are sent in the dtype of y.
    """
    weights = _is_first(handle).astype(accumulation_dtype(y.dtype))
    return _combine(options, y, weights, handle, y.dtype).astype(y.dtype)


def _combine(options: Options, y: Array, weights: Array, handle: LowLatencyHandle, wire: DTypeLike) -> Array:
    """Sum the rows of this rank's tokens, with weights `[W, M, K]` of all ranks, in the dtype of the weights."""
    layout, axis = handle.layout, options.axis

    def to_all(handle: LowLatencyHandle) -> Array:
        token = lax.iota(jnp.int32, layout.num_ranks * layout.num_tokens)
        sums = _partial_sums(options, y, weights, handle, token).astype(wire)
        parts = exchange(sums.reshape(layout.num_ranks, -1, y.shape[-1]), axis)
        return sum_in_order(parts.astype(weights.dtype))

    def in_segments(handle: LowLatencyHandle) -> Array:
        def sums_of(token: Array) -> Array:
            return _partial_sums(options, y, weights, handle, token).astype(wire)

        places = segments.places(handle, axis)
        back = segments.to_sources(places, layout)
        received = rounds.send(sums_of, back, segments.most_home(layout), axis, layout)
        order = segments.in_rank_order(places.home, segments.most_ranks(layout))
        return sum_in_order([rows.gather_rows(received, place).astype(weights.dtype) for place in order])

    row_bytes = y.shape[-1] * jnp.dtype(wire).itemsize
    return portable.choose(layout, row_bytes, to_all, in_segments, handle)


def _partial_sums(options: Options, y: Array, weights: Array, handle: LowLatencyHandle, token: Array) -> Array:
    """Compute weighted sums of the rows here of tokens `[N]`, `source_rank * M + token`; zeros for -1."""
    flat = y.reshape(-1, y.shape[-1])
    token_rows = rows.gather_rows(handle.assignment_to_row.reshape(-1, handle.layout.top_k) + 1, token) - 1
    weight = rows.gather_rows(weights.reshape(-1, handle.layout.top_k), token)
    total = jnp.zeros((), weights.dtype)
    for k in range(handle.layout.top_k):
        row = rows.gather_rows(flat, token_rows[:, k])
        if options.wire_dtype is not None:
            row = fp8.dequantize_rows(*fp8.quantize_rows(row), y.dtype)
        total = total + row.astype(weights.dtype) * weight[:, k, None]
    return total


def _pad_rows(x: Array, num_rows: int, fill: int) -> Array:
    """Pad the first axis of a matrix to `num_rows`."""
    if x.shape[0] == 0:  # XLA's partitioner fails on programs whose operands are all empty.
        return jnp.full_like(x, fill, shape=(num_rows, x.shape[1]))
    value = jnp.asarray(fill, x.dtype)
    return jnp.pad(x, ((0, num_rows - x.shape[0]), (0, 0)), constant_values=value) if num_rows > x.shape[0] else x
