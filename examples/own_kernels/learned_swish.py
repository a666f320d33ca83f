"""Triton kernels of `own_triton_kernel.py`: `weight * gate * sigmoid(slope * gate) * up`, and its gradient.

Each expert learns its slope. One program handles one row. Rows without an expert are padding, and their results are
zero.
"""

import triton
import triton.language as tl


@triton.jit
def load_row(slopes_ptr, weights_ptr, experts_ptr):
    """Return the row of this program, whether it has an expert, the slope of the expert, and the row's weight."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.load(experts_ptr + row)
    is_used = expert >= 0
    return row, is_used, tl.load(slopes_ptr + expert, mask=is_used, other=0.0), tl.load(weights_ptr + row)


@triton.jit
def activate(
    hidden_ptr, slopes_ptr, weights_ptr, experts_ptr, out_ptr, INNER: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute out `[R, INNER]` from hidden `[R, 2 * INNER]`, gate first; slopes `[L]`; weights and experts `[R]`."""
    row, is_used, slope, weight = load_row(slopes_ptr, weights_ptr, experts_ptr)
    for start in range(0, INNER, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < INNER
        gate = tl.load(hidden_ptr + row * 2 * INNER + columns, mask=mask & is_used, other=0.0).to(tl.float32)
        up = tl.load(hidden_ptr + row * 2 * INNER + INNER + columns, mask=mask & is_used, other=0.0).to(tl.float32)
        out = weight * gate * tl.sigmoid(slope * gate) * up
        tl.store(out_ptr + row * INNER + columns, out, mask=mask)


@triton.jit
def activate_gradient(
    hidden_ptr, slopes_ptr, weights_ptr, experts_ptr, d_out_ptr, d_hidden_ptr, d_slopes_ptr, d_weights_ptr,
    INNER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the cotangents of hidden and weights, and each row's share `[R]` of the slope's."""
    row, is_used, slope, weight = load_row(slopes_ptr, weights_ptr, experts_ptr)
    d_slope = tl.zeros((BLOCK,), tl.float32)
    d_weight = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, INNER, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < INNER
        at_gate = row * 2 * INNER + columns
        gate = tl.load(hidden_ptr + at_gate, mask=mask & is_used, other=0.0).to(tl.float32)
        up = tl.load(hidden_ptr + at_gate + INNER, mask=mask & is_used, other=0.0).to(tl.float32)
        d_out = tl.load(d_out_ptr + row * INNER + columns, mask=mask & is_used, other=0.0).to(tl.float32)
        share = tl.sigmoid(slope * gate)
        # Derivative of the sigmoid, times the gate: the derivative with respect to the slope, divided by the gate.
        bend = gate * share * (1 - share)
        d_weight += d_out * gate * share * up
        d_swish = d_out * weight * up
        d_slope += d_swish * gate * bend
        tl.store(d_hidden_ptr + at_gate, d_swish * (share + slope * bend), mask=mask)
        tl.store(d_hidden_ptr + at_gate + INNER, d_out * weight * gate * share, mask=mask)
    tl.store(d_slopes_ptr + row, tl.sum(d_slope, axis=0))
    tl.store(d_weights_ptr + row, tl.sum(d_weight, axis=0))
