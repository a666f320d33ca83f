"""Grouped GEMM and combine in one launch: each row of the product is stored at its source at once, and added there.

The columns are cut into CHUNKS. Every program computes its share of a chunk's tiles, counts itself, and helps with the
sums of the chunk before: the rows of a chunk have one chunk's time to travel. A row goes to slot `[token, k]` of its
source's heap; the program that counts last tells all ranks. Sums run in float32, in the order of k.

Only sums wait for other ranks, and only in programs that see all programs of this launch begun; the last to begin
always does, and so no program that has yet to begin can be what another rank waits for. So one resident program
suffices. gemm_reduce.py is the same operation with a row per rank instead of one per expert on the way.
"""

import triton
import triton.language as tl

from .chunks import all_begun, count_chunk, count_turns, first_turn, turn_product
from .protocol import (
    DONE,
    STARTED,
    announce,
    await_block_of_all,
    await_peers,
    end_launch,
    heap_rows,
    open_launch,
    publish,
)
from .tiles import locate_groups, number_tasks, tasks_until

TICKETS = tl.constexpr(8)  # of the sums of a chunk, that many words behind its count


@triton.jit
def row_addresses(
    row_slot_ptr,
    group_ptr,
    table_ptr,
    row,
    end,
    dtype: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    DATA: tl.constexpr,
    BM: tl.constexpr,
):
    """Addresses of BM rows in the heaps of the ranks that their tokens came from, or 0 for those from `end` on."""
    rows = row + tl.arange(0, BM)
    slot = tl.load(row_slot_ptr + rows, mask=rows < end, other=-1)
    travels = slot >= 0
    source = tl.load(group_ptr + tl.where(travels, slot // (T * K), 0))
    heap = tl.load(table_ptr + source)
    offset = tl.where(travels, slot % (T * K), 0).to(tl.int64) * (H * dtype.primitive_bitwidth // 8)
    return tl.where(travels, heap + DATA + offset, 0)


@triton.jit
def store_rows(total, addresses, column, dtype: tl.constexpr, H: tl.constexpr, BN: tl.constexpr):
    """Stores a tile's columns of the rows at these addresses."""
    columns = (column + tl.arange(0, BN))[None, :]
    target = tl.multiple_of(addresses.to(tl.pointer_type(dtype))[:, None] + columns, (16, 16))
    tl.store(target, total.to(dtype), mask=(addresses != 0)[:, None] & (columns < H))


@triton.jit
def clear_dropped(
    ids_ptr,
    slot_row_ptr,
    group_ptr,
    table_ptr,
    source_rank,
    first_token,
    rank,
    dtype: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    DATA: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Stores zeros at the source for those slots of ROWS tokens that should have a row here but found no place."""
    tokens = first_token + tl.arange(0, ROWS)
    base = heap_rows(table_ptr, tl.load(group_ptr + source_rank), dtype, DATA)
    for k in range(K):
        slots = (source_rank * T + tokens) * K + k
        expert = tl.load(ids_ptr + slots, mask=tokens < T, other=-1)
        dropped = (expert >= rank * L) & (expert < rank * L + L)
        dropped = dropped & (tl.load(slot_row_ptr + slots, mask=tokens < T, other=0) < 0)
        if tl.max(dropped.to(tl.int32), axis=0) > 0:
            for h in range(0, H, COLUMNS):
                columns = h + tl.arange(0, COLUMNS)[None, :]
                target = tl.multiple_of(base + (tokens * K + k).to(tl.int64)[:, None] * H + columns, (16, 16))
                tl.store(target, tl.zeros((ROWS, COLUMNS), dtype), mask=dropped[:, None] & (columns < H))


@triton.jit
def add_slots(
    received_ptr,
    ids_ptr,
    out_ptr,
    rank,
    first_token,
    first_column,
    end_column,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Adds the K rows of each of ROWS tokens, within some columns."""
    tokens = first_token + tl.arange(0, ROWS)
    for h in range(first_column, end_column, COLUMNS):
        columns = h + tl.arange(0, COLUMNS)[None, :]
        inside = columns < end_column
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in tl.static_range(K):
            expert = tl.load(ids_ptr + (rank * T + tokens) * K + k, mask=tokens < T, other=-1)
            chosen = (expert >= 0) & (expert < E)
            source = tl.multiple_of(received_ptr + (tokens * K + k).to(tl.int64)[:, None] * H + columns, (16, 16))
            total += tl.load(source, mask=chosen[:, None] & inside, other=0.0).to(tl.float32)
        target = tl.multiple_of(out_ptr + tokens.to(tl.int64)[:, None] * H + columns, (16, 16))
        tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(tokens < T)[:, None] & inside)


@triton.jit
def sum_chunk(
    received_ptr,
    ids_ptr,
    out_ptr,
    group_ptr,
    table_ptr,
    control,
    rank,
    chunk,
    alive,
    W: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    WIDTH: tl.constexpr,
    SUM_T: tl.constexpr,
    SUM_H: tl.constexpr,
    FLAGS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    DROPS: tl.constexpr,
    OPERATION: tl.constexpr,
):
    """Takes blocks of tokens until none is left, and adds their rows within the columns of a chunk."""
    if all_begun(control):
        num_blocks: tl.constexpr = (T + SUM_T - 1) // SUM_T
        block = tl.atomic_add(control + DONE + TICKETS + chunk, 1, sem="relaxed", scope="gpu")
        if block < num_blocks:
            if DROPS:  # zeros of all chunks belong to the first
                alive = await_block_of_all(
                    table_ptr, group_ptr, control, rank, 0, alive, chunk, OPERATION, FLAGS, W, D, MAX_BLOCKS
                )
            alive = await_block_of_all(
                table_ptr, group_ptr, control, rank, chunk, alive, chunk, OPERATION, FLAGS, W, D, MAX_BLOCKS
            )
        while block < num_blocks:
            end = tl.minimum((chunk + 1) * WIDTH, H)
            add_slots(
                received_ptr, ids_ptr, out_ptr, rank, block * SUM_T, chunk * WIDTH, end, T, K, H, W * L, SUM_T, SUM_H
            )
            block = tl.atomic_add(control + DONE + TICKETS + chunk, 1, sem="relaxed", scope="gpu")
    return alive


@triton.jit
def gemm_combine(
    h_desc,
    b_desc,
    ids_ptr,
    slot_row_ptr,
    row_slot_ptr,
    sizes_ptr,
    group_ptr,
    table_ptr,
    after_ptr,
    out_ptr,
    W: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    DATA: tl.constexpr,
    FLAGS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    CLEAR_T: tl.constexpr,
    SUM_T: tl.constexpr,
    SUM_H: tl.constexpr,
    FLATTEN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    DROPS: tl.constexpr,
    OPERATION: tl.constexpr,
):
    """`h [R, F]` and matrices `[L, F, H]` (`[L, H, F]` if TRANSPOSED) to `out [T, H]`.

    `ids`, `slot_row [W, T, K]`, `row_slot [R]` and `sizes [L]` are those of the handle. CHUNKS divides the number of
    column tiles. DROPS: slots may have found no row.
    """
    rank, me, control, alive = open_launch(table_ptr, group_ptr, OPERATION, W, D)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    width: tl.constexpr = (H + BN - 1) // BN // CHUNKS * BN
    token_blocks: tl.constexpr = (T + CLEAR_T - 1) // CLEAR_T
    received_ptr = heap_rows(table_ptr, me, dtype, DATA)
    if tl.atomic_add(control + STARTED, 1, sem="relaxed", scope="gpu") == 0:
        announce(table_ptr, group_ptr, control, me, rank, W, D)
    alive = await_peers(table_ptr, group_ptr, control, rank, alive, 0, OPERATION, W, D)
    if DROPS:  # known when compiling, unlike what follows
        if alive != 0:
            for index in range(tl.program_id(0), W * token_blocks, tl.num_programs(0)):
                clear_dropped(
                    ids_ptr,
                    slot_row_ptr,
                    group_ptr,
                    table_ptr,
                    index // token_blocks,
                    index % token_blocks * CLEAR_T,
                    rank,
                    dtype,
                    T,
                    K,
                    H,
                    L,
                    DATA,
                    CLEAR_T,
                    SUM_H,
                )
    starts, rows = locate_groups(sizes_ptr, R, L, BLOCK_L)
    group_ends = number_tasks(starts, rows, width, BM, BN, 0, BN)
    # After a failure nobody may be there to receive: no more stores, whatever the sums then are.
    num_tiles = tasks_until(tl.max(group_ends, axis=0)) * alive
    step = 0
    while step < 2 * CHUNKS:  # in a loop with `for` the compiler would not flatten the one over turns
        # The products of every chunk, each with sums of the chunk before; then all sums that are left.
        chunk = tl.minimum(step, CHUNKS)
        first = first_turn(chunk, num_tiles)
        count = count_turns(first, first_turn(tl.minimum(chunk + 1, CHUNKS), num_tiles))
        if count > 0:
            for i in tl.range(0, count, flatten=FLATTEN):
                total, row, end, column = turn_product(
                    h_desc,
                    b_desc,
                    sizes_ptr,
                    group_ends,
                    first + i,
                    chunk,
                    num_tiles,
                    F,
                    H,
                    R,
                    width,
                    BM,
                    BN,
                    BK,
                    GROUP_M,
                    TRANSPOSED,
                )
                # Addresses that live beside the sums would spill registers in the flat loop.
                addresses = row_addresses(row_slot_ptr, group_ptr, table_ptr, row, end, dtype, T, K, H, DATA, BM)
                store_rows(total, addresses, column, dtype, H, BN)
        if step < CHUNKS:
            if count_chunk(control, chunk):
                if alive != 0:
                    for peer_rank in range(W):
                        peer = tl.load(group_ptr + peer_rank)
                        publish(table_ptr, control, me, peer, chunk, FLAGS, D, MAX_BLOCKS)
        if step > 0:
            alive = sum_chunk(
                received_ptr,
                ids_ptr,
                out_ptr,
                group_ptr,
                table_ptr,
                control,
                rank,
                tl.where(step < CHUNKS, step - 1, step - CHUNKS),
                alive,
                W,
                D,
                T,
                K,
                H,
                L,
                width,
                SUM_T,
                SUM_H,
                FLAGS,
                MAX_BLOCKS,
                DROPS,
                OPERATION,
            )
        step += 1
    end_launch(control, group_ptr, W)
