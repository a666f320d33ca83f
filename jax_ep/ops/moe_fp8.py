"""The halves of the expert layer with products in FP8, whose derivatives are those of the products without it.

Rounding to FP8 counts as the identity (straight-through). So the backward pass consists of the functions that the
layer without FP8 has, at the tokens and hidden rows of this one, and is as precise as that of the other.

Source: forward products with scales per block as in DeepSeek-V3 (arXiv:2412.19437, section 3.3), which however rounds
the operands of the backward products too.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jax_ep.core import check_fp8
from jax_ep.core.bias import Bias, add_bias
from jax_ep.core.dtypes import FP8
from jax_ep.core.no_gradient import call_without_gradient
from jax_ep.ops import exchange, exchange_gemm, registry
from jax_ep.ops.activation import activate_gradient, is_one_pass
from jax_ep.ops.grouped_gemm import bias_gradient, multiply, sum_groups, weight_gradient
from jax_ep.ops.quantized_gemm import fp8_kernels
from jax_ep.types import TOKENS_NAME, Array, Experts, Handle, Options, Quantized, QuantizedExperts, Tokens

_REMEDY = (
    "an expert layer with forward_dtype=float8_e4m3fn has first derivatives only: for second ones, leave"
    " forward_dtype=None."
)


def checked(options: Options, forward_dtype: DTypeLike, experts: Experts, b_gate_up: Array | None, w: Array) -> bool:
    """True, after checking that the layer's products, the second by `w [L, I, H]`, can run in this dtype, FP8."""
    if isinstance(w, QuantizedExperts):
        raise ValueError(
            f"{options.function}: forward_dtype={forward_dtype!r} with QuantizedExperts, which say how products run;"
            " leave forward_dtype=None."
        )
    intermediate, hidden = w.shape[1:]
    check_fp8.forward(options.function, forward_dtype, hidden, intermediate)
    if not is_one_pass(experts, b_gate_up):
        raise ValueError(
            f"{options.function}: forward_dtype={forward_dtype!r} with a function of the caller's as activation, or"
            " with b_gate_up and weight_on='input': the pass that makes FP8 rows has neither; leave forward_dtype=None."
        )
    if options.schedule.fuse_weight_gradients:
        raise ValueError(
            f"{options.function}: fuse_weight_gradients=True and forward_dtype={forward_dtype!r}: the layer with FP8"
            " products saves its tokens in another form, by other launches; leave one of them None."
        )
    return True


def _multiply(options: Options, saved: Tokens, w: Array, handle: Handle) -> Array:
    """`[R, K]` rows, as they were saved or quantised here, times `w [L, K, N]`, quantised here."""
    products, operands = fp8_kernels(options)
    rows = _as_fp8(saved) if isinstance(saved, tuple) else operands.quantize_rows(saved, handle.group_sizes)
    matrices, scales = operands.quantize_matrices(w)
    return products.grouped_gemm_fp8(rows[0], matrices, handle.group_sizes, rows[1], scales, out_dtype=w.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch_and_multiply(options: Options, x: Array, weights: Array, w: Array, handle: Handle) -> tuple[Array, Array]:
    """`[T, H]` tokens to rows, times `w [L, H, N]` in FP8; and `[T, K]` weights to `[R]`."""
    saved, row_weights = _dispatch(options, x, weights, handle)
    return _multiply(options, saved, w, handle), row_weights


def _dispatch(options: Options, x: Array, weights: Array, handle: Handle) -> tuple[Tokens, Array]:
    """Tokens by row, as they travel, which is what the backward pass needs; and the weights of rows."""
    run = registry.get("exchange", exchange.choose(options, x, handle.layout, handle))
    if options.wire_dtype is None:
        tokens = run.dispatch_tokens(options, x, handle)
        return tokens, run.dispatch_weights(options, weights, handle, after=tokens)
    values, scales = run.dispatch_quantized(options, x, handle)
    row_weights = run.dispatch_weights(options, weights, handle, after=scales)
    # As bytes: FP8 values that `jax.checkpoint` saves inside of a scan come back as NaN on the CPU (JAX 0.11.2).
    return (lax.bitcast_convert_type(values, jnp.uint8), scales), row_weights


def _as_fp8(saved: Quantized) -> Quantized:
    """Values that were saved as bytes, or are FP8 already."""
    return lax.bitcast_convert_type(saved[0], FP8), saved[1]


def _dispatch_forward(options: Options, x: Array, weights: Array, w: Array, handle: Handle) -> Any:
    saved, row_weights = call_without_gradient(_REMEDY, partial(_dispatch, options), x, weights, handle)
    saved = checkpoint_name(saved, TOKENS_NAME)
    hidden = call_without_gradient(_REMEDY, partial(_multiply, options), saved, w, handle)
    return (hidden, row_weights), (saved, w, handle)


def _dispatch_backward(options: Options, residuals: Any, cotangents: tuple[Array, Array]) -> Any:
    saved, w, handle = residuals
    d_hidden, d_row_weights = cotangents
    if exchange_gemm.fuses(options, d_hidden, w.shape[1], handle):
        d_x, d_weights = exchange_gemm.multiply_and_combine(options, True, d_hidden, d_row_weights, w, handle)
    else:
        d_rows = multiply(options, True, w.dtype, d_hidden, w, handle.group_sizes)
        d_x, d_weights = exchange.combine_tokens(options, d_rows, d_row_weights, handle)
    if isinstance(saved, tuple):
        values, scales = _as_fp8(saved)
        saved = fp8_kernels(options)[1].dequantize_rows(values, scales, handle.group_sizes, dtype=w.dtype)
    return d_x, d_weights, weight_gradient(options, w.dtype, saved, d_hidden, handle.group_sizes), None


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


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def multiply_and_combine(options: Options, experts: Experts, between: Between, w: Array, handle: Handle) -> Array:
    """Hidden rows, activated and weighted, times `w [L, I, H]` in FP8, to unweighted sums `[T, H]`."""
    rows, _ = _activate(options, experts, between, handle, keep=False)
    y = _with_bias(_multiply(options, rows, w, handle), between, handle)
    run = registry.get("exchange", exchange.choose(options, y, handle.layout, handle))
    return run.combine_tokens(options, y, handle)


def _activate(
    options: Options, experts: Experts, between: Between, handle: Handle, *, keep: bool
) -> tuple[Quantized, Array | None]:
    """Activated and weighted rows in FP8 and, with `keep`, without that rounding."""
    run, operands = fp8_kernels(options)[1].activate_quantized, (between.hidden, between.row_weights, between.b_gate_up)
    values, scales, rows = run(experts, *operands, handle.group_sizes, keep=keep)
    return (values, scales), rows


def _with_bias(y: Array, between: Between, handle: Handle) -> Array:
    return y if between.b_down is None else add_bias(y, between.b_down, handle.group_sizes)


def _combine_forward(options: Options, experts: Experts, between: Between, w: Array, handle: Handle) -> Any:
    def run(between: Between, w: Array, handle: Handle) -> tuple[Array, Array | None]:
        quantized, rows = _activate(options, experts, between, handle, keep=True)
        y = _with_bias(_multiply(options, quantized, w, handle), between, handle)
        combine = registry.get("exchange", exchange.choose(options, y, handle.layout, handle)).combine_tokens
        return combine(options, y, handle), rows

    sums, rows = call_without_gradient(_REMEDY, run, between, w, handle)
    return sums, (between, rows, w, handle)


def _combine_backward(options: Options, experts: Experts, residuals: Any, d_sums: Array) -> Any:
    between, rows, w, handle = residuals
    sizes, options, d_sums = handle.group_sizes, options.transposed, d_sums.astype(w.dtype)
    if exchange_gemm.fuses(options, d_sums, w.shape[1], handle):
        d_rows, d_products, _ = exchange_gemm.dispatch_and_multiply(options, True, "rows", d_sums, None, w, handle)
        d_w = exchange_gemm.weight_gradient(options, True, "rows", d_sums, d_products, rows, handle)
    else:
        d_products, _ = exchange.dispatch_tokens(options, d_sums, None, handle)
        d_rows = multiply(options, True, w.dtype, d_products, w, sizes)
        d_w = weight_gradient(options, w.dtype, rows, d_products, sizes)
    operands = (between.hidden, between.row_weights, between.b_gate_up)
    d_hidden, d_weights = activate_gradient(options, experts, *operands, d_rows, sizes)
    d_gate_up = between.b_gate_up
    if d_gate_up is not None:
        d_gate_up = sum_groups(options, d_hidden, None, sizes).astype(d_gate_up.dtype)
    d_down = between.b_down
    if d_down is not None:
        d_down = bias_gradient(options, cast(Array, d_products), d_down, sizes)
    return Between(d_hidden, d_weights, d_gate_up, d_down), d_w, None


dispatch_and_multiply.defvjp(_dispatch_forward, _dispatch_backward)
multiply_and_combine.defvjp(_combine_forward, _combine_backward)
