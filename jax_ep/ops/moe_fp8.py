"""The two halves of the expert layer with the GEMMs of both passes in FP8.

Rounding to FP8 is differentiated as the identity (straight-through). Each operand has its scales along the axis that is
summed over. Rows and cotangents of rows have one per 128 columns, and are sent as they are multiplied. Both operands of
a weight gradient have one per column of 128 rows. Weights have one per block of 128 by 128, so that their transposes
are the same numbers.

Source: GEMMs with scales per block, all in e4m3, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jax_ep.core.autodiff import TOKENS_NAME, call_without_gradient
from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_matrices import GemmWeights, QuantizedWeights, num_home
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.layout import add_bias
from jax_ep.core.mesh_axes import platform
from jax_ep.ops import activation, exchange, registry
from jax_ep.ops.activation import is_one_pass
from jax_ep.ops.activation_gemm_combine import FfnHidden
from jax_ep.ops.grouped_gemm import bias_gradient
from jax_ep.ops.plan import Fp8LayerPlan
from jax_ep.types import Array, Experts, Handle, Options, Quantized

Weights = GemmWeights | QuantizedWeights
"""Weights of one GEMM, plain or quantized."""


def _without_second_derivative[Result](function: Callable[..., Result]) -> Callable[..., Result]:
    """Return the function of a plan and arrays, whose derivative is an error."""

    def run(plan: Fp8LayerPlan, *arguments: Any) -> Result:
        name = plan.options.function
        remedy = f"{name}: recipe='fp8' has first derivatives only; for second ones, leave recipe=None."
        return call_without_gradient(remedy, partial(function, plan), *arguments)

    return run


def check_layer(options: Options, experts: Experts, b_gate_up: Array | None, w: Weights) -> None:
    """Raise an error if the GEMMs, the second one by `w [L, I, H]`, cannot run in FP8."""
    function = options.function
    if isinstance(w, QuantizedWeights) and w.master is None:
        raise ValueError(
            f"{function}: recipe='fp8' with quantized weights for inference; pass quantize(w, 'fp8',"
            " for_training=True), or leave recipe=None."
        )
    intermediate, hidden = w.shape[1:]
    if hidden % GROUP_SIZE or intermediate % GROUP_SIZE:
        raise ValueError(
            f"{function}: H={hidden} and I={intermediate} on a rank, but recipe='fp8' needs multiples of {GROUP_SIZE},"
            " the FP8 scale block; pad both with zeros, or leave recipe=None."
        )
    if not is_one_pass(experts, b_gate_up):
        raise ValueError(
            f"{function}: recipe='fp8' with a custom activation, or with b_gate_up and"
            " weight_on='input': the pass that quantizes rows supports neither; leave recipe=None."
        )


def _multiply(
    plan: Fp8LayerPlan, rows: Quantized, w: Weights, handle: Handle, dtype: DTypeLike, *, transpose: bool = False
) -> Array:
    """Multiply `[R, K]` rows by `w [L, K, N]`, or `[R, N]` rows by its transpose; quantize other weights."""
    if not isinstance(w, QuantizedWeights):
        values, scales = plan.operands.quantize_matrices(w, handle.group_sizes, transpose=not transpose)
    elif transpose:
        values, scales = cast(Array, w.values_kn), jnp.swapaxes(cast(Array, w.scales), 1, 2)
    else:
        values, scales = w.values, cast(Array, w.scales)
    run = registry.FP8_GEMM.by(plan.gemm.forward.implementation).grouped_gemm_fp8
    return run(rows, (values, scales), handle.group_sizes, out_dtype=dtype)


def _weight_gradient(plan: Fp8LayerPlan, lhs: Quantized, rhs: Quantized, w: Weights, handle: Handle) -> Weights:
    """Return the cotangent of the master weights of `w`, from column-wise quantized operands."""
    run = registry.FP8_GEMM.by(plan.gemm.gradient.implementation).weight_gradient_fp8
    master = cast(GemmWeights, w.master if isinstance(w, QuantizedWeights) else w)
    gradient = run(lhs, rhs, handle.group_sizes, out_dtype=master.dtype, num_home=num_home(master))
    if not isinstance(w, QuantizedWeights):
        return gradient
    none = cast(Array, None)
    return dataclasses.replace(w, values=none, scales=none, values_kn=none, master=cast(Array, gradient))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch_and_multiply(
    plan: Fp8LayerPlan, x: Array, weights: Array, w: Weights, handle: Handle
) -> tuple[Array, Array]:
    """`[T, H]` tokens to rows, times `w [L, H, N]` in FP8; and `[T, K]` weights to `[R]`."""
    saved, row_weights = _dispatch(plan, x, weights, handle)
    return _multiply(plan, _as_fp8(saved), w, handle, x.dtype), row_weights


def _dispatch(plan: Fp8LayerPlan, x: Array, weights: Array, handle: Handle) -> tuple[Quantized, Array]:
    """Tokens by row, their values as bytes, which is what the backward pass needs; and the weights of rows."""
    run = registry.EXCHANGE.by(plan.exchange.dispatch.implementation)
    (values, scales), row_weights = run.dispatch_quantized(plan.exchange.options, x, weights, handle)
    # As bytes: FP8 values that `jax.checkpoint` saves inside of a scan come back as NaN on the CPU (JAX 0.11.2).
    return (lax.bitcast_convert_type(values, jnp.uint8), scales), cast(Array, row_weights)


def _saved_weights(w: Weights) -> Weights:
    """Return weights to save: as bytes on the CPU, where saved FP8 values are lost; on GPUs that would be a copy."""
    return _bitcast(w, jnp.uint8) if platform() == "cpu" else w


def _weights_of(saved: Weights) -> Weights:
    return _bitcast(saved, FP8)


def _bitcast(w: Weights, dtype: DTypeLike) -> Weights:
    if not isinstance(w, QuantizedWeights) or w.values.dtype == dtype:
        return w
    values, values_kn = (lax.bitcast_convert_type(part, dtype) for part in (w.values, cast(Array, w.values_kn)))
    return dataclasses.replace(w, values=values, values_kn=values_kn)


def _as_fp8(saved: Quantized) -> Quantized:
    """Rows that were saved, whose bytes are FP8."""
    return lax.bitcast_convert_type(saved[0], FP8), saved[1]


type _DispatchSaved = tuple[Quantized, Weights, Handle]
type _CombineSaved = tuple[FfnHidden, Weights, Handle]


def _dispatch_forward(
    plan: Fp8LayerPlan, x: Array, weights: Array, w: Weights, handle: Handle
) -> tuple[tuple[Array, Array], _DispatchSaved]:
    saved, row_weights = _without_second_derivative(_dispatch)(plan, x, weights, handle)
    saved, dtype = checkpoint_name(saved, TOKENS_NAME), x.dtype  # A function that holds x would leak its tracer.

    @_without_second_derivative
    def multiply(plan: Fp8LayerPlan, saved: Quantized, w: Weights, handle: Handle) -> Array:
        return _multiply(plan, _as_fp8(saved), w, handle, dtype)

    return (multiply(plan, saved, w, handle), row_weights), (saved, _saved_weights(w), handle)


@_without_second_derivative
def _dispatch_backward(
    plan: Fp8LayerPlan, residuals: _DispatchSaved, cotangents: tuple[Array, Array]
) -> tuple[Array, Array | None, Weights, None]:
    saved, saved_w, handle = residuals
    w, sizes = _weights_of(saved_w), handle.group_sizes
    d_hidden, d_row_weights = cotangents
    operands = plan.operands
    rows, rhs = operands.quantize_both_ways(d_hidden, sizes)
    d_rows = _multiply(plan, rows, w, handle, d_hidden.dtype, transpose=True)
    d_x, d_weights = exchange.combine_tokens(plan.exchange, d_rows, d_row_weights, handle)
    lhs = operands.quantize_columns(_as_fp8(saved), sizes)
    return d_x, d_weights, _weight_gradient(plan, lhs, rhs, w, handle), None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply_and_combine(plan: Fp8LayerPlan, between: FfnHidden, w: Weights, handle: Handle) -> Array:
    """Hidden rows, activated and weighted, times `w [L, I, H]` in FP8, to unweighted sums `[T, H]`."""
    rows = plan.operands.activate_quantized(plan.activation.experts, between.rows(handle.group_sizes))
    y = _multiply(plan, rows, w, handle, between.hidden.dtype)
    if between.b_down is not None:
        y = add_bias(y, between.b_down, handle.group_sizes)
    return exchange.combine_tokens(plan.exchange, y, None, handle)[0]


def _combine_forward(plan: Fp8LayerPlan, between: FfnHidden, w: Weights, handle: Handle) -> tuple[Array, _CombineSaved]:
    sums = _without_second_derivative(multiply_and_combine)(plan, between, w, handle)
    return sums, (between, _saved_weights(w), handle)


@_without_second_derivative
def _combine_backward(plan: Fp8LayerPlan, residuals: _CombineSaved, d_sums: Array) -> tuple[FfnHidden, Weights, None]:
    plan, (between, saved_w, handle) = plan.transposed, residuals
    w, sizes, dtype = _weights_of(saved_w), handle.group_sizes, between.hidden.dtype
    operands, d_sums = plan.operands, d_sums.astype(dtype)
    d_results, _ = exchange.dispatch_quantized(plan.exchange, d_sums, None, handle)
    d_rows = _multiply(plan, d_results, w, handle, dtype, transpose=True)
    d, _ = activation.gradient(plan.activation, between.rows(sizes), d_rows, keep=False)
    d_down = between.b_down
    if d_down is not None:
        d_down = bias_gradient(plan.gemm.sums, operands.dequantize_rows(*d_results, sizes, dtype=dtype), d_down, sizes)
    lhs = operands.activate_columns(plan.activation.experts, between.rows(sizes))
    rhs = operands.quantize_columns(d_results, sizes)
    d_between = FfnHidden(d.hidden, d.weights, d.bias, d_down)
    return d_between, _weight_gradient(plan, lhs, rhs, w, handle), None


dispatch_and_multiply.defvjp(_dispatch_forward, _dispatch_backward)
multiply_and_combine.defvjp(_combine_forward, _combine_backward)
