"""Grouped GEMM of FP8 rows and matrices: consecutive groups of rows, persistent programs, one tile after another.

masked_gemm.py computes a tile, tiles.py says which one. A tile has at most 128 columns: its sum and the products of one
block of K, which are scaled before they are added, take as many registers each.
"""

import triton
import triton.language as tl

from .gemm_tile import ZERO_ROWS, store_tile, zero_rows
from .masked_gemm import multiply_masked
from .quantization import GROUP
from .tiles import find_tile, locate_groups, num_turns, number_tasks, task_of_turn, tasks_until


@triton.jit
def grouped_gemm_fp8(
    lhs,
    rhs,
    lhs_scales_ptr,
    rhs_scales_ptr,
    sizes_ptr,
    out_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """`out[rows of g] = lhs[rows of g] @ rhs[g].T`, zero past the groups.

    `lhs` describes `[1, M, K]` in blocks `[1, BM, 128]`, `rhs` `[G, N, K]` in blocks `[1, BN, 128]`; scales are
    `[M, K / 128]` and `[G, ceil(N / 128), K / 128]`.
    """
    starts, rows = locate_groups(sizes_ptr, M, G, GROUPS)
    group_ends = number_tasks(starts, rows, N, BM, BN)
    last = tl.max(group_ends, axis=0)
    for turn in tl.range(0, num_turns(tasks_until(last)), flatten=True):
        task = task_of_turn(turn)
        group, row, end, column = find_tile(task, group_ends, sizes_ptr, M, N, BM, BN, GROUP_M)
        # Rows of other groups are computed too, whatever they hold, and not stored.
        total = multiply_masked(
            lhs, rhs, lhs_scales_ptr, rhs_scales_ptr, group, row, column, M, N, K, BM, BN, GROUP, False, True, True
        )
        store_tile(out_ptr, total, row, end, column, N, BM, BN, 0)
    used = (last >> 32).to(tl.int32)
    for block in range(num_turns(tl.cdiv(M - used, ZERO_ROWS))):
        zero_rows(out_ptr, used + task_of_turn(block) * ZERO_ROWS, M, N, ZERO_ROWS, BN)
