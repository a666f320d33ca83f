"""Grouped GEMM and combine in one launch: each row of the product is stored at its source at once, and added there.

A row goes to slot `[token, k]` of its source's heap. Every program computes its share of the tiles, counts itself, and
helps with the sums; the program that counts last tells all ranks. Sums run in float32, in the order of k.

The launch may make the weight gradient of the same rows, too: both are the backward pass of dispatch + GEMM. While the
last rows of the product travel, and while a program would have no tile left, programs multiply tiles of the gradient,
which need nothing of other ranks. Who had fewer tiles of the product begins with the tiles of the gradient.

Only sums wait for what other ranks compute, and only in programs that see all programs of this launch begun; the last
to begin always does, and so no program that has yet to begin can be what another rank waits for. So one resident
program suffices.
"""

import triton
import triton.language as tl

from .failures import poison
from .gemm_tile import multiply
from .gemm_weights import ALL_TASKS, multiply_flat
from .listed_sums import sum_listed
from .programs import all_begun, count_stored
from .protocol import (
    announce,
    await_block_of_all,
    await_peers,
    data_of,
    end_launch,
    next_task,
    open_launch,
    peer_of,
    publish,
)
from .scattered_rows import clear_dropped, list_slots, row_addresses, store_rows
from .structs import Rows
from .table import STARTED
from .tiles import (
    find_tile,
    locate_groups,
    num_turns,
    number_tasks,
    place_after,
    task_of_turn,
    tasks_until,
)


@triton.jit
def gemm_combine(
    h_desc,
    b_desc,
    ids_ptr,
    slot_row_ptr,
    row_slot_ptr,
    sizes_ptr,
    lhs,
    rhs,
    peers,
    out_ptr,
    lists_ptr,
    products,
    T: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    CLEAR_T: tl.constexpr,
    CLEAR_H: tl.constexpr,
    SUM_T: tl.constexpr,
    SUMS: tl.constexpr,
    CHOICES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    DROPS: tl.constexpr,
    WEIGHT_M: tl.constexpr,
    WEIGHT_N: tl.constexpr,
    WEIGHT_R: tl.constexpr,
    WEIGHT_STAGES: tl.constexpr,
    WEIGHT_PARTS: tl.constexpr,
    HEAP: tl.constexpr,
):
    """`h [R, F]` and matrices `[L, F, H]` (`[L, H, F]` if TRANSPOSED) to `out [T, H]`.

    `ids`, `slot_row [W, T, K]`, `row_slot [R]` and `sizes [L]` are those of the handle. DROPS: slots may have found no
    row. `lists` is scratch.

    Unless `products` is None, also `h` and the tokens `[R, H]` by row, which are `lhs` and `rhs` (`rhs` and `lhs` if
    TRANSPOSED), to `products`: `lhs[rows].T @ rhs[rows]` of each expert, in the shape of the matrices. Both are bounded
    descriptors with blocks of WEIGHT_R rows, and `products` is one of blocks `[1, WEIGHT_M, WEIGHT_N / WEIGHT_PARTS]`.
    """
    launch, alive = open_launch(peers, HEAP)
    W: tl.constexpr = HEAP.W
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    received_ptr = data_of(launch, launch.device, dtype, HEAP)
    if tl.atomic_add(launch.control + STARTED, 1, sem="relaxed", scope="gpu") == 0:
        announce(launch, HEAP)
    alive = await_peers(launch, alive, 0, HEAP)
    if DROPS:  # known when compiling, unlike what follows
        if alive != 0:
            clear_dropped(ids_ptr, slot_row_ptr, launch, dtype, T, K, H, L, CLEAR_T, CLEAR_H, HEAP)
    starts, rows = locate_groups(sizes_ptr, R, L, BLOCK_L)
    group_ends = number_tasks(starts, rows, H, BM, BN)
    # After a failure nobody may be there to receive: no more stores, whatever the results then are.
    all_tiles = tasks_until(tl.max(group_ends, axis=0))
    num_tiles = all_tiles * alive
    for turn in tl.range(0, num_turns(num_tiles), flatten=True):
        expert, row, end, column = find_tile(task_of_turn(turn), group_ends, sizes_ptr, R, H, BM, BN, GROUP_M)
        total = multiply(h_desc, b_desc, row, expert, column, F, BM, BN, BK, TRANSPOSED)
        # Addresses that live beside the sums would spill registers in the flat loop.
        addresses = row_addresses(row_slot_ptr, launch, row, end, dtype, T, K, H, BM, HEAP)
        store_rows(total, addresses, column, dtype, H, BN)
    if alive != 0:  # who has failed is missing in the count, so that nobody is told of rows that were not stored
        if count_stored(launch, 0):
            for peer_rank in range(W):
                publish(launch, peer_of(launch, peer_rank), 0, HEAP)
    if products is not None:
        multiply_flat(
            lhs,
            rhs,
            products,
            starts,
            rows,
            place_after(all_tiles),  # the same in all programs, also where some have failed and others not
            ALL_TASKS,
            F if TRANSPOSED else H,
            H if TRANSPOSED else F,
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
    if all_begun(launch):
        blocks: tl.constexpr = (T + SUM_T - 1) // SUM_T
        list_ptr = lists_ptr + tl.program_id(0) * 2 * SUMS.LENGTH
        block = next_task(launch)
        if block < blocks:
            alive = await_block_of_all(launch, 0, alive, block, HEAP)
        while block < blocks:
            count = list_slots(list_ptr, ids_ptr, launch.rank, block * SUM_T, T, K, W * L, SUM_T, CHOICES, SUMS.LENGTH)
            received = Rows(received_ptr, received_ptr)
            sum_listed(list_ptr, count, received, Rows(out_ptr, out_ptr), tl.float32, H, SUMS)
            block = next_task(launch)
    if end_launch(launch, HEAP):
        poison(out_ptr, T * H)  # the gradient needs nothing of other ranks
