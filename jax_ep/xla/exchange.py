"""Dispatch and combine by lax collectives with static shapes.

There are two algorithms. "To all": all tokens go to all ranks, into fixed slots `[source rank, token]`; each rank picks
its rows, and sums return by one all-to-all. "Segments": each token goes once to each rank that has rows for it, in
rounds (segments.py). Memory then grows with the rows and the tokens of one rank instead of those of all ranks. Small
arrays use the first algorithm. On accelerators, so do routings that send most tokens to most ranks.

The local steps are `pick` and `unpermute`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_ep.core import fp8
from jax_ep.core import layout as rows
from jax_ep.core.dtypes import FP8, accumulation_dtype
from jax_ep.core.mesh_axes import all_gather, exchange, rank_on, sum_in_order
from jax_ep.types import Array, Handle, Layout, Options, Quantized
from jax_ep.xla import segments

GATHERED_BYTES = 2 << 20
"""Up to this size, tokens of all ranks go to all ranks. On CPU devices segments are faster from 2 to 4 MiB on."""
ROUNDS_COST = 4
"""Cost of a byte in rounds, relative to "to all": 3187 us against 825 on two H200s (docs/design/exchange.md)."""


def plan(options: Options, topk_idx: Array, layout: Layout) -> Handle:
    """Build the handle from this rank's ids `[T, K]`."""
    num_invalid = rows.count_invalid(topk_idx, layout.num_experts)
    return rows.make_handle(all_gather(topk_idx, options.axis), rank_on(options.axis), num_invalid, layout)


def is_small(layout: Layout, row_bytes: int) -> bool:
    """Return whether tokens of `row_bytes` each go to all ranks, on any platform."""
    return layout.num_ranks == 1 or layout.num_ranks * layout.num_tokens * row_bytes <= GATHERED_BYTES


def segments_pay(layout: Layout) -> bool:
    """Return whether segments are cheaper than "to all" with uniform routing, or `capacity` saves memory."""
    share = 1 - (1 - 1 / layout.num_ranks) ** layout.top_k
    return ROUNDS_COST * share < 1 or layout.capacity < layout.num_ranks * layout.num_tokens


def choose[Result](
    row_bytes: int, to_all: Callable[[Handle], Result], in_segments: Callable[[Handle], Result], handle: Handle
) -> Result:
    """Run `to_all(handle)` or `in_segments(handle)`, chosen by the platform of the lowering."""
    layout = handle.layout
    if is_small(layout, row_bytes):
        return to_all(handle)
    return lax.platform_dependent(handle, cpu=in_segments, default=in_segments if segments_pay(layout) else to_all)


def pick[Tree](tree: Tree, index: Array) -> Tree:
    """Gather `index` from the first axis of each array, with zeros for -1, bit for bit for any dtype."""
    return jax.tree.map(lambda x: rows.gather_rows(x, index), tree)


def _dispatch[Tree](options: Options, tree: Tree, handle: Handle) -> Tree:
    """Dispatch arrays `[T, ...]` to `[R, ...]`, bit for bit."""
    layout, axis = handle.layout, options.axis

    def to_all(handle: Handle) -> Tree:
        gathered = jax.tree.map(lambda x: all_gather(x, axis).reshape(-1, *x.shape[1:]), tree)
        return pick(gathered, rows.row_tokens(handle))

    def in_segments(handle: Handle) -> Tree:
        places = segments.places(handle, axis)
        there = segments.to_experts(places, layout)
        received = segments.send(partial(pick, tree), there, segments.most_here(layout), axis, layout)
        # Padding has no place: -1 stays -1.
        here = rows.gather_rows(places.here.reshape(-1) + 1, rows.row_tokens(handle)) - 1
        return pick(received, here)

    token_bytes = sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in jax.tree.leaves(tree))
    return choose(token_bytes, to_all, in_segments, handle)


def dispatch_rows(options: Options, x: Array, handle: Handle) -> Array:
    """Dispatch per-token `[T, ...]` to per-row `[R, ...]` of any dtype, bit for bit; padding rows are zero."""
    return _dispatch(options, x, handle)


def dispatch_tokens(options: Options, x: Array, weights: Array | None, handle: Handle) -> tuple[Array, Array | None]:
    """Dispatch tokens `[T, H]` to rows `[R, H]`, in FP8 if `wire_dtype` asks for it, and weights `[T, K]` to `[R]`."""
    if options.wire_dtype is None:
        return dispatch_rows(options, x, handle), _dispatch_weights(options, weights, handle)
    quantized, row_weights = dispatch_quantized(options, x, weights, handle)
    return fp8.dequantize_rows(*quantized, x.dtype), row_weights


def dispatch_quantized(
    options: Options, x: Array, weights: Array | None, handle: Handle
) -> tuple[Quantized, Array | None]:
    """Dispatch tokens `[T, H]` to FP8 rows `[R, H]` with scales `[R, H / 128]`, and weights `[T, K]` to `[R]`.

    Padding rows are undefined and have weight zero.
    """
    return _dispatch(options, fp8.quantize_rows(x), handle), _dispatch_weights(options, weights, handle)


def _dispatch_weights(options: Options, weights: Array | None, handle: Handle) -> Array | None:
    if weights is None:
        return None
    return rows.gather_rows(all_gather(weights, options.axis).reshape(-1), handle.row_to_assignment)


def unpermute(y: Array, index: Array, dtype: DTypeLike) -> Array | Quantized:
    """Sum `y[index[:, k]]` over k, for `y [R, H]` and `index [N, K]`; -1 adds nothing.

    Rows are added in this order in float32, and rounded once. With FP8 as dtype, return values `[N, H]` and their
    scales `[N, H / 128]`.
    """
    wide = accumulation_dtype(y.dtype)
    total = rows.gather_rows(y, index[:, 0]).astype(wide)
    for k in range(1, index.shape[1]):
        total = total + rows.gather_rows(y, index[:, k]).astype(wide)
    return fp8.quantize_rows(total) if dtype == FP8 else total.astype(dtype)


def combine_tokens(options: Options, y: Array, row_weights: Array | None, handle: Handle) -> tuple[Array, Array | None]:
    """Combine rows `[R, H]` to unweighted sums `[T, H]`, and return row values `[R]` to their assignments `[T, K]`.

    Rows are added per expert rank first, then over ranks in rank order.
    """
    if handle.layout.num_ranks == 1:
        options = dataclasses.replace(options, axis=())  # nothing travels
    wide, layout, axis = accumulation_dtype(y.dtype), handle.layout, options.axis
    dtype = jnp.dtype(options.sum_dtype or y.dtype)
    wire = FP8 if options.wire_dtype is not None else dtype if layout.num_ranks == 1 else y.dtype
    partial_sums = partial(_partial_sums, y, handle, wire)

    def to_all(handle: Handle) -> Array:
        sums = partial_sums(lax.iota(jnp.int32, layout.num_ranks * layout.num_tokens))
        parts = jax.tree.map(lambda s: exchange(s.reshape(layout.num_ranks, -1, *s.shape[1:]), axis), sums)
        return sum_in_order(_widened(parts, wide)).astype(dtype)

    def in_segments(handle: Handle) -> Array:
        places = segments.places(handle, axis)
        back = segments.to_sources(places, layout)
        received = segments.send(partial_sums, back, segments.most_home(layout), axis, layout)
        in_order = segments.in_rank_order(places.home, segments.most_ranks(layout))
        if wire != FP8:
            return cast(Array, unpermute(cast(Array, received), in_order.T, dtype))
        total = jnp.zeros((), wide)
        for place in in_order:
            total = total + _widened(pick(received, place), wide)
        return total.astype(dtype)

    total = choose(y.shape[1] * wire.itemsize, to_all, in_segments, handle)
    return total, _combine_weights(options, row_weights, handle)


def _partial_sums(y: Array, handle: Handle, wire: DTypeLike, token: Array) -> Array | Quantized:
    """Sum the rows `y [R, H]` of tokens `[N]`, `source_rank * T + token`, in the wire dtype; zeros for -1."""
    token_rows = handle.assignment_to_row.reshape(-1, handle.layout.top_k)
    index = jnp.where(token[:, None] < 0, -1, token_rows[token])
    return unpermute(y, index, wire)


def _widened(part: Array | Quantized, dtype: DTypeLike) -> Array:
    return fp8.dequantize_rows(*part, dtype) if isinstance(part, tuple) else part.astype(dtype)


def _combine_weights(options: Options, row_weights: Array | None, handle: Handle) -> Array | None:
    if row_weights is None:
        return None
    # An assignment has a row on at most one rank, so a sum of bits keeps the one value exactly.
    bits = jnp.uint64 if row_weights.dtype.itemsize == 8 else jnp.uint32
    parts = rows.gather_rows(lax.bitcast_convert_type(row_weights, bits), handle.assignment_to_row)
    return lax.bitcast_convert_type(sum_in_order(exchange(parts, options.axis)), row_weights.dtype)
