"""Sums of rows that a list names, one row after the other, with the next rows in flight.

A program first writes the list of its task: only existing rows, the rows of one token next to each other. It then walks
through the list in one loop, which has several rows in flight, across tokens, however many of a token's experts are on
one rank. Narrow rows, and those of a few programs, go to registers: each row by shared memory costs a barrier.
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
def load_row(rows, row, h, HIDDEN: tl.constexpr, BLOCK_HIDDEN: tl.constexpr):
    """Load columns from h of a row, `[1, BLOCK_HIDDEN]`, and the scales of FP8 values; row -1 is zero."""
    columns = h + tl.arange(0, BLOCK_HIDDEN)[None, :]
    source = tl.multiple_of(rows.values_ptr + row.to(tl.int64) * HIDDEN + columns, (16, 16))
    values = tl.load(source, mask=(columns < HIDDEN) & (row >= 0), other=0.0)
    scales = values
    if rows.values_ptr.dtype.element_ty == tl.float8e4nv:
        offsets, exists = scale_offsets(row + tl.zeros((1,), tl.int32), h, HIDDEN, BLOCK_HIDDEN)
        scales = tl.load(rows.scales_ptr + offsets, mask=exists & (row >= 0), other=0.0)
    return values, scales


@triton.jit
def added(total, loaded):
    """Return a sum with a loaded row; FP8 values are multiplied by their scales."""
    values, scales = loaded
    if values.dtype == tl.float8e4nv:
        row = dequantize(values, scales, 1, values.shape[1])
    else:
        row = values.to(total.dtype)
    return total + row


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
def append(values, value):
    """Return a tuple with one more value."""
    return values + (value,)  # noqa: RUF005 - Triton unpacks no tuples


@triton.jit
def load_entries(list_ptr, first, count, AT_ONCE: tl.constexpr):
    """Load AT_ONCE entries from `first` on; -1 past the end."""
    entries = ()
    for i in tl.static_range(AT_ONCE):
        entries = append(entries, tl.load(list_ptr + first + i, mask=first + i < count, other=-1))
    return entries


@triton.jit
def add_row(total, loaded, target, sum_row, h, HIDDEN: tl.constexpr, BLOCK_HIDDEN: tl.constexpr):
    """Return a sum with a loaded row; after the last row of a sum, store it and return the start of the next one."""
    total = added(total, loaded)
    if sum_row >= 0:
        store_row(target, total, sum_row, h, HIDDEN, BLOCK_HIDDEN)
        total = tl.zeros_like(total)
    return total


@triton.jit
def sum_listed(list_ptr, count, source, target, SUM: tl.constexpr, HIDDEN: tl.constexpr, TILE: tl.constexpr):
    """Sum `Rows` as the list says, BLOCK_HIDDEN columns at a time."""
    BLOCK_HIDDEN: tl.constexpr = TILE.block_hidden
    AT_ONCE: tl.constexpr = TILE.rows_in_flight
    ends_ptr = list_ptr + TILE.list_length
    for h in tl.static_range(0, HIDDEN, BLOCK_HIDDEN):
        total = tl.zeros((1, BLOCK_HIDDEN), SUM)
        if TILE.in_registers:
            rows = load_entries(list_ptr, 0, count, AT_ONCE)
            for first in range(0, count, AT_ONCE):
                loaded = ()
                for i in tl.static_range(AT_ONCE):
                    loaded = append(loaded, load_row(source, rows[i], h, HIDDEN, BLOCK_HIDDEN))
                # The next entries load while these rows do.
                ends = load_entries(ends_ptr, first, count, AT_ONCE)
                rows = load_entries(list_ptr, first + AT_ONCE, count, AT_ONCE)
                for i in tl.static_range(AT_ONCE):
                    total = add_row(total, loaded[i], target, ends[i], h, HIDDEN, BLOCK_HIDDEN)
        else:
            # A software-pipelined loop: later rows are copied to shared memory while earlier ones are added.
            for i in tl.range(0, count, num_stages=AT_ONCE + 1):
                row = load_row(source, tl.load(list_ptr + i), h, HIDDEN, BLOCK_HIDDEN)
                total = add_row(total, row, target, tl.load(ends_ptr + i), h, HIDDEN, BLOCK_HIDDEN)
