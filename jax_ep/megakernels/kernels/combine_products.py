"""Combine, and beside it the gradient of the matrices whose products it adds up, in one launch.

The rows `y` are products of an earlier launch. The first COMM programs to begin make their sums, as combine.py does,
while all others multiply tiles of the gradient, which need nothing of other ranks; those of COMM come to them late. So
the link works while the tensor cores do, and only few programs wait for other ranks. As the first to begin are those
that communicate, one resident program suffices.

Tiles are taken some at a time, by whoever is free.
"""

import triton
import triton.language as tl

from .combine import combine_blocks
from .failures import poison
from .gemm_weights import multiply_flat
from .protocol import end_launch, open_launch
from .table import QUEUE, STARTED
from .tiles import locate_groups


@triton.jit
def combine_products(
    y_ptr,
    ids_ptr,
    slot_row_ptr,
    sizes_ptr,
    lhs,
    rhs,
    peers,
    out_ptr,
    lists_ptr,
    products,
    R: tl.constexpr,
    BLOCK_L: tl.constexpr,
    COMM: tl.constexpr,
    COMBINE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WEIGHT_M: tl.constexpr,
    WEIGHT_N: tl.constexpr,
    WEIGHT_R: tl.constexpr,
    WEIGHT_STAGES: tl.constexpr,
    WEIGHT_PARTS: tl.constexpr,
    TASKS: tl.constexpr,
    GROUP_M: tl.constexpr,
    HEAP: tl.constexpr,
):
    """`y [R, H]` to `out [T, H]` as `combine` has it; and `lhs [R, ROWS]` and `rhs [R, COLUMNS]` to `products`.

    These are `lhs[rows].T @ rhs[rows]` of each expert, `[L, ROWS, COLUMNS]`; TASKS tiles are taken at a time. `lhs` and
    `rhs` are bounded descriptors of blocks of WEIGHT_R rows, and `products` is one of blocks
    `[1, WEIGHT_M, WEIGHT_N / WEIGHT_PARTS]`.
    """
    launch, alive = open_launch(peers, HEAP)
    programs = tl.num_programs(0)
    L: tl.constexpr = COMBINE.L
    tiles: tl.constexpr = L * ((ROWS + WEIGHT_M - 1) // WEIGHT_M) * ((COLUMNS + WEIGHT_N - 1) // WEIGHT_N)
    num_turns = tl.cdiv(tiles, TASKS * programs) * programs
    communicates = tl.atomic_add(launch.control + STARTED, 1, sem="relaxed", scope="gpu") < COMM
    if communicates:
        combine_blocks(y_ptr, ids_ptr, slot_row_ptr, out_ptr, lists_ptr, launch, alive, COMBINE, HEAP)
    starts, rows = locate_groups(sizes_ptr, R, L, BLOCK_L)
    turn = tl.atomic_add(launch.control + QUEUE, 1, sem="relaxed", scope="gpu")
    while turn < num_turns:
        # Programs that take neighbouring turns work on neighbouring tiles.
        multiply_flat(
            lhs,
            rhs,
            products,
            starts,
            rows,
            turn // programs * programs * TASKS + turn % programs,
            TASKS,
            COLUMNS,
            ROWS,
            L,
            BLOCK_L,
            WEIGHT_M,
            WEIGHT_N,
            WEIGHT_R,
            GROUP_M,
            WEIGHT_PARTS,
            True,
            WEIGHT_STAGES,
        )
        turn = tl.atomic_add(launch.control + QUEUE, 1, sem="relaxed", scope="gpu")
    if end_launch(launch, HEAP):
        poison(out_ptr, COMBINE.T * COMBINE.H)  # the gradient needs nothing of other ranks
