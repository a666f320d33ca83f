"""Grouped GEMM: each row times the matrix of its group, by persistent programs, one tile after another.

gemm_tile.py computes a tile, tiles.py says which one. The loops over tiles and over K are one (`flatten`): the loads of
a tile begin before the one before it is stored.
"""

import triton
import triton.language as tl

from .gemm_tile import ZERO_ROWS, multiply, store_tile, zero_bounded, zero_rows
from .tiles import find_tile, locate_groups, num_turns, number_tasks, task_of_turn, tasks_until


@triton.jit
def grouped_gemm(
    lhs,
    rhs,
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
    GROUP_M: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    TMA_PARTS: tl.constexpr,
):
    """`out[rows of g] = lhs[rows of g] @ rhs[g]`, zero past the groups.

    `lhs` and `rhs` are descriptors. `out` is a pointer, or with TMA_PARTS a bounded descriptor of blocks
    `[BM, BN / TMA_PARTS]`: stores then end while the next tile is computed.
    """
    starts, rows = locate_groups(sizes_ptr, M, G, GROUPS)
    group_ends = number_tasks(starts, rows, N, BM, BN)
    last = tl.max(group_ends, axis=0)
    for turn in tl.range(0, num_turns(tasks_until(last)), flatten=True):
        group, row, end, column = find_tile(task_of_turn(turn), group_ends, sizes_ptr, M, N, BM, BN, GROUP_M)
        total = multiply(lhs, rhs, row, group, column, K, BM, BN, BK, TRANSPOSE)
        store_tile(out, total, row, end, column, N, BM, BN, TMA_PARTS)
    used = (last >> 32).to(tl.int32)
    for block in range(num_turns(tl.cdiv(M - used, BM if TMA_PARTS else ZERO_ROWS))):
        if TMA_PARTS:
            zero_bounded(out, used + task_of_turn(block) * BM, M, N, BM, BN // TMA_PARTS)
        else:
            zero_rows(out, used + task_of_turn(block) * ZERO_ROWS, M, N, ZERO_ROWS, BN)
