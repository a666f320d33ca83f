"""Dispatch: tokens to fixed slots at their expert ranks, and from there to expert-major rows, in one launch.

Tasks: first announce; then, for each block of tokens, send it, and copy what has arrived of the block LAG steps earlier
to its rows; last, zero the padding rows. A token is read once, quantised where it travels in FP8, and stored to slot
`[source rank, token]` of every rank that has one of its experts, and to its rows here; a received token is read once
and written to each of its rows. Its router weights, if there are any, travel with it.
"""

import triton
import triton.language as tl

from .dispatch_rows import clear_padding, copy_to_rows, store_rows, store_scales
from .exchange_structs import Rows
from .failures import poison
from .masks import destinations, goes_to, send_mask
from .protocol import (
    announce,
    await_block,
    await_peers,
    data_of,
    end_launch,
    next_task,
    open_launch,
    peer_of,
    publish_to_all,
)
from .quantization import GROUP, dequantize, quantize, scale_offsets
from .router_weights import clear_weights, push_weights, weights_to_rows
from .trace import COPY_EVENT, PUSH_EVENT, ZERO_EVENT, stamp, trace, trace_exchange


@triton.jit
def copy_tokens(x_ptr, tokens, slots, mask, values_ptr, HIDDEN: tl.constexpr, BLOCK_HIDDEN: tl.constexpr):
    """Copies tokens to slots, such as those in a peer's heap."""
    for h in range(0, HIDDEN, BLOCK_HIDDEN):
        columns = h + tl.arange(0, BLOCK_HIDDEN)[None, :]
        inside = mask[:, None] & (columns < HIDDEN)
        source = tl.multiple_of(x_ptr + tokens.to(tl.int64)[:, None] * HIDDEN + columns, (16, 16))
        target = tl.multiple_of(values_ptr + slots.to(tl.int64)[:, None] * HIDDEN + columns, (16, 16))
        tl.store(target, tl.load(source, mask=inside), mask=inside)


@triton.jit
def dispatch_block(
    x_ptr, weights_ptr, ids_ptr, slot_row_ptr, out, out_weights_ptr, launch, block, S: tl.constexpr, HEAP: tl.constexpr
):
    """Stores a block of this rank's tokens in the heap of every peer that has experts of theirs, and in own rows."""
    wire: tl.constexpr = tl.float8e4nv if S.fp8 else x_ptr.dtype.element_ty
    HIDDEN: tl.constexpr = S.hidden
    BLOCK_TOKENS: tl.constexpr = S.tile.block_tokens
    BLOCK_HIDDEN: tl.constexpr = S.tile.block_hidden
    NUM_RANKS: tl.constexpr = HEAP.num_ranks
    tokens = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    slots = launch.rank * S.num_tokens + tokens
    ranks = destinations(ids_ptr, slots * S.top_k, tokens < S.num_tokens, S.top_k, S.num_local_experts, S.num_experts)
    for h in range(0, HIDDEN, BLOCK_HIDDEN):
        columns = h + tl.arange(0, BLOCK_HIDDEN)[None, :]
        inside = columns < HIDDEN
        source = tl.multiple_of(x_ptr + tokens.to(tl.int64)[:, None] * HIDDEN + columns, (16, 16))
        values = tl.load(source, mask=(ranks != 0)[:, None] & inside, other=0.0)
        if S.fp8:
            values, scales = quantize(values, BLOCK_TOKENS, BLOCK_HIDDEN)
            offsets, exists = scale_offsets(slots, h, HIDDEN, BLOCK_HIDDEN)
        for step in tl.static_range(1, NUM_RANKS):
            peer = peer_of(launch, (launch.rank + step) % NUM_RANKS)
            mask = goes_to(ranks, peer.rank)[:, None]
            row_ptr = data_of(launch, peer.device, wire, HEAP) + slots.to(tl.int64)[:, None] * HIDDEN
            tl.store(tl.multiple_of(row_ptr + columns, (16, 16)), values, mask=mask & inside)
            if S.fp8:
                scales_ptr = data_of(launch, peer.device, tl.float32, HEAP, S.scales_offset)
                tl.store(scales_ptr + offsets, scales, mask=mask & exists)
        own = goes_to(ranks, launch.rank)
        if S.quantized:
            store_scales(scales, slot_row_ptr + slots * S.top_k, own, out.scales_ptr, h, S)
        elif S.fp8:
            values = dequantize(values, scales, BLOCK_TOKENS, BLOCK_HIDDEN).to(x_ptr.dtype.element_ty)
        store_rows(values, slot_row_ptr + slots * S.top_k, own, out.values_ptr, columns, inside, S)
    if weights_ptr is not None:
        for step in tl.static_range(1, NUM_RANKS):
            peer = peer_of(launch, (launch.rank + step) % NUM_RANKS)
            push_weights(weights_ptr, tokens, goes_to(ranks, peer.rank), launch, peer, S, HEAP)
        own_rows_ptr = slot_row_ptr + launch.rank * (S.num_tokens * S.top_k)
        weights_to_rows(weights_ptr, own_rows_ptr, tokens, tokens < S.num_tokens, out_weights_ptr, S.top_k)


@triton.jit
def dispatch(
    x_ptr,
    weights_ptr,
    ids_ptr,
    slot_row_ptr,
    row_slot_ptr,
    peers,
    out_ptr,
    out_scales_ptr,
    out_weights_ptr,
    S: tl.constexpr,
    HEAP: tl.constexpr,
):
    """`x [T, H]` to `out [R, H]`; `ids`, `slot_row [W, T, K]` and `row_slot [R]` are those of the handle.

    With QUANTIZED, rows stay FP8 values, with scales in `out_scales [R, H / 128]`. CLEAR writes zeros where there is no
    token. Unless both are None, `weights [T, K]` go to `out_weights [R]`, zero where there is no token.
    """
    launch, alive = open_launch(peers, HEAP)
    out = Rows(out_ptr, out_scales_ptr)
    NUM_RANKS: tl.constexpr = HEAP.num_ranks
    BLOCK_TOKENS: tl.constexpr = S.tile.block_tokens
    BLOCK_ROWS: tl.constexpr = S.tile.block_rows
    LAG: tl.constexpr = S.tile.lag
    wire: tl.constexpr = tl.float8e4nv if S.fp8 else x_ptr.dtype.element_ty
    num_blocks: tl.constexpr = (S.num_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    # A step sends a block, and copies one of each peer.
    steps_end: tl.constexpr = 1 + (num_blocks + LAG) * NUM_RANKS
    clears: tl.constexpr = S.clears_padding or weights_ptr is not None
    num_tasks: tl.constexpr = steps_end + ((S.num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS if clears else 0)
    begun = 0
    task = next_task(launch)
    while task < num_tasks:
        step = (task - 1) // NUM_RANKS
        index = (task - 1) % NUM_RANKS
        if task == 0:
            announce(launch, HEAP)
        elif task >= steps_end:
            began = stamp(HEAP)
            if S.clears_padding:
                clear_padding(out_ptr, row_slot_ptr, (task - steps_end) * BLOCK_ROWS, S)
            if weights_ptr is not None:
                clear_weights(out_weights_ptr, row_slot_ptr, (task - steps_end) * BLOCK_ROWS, BLOCK_ROWS, S.num_rows)
            trace(launch, ZERO_EVENT, began, task, HEAP)
        elif index == 0:
            if step < num_blocks:
                if begun == 0:
                    alive = await_peers(launch, alive, task, HEAP)
                    begun = 1
                if alive != 0:
                    began = stamp(HEAP)
                    dispatch_block(
                        x_ptr, weights_ptr, ids_ptr, slot_row_ptr, out, out_weights_ptr, launch, step, S, HEAP
                    )
                    trace_exchange(launch, PUSH_EVENT, began, task, -1, step, HEAP)
                    publish_to_all(launch, step, task, HEAP)
        elif step >= LAG:
            block = step - LAG
            source = peer_of(launch, (launch.rank + NUM_RANKS - index) % NUM_RANKS)
            alive = await_block(launch, source, block, alive, task, HEAP)
            began = stamp(HEAP)
            tokens = source.rank * S.num_tokens + block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
            mask = send_mask(
                ids_ptr,
                tokens * S.top_k,
                tokens < (source.rank + 1) * S.num_tokens,
                launch.rank,
                S.top_k,
                S.num_local_experts,
            )
            scales_ptr = data_of(launch, launch.device, tl.float32, HEAP, S.scales_offset)
            received = Rows(data_of(launch, launch.device, wire, HEAP), scales_ptr)
            copy_to_rows(received, tokens, mask, slot_row_ptr, out, S)
            if weights_ptr is not None:
                arrived_ptr = data_of(launch, launch.device, weights_ptr.dtype.element_ty, HEAP, S.weights_offset)
                weights_to_rows(arrived_ptr, slot_row_ptr, tokens, mask, out_weights_ptr, S.top_k)
            trace_exchange(launch, COPY_EVENT, began, task, source.device, block, HEAP)
        task = next_task(launch)
    if end_launch(launch, HEAP):
        poison(out_ptr, S.num_rows * S.hidden)
        if S.quantized:
            poison(out_scales_ptr, S.num_rows * (S.hidden // GROUP))
        if weights_ptr is not None:
            poison(out_weights_ptr, S.num_rows)
