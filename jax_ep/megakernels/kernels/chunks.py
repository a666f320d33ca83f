"""Chunks of columns of a grouped GEMM, for kernels that send one chunk while they compute the next.

Tiles are numbered chunk by chunk, and programs take turns over all of them: whatever the number of chunks, no program
computes two tiles more than another. Which program computes what is fixed, so that the loads of a tile can begin before
the one before it is stored.
"""

import triton
import triton.language as tl

from .gemm_tile import multiply
from .protocol import DONE, STARTED
from .tiles import find_tile, num_turns, task_of_turn

MOST_TURNS = tl.constexpr(1 << 20)  # of a program, more than any matrix has


@triton.jit
def first_turn(chunk, num_tiles):
    """The turn at which this program begins a chunk."""
    return num_turns(chunk * num_tiles)


@triton.jit
def place_after(num_tasks):
    """This program's place behind `num_tasks` tasks of `task_of_turn`: those with a turn less come first."""
    programs = tl.num_programs(0)
    full = num_tasks // programs
    return (tl.program_id(0) + full - num_tasks % programs + programs) % programs


@triton.jit
def count_turns(first, end):
    """Turns from `first` to `end`, with a bound that the compiler can see.

    Where a loop over them is behind a test for more than none, it knows that the loop runs, also after it has joined it
    with the one over the depth. If it did not, the registers of a tile's sums would be in use around the loop.
    """
    return tl.minimum(end - first, MOST_TURNS)


@triton.jit
def turn_product(
    h_desc,
    b_desc,
    sizes_ptr,
    group_ends,
    turn,
    chunk,
    num_tiles,
    F: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """The tile of this program's turn in a chunk of WIDTH columns, which has `num_tiles`; float32 `[BM, BN]`.

    Returns:
      The products, their first row, the end of the rows that are their group's, and their first column.
    """
    task = task_of_turn(turn) - chunk * num_tiles
    expert, row, end, column, _ = find_tile(task, group_ends, sizes_ptr, R, WIDTH, BM, BN, 0, BN, GROUP_M)
    column += chunk * WIDTH
    return multiply(h_desc, b_desc, row, expert, column, H, F, BM, BN, BK, TRANSPOSED), row, end, column


@triton.jit
def count_chunk(control, chunk):
    """Counts this program among those that have stored their tiles of a chunk; returns whether it is the last one."""
    # Stores of all threads come before the count, and those of all programs before what the last count allows.
    tl.debug_barrier()
    return tl.atomic_add(control + DONE + chunk, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1


@triton.jit
def all_begun(control):
    """Whether all programs of this launch have begun: the last one to begin always sees it.

    Only then may a program wait for other ranks, or for other programs: none that it waits for can be one that begins
    when this one ends.
    """
    return tl.atomic_add(control + STARTED, 0, sem="relaxed", scope="gpu") == tl.num_programs(0)
