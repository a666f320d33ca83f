"""Dispatch: tokens to fixed slots at their expert ranks, and from there to expert-major rows, in one launch.

Tasks: first announce; then, for each block of tokens, send it, and copy what has arrived of the block LAG steps earlier
to its rows; last, zero the padding rows. A token is read once, quantised where it travels in FP8, and stored to slot
`[source rank, token]` of every rank that has one of its experts, and to its rows here; a received token is read once
and written to each of its rows. Its router weights, if there are any, travel with it.
"""

import triton
import triton.language as tl

from .dispatch_rows import clear_padding, copy_to_rows, store_rows, store_scales
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
from .structs import Rows
from .trace import COPY_EVENT, PUSH_EVENT, ZERO_EVENT, stamp, trace, trace_exchange


@triton.jit
def copy_tokens(x_ptr, tokens, slots, mask, values_ptr, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """Copies tokens to slots, such as those in a peer's heap."""
    for h in range(0, H, BLOCK_H):
        columns = h + tl.arange(0, BLOCK_H)[None, :]
        inside = mask[:, None] & (columns < H)
        source = tl.multiple_of(x_ptr + tokens.to(tl.int64)[:, None] * H + columns, (16, 16))
        target = tl.multiple_of(values_ptr + slots.to(tl.int64)[:, None] * H + columns, (16, 16))
        tl.store(target, tl.load(source, mask=inside), mask=inside)


@triton.jit
def dispatch_block(
    x_ptr, weights_ptr, ids_ptr, slot_row_ptr, out, out_weights_ptr, launch, block, S: tl.constexpr, HEAP: tl.constexpr
):
    """Stores a block of this rank's tokens in the heap of every peer that has experts of theirs, and in own rows."""
    wire: tl.constexpr = tl.float8e4nv if S.FP8 else x_ptr.dtype.element_ty
    H: tl.constexpr = S.H
    BLOCK_T: tl.constexpr = S.tile.BLOCK_T
    BLOCK_H: tl.constexpr = S.tile.BLOCK_H
    W: tl.constexpr = HEAP.W
    tokens = block * BLOCK_T + tl.arange(0, BLOCK_T)
    slots = launch.rank * S.T + tokens
    ranks = destinations(ids_ptr, slots * S.K, tokens < S.T, S.K, S.L, S.E)
    for h in range(0, H, BLOCK_H):
        columns = h + tl.arange(0, BLOCK_H)[None, :]
        inside = columns < H
        source = tl.multiple_of(x_ptr + tokens.to(tl.int64)[:, None] * H + columns, (16, 16))
        values = tl.load(source, mask=(ranks != 0)[:, None] & inside, other=0.0)
        if S.FP8:
            values, scales = quantize(values, BLOCK_T, BLOCK_H)
            offsets, exists = scale_offsets(slots, h, H, BLOCK_H)
        for step in tl.static_range(1, W):
            peer = peer_of(launch, (launch.rank + step) % W)
            mask = goes_to(ranks, peer.rank)[:, None]
            row_ptr = data_of(launch, peer.device, wire, HEAP) + slots.to(tl.int64)[:, None] * H
            tl.store(tl.multiple_of(row_ptr + columns, (16, 16)), values, mask=mask & inside)
            if S.FP8:
                scales_ptr = data_of(launch, peer.device, tl.float32, HEAP, S.SCALES)
                tl.store(scales_ptr + offsets, scales, mask=mask & exists)
        own = goes_to(ranks, launch.rank)
        if S.QUANTIZED:
            store_scales(scales, slot_row_ptr + slots * S.K, own, out.scales_ptr, h, S)
        elif S.FP8:
            values = dequantize(values, scales, BLOCK_T, BLOCK_H).to(x_ptr.dtype.element_ty)
        store_rows(values, slot_row_ptr + slots * S.K, own, out.values_ptr, columns, inside, S)
    if weights_ptr is not None:
        for step in tl.static_range(1, W):
            peer = peer_of(launch, (launch.rank + step) % W)
            push_weights(weights_ptr, tokens, goes_to(ranks, peer.rank), launch, peer, S, HEAP)
        own_rows_ptr = slot_row_ptr + launch.rank * (S.T * S.K)
        weights_to_rows(weights_ptr, own_rows_ptr, tokens, tokens < S.T, out_weights_ptr, S.K)


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
    W: tl.constexpr = HEAP.W
    BLOCK_T: tl.constexpr = S.tile.BLOCK_T
    BLOCK_R: tl.constexpr = S.tile.BLOCK_R
    LAG: tl.constexpr = S.tile.LAG
    wire: tl.constexpr = tl.float8e4nv if S.FP8 else x_ptr.dtype.element_ty
    num_blocks: tl.constexpr = (S.T + BLOCK_T - 1) // BLOCK_T
    # A step sends a block, and copies one of each peer.
    steps_end: tl.constexpr = 1 + (num_blocks + LAG) * W
    clears: tl.constexpr = S.CLEAR or weights_ptr is not None
    num_tasks: tl.constexpr = steps_end + ((S.R + BLOCK_R - 1) // BLOCK_R if clears else 0)
    begun = 0
    task = next_task(launch)
    while task < num_tasks:
        step = (task - 1) // W
        index = (task - 1) % W
        if task == 0:
            announce(launch, HEAP)
        elif task >= steps_end:
            began = stamp(HEAP)
            if S.CLEAR:
                clear_padding(out_ptr, row_slot_ptr, (task - steps_end) * BLOCK_R, S)
            if weights_ptr is not None:
                clear_weights(out_weights_ptr, row_slot_ptr, (task - steps_end) * BLOCK_R, BLOCK_R, S.R)
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
            source = peer_of(launch, (launch.rank + W - index) % W)
            alive = await_block(launch, source, block, alive, task, HEAP)
            began = stamp(HEAP)
            tokens = source.rank * S.T + block * BLOCK_T + tl.arange(0, BLOCK_T)
            mask = send_mask(ids_ptr, tokens * S.K, tokens < (source.rank + 1) * S.T, launch.rank, S.K, S.L)
            scales_ptr = data_of(launch, launch.device, tl.float32, HEAP, S.SCALES)
            received = Rows(data_of(launch, launch.device, wire, HEAP), scales_ptr)
            copy_to_rows(received, tokens, mask, slot_row_ptr, out, S)
            if weights_ptr is not None:
                arrived_ptr = data_of(launch, launch.device, weights_ptr.dtype.element_ty, HEAP, S.WEIGHTS)
                weights_to_rows(arrived_ptr, slot_row_ptr, tokens, mask, out_weights_ptr, S.K)
            trace_exchange(launch, COPY_EVENT, began, task, source.device, block, HEAP)
        task = next_task(launch)
    if end_launch(launch, HEAP):
        poison(out_ptr, S.R * S.H)
        if S.QUANTIZED:
            poison(out_scales_ptr, S.R * (S.H // GROUP))
        if weights_ptr is not None:
            poison(out_weights_ptr, S.R)
