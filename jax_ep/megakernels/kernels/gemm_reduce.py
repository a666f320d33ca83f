"""Grouped GEMM and combine in one launch: the rows of a token are added where its experts are, and one row travels.

The columns are cut into CHUNKS. The product of a chunk is stored in this device's memory, from where the tasks of
reduced_sums.py take it: at a point in the chunk after it, each program does its part of the sums that are to be sent,
and of those that have arrived; at the end, what is left. These points lie apart from program to program, so that some
of them move rows while the others multiply.

Tiles are numbered chunk by chunk, and programs take turns over all of them: whatever the number of chunks, no program
computes two tiles more than another. Which tiles a program computes is fixed, so that the loads of a tile can begin
before the one before it is stored; sums are tasks of a queue. A program takes tasks once all programs have begun,
in the order of their numbers, and those of a chunk once it has computed its own tiles of that chunk. So what a task
waits for is a task with a smaller number, here or on a peer, or a tile of a program that runs and does only tasks with
smaller numbers before it. One resident program suffices.
"""

import triton
import triton.language as tl

from .failures import poison
from .gemm_tile import multiply, store_tile
from .programs import all_begun, count_stored
from .protocol import announce, end_launch, open_launch
from .reduced_sums import move_sums
from .table import STARTED
from .tiles import find_tile, locate_groups, num_turns, number_tasks, task_of_turn, tasks_until

MOST_TURNS = tl.constexpr(1 << 20)  # of a program, more than any matrix has


@triton.jit
def count_turns(first, end):
    """Turns from `first` to `end`, with a bound that the compiler can see.

    Where a loop over them is behind a test for more than none, it knows that the loop runs, also after it has joined it
    with the one over the depth. If it did not, the registers of a tile's sums would be in use around the loop.
    """
    return tl.minimum(end - first, MOST_TURNS)


@triton.jit
def gemm_reduce(
    h_desc,
    b_desc,
    ids_ptr,
    slot_row_ptr,
    sizes_ptr,
    peers,
    out_ptr,
    y_ptr,
    T: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILE_T: tl.constexpr,
    SUM_H: tl.constexpr,
    PHASES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HEAP: tl.constexpr,
):
    """`h [R, F]` and matrices `[L, F, H]` (`[L, H, F]` if TRANSPOSED) to `out [T, H]`.

    `ids` and `slot_row [W, T, K]` and `sizes [L]` are those of the handle; `y [R, H]` is for the products. CHUNKS, at
    most 16, divides the number of column tiles.
    """
    launch, alive = open_launch(peers, HEAP)
    W: tl.constexpr = HEAP.W
    width: tl.constexpr = (H + BN - 1) // BN // CHUNKS * BN
    per_chunk: tl.constexpr = (T + BLOCK_T - 1) // BLOCK_T * (W + 1)
    if tl.atomic_add(launch.control + STARTED, 1, sem="relaxed", scope="gpu") == 0:
        announce(launch, HEAP)
    starts, rows = locate_groups(sizes_ptr, R, L, BLOCK_L)
    group_ends = number_tasks(starts, rows, width, BM, BN, 0, BN)
    # After a failure nobody may be there to receive, whatever the sums then are.
    num_tiles = tasks_until(tl.max(group_ends, axis=0)) * alive
    task = -1
    step = 0
    while step <= 2 * CHUNKS:  # in a loop with `for` the compiler would not flatten the one over turns
        # Up to a point in a chunk, then to its end; the last step multiplies nothing.
        chunk = step // 2
        is_first_part = step % 2 == 0
        first = num_turns(chunk * num_tiles)
        end = num_turns(tl.minimum(chunk + 1, CHUNKS) * num_tiles)
        # Other programs get there first in the next chunk, since not all need to find tasks.
        middle = first + (end - first) * ((tl.program_id(0) + chunk) % PHASES + 1) // (PHASES + 1)
        first, end = tl.where(is_first_part, first, middle), tl.where(is_first_part, middle, end)
        count = count_turns(first, end)
        if count > 0:
            for i in tl.range(0, count, flatten=True):
                tile = task_of_turn(first + i) - chunk * num_tiles
                expert, row, end_row, column, _ = find_tile(
                    tile, group_ends, sizes_ptr, R, width, BM, BN, 0, BN, GROUP_M
                )
                column += chunk * width
                total = multiply(h_desc, b_desc, row, expert, column, H, F, BM, BN, BK, TRANSPOSED)
                store_tile(y_ptr, total, row, end_row, column, H, BM, BN, 0)
        if step % 2 == 1:
            count_stored(launch, chunk)
        elif chunk > 0:
            if all_begun(launch):
                # The last step does all that is left.
                is_last = chunk == CHUNKS
                task, alive = move_sums(
                    y_ptr,
                    ids_ptr,
                    slot_row_ptr,
                    peers,
                    out_ptr,
                    task,
                    alive,
                    tl.where(is_last, (CHUNKS + 1) * per_chunk, tl.cdiv(per_chunk, tl.num_programs(0))),
                    tl.where(is_last, CHUNKS + 1, chunk) * per_chunk,
                    T,
                    K,
                    H,
                    L,
                    width,
                    CHUNKS,
                    BLOCK_T,
                    TILE_T,
                    SUM_H,
                    HEAP,
                )
        step += 1
    if end_launch(launch, HEAP):
        poison(out_ptr, T * H)
