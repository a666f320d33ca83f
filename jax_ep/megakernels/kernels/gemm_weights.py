"""The weight gradient of a grouped GEMM: for each group, the product of its rows of two arrays, summed over the rows.

A task is one tile of one group's matrix; each group has the same number of them. The last block of a group's rows ends
with the group: what lies behind, another group's rows or none, may hold NaN and reads as zero from both operands.
"""

import triton
import triton.language as tl

from .bounded import load_bounded
from .tiles import locate_groups, tile_in_grid


@triton.jit
def load_rows(x, row, end, column, WIDTH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """`[BR, BC]` of `[M, WIDTH]`, zero from row `end` on; `x` is a bounded descriptor, or a pointer."""
    if DESCRIPTORS:
        block = load_bounded(x, row, end, column, BR, BC)
    else:
        rows = row + tl.arange(0, BR)
        columns = column + tl.arange(0, BC)
        inside = (rows < end)[:, None] & (columns < WIDTH)[None, :]
        block = tl.load(x + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)
    return block


@triton.jit
def store_matrix_tile(
    out,
    total,
    group,
    row,
    column,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    TMA_STORE: tl.constexpr,
):
    """Stores a tile of one group's matrix in `[G, K, N]`, through a descriptor or a pointer."""
    if TMA_STORE:
        out.store([group, row, column], tl.reshape(total.to(out.dtype), (1, BM, BN)))
    else:
        rows = row + tl.arange(0, BM)
        columns = column + tl.arange(0, BN)
        target = out + (group.to(tl.int64) * K + rows)[:, None] * N + columns[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=(rows < K)[:, None] & (columns < N)[None, :])


@triton.jit
def find_matrix_tile(
    task,
    starts,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Group of a task, its first row and the end of its rows, and the first row and column of the tile."""
    num_rows: tl.constexpr = (K + BM - 1) // BM
    num_columns: tl.constexpr = (N + BN - 1) // BN
    group = task // (num_rows * num_columns)
    is_group = tl.arange(0, GROUPS) == group
    # Both at once: the sum runs over one group.
    bounds = tl.sum(tl.where(is_group, starts.to(tl.int64) << 32 | (starts + rows), 0), axis=0)
    row, column = tile_in_grid(task % (num_rows * num_columns), num_rows, num_columns, GROUP_M)
    return group, (bounds >> 32).to(tl.int32), (bounds & 0xFFFFFFFF).to(tl.int32), row * BM, column * BN


@triton.jit
def grouped_gemm_weights(
    lhs,
    rhs,
    sizes_ptr,
    out_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    GROUP_M: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    FLATTEN: tl.constexpr,
    TMA_STORE: tl.constexpr,
):
    """`out[g] = lhs[rows of g].T @ rhs[rows of g]` in `[G, K, N]`, zero for empty groups.

    With FLATTEN the loops over tiles and rows are one, written by hand since the number of blocks differs from tile to
    tile: the loads of a tile begin before the one before it is stored. With TMA_STORE stores end while the next tile is
    computed.
    """
    starts, rows = locate_groups(sizes_ptr, M, G, GROUPS)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    out = out_ptr
    if TMA_STORE:
        out = tl.make_tensor_descriptor(out_ptr, [G, K, N], [K * N, N, 1], [1, BM, BN])
    tiles: tl.constexpr = ((K + BM - 1) // BM) * ((N + BN - 1) // BN)
    if FLATTEN:
        # Tasks of this program before the first one of each group, and before that of the next group.
        index = tl.arange(0, GROUPS)
        before = tl.cdiv(tl.maximum(index * tiles - program, 0), programs)
        until = tl.cdiv(tl.maximum((index + 1) * tiles - program, 0), programs)
        blocks_of_group = tl.maximum(tl.cdiv(rows, BR), 1)
        num_steps = tl.sum(tl.where(index < G, (until - before) * blocks_of_group, 0), axis=0)
        task = program - programs
        block = 0
        num_blocks = 1
        group = 0
        start = 0
        end = 0
        row = 0
        column = 0
        total = tl.zeros((BM, BN), tl.float32)
        for _ in range(num_steps):
            block += 1
            if block == num_blocks:
                task += programs
                group, start, end, row, column = find_matrix_tile(task, starts, rows, N, K, GROUPS, BM, BN, GROUP_M)
                block = 0
                num_blocks = tl.maximum(tl.cdiv(end - start, BR), 1)
            a = load_rows(lhs, start + block * BR, end, row, K, BR, BM, DESCRIPTORS)
            b = load_rows(rhs, start + block * BR, end, column, N, BR, BN, DESCRIPTORS)
            total = tl.dot(tl.trans(a), b, total)
            if block == num_blocks - 1:
                store_matrix_tile(out, total, group, row, column, N, K, BM, BN, TMA_STORE)
                total = tl.zeros((BM, BN), tl.float32)
    else:
        for task in range(program, G * tiles, programs):
            group, start, end, row, column = find_matrix_tile(task, starts, rows, N, K, GROUPS, BM, BN, GROUP_M)
            total = tl.zeros((BM, BN), tl.float32)
            for first in range(start, end, BR):
                a = load_rows(lhs, first, end, row, K, BR, BM, DESCRIPTORS)
                b = load_rows(rhs, first, end, column, N, BR, BN, DESCRIPTORS)
                total = tl.dot(tl.trans(a), b, total)
            store_matrix_tile(out, total, group, row, column, N, K, BM, BN, TMA_STORE)
