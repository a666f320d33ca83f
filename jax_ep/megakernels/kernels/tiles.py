"""Which tile of a grouped GEMM a task computes, from the group sizes alone, on the device.

The rows of a group are covered by tiles of BM rows; the last one reaches past the group where they are no multiple.
Tasks are numbered group by group, so that all programs work on few matrices at a time, which stay in the L2 cache.
"""

import triton
import triton.language as tl


@triton.jit
def locate_groups(sizes_ptr, M: tl.constexpr, G: tl.constexpr, GROUPS: tl.constexpr):
    """`[GROUPS]` int32 first row and number of rows of each group; no size can reach past row M."""
    index = tl.arange(0, GROUPS)
    # The API takes any int32: negative sizes are empty groups, and the sums of large ones need 64 bits.
    sizes = tl.maximum(tl.load(sizes_ptr + index, mask=index < G, other=0), 0).to(tl.int64)
    ends = tl.cumsum(sizes, axis=0)
    starts = tl.minimum(ends - sizes, M)
    return starts.to(tl.int32), (tl.minimum(ends, M) - starts).to(tl.int32)


@triton.jit
def number_tasks(starts, rows, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """`[GROUPS]` end of each group, as (last row << 32 | last task) in int64; both never decrease."""
    tasks = tl.cdiv(rows, BM) * ((N + BN - 1) // BN)
    return (starts + rows).to(tl.int64) << 32 | tl.cumsum(tasks, axis=0).to(tl.int64)


@triton.jit
def tasks_until(end):
    """The part of a group's end that counts tasks."""
    return (end & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def tile_in_grid(task, num_rows, NUM_COLUMNS: tl.constexpr, GROUP_M: tl.constexpr):
    """Row and column of a tile in a grid: bands of GROUP_M rows; in a band, down its columns first."""
    band = task // (GROUP_M * NUM_COLUMNS) * GROUP_M
    height = tl.minimum(num_rows - band, GROUP_M)
    inside = task % (GROUP_M * NUM_COLUMNS)
    return band + inside % height, inside // height


@triton.jit
def find_tile(
    task,
    group_ends,
    sizes_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Where a task computes.

    Args:
      task: less than the number of tasks.
      group_ends: of `number_tasks`.

    Returns:
      Group, first row, end of the rows that are the group's, and first column.
    """
    before = tasks_until(group_ends) <= task
    group = tl.sum(before.to(tl.int32), axis=0)
    previous = tl.max(tl.where(before, group_ends, 0), axis=0)
    start = (previous >> 32).to(tl.int32)
    local = task - tasks_until(previous)
    rows = tl.minimum(tl.maximum(tl.load(sizes_ptr + group), 0), M - start)
    row, column = tile_in_grid(local, tl.cdiv(rows, BM), (N + BN - 1) // BN, GROUP_M)
    return group, start + row * BM, start + rows, column * BN


@triton.jit
def num_turns(num_tasks):
    """How many tasks this program takes; see `task_of_turn`."""
    programs = tl.num_programs(0)
    full = num_tasks // programs
    return full + ((tl.program_id(0) + full) % programs < num_tasks % programs).to(tl.int32)


@triton.jit
def task_of_turn(turn):
    """The task of this program in a turn: all programs take neighbours, and each turn their places move by one.

    Without the move, programs could meet the tiles at the end of a group always or never: as often as their number and
    that of a group's tiles have a common factor.
    """
    programs = tl.num_programs(0)
    return turn * programs + (tl.program_id(0) + turn) % programs


@triton.jit
def place_after(num_tasks):
    """This program's place behind `num_tasks` tasks of `task_of_turn`: those with a turn less come first."""
    programs = tl.num_programs(0)
    full = num_tasks // programs
    return (tl.program_id(0) + full - num_tasks % programs + programs) % programs
