"""One tile of a grouped GEMM: rows times columns of their group's matrix. Kernels that communicate use it too.

Blocks come through descriptors, by TMA. What lies outside an array reads as zero, so K needs no
care, and neither do rows: those of other groups are computed, whatever they hold, and not stored.

Operands have 16-bit elements. For FP8, the scales of a block of K belong between the products of `multiply`.
"""

import triton
import triton.language as tl

from .bounded import store_bounded, store_in_parts

ZERO_ROWS = tl.constexpr(8)  # a block of those past the groups


@triton.jit
def load_rhs(
    rhs,
    group,
    k,
    column,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TRANSPOSE: tl.constexpr,
):
    """`[BK, BN]` of one group's matrix, from `[G, K, N]`, or transposed from `[G, N, K]`.

    `rhs` is a descriptor with blocks `[1, BK, BN]`, or `[1, BN, BK]`.
    """
    if TRANSPOSE:
        block = tl.trans(tl.reshape(rhs.load([group, column, k]), (BN, BK)))
    else:
        block = tl.reshape(rhs.load([group, k, column]), (BK, BN))
    return block


@triton.jit
def multiply(
    lhs,
    rhs,
    row,
    group,
    column,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TRANSPOSE: tl.constexpr,
):
    """float32 `[BM, BN]` of consecutive rows; `lhs` is a descriptor of `[M, K]` with blocks `[BM, BK]`."""
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        block = load_rhs(rhs, group, k, column, BN, BK, TRANSPOSE)
        total = tl.dot(lhs.load([row, k]), block, total)
    return total


@triton.jit
def store_tile(
    out, total, row, end, column, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TMA_PARTS: tl.constexpr
):
    """Stores the rows before `end` of a tile.

    `out` points at `[M, N]`, or is a bounded descriptor of blocks `[BM, BN / TMA_PARTS]`, where that is not 0.
    """
    if TMA_PARTS:
        store_in_parts(out, total.to(out.dtype), row, end, column, BM, BN, TMA_PARTS)
    else:
        rows = row + tl.arange(0, BM)
        columns = column + tl.arange(0, BN)
        target = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=(rows < end)[:, None] & (columns < N)[None, :])


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
