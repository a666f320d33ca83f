"""The halves of the expert layer with products in FP8: those of the forward pass, all, or all but weight gradients.

Rounding to FP8 counts as the identity (straight-through). With the recipe "fp8-forward" the backward pass consists of
the functions that the layer without FP8 has, at the tokens and hidden rows of this one, and is as precise as that of
the other. With "fp8" its products are in FP8 too. Each operand then has its scales along the axis that is summed over:
cotangents of rows, which travel as they are multiplied, for 128 columns; both operands of a weight gradient, for a
column of 128 rows; matrices for blocks of 128 by 128, so that their transposes are the same numbers. With
"fp8-input-gradient" weight gradients alone are products in the dtype of the tokens, of rows as they came or were made:
no columns are quantised, of which a group needs whole blocks.

Source: products with scales per block, all in e4m3, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jax_ep.core import check_recipe
from jax_ep.core.bias import add_bias
from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_matrices import Fp8Weights, QuantizedExperts
from jax_ep.core.mesh_axes import platform
from jax_ep.core.no_gradient import call_without_gradient
from jax_ep.ops import exchange, exchange_gemm, registry
from jax_ep.ops.activation import activate_gradient, is_one_pass
from jax_ep.ops.activation_gemm_combine import Between
from jax_ep.ops.grouped_gemm import bias_gradient, multiply, sum_groups, weight_gradient
from jax_ep.ops.quantized_gemm import fp8_kernels, fp8_product, fp8_weight_gradient
from jax_ep.types import TOKENS_NAME, Array, Experts, Handle, Options, Quantized, Tokens

Weights = Array | Fp8Weights
"""Of one product, as the caller has them or quantised before."""


def _no_second(options: Options) -> str:
    return f"{options.function}: an FP8 recipe has first derivatives only; for second ones, leave recipe=None."


def check_layer(options: Options, experts: Experts, b_gate_up: Array | None, w: Any) -> None:
    """Raises where products, the second by `w [L, I, H]`, cannot run in FP8."""
    function, recipe = options.function, str(options.recipe)
    if isinstance(w, QuantizedExperts):
        raise ValueError(
            f"{function}: recipe={recipe!r} with QuantizedExperts, which say how products run; leave recipe=None."
        )
    intermediate, hidden = w.shape[1:]
    check_recipe.whole_blocks(function, recipe, hidden, intermediate)
    if not is_one_pass(experts, b_gate_up):
        raise ValueError(
            f"{function}: recipe={recipe!r} with a function of the caller's as activation, or with b_gate_up and"
            " weight_on='input': the pass that makes FP8 rows has neither; leave recipe=None."
        )
    if options.schedule.fuse_weight_gradients:
        raise ValueError(
            f"{function}: fuse_weight_gradients=True and recipe={recipe!r}: the layer with FP8 products saves its"
            " tokens in another form, by other launches; leave one of them None."
        )


def _multiply(
    options: Options, rows: Tokens, w: Weights, handle: Handle, dtype: DTypeLike, *, transpose: bool = False
) -> Array:
    """`[R, K]` rows times `w [L, K, N]`, or `[R, N]` rows times its transpose; what is not in FP8 is quantised here."""
    operands = fp8_kernels(options)[1]
    if not isinstance(rows, tuple):
        rows = operands.quantize_rows(rows, handle.group_sizes)
    if not isinstance(w, Fp8Weights):
        matrices, scales = operands.quantize_matrices(w, transpose=not transpose)
    elif transpose:
        matrices, scales = w.transposed, jnp.swapaxes(w.scales, 1, 2)
    else:
        matrices, scales = w.values, w.scales
    run = fp8_product(options, rows[0], matrices)
    return run(rows[0], matrices, handle.group_sizes, rows[1], scales, out_dtype=dtype)


def _weight_gradient(options: Options, lhs: Tokens, rhs: Tokens, w: Weights, handle: Handle) -> Weights:
    """The cotangent of `w`, of columns in FP8 or of rows."""
    sizes = handle.group_sizes
    if not (isinstance(lhs, tuple) and isinstance(rhs, tuple)):
        return _cotangent(w, weight_gradient(options, w.dtype, lhs, rhs, sizes))
    run = fp8_weight_gradient(options, lhs[0], rhs[0], sizes.shape[0])
    return _cotangent(w, run(lhs[0], rhs[0], sizes, lhs[1], rhs[1], out_dtype=w.dtype))


def _cotangent(w: Weights, gradient: Array) -> Weights:
    """The cotangent of matrices, which goes to their master."""
    gradient = gradient.astype(w.dtype)
    return Fp8Weights(gradient, *(cast(Array, None),) * 3) if isinstance(w, Fp8Weights) else gradient


def _unquantized(w: Weights, dtype: DTypeLike) -> Array:
    """The matrices themselves, for products without FP8."""
    return (w.master if isinstance(w, Fp8Weights) else w).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch_and_multiply(
    options: Options, x: Array, weights: Array, w: Weights, handle: Handle
) -> tuple[Array, Array]:
    """`[T, H]` tokens to rows, times `w [L, H, N]` in FP8; and `[T, K]` weights to `[R]`."""
    saved, row_weights = _dispatch(options, x, weights, handle)
    return _multiply(options, _as_fp8(saved), w, handle, x.dtype), row_weights


def _dispatch(options: Options, x: Array, weights: Array, handle: Handle) -> tuple[Tokens, Array]:
    """Tokens by row, as they travel, which is what the backward pass needs; and the weights of rows."""
    run = registry.get("exchange", exchange.choose(options, x, handle.layout, handle))
    if options.wire_dtype is None:
        return run.dispatch_tokens(options, x, weights, handle)
    (values, scales), row_weights = run.dispatch_quantized(options, x, weights, handle)
    # As bytes: FP8 values that `jax.checkpoint` saves inside of a scan come back as NaN on the CPU (JAX 0.11.2).
    return (lax.bitcast_convert_type(values, jnp.uint8), scales), row_weights


def _saved_matrices(w: Weights) -> Weights:
    """As bytes on the CPU, where FP8 is lost that a layer quantises and saves; elsewhere they would be copies."""
    return _bitcast(w, jnp.uint8) if platform() == "cpu" else w


def _matrices(saved: Weights) -> Weights:
    return _bitcast(saved, FP8)


def _bitcast(w: Weights, dtype: DTypeLike) -> Weights:
    if not isinstance(w, Fp8Weights) or w.values.dtype == dtype:
        return w
    transposed = None if w.transposed is None else lax.bitcast_convert_type(w.transposed, dtype)
    return dataclasses.replace(w, values=lax.bitcast_convert_type(w.values, dtype), transposed=transposed)


def _as_fp8(saved: Tokens) -> Tokens:
    """Rows that were saved; values in bytes are FP8."""
    return (lax.bitcast_convert_type(saved[0], FP8), saved[1]) if isinstance(saved, tuple) else saved


def _dispatch_forward(options: Options, x: Array, weights: Array, w: Weights, handle: Handle) -> Any:
    saved, row_weights = call_without_gradient(_no_second(options), partial(_dispatch, options), x, weights, handle)
    saved = checkpoint_name(saved, TOKENS_NAME)

    def run(saved: Tokens, w: Weights, handle: Handle) -> Array:
        return _multiply(options, _as_fp8(saved), w, handle, x.dtype)

    return (call_without_gradient(_no_second(options), run, saved, w, handle), row_weights), (
        saved,
        _saved_matrices(w),
        handle,
    )


def _dispatch_backward(options: Options, residuals: Any, cotangents: tuple[Array, Array]) -> Any:
    if check_recipe.differentiates_in_fp8(options.recipe):
        return call_without_gradient(
            _no_second(options), partial(_dispatch_backward_in_fp8, options), residuals, cotangents
        )
    saved, saved_w, handle = residuals
    w = _matrices(saved_w)
    d_hidden, d_row_weights = cotangents
    dtype, matrices = d_hidden.dtype, _unquantized(w, d_hidden.dtype)
    if exchange_gemm.fuses(options, d_hidden, w.shape[1], handle):
        d_x, d_weights = exchange_gemm.multiply_and_combine(options, True, d_hidden, d_row_weights, matrices, handle)
    else:
        d_rows = multiply(options, True, dtype, d_hidden, matrices, handle.group_sizes)
        d_x, d_weights = exchange.combine_tokens(options, d_rows, d_row_weights, handle)
    rows = _as_fp8(saved)
    if isinstance(rows, tuple):
        rows = fp8_kernels(options)[1].dequantize_rows(*rows, handle.group_sizes, dtype=dtype)
    return d_x, d_weights, _weight_gradient(options, rows, d_hidden, w, handle), None


def _dispatch_backward_in_fp8(options: Options, residuals: Any, cotangents: tuple[Array, Array]) -> Any:
    saved, saved_w, handle = residuals
    w = _matrices(saved_w)
    d_hidden, d_row_weights = cotangents
    operands, sizes, dtype = fp8_kernels(options)[1], handle.group_sizes, d_hidden.dtype
    in_columns = options.recipe == "fp8"
    rows, rhs = operands.quantize_both_ways(d_hidden, sizes) if in_columns else (d_hidden, d_hidden)
    d_rows = _multiply(options, rows, w, handle, dtype, transpose=True)
    d_x, d_weights = exchange.combine_tokens(options, d_rows, d_row_weights, handle)
    tokens = _as_fp8(saved)
    if in_columns:
        lhs = operands.quantize_columns(tokens, sizes)
    else:
        lhs = operands.dequantize_rows(*tokens, sizes, dtype=dtype)
    return d_x, d_weights, _weight_gradient(options, lhs, rhs, w, handle), None


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def multiply_and_combine(options: Options, experts: Experts, between: Between, w: Weights, handle: Handle) -> Array:
    """Hidden rows, activated and weighted, times `w [L, I, H]` in FP8, to unweighted sums `[T, H]`."""
    rows, _ = _activate(options, experts, between, handle, keep=False)
    return _combine(options, _multiply(options, rows, w, handle, between.hidden.dtype), between, handle)


def _activate(
    options: Options, experts: Experts, between: Between, handle: Handle, *, keep: bool
) -> tuple[Quantized, Array | None]:
    """Activated and weighted rows in FP8 and, with `keep`, without that rounding."""
    run = fp8_kernels(options)[1].activate_quantized
    values, scales, rows = run(experts, *between[:3], handle.group_sizes, keep=keep)
    return (values, scales), rows


def _combine(options: Options, y: Array, between: Between, handle: Handle) -> Array:
    if between.b_down is not None:
        y = add_bias(y, between.b_down, handle.group_sizes)
    run = registry.get("exchange", exchange.choose(options, y, handle.layout, handle))
    return run.combine_tokens(options, y, None, handle)[0]


def _combine_forward(options: Options, experts: Experts, between: Between, w: Weights, handle: Handle) -> Any:
    # With products in FP8 in the backward pass, too, rows are made again there, from the hidden rows.
    keep = not check_recipe.differentiates_in_fp8(options.recipe)

    def run(between: Between, w: Weights, handle: Handle) -> tuple[Array, Array | None]:
        quantized, rows = _activate(options, experts, between, handle, keep=keep)
        y = _multiply(options, quantized, w, handle, between.hidden.dtype)
        return _combine(options, y, between, handle), rows

    sums, rows = call_without_gradient(_no_second(options), run, between, w, handle)
    return sums, (between, rows, _saved_matrices(w), handle)


def _combine_backward(options: Options, experts: Experts, residuals: Any, d_sums: Array) -> Any:
    options = options.transposed
    if check_recipe.differentiates_in_fp8(options.recipe):
        run = partial(_combine_backward_in_fp8, options, experts)
        return call_without_gradient(_no_second(options), run, residuals, d_sums)
    between, rows, saved_w, handle = residuals
    w = _matrices(saved_w)
    sizes, dtype = handle.group_sizes, between.hidden.dtype
    d_sums, matrices = d_sums.astype(dtype), _unquantized(w, dtype)
    if exchange_gemm.fuses(options, d_sums, w.shape[1], handle):
        d_rows, d_products, _ = exchange_gemm.dispatch_and_multiply(
            options, True, "rows", d_sums, None, matrices, handle
        )
        d_w = exchange_gemm.weight_gradient(options, True, "rows", d_sums, d_products, rows, handle)
    else:
        d_products, _ = exchange.dispatch_tokens(options, d_sums, None, handle)
        d_rows = multiply(options, True, dtype, d_products, matrices, sizes)
        d_w = weight_gradient(options, w.dtype, rows, d_products, sizes)
    d_between, _ = _gradient_between(options, experts, between, d_rows, cast(Array, d_products), sizes)
    return d_between, _cotangent(w, d_w), None


def _combine_backward_in_fp8(options: Options, experts: Experts, residuals: Any, d_sums: Array) -> Any:
    between, _, saved_w, handle = residuals
    w = _matrices(saved_w)
    sizes, dtype = handle.group_sizes, between.hidden.dtype
    operands, d_sums = fp8_kernels(options)[1], d_sums.astype(dtype)
    run = registry.get("exchange", exchange.choose(options, d_sums, handle.layout, handle))
    in_fp8, _ = run.dispatch_quantized(options, d_sums, None, handle)
    d_rows = _multiply(options, in_fp8, w, handle, dtype, transpose=True)
    in_columns, d_products = options.recipe == "fp8", None
    if between.b_down is not None or not in_columns:
        d_products = operands.dequantize_rows(*in_fp8, sizes, dtype=dtype)
    d_between, rows = _gradient_between(options, experts, between, d_rows, d_products, sizes, keep=not in_columns)
    lhs: Any = operands.activate_columns(experts, *between[:3], sizes) if in_columns else rows
    rhs: Any = operands.quantize_columns(in_fp8, sizes) if in_columns else d_products
    return d_between, _weight_gradient(options, lhs, rhs, w, handle), None


def _gradient_between(
    options: Options,
    experts: Experts,
    between: Between,
    d_rows: Array,
    d_products: Array | None,
    sizes: Array,
    *,
    keep: bool = False,
) -> tuple[Between, Array | None]:
    """The cotangents of what is between the products, and of the bias behind them; with `keep` also activated rows."""
    d_hidden, d_weights, rows = activate_gradient(options, experts, keep, *between[:3], d_rows, sizes)
    d_gate_up, d_down = between.b_gate_up, between.b_down
    if d_gate_up is not None:
        d_gate_up = sum_groups(options, d_hidden, None, sizes).astype(d_gate_up.dtype)
    if d_down is not None:
        d_down = bias_gradient(options, cast(Array, d_products), d_down, sizes)
    return Between(d_hidden, d_weights, d_gate_up, d_down), rows


dispatch_and_multiply.defvjp(_dispatch_forward, _dispatch_backward)
multiply_and_combine.defvjp(_combine_forward, _combine_backward)
