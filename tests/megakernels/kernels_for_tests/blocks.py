"""Loads and stores of blocks through tensor descriptors."""

import triton
import triton.language as tl


@triton.jit
def block_of_matrix(x, y_ptr, ROW: tl.constexpr, COLUMN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """y = the block of x at a place that may lie outside."""
    index = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(y_ptr + index, x.load([ROW, COLUMN]))


@triton.jit
def block_of_group(x, y_ptr, GROUP: tl.constexpr, ROW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """y = rows of one matrix of x `[G, M, N]`."""
    index = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(y_ptr + index, tl.reshape(x.load([GROUP, ROW, 0]), (ROWS, COLUMNS)))
