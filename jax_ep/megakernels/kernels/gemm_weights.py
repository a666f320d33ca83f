"""The weight gradient of a grouped GEMM: for each group, the product of its rows of two arrays, summed over the rows.

A task is one tile of one group's matrix; each group has the same number of them. The last block of a group's rows ends
with the group: what lies behind, another group's rows or none, may hold NaN and reads as zero from both operands.
"""

import triton
import triton.language as tl

from .bounded import halves, load_bounded
from .tiles import locate_groups, tile_in_grid

ALL_TASKS = tl.constexpr(1 << 30)


@triton.jit
def store_block(
    out,
    values,
    group,
    row,
    column,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TMA_STORE: tl.constexpr,
):
    """Stores a block of one group's matrix in `[G, K, N]`, through a descriptor of such blocks or a pointer."""
    if TMA_STORE:
        out.store([group, row, column], tl.reshape(values, (1, ROWS, COLUMNS)))
    else:
        rows = row + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        target = out + (group.to(tl.int64) * K + rows)[:, None] * N + columns[None, :]
        tl.store(target, values, mask=(rows < K)[:, None] & (columns < N)[None, :])


@triton.jit
def store_matrix_tile(
    out,
    values,
    group,
    row,
    column,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
    TMA_STORE: tl.constexpr,
):
    """Stores a tile of one group's matrix in 1, 2 or 4 parts: shared memory then holds a part at a time."""
    values = values.to(out.dtype if TMA_STORE else out.dtype.element_ty)
    if PARTS == 1:
        store_block(out, values, group, row, column, N, K, BM, BN, TMA_STORE)
    else:
        left, right = halves(values, BM, BN)
        store_matrix_tile(out, left, group, row, column, N, K, BM, BN // 2, PARTS // 2, TMA_STORE)
        store_matrix_tile(out, right, group, row, column + BN // 2, N, K, BM, BN // 2, PARTS // 2, TMA_STORE)


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
def multiply_flat(
    lhs,
    rhs,
    out,
    starts,
    rows,
    first_task,
    most_tasks,
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,
    TMA_STORE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """At most so many tiles, from `first_task` on in steps of the number of programs, until there are no more.

    The loops over tiles and rows are one, written by hand since the number of blocks differs from tile to tile: the
    loads of a tile begin before the one before it is stored. STAGES blocks are in flight; None: as many as the launch
    says.
    """
    programs = tl.num_programs(0)
    tiles: tl.constexpr = ((K + BM - 1) // BM) * ((N + BN - 1) // BN)
    # Tasks of this program before the first one of each group, and before that of the next group.
    index = tl.arange(0, GROUPS)
    before = tl.minimum(tl.cdiv(tl.maximum(index * tiles - first_task, 0), programs), most_tasks)
    until = tl.minimum(tl.cdiv(tl.maximum((index + 1) * tiles - first_task, 0), programs), most_tasks)
    blocks_of_group = tl.maximum(tl.cdiv(rows, BR), 1)
    num_steps = tl.sum(tl.where(index < G, (until - before) * blocks_of_group, 0), axis=0)
    task = first_task
    block = 0
    group, start, end, row, column = find_matrix_tile(task, starts, rows, N, K, GROUPS, BM, BN, GROUP_M)
    num_blocks = tl.maximum(tl.cdiv(end - start, BR), 1)
    total = tl.zeros((BM, BN), tl.float32)
    for _ in tl.range(0, num_steps, num_stages=STAGES):
        first = start + block * BR
        a = load_bounded(lhs, first, end, row, BR, BM)
        b = load_bounded(rhs, first, end, column, BR, BN)
        total = tl.dot(tl.trans(a), b, total)
        is_last = block == num_blocks - 1
        if is_last:
            store_matrix_tile(out, total, group, row, column, N, K, BM, BN, PARTS, TMA_STORE)
            total = tl.zeros((BM, BN), tl.float32)
        # Apart from the store: the compiler runs this ahead, with the loads of later steps.
        block += 1
        if is_last:
            task += programs
            group, start, end, row, column = find_matrix_tile(task, starts, rows, N, K, GROUPS, BM, BN, GROUP_M)
            block = 0
            num_blocks = tl.maximum(tl.cdiv(end - start, BR), 1)


@triton.jit
def grouped_gemm_weights(
    lhs,
    rhs,
    sizes_ptr,
    out,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,
    TMA_STORE: tl.constexpr,
):
    """`out[g] = lhs[rows of g].T @ rhs[rows of g]` in `[G, K, N]`, zero for empty groups.

    `lhs` and `rhs` are bounded descriptors. `out` is a pointer, or with TMA_STORE a descriptor of what is stored at a
    time, and stores end while the next tile is computed.
    """
    starts, rows = locate_groups(sizes_ptr, M, G, GROUPS)
    multiply_flat(
        lhs,
        rhs,
        out,
        starts,
        rows,
        tl.program_id(0),
        ALL_TASKS,
        N,
        K,
        G,
        GROUPS,
        BM,
        BN,
        BR,
        GROUP_M,
        PARTS,
        TMA_STORE,
        None,
    )
