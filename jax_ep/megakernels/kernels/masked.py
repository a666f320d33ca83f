"""Masked grouped GEMM and gated activation, on the layout of a low-latency dispatch: of M rows per group, `size` count.

Roles. Programs are persistent and equal; no program waits for another. Tasks are numbered group by group, and column by
column in a group, so the row tiles that share columns of the weights are neighbors: weights are read from memory once.
Groups without rows, and rows past the size, have no tasks.

Floor: with few rows per group, reading all weights once at memory bandwidth. So many bytes must be in flight: blocks
`[block_n, block_k]` come by TMA, several per program, and one loop over tiles and K keeps them coming across tiles.

swap_ab: Hopper's tensor cores multiply at least 64 rows, but as few as 8 columns. With fewer than 64 rows per tile the
kernel computes the transposed tile, `out.T = rhs @ lhs.T`.

FP8: products of one block of K are scaled and added in float32 registers, since sums inside of the tensor cores keep
fewer bits. Source: section 3.3 of DeepSeek-V3 (arXiv:2412.19437).
"""

import triton
import triton.language as tl

from .activation import activate_halves, load_halves
from .quantization import GROUP, quantize, scale_offsets
from .tiles import num_own_tasks, own_task


@triton.jit
def rows_of(sizes_ptr, group, M: tl.constexpr, mask=None):
    """Return the sizes of groups, clipped to `[0, M]`; the API takes any int32."""
    if mask is None:
        size = tl.load(sizes_ptr + group)
    else:
        size = tl.load(sizes_ptr + group, mask=mask, other=0)
    return tl.minimum(tl.maximum(size, 0), M)


@triton.jit
def number_masked_tasks(sizes_ptr, S: tl.constexpr):
    """Return the end task of each group, int32 `[padded_groups]`."""
    column_tiles: tl.constexpr = (S.N + S.tile.block_n - 1) // S.tile.block_n
    group = tl.arange(0, S.padded_groups)
    rows = rows_of(sizes_ptr, group, S.M, group < S.num_groups)
    return tl.cumsum((rows + S.tile.block_m - 1) // S.tile.block_m * column_tiles, axis=0)


@triton.jit
def find_masked_tile(task, group_ends, sizes_ptr, S: tl.constexpr):
    """Return a task's group, first row in it, the group's size, and column tile."""
    # The group is the first one that ends behind the task.
    before = group_ends <= task
    group = tl.sum(before.to(tl.int32), axis=0)
    local = task - tl.max(tl.where(before, group_ends, 0), axis=0)
    rows = rows_of(sizes_ptr, group, S.M)
    row_tiles = (rows + S.tile.block_m - 1) // S.tile.block_m
    # Row tiles run first, so neighbors share columns of the weights.
    return group, local % row_tiles * S.tile.block_m, rows, local // row_tiles


@triton.jit
def multiply_masked(lhs, rhs, lhs_scales_ptr, rhs_scales_ptr, group, row, column, S: tl.constexpr):
    """Compute a tile in float32 `[block_m, block_n]`, or `[block_n, block_m]` with swap_ab.

    `lhs` and `rhs` are descriptors of `[num_groups, M, K]` and `[num_groups, N, K]`.
    """
    BLOCK_M: tl.constexpr = S.tile.block_m
    BLOCK_N: tl.constexpr = S.tile.block_n
    BLOCK_K: tl.constexpr = S.tile.block_k
    SWAP_AB: tl.constexpr = S.tile.swap_ab
    total = tl.zeros((BLOCK_N, BLOCK_M) if SWAP_AB else (BLOCK_M, BLOCK_N), tl.float32)
    num_scales: tl.constexpr = S.K // GROUP
    if S.fp8:
        tl.static_assert(BLOCK_K == GROUP and GROUP % BLOCK_N == 0, "a block has one scale of the matrix")
        # Scales of the rows, and of the block of weights; rows past M repeat the last one.
        rows = group.to(tl.int64) * S.M + tl.minimum(row + tl.arange(0, BLOCK_M), S.M - 1)
        lhs_scales = lhs_scales_ptr + rows * num_scales
        column_blocks: tl.constexpr = (S.N + GROUP - 1) // GROUP
        rhs_scales = rhs_scales_ptr + (group.to(tl.int64) * column_blocks + column // GROUP) * num_scales
    for k in range(0, S.K, BLOCK_K):
        a = tl.reshape(lhs.load([group, row, k]), (BLOCK_M, BLOCK_K))
        b = tl.reshape(rhs.load([group, column, k]), (BLOCK_N, BLOCK_K))
        if S.fp8:
            # Promote to float32 every 128 of K.
            scale = tl.load(lhs_scales + k // GROUP) * tl.load(rhs_scales + k // GROUP)
            if SWAP_AB:
                total += tl.dot(b, tl.trans(a)) * scale[None, :]
            else:
                total += tl.dot(a, tl.trans(b)) * scale[:, None]
        elif SWAP_AB:
            total = tl.dot(b, tl.trans(a), total)
        else:
            total = tl.dot(a, tl.trans(b), total)
    return total


@triton.jit
def store_masked_tile(out_ptr, total, group, row, size, column, S: tl.constexpr):
    """Store the rows of a tile that lie below the group's size."""
    rows = row + tl.arange(0, S.tile.block_m)
    columns = column + tl.arange(0, S.tile.block_n)
    target = out_ptr + (group.to(tl.int64) * S.M + rows)[:, None] * S.N + columns[None, :]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(rows < size)[:, None] & (columns < S.N)[None, :])


@triton.jit
def masked_grouped_gemm(lhs, rhs, lhs_scales_ptr, rhs_scales_ptr, sizes_ptr, out_ptr, S: tl.constexpr):
    """Compute `out[g, i] = lhs[g, i] @ rhs[g].T` for rows i below the group's size; other rows are not written.

    Scales are `[num_groups, M, K / 128]` and `[num_groups, ceil(N / 128), K / 128]`; without FP8 they are not read.
    """
    group_ends = number_masked_tasks(sizes_ptr, S)
    for i in tl.range(0, num_own_tasks(tl.max(group_ends, axis=0)), flatten=True):
        group, row, size, column_tile = find_masked_tile(own_task(i), group_ends, sizes_ptr, S)
        column = column_tile * S.tile.block_n
        total = multiply_masked(lhs, rhs, lhs_scales_ptr, rhs_scales_ptr, group, row, column, S)
        if S.tile.swap_ab:
            total = tl.trans(total)
        store_masked_tile(out_ptr, total, group, row, size, column, S)


@triton.jit
def masked_gated_activation(hidden_ptr, sizes_ptr, bias_ptr, out_ptr, scales_ptr, KIND: tl.constexpr, S: tl.constexpr):
    """Activate `hidden [num_groups, M, 2 * N]` to `out [num_groups, M, N]`.

    If `S.quantizes`, the result is FP8 with `scales [num_groups, M, N / 128]`. `bias_ptr` points to biases
    `[num_groups, 2 * N]` of the hidden rows, or is None. Without gates, hidden rows and biases have N columns.
    """
    N: tl.constexpr = S.N
    BLOCK_M: tl.constexpr = S.tile.block_m
    BLOCK_N: tl.constexpr = S.tile.block_n
    group_ends = number_masked_tasks(sizes_ptr, S)
    for i in range(num_own_tasks(tl.max(group_ends, axis=0))):
        group, row, size, column_tile = find_masked_tile(own_task(i), group_ends, sizes_ptr, S)
        local = row + tl.arange(0, BLOCK_M)
        rows = group.to(tl.int64) * S.M + local
        column = column_tile * BLOCK_N
        gate, up = load_halves(hidden_ptr, rows, local < size, column, KIND, N, BLOCK_N)
        if bias_ptr is not None:
            one = group.to(tl.int64) + tl.zeros((1,), tl.int64)
            gate_bias, up_bias = load_halves(bias_ptr, one, one >= 0, column, KIND, N, BLOCK_N)
            gate, up = gate + gate_bias, up + up_bias
        values = activate_halves(gate, up, KIND)
        if S.quantizes:
            values, scales = quantize(values, BLOCK_M, BLOCK_N)
            offsets, exist = scale_offsets(rows, column, N, BLOCK_N)
            tl.store(scales_ptr + offsets, scales, mask=(local < size)[:, None] & exist)
        columns = column + tl.arange(0, BLOCK_N)[None, :]
        target = out_ptr + rows[:, None] * N + columns
        tl.store(target, values.to(out_ptr.dtype.element_ty), mask=(local < size)[:, None] & (columns < N))
