"""Passes over the rows in use: block numbering, gather, and row-wise FP8 quantization.

Rows past the groups are neither read nor written; with a dropless capacity that is most of the array. Roles: programs
are equal, each takes every num_programs-th block, and none waits for another. Floor: memory bandwidth.
"""

import triton
import triton.language as tl

from .quantization import dequantize, quantize, scale_offsets


@triton.jit
def rows_in_use(sizes_ptr, S: tl.constexpr):
    """Return the number of rows of all groups, at most `num_rows`; negative sizes count as 0, as in the GEMMs."""
    lanes = tl.arange(0, S.padded_groups)
    sizes = tl.maximum(tl.load(sizes_ptr + lanes, mask=lanes < S.num_groups, other=0), 0).to(tl.int64)
    return tl.minimum(tl.sum(sizes, axis=0), S.num_rows).to(tl.int32)


@triton.jit
def num_row_tasks(used, S: tl.constexpr):
    """Return the number of blocks that cover the rows in use; neighboring blocks span the width."""
    column_tiles: tl.constexpr = (S.width + S.block_columns - 1) // S.block_columns
    return tl.cdiv(used, S.block_rows) * column_tiles


@triton.jit
def block_of_task(task, used, S: tl.constexpr):
    """Return a block's rows `[block_rows]`, first column, columns `[1, block_columns]`, and the mask in use."""
    column_tiles: tl.constexpr = (S.width + S.block_columns - 1) // S.block_columns
    rows = task // column_tiles * S.block_rows + tl.arange(0, S.block_rows)
    column = task % column_tiles * S.block_columns
    columns = (column + tl.arange(0, S.block_columns))[None, :]
    return rows, column, columns, (rows < used)[:, None] & (columns < S.width)


@triton.jit
def load_block(x_ptr, rows, columns, mask, WIDTH: tl.constexpr):
    """Load float32 `[block_rows, block_columns]` of `[num_rows, WIDTH]`; zero outside of the mask."""
    return tl.load(x_ptr + rows.to(tl.int64)[:, None] * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_block(x_ptr, rows, columns, values, mask, WIDTH: tl.constexpr):
    """Store float32 values, rounded once."""
    target = x_ptr + rows.to(tl.int64)[:, None] * WIDTH + columns
    tl.store(target, values.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_quantized(quantized, rows, column, values, used, S: tl.constexpr):
    """Store float32 `[., block_columns]`, one line per row, as FP8 values `[num_rows, width]` and scales."""
    columns = (column + tl.arange(0, S.block_columns))[None, :]
    values, scales = quantize(values, values.shape[0], S.block_columns)
    store_block(quantized.values_ptr, rows, columns, values, (rows < used)[:, None] & (columns < S.width), S.width)
    offsets, exist = scale_offsets(rows, column, S.width, S.block_columns)
    tl.store(quantized.scales_ptr + offsets, scales, mask=(rows < used)[:, None] & exist)


@triton.jit
def gather_rows(x_ptr, index_ptr, sizes_ptr, out_ptr, S: tl.constexpr):
    """Store `out[row] = x[index[row]]` in `[num_rows, width]` for rows in use; zeros if the index is negative."""
    WIDTH: tl.constexpr = S.width
    used = rows_in_use(sizes_ptr, S)
    for task in range(tl.program_id(0), num_row_tasks(used, S), tl.num_programs(0)):
        rows, _, columns, mask = block_of_task(task, used, S)
        index = tl.load(index_ptr + rows, mask=rows < used, other=-1)
        source = tl.multiple_of(x_ptr + index.to(tl.int64)[:, None] * WIDTH + columns, (16, 16))
        values = tl.load(source, mask=(index >= 0)[:, None] & (columns < WIDTH), other=0.0)
        # Padding rows store zeros, so no row in use stays unwritten.
        target = tl.multiple_of(out_ptr + rows.to(tl.int64)[:, None] * WIDTH + columns, (16, 16))
        tl.store(target, values, mask=mask)


@triton.jit
def quantize_rows(x_ptr, sizes_ptr, quantized, S: tl.constexpr):
    """Quantize `x [num_rows, width]` to FP8 values and scales `[num_rows, width / 128]`."""
    used = rows_in_use(sizes_ptr, S)
    for task in range(tl.program_id(0), num_row_tasks(used, S), tl.num_programs(0)):
        rows, column, columns, mask = block_of_task(task, used, S)
        values = load_block(x_ptr, rows, columns, mask, S.width)
        store_quantized(quantized, rows, column, values, used, S)


@triton.jit
def dequantize_rows(quantized, sizes_ptr, out_ptr, S: tl.constexpr):
    """Multiply FP8 rows by their scales, to the dtype of `out [num_rows, width]`."""
    used = rows_in_use(sizes_ptr, S)
    for task in range(tl.program_id(0), num_row_tasks(used, S), tl.num_programs(0)):
        rows, column, columns, mask = block_of_task(task, used, S)
        source = quantized.values_ptr + rows.to(tl.int64)[:, None] * S.width + columns
        values = tl.load(source, mask=mask, other=0.0)
        offsets, exist = scale_offsets(rows, column, S.width, S.block_columns)
        scales = tl.load(quantized.scales_ptr + offsets, mask=(rows < used)[:, None] & exist, other=0.0)
        store_block(out_ptr, rows, columns, dequantize(values, scales, S.block_rows, S.block_columns), mask, S.width)
