"""Rows of a grouped GEMM that travel to their sources one by one, chunk by chunk of columns, and their sums there.

What gemm_combine.py and gemm_combine_weights.py have in common; the former tells the protocol.
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
    heap_rows,
    publish,
)

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
def begin_scatter(
    ids_ptr,
    slot_row_ptr,
    group_ptr,
    table_ptr,
    control,
    me,
    rank,
    alive,
    dtype: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    DATA: tl.constexpr,
    CLEAR_T: tl.constexpr,
    SUM_H: tl.constexpr,
    DROPS: tl.constexpr,
    OPERATION: tl.constexpr,
):
    """Waits until rows may be stored at all ranks, and stores zeros for those that have no place here.

    Returns:
      Whether the launch is alive.
    """
    token_blocks: tl.constexpr = (T + CLEAR_T - 1) // CLEAR_T
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
    return alive


@triton.jit
def scatter_products(
    h_desc,
    b_desc,
    row_slot_ptr,
    sizes_ptr,
    group_ptr,
    table_ptr,
    group_ends,
    chunk,
    num_tiles,
    dtype: tl.constexpr,
    CHUNKS: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    DATA: tl.constexpr,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    FLATTEN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """This program's tiles of a chunk, which has `num_tiles`, stored at the sources of their rows."""
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
                WIDTH,
                BM,
                BN,
                BK,
                GROUP_M,
                TRANSPOSED,
            )
            # Addresses that live beside the sums would spill registers in the flat loop.
            addresses = row_addresses(row_slot_ptr, group_ptr, table_ptr, row, end, dtype, T, K, H, DATA, BM)
            store_rows(total, addresses, column, dtype, H, BN)


@triton.jit
def tell_chunk(
    group_ptr,
    table_ptr,
    control,
    me,
    chunk,
    alive,
    W: tl.constexpr,
    D: tl.constexpr,
    FLAGS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    """Counts this program's tiles of a chunk as stored; the program that counts last tells all ranks."""
    if count_chunk(control, chunk):
        if alive != 0:
            for peer_rank in range(W):
                peer = tl.load(group_ptr + peer_rank)
                publish(table_ptr, control, me, peer, chunk, FLAGS, D, MAX_BLOCKS)


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
