"""Rows in use: how many there are, and what is gathered into them."""

import triton
import triton.language as tl


@triton.jit
def rows_in_use(sizes_ptr, S: tl.constexpr):
    """Rows of all groups, R at most; negative sizes count as 0, as in the products."""
    lanes = tl.arange(0, S.padded_groups)
    sizes = tl.maximum(tl.load(sizes_ptr + lanes, mask=lanes < S.num_groups, other=0), 0).to(tl.int64)
    return tl.minimum(tl.sum(sizes, axis=0), S.num_rows).to(tl.int32)


@triton.jit
def num_row_tasks(used, S: tl.constexpr):
    """Blocks that cover the rows in use; blocks side by side span H."""
    column_tiles: tl.constexpr = (S.width + S.block_columns - 1) // S.block_columns
    return tl.cdiv(used, S.block_rows) * column_tiles


@triton.jit
def block_of_task(task, used, S: tl.constexpr):
    """Rows `[BR]`, first column, columns `[1, BC]` and what is in use of a block."""
    column_tiles: tl.constexpr = (S.width + S.block_columns - 1) // S.block_columns
    rows = task // column_tiles * S.block_rows + tl.arange(0, S.block_rows)
    column = task % column_tiles * S.block_columns
    columns = (column + tl.arange(0, S.block_columns))[None, :]
    return rows, column, columns, (rows < used)[:, None] & (columns < S.width)


@triton.jit
def gather_rows(x_ptr, index_ptr, sizes_ptr, out_ptr, S: tl.constexpr):
    """`out[row] = x[index[row]]` in `[R, H]` for rows in use, zeros where the index is negative."""
    WIDTH: tl.constexpr = S.width
    used = rows_in_use(sizes_ptr, S)
    for task in range(tl.program_id(0), num_row_tasks(used, S), tl.num_programs(0)):
        rows, _, columns, mask = block_of_task(task, used, S)
        index = tl.load(index_ptr + rows, mask=rows < used, other=-1)
        source = tl.multiple_of(x_ptr + index.to(tl.int64)[:, None] * WIDTH + columns, (16, 16))
        values = tl.load(source, mask=(index >= 0)[:, None] & (columns < WIDTH), other=0.0)
        target = tl.multiple_of(out_ptr + rows.to(tl.int64)[:, None] * WIDTH + columns, (16, 16))
        tl.store(target, values, mask=mask)
