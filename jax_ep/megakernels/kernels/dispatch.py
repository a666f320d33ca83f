"""Dispatch: tokens to fixed slots at their expert ranks, and from there to expert-major rows, in one launch.

Tasks: first announce; then, for each block of tokens, push it to every peer, copy what has arrived of the block LAG
steps earlier to its rows, and copy this rank's own tokens; last, zero the padding rows. A token travels once per rank,
to slot `[source rank, token]`; a received token is read once and written to each of its rows.
"""

import triton
import triton.language as tl

from .protocol import (
    announce,
    await_block,
    await_ready,
    end_launch,
    heap_rows,
    next_task,
    open_launch,
    publish,
    wanted_by,
)
from .quantization import GROUP, dequantize, scale_offsets


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
def push_scales(x_scales_ptr, tokens, slots, wanted, scales_ptr, H: tl.constexpr, BLOCK_G: tl.constexpr):
    """Copies the scales of quantised tokens to their slots in a peer's heap."""
    groups = tl.arange(0, BLOCK_G)[None, :]
    mask = wanted[:, None] & (groups < H // GROUP)
    scales = tl.load(x_scales_ptr + tokens.to(tl.int64)[:, None] * (H // GROUP) + groups, mask=mask)
    tl.store(scales_ptr + slots.to(tl.int64)[:, None] * (H // GROUP) + groups, scales, mask=mask)


@triton.jit
def copy_to_rows(
    values_ptr,
    scales_ptr,
    sources,
    wanted,
    slot_row_ptr,
    slots,
    out_ptr,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FP8: tl.constexpr,
):
    """Copies tokens, this rank's own or received ones, to each of their rows of `out`."""
    for h in range(0, H, BLOCK_H):
        columns = h + tl.arange(0, BLOCK_H)[None, :]
        inside = columns < H
        source = tl.multiple_of(values_ptr + sources.to(tl.int64)[:, None] * H + columns, (16, 16))
        values = tl.load(source, mask=wanted[:, None] & inside, other=0.0)
        if FP8:
            offsets, exists = scale_offsets(sources, h, H, BLOCK_H)
            scales = tl.load(scales_ptr + offsets, mask=wanted[:, None] & exists, other=0.0)
            values = dequantize(values, scales, BLOCK_T, BLOCK_H).to(out_ptr.dtype.element_ty)
        for k in tl.static_range(K):
            row = tl.load(slot_row_ptr + slots + k, mask=wanted, other=-1)
            target = tl.multiple_of(out_ptr + row.to(tl.int64)[:, None] * H + columns, (16, 16))
            tl.store(target, values, mask=(row >= 0)[:, None] & inside)


@triton.jit
def clear_padding(
    out_ptr, row_slot_ptr, first, H: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Zeroes those of the rows from `first` on that belong to no slot."""
    rows = first + tl.arange(0, ROWS)
    empty = (tl.load(row_slot_ptr + rows, mask=rows < R, other=0) < 0)[:, None]
    zeros = tl.zeros((ROWS, BLOCK_H), out_ptr.dtype.element_ty)
    for h in range(0, H, BLOCK_H):
        columns = h + tl.arange(0, BLOCK_H)[None, :]
        target = tl.multiple_of(out_ptr + rows.to(tl.int64)[:, None] * H + columns, (16, 16))
        tl.store(target, zeros, mask=empty & (columns < H))


@triton.jit
def dispatch(
    x_ptr,
    x_scales_ptr,
    ids_ptr,
    slot_row_ptr,
    row_slot_ptr,
    group_ptr,
    table_ptr,
    checked_ptr,
    out_ptr,
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
    PUSH_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LAG: tl.constexpr,
    FP8: tl.constexpr,
    TO_ROWS: tl.constexpr,
    OPERATION: tl.constexpr,
):
    """`x [T, H]` to `out [R, H]`; `ids`, `slot_row [W, T, K]` and `row_slot [R]` are those of the handle.

    With `FP8`, x is quantised already, `x_scales [T, H // 128]` are its scales, and `out` gets what they stand for.
    Without `TO_ROWS` the launch ends when all tokens have arrived in the heap, and `out` is not written.
    """
    rank, me, control, alive = open_launch(table_ptr, group_ptr, OPERATION, W, D)
    wire: tl.constexpr = x_ptr.dtype.element_ty
    num_blocks: tl.constexpr = (T + BLOCK_T - 1) // BLOCK_T
    step_tasks: tl.constexpr = 2 * (W - 1) + (1 if TO_ROWS else 0)
    steps_end: tl.constexpr = 1 + (num_blocks + LAG) * step_tasks
    task = next_task(control)
    while task < steps_end + ((R + BLOCK_R - 1) // BLOCK_R if TO_ROWS else 0):
        step = (task - 1) // (step_tasks if step_tasks > 0 else 1)
        index = (task - 1) % (step_tasks if step_tasks > 0 else 1)
        if task == 0:
            announce(table_ptr, group_ptr, control, me, rank, W, D)
        elif task >= steps_end:
            clear_padding(out_ptr, row_slot_ptr, (task - steps_end) * BLOCK_R, H, R, BLOCK_R, BLOCK_H)
        elif index < W - 1:
            if step < num_blocks:
                peer_rank = (rank + 1 + index) % W
                peer = tl.load(group_ptr + peer_rank)
                alive = await_ready(table_ptr, control, me, rank, peer_rank, peer, alive, task, OPERATION, D)
                if alive != 0:
                    tokens = step * BLOCK_T + tl.arange(0, BLOCK_T)
                    wanted = wanted_by(ids_ptr, (rank * T + tokens) * K, tokens < T, peer_rank * L, L, K)
                    slots = rank * T + tokens
                    push(x_ptr, tokens, slots, wanted, heap_rows(table_ptr, peer, wire, DATA), H, PUSH_H)
                    if FP8:
                        scales_ptr = heap_rows(table_ptr, peer, tl.float32, SCALES)
                        push_scales(x_scales_ptr, tokens, slots, wanted, scales_ptr, H, BLOCK_G)
                    publish(table_ptr, control, me, peer, step, FLAGS, D, MAX_BLOCKS)
        elif index < 2 * (W - 1):
            # In the order in which peers push: this rank is the last of the peer after it, and so on.
            block = step - LAG
            if block >= 0:
                source_rank = (rank + W - 1 - (index - (W - 1))) % W
                source = tl.load(group_ptr + source_rank)
                alive = await_block(
                    table_ptr, control, rank, source_rank, source, block, alive, task, OPERATION, FLAGS, D, MAX_BLOCKS
                )
                if TO_ROWS:
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
                        tokens * K,
                        out_ptr,
                        H,
                        K,
                        BLOCK_T,
                        BLOCK_H,
                        FP8,
                    )
        elif step < num_blocks:
            tokens = step * BLOCK_T + tl.arange(0, BLOCK_T)
            slots = (rank * T + tokens) * K
            wanted = wanted_by(ids_ptr, slots, tokens < T, rank * L, L, K)
            copy_to_rows(x_ptr, x_scales_ptr, tokens, wanted, slot_row_ptr, slots, out_ptr, H, K, BLOCK_T, BLOCK_H, FP8)
        task = next_task(control)
    end_launch(control, group_ptr, W)
