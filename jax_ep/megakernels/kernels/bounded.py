"""Blocks of `[M, WIDTH]` whose rows end where the kernel says: rows behind the end read as zero and are not stored.

TMA checks bounds against the shape in the descriptor, but the end differs from group to group. So the descriptor has
two extra dimensions whose strides cancel. With s = WIDTH, the element at `[BOUND, end, row - end + BOUND, column]` has
the offset

    BOUND * (2**34 - s) + end * s + (row - end + BOUND) * s + column = row * s + column + 2**64

and addresses have 64 bits, so it is the element `[row, column]`. The third coordinate reaches BOUND, the end of its
dimension, exactly where row reaches `end`. `jax_ep.core.kernel.Descriptor` makes these descriptors.

Source: triton.tools.ragged_tma.
"""

import triton
import triton.language as tl

BOUND = tl.constexpr(1 << 30)


@triton.jit
def load_bounded(x, row, end, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load `[ROWS, COLUMNS]` from `row` and `column` on; rows from `end` on read as zero."""
    return tl.reshape(x.load([BOUND, end, row - end + BOUND, column]), (ROWS, COLUMNS))


@triton.jit
def store_bounded(out, values, row, end, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the rows of `values` that lie before `end`."""
    block = tl.reshape(values.to(out.dtype), (1, 1, ROWS, COLUMNS))
    out.store([BOUND, end, row - end + BOUND, column], block)


@triton.jit
def split_columns(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Split `x [ROWS, COLUMNS]` into its left and right halves."""
    # `split` takes the last axis, so the halves move there first.
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def store_in_parts(out, values, row, end, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """Store the rows before `end` in 1, 2 or 4 parts of the columns in turn, so that shared memory holds one part."""
    if PARTS == 1:
        store_bounded(out, values, row, end, column, ROWS, COLUMNS)
    else:
        left, right = split_columns(values, ROWS, COLUMNS)
        store_in_parts(out, left, row, end, column, ROWS, COLUMNS // 2, PARTS // 2)
        store_in_parts(out, right, row, end, column + COLUMNS // 2, ROWS, COLUMNS // 2, PARTS // 2)
