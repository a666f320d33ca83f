"""Grouped GEMM: each row times the matrix of its group, by persistent programs, one tile after another.

gemm_tile.py computes a tile, tiles.py says which one.
"""

import triton
import triton.language as tl

from .gemm_tile import ZERO_ROWS, compute_tile, zero_bounded, zero_rows
from .tiles import divide_rows, find_tile, locate_groups, num_turns, number_tasks, task_of_turn, tasks_until


@triton.jit
def compute_tiles(
    lhs,
    small_lhs,
    rhs,
    small_rhs,
    sizes_ptr,
    out,
    starts,
    rows,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SM: tl.constexpr,
    SN: tl.constexpr,
    GROUP_M: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    GATHER: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    TMA_PARTS: tl.constexpr,
    FLAT: tl.constexpr,
):
    """All tiles of this program, and its share of the rows past the groups.

    With FLAT, groups have main tiles only, and the loops over tiles and over K are one: the loads of a tile begin
    before the one before it is stored. The compiler cannot join the two loops over K that main and small tiles need.
    """
    END: tl.constexpr = 0 if FLAT else SM
    group_ends = number_tasks(starts, rows, N, BM, BN, END, SN)
    last = tl.max(group_ends, axis=0)
    num_tasks = tasks_until(last)
    programs = tl.num_programs(0)
    # Where the last tasks leave half of the programs without any, each becomes two: its upper and its lower rows.
    num_split = 0
    if BM == 2 * SM and BN == SN:
        num_split = num_tasks % programs
        num_split = tl.where(2 * num_split <= programs, num_split, 0)
    turns = num_turns(num_tasks - num_split)
    used = (last >> 32).to(tl.int32)
    blocks = num_turns(tl.cdiv(M - used, BM if TMA_PARTS else ZERO_ROWS))
    done = 0
    if FLAT:
        for turn in tl.range(0, turns, flatten=True):
            task = task_of_turn(turn)
            group, row, end, column, _ = find_tile(task, group_ends, sizes_ptr, M, N, BM, BN, END, SN, GROUP_M)
            compute_tile(
                lhs, rhs, out, row, end, group, column, N, K, BM, BN, BK, TRANSPOSE, GATHER, DESCRIPTORS, TMA_PARTS
            )
    else:
        share = tl.cdiv(blocks, tl.maximum(turns, 1))
        done = tl.minimum(turns * share, blocks)
        for turn in range(turns):
            task = task_of_turn(turn)
            group, row, end, column, is_small = find_tile(task, group_ends, sizes_ptr, M, N, BM, BN, END, SN, GROUP_M)
            # These stores run while the products do.
            for block in range(turn * share, tl.minimum((turn + 1) * share, blocks)):
                zero_rows(out, used + task_of_turn(block) * ZERO_ROWS, M, N, ZERO_ROWS, BN)
            if is_small:
                compute_tile(
                    small_lhs,
                    small_rhs,
                    out,
                    row,
                    end,
                    group,
                    column,
                    N,
                    K,
                    SM,
                    SN,
                    BK,
                    TRANSPOSE,
                    GATHER,
                    DESCRIPTORS,
                    0,
                )
            else:
                compute_tile(
                    lhs, rhs, out, row, end, group, column, N, K, BM, BN, BK, TRANSPOSE, GATHER, DESCRIPTORS, TMA_PARTS
                )
    if BM == 2 * SM and BN == SN:
        half = tl.program_id(0)
        if half < 2 * num_split:
            task = num_tasks - num_split + half // 2
            group, row, end, column, _ = find_tile(task, group_ends, sizes_ptr, M, N, BM, BN, END, SN, GROUP_M)
            row += half % 2 * SM
            if row < end:
                compute_tile(
                    small_lhs,
                    small_rhs,
                    out,
                    row,
                    end,
                    group,
                    column,
                    N,
                    K,
                    SM,
                    SN,
                    BK,
                    TRANSPOSE,
                    GATHER,
                    DESCRIPTORS,
                    0,
                )
    for block in range(done, blocks):
        if TMA_PARTS:
            zero_bounded(out, used + task_of_turn(block) * BM, M, N, BM, BN // TMA_PARTS)
        else:
            zero_rows(out, used + task_of_turn(block) * ZERO_ROWS, M, N, ZERO_ROWS, BN)


@triton.jit
def grouped_gemm(
    lhs,
    small_lhs,
    rhs,
    small_rhs,
    sizes_ptr,
    out,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SM: tl.constexpr,
    SN: tl.constexpr,
    FLAT_PERCENT: tl.constexpr,
    GROUP_M: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    GATHER: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    TMA_PARTS: tl.constexpr,
):
    """`out[rows of g] = lhs[rows of g] @ rhs[g]`, zero past the groups.

    `lhs` and `rhs` are descriptors for main tiles, `small_lhs` and `small_rhs` for small ones; SM = 0: there are none.
    At most FLAT_PERCENT of all tiles may be small ones for main tiles to be used in their place (-1: never).
    With GATHER the left-hand side is read by pointers, and without DESCRIPTORS, which needs GATHER, so is the other.
    `out` is a pointer, or with TMA_PARTS, which needs main tiles only, a bounded descriptor of blocks
    `[BM, BN / TMA_PARTS]`: stores then end while the next tile is computed.
    """
    starts, rows = locate_groups(sizes_ptr, M, G, GROUPS)
    if SM == 0 or FLAT_PERCENT < 0 or FLAT_PERCENT >= 100:  # known when compiling
        flat: tl.constexpr = SM == 0 or FLAT_PERCENT >= 100
    else:
        main, small = divide_rows(rows, BM, SM)
        num_small = tl.sum(small, axis=0)
        flat = 100 * num_small <= FLAT_PERCENT * (tl.sum(main, axis=0) + num_small)
    if flat:
        compute_tiles(
            lhs,
            small_lhs,
            rhs,
            small_rhs,
            sizes_ptr,
            out,
            starts,
            rows,
            M,
            N,
            K,
            BM,
            BN,
            BK,
            SM,
            SN,
            GROUP_M,
            TRANSPOSE,
            GATHER,
            DESCRIPTORS,
            TMA_PARTS,
            True,
        )
    else:
        compute_tiles(
            lhs,
            small_lhs,
            rhs,
            small_rhs,
            sizes_ptr,
            out,
            starts,
            rows,
            M,
            N,
            K,
            BM,
            BN,
            BK,
            SM,
            SN,
            GROUP_M,
            TRANSPOSE,
            GATHER,
            DESCRIPTORS,
            TMA_PARTS,
            False,
        )
