"""What comes between the two products of the layer: activated rows, scaled by their router weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from jax_ep.core import activations
from jax_ep.ops import registry
from jax_ep.types import Array, Options


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def activate(
    options: Options, activation: str, gated: bool, hidden: Array, weights: Array, group_sizes: Array
) -> Array:
    """`[R, 2 * I]` hidden rows (`[R, I]` where not gated) and `[R]` weights to `[R, I]`.

    In float32 with one final rounding. Hidden rows and weights are kept for the backward pass. Rows past the groups may
    hold anything, as products do not read them.
    """
    run = registry.get("activation", registry.choose(options, "activation", hidden.dtype)).activate
    return run(hidden, weights, group_sizes, activation=activation, gated=gated)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def activate_gradient(
    options: Options, activation: str, gated: bool, hidden: Array, weights: Array, d_rows: Array, group_sizes: Array
) -> tuple[Array, Array]:
    """Cotangents of `hidden` and `weights`."""
    run = registry.get("activation", registry.choose(options, "activation", hidden.dtype)).activate_gradient
    return run(hidden, weights, d_rows, group_sizes, activation=activation, gated=gated)


def _activate_forward(options: Options, activation: str, gated: bool, *operands: Array) -> Any:
    return activate(options, activation, gated, *operands), operands


def _activate_backward(
    options: Options, activation: str, gated: bool, residuals: Any, d_rows: Array
) -> tuple[Array, Array, None]:
    hidden, weights, group_sizes = residuals
    return *activate_gradient(options, activation, gated, hidden, weights, d_rows, group_sizes), None


def _activate_gradient_forward(options: Options, activation: str, gated: bool, *operands: Array) -> Any:
    return activate_gradient(options, activation, gated, *operands), operands[:3]


def _activate_gradient_backward(
    options: Options, activation: str, gated: bool, residuals: Any, cotangents: Any
) -> tuple[Any, ...]:
    # Second derivatives are rare: the portable formula, which JAX differentiates again.
    def gradient(hidden: Array, weights: Array, d_rows: Array) -> tuple[Array, Array]:
        return activations.weighted_gradient(hidden, weights, d_rows, activation, gated)

    _, pull = jax.vjp(gradient, *residuals)
    return *pull(cotangents), None


activate.defvjp(_activate_forward, _activate_backward)
activate_gradient.defvjp(_activate_gradient_forward, _activate_gradient_backward)
