"""Rows in use: how many there are, and what is gathered into them."""

import triton
import triton.language as tl


@triton.jit
def rows_in_use(sizes_ptr, R: tl.constexpr, L: tl.constexpr, BLOCK_L: tl.constexpr):
    """Rows of all groups, R at most; negative sizes count as 0, as in the products."""
    lanes = tl.arange(0, BLOCK_L)
    sizes = tl.maximum(tl.load(sizes_ptr + lanes, mask=lanes < L, other=0), 0).to(tl.int64)
    return tl.minimum(tl.sum(sizes, axis=0), R).to(tl.int32)


@triton.jit
def block_of_task(task, used, H: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Rows `[BR]`, first column, columns `[1, BC]` and what is in use of a block; blocks side by side span H."""
    column_tiles: tl.constexpr = (H + BC - 1) // BC
    rows = task // column_tiles * BR + tl.arange(0, BR)
    column = task % column_tiles * BC
    columns = (column + tl.arange(0, BC))[None, :]
    return rows, column, columns, (rows < used)[:, None] & (columns < H)


@triton.jit
def gather_rows(
    x_ptr,
    index_ptr,
    sizes_ptr,
    out_ptr,
    R: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """`out[row] = x[index[row]]` in `[R, H]` for rows in use, zeros where the index is negative."""
    used = rows_in_use(sizes_ptr, R, L, BLOCK_L)
    column_tiles: tl.constexpr = (H + BC - 1) // BC
    for task in range(tl.program_id(0), tl.cdiv(used, BR) * column_tiles, tl.num_programs(0)):
        rows, _, columns, wanted = block_of_task(task, used, H, BR, BC)
        places = tl.load(index_ptr + rows, mask=rows < used, other=-1)
        source = tl.multiple_of(x_ptr + places.to(tl.int64)[:, None] * H + columns, (16, 16))
        values = tl.load(source, mask=(places >= 0)[:, None] & (columns < H), other=0.0)
        target = tl.multiple_of(out_ptr + rows.to(tl.int64)[:, None] * H + columns, (16, 16))
        tl.store(target, values, mask=wanted)
