"""Activation, grouped GEMM and combine: the second half of the expert layer, which keeps hidden rows alone.

The backward pass makes the activated rows again, in the pass of the activation's gradient, and no product: the gradient
of a router weight is that of its activated row times the row, so what the second product gave is not needed.

Source: what is kept, and that gradient, are those of SonicMoE (arXiv:2512.14080).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import jax

from jax_ep.core.bias import Bias
from jax_ep.ops import exchange, exchange_gemm, registry
from jax_ep.ops.activation import activate, activate_again, is_one_pass
from jax_ep.ops.grouped_gemm import bias_gradient, multiply, multiply_with_bias, weight_gradient
from jax_ep.types import Array, Experts, Handle, Options


class Between(NamedTuple):
    """What comes between the two products, and behind the second.

    Attributes:
      hidden: `[R, N]` results of the first.
      row_weights: `[R]`.
      b_gate_up: `[L, N]` biases of the hidden rows, or None.
      b_down: of the second product, or None.
    """

    hidden: Array
    row_weights: Array
    b_gate_up: Array | None
    b_down: Bias | None


def for_experts(experts: Experts, b_gate_up: Array | None) -> Any:
    """`activate_multiply_and_combine` or, where one pass does not activate rows, `in_several_passes`."""
    return activate_multiply_and_combine if is_one_pass(experts, b_gate_up) else in_several_passes


def in_several_passes(options: Options, experts: Experts, between: Between, w: Array, handle: Handle) -> Array:
    """The same with JAX's own derivatives of the activation, whose passes run again in the backward pass."""

    @jax.checkpoint
    def run(between: Between, w: Array, handle: Handle) -> Array:
        hidden, weights, b_gate_up, bias = between
        sizes = handle.group_sizes
        rows = activate(options, experts, w.shape[1], hidden, weights, b_gate_up, sizes)
        return multiply_and_combine(options, rows, w, handle, bias)

    return run(between, w, handle)


def multiply_and_combine(options: Options, rows: Array, w: Array, handle: Handle, bias: Bias | None) -> Array:
    """Activated rows times `w [L, I, H]` to sums `[T, H]`, in one launch or several."""
    if not exchange_gemm.fuses(options, rows, w.shape[2], handle):
        return _multiply_then_combine(options, rows, w, handle, bias)
    if bias is None:
        return exchange_gemm.multiply_and_combine(options, False, rows, None, w, handle)[0]
    return exchange_gemm.multiply_and_combine_with_bias(options, rows, w, handle, bias)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def activate_multiply_and_combine(
    options: Options, experts: Experts, between: Between, w: Array, handle: Handle
) -> Array:
    """Hidden rows, activated and weighted in one pass, times `w [L, I, H]`, to unweighted sums `[T, H]`."""
    hidden, weights, b_gate_up, bias = between
    activation = registry.get("activation", registry.choose(options, "activation", hidden.dtype))
    rows = activation.activate(experts, hidden, weights, b_gate_up, handle.group_sizes)
    if not exchange_gemm.fuses(options, rows, w.shape[2], handle):
        return _multiply_then_combine(options, rows, w, handle, bias)
    run = exchange_gemm.implementation(options, rows, w, handle)
    return cast(Array, run.grouped_gemm_combine(options, rows, None, w, handle, transpose_rhs=False, bias=bias)[0])


def _multiply_then_combine(options: Options, rows: Array, w: Array, handle: Handle, bias: Bias | None) -> Array:
    operands = (rows.dtype, rows, w, handle.group_sizes)
    if bias is None:
        products = multiply(options, False, *operands)
    else:
        products = multiply_with_bias(options, *operands, bias)
    return exchange.combine_tokens(options, products, None, handle)[0]


def _forward(options: Options, experts: Experts, *operands: Any) -> Any:
    return activate_multiply_and_combine(options, experts, *operands), operands


def _backward(options: Options, experts: Experts, residuals: Any, d_sums: Array) -> Any:
    between, w, handle = residuals
    sizes, options = handle.group_sizes, options.transposed
    d_sums = d_sums.astype(w.dtype)
    fused = exchange_gemm.fuses(options, d_sums, w.shape[1], handle)
    if fused:
        # The cotangents are needed at once, as rows, and not kept.
        d_rows, d_products, _ = exchange_gemm.dispatch_and_multiply(options, True, "rows", d_sums, None, w, handle)
    else:
        d_products, _ = exchange.dispatch_tokens(options, d_sums, None, handle)
        d_rows = multiply(options, True, w.dtype, d_products, w, sizes)
    # Else XLA would find what portable formulas compute in both directions, and keep it.
    hidden, d_rows = jax.lax.optimization_barrier((between.hidden, d_rows))
    d = activate_again(options, experts, hidden, between.row_weights, between.b_gate_up, d_rows, sizes)
    if fused:
        d_w = exchange_gemm.weight_gradient(options, True, "rows", d_sums, d_products, d.rows, handle)
    else:
        d_w = weight_gradient(options, w.dtype, d.rows, d_products, sizes)
    d_down = between.b_down
    if d_down is not None:
        d_down = bias_gradient(options, cast(Array, d_products), d_down, sizes)
    return Between(d.hidden, d.weights, d.bias, d_down), d_w, None


activate_multiply_and_combine.defvjp(_forward, _backward)
