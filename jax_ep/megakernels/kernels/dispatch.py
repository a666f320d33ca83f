"""Dispatch: tokens to fixed slots at their expert ranks, and from there to expert-major rows, in one launch.

Tasks, in order: (0) announce; (1) push blocks of tokens to peers, interleaved over peers; (2) zero the padding rows;
(3) copy this rank's own tokens to their rows; (4) copy what arrived to its rows, block by block. A token travels once
per rank, to slot `[source rank, token]`; a received token is read once and written to each of its rows.
"""

import triton
import triton.language as tl

from .protocol import (
    FAILED,
    announce,
    await_block,
    await_ready,
    control_words,
    end_launch,
    heap_rows,
    next_task,
    publish,
    wanted_by,
)


@triton.jit
def copy_to_rows(
    source,
    out_ptr,
    slot_row_ptr,
    slots,
    offsets,
    wanted,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Copies tokens at `source + offsets` to each of their rows of `out`."""
    for h in range(0, H, BLOCK_H):
        columns = h + tl.arange(0, BLOCK_H)[None, :]
        inside = columns < H
        pointers = tl.multiple_of(source + offsets[:, None] + columns, (16, 16))
        values = tl.load(pointers, mask=wanted[:, None] & inside)
        for k in tl.static_range(K):
            row = tl.load(slot_row_ptr + slots + k, mask=wanted, other=-1)
            target = out_ptr + row.to(tl.int64)[:, None] * H + columns
            tl.store(tl.multiple_of(target, (16, 16)), values, mask=(row >= 0)[:, None] & inside)


@triton.jit
def dispatch(
    x_ptr,
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
    FLAGS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TO_ROWS: tl.constexpr,
    OPERATION: tl.constexpr,
):
    """`x [T, H]` to `out [R, H]`; `ids`, `slot_row [W, T, K]` and `row_slot [R]` are those of the handle.

    Without `TO_ROWS` the launch ends when all tokens have arrived in the heap, and `out` is not written.
    """
    rank = tl.load(group_ptr + W)
    me = tl.load(group_ptr + rank)
    control = control_words(table_ptr, me)
    received = heap_rows(table_ptr, me, x_ptr.dtype.element_ty, DATA)
    alive = 1 - tl.load(control + FAILED)
    num_blocks: tl.constexpr = (T + BLOCK_T - 1) // BLOCK_T
    push_end: tl.constexpr = 1 + (W - 1) * num_blocks
    zero_end: tl.constexpr = push_end + ((R + BLOCK_R - 1) // BLOCK_R if TO_ROWS else 0)
    own_end: tl.constexpr = zero_end + (num_blocks if TO_ROWS else 0)
    task = next_task(control)
    while task < own_end + (W - 1) * num_blocks:
        if task == 0:
            announce(table_ptr, group_ptr, control, me, rank, W, D)
        elif task < push_end:
            block = (task - 1) // (W - 1 if W > 1 else 1)
            peer_rank = (rank + 1 + (task - 1) % (W - 1 if W > 1 else 1)) % W
            peer = tl.load(group_ptr + peer_rank)
            alive = await_ready(table_ptr, control, me, rank, peer_rank, peer, alive, task, OPERATION, D)
            if alive != 0:
                tokens = block * BLOCK_T + tl.arange(0, BLOCK_T)
                wanted = wanted_by(ids_ptr, (rank * T + tokens) * K, tokens < T, peer_rank * L, L, K)[:, None]
                target = heap_rows(table_ptr, peer, x_ptr.dtype.element_ty, DATA)
                source_rows = tokens.to(tl.int64)[:, None] * H
                target_rows = (rank * T + tokens).to(tl.int64)[:, None] * H
                for h in range(0, H, BLOCK_H):
                    columns = h + tl.arange(0, BLOCK_H)[None, :]
                    mask = wanted & (columns < H)
                    values = tl.load(tl.multiple_of(x_ptr + source_rows + columns, (16, 16)), mask=mask)
                    tl.store(tl.multiple_of(target + target_rows + columns, (16, 16)), values, mask=mask)
                publish(table_ptr, control, me, peer, block, FLAGS, D, MAX_BLOCKS)
        elif task < zero_end:
            rows = (task - push_end) * BLOCK_R + tl.arange(0, BLOCK_R)
            empty = (tl.load(row_slot_ptr + rows, mask=rows < R, other=0) < 0)[:, None]
            for h in range(0, H, BLOCK_H):
                columns = h + tl.arange(0, BLOCK_H)[None, :]
                zeros = tl.zeros((BLOCK_R, BLOCK_H), x_ptr.dtype.element_ty)
                target = out_ptr + rows.to(tl.int64)[:, None] * H + columns
                tl.store(tl.multiple_of(target, (16, 16)), zeros, mask=empty & (columns < H))
        else:
            # Own tokens come first, then blocks in the order in which peers push them.
            index = task - zero_end
            step = 0
            block = index
            if task >= own_end:
                index = task - own_end
                step = 1 + index % (W - 1 if W > 1 else 1)
                block = index // (W - 1 if W > 1 else 1)
            source_rank = (rank + W - step) % W
            source = tl.load(group_ptr + source_rank)
            tokens = block * BLOCK_T + tl.arange(0, BLOCK_T)
            slots = (source_rank * T + tokens) * K
            wanted = wanted_by(ids_ptr, slots, tokens < T, rank * L, L, K)
            if step == 0:
                copy_to_rows(x_ptr, out_ptr, slot_row_ptr, slots, tokens.to(tl.int64) * H, wanted, H, K, BLOCK_H)
            else:
                alive = await_block(
                    table_ptr, control, rank, source_rank, source, block, alive, task, OPERATION, FLAGS, D, MAX_BLOCKS
                )
                if TO_ROWS:
                    rows = (source_rank * T + tokens).to(tl.int64) * H
                    copy_to_rows(received, out_ptr, slot_row_ptr, slots, rows, wanted, H, K, BLOCK_H)
        task = next_task(control)
    end_launch(control, group_ptr, W)
