"""Combine: the rows of a token are summed on each expert rank, and what each rank sends is summed at the source.

Tasks: first announce; then, for each block of tokens, sum its rows for each peer and store the sums in that heap,
slot `[this rank, token]`, own tokens last; and, for the block LAG steps earlier, add what arrived, in rank order.
Sums run in float32 (float64 for float64), are rounded once to what travels, and once at the end.
"""

import triton
import triton.language as tl

from .failures import poison
from .listed_sums import sum_listed, write_list
from .protocol import announce, await_block_of_all, await_peers, end_launch, heap_rows, next_task, open_launch, publish
from .wanted import wanting_ranks


@triton.jit
def list_rows(
    list_ptr,
    slot_row_ptr,
    ids_ptr,
    block,
    peer_rank,
    rank,
    T: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHOICES: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """Lists the rows on this rank of a block of a peer's tokens, in order of k; returns how many.

    A token whose rows were all dropped still has a sum: the peer adds it up.
    """
    local = block * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, CHOICES)[None, :]
    slots = (peer_rank * T + local)[:, None] * K + k
    inside = (local < T)[:, None] & (k < K)
    expert = tl.load(ids_ptr + slots, mask=inside, other=-1)
    wanted = tl.max(((expert >= rank * L) & (expert < rank * L + L)).to(tl.int32), axis=1) > 0
    rows = tl.load(slot_row_ptr + slots, mask=inside & wanted[:, None], other=-1)
    return write_list(list_ptr, rows, rows >= 0, rank * T + local, wanted, BLOCK_T, CHOICES, LENGTH)


@triton.jit
def list_arrivals(
    list_ptr,
    ids_ptr,
    block,
    rank,
    T: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    BLOCK_T: tl.constexpr,
    RANKS: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """Lists the slots in which sums for a block of this rank's tokens arrive, in rank order; returns how many."""
    tokens = block * BLOCK_T + tl.arange(0, BLOCK_T)
    senders = wanting_ranks(ids_ptr, (rank * T + tokens) * K, tokens < T, W, L, K)[:, None]
    source_rank = tl.arange(0, RANKS)[None, :]
    sends = ((senders >> source_rank.to(tl.int64)) & 1) > 0
    slots = source_rank * T + tokens[:, None]
    return write_list(list_ptr, slots, sends, tokens, tokens < T, BLOCK_T, RANKS, LENGTH)


@triton.jit
def sum_blocks(
    y_ptr,
    ids_ptr,
    slot_row_ptr,
    group_ptr,
    table_ptr,
    out_ptr,
    lists_ptr,
    rank,
    me,
    control,
    alive,
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
    BLOCK_H: tl.constexpr,
    CHOICES: tl.constexpr,
    RANKS: tl.constexpr,
    LENGTH: tl.constexpr,
    STAGES: tl.constexpr,
    LAG: tl.constexpr,
    FP8: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Tasks of the open launch until none is left; arguments as for `combine`."""
    SUM: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    wire: tl.constexpr = tl.float8e4nv if FP8 else y_ptr.dtype.element_ty
    num_blocks: tl.constexpr = (T + BLOCK_T - 1) // BLOCK_T
    list_ptr = lists_ptr + tl.program_id(0) * 2 * LENGTH
    begun = 0
    task = next_task(control)
    while task < 1 + (num_blocks + LAG) * (W + 1):
        step = (task - 1) // (W + 1)
        index = (task - 1) % (W + 1)
        if task == 0:
            announce(table_ptr, group_ptr, control, me, rank, LAUNCH, W, D)
        elif index < W and step < num_blocks:
            block = step
            peer_rank = (rank + 1 + index) % W
            peer = tl.load(group_ptr + peer_rank)
            count = list_rows(
                list_ptr, slot_row_ptr, ids_ptr, block, peer_rank, rank, T, K, L, BLOCK_T, CHOICES, LENGTH
            )
            if begun == 0:
                alive = await_peers(table_ptr, group_ptr, control, rank, alive, task, LAUNCH, W, D)
                begun = 1
            if alive != 0:
                values_ptr = heap_rows(table_ptr, peer, wire, DATA)
                scales_ptr = heap_rows(table_ptr, peer, tl.float32, SCALES)
                sum_listed(list_ptr, count, y_ptr, scales_ptr, values_ptr, scales_ptr, H, BLOCK_H, LENGTH, STAGES, SUM)
                publish(table_ptr, control, me, peer, block, FLAGS, D, MAX_BLOCKS)
        elif index == W and step >= LAG:
            block = step - LAG
            count = list_arrivals(list_ptr, ids_ptr, block, rank, T, W, K, L, BLOCK_T, RANKS, LENGTH)
            alive = await_block_of_all(
                table_ptr, group_ptr, control, rank, block, alive, task, LAUNCH, FLAGS, W, D, MAX_BLOCKS
            )
            values_ptr = heap_rows(table_ptr, me, wire, DATA)
            scales_ptr = heap_rows(table_ptr, me, tl.float32, SCALES)
            sum_listed(list_ptr, count, values_ptr, scales_ptr, out_ptr, scales_ptr, H, BLOCK_H, LENGTH, STAGES, SUM)
        task = next_task(control)


@triton.jit
def combine(
    y_ptr,
    ids_ptr,
    slot_row_ptr,
    group_ptr,
    table_ptr,
    after_ptr,
    out_ptr,
    lists_ptr,
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
    BLOCK_H: tl.constexpr,
    CHOICES: tl.constexpr,
    RANKS: tl.constexpr,
    LENGTH: tl.constexpr,
    STAGES: tl.constexpr,
    LAG: tl.constexpr,
    FP8: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """`y [R, H]` to `out [T, H]`; `ids` and `slot_row [W, T, K]` are those of the handle, `lists` is scratch."""
    rank, me, control, alive = open_launch(table_ptr, group_ptr, LAUNCH, W, D)
    sum_blocks(
        y_ptr,
        ids_ptr,
        slot_row_ptr,
        group_ptr,
        table_ptr,
        out_ptr,
        lists_ptr,
        rank,
        me,
        control,
        alive,
        W,
        D,
        T,
        K,
        H,
        L,
        DATA,
        SCALES,
        FLAGS,
        MAX_BLOCKS,
        BLOCK_T,
        BLOCK_H,
        CHOICES,
        RANKS,
        LENGTH,
        STAGES,
        LAG,
        FP8,
        LAUNCH,
    )
    if end_launch(control, group_ptr, W):
        poison(out_ptr, T * H)
