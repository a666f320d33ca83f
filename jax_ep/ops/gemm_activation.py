"""The expert layer with weights in the dtype of the tokens, also where its first GEMM stores activated rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
from jax.custom_derivatives import CustomVJPPrimal

from jax_ep.core.expert_matrices import ExpertWeights
from jax_ep.ops import activation_gemm_combine, exchange_gemm
from jax_ep.ops import plan as plans
from jax_ep.ops.activation import is_one_pass
from jax_ep.ops.activation_gemm_combine import bias_of_result, ffn_hidden
from jax_ep.types import Array, Handle

type _Pull = Callable[[Array], tuple[Any, ...]]


def with_hidden_rows(plan: plans.LayerPlan, x: Array, weights: Array, handle: Handle, parts: ExpertWeights) -> Array:
    """Run `moe` with weights in the dtype of the tokens; the backward pass keeps the result of the first GEMM."""
    hidden, row_weights = exchange_gemm.dispatch_and_multiply(plan.first, x, weights, parts.w_gate_up, handle)
    experts = plan.activation.experts
    between = ffn_hidden(experts, hidden, cast(Array, row_weights), parts)
    is_one = is_one_pass(experts, parts.b_gate_up)
    run = activation_gemm_combine.activate_multiply_and_combine if is_one else activation_gemm_combine.in_several_passes
    return run(plan.second, plan.activation, between, parts.w_down, handle)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_activated_rows(plan: plans.LayerPlan, x: Array, weights: Array, handle: Handle, parts: ExpertWeights) -> Array:
    """`with_hidden_rows`, where the first GEMM stores activated rows, which are not enough for a gradient."""
    experts = plan.activation.experts
    rows, row_weights = exchange_gemm.dispatch_and_activate(plan.first, experts, x, weights, parts.w_gate_up, handle)
    bias = bias_of_result(experts, parts.b_down, row_weights)
    return exchange_gemm.multiply_and_combine(plan.second, rows, parts.w_down, handle, bias)


def _activated_forward(plan: plans.LayerPlan, *arguments: object) -> tuple[Array, _Pull]:
    """Save what `with_hidden_rows` saves for those arguments alone that have a gradient."""
    trained = jax.tree.map(lambda a: a.value if a.perturbed else None, arguments, is_leaf=_is_argument)

    def of(trained: object) -> Array:
        whole = jax.tree.map(lambda a, t: a.value if t is None else t, arguments, trained, is_leaf=_is_argument)
        return with_hidden_rows(plan, *whole)

    return jax.vjp(of, trained)


def _is_argument(node: object) -> bool:
    return isinstance(node, CustomVJPPrimal)


with_activated_rows.defvjp(_activated_forward, lambda plan, pull, cotangent: pull(cotangent)[0], symbolic_zeros=True)
