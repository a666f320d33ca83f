"""The activation between the two GEMMs of the layer: activated rows, scaled by their router weights."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.core import check
from jax_ep.core.dtypes import accumulation_dtype
from jax_ep.core.layout import row_groups
from jax_ep.ops.grouped_gemm import sum_groups
from jax_ep.ops.plan import ActivationPlan
from jax_ep.types import Array, Experts
from jax_ep.xla import activation as portable


def activate(
    plan: ActivationPlan,
    experts: Experts,
    intermediate: int,
    hidden: Array,
    weights: Array,
    bias: Array | None,
    group_sizes: Array,
) -> Array:
    """Hidden rows `[R, N]`, `[R]` weights, and `[L, N]` biases of the hidden rows, if there are any, to `[R, I]`.

    In float32 with one final rounding. Hidden rows and weights are kept for the backward pass. Rows past the groups may
    hold anything, as GEMMs do not read them.
    """
    if is_one_pass(experts, bias):
        return _activate(plan, experts, hidden, weights, bias, group_sizes)
    # One pass for the weights or the caller's function, with JAX's own derivatives, and one for what is left.
    in_use = (row_groups(group_sizes, hidden.shape[0]) >= 0)[:, None]
    wide = accumulation_dtype(hidden.dtype)
    # Rows past the groups may hold NaN: keep it out of values and derivatives.
    factors = jnp.where(in_use, weights[:, None], 0).astype(wide)
    if experts.weight_on == "input":
        hidden = (jnp.where(in_use, hidden, 0).astype(wide) * factors).astype(hidden.dtype)
        factors = jnp.ones_like(factors)
    if not callable(experts.activation):
        after = dataclasses.replace(experts, weight_on="output")
        return _activate(plan, after, hidden, factors[:, 0], bias, group_sizes)
    if bias is not None:
        # An activation that is none adds the bias alone, with the sums of its gradient by group.
        identity = Experts(_same)
        hidden = _activate(plan, identity, hidden, jnp.ones_like(weights), bias, group_sizes)
    # Fill rows past the groups with a row in use: the derivative of the function may not exist at zero.
    usual = lax.stop_gradient(jnp.where(in_use[:1], hidden[:1], 1))
    rows = experts.activation(jnp.where(in_use, hidden, usual))
    rows = check.activation_rows(plan.options.function, rows, hidden, intermediate)
    return (jnp.where(in_use, rows, 0).astype(wide) * factors).astype(hidden.dtype)


def is_one_pass(experts: Experts, bias: Array | None) -> bool:
    """Whether one pass activates rows, and may round them to FP8; see `activate` for what needs another."""
    return not callable(experts.activation) and (experts.weight_on == "output" or bias is None)


def _same(hidden: Array) -> Array:
    return hidden


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _activate(
    plan: ActivationPlan, experts: Experts, hidden: Array, weights: Array, bias: Array | None, group_sizes: Array
) -> Array:
    return plan.run.activate(experts, hidden, weights, bias, group_sizes)


class Gradient(NamedTuple):
    """Cotangents of an activation's operands, and its rows `[R, I]` where they are made again."""

    hidden: Array
    weights: Array
    bias: Array | None
    rows: Array | None


def activate_again(
    plan: ActivationPlan,
    experts: Experts,
    hidden: Array,
    weights: Array,
    bias: Array | None,
    d_rows: Array,
    group_sizes: Array,
) -> Gradient:
    """Compute all cotangents, and recompute the rows of `activate` in the same pass; requires `is_one_pass`."""
    return _gradient(plan, experts, True, hidden, weights, bias, d_rows, group_sizes)


def _gradient(
    plan: ActivationPlan,
    experts: Experts,
    keep: bool,
    hidden: Array,
    weights: Array,
    bias: Array | None,
    d_rows: Array,
    group_sizes: Array,
) -> Gradient:
    d_hidden, d_weights, rows = activate_gradient(plan, experts, keep, hidden, weights, bias, d_rows, group_sizes)
    d_bias = None if bias is None else sum_groups(plan.sums, d_hidden, None, group_sizes).astype(bias.dtype)
    return Gradient(d_hidden, d_weights, d_bias, rows)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def activate_gradient(
    plan: ActivationPlan,
    experts: Experts,
    keep: bool,
    hidden: Array,
    weights: Array,
    bias: Array | None,
    d_rows: Array,
    group_sizes: Array,
) -> tuple[Array, Array, Array | None]:
    """Cotangents of `hidden` and `weights` and, with `keep`, the rows of `activate`, where `is_one_pass`."""
    return plan.run.activate_gradient(experts, hidden, weights, bias, d_rows, group_sizes, keep=keep)


type _Operands = tuple[Array, Array, Array | None, Array]
type _GradientOperands = tuple[Array, Array, Array | None, Array, Array]


def _activate_forward(
    plan: ActivationPlan, experts: Experts, hidden: Array, weights: Array, bias: Array | None, group_sizes: Array
) -> tuple[Array, _Operands]:
    operands = hidden, weights, bias, group_sizes
    return _activate(plan, experts, *operands), operands


def _activate_backward(
    plan: ActivationPlan, experts: Experts, residuals: _Operands, d_rows: Array
) -> tuple[Array, Array, Array | None, None]:
    hidden, weights, bias, group_sizes = residuals
    found = _gradient(plan, experts, False, hidden, weights, bias, d_rows, group_sizes)
    return found.hidden, found.weights, found.bias, None


def _activate_gradient_forward[*Operands](
    plan: ActivationPlan, experts: Experts, keep: bool, *operands: *Operands
) -> tuple[tuple[Array, Array, Array | None], tuple[*Operands]]:
    return activate_gradient(plan, experts, keep, *operands), operands


def _activate_gradient_backward(
    plan: ActivationPlan,
    experts: Experts,
    keep: bool,
    residuals: _GradientOperands,
    cotangents: tuple[Array, Array, Array | None],
) -> tuple[Array, Array, Array | None, Array, None]:
    # Second derivatives are rare: the portable formula, which JAX differentiates again.
    *operands, group_sizes = residuals

    def gradient(hidden: Array, weights: Array, bias: Array | None, d_rows: Array) -> tuple[Array, Array, Array | None]:
        return portable.activate_gradient(experts, hidden, weights, bias, d_rows, group_sizes, keep=keep)

    _, pull = jax.vjp(gradient, *operands)
    return *pull(cotangents), None


_activate.defvjp(_activate_forward, _activate_backward)
activate_gradient.defvjp(_activate_gradient_forward, _activate_gradient_backward)
