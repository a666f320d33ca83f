"""Grouped GEMM: each row times the matrix of its group; the same of FP8 operands; and its weight gradient.

Programs are persistent, and compute one tile after another (tiles.py). The loops over tiles and over K are one
(`flatten`): the loads of a tile begin before the one before it is stored.

Of the weight gradient, for each group the product of its rows of two arrays, summed over the rows, a task is one tile
of one group's matrix; each group has the same number of them. The last block of a group's rows ends with the group:
what lies behind, another group's rows or none, may hold NaN and reads as zero from both operands.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .bounded import halves, load_bounded
from .fp8_columns import locate_places
from .quantization import GROUP
from .tiles import (
    add_bias,
    find_tile,
    locate_groups,
    multiply,
    num_turns,
    number_tasks,
    store_tile,
    task_of_turn,
    tasks_until,
    tile_in_grid,
    zero_rest,
)

ALL_TASKS = tl.constexpr(1 << 30)


@triton.jit
def grouped_gemm(lhs, rhs, sizes_ptr, bias, out, S: tl.constexpr):
    """`out[rows of g] = lhs[rows of g] @ rhs[g]`, zero past the groups.

    `lhs` and `rhs` are descriptors. `bias` is a `Bias` that is added, or None. `out` is a pointer, or with TMA_PARTS a
    bounded descriptor of blocks `[BM, BN / TMA_PARTS]`: stores then end while the next tile is computed.
    """
    group_ends = number_tasks(locate_groups(sizes_ptr, S), S)
    for turn in tl.range(0, num_turns(tasks_until(tl.max(group_ends, axis=0))), flatten=True):
        tile = find_tile(task_of_turn(turn), group_ends, sizes_ptr, S)
        store_tile(out, add_bias(multiply(lhs, rhs, tile, S), bias, tile, S), tile, S)
    zero_rest(out, group_ends, S)


@triton.jit
def multiply_fp8(lhs, rhs, lhs_scales_ptr, rhs_scales_ptr, tile, S: tl.constexpr):
    """float32 `[BM, BN]` of a `Tile`; operands as for `grouped_gemm_fp8`.

    Products of one block of K are scaled and added in float32 registers, see masked.py. Rows of other groups are
    computed too, whatever they hold, and not stored.
    """
    BLOCK_M: tl.constexpr = S.tile.block_m
    BLOCK_N: tl.constexpr = S.tile.block_n
    tl.static_assert(GROUP % BLOCK_N == 0, "a block has one scale of the matrix")
    num_scales: tl.constexpr = S.K // GROUP
    column_blocks: tl.constexpr = (S.N + GROUP - 1) // GROUP
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    rows = tl.minimum(tile.row + tl.arange(0, BLOCK_M), S.M - 1).to(tl.int64)
    lhs_scales = lhs_scales_ptr + rows * num_scales
    rhs_scales = rhs_scales_ptr + (tile.group.to(tl.int64) * column_blocks + tile.column // GROUP) * num_scales
    for k in range(0, S.K, GROUP):
        a = tl.reshape(lhs.load([0, tile.row, k]), (BLOCK_M, GROUP))
        b = tl.reshape(rhs.load([tile.group, tile.column, k]), (BLOCK_N, GROUP))
        scale = tl.load(lhs_scales + k // GROUP) * tl.load(rhs_scales + k // GROUP)
        total += tl.dot(a, tl.trans(b)) * scale[:, None]
    return total


@triton.jit
def grouped_gemm_fp8(lhs, rhs, lhs_scales_ptr, rhs_scales_ptr, sizes_ptr, out_ptr, S: tl.constexpr):
    """`out[rows of g] = lhs[rows of g] @ rhs[g].T`, zero past the groups.

    `lhs` describes `[1, M, K]` in blocks `[1, BM, 128]`, `rhs` `[G, N, K]` in blocks `[1, BN, 128]`; scales are
    `[M, K / 128]` and `[G, ceil(N / 128), K / 128]`. A tile has at most 128 columns: its sum and the products of one
    block of K, which are scaled before they are added, take as many registers each.
    """
    group_ends = number_tasks(locate_groups(sizes_ptr, S), S)
    for turn in tl.range(0, num_turns(tasks_until(tl.max(group_ends, axis=0))), flatten=True):
        tile = find_tile(task_of_turn(turn), group_ends, sizes_ptr, S)
        total = multiply_fp8(lhs, rhs, lhs_scales_ptr, rhs_scales_ptr, tile, S)
        store_tile(out_ptr, total, tile, S)
    zero_rest(out_ptr, group_ends, S)


@triton.jit
def store_block(out, values, group, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, S: tl.constexpr):
    """Stores a block of one group's matrix in `[G, K, N]`, through a descriptor of such blocks or a pointer."""
    if S.tma_store:
        out.store([group, row, column], tl.reshape(values, (1, ROWS, COLUMNS)))
    else:
        rows = row + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        target = out + (group.to(tl.int64) * S.K + rows)[:, None] * S.N + columns[None, :]
        tl.store(target, values, mask=(rows < S.K)[:, None] & (columns < S.N)[None, :])


@triton.jit
def store_matrix_tile(out, values, group, row, column, COLUMNS: tl.constexpr, PARTS: tl.constexpr, S: tl.constexpr):
    """Stores a tile of one group's matrix in 1, 2 or 4 parts: shared memory then holds a part at a time."""
    BLOCK_M: tl.constexpr = S.tile.block_m
    values = values.to(out.dtype if S.tma_store else out.dtype.element_ty)
    if PARTS == 1:
        store_block(out, values, group, row, column, BLOCK_M, COLUMNS, S)
    else:
        left, right = halves(values, BLOCK_M, COLUMNS)
        store_matrix_tile(out, left, group, row, column, COLUMNS // 2, PARTS // 2, S)
        store_matrix_tile(out, right, group, row, column + COLUMNS // 2, COLUMNS // 2, PARTS // 2, S)


class GradientTile(NamedTuple):
    """One tile of a group's weight gradient."""

    group: Any
    start: Any  # first row of the group, over whose rows the tile contracts
    end: Any  # one past the last row of the group
    row: Any  # first row of the tile
    column: Any  # first column of the tile


@triton.jit
def find_matrix_tile(task, groups, S: tl.constexpr):
    """The `GradientTile` of a task."""
    num_rows: tl.constexpr = (S.K + S.tile.block_m - 1) // S.tile.block_m
    num_columns: tl.constexpr = (S.N + S.tile.block_n - 1) // S.tile.block_n
    group = task // (num_rows * num_columns)
    is_group = tl.arange(0, S.padded_groups) == group
    # Both at once: the sum runs over one group.
    bounds = tl.sum(tl.where(is_group, groups.starts.to(tl.int64) << 32 | (groups.starts + groups.rows), 0), axis=0)
    row, column = tile_in_grid(task % (num_rows * num_columns), num_rows, num_columns, S.tile.group_m)
    start, end = (bounds >> 32).to(tl.int32), (bounds & 0xFFFFFFFF).to(tl.int32)
    return GradientTile(group, start, end, row * S.tile.block_m, column * S.tile.block_n)


@triton.jit
def multiply_rows(lhs, rhs, out, groups, first_task, most_tasks, S: tl.constexpr):
    """At most so many tiles, from `first_task` on in steps of the number of programs, until there are no more.

    The loops over tiles and rows are one, written by hand since the number of blocks differs from tile to tile: the
    loads of a tile begin before the one before it is stored.
    """
    BLOCK_M: tl.constexpr = S.tile.block_m
    BLOCK_N: tl.constexpr = S.tile.block_n
    BLOCK_ROWS: tl.constexpr = S.tile.block_rows
    programs = tl.num_programs(0)
    tiles: tl.constexpr = ((S.K + BLOCK_M - 1) // BLOCK_M) * ((S.N + BLOCK_N - 1) // BLOCK_N)
    # Tasks of this program before the first one of each group, and before that of the next group.
    index = tl.arange(0, S.padded_groups)
    before = tl.minimum(tl.cdiv(tl.maximum(index * tiles - first_task, 0), programs), most_tasks)
    until = tl.minimum(tl.cdiv(tl.maximum((index + 1) * tiles - first_task, 0), programs), most_tasks)
    blocks_of_group = tl.maximum(tl.cdiv(groups.rows, BLOCK_ROWS), 1)
    num_steps = tl.sum(tl.where(index < S.num_groups, (until - before) * blocks_of_group, 0), axis=0)
    task = first_task
    block = 0
    tile = find_matrix_tile(task, groups, S)
    num_blocks = tl.maximum(tl.cdiv(tile.end - tile.start, BLOCK_ROWS), 1)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in tl.range(0, num_steps, num_stages=S.tile.num_stages):
        first = tile.start + block * BLOCK_ROWS
        a = load_bounded(lhs, first, tile.end, tile.row, BLOCK_ROWS, BLOCK_M)
        b = load_bounded(rhs, first, tile.end, tile.column, BLOCK_ROWS, BLOCK_N)
        total = tl.dot(tl.trans(a), b, total)
        is_last = block == num_blocks - 1
        if is_last:
            store_matrix_tile(out, total, tile.group, tile.row, tile.column, BLOCK_N, S.store_parts, S)
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        # Apart from the store: the compiler runs this ahead, with the loads of later steps.
        block += 1
        if is_last:
            task += programs
            tile = find_matrix_tile(task, groups, S)
            block = 0
            num_blocks = tl.maximum(tl.cdiv(tile.end - tile.start, BLOCK_ROWS), 1)


@triton.jit
def weight_gradient_fp8(lhs, rhs, lhs_scales_ptr, rhs_scales_ptr, sizes_ptr, out, S: tl.constexpr):
    """`out[g] = lhs[:, places of g] @ rhs[:, places of g].T` in `[G, K, N]`, zero for empty groups.

    `lhs` describes `[K, P]` in blocks `[BM, 128]`, `rhs` `[N, P]` in blocks `[BN, 128]`, with the places of
    fp8_columns.py, and M places at most; scales are `[M / 128, K]` and `[M / 128, N]`. Products of one block of places
    are scaled and added in float32 registers. The loops over tiles and blocks are one, see `multiply_rows`.
    """
    BLOCK_M: tl.constexpr = S.tile.block_m
    BLOCK_N: tl.constexpr = S.tile.block_n
    places = locate_places(sizes_ptr, S)
    num_tiles: tl.constexpr = ((S.K + BLOCK_M - 1) // BLOCK_M) * ((S.N + BLOCK_N - 1) // BLOCK_N)
    programs = tl.num_programs(0)
    task = tl.program_id(0)
    index = tl.arange(0, S.padded_groups)
    before = tl.cdiv(tl.maximum(index * num_tiles - task, 0), programs)
    until = tl.cdiv(tl.maximum((index + 1) * num_tiles - task, 0), programs)
    blocks_of_group = tl.maximum(places.rows // GROUP, 1)
    num_steps = tl.sum(tl.where(index < S.num_groups, (until - before) * blocks_of_group, 0), axis=0)
    tile = find_matrix_tile(task, places, S)
    place = tile.start
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in tl.range(0, num_steps, num_stages=S.tile.num_stages):
        # A group without rows has one step, behind the last place: what lies there reads as zero.
        first = tl.where(place < tile.end, place, S.M)
        a = lhs.load([tile.row, first])
        b = rhs.load([tile.column, first])
        rows = tile.row + tl.arange(0, BLOCK_M)
        columns = tile.column + tl.arange(0, BLOCK_N)
        block = (first // GROUP).to(tl.int64)
        left = tl.load(lhs_scales_ptr + block * S.K + rows, mask=(rows < S.K) & (first < S.M), other=0.0)
        right = tl.load(rhs_scales_ptr + block * S.N + columns, mask=(columns < S.N) & (first < S.M), other=0.0)
        total += tl.dot(a, tl.trans(b)) * left[:, None] * right[None, :]
        place += GROUP
        is_last = place >= tile.end
        if is_last:
            store_matrix_tile(out, total, tile.group, tile.row, tile.column, BLOCK_N, S.store_parts, S)
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if is_last:
            task += programs
            tile = find_matrix_tile(task, places, S)
            place = tile.start


@triton.jit
def weight_gradient(lhs, rhs, sizes_ptr, out, S: tl.constexpr):
    """`out[g] = lhs[rows of g].T @ rhs[rows of g]` in `[G, K, N]`, zero for empty groups.

    `lhs` and `rhs` are bounded descriptors. `out` is a pointer, or with TMA_STORE a descriptor of what is stored at a
    time, and stores end while the next tile is computed.
    """
    multiply_rows(lhs, rhs, out, locate_groups(sizes_ptr, S), tl.program_id(0), ALL_TASKS, S)
