"""Which tile of a masked product a task works on: groups have one block of M rows each, of which the first ones count.

Tasks are numbered group by group, in a group column by column, so that the row tiles that share a part of the group's
matrix are neighbours: it is read from memory once. Groups without rows, and rows past the count, have no tasks.
"""

import triton
import triton.language as tl


@triton.jit
def rows_in_use(sizes_ptr, group, M: tl.constexpr, mask=None):
    """Rows that count; the API takes any int32."""
    if mask is None:
        size = tl.load(sizes_ptr + group)
    else:
        size = tl.load(sizes_ptr + group, mask=mask, other=0)
    return tl.minimum(tl.maximum(size, 0), M)


@triton.jit
def number_masked_tasks(
    sizes_ptr, M: tl.constexpr, G: tl.constexpr, GROUPS: tl.constexpr, BM: tl.constexpr, COLUMN_TILES: tl.constexpr
):
    """`[GROUPS]` int32: the first task after each group."""
    group = tl.arange(0, GROUPS)
    rows = rows_in_use(sizes_ptr, group, M, group < G)
    return tl.cumsum((rows + BM - 1) // BM * COLUMN_TILES, axis=0)


@triton.jit
def find_masked_tile(task, group_ends, sizes_ptr, M: tl.constexpr, BM: tl.constexpr):
    """Group, first row in its block, rows of the group that count, and column tile of a task."""
    before = group_ends <= task
    group = tl.sum(before.to(tl.int32), axis=0)
    local = task - tl.max(tl.where(before, group_ends, 0), axis=0)
    rows = rows_in_use(sizes_ptr, group, M)
    row_tiles = (rows + BM - 1) // BM
    return group, local % row_tiles * BM, rows, local // row_tiles
