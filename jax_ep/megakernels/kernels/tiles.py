"""Tiles of a grouped GEMM: which one a task computes, its sum over K, and how it is stored.

The rows of a group are covered by tiles of BM rows; the last one reaches past the group where they are no multiple.
Tasks are numbered group by group, so that all programs work on few matrices at a time, which stay in the L2 cache;
which tile a task has follows from the group sizes alone, on the device.

Operands come in blocks through descriptors, by TMA. What lies outside an array reads as zero, so K needs no care, and
neither do rows: those of other groups are computed, whatever they hold, and not stored. Kernels that communicate use
this code too.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .bounded import store_bounded, store_in_parts

ZERO_ROWS = tl.constexpr(8)  # a block of those past the groups


class Groups(NamedTuple):
    """Rows of each group, as `[padded_groups]` int32 tensors."""

    starts: Any  # first row
    rows: Any  # number of rows


class Tile(NamedTuple):
    """One tile of a grouped GEMM."""

    group: Any  # whose weights the rows are multiplied with
    row: Any  # first row
    end: Any  # one past the last row of the group; rows from here on are not stored
    column: Any  # first column


@triton.jit
def locate_groups(sizes_ptr, S: tl.constexpr):
    """The `Groups` of sizes `[G]`; none can reach past row M."""
    index = tl.arange(0, S.padded_groups)
    # The API takes any int32: negative sizes are empty groups, and the sums of large ones need 64 bits.
    sizes = tl.maximum(tl.load(sizes_ptr + index, mask=index < S.num_groups, other=0), 0).to(tl.int64)
    ends = tl.cumsum(sizes, axis=0)
    starts = tl.minimum(ends - sizes, S.M)
    return Groups(starts.to(tl.int32), (tl.minimum(ends, S.M) - starts).to(tl.int32))


@triton.jit
def number_tasks(groups, S: tl.constexpr):
    """`[GROUPS]` end of each group, as (last row << 32 | last task) in int64; both never decrease."""
    tasks = tl.cdiv(groups.rows, S.tile.block_m) * ((S.N + S.tile.block_n - 1) // S.tile.block_n)
    return (groups.starts + groups.rows).to(tl.int64) << 32 | tl.cumsum(tasks, axis=0).to(tl.int64)


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
def find_tile(task, group_ends, sizes_ptr, S: tl.constexpr):
    """The `Tile` of a task, which is less than the number of tasks; `group_ends` are of `number_tasks`."""
    before = tasks_until(group_ends) <= task
    group = tl.sum(before.to(tl.int32), axis=0)
    previous = tl.max(tl.where(before, group_ends, 0), axis=0)
    start = (previous >> 32).to(tl.int32)
    local = task - tasks_until(previous)
    rows = tl.minimum(tl.maximum(tl.load(sizes_ptr + group), 0), S.M - start)
    row, column = tile_in_grid(
        local, tl.cdiv(rows, S.tile.block_m), (S.N + S.tile.block_n - 1) // S.tile.block_n, S.tile.group_m
    )
    return Tile(group, start + row * S.tile.block_m, start + rows, column * S.tile.block_n)


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


@triton.jit
def load_rhs(rhs, group, k, column, S: tl.constexpr):
    """`[BK, BN]` of one group's matrix, from `[G, K, N]`, or from `[G, N, K]` if TRANSPOSED.

    `rhs` is a descriptor with blocks `[1, BK, BN]`, or `[1, BN, BK]`.
    """
    if S.transposed:
        block = tl.trans(tl.reshape(rhs.load([group, column, k]), (S.tile.block_n, S.tile.block_k)))
    else:
        block = tl.reshape(rhs.load([group, k, column]), (S.tile.block_k, S.tile.block_n))
    return block


@triton.jit
def multiply(lhs, rhs, tile, S: tl.constexpr):
    """float32 `[BM, BN]` of a `Tile`; `lhs` is a descriptor of `[M, K]` with blocks `[BM, BK]`."""
    total = tl.zeros((S.tile.block_m, S.tile.block_n), tl.float32)
    for k in range(0, S.K, S.tile.block_k):
        block = load_rhs(rhs, tile.group, k, tile.column, S)
        total = tl.dot(lhs.load([tile.row, k]), block, total)
    return total


@triton.jit
def add_bias(total, bias, tile, S: tl.constexpr):
    """Columns of a `Tile`, from its first on, with its group's row of a `Bias`; as they are where that is None."""
    if bias is not None:
        rows = tile.row + tl.arange(0, total.shape[0])
        columns = tile.column + tl.arange(0, total.shape[1])
        values = tl.load(bias.values_ptr + tile.group.to(tl.int64) * S.N + columns, mask=columns < S.N, other=0.0)
        scales = tl.load(bias.scales_ptr + rows, mask=rows < tile.end, other=0.0)
        total += scales[:, None] * values.to(tl.float32)[None, :]
    return total


@triton.jit
def store_tile(out, total, tile, S: tl.constexpr):
    """Stores the rows before the end of a `Tile`, `[., BN]`.

    `out` points at `[M, N]`, or is a bounded descriptor of blocks `[BM, BN / TMA_PARTS]`, where that is not 0.
    """
    if S.tma_parts:
        store_in_parts(
            out, total.to(out.dtype), tile.row, tile.end, tile.column, S.tile.block_m, S.tile.block_n, S.tma_parts
        )
    else:
        rows = tile.row + tl.arange(0, total.shape[0])
        columns = tile.column + tl.arange(0, S.tile.block_n)
        target = out + rows.to(tl.int64)[:, None] * S.N + columns[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=(rows < tile.end)[:, None] & (columns < S.N)[None, :])


@triton.jit
def zero_rows(out_ptr, first, end, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zeroes up to ROWS rows from `first` on, before `end`."""
    rows = first + tl.arange(0, ROWS)
    zeros = tl.zeros((ROWS, COLUMNS), out_ptr.dtype.element_ty)
    for start in range(0, N, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        target = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(target, zeros, mask=(rows < end)[:, None] & (columns < N)[None, :])


@triton.jit
def zero_bounded(out, first, end, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The same through a bounded descriptor of blocks `[ROWS, COLUMNS]`."""
    for column in range(0, N, COLUMNS):
        store_bounded(out, tl.zeros((ROWS, COLUMNS), out.dtype), first, end, column, ROWS, COLUMNS)


@triton.jit
def zero_rest(out, group_ends, S: tl.constexpr):
    """This program's share of the zeros past the groups; `out` as for `store_tile`."""
    BLOCK_M: tl.constexpr = S.tile.block_m
    used = (tl.max(group_ends, axis=0) >> 32).to(tl.int32)
    for block in range(num_turns(tl.cdiv(S.M - used, BLOCK_M if S.tma_parts else ZERO_ROWS))):
        if S.tma_parts:
            zero_bounded(out, used + task_of_turn(block) * BLOCK_M, S.M, S.N, BLOCK_M, S.tile.block_n // S.tma_parts)
        else:
            zero_rows(out, used + task_of_turn(block) * ZERO_ROWS, S.M, S.N, ZERO_ROWS, S.tile.block_n)
