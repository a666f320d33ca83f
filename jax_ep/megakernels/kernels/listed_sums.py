"""Sums of rows that a list names, one row after the other, with the next ones on their way.

A program first writes the list of its task: only rows that exist, the rows of a token one after another. Then it walks
through the list in one loop, whose loads the compiler issues several rows ahead, over the borders of tokens. What is
in flight does not depend on how many of a token's experts are on one rank, so that few programs keep memory busy.
"""

import triton
import triton.language as tl

from .quantization import dequantize, quantize, scale_offsets


@triton.jit
def write_list(list_ptr, rows, exists, targets, needed, LENGTH: tl.constexpr):
    """Writes those of `rows [TOKENS, EACH]` that exist, with the row that their sum goes to; returns how many.

    `list_ptr` has LENGTH rows, of which -1 is a row of zeros, then for each of them the target, if it is the last
    one of its sum, or else -1. Tokens that are `needed` have a sum also where no row exists: zero.
    """
    without = needed & (tl.max(exists.to(tl.int32), axis=1) == 0)
    rows = tl.where(exists, rows, -1)
    exists = exists | ((tl.arange(0, rows.shape[1])[None, :] == 0) & without[:, None])
    flags = exists.to(tl.int32)
    counts = tl.sum(flags, axis=1)
    within = tl.cumsum(flags, axis=1)
    index = (tl.cumsum(counts, axis=0) - counts)[:, None] + within - 1
    ends = tl.where(within == counts[:, None], tl.broadcast_to(targets[:, None], rows.shape), -1)
    tl.debug_barrier()  # no warp still reads the list before
    tl.store(list_ptr + index, rows, mask=exists)
    tl.store(list_ptr + LENGTH + index, ends, mask=exists)
    tl.debug_barrier()
    return tl.sum(counts, axis=0)


@triton.jit
def load_row(rows, row, h, HIDDEN: tl.constexpr, BLOCK_HIDDEN: tl.constexpr, SUM: tl.constexpr):
    """Columns from h of a row, `[1, BLOCK_H]`; FP8 with its scales; zeros of row -1."""
    columns = h + tl.arange(0, BLOCK_HIDDEN)[None, :]
    source = tl.multiple_of(rows.values_ptr + row.to(tl.int64) * HIDDEN + columns, (16, 16))
    values = tl.load(source, mask=(columns < HIDDEN) & (row >= 0), other=0.0)
    if rows.values_ptr.dtype.element_ty == tl.float8e4nv:
        offsets, exists = scale_offsets(row + tl.zeros((1,), tl.int32), h, HIDDEN, BLOCK_HIDDEN)
        scales = tl.load(rows.scales_ptr + offsets, mask=exists & (row >= 0), other=0.0)
        row_values = dequantize(values, scales, 1, BLOCK_HIDDEN)
    else:
        row_values = values.to(SUM)
    return row_values


@triton.jit
def store_row(rows, values, row, h, HIDDEN: tl.constexpr, BLOCK_HIDDEN: tl.constexpr):
    """The reverse, for a row that exists."""
    columns = h + tl.arange(0, BLOCK_HIDDEN)[None, :]
    target = tl.multiple_of(rows.values_ptr + row.to(tl.int64) * HIDDEN + columns, (16, 16))
    if rows.values_ptr.dtype.element_ty == tl.float8e4nv:
        quantized, scales = quantize(values, 1, BLOCK_HIDDEN)
        offsets, exists = scale_offsets(row + tl.zeros((1,), tl.int32), h, HIDDEN, BLOCK_HIDDEN)
        tl.store(rows.scales_ptr + offsets, scales, mask=exists)
        tl.store(target, quantized, mask=columns < HIDDEN)
    else:
        tl.store(target, values.to(rows.values_ptr.dtype.element_ty), mask=columns < HIDDEN)


@triton.jit
def sum_listed(list_ptr, count, source, target, SUM: tl.constexpr, HIDDEN: tl.constexpr, TILE: tl.constexpr):
    """Sums `Rows` `[., H]` as the list says, BLOCK_H columns at a time; what is FP8 has scales."""
    BLOCK_HIDDEN: tl.constexpr = TILE.block_hidden
    for h in tl.static_range(0, HIDDEN, BLOCK_HIDDEN):
        total = tl.zeros((1, BLOCK_HIDDEN), SUM)
        for i in tl.range(0, count, num_stages=TILE.num_stages):
            row = tl.load(list_ptr + i)
            sum_row = tl.load(list_ptr + TILE.list_length + i)
            total += load_row(source, row, h, HIDDEN, BLOCK_HIDDEN, SUM)
            if sum_row >= 0:
                store_row(target, total, sum_row, h, HIDDEN, BLOCK_HIDDEN)
                total = tl.zeros_like(total)
