"""Every custom VJP of the package.

Dispatch and combine are each other's transpose over the same handle, for tokens and for weights. The grouped GEMM and
its weight gradient are closed under differentiation too. So each backward pass is made of the functions of this file,
and gradients of any order exist.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep import activations, backends, reference
from jax_ep.no_gradient import without_gradient
from jax_ep.types import Array, Handle, Layout, LowLatencyHandle, Quantized


class Route(NamedTuple):
    """How an exchange runs: static, hashable.

    Attributes:
      implementation: registered name.
      axis: mesh axes of the exchange.
      wire_dtype: FP8 dtype, or None to send the tokens as they are.
    """

    implementation: str
    axis: tuple[str, ...]
    wire_dtype: DTypeLike | None = None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def scatter(route: Route, x: Array, weights: Array | None, handle: Handle) -> tuple[Array, Array | None]:
    """`[T, H]` tokens and `[T, K]` weights to `[R, H]` and `[R]` rows; transpose of `gather`."""
    run = backends.get(route.implementation)
    tokens = run.send_tokens(x, handle, route.axis, route.wire_dtype)
    if weights is None:
        return tokens, None
    return tokens, run.send_weights(weights, handle, route.axis, after=tokens)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather(route: Route, y: Array, row_weights: Array | None, handle: Handle) -> tuple[Array, Array | None]:
    """`[R, H]` rows to `[T, H]` sums, and `[R]` row values to their `[T, K]` slots; transpose of `scatter`."""
    run = backends.get(route.implementation)
    sums = run.return_tokens(y, handle, route.axis, route.wire_dtype)
    if row_weights is None:
        return sums, None
    return sums, run.return_weights(row_weights, handle, route.axis, after=sums)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def scatter_weights(route: Route, weights: Array, handle: Handle) -> tuple[Array]:
    """`[T, K]` router weights to `[R]`, without tokens; transpose of `gather_weights`."""
    return (backends.get(route.implementation).send_weights(weights, handle, route.axis),)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_weights(route: Route, row_weights: Array, handle: Handle) -> tuple[Array]:
    """`[R]` row values to their `[T, K]` slots; transpose of `scatter_weights`."""
    return (backends.get(route.implementation).return_weights(row_weights, handle, route.axis),)


def _transposes(function: Any, transpose: Any) -> None:
    """Makes `transpose` the backward of the linear `function(route, *arrays, handle)`."""

    def forward(route: Route, *args: Any) -> tuple[Any, Handle]:
        return function(route, *args), args[-1]

    def backward(route: Route, handle: Handle, cotangents: Any) -> tuple[Any, ...]:
        return *transpose(route, *cotangents, handle), None

    function.defvjp(forward, backward)


for _function, _transpose in ((scatter, gather), (scatter_weights, gather_weights)):
    _transposes(_function, _transpose)
    _transposes(_transpose, _function)


class Gemms(NamedTuple):
    """Implementations of grouped GEMMs: of products, and of the gradients of their matrices."""

    products: str
    weights: str


class GemmConfig(NamedTuple):
    """Static arguments of a grouped GEMM."""

    implementation: Gemms
    transpose_rhs: bool
    out_dtype: DTypeLike


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_gemm(config: GemmConfig, lhs: Array, rhs: Array, group_sizes: Array) -> Array:
    """`[M, K]` rows times the `[G, K, N]` matrix of their group (`[G, N, K]` if `transpose_rhs`)."""
    run = backends.get(config.implementation.products).grouped_gemm
    return run(lhs, rhs, group_sizes, transpose_rhs=config.transpose_rhs, out_dtype=config.out_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_gemm_weights(config: GemmConfig, lhs: Array, rhs: Array, group_sizes: Array) -> Array:
    """`[M, K]` and `[M, N]` rows to `[G, K, N]`, one product per group; `transpose_rhs` is not used."""
    run = backends.get(config.implementation.weights).grouped_gemm_weights
    return run(lhs, rhs, group_sizes, out_dtype=config.out_dtype)


def _grouped_gemm_forward(config: GemmConfig, lhs: Array, rhs: Array, group_sizes: Array) -> Any:
    return grouped_gemm(config, lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _grouped_gemm_backward(config: GemmConfig, residuals: Any, cotangent: Array) -> tuple[Array, Array, None]:
    lhs, rhs, group_sizes = residuals
    cotangent = cotangent.astype(lhs.dtype)
    back = config._replace(transpose_rhs=not config.transpose_rhs, out_dtype=lhs.dtype)
    d_lhs = grouped_gemm(back, cotangent, rhs, group_sizes)
    rows = (cotangent, lhs) if config.transpose_rhs else (lhs, cotangent)
    d_rhs = grouped_gemm_weights(config._replace(out_dtype=rhs.dtype), *rows, group_sizes)
    return d_lhs, d_rhs, None


def _grouped_gemm_weights_forward(config: GemmConfig, lhs: Array, rhs: Array, group_sizes: Array) -> Any:
    return grouped_gemm_weights(config, lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _grouped_gemm_weights_backward(config: GemmConfig, residuals: Any, cotangent: Array) -> tuple[Array, Array, None]:
    lhs, rhs, group_sizes = residuals
    cotangent = cotangent.astype(lhs.dtype)
    gemm = GemmConfig(config.implementation, transpose_rhs=True, out_dtype=lhs.dtype)
    d_lhs = grouped_gemm(gemm, rhs, cotangent, group_sizes)
    d_rhs = grouped_gemm(gemm._replace(transpose_rhs=False), lhs, cotangent, group_sizes)
    return d_lhs, d_rhs, None


grouped_gemm.defvjp(_grouped_gemm_forward, _grouped_gemm_backward)
grouped_gemm_weights.defvjp(_grouped_gemm_weights_forward, _grouped_gemm_weights_backward)


class ActivationConfig(NamedTuple):
    """Static arguments of a weighted activation."""

    implementation: str
    activation: str
    gated: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def activate(config: ActivationConfig, hidden: Array, weights: Array, group_sizes: Array) -> Array:
    """`[R, 2 * I]` hidden rows (`[R, I]` where not gated) and `[R]` weights to `[R, I]`."""
    run = backends.get(config.implementation).activate
    return run(hidden, weights, group_sizes, activation=config.activation, gated=config.gated)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def activate_gradient(
    config: ActivationConfig, hidden: Array, weights: Array, d_rows: Array, group_sizes: Array
) -> tuple[Array, Array]:
    """Cotangents of `hidden` and `weights`."""
    run = backends.get(config.implementation).activate_gradient
    return run(hidden, weights, d_rows, group_sizes, activation=config.activation, gated=config.gated)


def _activate_forward(config: ActivationConfig, hidden: Array, weights: Array, group_sizes: Array) -> Any:
    return activate(config, hidden, weights, group_sizes), (hidden, weights, group_sizes)


def _activate_backward(config: ActivationConfig, residuals: Any, d_rows: Array) -> tuple[Array, Array, None]:
    hidden, weights, group_sizes = residuals
    return *activate_gradient(config, hidden, weights, d_rows, group_sizes), None


def _activate_gradient_forward(
    config: ActivationConfig, hidden: Array, weights: Array, d_rows: Array, group_sizes: Array
) -> Any:
    return activate_gradient(config, hidden, weights, d_rows, group_sizes), (hidden, weights, d_rows)


def _activate_gradient_backward(config: ActivationConfig, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    # Second derivatives are rare: the portable formula, which JAX differentiates again.
    def gradient(hidden: Array, weights: Array, d_rows: Array) -> tuple[Array, Array]:
        return activations.weighted_gradient(hidden, weights, d_rows, config.activation, config.gated)

    _, pull = jax.vjp(gradient, *residuals)
    return *pull(cotangents), None


activate.defvjp(_activate_forward, _activate_backward)
activate_gradient.defvjp(_activate_gradient_forward, _activate_gradient_backward)


def send_quantized(route: Route, pair: Quantized, handle: Handle) -> Quantized:
    """FP8 values and scales of `[T]` tokens to `[R]` rows, bit for bit; not differentiable."""
    pair = without_gradient(
        "dispatch of a (values, scales) pair has no gradient: pass the tokens themselves with"
        " wire_dtype=float8_e4m3fn.",
        pair,
    )
    run = backends.get(route.implementation).send_rows
    values, scales = (run(part, handle, route.axis) for part in pair)
    return values, scales


class LowLatencyRoute(NamedTuple):
    """How a low-latency exchange runs: static, hashable.

    Attributes:
      implementation: registered name.
      axis: mesh axes of the exchange.
      layout: static sizes.
      group_size: columns per FP8 scale, or None to send tokens as they are.
      wire_dtype: FP8 on the way back, or None.
    """

    implementation: str
    axis: tuple[str, ...]
    layout: Layout
    group_size: int | None = None
    wire_dtype: DTypeLike | None = None


# Kernels for decoding need no fast gradient: both backward passes are those of the portable implementation, which
# reads the handles of all.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def low_latency_dispatch(
    route: LowLatencyRoute, x: Array | Quantized, topk_idx: Array, num_tokens: Array | None
) -> tuple[Array, Array | None, Array, LowLatencyHandle]:
    """Tokens, scales, group sizes and handle of a low-latency dispatch; differentiable where it quantises nothing."""
    run = backends.get(route.implementation).low_latency_dispatch
    return run(x, topk_idx, num_tokens, route.layout, route.axis, route.group_size)


def _low_latency_dispatch_forward(
    route: LowLatencyRoute, x: Array | Quantized, topk_idx: Array, num_tokens: Array | None
) -> Any:
    tokens, scales, group_sizes, handle = low_latency_dispatch(route, x, topk_idx, num_tokens)
    # Rows past the counts hold anything, and would meet zeros in the gradient of a product: NaN * 0 is NaN.
    counts = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] < group_sizes[:, None]
    tokens = jnp.where(counts[:, :, None], tokens, jnp.zeros((), tokens.dtype))
    return (tokens, scales, group_sizes, handle), (x, handle)


def _low_latency_dispatch_backward(
    route: LowLatencyRoute, residuals: tuple[Array | Quantized, LowLatencyHandle], cotangents: Any
) -> tuple[Array, None, None]:
    x, handle = residuals
    if route.group_size is not None or isinstance(x, tuple):
        raise TypeError(
            "low_latency_dispatch in FP8 has no gradient: pass quantize=False, or train with dispatch(wire_dtype=...)."
        )
    _, transpose = jax.vjp(lambda x: reference.low_latency_send(x, handle, route.axis), x)
    return *transpose(cotangents[0]), None, None


low_latency_dispatch.defvjp(_low_latency_dispatch_forward, _low_latency_dispatch_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def low_latency_combine(route: LowLatencyRoute, y: Array, topk_weights: Array, handle: LowLatencyHandle) -> Array:
    """Weighted sums of a low-latency combine; differentiable where nothing is rounded to FP8."""
    run = backends.get(route.implementation).low_latency_combine
    return run(y, topk_weights, handle, route.axis, route.wire_dtype)


def _low_latency_combine_forward(
    route: LowLatencyRoute, y: Array, topk_weights: Array, handle: LowLatencyHandle
) -> Any:
    return low_latency_combine(route, y, topk_weights, handle), (y, topk_weights, handle)


def _low_latency_combine_backward(route: LowLatencyRoute, residuals: Any, cotangent: Array) -> tuple[Any, Any, None]:
    y, topk_weights, handle = residuals
    if route.wire_dtype is not None:
        raise TypeError("low_latency_combine in FP8 has no gradient: leave wire_dtype=None, or train with combine.")
    _, transpose = jax.vjp(
        lambda y, weights: reference.low_latency_combine(y, weights, handle, route.axis, None), y, topk_weights
    )
    return *transpose(cotangent), None


low_latency_combine.defvjp(_low_latency_combine_forward, _low_latency_combine_backward)
