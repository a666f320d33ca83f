"""The `xla` implementation: portable lax collectives with static shapes; any platform, the default on the CPU.

Every rank gathers the tokens of all ranks into fixed slots `[source rank, token]`, and picks its rows from them; sums
travel back by one all-to-all. With static shapes and no dropped token no exchange can send less: any rank may hold an
expert of any token.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_ep import activations, collectives, fp8_reference, masked_reference, quantization, tiled_gemm
from jax_ep import layout as rows
from jax_ep.collectives import Axis, all_gather, exchange, rank_on, sum_in_order
from jax_ep.dtypes import accumulation_dtype
from jax_ep.types import Array, Handle, Layout, LowLatencyHandle, Quantized

send_weights = collectives.send_weights
return_weights = collectives.return_weights
grouped_gemm = tiled_gemm.grouped_gemm
grouped_gemm_weights = tiled_gemm.grouped_gemm_weights
grouped_gemm_fp8 = fp8_reference.grouped_gemm_fp8
quantize_rows = fp8_reference.quantize_rows
dequantize_rows = fp8_reference.dequantize_rows
quantize_matrices = fp8_reference.quantize_matrices
activate_quantized = fp8_reference.activate_quantized
masked_grouped_gemm = masked_reference.masked_grouped_gemm
masked_gated_activation = masked_reference.masked_gated_activation


def refusal(request: Any) -> str | None:
    """Why this implementation cannot serve a request, or None; see `backends.Request`."""
    if request.operation == "exchange" and request.mode not in (None, "serial"):
        return f"it fuses nothing, so that mode={request.mode!r} does not exist there; 'serial' does"
    if request.operation == "exchange" and request.dispatch_mode == "fused":
        return "it fuses nothing, so that mode='fused' of a dispatch does not exist there; 'serial' does"
    return None


def fuses(layout: Layout, dtype: DTypeLike, depth: int, columns: int) -> bool:
    """No: exchanges and products are separate here."""
    return False


def activate(hidden: Array, weights: Array, group_sizes: Array, *, activation: str, gated: bool) -> Array:
    """`[R, 2 * I]` hidden rows (`[R, I]` where not gated), activated and weighted, to `[R, I]`."""
    return activations.weighted(hidden, weights, activation, gated)


def activate_gradient(
    hidden: Array, weights: Array, d_rows: Array, group_sizes: Array, *, activation: str, gated: bool
) -> tuple[Array, Array]:
    """Cotangents of `hidden` and `weights`."""
    return activations.weighted_gradient(hidden, weights, d_rows, activation, gated)


def fuses_low_latency(layout: Layout, lhs_dtype: DTypeLike, dtype: DTypeLike, depth: int, columns: int) -> bool:
    """No, see `fuses`."""
    return False


def plan(topk_idx: Array, layout: Layout, axis: Axis) -> Handle:
    """`[T, K]` ids of this rank to the handle."""
    num_invalid = rows.count_invalid(topk_idx, layout.num_experts)
    return rows.make_handle(all_gather(topk_idx, axis), rank_on(axis), num_invalid, layout)


def send_rows(x: Array, handle: Handle, axis: Axis) -> Array:
    """`[T, ...]` per token to `[R, ...]` per row, bit for bit; zero in padding rows."""
    token = rows.row_tokens(handle)
    gathered = all_gather(x, axis)
    return rows.gather_rows(gathered.reshape(-1, *x.shape[1:]), token)


def send_tokens(x: Array, handle: Handle, axis: Axis, wire_dtype: DTypeLike | None) -> Array:
    """`[T, H]` tokens to `[R, H]` rows, through FP8 where `wire_dtype` says so."""
    if wire_dtype is None:
        return send_rows(x, handle, axis)
    return quantization.dequantize_fp8(*send_quantized(x, handle, axis), x.dtype)


def send_quantized(x: Array, handle: Handle, axis: Axis) -> Quantized:
    """`[T, H]` tokens to FP8 rows `[R, H]` and their scales `[R, H / 128]`; padding rows may hold anything."""
    values, scales = quantization.quantize_fp8(x)
    return send_rows(values, handle, axis), send_rows(scales, handle, axis)


def return_tokens(y: Array, handle: Handle, axis: Axis, wire_dtype: DTypeLike | None) -> Array:
    """`[R, H]` rows to their unweighted sums `[T, H]`: first per expert rank, then over ranks in rank order."""
    dtype = accumulation_dtype(y.dtype)
    partial = jnp.zeros((), dtype)
    for k in range(handle.layout.top_k):
        partial = partial + rows.gather_rows(y, handle.slot_row[:, :, k]).astype(dtype)
    if wire_dtype is None:
        parts = exchange(partial.astype(y.dtype), axis).astype(dtype)
    else:
        values, scales = (exchange(part, axis) for part in quantization.quantize_fp8(partial))
        parts = quantization.dequantize_fp8(values, scales, dtype)
    return sum_in_order(parts).astype(y.dtype)


def low_latency_plan(topk_idx: Array, layout: Layout, axis: Axis) -> LowLatencyHandle:
    """`[max_tokens_per_rank, K]` ids of this rank to a handle in which a token has at most one row per expert."""
    num_local, num_ranks, block = layout.num_local_experts, layout.num_ranks, layout.num_ranks * layout.num_tokens
    all_idx = all_gather(topk_idx, axis)
    # Every slot uses the row of the first slot of its token that names the same expert.
    same = all_idx[..., :, None] == all_idx[..., None, :]
    first_k = jnp.argmax(same, axis=-1).astype(jnp.int32)
    is_first = first_k == lax.broadcasted_iota(jnp.int32, first_k.shape, 2)
    groups = rows.local_groups(all_idx, rank_on(axis) * num_local, num_local)
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


def low_latency_dispatch(
    x: Array | Quantized,
    topk_idx: Array,
    num_tokens: Array | None,
    layout: Layout,
    axis: Axis,
    group_size: int | None,
) -> tuple[Array, Array | None, Array, LowLatencyHandle]:
    """`[T, H]` tokens and `[T, K]` ids to packed rows per expert.

    Args:
      x: tokens, or a quantised pair; T is at most the `num_tokens` of the layout, M.
      topk_idx: expert ids.
      num_tokens: `[]` int32, how many tokens count; None: all.
      layout: static sizes.
      axis: expert axis.
      group_size: columns per FP8 scale, or None to send x as it is.

    Returns:
      tokens `[L, W * M, H]`, scales `[L, W * M, H // group_size]` or None, rows of each expert `[L]`, and the handle.
    """
    if group_size is not None and not isinstance(x, tuple):
        x = quantization.quantize_fp8(x, group_size=group_size)
    if num_tokens is not None:
        index = jnp.arange(topk_idx.shape[0], dtype=jnp.int32)
        topk_idx = jnp.where((index < num_tokens)[:, None], topk_idx, -1)
    handle = low_latency_plan(_pad_rows(topk_idx, layout.num_tokens, -1), layout, axis)
    values, scales = x if isinstance(x, tuple) else (x, None)
    tokens = low_latency_send(values, handle, axis)
    group_sizes = jnp.sum(handle.source_count, axis=1, dtype=jnp.int32)
    return tokens, None if scales is None else low_latency_send(scales, handle, axis), group_sizes, handle


def low_latency_send(x: Array, handle: LowLatencyHandle, axis: Axis) -> Array:
    """`[T, ...]` per token to `[L, W * max_tokens_per_rank, ...]`, bit for bit; zero elsewhere."""
    layout = handle.layout
    position = jnp.arange(handle.source_token.shape[1], dtype=jnp.int32)[None, :]
    ends = handle.source_start + handle.source_count
    source = jnp.sum(position[:, :, None] >= ends[:, None, :], axis=-1, dtype=jnp.int32)
    index = jnp.where(handle.source_token < 0, -1, source * layout.num_tokens + handle.source_token)
    x = _pad_rows(x, layout.num_tokens, 0)
    return rows.gather_rows(all_gather(x, axis).reshape(-1, *x.shape[1:]), index)


def low_latency_combine(
    y: Array, topk_weights: Array, handle: LowLatencyHandle, axis: Axis, wire_dtype: DTypeLike | None
) -> Array:
    """`[L, W * max_tokens_per_rank, H]` rows and `[T, K]` weights to `[T, H]` weighted sums per token.

    Rounding to the wire format applies to each row; the weighted sums of a rank then travel in float32.
    """
    dtype = accumulation_dtype(y.dtype)
    flat = y.reshape(-1, y.shape[-1])
    if wire_dtype is not None:
        flat = quantization.dequantize_fp8(*quantization.quantize_fp8(flat), y.dtype)
    weights = all_gather(_pad_rows(topk_weights.astype(dtype), handle.layout.num_tokens, 0), axis)
    partial = jnp.zeros((), dtype)
    for k in range(handle.layout.top_k):
        row = rows.gather_rows(flat, handle.slot_row[:, :, k]).astype(dtype)
        # The weight of a slot without a row here may be anything.
        weight = jnp.where(handle.slot_row[:, :, k] < 0, jnp.zeros((), dtype), weights[:, :, k])
        partial = partial + row * weight[:, :, None]
    return sum_in_order(exchange(partial, axis)).astype(y.dtype)[: topk_weights.shape[0]]


def _pad_rows(x: Array, num_rows: int, fill: int) -> Array:
    """Extends the first axis of a matrix to `num_rows`."""
    if x.shape[0] == 0:  # XLA's partitioner fails at programs all of whose operands are empty
        return jnp.full_like(x, fill, shape=(num_rows, x.shape[1]))
    value = jnp.asarray(fill, x.dtype)
    return jnp.pad(x, ((0, num_rows - x.shape[0]), (0, 0)), constant_values=value) if num_rows > x.shape[0] else x
