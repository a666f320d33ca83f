"""Dispatch: tokens to fixed slots at their expert ranks, and from there to expert-major rows, in one launch.

Tasks: first announce; then, for each block of tokens, send it, and copy what has arrived of the block LAG steps earlier
to its rows; last, zero the padding rows. A token is read once, quantised where it travels in FP8, and stored to slot
`[source rank, token]` of every rank that has one of its experts, and to its rows here; a received token is read once
and written to each of its rows.
"""

import triton
import triton.language as tl

from .dispatch_rows import clear_padding, copy_to_rows, store_rows, store_scales
from .failures import poison
from .protocol import (
    announce,
    await_block,
    await_peers,
    end_launch,
    heap_rows,
    next_task,
    open_launch,
    publish_to_all,
)
from .quantization import GROUP, dequantize, quantize, scale_offsets
from .wanted import wanted_by, wanting_ranks


@triton.jit
def push(x_ptr, tokens, slots, wanted, values_ptr, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """Copies tokens to slots, such as those in a peer's heap."""
    for h in range(0, H, BLOCK_H):
        columns = h + tl.arange(0, BLOCK_H)[None, :]
        mask = wanted[:, None] & (columns < H)
        source = tl.multiple_of(x_ptr + tokens.to(tl.int64)[:, None] * H + columns, (16, 16))
        target = tl.multiple_of(values_ptr + slots.to(tl.int64)[:, None] * H + columns, (16, 16))
        tl.store(target, tl.load(source, mask=mask), mask=mask)


@triton.jit
def send_block(
    x_ptr,
    ids_ptr,
    slot_row_ptr,
    group_ptr,
    table_ptr,
    out_ptr,
    out_scales_ptr,
    rank,
    block,
    W: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    DATA: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FP8: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """Stores a block of this rank's tokens in the heap of every peer that wants them, and in their rows of `out`."""
    wire: tl.constexpr = tl.float8e4nv if FP8 else x_ptr.dtype.element_ty
    tokens = block * BLOCK_T + tl.arange(0, BLOCK_T)
    slots = rank * T + tokens
    ranks = wanting_ranks(ids_ptr, slots * K, tokens < T, W, L, K)
    for h in range(0, H, BLOCK_H):
        columns = h + tl.arange(0, BLOCK_H)[None, :]
        inside = columns < H
        source = tl.multiple_of(x_ptr + tokens.to(tl.int64)[:, None] * H + columns, (16, 16))
        values = tl.load(source, mask=(ranks != 0)[:, None] & inside, other=0.0)
        if FP8:
            values, scales = quantize(values, BLOCK_T, BLOCK_H)
            offsets, exists = scale_offsets(slots, h, H, BLOCK_H)
        for step in tl.static_range(1, W):
            peer_rank = (rank + step) % W
            peer = tl.load(group_ptr + peer_rank)
            wanted = ((ranks >> peer_rank.to(tl.int64)) & 1 > 0)[:, None]
            row_ptr = heap_rows(table_ptr, peer, wire, DATA) + slots.to(tl.int64)[:, None] * H
            tl.store(tl.multiple_of(row_ptr + columns, (16, 16)), values, mask=wanted & inside)
            if FP8:
                tl.store(heap_rows(table_ptr, peer, tl.float32, SCALES) + offsets, scales, mask=wanted & exists)
        own = (ranks >> rank.to(tl.int64)) & 1 > 0
        if QUANTIZED:
            store_scales(scales, slot_row_ptr + slots * K, own, out_scales_ptr, h, H, K, BLOCK_H)
        elif FP8:
            values = dequantize(values, scales, BLOCK_T, BLOCK_H).to(x_ptr.dtype.element_ty)
        store_rows(values, slot_row_ptr + slots * K, own, out_ptr, columns, inside, H, K)


@triton.jit
def dispatch(
    x_ptr,
    ids_ptr,
    slot_row_ptr,
    row_slot_ptr,
    group_ptr,
    table_ptr,
    after_ptr,
    out_ptr,
    out_scales_ptr,
    W: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    DATA: tl.constexpr,
    SCALES: tl.constexpr,
    FLAGS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LAG: tl.constexpr,
    FP8: tl.constexpr,
    QUANTIZED: tl.constexpr,
    CLEAR: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """`x [T, H]` to `out [R, H]`; `ids`, `slot_row [W, T, K]` and `row_slot [R]` are those of the handle.

    With QUANTIZED, rows stay FP8 values, with scales in `out_scales [R, H / 128]`. CLEAR writes zeros where there is no
    token.
    """
    rank, me, control, alive = open_launch(table_ptr, group_ptr, LAUNCH, W, D)
    wire: tl.constexpr = tl.float8e4nv if FP8 else x_ptr.dtype.element_ty
    num_blocks: tl.constexpr = (T + BLOCK_T - 1) // BLOCK_T
    # A step sends a block, and copies one of each peer.
    steps_end: tl.constexpr = 1 + (num_blocks + LAG) * W
    num_tasks: tl.constexpr = steps_end + ((R + BLOCK_R - 1) // BLOCK_R if CLEAR else 0)
    begun = 0
    task = next_task(control)
    while task < num_tasks:
        step = (task - 1) // W
        index = (task - 1) % W
        if task == 0:
            announce(table_ptr, group_ptr, control, me, rank, LAUNCH, W, D)
        elif task >= steps_end:
            if CLEAR:
                clear_padding(out_ptr, row_slot_ptr, (task - steps_end) * BLOCK_R, H, R, BLOCK_R, BLOCK_H)
        elif index == 0:
            if step < num_blocks:
                if begun == 0:
                    alive = await_peers(table_ptr, group_ptr, control, rank, alive, task, LAUNCH, W, D)
                    begun = 1
                if alive != 0:
                    send_block(
                        x_ptr,
                        ids_ptr,
                        slot_row_ptr,
                        group_ptr,
                        table_ptr,
                        out_ptr,
                        out_scales_ptr,
                        rank,
                        step,
                        W,
                        T,
                        K,
                        H,
                        L,
                        DATA,
                        SCALES,
                        BLOCK_T,
                        BLOCK_H,
                        FP8,
                        QUANTIZED,
                    )
                    publish_to_all(table_ptr, group_ptr, control, me, rank, step, FLAGS, W, D, MAX_BLOCKS)
        elif step >= LAG:
            block = step - LAG
            source_rank = (rank + W - index) % W
            source = tl.load(group_ptr + source_rank)
            alive = await_block(
                table_ptr, control, rank, source_rank, source, block, alive, task, LAUNCH, FLAGS, D, MAX_BLOCKS
            )
            tokens = source_rank * T + block * BLOCK_T + tl.arange(0, BLOCK_T)
            wanted = wanted_by(ids_ptr, tokens * K, tokens < (source_rank + 1) * T, rank * L, L, K)
            values_ptr = heap_rows(table_ptr, me, wire, DATA)
            scales_ptr = heap_rows(table_ptr, me, tl.float32, SCALES)
            copy_to_rows(
                values_ptr,
                scales_ptr,
                tokens,
                wanted,
                slot_row_ptr,
                out_ptr,
                out_scales_ptr,
                H,
                K,
                BLOCK_T,
                BLOCK_H,
                FP8,
                QUANTIZED,
            )
        task = next_task(control)
    if end_launch(control, group_ptr, W):
        poison(out_ptr, R * H)
        if QUANTIZED:
            poison(out_scales_ptr, R * (H // GROUP))
