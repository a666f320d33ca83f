"""The weighted activation between the two GEMMs of experts, and its gradient.

Each kernel is one pass over the rows in use (rows.py), in float32 with one final rounding. Programs are equal and none
waits for another. Floor: memory bandwidth, reading hidden rows once and writing each result once.
"""

import triton
import triton.language as tl

from .rows import block_of_task, load_block, num_row_tasks, rows_in_use, store_block, store_quantized

# Write `tensor * constant`: in the interpreter, a constant on the left makes the product a constant.
SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)  # sqrt(8 / pi)
GELU_CUBIC = tl.constexpr(0.044715)
GELU_CUBIC_SLOPE = tl.constexpr(0.134145)  # 3 * GELU_CUBIC
SQRT_HALF = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 * pi)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """Apply the activation to float32."""
    NAME: tl.constexpr = KIND.name
    if NAME == "relu":
        # NaN stays NaN.
        y = tl.where(x < 0, 0.0, x)
    elif NAME == "relu_squared":
        y = tl.where(x < 0, 0.0, x)
        y = y * y
    elif NAME == "gelu":
        # 0.5 * (1 + tanh(z)) is sigmoid(2 * z).
        y = x * tl.sigmoid((x + x * GELU_CUBIC * x * x) * SQRT_8_OVER_PI)
    elif NAME == "gelu_exact":
        y = x * 0.5 * (1 + tl.erf(x * SQRT_HALF))
    else:
        tl.static_assert(NAME == "silu")
        y = x * tl.sigmoid(KIND.alpha * x)
    return y


@triton.jit
def slope(x, KIND: tl.constexpr):
    """Return the derivative of `activate`."""
    NAME: tl.constexpr = KIND.name
    if NAME == "relu":
        y = tl.where(x > 0, 1.0, 0.0)
    elif NAME == "relu_squared":
        y = tl.where(x < 0, 0.0, 2 * x)
    elif NAME == "gelu":
        # Past 16 the slope is 0 or 1, and the powers would overflow; NaN stays NaN.
        x = tl.where(x > 16.0, 16.0, tl.where(x < -16.0, -16.0, x))
        share = tl.sigmoid((x + x * GELU_CUBIC * x * x) * SQRT_8_OVER_PI)
        y = share + x * share * (1 - share) * SQRT_8_OVER_PI * (1 + x * GELU_CUBIC_SLOPE * x)
    elif NAME == "gelu_exact":
        density = tl.exp(-0.5 * x * x) * INV_SQRT_2PI
        # If the density is 0, x may be infinite.
        y = 0.5 * (1 + tl.erf(x * SQRT_HALF)) + tl.where(density == 0.0, 0.0, x * density)
    else:
        tl.static_assert(NAME == "silu")
        share = tl.sigmoid(KIND.alpha * x)
        y = share * (1 + KIND.alpha * x * (1 - share))
    return y


@triton.jit
def limit_gate(gate, KIND: tl.constexpr):
    """Clamp gates from above; NaN stays NaN, here and below."""
    if KIND.clamp is not None:
        gate = tl.where(gate > KIND.clamp, KIND.clamp, gate)
    return gate


@triton.jit
def factor_of(up, KIND: tl.constexpr):
    """Return the factor of an activated gate: the up value, clamped and shifted."""
    if KIND.clamp is not None:
        up = tl.where(up > KIND.clamp, KIND.clamp, tl.where(up < -KIND.clamp, -KIND.clamp, up))
    if KIND.up_offset != 0:
        up += KIND.up_offset
    return up


@triton.jit
def activate_halves(gate, up, KIND: tl.constexpr):
    """Compute activated rows in float32."""
    values = activate(limit_gate(gate, KIND), KIND)
    if KIND.gated:
        values *= factor_of(up, KIND)
    return values


@triton.jit
def load_halves(x_ptr, rows, exist, column, KIND: tl.constexpr, WIDTH: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Load gates and up values of a block of `[., 2 * WIDTH]`; without gates return the block of `[., WIDTH]` twice."""
    if KIND.interleaved:
        # Interleaved: gates are the even columns.
        columns = (2 * column + tl.arange(0, 2 * BLOCK_COLUMNS))[None, :]
        both = load_block(x_ptr, rows, columns, exist[:, None] & (columns < 2 * WIDTH), 2 * WIDTH)
        gate, up = tl.split(tl.reshape(both, (rows.shape[0], BLOCK_COLUMNS, 2)))
    else:
        columns = (column + tl.arange(0, BLOCK_COLUMNS))[None, :]
        mask = exist[:, None] & (columns < WIDTH)
        line: tl.constexpr = 2 * WIDTH if KIND.gated else WIDTH
        gate = load_block(x_ptr, rows, columns, mask, line)
        up = load_block(x_ptr, rows, WIDTH + columns, mask, line) if KIND.gated else gate
    return gate, up


@triton.jit
def store_halves(x_ptr, rows, column, gate, up, used, KIND: tl.constexpr, S: tl.constexpr):
    """Store gates and up values as `load_halves` reads them; without gates only the first block."""
    if KIND.interleaved:
        columns = (2 * column + tl.arange(0, 2 * S.block_columns))[None, :]
        both = tl.reshape(tl.join(gate, up), (rows.shape[0], 2 * S.block_columns))
        store_block(x_ptr, rows, columns, both, (rows < used)[:, None] & (columns < 2 * S.width), 2 * S.width)
    else:
        columns = (column + tl.arange(0, S.block_columns))[None, :]
        mask = (rows < used)[:, None] & (columns < S.width)
        width: tl.constexpr = 2 * S.width if KIND.gated else S.width
        store_block(x_ptr, rows, columns, gate, mask, width)
        if KIND.gated:
            store_block(x_ptr, rows, S.width + columns, up, mask, width)


@triton.jit
def load_hidden(hidden_ptr, bias, weights, rows, column, used, KIND: tl.constexpr, S: tl.constexpr):
    """Load gates and up values of hidden rows, with biases, and with weights if these scale the input."""
    gate, up = load_halves(hidden_ptr, rows, rows < used, column, KIND, S.width, S.block_columns)
    if KIND.weights_on_input:
        gate, up = gate * weights[:, None], up * weights[:, None]
    if bias is not None:
        groups = tl.load(bias.group_ptr + rows, mask=rows < used, other=0)
        exist = groups < S.num_groups
        gate_bias, up_bias = load_halves(bias.values_ptr, groups, exist, column, KIND, S.width, S.block_columns)
        gate, up = gate + gate_bias, up + up_bias
    return gate, up


@triton.jit
def activate_block(hidden_ptr, weights_ptr, bias, rows, column, used, KIND: tl.constexpr, S: tl.constexpr):
    """Compute a float32 block of activated, weighted rows of `hidden [., 2 * width]` (`[., width]` without gates)."""
    weights = tl.load(weights_ptr + rows, mask=rows < used, other=0.0)
    gate, up = load_hidden(hidden_ptr, bias, weights, rows, column, used, KIND, S)
    values = activate_halves(gate, up, KIND)
    if not KIND.weights_on_input:
        values *= weights[:, None]
    return values


@triton.jit
def weighted_activation(hidden_ptr, weights_ptr, sizes_ptr, bias, out_ptr, KIND: tl.constexpr, S: tl.constexpr):
    """Activate `hidden [num_rows, 2 * width]` to `out [num_rows, width]`, with row weights and a `RowBias` or None."""
    used = rows_in_use(sizes_ptr, S)
    for task in range(tl.program_id(0), num_row_tasks(used, S), tl.num_programs(0)):
        rows, column, columns, mask = block_of_task(task, used, S)
        values = activate_block(hidden_ptr, weights_ptr, bias, rows, column, used, KIND, S)
        store_block(out_ptr, rows, columns, values, mask, S.width)


@triton.jit
def differentiate_block(gate, up, d_values, KIND: tl.constexpr):
    """Return the cotangents of gates and up values, and the activated block, given the block's cotangent."""
    limited = limit_gate(gate, KIND)
    values = activate(limited, KIND)
    d_gate = d_values * slope(limited, KIND)
    d_up = d_values * values
    if KIND.gated:
        factor = factor_of(up, KIND)
        values *= factor
        d_gate *= factor
    # No gradient where values were clamped.
    if KIND.clamp is not None:
        d_gate = tl.where(gate > KIND.clamp, 0.0, d_gate)
        d_up = tl.where((up > KIND.clamp) | (up < -KIND.clamp), 0.0, d_up)
    return d_gate, d_up, values


@triton.jit
def weighted_activation_gradient(
    hidden_ptr,
    weights_ptr,
    d_rows_ptr,
    sizes_ptr,
    bias,
    d_hidden_ptr,
    d_weights_ptr,
    rows_ptr,
    KIND: tl.constexpr,
    KEEP: tl.constexpr,
    S: tl.constexpr,
):
    """Store the cotangents of `hidden` and `weights` for `d_rows [num_rows, width]`; weights past the groups get zero.

    If KEEP, also store the activated `rows`, as `weighted_activation` does.
    """
    WIDTH: tl.constexpr = S.width
    BLOCK_ROWS: tl.constexpr = S.block_rows
    BLOCK_COLUMNS: tl.constexpr = S.block_columns
    used = rows_in_use(sizes_ptr, S)
    for block in range(tl.program_id(0), (S.num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS, tl.num_programs(0)):
        rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        weights = tl.load(weights_ptr + rows, mask=rows < used, other=0.0)
        # The cotangent of a weight is a sum over the row's columns.
        products = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        if block * BLOCK_ROWS < used:
            for column in range(0, WIDTH, BLOCK_COLUMNS):
                columns = (column + tl.arange(0, BLOCK_COLUMNS))[None, :]
                mask = (rows < used)[:, None] & (columns < WIDTH)
                d_rows = load_block(d_rows_ptr, rows, columns, mask, WIDTH)
                gate, up = load_hidden(hidden_ptr, bias, weights, rows, column, used, KIND, S)
                if KIND.weights_on_input:
                    d_gate, d_up, values = differentiate_block(gate, up, d_rows, KIND)
                    if KEEP:
                        store_block(rows_ptr, rows, columns, values, mask, WIDTH)
                    # The weight scaled the unbiased input: load that again, since the weight may be zero.
                    gate, up = load_halves(hidden_ptr, rows, rows < used, column, KIND, WIDTH, BLOCK_COLUMNS)
                    products += d_gate * gate
                    if KIND.gated:
                        products += d_up * up
                    d_gate, d_up = d_gate * weights[:, None], d_up * weights[:, None]
                else:
                    d_gate, d_up, values = differentiate_block(gate, up, d_rows * weights[:, None], KIND)
                    products += d_rows * values
                    if KEEP:
                        store_block(rows_ptr, rows, columns, values * weights[:, None], mask, WIDTH)
                store_halves(d_hidden_ptr, rows, column, d_gate, d_up, used, KIND, S)
        tl.store(d_weights_ptr + rows, tl.sum(products, axis=1), mask=rows < S.num_rows)


@triton.jit
def activate_quantized(hidden_ptr, weights_ptr, sizes_ptr, bias, quantized, KIND: tl.constexpr, S: tl.constexpr):
    """Store the weighted activation as FP8 `[num_rows, width]` with scales."""
    used = rows_in_use(sizes_ptr, S)
    for task in range(tl.program_id(0), num_row_tasks(used, S), tl.num_programs(0)):
        rows, column, _, _ = block_of_task(task, used, S)
        values = activate_block(hidden_ptr, weights_ptr, bias, rows, column, used, KIND, S)
        store_quantized(quantized, rows, column, values, used, S)
