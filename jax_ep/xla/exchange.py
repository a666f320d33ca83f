"""Dispatch and combine by lax collectives with static shapes.

Every rank gathers the tokens of all ranks into fixed slots `[source rank, token]`, and picks its rows from them; sums
travel back by one all-to-all. With static shapes and no dropped token no exchange can send less: any rank may hold an
expert of any token. `after` orders the exchanges of kernels; XLA's own collectives see to that themselves.
"""

from __future__ import annotations

import jax.numpy as jnp

from jax_ep.core import fp8
from jax_ep.core import layout as rows
from jax_ep.core.collectives import all_gather, exchange, rank_on, sum_in_order
from jax_ep.core.dtypes import accumulation_dtype
from jax_ep.types import Array, Handle, Layout, Options, Quantized


def plan(options: Options, topk_idx: Array, layout: Layout) -> Handle:
    """`[T, K]` ids of this rank to the handle."""
    num_invalid = rows.count_invalid(topk_idx, layout.num_experts)
    return rows.make_handle(all_gather(topk_idx, options.axis), rank_on(options.axis), num_invalid, layout)


def dispatch_rows(options: Options, x: Array, handle: Handle) -> Array:
    """`[T, ...]` per token to `[R, ...]` per row of any dtype, bit for bit; zero in padding rows."""
    gathered = all_gather(x, options.axis)
    return rows.gather_rows(gathered.reshape(-1, *x.shape[1:]), rows.row_tokens(handle))


def dispatch_tokens(options: Options, x: Array, handle: Handle) -> Array:
    """`[T, H]` tokens to `[R, H]` rows, through FP8 where they travel in it."""
    if options.wire_dtype is None:
        return dispatch_rows(options, x, handle)
    return fp8.dequantize_rows(*dispatch_quantized(options, x, handle), x.dtype)


def dispatch_quantized(options: Options, x: Array, handle: Handle) -> Quantized:
    """`[T, H]` tokens to FP8 rows `[R, H]` and their scales `[R, H / 128]`; padding rows may hold anything."""
    values, scales = fp8.quantize_rows(x)
    return dispatch_rows(options, values, handle), dispatch_rows(options, scales, handle)


def dispatch_weights(options: Options, weights: Array, handle: Handle, after: Array | None = None) -> Array:
    """`[T, K]` router weights to `[R]`, one per row; zero in padding rows."""
    return rows.gather_rows(all_gather(weights, options.axis).reshape(-1), handle.row_slot)


def combine_tokens(options: Options, y: Array, handle: Handle) -> Array:
    """`[R, H]` rows to their unweighted sums `[T, H]`: first per expert rank, then over ranks in rank order."""
    dtype = accumulation_dtype(y.dtype)
    partial = jnp.zeros((), dtype)
    for k in range(handle.layout.top_k):
        partial = partial + rows.gather_rows(y, handle.slot_row[:, :, k]).astype(dtype)
    if options.wire_dtype is None:
        parts = exchange(partial.astype(y.dtype), options.axis).astype(dtype)
    else:
        values, scales = (exchange(part, options.axis) for part in fp8.quantize_rows(partial))
        parts = fp8.dequantize_rows(values, scales, dtype)
    return sum_in_order(parts).astype(options.sum_dtype or y.dtype)


def combine_weights(options: Options, row_weights: Array, handle: Handle, after: Array | None = None) -> Array:
    """`[R]` values to the `[T, K]` slots they belong to; zero for slots that had no row."""
    return sum_in_order(exchange(rows.gather_rows(row_weights, handle.slot_row), options.axis))
