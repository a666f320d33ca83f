"""The halves of the expert layer with products in FP8, whose derivatives are those of the products without it.

Rounding to FP8 counts as the identity (straight-through). So the backward pass consists of the functions that the
layer without FP8 has, at the tokens and hidden rows of this one, and is as precise as that of the other.

Source: forward products with scales per block as in DeepSeek-V3 (arXiv:2412.19437, section 3.3), which however rounds
the operands of the backward products too.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_ep import backends, fused_vjp, vjp
from jax_ep.dtypes import FP8
from jax_ep.fused_vjp import FusedConfig
from jax_ep.no_gradient import call_without_gradient
from jax_ep.types import TOKENS_NAME, Array, Handle, Quantized
from jax_ep.vjp import ActivationConfig, GemmConfig, Route

_REMEDY = (
    "an expert layer with forward_dtype=float8_e4m3fn has first derivatives only: for second ones, leave"
    " forward_dtype=None."
)


class Fp8Config(NamedTuple):
    """How one half of the layer runs: static, hashable.

    Attributes:
      route: of the exchange.
      product: registered name of the implementation of products in FP8.
      backward: those of the products of the backward pass.
      gradient: of the gradient of the activation.
      fused: how the backward pass runs a product and its exchange in one launch; None: one after the other.
      activation: name of the activation.
      gated: whether hidden rows have gate and up.
    """

    route: Route
    product: str
    backward: vjp.Gemms
    gradient: str
    fused: FusedConfig | None
    activation: str
    gated: bool


def _multiply(config: Fp8Config, rows: Quantized, w: Array, handle: Handle) -> Array:
    """`[R, K]` rows in FP8 times `w [L, K, N]`, quantised here."""
    run = backends.get(config.product)
    matrices, scales = run.quantize_matrices(w)
    return run.grouped_gemm_fp8(rows[0], matrices, handle.group_sizes, rows[1], scales, out_dtype=w.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch_gemm(config: Fp8Config, x: Array, weights: Array, w: Array, handle: Handle) -> tuple[Array, Array]:
    """`[T, H]` tokens to rows, times `w [L, H, N]` in FP8; and `[T, K]` weights to `[R]`."""
    kept, row_weights = _send(config, x, weights, handle)
    return _multiply_kept(config, kept, w, handle), row_weights


def _send(config: Fp8Config, x: Array, weights: Array, handle: Handle) -> tuple[Array | Quantized, Array]:
    """Tokens by row, as they travel, which is what the backward pass needs; and the weights of rows."""
    exchange, axis = backends.get(config.route.implementation), config.route.axis
    if config.route.wire_dtype is None:
        tokens = exchange.send_tokens(x, handle, axis, None)
        return tokens, exchange.send_weights(weights, handle, axis, after=tokens)
    values, scales = exchange.send_quantized(x, handle, axis)
    row_weights = exchange.send_weights(weights, handle, axis, after=scales)
    # As bytes: FP8 values that `jax.checkpoint` saves inside of a scan come back as NaN on the CPU (JAX 0.11.2).
    return (lax.bitcast_convert_type(values, jnp.uint8), scales), row_weights


def _multiply_kept(config: Fp8Config, kept: Array | Quantized, w: Array, handle: Handle) -> Array:
    """Tokens by row times `w [L, H, N]`."""
    if isinstance(kept, tuple):
        return _multiply(config, _as_fp8(kept), w, handle)
    return _multiply(config, backends.get(config.product).quantize_rows(kept, handle.group_sizes), w, handle)


def _as_fp8(kept: Quantized) -> Quantized:
    return lax.bitcast_convert_type(kept[0], FP8), kept[1]


def _dispatch_gemm_forward(config: Fp8Config, x: Array, weights: Array, w: Array, handle: Handle) -> Any:
    kept, row_weights = call_without_gradient(_REMEDY, partial(_send, config), x, weights, handle)
    kept = checkpoint_name(kept, TOKENS_NAME)
    hidden = call_without_gradient(_REMEDY, partial(_multiply_kept, config), kept, w, handle)
    return (hidden, row_weights), (kept, w, handle)


def _dispatch_gemm_backward(config: Fp8Config, residuals: Any, cotangents: tuple[Array, Array]) -> Any:
    kept, w, handle = residuals
    d_hidden, d_row_weights = cotangents
    gemm = GemmConfig(config.backward, transpose_rhs=True, out_dtype=w.dtype)
    if config.fused is not None:
        back = config.fused._replace(transpose_rhs=True)
        d_x, d_weights = fused_vjp.gather_gemm(back, d_hidden, d_row_weights, w, handle)
    else:
        d_rows = vjp.grouped_gemm(gemm, d_hidden, w, handle.group_sizes)
        d_x, d_weights = vjp.gather(config.route, d_rows, d_row_weights, handle)
    if isinstance(kept, tuple):
        values, scales = _as_fp8(kept)
        kept = backends.get(config.product).dequantize_rows(values, scales, handle.group_sizes, dtype=w.dtype)
    d_w = vjp.grouped_gemm_weights(gemm._replace(transpose_rhs=False), kept, d_hidden, handle.group_sizes)
    return d_x, d_weights, d_w, None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gemm_combine(config: Fp8Config, hidden: Array, row_weights: Array, w: Array, handle: Handle) -> Array:
    """`[R, N]` hidden rows, activated and weighted, times `w [L, I, H]` in FP8, to unweighted sums `[T, H]`."""
    return _gemm_combine(config, hidden, row_weights, w, handle, keep=False)[0]


def _gemm_combine(
    config: Fp8Config, hidden: Array, row_weights: Array, w: Array, handle: Handle, *, keep: bool
) -> tuple[Array, Array | None]:
    """The sums and, with `keep`, the activated rows without the rounding to FP8."""
    exchange, route = backends.get(config.route.implementation), config.route
    activate = partial(backends.get(config.product).activate_quantized, activation=config.activation, keep=keep)
    values, scales, rows = activate(hidden, row_weights, handle.group_sizes, gated=config.gated)
    y = _multiply(config, (values, scales), w, handle)
    return exchange.return_tokens(y, handle, route.axis, route.wire_dtype), rows


def _gemm_combine_forward(config: Fp8Config, hidden: Array, row_weights: Array, w: Array, handle: Handle) -> Any:
    run = partial(_gemm_combine, config, keep=True)
    sums, rows = call_without_gradient(_REMEDY, run, hidden, row_weights, w, handle)
    return sums, (hidden, row_weights, rows, w, handle)


def _gemm_combine_backward(config: Fp8Config, residuals: Any, d_sums: Array) -> Any:
    hidden, row_weights, rows, w, handle = residuals
    if config.fused is not None:
        back = config.fused._replace(transpose_rhs=True, keep="rows")
        d_rows, kept, _ = fused_vjp.scatter_gemm(back, d_sums, None, w, handle)
        d_w = fused_vjp.token_products(back, d_sums, kept, rows, handle)
    else:
        gemm = GemmConfig(config.backward, transpose_rhs=True, out_dtype=w.dtype)
        d_products, _ = vjp.scatter(config.route, d_sums, None, handle)
        d_rows = vjp.grouped_gemm(gemm, d_products, w, handle.group_sizes)
        d_w = vjp.grouped_gemm_weights(gemm._replace(transpose_rhs=False), rows, d_products, handle.group_sizes)
    activation = ActivationConfig(config.gradient, config.activation, config.gated)
    d_hidden, d_weights = vjp.activate_gradient(activation, hidden, row_weights, d_rows, handle.group_sizes)
    return d_hidden, d_weights, d_w, None


dispatch_gemm.defvjp(_dispatch_gemm_forward, _dispatch_gemm_backward)
gemm_combine.defvjp(_gemm_combine_forward, _gemm_combine_backward)
