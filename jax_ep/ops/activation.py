"""The activation between the two GEMMs of the layer: activated rows, scaled by their router weights."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.core import check
from jax_ep.core.activations import HiddenRows
from jax_ep.core.autodiff import saves_operands
from jax_ep.core.dtypes import accumulation_dtype
from jax_ep.core.layout import row_groups
from jax_ep.core.mesh_axes import platform
from jax_ep.ops.grouped_gemm import sum_groups
from jax_ep.ops.plan import ActivationPlan
from jax_ep.types import Array, Experts
from jax_ep.xla import activation as portable


def activate(plan: ActivationPlan, intermediate: int, rows: HiddenRows) -> Array:
    """Activate and weight rows to `[R, I]`, in float32 with one final rounding.

    Hidden rows and weights are kept for the backward pass. Rows past the groups may hold anything, as GEMMs do not
    read them.
    """
    experts = plan.experts
    if is_one_pass(experts, rows.bias):
        return _activate(plan, rows)
    # One pass for the weights or the caller's function, with JAX's own derivatives, and one for what is left.
    hidden, weights, bias, group_sizes = rows
    in_use = (row_groups(group_sizes, hidden.shape[0]) >= 0)[:, None]
    wide = accumulation_dtype(hidden.dtype)
    # Rows past the groups may hold NaN: keep it out of values and derivatives.
    factors = jnp.where(in_use, weights[:, None], 0).astype(wide)
    if experts.weight_on == "input":
        hidden = (jnp.where(in_use, hidden, 0).astype(wide) * factors).astype(hidden.dtype)
        factors = jnp.ones_like(factors)
        if platform() == "cpu":  # Else XLA merges these products with what follows, in some programs only.
            hidden, factors = lax.optimization_barrier((hidden, factors))
    if not callable(experts.activation):
        after = dataclasses.replace(plan, experts=dataclasses.replace(experts, weight_on="output"))
        return _activate(after, HiddenRows(hidden, factors[:, 0], bias, group_sizes))
    if bias is not None:
        # An activation that is none adds the bias alone, with the sums of its gradient by group.
        alone = dataclasses.replace(plan, experts=Experts(_same))
        hidden = _activate(alone, HiddenRows(hidden, jnp.ones_like(weights), bias, group_sizes))
    # Fill rows past the groups with a row in use: the derivative of the function may not exist at zero.
    usual = lax.stop_gradient(jnp.where(in_use[:1], hidden[:1], 1))
    activated = experts.activation(jnp.where(in_use, hidden, usual))
    activated = check.activation_rows(plan.options.function, activated, hidden, intermediate)
    return (jnp.where(in_use, activated, 0).astype(wide) * factors).astype(hidden.dtype)


def is_one_pass(experts: Experts, bias: Array | None) -> bool:
    """Whether one pass activates rows, and may round them to FP8; see `activate` for what needs another."""
    return not callable(experts.activation) and (experts.weight_on == "output" or bias is None)


def _same(hidden: Array) -> Array:
    return hidden


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _activate(plan: ActivationPlan, rows: HiddenRows) -> Array:
    return plan.run.activate(plan.experts, rows)


def gradient(plan: ActivationPlan, rows: HiddenRows, d_rows: Array, *, keep: bool) -> tuple[HiddenRows, Array | None]:
    """Return all cotangents and, with `keep`, the rows of `activate`, recomputed; requires `is_one_pass`."""
    d_hidden, d_weights, activated = _gradient(plan, keep, rows, d_rows)
    d_bias = rows.bias
    if d_bias is not None:
        d_bias = sum_groups(plan.sums, d_hidden, None, rows.group_sizes).astype(d_bias.dtype)
    return HiddenRows(d_hidden, d_weights, d_bias, cast(Array, None)), activated


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gradient(plan: ActivationPlan, keep: bool, rows: HiddenRows, d_rows: Array) -> _Gradient:
    return plan.run.activate_gradient(plan.experts, rows, d_rows, keep=keep)


type _Gradient = tuple[Array, Array, Array | None]


def _activate_backward(plan: ActivationPlan, residuals: tuple[HiddenRows], d_rows: Array) -> tuple[HiddenRows]:
    return (gradient(plan, *residuals, d_rows, keep=False)[0],)


def _gradient_backward(
    plan: ActivationPlan, keep: bool, residuals: tuple[HiddenRows, Array], cotangents: _Gradient
) -> tuple[HiddenRows, Array]:
    # Second derivatives are rare: the portable formula, which JAX differentiates again.
    (*factors, group_sizes), d_rows = residuals

    def run(hidden: Array, weights: Array, bias: Array | None, d_rows: Array) -> _Gradient:
        rows = HiddenRows(hidden, weights, bias, group_sizes)
        return portable.activate_gradient(plan.experts, rows, d_rows, keep=keep)

    _, pull = jax.vjp(run, *factors, d_rows)
    d_hidden, d_weights, d_bias, d_d_rows = pull(cotangents)
    return HiddenRows(d_hidden, d_weights, d_bias, cast(Array, None)), d_d_rows


_activate.defvjp(saves_operands(_activate), _activate_backward)
_gradient.defvjp(saves_operands(_gradient), _gradient_backward)
