"""Tiles of a grouped GEMM: which tile a task computes, its sum over K, and its store.

Tiles of block_m rows cover the rows of each group; the last tile of a group may reach past it. Tasks are numbered group
by group, so programs work on few groups at a time and their weights stay in the L2 cache. Which tile a task has follows
from the group sizes alone, on the device.

Persistent programs take tasks round-robin. Operands come in blocks by TMA, which reads zeros outside of an array, so a
partial step of K needs no mask. Rows past the group are computed, whatever they hold, but not stored. Kernels that
communicate share this code.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .gemm_structs import Value

ZERO_ROWS = tl.constexpr(8)  # rows past the groups that are zeroed at a time
BOUND = tl.constexpr(1 << 30)
"""Rows of a bounded descriptor of `[M, WIDTH]`, whose blocks end where the kernel says.

TMA checks bounds against the shape in the descriptor, but the end differs from group to group. So the descriptor has
two extra dimensions whose strides cancel. With s = WIDTH, the element at `[BOUND, end, row - end + BOUND, column]` has
the offset

    BOUND * (2**34 - s) + end * s + (row - end + BOUND) * s + column = row * s + column + 2**64

and addresses have 64 bits, so it is the element `[row, column]`. The third coordinate reaches BOUND, the end of its
dimension, exactly where row reaches `end`. `jax_ep.core.kernel.Descriptor` makes these descriptors.

Source: triton.tools.ragged_tma.
"""


class Groups(NamedTuple):
    """Rows of each group, as `[padded_groups]` int32 tensors."""

    starts: Value  # first row
    rows: Value  # number of rows


class Tile(NamedTuple):
    """One tile of a grouped GEMM."""

    group: Value  # whose weights the rows are multiplied with
    row: Value  # first row
    end: Value  # one past the last row of the group; rows from here on are not stored
    column: Value  # first column


@triton.jit
def locate_groups(sizes_ptr, S: tl.constexpr):
    """Return the `Groups` of sizes `[num_groups]`; none reaches past row M."""
    index = tl.arange(0, S.padded_groups)
    # Sizes may be any int32: negative ones are empty groups, and sums of large ones need 64 bits.
    sizes = tl.maximum(tl.load(sizes_ptr + index, mask=index < S.num_groups, other=0), 0).to(tl.int64)
    ends = tl.cumsum(sizes, axis=0)
    starts = tl.minimum(ends - sizes, S.M)
    return Groups(starts.to(tl.int32), (tl.minimum(ends, S.M) - starts).to(tl.int32))


@triton.jit
def number_tasks(groups, S: tl.constexpr):
    """Return the end of each group, `(end row << 32) | end task` in int64 `[padded_groups]`; both never decrease."""
    tasks = tl.cdiv(groups.rows, S.tile.block_m) * ((S.N + S.tile.block_n - 1) // S.tile.block_n)
    return (groups.starts + groups.rows).to(tl.int64) << 32 | tl.cumsum(tasks, axis=0).to(tl.int64)


@triton.jit
def tasks_until(end):
    """Extract the end task from a group's end."""
    return (end & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def tile_in_grid(task, num_rows, NUM_COLUMNS: tl.constexpr, GROUP_M: tl.constexpr):
    """Return row and column of a tile in bands of GROUP_M rows; in a band, tiles run down its columns first."""
    band = task // (GROUP_M * NUM_COLUMNS) * GROUP_M
    # The last band may have fewer rows.
    height = tl.minimum(num_rows - band, GROUP_M)
    inside = task % (GROUP_M * NUM_COLUMNS)
    return band + inside % height, inside // height


@triton.jit
def find_tile(task, group_ends, sizes_ptr, S: tl.constexpr):
    """Return the `Tile` of a task below the number of tasks; `group_ends` come from `number_tasks`."""
    # The group is the first one that ends behind the task.
    before = tasks_until(group_ends) <= task
    group = tl.sum(before.to(tl.int32), axis=0)
    previous = tl.max(tl.where(before, group_ends, 0), axis=0)
    start = (previous >> 32).to(tl.int32)
    local = task - tasks_until(previous)
    # Group sizes are clipped as in `locate_groups`.
    rows = tl.minimum(tl.maximum(tl.load(sizes_ptr + group), 0), S.M - start)
    row, column = tile_in_grid(
        local, tl.cdiv(rows, S.tile.block_m), (S.N + S.tile.block_n - 1) // S.tile.block_n, S.tile.group_m
    )
    return Tile(group, start + row * S.tile.block_m, start + rows, column * S.tile.block_n)


@triton.jit
def num_own_tasks(num_tasks):
    """Return how many tasks this program takes; see `own_task`."""
    programs = tl.num_programs(0)
    full = num_tasks // programs
    return full + ((tl.program_id(0) + full) % programs < num_tasks % programs).to(tl.int32)


@triton.jit
def own_task(i):
    """Return the i-th task of this program: each round, programs take consecutive tasks, shifted by one place.

    Without the shift, a program could get the partial tiles at the end of groups always or never, depending on the
    common factors of the number of programs and of a group's tiles.
    """
    programs = tl.num_programs(0)
    return i * programs + (tl.program_id(0) + i) % programs


@triton.jit
def locate_weights(weights, group, HOME_GROUPS: tl.constexpr):
    """Return the array that has a group's weights, and the index of the group there.

    `weights` are one array, or `SplitWeights` if HOME_GROUPS is not 0.
    """
    if HOME_GROUPS == 0:
        found, index = weights, group
    else:
        found, index = weights.home, group
        if group >= HOME_GROUPS:
            found, index = weights.spare, group - HOME_GROUPS
    return found, index


@triton.jit
def load_rhs(rhs, group, k, column, S: tl.constexpr):
    """Load `[block_k, block_n]` of a group's weights `[num_groups, K, N]` (`[num_groups, N, K]` if transposed).

    `rhs` is a descriptor with blocks `[1, block_k, block_n]`, or `[1, block_n, block_k]`.
    """
    if S.transposed:
        block = tl.trans(tl.reshape(rhs.load([group, column, k]), (S.tile.block_n, S.tile.block_k)))
    else:
        block = tl.reshape(rhs.load([group, k, column]), (S.tile.block_k, S.tile.block_n))
    return block


@triton.jit
def multiply(lhs, rhs, tile, S: tl.constexpr):
    """Compute a `Tile` in float32 `[block_m, block_n]`; `lhs` describes `[M, K]` in blocks `[block_m, block_k]`.

    `rhs` describes weights as for `load_rhs`, or is a `SplitWeights` of two descriptors if `S.home_groups` is not 0.
    """
    rhs, group = locate_weights(rhs, tile.group, S.home_groups)
    total = tl.zeros((S.tile.block_m, S.tile.block_n), tl.float32)
    for k in range(0, S.K, S.tile.block_k):
        block = load_rhs(rhs, group, k, tile.column, S)
        total = tl.dot(lhs.load([tile.row, k]), block, total)
    return total


@triton.jit
def add_bias(total, bias, tile, S: tl.constexpr):
    """Add the group's row of a `Bias` to columns of a `Tile`; return them unchanged if `bias` is None."""
    if bias is not None:
        rows = tile.row + tl.arange(0, total.shape[0])
        columns = tile.column + tl.arange(0, total.shape[1])
        values = tl.load(bias.values_ptr + tile.group.to(tl.int64) * S.N + columns, mask=columns < S.N, other=0.0)
        scales = tl.load(bias.scales_ptr + rows, mask=rows < tile.end, other=0.0)
        total += scales[:, None] * values.to(tl.float32)[None, :]
    return total


@triton.jit
def store_tile(out, total, tile, S: tl.constexpr):
    """Store the rows of a `Tile` that lie before its end.

    `out` is a pointer to `[M, N]`, or if `S.tma_parts` is not 0 a bounded descriptor of blocks `[block_m, block_n /
    tma_parts]`.
    """
    if S.tma_parts:
        BLOCK_N: tl.constexpr = S.tile.block_n
        store_in_parts(out, total.to(out.dtype), tile.row, tile.end, tile.column, S.tile.block_m, BLOCK_N, S.tma_parts)
    else:
        rows = tile.row + tl.arange(0, total.shape[0])
        columns = tile.column + tl.arange(0, S.tile.block_n)
        target = out + rows.to(tl.int64)[:, None] * S.N + columns[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=(rows < tile.end)[:, None] & (columns < S.N)[None, :])


@triton.jit
def zero_rows(out_ptr, first, end, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zero up to ROWS rows from `first` on, before `end`."""
    rows = first + tl.arange(0, ROWS)
    zeros = tl.zeros((ROWS, COLUMNS), out_ptr.dtype.element_ty)
    for start in range(0, N, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        target = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(target, zeros, mask=(rows < end)[:, None] & (columns < N)[None, :])


@triton.jit
def zero_bounded(out, first, end, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zero rows through a bounded descriptor of blocks `[ROWS, COLUMNS]`."""
    for column in range(0, N, COLUMNS):
        store_bounded(out, tl.zeros((ROWS, COLUMNS), out.dtype), first, end, column, ROWS, COLUMNS)


@triton.jit
def zero_rest(out, group_ends, S: tl.constexpr):
    """Zero this program's share of the rows past the groups; `out` as for `store_tile`."""
    BLOCK_M: tl.constexpr = S.tile.block_m
    used = (tl.max(group_ends, axis=0) >> 32).to(tl.int32)
    for block in range(num_own_tasks(tl.cdiv(S.M - used, BLOCK_M if S.tma_parts else ZERO_ROWS))):
        if S.tma_parts:
            zero_bounded(out, used + own_task(block) * BLOCK_M, S.M, S.N, BLOCK_M, S.tile.block_n // S.tma_parts)
        else:
            zero_rows(out, used + own_task(block) * ZERO_ROWS, S.M, S.N, ZERO_ROWS, S.tile.block_n)


@triton.jit
def load_bounded(x, row, end, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load `[ROWS, COLUMNS]` from `row` and `column` on; rows from `end` on read as zero."""
    return tl.reshape(x.load([BOUND, end, row - end + BOUND, column]), (ROWS, COLUMNS))


@triton.jit
def store_bounded(out, values, row, end, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the rows of `values` that lie before `end`."""
    block = tl.reshape(values.to(out.dtype), (1, 1, ROWS, COLUMNS))
    out.store([BOUND, end, row - end + BOUND, column], block)


@triton.jit
def split_columns(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Split `x [ROWS, COLUMNS]` into its left and right halves."""
    # `split` takes the last axis, so the halves move there first.
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def store_in_parts(out, values, row, end, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """Store the rows before `end` in 1, 2 or 4 parts of the columns in turn, so that shared memory holds one part."""
    if PARTS == 1:
        store_bounded(out, values, row, end, column, ROWS, COLUMNS)
    else:
        left, right = split_columns(values, ROWS, COLUMNS)
        store_in_parts(out, left, row, end, column, ROWS, COLUMNS // 2, PARTS // 2)
        store_in_parts(out, right, row, end, column + COLUMNS // 2, ROWS, COLUMNS // 2, PARTS // 2)
