"""Combine: the rows of a token are summed on each expert rank, and what each rank sends is summed at the source.

Tasks, in order: (0) announce; (1) sum the rows of a block of one peer's tokens and store the sums in that peer's heap,
slot `[this rank, token]`, interleaved over peers, own tokens last; (2) per block, add what the ranks sent, in rank
order. Sums run in float32 and are rounded once to the dtype that travels, and once at the end.
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
def combine(
    y_ptr,
    ids_ptr,
    slot_row_ptr,
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
    DATA: tl.constexpr,
    FLAGS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILE_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    OPERATION: tl.constexpr,
):
    """`y [R, H]` to `out [T, H]`; `ids` and `slot_row [W, T, K]` are those of the handle."""
    rank = tl.load(group_ptr + W)
    me = tl.load(group_ptr + rank)
    control = control_words(table_ptr, me)
    received = heap_rows(table_ptr, me, y_ptr.dtype.element_ty, DATA)
    alive = 1 - tl.load(control + FAILED)
    num_blocks: tl.constexpr = (T + BLOCK_T - 1) // BLOCK_T
    send_end: tl.constexpr = 1 + W * num_blocks
    task = next_task(control)
    while task < send_end + num_blocks:
        if task == 0:
            announce(table_ptr, group_ptr, control, me, rank, W, D)
        elif task < send_end:
            block = (task - 1) // W
            peer_rank = (rank + 1 + (task - 1) % W) % W
            peer = tl.load(group_ptr + peer_rank)
            if peer_rank != rank:
                alive = await_ready(table_ptr, control, me, rank, peer_rank, peer, alive, task, OPERATION, D)
            if alive != 0:
                target = heap_rows(table_ptr, peer, y_ptr.dtype.element_ty, DATA)
                for t in range(0, BLOCK_T, TILE_T):
                    tokens = block * BLOCK_T + t + tl.arange(0, TILE_T)
                    slots = (peer_rank * T + tokens) * K
                    wanted = wanted_by(ids_ptr, slots, tokens < T, rank * L, L, K)
                    target_rows = (rank * T + tokens).to(tl.int64)[:, None] * H
                    for h in range(0, H, BLOCK_H):
                        columns = h + tl.arange(0, BLOCK_H)[None, :]
                        inside = columns < H
                        total = tl.zeros((TILE_T, BLOCK_H), tl.float32)
                        for k in tl.static_range(K):
                            row = tl.load(slot_row_ptr + slots + k, mask=wanted, other=-1)
                            pointers = tl.multiple_of(y_ptr + row.to(tl.int64)[:, None] * H + columns, (16, 16))
                            values = tl.load(pointers, mask=(row >= 0)[:, None] & inside, other=0.0)
                            total += values.to(tl.float32)
                        pointers = tl.multiple_of(target + target_rows + columns, (16, 16))
                        tl.store(pointers, total.to(y_ptr.dtype.element_ty), mask=wanted[:, None] & inside)
                publish(table_ptr, control, me, peer, block, FLAGS, D, MAX_BLOCKS)
        else:
            block = task - send_end
            for source_rank in range(W):
                source = tl.load(group_ptr + source_rank)
                alive = await_block(
                    table_ptr, control, rank, source_rank, source, block, alive, task, OPERATION, FLAGS, D, MAX_BLOCKS
                )
            for t in range(0, BLOCK_T, TILE_T):
                tokens = block * BLOCK_T + t + tl.arange(0, TILE_T)
                for h in range(0, H, BLOCK_H):
                    columns = h + tl.arange(0, BLOCK_H)[None, :]
                    inside = columns < H
                    total = tl.zeros((TILE_T, BLOCK_H), tl.float32)
                    for source_rank in range(W):
                        wanted = wanted_by(ids_ptr, (rank * T + tokens) * K, tokens < T, source_rank * L, L, K)
                        rows = (source_rank * T + tokens).to(tl.int64)[:, None] * H
                        pointers = tl.multiple_of(received + rows + columns, (16, 16))
                        total += tl.load(pointers, mask=wanted[:, None] & inside, other=0.0).to(tl.float32)
                    out = tl.multiple_of(out_ptr + tokens.to(tl.int64)[:, None] * H + columns, (16, 16))
                    tl.store(out, total.to(y_ptr.dtype.element_ty), mask=(tokens < T)[:, None] & inside)
        task = next_task(control)
    end_launch(control, group_ptr, W)
