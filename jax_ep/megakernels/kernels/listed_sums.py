"""Sums of rows that a list names, one row after the other, with the next rows in flight.

A program first writes the list of its task: only existing rows, the rows of one token next to each other. It then walks
through the list in one loop, whose loads the compiler issues several rows ahead, across tokens. The loads in flight do
not depend on how many of a token's experts are on one rank, so a few programs keep memory busy.
"""

import triton
import triton.language as tl

from .quantization import dequantize, quantize, scale_offsets


@triton.jit
def write_list(list_ptr, rows, exists, targets, needed, LENGTH: tl.constexpr):
    """Write the existing ones of `rows [tokens, each]`, with the target row of their sum; return how many.

    `list_ptr` holds LENGTH rows, where -1 is a row of zeros. LENGTH targets follow: the target row for the last entry
    of a sum, -1 for other entries. Tokens that are `needed` have a sum, zero, even if none of their rows exists.
    """
    # A needed token without rows gets one entry: the row of zeros.
    without = needed & (tl.max(exists.to(tl.int32), axis=1) == 0)
    rows = tl.where(exists, rows, -1)
    exists = exists | ((tl.arange(0, rows.shape[1])[None, :] == 0) & without[:, None])
    flags = exists.to(tl.int32)
    # Position of each entry: entries of earlier tokens, then of this token.
    counts = tl.sum(flags, axis=1)
    within = tl.cumsum(flags, axis=1)
    index = (tl.cumsum(counts, axis=0) - counts)[:, None] + within - 1
    # The last entry of a token carries the target.
    ends = tl.where(within == counts[:, None], tl.broadcast_to(targets[:, None], rows.shape), -1)
    tl.debug_barrier()  # no warp still reads the previous list
    tl.store(list_ptr + index, rows, mask=exists)
    tl.store(list_ptr + LENGTH + index, ends, mask=exists)
    tl.debug_barrier()
    return tl.sum(counts, axis=0)


@triton.jit
def load_row(rows, row, h, HIDDEN: tl.constexpr, BLOCK_HIDDEN: tl.constexpr, SUM: tl.constexpr):
    """Load columns from h of a row as SUM, `[1, BLOCK_HIDDEN]`; row -1 is zero, FP8 is multiplied by its scales."""
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
    """Store columns from h of a row, rounded to the dtype of `rows`; FP8 is quantized."""
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
    """Sum `Rows` as the list says, BLOCK_HIDDEN columns at a time."""
    BLOCK_HIDDEN: tl.constexpr = TILE.block_hidden
    for h in tl.static_range(0, HIDDEN, BLOCK_HIDDEN):
        total = tl.zeros((1, BLOCK_HIDDEN), SUM)
        # One software-pipelined loop over all entries: later rows load while earlier ones are added.
        for i in tl.range(0, count, num_stages=TILE.num_stages):
            row = tl.load(list_ptr + i)
            sum_row = tl.load(list_ptr + TILE.list_length + i)
            total += load_row(source, row, h, HIDDEN, BLOCK_HIDDEN, SUM)
            # The last entry of a sum: store it and start the next one.
            if sum_row >= 0:
                store_row(target, total, sum_row, h, HIDDEN, BLOCK_HIDDEN)
                total = tl.zeros_like(total)
