"""Grouped GEMM and combine in one launch: each row of the product is stored at its source at once, and added there.

The columns are cut into CHUNKS. Every program computes its share of a chunk's tiles, counts itself, and helps with the
sums of the chunk before: the rows of a chunk have one chunk's time to travel. On GPUs one chunk is best (tuning.py). A
row goes to slot `[token, k]` of its source's heap; the program that counts last tells all ranks. Sums run in float32,
in the order of k.

Only sums wait for other ranks, and only in programs that see all programs of this launch begun; the last to begin
always does, and so no program that has yet to begin can be what another rank waits for. So one resident program
suffices. The parts are in scattered_rows.py. gemm_reduce.py is the same operation with a row per rank instead of one
per expert on the way.
"""

import triton
import triton.language as tl

from .protocol import end_launch, heap_rows, open_launch
from .scattered_rows import begin_scatter, scatter_products, sum_chunk, tell_chunk
from .tiles import locate_groups, number_tasks, tasks_until


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
    received_ptr = heap_rows(table_ptr, me, dtype, DATA)
    alive = begin_scatter(
        ids_ptr,
        slot_row_ptr,
        group_ptr,
        table_ptr,
        control,
        me,
        rank,
        alive,
        dtype,
        W,
        D,
        T,
        K,
        H,
        L,
        DATA,
        CLEAR_T,
        SUM_H,
        DROPS,
        OPERATION,
    )
    starts, rows = locate_groups(sizes_ptr, R, L, BLOCK_L)
    group_ends = number_tasks(starts, rows, width, BM, BN, 0, BN)
    # After a failure nobody may be there to receive: no more stores, whatever the sums then are.
    num_tiles = tasks_until(tl.max(group_ends, axis=0)) * alive
    step = 0
    while step < 2 * CHUNKS:  # in a loop with `for` the compiler would not flatten the one over turns
        # The products of every chunk, each with sums of the chunk before; then all sums that are left.
        chunk = tl.minimum(step, CHUNKS)
        scatter_products(
            h_desc,
            b_desc,
            row_slot_ptr,
            sizes_ptr,
            group_ptr,
            table_ptr,
            group_ends,
            chunk,
            num_tiles,
            dtype,
            CHUNKS,
            T,
            K,
            F,
            H,
            R,
            DATA,
            width,
            BM,
            BN,
            BK,
            GROUP_M,
            FLATTEN,
            TRANSPOSED,
        )
        if step < CHUNKS:
            tell_chunk(group_ptr, table_ptr, control, me, chunk, alive, W, D, FLAGS, MAX_BLOCKS)
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
