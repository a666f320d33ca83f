"""Grouped GEMM and gated activation on the layout of a low-latency dispatch: of M rows of a group the first count.

Tasks are numbered group by group, in a group column by column, so that the row tiles that share a part of the group's
matrix are neighbours: it is read from memory once. Groups without rows, and rows past the count, have no tasks.

With few rows per group the matrices are nearly all that is read, each once. So what counts is how many bytes of them
are under way: blocks of [BN, BK] come by TMA, several per program, and one loop over tiles and K keeps them coming
across the end of a tile.

Tensor cores of Hopper multiply 64 rows at a time, but as few as 8 columns. With fewer than 64 rows per tile the product
is turned (SWAP): columns of the matrix stand in for rows, `out.T = rhs @ lhs.T`.

In FP8, products of one block of K are scaled and added in float32 registers, since the sums inside of the tensor cores
keep fewer bits. Source: section 3.3 of DeepSeek-V3 (arXiv:2412.19437).
"""

import triton
import triton.language as tl

from .activation import activate, factor_of, limit_gate
from .quantization import GROUP, quantize, scale_offsets
from .tiles import num_turns, task_of_turn


@triton.jit
def rows_of(sizes_ptr, group, M: tl.constexpr, mask=None):
    """Rows of groups that count; the API takes any int32."""
    if mask is None:
        size = tl.load(sizes_ptr + group)
    else:
        size = tl.load(sizes_ptr + group, mask=mask, other=0)
    return tl.minimum(tl.maximum(size, 0), M)


@triton.jit
def number_masked_tasks(sizes_ptr, S: tl.constexpr):
    """`[GROUPS]` int32: the first task after each group."""
    column_tiles: tl.constexpr = (S.N + S.tile.block_n - 1) // S.tile.block_n
    group = tl.arange(0, S.padded_groups)
    rows = rows_of(sizes_ptr, group, S.M, group < S.num_groups)
    return tl.cumsum((rows + S.tile.block_m - 1) // S.tile.block_m * column_tiles, axis=0)


@triton.jit
def find_masked_tile(task, group_ends, sizes_ptr, S: tl.constexpr):
    """Group, first row in its block, rows of the group that count, and column tile of a task."""
    before = group_ends <= task
    group = tl.sum(before.to(tl.int32), axis=0)
    local = task - tl.max(tl.where(before, group_ends, 0), axis=0)
    rows = rows_of(sizes_ptr, group, S.M)
    row_tiles = (rows + S.tile.block_m - 1) // S.tile.block_m
    return group, local % row_tiles * S.tile.block_m, rows, local // row_tiles


@triton.jit
def multiply_masked(lhs, rhs, lhs_scales_ptr, rhs_scales_ptr, group, row, column, S: tl.constexpr):
    """float32 `[BM, BN]`, or `[BN, BM]` with SWAP, from descriptors of `[G, M, K]` and `[G, N, K]`."""
    BLOCK_M: tl.constexpr = S.tile.block_m
    BLOCK_N: tl.constexpr = S.tile.block_n
    BLOCK_K: tl.constexpr = S.tile.block_k
    SWAP_AB: tl.constexpr = S.tile.swap_ab
    total = tl.zeros((BLOCK_N, BLOCK_M) if SWAP_AB else (BLOCK_M, BLOCK_N), tl.float32)
    num_scales: tl.constexpr = S.K // GROUP
    if S.fp8:
        tl.static_assert(BLOCK_K == GROUP and GROUP % BLOCK_N == 0, "a block has one scale of the matrix")
        rows = group.to(tl.int64) * S.M + tl.minimum(row + tl.arange(0, BLOCK_M), S.M - 1)
        lhs_scales = lhs_scales_ptr + rows * num_scales
        column_blocks: tl.constexpr = (S.N + GROUP - 1) // GROUP
        rhs_scales = rhs_scales_ptr + (group.to(tl.int64) * column_blocks + column // GROUP) * num_scales
    for k in range(0, S.K, BLOCK_K):
        a = tl.reshape(lhs.load([group, row, k]), (BLOCK_M, BLOCK_K))
        b = tl.reshape(rhs.load([group, column, k]), (BLOCK_N, BLOCK_K))
        if S.fp8:
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
def masked_grouped_gemm(lhs, rhs, lhs_scales_ptr, rhs_scales_ptr, sizes_ptr, out_ptr, S: tl.constexpr):
    """`out[g, i] = lhs[g, i] @ rhs[g].T` for rows i below the group's size; others are not written.

    Scales are `[G, M, K / 128]` and `[G, ceil(N / 128), K / 128]`; without FP8 they are not read.
    """
    group_ends = number_masked_tasks(sizes_ptr, S)
    for turn in tl.range(0, num_turns(tl.max(group_ends, axis=0)), flatten=True):
        group, row, size, column_tile = find_masked_tile(task_of_turn(turn), group_ends, sizes_ptr, S)
        column = column_tile * S.tile.block_n
        total = multiply_masked(lhs, rhs, lhs_scales_ptr, rhs_scales_ptr, group, row, column, S)
        if S.tile.swap_ab:
            total = tl.trans(total)
        rows = row + tl.arange(0, S.tile.block_m)
        columns = column + tl.arange(0, S.tile.block_n)
        target = out_ptr + (group.to(tl.int64) * S.M + rows)[:, None] * S.N + columns[None, :]
        tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(rows < size)[:, None] & (columns < S.N)[None, :])


@triton.jit
def load_masked_halves(x_ptr, rows, mask, column, KIND: tl.constexpr, S: tl.constexpr):
    """float32 gates and what they multiply of a block of `[., 2 * N]`; without gates the block of `[., N]`, twice."""
    N: tl.constexpr = S.N
    BLOCK_N: tl.constexpr = S.tile.block_n
    if KIND.interleaved:
        columns = 2 * column + tl.arange(0, 2 * BLOCK_N)[None, :]
        both = tl.load(x_ptr + rows[:, None] * (2 * N) + columns, mask=mask[:, None] & (columns < 2 * N), other=0.0)
        gate, up = tl.split(tl.reshape(both.to(tl.float32), (rows.shape[0], BLOCK_N, 2)))
    else:
        columns = column + tl.arange(0, BLOCK_N)[None, :]
        inside = mask[:, None] & (columns < N)
        source = x_ptr + rows[:, None] * (2 * N if KIND.gated else N) + columns
        gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(source + N, mask=inside, other=0.0).to(tl.float32) if KIND.gated else gate
    return gate, up


@triton.jit
def masked_gated_activation(hidden_ptr, sizes_ptr, bias_ptr, out_ptr, scales_ptr, KIND: tl.constexpr, S: tl.constexpr):
    """`hidden [G, M, 2 * N]` to `out [G, M, N]`, with QUANTIZE as FP8 and `scales [G, M, N / 128]`.

    With biases `[G, 2 * N]` of the hidden rows, or None. Without gates hidden is `[G, M, N]`, and biases as wide.
    """
    N: tl.constexpr = S.N
    BLOCK_M: tl.constexpr = S.tile.block_m
    BLOCK_N: tl.constexpr = S.tile.block_n
    group_ends = number_masked_tasks(sizes_ptr, S)
    for turn in range(num_turns(tl.max(group_ends, axis=0))):
        group, row, size, column_tile = find_masked_tile(task_of_turn(turn), group_ends, sizes_ptr, S)
        local = row + tl.arange(0, BLOCK_M)
        rows = group.to(tl.int64) * S.M + local
        column = column_tile * BLOCK_N
        gate, up = load_masked_halves(hidden_ptr, rows, local < size, column, KIND, S)
        if bias_ptr is not None:
            one = group.to(tl.int64) + tl.zeros((1,), tl.int64)
            gate_bias, up_bias = load_masked_halves(bias_ptr, one, one >= 0, column, KIND, S)
            gate, up = gate + gate_bias, up + up_bias
        values = activate(limit_gate(gate, KIND), KIND)
        if KIND.gated:
            values *= factor_of(up, KIND)
        if S.quantizes:
            values, scales = quantize(values, BLOCK_M, BLOCK_N)
            offsets, exist = scale_offsets(rows, column, N, BLOCK_N)
            tl.store(scales_ptr + offsets, scales, mask=(local < size)[:, None] & exist)
        columns = column + tl.arange(0, BLOCK_N)[None, :]
        target = out_ptr + rows[:, None] * N + columns
        tl.store(target, values.to(out_ptr.dtype.element_ty), mask=(local < size)[:, None] & (columns < N))
