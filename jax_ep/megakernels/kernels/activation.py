"""The weighted activation between the two products of the layer, its gradient, and operands of the products in FP8.

Each is one pass over the rows in use. What lies past the groups is neither read nor written: no product reads it
either. With a dropless capacity that is most of the array.
"""

import triton
import triton.language as tl

from .quantization import dequantize, quantize, scale_offsets
from .rows import block_of_task, num_row_tasks, rows_in_use


@triton.jit
def activate(x, KIND: tl.constexpr):
    """float32 to float32."""
    NAME: tl.constexpr = KIND.name
    if NAME == "relu":
        # NaN stays NaN.
        y = tl.where(x < 0, 0.0, x)
    elif NAME == "relu_squared":
        y = tl.where(x < 0, 0.0, x)
        y = y * y
    elif NAME == "gelu":
        # 0.5 * (1 + tanh(z)) is sigmoid(2 * z).
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif NAME == "gelu_exact":
        y = x * 0.5 * (1 + tl.erf(0.7071067811865476 * x))
    else:
        tl.static_assert(NAME == "silu")
        y = x * tl.sigmoid(KIND.alpha * x)
    return y


@triton.jit
def slope(x, KIND: tl.constexpr):
    """The derivative of `activate`."""
    NAME: tl.constexpr = KIND.name
    if NAME == "relu":
        y = tl.where(x > 0, 1.0, 0.0)
    elif NAME == "relu_squared":
        y = tl.where(x < 0, 0.0, 2 * x)
    elif NAME == "gelu":
        # Farther out it is 0 or 1, and the powers would overflow; NaN stays NaN.
        x = tl.where(x > 16.0, 16.0, tl.where(x < -16.0, -16.0, x))
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        y = share + x * share * (1 - share) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    elif NAME == "gelu_exact":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        # Where it is 0, x may be infinite.
        y = 0.5 * (1 + tl.erf(0.7071067811865476 * x)) + tl.where(density == 0.0, 0.0, x * density)
    else:
        tl.static_assert(NAME == "silu")
        share = tl.sigmoid(KIND.alpha * x)
        y = share * (1 + KIND.alpha * x * (1 - share))
    return y


@triton.jit
def limit_gate(gate, KIND: tl.constexpr):
    """What of a gate is activated; NaN stays NaN, here and below."""
    if KIND.clamp is not None:
        gate = tl.where(gate > KIND.clamp, KIND.clamp, gate)
    return gate


@triton.jit
def factor_of(up, KIND: tl.constexpr):
    """What an activated gate multiplies."""
    if KIND.clamp is not None:
        up = tl.where(up > KIND.clamp, KIND.clamp, tl.where(up < -KIND.clamp, -KIND.clamp, up))
    if KIND.up_offset != 0:
        up += KIND.up_offset
    return up


@triton.jit
def load_block(x_ptr, rows, columns, mask, WIDTH: tl.constexpr):
    """float32 `[BR, BC]` of `[R, WIDTH]`; zero where not in the mask."""
    return tl.load(x_ptr + rows.to(tl.int64)[:, None] * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_block(x_ptr, rows, columns, values, mask, WIDTH: tl.constexpr):
    """Rounds once."""
    target = x_ptr + rows.to(tl.int64)[:, None] * WIDTH + columns
    tl.store(target, values.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_halves(x_ptr, rows, column, used, KIND: tl.constexpr, S: tl.constexpr):
    """Gates and what they multiply of a block of `[., 2 * H]`; without gates the block of `[., H]`, twice."""
    if KIND.interleaved:
        columns = (2 * column + tl.arange(0, 2 * S.block_columns))[None, :]
        both = load_block(x_ptr, rows, columns, (rows < used)[:, None] & (columns < 2 * S.width), 2 * S.width)
        gate, up = tl.split(tl.reshape(both, (rows.shape[0], S.block_columns, 2)))
    else:
        columns = (column + tl.arange(0, S.block_columns))[None, :]
        mask = (rows < used)[:, None] & (columns < S.width)
        width: tl.constexpr = 2 * S.width if KIND.gated else S.width
        gate = load_block(x_ptr, rows, columns, mask, width)
        up = load_block(x_ptr, rows, S.width + columns, mask, width) if KIND.gated else gate
    return gate, up


@triton.jit
def store_halves(x_ptr, rows, column, gate, up, used, KIND: tl.constexpr, S: tl.constexpr):
    """The inverse of `load_halves`; without gates the first is stored."""
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
    """Gates and what they multiply, with weights on the input and biases, of a block of hidden rows."""
    gate, up = load_halves(hidden_ptr, rows, column, used, KIND, S)
    if KIND.weights_on_input:
        gate, up = gate * weights[:, None], up * weights[:, None]
    if bias is not None:
        groups = tl.load(bias.group_ptr + rows, mask=rows < used, other=0)
        gate_bias, up_bias = load_halves(bias.values_ptr, groups, column, S.num_groups, KIND, S)
        gate, up = gate + gate_bias, up + up_bias
    return gate, up


@triton.jit
def activate_block(hidden_ptr, weights_ptr, bias, rows, column, used, KIND: tl.constexpr, S: tl.constexpr):
    """float32 block of activated and weighted rows of `hidden [R, 2 * H]` (`[R, H]` without GATED)."""
    weights = tl.load(weights_ptr + rows, mask=rows < used, other=0.0)
    gate, up = load_hidden(hidden_ptr, bias, weights, rows, column, used, KIND, S)
    values = activate(limit_gate(gate, KIND), KIND)
    if KIND.gated:
        values *= factor_of(up, KIND)
    if not KIND.weights_on_input:
        values *= weights[:, None]
    return values


@triton.jit
def weighted_activation(hidden_ptr, weights_ptr, sizes_ptr, bias, out_ptr, KIND: tl.constexpr, S: tl.constexpr):
    """`hidden [R, 2 * H]` (`[R, H]` without GATED), `weights [R]` and a `RowBias` or None to `out [R, H]`."""
    used = rows_in_use(sizes_ptr, S)
    for task in range(tl.program_id(0), num_row_tasks(used, S), tl.num_programs(0)):
        rows, column, columns, mask = block_of_task(task, used, S)
        values = activate_block(hidden_ptr, weights_ptr, bias, rows, column, used, KIND, S)
        store_block(out_ptr, rows, columns, values, mask, S.width)


@triton.jit
def differentiate_block(gate, up, d_values, KIND: tl.constexpr):
    """Cotangents of gates and of what they multiply, and the activated block, for the cotangent of that."""
    limited = limit_gate(gate, KIND)
    values = activate(limited, KIND)
    d_gate = d_values * slope(limited, KIND)
    d_up = d_values * values
    if KIND.gated:
        factor = factor_of(up, KIND)
        values *= factor
        d_gate *= factor
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
    """Cotangents of `hidden` and `weights` for `d_rows [R, H]`; those of weights past the groups are zero.

    With KEEP also `rows` as `weighted_activation` has them.
    """
    WIDTH: tl.constexpr = S.width
    BLOCK_ROWS: tl.constexpr = S.block_rows
    BLOCK_COLUMNS: tl.constexpr = S.block_columns
    used = rows_in_use(sizes_ptr, S)
    for block in range(tl.program_id(0), (S.num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS, tl.num_programs(0)):
        rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        weights = tl.load(weights_ptr + rows, mask=rows < used, other=0.0)
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
                    # Of the rows as they were: there is no bias here, and a weight may be zero.
                    gate, up = load_halves(hidden_ptr, rows, column, used, KIND, S)
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
def store_quantized(quantized, rows, column, values, used, S: tl.constexpr):
    """Stores float32 `[., BC]`, a line for each of `rows`, as values of `[R, H]` and scales of `[R, H / 128]`."""
    columns = (column + tl.arange(0, S.block_columns))[None, :]
    values, scales = quantize(values, values.shape[0], S.block_columns)
    store_block(quantized.values_ptr, rows, columns, values, (rows < used)[:, None] & (columns < S.width), S.width)
    offsets, exist = scale_offsets(rows, column, S.width, S.block_columns)
    tl.store(quantized.scales_ptr + offsets, scales, mask=(rows < used)[:, None] & exist)


@triton.jit
def quantize_rows(x_ptr, sizes_ptr, quantized, S: tl.constexpr):
    """`x [R, H]` to FP8 values and `[R, H / 128]` scales."""
    used = rows_in_use(sizes_ptr, S)
    for task in range(tl.program_id(0), num_row_tasks(used, S), tl.num_programs(0)):
        rows, column, columns, mask = block_of_task(task, used, S)
        values = load_block(x_ptr, rows, columns, mask, S.width)
        store_quantized(quantized, rows, column, values, used, S)


@triton.jit
def dequantize_rows(quantized, sizes_ptr, out_ptr, S: tl.constexpr):
    """The inverse, in the dtype of `out [R, H]`."""
    used = rows_in_use(sizes_ptr, S)
    for task in range(tl.program_id(0), num_row_tasks(used, S), tl.num_programs(0)):
        rows, column, columns, mask = block_of_task(task, used, S)
        source = quantized.values_ptr + rows.to(tl.int64)[:, None] * S.width + columns
        values = tl.load(source, mask=mask, other=0.0)
        offsets, exist = scale_offsets(rows, column, S.width, S.block_columns)
        scales = tl.load(quantized.scales_ptr + offsets, mask=(rows < used)[:, None] & exist, other=0.0)
        store_block(out_ptr, rows, columns, dequantize(values, scales, S.block_rows, S.block_columns), mask, S.width)


@triton.jit
def activate_quantized(
    hidden_ptr,
    weights_ptr,
    sizes_ptr,
    bias,
    quantized,
    KIND: tl.constexpr,
    S: tl.constexpr,
):
    """Store the weighted activation in FP8, `[R, H]`."""
    used = rows_in_use(sizes_ptr, S)
    for task in range(tl.program_id(0), num_row_tasks(used, S), tl.num_programs(0)):
        rows, column, _, _ = block_of_task(task, used, S)
        values = activate_block(hidden_ptr, weights_ptr, bias, rows, column, used, KIND, S)
        store_quantized(quantized, rows, column, values, used, S)
