"""The weighted activation between the two products of the layer, and its gradient, in one pass over the rows in use.

What lies past the groups is neither read nor written: no product reads it either. With a dropless capacity that is most
of the array.
"""

import triton
import triton.language as tl

from .masked_activation import activate
from .rows import block_of_task, rows_in_use


@triton.jit
def slope(x, ACTIVATION: tl.constexpr):
    """The derivative of `activate`."""
    if ACTIVATION == "relu":
        y = tl.where(x > 0, 1.0, 0.0)
    elif ACTIVATION == "gelu":
        # Farther out it is 0 or 1, and the powers would overflow; NaN stays NaN.
        x = tl.where(x > 16.0, 16.0, tl.where(x < -16.0, -16.0, x))
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        y = share + x * share * (1 - share) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    else:
        tl.static_assert(ACTIVATION == "silu")
        share = tl.sigmoid(x)
        y = share * (1 + x * (1 - share))
    return y


@triton.jit
def load_block(x_ptr, rows, columns, wanted, WIDTH: tl.constexpr):
    """float32 `[BR, BC]` of `[R, WIDTH]`; zero where not wanted."""
    return tl.load(x_ptr + rows.to(tl.int64)[:, None] * WIDTH + columns, mask=wanted, other=0.0).to(tl.float32)


@triton.jit
def store_block(x_ptr, rows, columns, values, wanted, WIDTH: tl.constexpr):
    """Rounds once."""
    target = x_ptr + rows.to(tl.int64)[:, None] * WIDTH + columns
    tl.store(target, values.to(x_ptr.dtype.element_ty), mask=wanted)


@triton.jit
def activate_block(
    hidden_ptr,
    weights_ptr,
    rows,
    columns,
    wanted,
    used,
    INNER: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """float32 block of activated rows of `hidden [R, 2 * INNER]` (`[R, INNER]` without GATED), times their weights."""
    width: tl.constexpr = 2 * INNER if GATED else INNER
    values = activate(load_block(hidden_ptr, rows, columns, wanted, width), ACTIVATION)
    if GATED:
        values *= load_block(hidden_ptr, rows, INNER + columns, wanted, width)
    return values * tl.load(weights_ptr + rows, mask=rows < used, other=0.0)[:, None]


@triton.jit
def weighted_activation(
    hidden_ptr,
    weights_ptr,
    sizes_ptr,
    out_ptr,
    R: tl.constexpr,
    INNER: tl.constexpr,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """`hidden [R, 2 * INNER]` (`[R, INNER]` without GATED) and `weights [R]` to `out [R, INNER]`."""
    used = rows_in_use(sizes_ptr, R, L, BLOCK_L)
    column_tiles: tl.constexpr = (INNER + BC - 1) // BC
    for task in range(tl.program_id(0), tl.cdiv(used, BR) * column_tiles, tl.num_programs(0)):
        rows, _, columns, wanted = block_of_task(task, used, INNER, BR, BC)
        values = activate_block(hidden_ptr, weights_ptr, rows, columns, wanted, used, INNER, GATED, ACTIVATION)
        store_block(out_ptr, rows, columns, values, wanted, INNER)


@triton.jit
def weighted_activation_gradient(
    hidden_ptr,
    weights_ptr,
    d_rows_ptr,
    sizes_ptr,
    d_hidden_ptr,
    d_weights_ptr,
    R: tl.constexpr,
    INNER: tl.constexpr,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Cotangents of `hidden` and `weights` for `d_rows [R, INNER]`; those of weights past the groups are zero."""
    used = rows_in_use(sizes_ptr, R, L, BLOCK_L)
    width: tl.constexpr = 2 * INNER if GATED else INNER
    for block in range(tl.program_id(0), (R + BR - 1) // BR, tl.num_programs(0)):
        rows = block * BR + tl.arange(0, BR)
        weights = tl.load(weights_ptr + rows, mask=rows < used, other=0.0)[:, None]
        products = tl.zeros((BR, BC), tl.float32)
        if block * BR < used:
            for column in range(0, INNER, BC):
                columns = (column + tl.arange(0, BC))[None, :]
                wanted = (rows < used)[:, None] & (columns < INNER)
                gate = load_block(hidden_ptr, rows, columns, wanted, width)
                d_rows = load_block(d_rows_ptr, rows, columns, wanted, INNER)
                value = activate(gate, ACTIVATION)
                d_gate = d_rows * weights * slope(gate, ACTIVATION)
                if GATED:
                    up = load_block(hidden_ptr, rows, INNER + columns, wanted, width)
                    products += d_rows * value * up
                    store_block(d_hidden_ptr, rows, columns, d_gate * up, wanted, width)
                    store_block(d_hidden_ptr, rows, INNER + columns, d_rows * weights * value, wanted, width)
                else:
                    products += d_rows * value
                    store_block(d_hidden_ptr, rows, columns, d_gate, wanted, width)
        tl.store(d_weights_ptr + rows, tl.sum(products, axis=1), mask=rows < R)
