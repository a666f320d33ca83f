"""Combine: the rows of a token are summed on each expert rank, and what each rank sends is summed at the source.

Tasks: first announce; then, for each block of tokens, sum its rows for each peer and store the sums in that heap,
slot `[this rank, token]`, own tokens last; and, for the block LAG steps earlier, add what arrived, in rank order.
Sums run in float32 (float64 for float64), are rounded once to what travels, and once at the end.
"""

import triton
import triton.language as tl

from .protocol import announce, await_block_of_all, await_peers, end_launch, heap_rows, next_task, open_launch, publish
from .quantization import dequantize, quantize, scale_offsets
from .wanted import wanted_by, wanting_ranks


@triton.jit
def send_sums(
    y_ptr,
    slot_row_ptr,
    tokens,
    wanted,
    slots,
    values_ptr,
    scales_ptr,
    first_column,
    end_column,
    H: tl.constexpr,
    K: tl.constexpr,
    TILE_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FP8: tl.constexpr,
    SUM: tl.constexpr,
):
    """Sums the rows of each token, in order of k, within some columns, and stores the sums in the slots."""
    for h in range(first_column, end_column, BLOCK_H):
        columns = h + tl.arange(0, BLOCK_H)[None, :]
        inside = columns < end_column
        total = tl.zeros((TILE_T, BLOCK_H), SUM)
        for k in tl.static_range(K):
            row = tl.load(slot_row_ptr + tokens * K + k, mask=wanted, other=-1)
            source = tl.multiple_of(y_ptr + row.to(tl.int64)[:, None] * H + columns, (16, 16))
            total += tl.load(source, mask=(row >= 0)[:, None] & inside, other=0.0).to(SUM)
        if FP8:
            values, scales = quantize(total, TILE_T, BLOCK_H)
            offsets, exists = scale_offsets(slots, h, H, BLOCK_H)
            tl.store(scales_ptr + offsets, scales, mask=wanted[:, None] & exists)
        else:
            values = total.to(y_ptr.dtype.element_ty)
        target = tl.multiple_of(values_ptr + slots.to(tl.int64)[:, None] * H + columns, (16, 16))
        tl.store(target, values, mask=wanted[:, None] & inside)


@triton.jit
def add_received(
    values_ptr,
    scales_ptr,
    ids_ptr,
    out_ptr,
    tokens,
    rank,
    first_column,
    end_column,
    T: tl.constexpr,
    W: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    TILE_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FP8: tl.constexpr,
    SUM: tl.constexpr,
):
    """Adds what the ranks have sent for these tokens, within some columns, in rank order."""
    ranks = wanting_ranks(ids_ptr, (rank * T + tokens) * K, tokens < T, W, L, K)
    for h in range(first_column, end_column, BLOCK_H):
        columns = h + tl.arange(0, BLOCK_H)[None, :]
        inside = columns < end_column
        total = tl.zeros((TILE_T, BLOCK_H), SUM)
        for source_rank in tl.static_range(W):
            wanted = ((ranks >> source_rank) & 1 > 0)[:, None]
            slots = source_rank * T + tokens
            source = tl.multiple_of(values_ptr + slots.to(tl.int64)[:, None] * H + columns, (16, 16))
            values = tl.load(source, mask=wanted & inside, other=0.0)
            if FP8:
                offsets, exists = scale_offsets(slots, h, H, BLOCK_H)
                scales = tl.load(scales_ptr + offsets, mask=wanted & exists, other=0.0)
                total += dequantize(values, scales, TILE_T, BLOCK_H)
            else:
                total += values.to(SUM)
        target = tl.multiple_of(out_ptr + tokens.to(tl.int64)[:, None] * H + columns, (16, 16))
        tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(tokens < T)[:, None] & inside)


@triton.jit
def combine(
    y_ptr,
    ids_ptr,
    slot_row_ptr,
    group_ptr,
    table_ptr,
    after_ptr,
    out_ptr,
    W: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    DATA: tl.constexpr,
    SCALES: tl.constexpr,
    FLAGS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILE_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    LAG: tl.constexpr,
    FP8: tl.constexpr,
    OPERATION: tl.constexpr,
):
    """`y [R, H]` to `out [T, H]`; `ids` and `slot_row [W, T, K]` are those of the handle."""
    rank, me, control, alive = open_launch(table_ptr, group_ptr, OPERATION, W, D)
    SUM: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    wire: tl.constexpr = tl.float8e4nv if FP8 else y_ptr.dtype.element_ty
    num_blocks: tl.constexpr = (T + BLOCK_T - 1) // BLOCK_T
    begun = 0
    task = next_task(control)
    while task < 1 + (num_blocks + LAG) * (W + 1):
        step = (task - 1) // (W + 1)
        index = (task - 1) % (W + 1)
        if task == 0:
            announce(table_ptr, group_ptr, control, me, rank, W, D)
        elif index < W and step < num_blocks:
            block = step
            peer_rank = (rank + 1 + index) % W
            peer = tl.load(group_ptr + peer_rank)
            if begun == 0:
                alive = await_peers(table_ptr, group_ptr, control, rank, alive, task, OPERATION, W, D)
                begun = 1
            if alive != 0:
                values_ptr = heap_rows(table_ptr, peer, wire, DATA)
                scales_ptr = heap_rows(table_ptr, peer, tl.float32, SCALES)
                for t in range(0, BLOCK_T, TILE_T):
                    local = block * BLOCK_T + t + tl.arange(0, TILE_T)
                    tokens = peer_rank * T + local
                    wanted = wanted_by(ids_ptr, tokens * K, local < T, rank * L, L, K)
                    slots = rank * T + local
                    send_sums(
                        y_ptr,
                        slot_row_ptr,
                        tokens,
                        wanted,
                        slots,
                        values_ptr,
                        scales_ptr,
                        0,
                        H,
                        H,
                        K,
                        TILE_T,
                        BLOCK_H,
                        FP8,
                        SUM,
                    )
                publish(table_ptr, control, me, peer, block, FLAGS, D, MAX_BLOCKS)
        elif index == W and step >= LAG:
            block = step - LAG
            alive = await_block_of_all(
                table_ptr, group_ptr, control, rank, block, alive, task, OPERATION, FLAGS, W, D, MAX_BLOCKS
            )
            values_ptr = heap_rows(table_ptr, me, wire, DATA)
            scales_ptr = heap_rows(table_ptr, me, tl.float32, SCALES)
            for t in range(0, BLOCK_T, TILE_T):
                tokens = block * BLOCK_T + t + tl.arange(0, TILE_T)
                add_received(
                    values_ptr,
                    scales_ptr,
                    ids_ptr,
                    out_ptr,
                    tokens,
                    rank,
                    0,
                    H,
                    T,
                    W,
                    H,
                    K,
                    L,
                    TILE_T,
                    BLOCK_H,
                    FP8,
                    SUM,
                )
        task = next_task(control)
    end_launch(control, group_ptr, W)
