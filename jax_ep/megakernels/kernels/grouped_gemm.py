"""Grouped GEMM: multiply each row with its group's weights, in 16 or 32 bits or FP8; and the weight gradient.

Roles. Programs are persistent and equal; each computes one tile after another (tiles.py), and no program waits for
another. The loops over tiles and over K are flattened into one, so the loads of a tile begin before the previous tile
is stored. Floor: the tensor cores' rate for many rows per group, reading all weights once for few.

Weight gradient: for each group, contract its rows of two arrays. A task is one tile of one group's gradient; every
group has the same number of tiles. The last block of a group's rows ends at the group: rows behind it belong to another
group or to none, may hold NaN, and read as zero from both operands.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .fp8_columns import locate_places
from .gemm_structs import Value
from .quantization import GROUP
from .tiles import (
    add_bias,
    find_tile,
    load_bounded,
    locate_groups,
    locate_weights,
    multiply,
    num_own_tasks,
    number_tasks,
    own_task,
    split_columns,
    store_tile,
    tasks_until,
    tile_in_grid,
    zero_rest,
)


@triton.jit
def grouped_gemm(lhs, rhs, sizes_ptr, bias, out, S: tl.constexpr):
    """Compute `out[rows of g] = lhs[rows of g] @ rhs[g]`, and zeros past the groups.

    `lhs` and `rhs` are descriptors. `bias` is a `Bias` that is added, or None. `out` is a pointer, or if `S.tma_parts`
    is not 0 a bounded descriptor of blocks `[block_m, block_n / tma_parts]`: TMA stores overlap with the next tile.
    """
    group_ends = number_tasks(locate_groups(sizes_ptr, S), S)
    for i in tl.range(0, num_own_tasks(tasks_until(tl.max(group_ends, axis=0))), flatten=True):
        tile = find_tile(own_task(i), group_ends, sizes_ptr, S)
        store_tile(out, add_bias(multiply(lhs, rhs, tile, S), bias, tile, S), tile, S)
    zero_rest(out, group_ends, S)


@triton.jit
def multiply_fp8(lhs, rhs, lhs_scales_ptr, rhs_scales_ptr, tile, S: tl.constexpr):
    """Compute a `Tile` of FP8 operands in float32 `[block_m, block_n]`; operands as for `grouped_gemm_fp8`.

    Products of one block of K are scaled and added in float32 registers, see masked.py.
    """
    BLOCK_M: tl.constexpr = S.tile.block_m
    BLOCK_N: tl.constexpr = S.tile.block_n
    tl.static_assert(GROUP % BLOCK_N == 0, "a block has one scale of the matrix")
    num_scales: tl.constexpr = S.K // GROUP
    column_blocks: tl.constexpr = (S.N + GROUP - 1) // GROUP
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Rows of other groups are computed too, and not stored.
    rows = tl.minimum(tile.row + tl.arange(0, BLOCK_M), S.M - 1).to(tl.int64)
    lhs_scales = lhs_scales_ptr + rows * num_scales
    rhs_scales = rhs_scales_ptr + (tile.group.to(tl.int64) * column_blocks + tile.column // GROUP) * num_scales
    for k in range(0, S.K, GROUP):
        a = tl.reshape(lhs.load([0, tile.row, k]), (BLOCK_M, GROUP))
        b = tl.reshape(rhs.load([tile.group, tile.column, k]), (BLOCK_N, GROUP))
        scale = tl.load(lhs_scales + k // GROUP) * tl.load(rhs_scales + k // GROUP)
        # Promote to float32 every 128 of K: scale the block's products, then add.
        total += tl.dot(a, tl.trans(b)) * scale[:, None]
    return total


@triton.jit
def grouped_gemm_fp8(lhs, rhs, lhs_scales_ptr, rhs_scales_ptr, sizes_ptr, out_ptr, S: tl.constexpr):
    """Compute `out[rows of g] = lhs[rows of g] @ rhs[g].T` of FP8 operands, and zeros past the groups.

    `lhs` describes `[1, M, K]` in blocks `[1, block_m, 128]`, `rhs` `[num_groups, N, K]` in blocks `[1, block_n, 128]`.
    Scales are `[M, K / 128]` and `[num_groups, ceil(N / 128), K / 128]`. A tile has at most 128 columns: its sum and
    the products of one block of K take as many registers each.
    """
    group_ends = number_tasks(locate_groups(sizes_ptr, S), S)
    for i in tl.range(0, num_own_tasks(tasks_until(tl.max(group_ends, axis=0))), flatten=True):
        tile = find_tile(own_task(i), group_ends, sizes_ptr, S)
        total = multiply_fp8(lhs, rhs, lhs_scales_ptr, rhs_scales_ptr, tile, S)
        store_tile(out_ptr, total, tile, S)
    zero_rest(out_ptr, group_ends, S)


@triton.jit
def store_block(out, values, group, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, S: tl.constexpr):
    """Store a block of one group's gradient `[num_groups, K, N]`, through a descriptor of such blocks or a pointer."""
    if S.tma_store:
        out.store([group, row, column], tl.reshape(values, (1, ROWS, COLUMNS)))
    else:
        rows = row + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        target = out + (group.to(tl.int64) * S.K + rows)[:, None] * S.N + columns[None, :]
        tl.store(target, values, mask=(rows < S.K)[:, None] & (columns < S.N)[None, :])


@triton.jit
def store_gradient_tile(out, values, group, row, column, COLUMNS: tl.constexpr, PARTS: tl.constexpr, S: tl.constexpr):
    """Store a tile of one group's gradient in 1, 2 or 4 parts, so that shared memory holds one part at a time."""
    BLOCK_M: tl.constexpr = S.tile.block_m
    values = values.to(out.dtype if S.tma_store else out.dtype.element_ty)
    if PARTS == 1:
        store_block(out, values, group, row, column, BLOCK_M, COLUMNS, S)
    else:
        left, right = split_columns(values, BLOCK_M, COLUMNS)
        store_gradient_tile(out, left, group, row, column, COLUMNS // 2, PARTS // 2, S)
        store_gradient_tile(out, right, group, row, column + COLUMNS // 2, COLUMNS // 2, PARTS // 2, S)


class GradientTile(NamedTuple):
    """One tile of a group's weight gradient."""

    group: Value
    start: Value  # first row of the group, over whose rows the tile contracts
    end: Value  # one past the last row of the group
    row: Value  # first row of the tile
    column: Value  # first column of the tile


@triton.jit
def find_gradient_tile(task, groups, S: tl.constexpr):
    """Return the `GradientTile` of a task."""
    num_rows: tl.constexpr = (S.K + S.tile.block_m - 1) // S.tile.block_m
    num_columns: tl.constexpr = (S.N + S.tile.block_n - 1) // S.tile.block_n
    group = task // (num_rows * num_columns)
    is_group = tl.arange(0, S.padded_groups) == group
    # Extract start and end of the one matching group in a single reduction: start << 32 | end.
    bounds = tl.sum(tl.where(is_group, groups.starts.to(tl.int64) << 32 | (groups.starts + groups.rows), 0), axis=0)
    row, column = tile_in_grid(task % (num_rows * num_columns), num_rows, num_columns, S.tile.group_m)
    start, end = (bounds >> 32).to(tl.int32), (bounds & 0xFFFFFFFF).to(tl.int32)
    return GradientTile(group, start, end, row * S.tile.block_m, column * S.tile.block_n)


@triton.jit
def weight_gradient(lhs, rhs, sizes_ptr, out, S: tl.constexpr):
    """Compute `out[g] = lhs[rows of g].T @ rhs[rows of g]` in `[num_groups, K, N]`, zero for empty groups.

    `lhs` and `rhs` are bounded descriptors. `out` is a pointer, or if `S.tma_store` a descriptor of the stored blocks:
    TMA stores overlap with the next tile; a `SplitWeights` of two of them if `S.home_groups` is not 0. The loops over
    tiles and rows are one. It is written by hand, since the number of row blocks differs between groups: the loads of
    a tile begin before the previous tile is stored.
    """
    BLOCK_M: tl.constexpr = S.tile.block_m
    BLOCK_N: tl.constexpr = S.tile.block_n
    BLOCK_ROWS: tl.constexpr = S.tile.block_rows
    programs = tl.num_programs(0)
    tiles: tl.constexpr = ((S.K + BLOCK_M - 1) // BLOCK_M) * ((S.N + BLOCK_N - 1) // BLOCK_N)
    # Number of this program's steps: its tasks in each group, times the group's row blocks (at least one, so that empty
    # groups store zeros).
    groups = locate_groups(sizes_ptr, S)
    index = tl.arange(0, S.padded_groups)
    task = tl.program_id(0)
    before = tl.cdiv(tl.maximum(index * tiles - task, 0), programs)
    until = tl.cdiv(tl.maximum((index + 1) * tiles - task, 0), programs)
    blocks_of_group = tl.maximum(tl.cdiv(groups.rows, BLOCK_ROWS), 1)
    num_steps = tl.sum(tl.where(index < S.num_groups, (until - before) * blocks_of_group, 0), axis=0)
    block = 0
    tile = find_gradient_tile(task, groups, S)
    num_blocks = tl.maximum(tl.cdiv(tile.end - tile.start, BLOCK_ROWS), 1)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(num_steps):
        first = tile.start + block * BLOCK_ROWS
        # One step: contract a block of rows; rows past the group read as zero.
        a = load_bounded(lhs, first, tile.end, tile.row, BLOCK_ROWS, BLOCK_M)
        b = load_bounded(rhs, first, tile.end, tile.column, BLOCK_ROWS, BLOCK_N)
        total = tl.dot(tl.trans(a), b, total)
        is_last = block == num_blocks - 1
        # Last row block of the tile: store it and start the next one.
        if is_last:
            target, group = locate_weights(out, tile.group, S.home_groups)
            store_gradient_tile(target, total, group, tile.row, tile.column, BLOCK_N, S.store_parts, S)
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        # Separate from the store, so that the compiler can run it ahead with the loads of later steps.
        block += 1
        if is_last:
            task += programs
            tile = find_gradient_tile(task, groups, S)
            block = 0
            num_blocks = tl.maximum(tl.cdiv(tile.end - tile.start, BLOCK_ROWS), 1)


@triton.jit
def weight_gradient_fp8(lhs, rhs, lhs_scales_ptr, rhs_scales_ptr, sizes_ptr, out, S: tl.constexpr):
    """Compute `out[g] = lhs[:, places of g] @ rhs[:, places of g].T` in `[num_groups, K, N]`, zero for empty groups.

    `lhs` describes `[K, places]` in blocks `[block_m, 128]`, `rhs` `[N, places]` in blocks `[block_n, 128]`, with the
    places of fp8_columns.py; there are at most M. Scales are `[M / 128, K]` and `[M / 128, N]`. Products of one block
    of places are scaled and added in float32 registers. The loops over tiles and blocks are one, and `out` may be two
    arrays, see `weight_gradient`.
    """
    BLOCK_M: tl.constexpr = S.tile.block_m
    BLOCK_N: tl.constexpr = S.tile.block_n
    places = locate_places(sizes_ptr, S)
    num_tiles: tl.constexpr = ((S.K + BLOCK_M - 1) // BLOCK_M) * ((S.N + BLOCK_N - 1) // BLOCK_N)
    programs = tl.num_programs(0)
    task = tl.program_id(0)
    index = tl.arange(0, S.padded_groups)
    # Number of this program's steps, as in `weight_gradient`.
    before = tl.cdiv(tl.maximum(index * num_tiles - task, 0), programs)
    until = tl.cdiv(tl.maximum((index + 1) * num_tiles - task, 0), programs)
    blocks_of_group = tl.maximum(places.rows // GROUP, 1)
    num_steps = tl.sum(tl.where(index < S.num_groups, (until - before) * blocks_of_group, 0), axis=0)
    tile = find_gradient_tile(task, places, S)
    place = tile.start
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(num_steps):
        # An empty group has one step behind the last place, which reads as zero.
        first = tl.where(place < tile.end, place, S.M)
        a = lhs.load([tile.row, first])
        b = rhs.load([tile.column, first])
        rows = tile.row + tl.arange(0, BLOCK_M)
        columns = tile.column + tl.arange(0, BLOCK_N)
        block = (first // GROUP).to(tl.int64)
        left = tl.load(lhs_scales_ptr + block * S.K + rows, mask=(rows < S.K) & (first < S.M), other=0.0)
        right = tl.load(rhs_scales_ptr + block * S.N + columns, mask=(columns < S.N) & (first < S.M), other=0.0)
        # Promote to float32 every 128 places.
        total += tl.dot(a, tl.trans(b)) * left[:, None] * right[None, :]
        place += GROUP
        is_last = place >= tile.end
        # Last block of the tile: store it and start the next one.
        if is_last:
            target, group = locate_weights(out, tile.group, S.home_groups)
            store_gradient_tile(target, total, group, tile.row, tile.column, BLOCK_N, S.store_parts, S)
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if is_last:
            # Separate from the store, as in `weight_gradient`.
            task += programs
            tile = find_gradient_tile(task, places, S)
            place = tile.start
