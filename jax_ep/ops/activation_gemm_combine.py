"""The expert layer with weights in the dtype of the tokens, which keeps hidden rows alone for its backward pass.

Its second half is the activation, the second GEMM and combine. The backward pass computes activated rows again, in the
pass of the activation's gradient, and repeats no GEMM. The gradient of a router weight is that of its activated row
times the row, so the result of the second GEMM is not needed.

Source: what is kept, and that gradient, are those of SonicMoE (arXiv:2512.14080).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal

from jax_ep.core.activations import HiddenRows
from jax_ep.core.autodiff import HIDDEN_NAME, saves_operands
from jax_ep.core.expert_matrices import ExpertWeights, GemmWeights, num_home
from jax_ep.core.layout import Bias
from jax_ep.ops import activation, exchange, exchange_gemm
from jax_ep.ops.activation import activate, is_one_pass
from jax_ep.ops.grouped_gemm import bias_gradient, multiply, weight_gradient
from jax_ep.ops.plan import ActivationPlan, ExchangeGemmPlan, LayerPlan
from jax_ep.types import Array, Experts, Handle


class FfnHidden(NamedTuple):
    """The FFN hidden state: the inputs of the activation, and the bias of the second GEMM."""

    hidden: Array  # `[R, N]` results of the first GEMM
    row_weights: Array  # `[R]` router weights
    b_gate_up: Array | None  # `[L, N]` biases of the hidden rows, or None
    b_down: Bias | None  # bias of the second GEMM, or None

    def rows(self, group_sizes: Array) -> HiddenRows:
        """Return the inputs of the activation."""
        return HiddenRows(self.hidden, self.row_weights, self.b_gate_up, group_sizes)


def bias_of_result(experts: Experts, b_down: Array | None, row_weights: Array) -> Bias | None:
    """Return the bias of the second GEMM, scaled by the router weights if these scale the rows."""
    return None if b_down is None else Bias(b_down, row_weights if experts.weight_on == "output" else None)


def ffn_hidden(experts: Experts, hidden: Array, row_weights: Array, parts: ExpertWeights) -> FfnHidden:
    """Return what the second half of the layer takes, under the name by which `jax.checkpoint` can save it."""
    # Both under one name: with a policy that saves only some results of a launch, it runs again.
    hidden, row_weights = checkpoint_name((hidden, row_weights), HIDDEN_NAME)
    return FfnHidden(hidden, row_weights, parts.b_gate_up, bias_of_result(experts, parts.b_down, row_weights))


def in_several_passes(
    plan: ExchangeGemmPlan, between_plan: ActivationPlan, between: FfnHidden, w: GemmWeights, handle: Handle
) -> Array:
    """Activate, multiply and combine with JAX's derivatives of the activation, recomputed in the backward pass."""

    @jax.checkpoint
    def run(between: FfnHidden, w: GemmWeights, handle: Handle) -> Array:
        rows = activate(between_plan, w.shape[1], between.rows(handle.group_sizes))
        return exchange_gemm.multiply_and_combine(plan, rows, w, handle, between.b_down)

    return run(between, w, handle)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def activate_multiply_and_combine(
    plan: ExchangeGemmPlan, between_plan: ActivationPlan, between: FfnHidden, w: GemmWeights, handle: Handle
) -> Array:
    """Hidden rows, activated and weighted in one pass, times `w [L, I, H]`, to unweighted sums `[T, H]`."""
    rows = between_plan.run.activate(between_plan.experts, between.rows(handle.group_sizes))
    return exchange_gemm.multiply_with_combine(plan, False, rows, None, w, handle, between.b_down)[0]


def _backward(
    plan: ExchangeGemmPlan,
    between_plan: ActivationPlan,
    residuals: tuple[FfnHidden, GemmWeights, Handle],
    d_sums: Array,
) -> tuple[FfnHidden, GemmWeights, None]:
    between, w, handle = residuals
    sizes, plan = handle.group_sizes, plan.transposed
    d_sums = d_sums.astype(w.dtype)
    if plan.fused is not None:
        # The cotangents are needed at once, as rows, and not kept.
        d_rows, d_results, _ = exchange_gemm.dispatch_with_multiply(plan, True, "rows", d_sums, None, w, handle)
    else:
        d_results, _ = exchange.dispatch_tokens(plan.exchange, d_sums, None, handle)
        d_rows = multiply(plan.gemm, True, w.dtype, d_results, w, sizes)
    # Else XLA would find what portable formulas compute in both directions, and keep it.
    hidden, d_rows = jax.lax.optimization_barrier((between.hidden, d_rows))
    rows = between._replace(hidden=hidden).rows(sizes)
    d, activated = activation.gradient(between_plan, rows, d_rows, keep=True)
    if plan.fused is not None:
        d_w = exchange_gemm.weight_gradient(plan, True, "rows", d_sums, d_results, activated, handle, num_home(w))
    else:
        d_w = weight_gradient(plan.gemm, w.dtype, cast(Array, activated), d_results, sizes, num_home(w))
    d_down = between.b_down
    if d_down is not None:
        d_down = bias_gradient(plan.sums, cast(Array, d_results), d_down, sizes)
    return FfnHidden(d.hidden, d.weights, d.bias, d_down), d_w, None


activate_multiply_and_combine.defvjp(saves_operands(activate_multiply_and_combine), _backward)


def with_hidden_rows(plan: LayerPlan, x: Array, weights: Array, handle: Handle, parts: ExpertWeights) -> Array:
    """Run `moe` with weights in the dtype of the tokens; the backward pass keeps the result of the first GEMM."""
    hidden, row_weights = exchange_gemm.dispatch_and_multiply(plan.first, x, weights, parts.w_gate_up, handle)
    experts = plan.activation.experts
    between = ffn_hidden(experts, hidden, cast(Array, row_weights), parts)
    is_one = is_one_pass(experts, parts.b_gate_up)
    run = activate_multiply_and_combine if is_one else in_several_passes
    return run(plan.second, plan.activation, between, parts.w_down, handle)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_activated_rows(plan: LayerPlan, x: Array, weights: Array, handle: Handle, parts: ExpertWeights) -> Array:
    """`with_hidden_rows`, where the first GEMM stores activated rows, which are not enough for a gradient."""
    experts = plan.activation.experts
    rows, row_weights = exchange_gemm.dispatch_and_activate(plan.first, experts, x, weights, parts.w_gate_up, handle)
    bias = bias_of_result(experts, parts.b_down, row_weights)
    return exchange_gemm.multiply_and_combine(plan.second, rows, parts.w_down, handle, bias)


type _Pull = Callable[[Array], tuple[Any, ...]]


def _activated_forward(plan: LayerPlan, *arguments: object) -> tuple[Array, _Pull]:
    """Save what `with_hidden_rows` saves for those arguments alone that have a gradient."""
    trained = jax.tree.map(lambda a: a.value if a.perturbed else None, arguments, is_leaf=_is_argument)

    def of(trained: object) -> Array:
        whole = jax.tree.map(lambda a, t: a.value if t is None else t, arguments, trained, is_leaf=_is_argument)
        return with_hidden_rows(plan, *whole)

    return jax.vjp(of, trained)


def _is_argument(node: object) -> bool:
    return isinstance(node, CustomVJPPrimal)


with_activated_rows.defvjp(_activated_forward, lambda plan, pull, cotangent: pull(cotangent)[0], symbolic_zeros=True)
