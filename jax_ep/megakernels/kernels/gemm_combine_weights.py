"""GEMM + combine as in gemm_combine.py and the weight gradient of the same rows, in one launch.

That is the backward pass of dispatch + GEMM. While the last rows of the product travel, and while a program would have
no tile left, programs multiply tiles of the weight gradient, which need nothing of other ranks; sums that are not made
by then come last. Who had fewer tiles of the product begins with the tiles of the gradient.

Nothing in between waits, so the order of tasks is that of gemm_combine.py, and one resident program suffices.
"""

import triton
import triton.language as tl

from .chunks import place_after
from .gemm_weights import multiply_flat
from .protocol import end_launch, heap_rows, open_launch
from .scattered_rows import begin_scatter, scatter_products, sum_chunk, tell_chunk
from .tiles import locate_groups, number_tasks, tasks_until


@triton.jit
def gemm_combine_weights(
    h_desc,
    b_desc,
    lhs,
    rhs,
    ids_ptr,
    slot_row_ptr,
    row_slot_ptr,
    sizes_ptr,
    group_ptr,
    table_ptr,
    after_ptr,
    out_ptr,
    products,
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
    WEIGHT_M: tl.constexpr,
    WEIGHT_N: tl.constexpr,
    WEIGHT_R: tl.constexpr,
    WEIGHT_STAGES: tl.constexpr,
    WEIGHT_PARTS: tl.constexpr,
    OPERATION: tl.constexpr,
):
    """`h [R, F]` and matrices `[L, F, H]` (`[L, H, F]` if TRANSPOSED) to `out [T, H]`, see gemm_combine.py for these.

    And `lhs`, `rhs`, which are the tokens `[R, H]` by row and `h`, to `products`: `lhs[rows].T @ rhs[rows]` of each
    expert, in the shape of the matrices. Both are bounded descriptors with blocks of WEIGHT_R rows, and `products` is
    one of blocks `[1, WEIGHT_M, WEIGHT_N / WEIGHT_PARTS]`.
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
    # After a failure nobody may be there to receive: no more stores, whatever the results then are.
    num_tiles = tasks_until(tl.max(group_ends, axis=0)) * alive
    chunk = 0
    while chunk < CHUNKS:  # in a loop with `for` the compiler would not flatten the one over turns
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
        tell_chunk(group_ptr, table_ptr, control, me, chunk, alive, W, D, FLAGS, MAX_BLOCKS)
        if chunk > 0:
            alive = sum_chunk(
                received_ptr,
                ids_ptr,
                out_ptr,
                group_ptr,
                table_ptr,
                control,
                rank,
                chunk - 1,
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
        chunk += 1
    multiply_flat(
        lhs,
        rhs,
        products,
        starts,
        rows,
        place_after(CHUNKS * num_tiles),
        alive,
        F if TRANSPOSED else H,
        H if TRANSPOSED else F,
        L,
        BLOCK_L,
        WEIGHT_M,
        WEIGHT_N,
        WEIGHT_R,
        GROUP_M,
        True,
        WEIGHT_PARTS,
        True,
        WEIGHT_STAGES,
    )
    chunk = 0
    while chunk < CHUNKS:
        alive = sum_chunk(
            received_ptr,
            ids_ptr,
            out_ptr,
            group_ptr,
            table_ptr,
            control,
            rank,
            chunk,
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
        chunk += 1
    end_launch(control, group_ptr, W)
