"""Gated activation of the rows that count, and their quantisation for the next product, in one pass."""

import triton
import triton.language as tl

from .masked_tiles import find_masked_tile, number_masked_tasks
from .quantization import quantize, scale_offsets
from .tiles import num_turns, task_of_turn


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """float32 to float32."""
    if ACTIVATION == "relu":
        # NaN stays NaN.
        y = tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "gelu":
        # 0.5 * (1 + tanh(z)) is sigmoid(2 * z).
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(ACTIVATION == "silu")
        y = x * tl.sigmoid(x)
    return y


@triton.jit
def masked_gated_activation(
    hidden_ptr,
    sizes_ptr,
    out_ptr,
    scales_ptr,
    M: tl.constexpr,
    INNER: tl.constexpr,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    ACTIVATION: tl.constexpr,
    QUANTIZE: tl.constexpr,
):
    """`hidden [G, M, 2 * INNER]` to `out [G, M, INNER]`, with QUANTIZE as FP8 and `scales [G, M, INNER / 128]`."""
    column_tiles: tl.constexpr = (INNER + BC - 1) // BC
    group_ends = number_masked_tasks(sizes_ptr, M, G, GROUPS, BM, column_tiles)
    for turn in range(num_turns(tl.max(group_ends, axis=0))):
        group, row, size, column_tile = find_masked_tile(task_of_turn(turn), group_ends, sizes_ptr, M, BM)
        local = row + tl.arange(0, BM)
        rows = group.to(tl.int64) * M + local
        column = column_tile * BC
        columns = column + tl.arange(0, BC)[None, :]
        wanted = (local < size)[:, None] & (columns < INNER)
        source = hidden_ptr + rows[:, None] * (2 * INNER) + columns
        gate = tl.load(source, mask=wanted, other=0.0).to(tl.float32)
        up = tl.load(source + INNER, mask=wanted, other=0.0).to(tl.float32)
        values = activate(gate, ACTIVATION) * up
        if QUANTIZE:
            values, scales = quantize(values, BM, BC)
            offsets, exist = scale_offsets(rows, column, INNER, BC)
            tl.store(scales_ptr + offsets, scales, mask=(local < size)[:, None] & exist)
        tl.store(out_ptr + rows[:, None] * INNER + columns, values.to(out_ptr.dtype.element_ty), mask=wanted)
