"""Blocks of `[M, WIDTH]` whose rows end wherever the kernel says: what lies behind reads as zero and is not written.

TMA checks bounds against the shape in a descriptor, which is the same for all groups. So two dimensions are added whose
strides cancel: with s the width, an element at `[BOUND, end, row - end + BOUND, column]` lies

    BOUND * (2**34 - s) + end * s + (row - end + BOUND) * s + column = row * s + column + 2**64

elements behind the first, and addresses have 64 bits. The third coordinate reaches BOUND, the end of its dimension,
where row reaches `end`. jax_ep.kernel.Descriptor makes these descriptors.

Source: triton.tools.ragged_tma.
"""

import triton
import triton.language as tl

BOUND = tl.constexpr(1 << 30)


@triton.jit
def load_bounded(x, row, end, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`[ROWS, COLUMNS]` from `row` and `column` on, zero from row `end` on."""
    return tl.reshape(x.load([BOUND, end, row - end + BOUND, column]), (ROWS, COLUMNS))


@triton.jit
def store_bounded(out, values, row, end, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Stores the rows before `end` of `values`."""
    block = tl.reshape(values.to(out.dtype), (1, 1, ROWS, COLUMNS))
    out.store([BOUND, end, row - end + BOUND, column], block)


@triton.jit
def halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right columns of `x [ROWS, COLUMNS]`."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def store_in_parts(out, values, row, end, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """The same in 1, 2 or 4 parts of the columns, one after another: shared memory then holds a part at a time."""
    if PARTS == 1:
        store_bounded(out, values, row, end, column, ROWS, COLUMNS)
    else:
        left, right = halves(values, ROWS, COLUMNS)
        store_in_parts(out, left, row, end, column, ROWS, COLUMNS // 2, PARTS // 2)
        store_in_parts(out, right, row, end, column + COLUMNS // 2, ROWS, COLUMNS // 2, PARTS // 2)
