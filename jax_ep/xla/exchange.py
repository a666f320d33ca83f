"""Dispatch and combine by lax collectives with static shapes.

There are two ways. All tokens go to all ranks, into fixed slots `[source rank, token]`, each rank picks its rows from
them, and sums travel back by one all-to-all. Or each token travels once to each rank that has rows for it, in segments:
by the ragged exchange where the platform has one, else in rounds; memory then follows the rows and the tokens of one
rank, not those of all. The first way is that of small arrays, and on platforms with a ragged exchange that of routings
of which most tokens go to most ranks.

What a rank does by itself, before and after, are `pick`, which all implementations share, and `unpermute`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_ep.core import fp8
from jax_ep.core import layout as rows
from jax_ep.core.collectives import all_gather, exchange, rank_on, sum_in_order
from jax_ep.core.dtypes import FP8, accumulation_dtype
from jax_ep.types import Array, Handle, Layout, LowLatencyHandle, Options, Quantized
from jax_ep.xla import local_steps, ragged, rounds, segments
from jax_ep.xla.local_steps import Unpermute

GATHERED_BYTES = 2 << 20
"""Tokens of all ranks up to this size go to all. On CPU devices segments are faster from 2 to 4 MiB on."""
RAGGED_PLATFORMS = ("rocm", "tpu")
"""Those that exchange segments at once. NVIDIA GPUs do it in rounds: XLA's ragged exchange takes 13 times as long there
as long as nobody sets its flags (docs/design/exchange.md)."""
RAGGED_COST = 3
"""What a byte costs there, in bytes to all ranks: on four H200s 2540 us against 903, with the best flags
(docs/performance.md)."""
ROUNDS_COST = 4
"""The same of rounds on NVIDIA GPUs: on two H200s 3187 us against 825 (docs/design/exchange.md)."""


def plan(options: Options, topk_idx: Array, layout: Layout) -> Handle:
    """`[T, K]` ids of this rank to the handle."""
    num_invalid = rows.count_invalid(topk_idx, layout.num_experts)
    return rows.make_handle(all_gather(topk_idx, options.axis), rank_on(options.axis), num_invalid, layout)


def is_small(layout: Layout, row_bytes: int) -> bool:
    """Whether tokens of `row_bytes` each go to all ranks, on any platform."""
    return layout.num_ranks == 1 or layout.num_ranks * layout.num_tokens * row_bytes <= GATHERED_BYTES


def segments_pay(layout: Layout, cost: float) -> bool:
    """Whether segments, with uniform routing, are that much less than all tokens to all ranks, or these fill memory."""
    share = 1 - (1 - 1 / layout.num_ranks) ** layout.top_k
    return cost * share < 1 or layout.capacity < layout.num_ranks * layout.num_tokens


def choose[Handles: (Handle, LowLatencyHandle)](
    layout: Layout, row_bytes: int, to_all: Callable[[Handles], Any], in_segments: Callable[..., Any], handle: Handles
) -> Any:
    """`to_all(handle)`, or `in_segments(handle, way=...)` by what there is where the program is lowered for."""
    if is_small(layout, row_bytes):
        return to_all(handle)
    in_rounds, at_once = (partial(in_segments, way=way) for way in (rounds, ragged))
    chosen = {"cuda": in_rounds if segments_pay(layout, ROUNDS_COST) else to_all}
    chosen |= dict.fromkeys(RAGGED_PLATFORMS, at_once if segments_pay(layout, RAGGED_COST) else to_all)
    return lax.platform_dependent(handle, default=in_rounds, **chosen)


def token_bytes(tree: Any) -> int:
    """Of one token in arrays `[T, ...]`."""
    return sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def pick[Tree](tree: Tree, index: Array) -> Tree:
    """`index` of the first axis of each array, zeros for -1, bit for bit and of any dtype."""
    return jax.tree.map(lambda x: rows.gather_rows(x, index), tree)


def _dispatch[Tree](options: Options, tree: Tree, handle: Handle) -> Tree:
    """Arrays `[T, ...]` to `[R, ...]`, bit for bit."""
    layout, axis = handle.layout, options.axis

    def to_all(handle: Handle) -> Tree:
        gathered = jax.tree.map(lambda x: all_gather(x, axis).reshape(-1, *x.shape[1:]), tree)
        return pick(gathered, rows.row_tokens(handle))

    def in_segments(handle: Handle, way: Any) -> Tree:
        places = segments.places(handle, axis)
        there = segments.to_experts(places, layout)
        received = way.send(partial(pick, tree), there, segments.most_here(layout), axis, layout)
        # Padding has no place: its -1 stays one.
        here = rows.gather_rows(places.here.reshape(-1) + 1, rows.row_tokens(handle)) - 1
        return pick(received, here)

    return cast(Tree, choose(layout, token_bytes(tree), to_all, in_segments, handle))


def dispatch_rows(options: Options, x: Array, handle: Handle) -> Array:
    """`[T, ...]` per token to `[R, ...]` per row of any dtype, bit for bit; zero in padding rows."""
    return _dispatch(options, x, handle)


def dispatch_tokens(options: Options, x: Array, weights: Array | None, handle: Handle) -> tuple[Array, Array | None]:
    """`[T, H]` tokens to `[R, H]` rows, through FP8 where they travel in it; and `[T, K]` weights to `[R]`."""
    if options.wire_dtype is None:
        return dispatch_rows(options, x, handle), _dispatch_weights(options, weights, handle)
    quantized, row_weights = dispatch_quantized(options, x, weights, handle)
    return fp8.dequantize_rows(*quantized, x.dtype), row_weights


def dispatch_quantized(
    options: Options, x: Array, weights: Array | None, handle: Handle
) -> tuple[Quantized, Array | None]:
    """`[T, H]` tokens to FP8 rows `[R, H]` and their scales `[R, H / 128]`; and `[T, K]` weights to `[R]`.

    Padding rows may hold anything, and have no weight: zero.
    """
    return _dispatch(options, fp8.quantize_rows(x), handle), _dispatch_weights(options, weights, handle)


def _dispatch_weights(options: Options, weights: Array | None, handle: Handle) -> Array | None:
    if weights is None:
        return None
    return rows.gather_rows(all_gather(weights, options.axis).reshape(-1), handle.row_slot)


def combine_tokens(
    options: Options,
    y: Array,
    row_weights: Array | None,
    handle: Handle,
    *,
    unpermute: Unpermute = local_steps.unpermute,
) -> tuple[Array, Array | None]:
    """`[R, H]` rows to their unweighted sums `[T, H]`; and `[R]` values to the `[T, K]` slots of their rows.

    Rows are added per expert rank first, then over ranks in rank order.
    """
    wide, layout, axis = accumulation_dtype(y.dtype), handle.layout, options.axis
    dtype = options.sum_dtype or y.dtype
    wire = y.dtype if options.wire_dtype is None else FP8
    partial_sums = partial(_partial_sums, y, handle, wire, unpermute)

    def to_all(handle: Handle) -> Array:
        sums = partial_sums(lax.iota(jnp.int32, layout.num_ranks * layout.num_tokens))
        parts = jax.tree.map(lambda s: exchange(s.reshape(layout.num_ranks, -1, *s.shape[1:]), axis), sums)
        return sum_in_order(_widened(parts, wide)).astype(dtype)

    def in_segments(handle: Handle, way: Any) -> Array:
        places = segments.places(handle, axis)
        back = segments.to_sources(places, layout)
        received = way.send(partial_sums, back, segments.most_home(layout), axis, layout)
        in_order = segments.in_rank_order(places.home, segments.most_ranks(layout))
        if wire != FP8:
            return cast(Array, unpermute(received, in_order.T, dtype))
        total = jnp.zeros((), wide)
        for place in in_order:
            total = total + _widened(pick(received, place), wide)
        return total.astype(dtype)

    total = cast(Array, choose(layout, y.shape[1] * wire.itemsize, to_all, in_segments, handle))
    return total, _combine_weights(options, row_weights, handle)


def _partial_sums(y: Array, handle: Handle, wire: DTypeLike, unpermute: Unpermute, token: Array) -> Array | Quantized:
    """Sums of the rows `y [R, H]` of tokens `[N]`, `source_rank * T + token`, as they travel; zeros for -1."""
    token_rows = handle.slot_row.reshape(-1, handle.layout.top_k)
    index = jnp.where(token[:, None] < 0, -1, token_rows[token])
    return unpermute(y, index, wire)


def _widened(part: Array | Quantized, dtype: DTypeLike) -> Array:
    return fp8.dequantize_rows(*part, dtype) if isinstance(part, tuple) else part.astype(dtype)


def _combine_weights(options: Options, row_weights: Array | None, handle: Handle) -> Array | None:
    if row_weights is None:
        return None
    # A slot has a row on one rank at most: sums of bits are those of the one value, whatever it is.
    bits = jnp.uint64 if row_weights.dtype.itemsize == 8 else jnp.uint32
    parts = rows.gather_rows(lax.bitcast_convert_type(row_weights, bits), handle.slot_row)
    return lax.bitcast_convert_type(sum_in_order(exchange(parts, options.axis)), row_weights.dtype)
