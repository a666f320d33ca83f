"""Blocks of `[M, WIDTH]` whose rows end wherever the kernel says: what lies behind reads as zero and is not written.

TMA checks bounds against the shape in a descriptor, which is the same for all groups. So two dimensions are added whose
strides cancel: with s the width, an element at `[BOUND, end, row - end + BOUND, column]` lies

    BOUND * (2**34 - s) + end * s + (row - end + BOUND) * s + column = row * s + column + 2**64

elements behind the first, and addresses have 64 bits. The third coordinate reaches BOUND, the end of its dimension,
where row reaches `end`. jax_ep.kernel.Descriptor makes the same descriptors outside of kernels.

Source: triton/tools/ragged_tma.py.
"""

import triton
import triton.language as tl

BOUND = tl.constexpr(1 << 30)
FAR = tl.constexpr(0x7FFF0000)


@triton.jit
def describe_bounded(ptr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A descriptor with blocks of ROWS and COLUMNS, made in the kernel: results cannot have others."""
    return tl.make_tensor_descriptor(
        ptr, [FAR, FAR, BOUND, WIDTH], [(1 << 34) - WIDTH, WIDTH, WIDTH, 1], [1, 1, ROWS, COLUMNS]
    )


@triton.jit
def load_bounded(x, row, end, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`[ROWS, COLUMNS]` from `row` and `column` on, zero from row `end` on."""
    return tl.reshape(x.load([BOUND, end, row - end + BOUND, column]), (ROWS, COLUMNS))


@triton.jit
def store_bounded(out, values, row, end, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Stores the rows before `end` of `values`."""
    block = tl.reshape(values.to(out.dtype), (1, 1, ROWS, COLUMNS))
    out.store([BOUND, end, row - end + BOUND, column], block)
