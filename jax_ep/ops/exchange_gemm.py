"""Dispatch + grouped GEMM and grouped GEMM + combine, each in one launch where the implementation has it.

They are each other's transpose with the transposed weights, so the backward pass of each is the other kernel. The
gradient of the weights multiplies rows with dispatched tokens, which are sent again, or were saved where the schedule
says so. All are closed under differentiation, so gradients of any order exist.

Source: tokens that are not kept as they were dispatched are those of SonicMoE (arXiv:2512.14080).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero, custom_vjp_primal_tree_values
from jax.typing import DTypeLike

from jax_ep import context
from jax_ep.core import check
from jax_ep.core.autodiff import TOKENS_NAME
from jax_ep.core.check import operation
from jax_ep.core.expert_matrices import GemmWeights, num_home
from jax_ep.core.layout import Bias
from jax_ep.core.mesh_axes import takes_global_arrays, vary_alike
from jax_ep.ops import exchange, registry
from jax_ep.ops import plan as plans
from jax_ep.ops.grouped_gemm import bias_gradient, multiply
from jax_ep.ops.plan import ExchangeGemmPlan
from jax_ep.ops.plan_lora import LoraLayerPlan
from jax_ep.types import Array, AxisName, DispatchedGemm, Experts, Handle, Schedule


@operation
@takes_global_arrays()
def dispatch_grouped_gemm(
    x: Array,
    topk_idx: Array | None,
    topk_weights: Array | None,
    w: Array,
    *,
    num_experts: int,
    axis_name: AxisName = "expert",
    capacity: int | None = None,
    alignment: int = 1,
    handle: Handle | None = None,
    schedule: Schedule | None = None,
    implementation: str | Sequence[str] | None = None,
) -> DispatchedGemm:
    """Dispatch tokens, then multiply the rows of each expert by its weights.

    Args:
      x: `[T, H]` tokens; see `dispatch` for this and all arguments not named here.
      topk_idx: `[T, K]` int32 expert ids.
      topk_weights: `[T, K]` float32 router weights, or None.
      w: `[L, H, N]` weights of this rank's experts, in the dtype of x.
      num_experts: E.
      axis_name: expert axis.
      capacity: R.
      alignment: see `dispatch`.
      handle: see `dispatch`.
      schedule: how kernels share the GPU, see `Schedule`: here its `dispatch_mode` and `num_communicating_programs`,
        and, for the backward pass, `keep_tokens` and `combine_mode`.
      implementation: see `dispatch`.

    Returns:
      `DispatchedGemm(hidden [R, N], weights [R] or None, group_sizes [L] int32, handle, dropped [] int32)`.

    Raises:
      ValueError, TypeError: as `dispatch` and `grouped_gemm` do.
      NotImplementedError: no requested implementation supports the call, in the modes of the schedule.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> x, w = jnp.ones((2, 4)), jnp.ones((2, 4, 3))
      >>> out = jax_ep.dispatch_grouped_gemm(x, jnp.array([[0], [1]]), None, w, num_experts=2, axis_name=())
      >>> out.hidden.shape
      (2, 3)
    """
    options = registry.options("dispatch_grouped_gemm", axis_name, implementation, schedule)
    x = check.plain_tokens(options.function, x)
    num_experts, num_ranks = check.experts(options.function, num_experts, axis_name)
    w = check.expert_weights(options.function, "w", w, (num_experts // num_ranks, x.shape[1]), x.dtype)
    given = exchange.checked(
        options,
        x,
        topk_idx,
        topk_weights,
        num_experts=num_experts,
        capacity=capacity,
        alignment=alignment,
        handle=handle,
    )
    plan = plans.exchange_gemm(given.options, given.facts.with_columns(w.shape[2]), out_columns=w.shape[2])
    (tokens, weights, handle), w = exchange.located(plan.exchange, given, w)
    hidden, row_weights = dispatch_and_multiply(plan, tokens, weights, w, handle)
    return DispatchedGemm(hidden, row_weights, handle.group_sizes, handle, handle.num_dropped)


@operation
@takes_global_arrays()
def grouped_gemm_combine(
    h: Array,
    w: Array,
    handle: Handle,
    *,
    axis_name: AxisName = "expert",
    preferred_element_type: DTypeLike | None = None,
    schedule: Schedule | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Array:
    """Multiply the rows of each expert by its weights, then `combine`.

    The schedule's `combine_mode` decides on which rank rows are summed. "serial" rounds as `combine`
    does after `grouped_gemm`: the rows to the dtype of h, then the sum on each expert rank, then the sum over ranks.
    "scatter" rounds the rows, and then the sum of all K of them. Both give the same bits on every run.

    Args:
      h: `[R, I]` rows in the order of the dispatch.
      w: `[L, I, H]` weights of this rank's experts, in the dtype of h.
      handle: `Dispatched.handle`.
      axis_name: the axis of the dispatch.
      preferred_element_type: dtype of the result, see `combine`; rows are rounded to that of h. None: that of h.
      schedule: how kernels share the GPU, see `Schedule`: here its `combine_mode`, and, for the backward pass,
        `dispatch_mode`.
      implementation: see `dispatch`.

    Returns:
      `[T, H]` unweighted sums.

    Raises:
      ValueError, TypeError: as `combine` and `grouped_gemm` do.
      NotImplementedError: no requested implementation supports the call, in the mode of the schedule.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> x, w = jnp.ones((2, 4)), jnp.ones((2, 4, 3))
      >>> out = jax_ep.dispatch_grouped_gemm(x, jnp.array([[0], [1]]), None, w, num_experts=2, axis_name=())
      >>> jax_ep.grouped_gemm_combine(out.hidden, jnp.ones((2, 3, 4)), out.handle, axis_name=()).tolist()[0]
      [12.0, 12.0, 12.0, 12.0]
    """
    function = "grouped_gemm_combine"
    options = registry.options(function, axis_name, implementation, schedule)
    layout = check.handle(function, handle, Handle, axis_name)
    remedy = "pass one row per row of the dispatch that made the handle"
    h = check.floating(function, "h", h, "[R, I]", remedy=remedy, R=layout.capacity)
    w = check.expert_weights(function, "w", w, (layout.num_local_experts, h.shape[1]), h.dtype)
    check.array(function, "w", w, "[L, I, H >= 1]", remedy="pass weights of at least one column")
    sum_dtype = check.result_dtype(function, preferred_element_type, h.dtype)
    options = dataclasses.replace(options, wire_dtype=check.wire(function, options.wire_dtype, h.dtype, w.shape[2]))
    context.compare(function, layout, options.wire_dtype, (h, w))
    h, w, handle = vary_alike((h, w, handle), over=options.axis)
    facts = plans.exchange_facts(h.dtype, w.shape[2], handle).with_columns(w.shape[1])
    plan = plans.exchange_gemm(options, facts, out_columns=w.shape[2], sum_dtype=sum_dtype)
    return multiply_and_combine(plan, h, w, handle, None)


def dispatch_and_multiply(
    plan: ExchangeGemmPlan, x: Array, weights: Array | None, w: GemmWeights, handle: Handle
) -> tuple[Array, Array | None]:
    """`[T, H]` tokens to rows, times `w [L, H, N]`; and `[T, K]` weights to `[R]`."""
    if plan.fused is None:
        return dispatch_then(plan, partial(multiply, plan.gemm, False, x.dtype), x, weights, w, handle)
    hidden, _, row_weights = dispatch_with_multiply(plan, False, None, x, weights, w, handle)
    return hidden, row_weights


def dispatch_and_activate(
    plan: ExchangeGemmPlan, experts: Experts, x: Array, weights: Array, w: GemmWeights, handle: Handle
) -> tuple[Array, Array]:
    """`[T, H]` tokens to rows, times `w [L, H, 2I]`, to activated and weighted rows `[R, I]`; and weights to `[R]`."""
    from jax_ep.megakernels import exchange_gemm as fused
    from jax_ep.megakernels.grouped_gemm import gemm_activation

    if plan.fused is not None and plan.mode(None) == "fused":
        rows, _, row_weights = fused.dispatch_grouped_gemm(
            plan.options,
            x,
            weights,
            w,
            handle,
            transpose=False,
            save_as=None,
            mode="fused",
            products=plan.gemm.run,
            experts=experts,
        )
        return rows, cast(Array, row_weights)
    rows, found = dispatch_apart(plan, x, weights, handle)
    row_weights = cast(Array, found)
    return gemm_activation(rows, w, handle.group_sizes, row_weights, experts=experts), row_weights


def multiply_and_combine(plan: ExchangeGemmPlan, h: Array, w: GemmWeights, handle: Handle, bias: Bias | None) -> Array:
    """`[R, F]` rows times `w [L, F, H]` to sums `[T, H]`, with the bias of the GEMM if there is one."""
    if plan.fused is None:
        y = multiply(plan.gemm, False, h.dtype, h, w, handle.group_sizes, bias, plan.sums)
        return exchange.combine_tokens(plan.exchange, y, None, handle)[0]
    return multiply_with_combine(plan, False, h, None, w, handle, bias)[0]


def dispatch_apart(
    plan: ExchangeGemmPlan, x: Array, weights: Array | None, handle: Handle
) -> tuple[Array, Array | None]:
    """Dispatch for a separate GEMM: `[T, H]` tokens and `[T, K]` weights to `[R, H]` and `[R]`."""
    if plan.fused is None:
        return exchange.dispatch_tokens(plan.exchange, x, weights, handle)
    from jax_ep.megakernels import exchange_gemm as fused

    return fused.dispatch_apart(plan.options, x, weights, handle)


class Dispatched(NamedTuple):
    """`hidden [R, N]`, the saved tokens or None, `row_weights [R]` or None."""

    hidden: Array
    saved: Array | None
    row_weights: Array | None


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def dispatch_with_multiply(
    plan: ExchangeGemmPlan,
    transpose: bool,
    save_as: str | None,
    x: Array,
    weights: Array | None,
    w: GemmWeights,
    handle: Handle,
) -> Dispatched:
    """`[T, H]` tokens to rows, times `w [L, H, N]` (`[L, N, H]` if `transpose`); and `[T, K]` weights to `[R]`.

    `save_as` is the form of the dispatched tokens that it returns, see `ExchangeGemmPlan`; None: none. Transpose of
    `multiply_with_combine`.
    """
    from jax_ep.megakernels import exchange_gemm as fused

    found = fused.dispatch_grouped_gemm(
        plan.options,
        x,
        weights,
        w,
        handle,
        transpose=transpose,
        save_as=save_as,
        mode=plan.mode(save_as),
        products=plan.gemm.run,
    )
    return Dispatched(*found)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def multiply_with_combine(
    plan: ExchangeGemmPlan,
    transpose: bool,
    h: Array,
    row_weights: Array | None,
    w: GemmWeights,
    handle: Handle,
    bias: Bias | None = None,
) -> tuple[Array, Array | None]:
    """`[R, F]` rows times `w [L, F, H]`, plus the bias of their experts, to sums `[T, H]`; and `[R]` to `[T, K]`.

    Without a bias the transpose of `dispatch_with_multiply`.
    """
    if plan.fused is None or plan.combine_mode == "serial":
        y = plan.gemm.run.grouped_gemm(h, w, handle.group_sizes, transpose=transpose, out_dtype=h.dtype, bias=bias)
        return exchange.combine_tokens(plan.exchange, y, row_weights, handle)
    from jax_ep.megakernels import exchange_gemm as fused

    return fused.grouped_gemm_combine(plan.options, h, row_weights, w, handle, transpose=transpose, bias=bias)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 7))
def weight_gradient(
    plan: ExchangeGemmPlan,
    transpose: bool,
    saved_as: str,
    x: Array,
    saved: Array,
    rows: Array,
    handle: Handle,
    num_home: int = 0,
) -> GemmWeights:
    """Per local expert, dispatched tokens times rows: `[L, H, N]`, or `[L, N, H]` with `transpose`.

    With `num_home` > 0 they are in two arrays, the first of as many experts.
    `saved` holds what became of the tokens `x` on the way; gradients go to `x` alone.
    """
    from jax_ep.megakernels import exchange_gemm as fused

    tokens = fused.expert_rows(saved, handle, saved_as)
    lhs, rhs = (rows, tokens) if transpose else (tokens, rows)
    run = plan.gemm.run.weight_gradient
    return run(lhs, rhs, handle.group_sizes, out_dtype=saved.dtype, num_home=num_home)


type _Sums = tuple[Array, Array | None]
"""Sums `[T, H]`, and slots of weights `[T, K]` or None."""
type _Saved = tuple[Array | None, Array | None, GemmWeights, Handle]
"""Tokens `x` and what they were saved as, each None where no gradient of the weights is wanted; weights, handle."""
type _DispatchPlan = ExchangeGemmPlan | LoraLayerPlan
type _Gemm = Callable[[Array, Any, Array], Array]
"""Rows, weights and group sizes to rows, with a derivative."""


def _dispatch_forward(
    plan: ExchangeGemmPlan, transpose: bool, save_as: str | None, *arguments: CustomVJPPrimal
) -> tuple[Dispatched, _Saved]:
    """Run the forward pass, and save the tokens only if the weights need a gradient."""
    trains = jax.tree.leaves(arguments[2])[0].perturbed
    x, weights, w, handle = custom_vjp_primal_tree_values(arguments)
    form = save_as or (plan.saved_as if trains else None)
    found = dispatch_with_multiply(plan, transpose, form, x, weights, w, handle)
    saved = None if found.saved is None else checkpoint_name(found.saved, TOKENS_NAME)
    kept = (x, saved) if trains else (None, None)
    return found._replace(saved=saved if save_as else None), (*kept, w, handle)


def _dispatch_backward(
    plan: ExchangeGemmPlan, transpose: bool, save_as: str | None, residuals: _Saved, cotangents: Dispatched
) -> tuple[Array, Array | None, GemmWeights | None, None]:
    x, saved, w, handle = residuals
    d_hidden, d_row_weights = cotangents.hidden, cotangents.row_weights
    if isinstance(d_hidden, SymbolicZero):
        d_hidden = vary_alike((jnp.zeros(d_hidden.shape, d_hidden.dtype), w))[0]
    if isinstance(d_row_weights, SymbolicZero):
        d_row_weights = None
    back = (plan, not transpose)
    if save_as == "rows" and not isinstance(cotangents.saved, SymbolicZero):
        # Of rows that something else than `weight_gradient` has read, as the gradient of a bias does.
        d_rows = multiply(plan.gemm, not transpose, w.dtype, d_hidden, w, handle.group_sizes)
        d_rows = d_rows + cast(Array, cotangents.saved)
        d_x, d_weights = exchange.combine_tokens(plan.exchange, d_rows, d_row_weights, handle)
        if x is None:
            return d_x, d_weights, None, None
        d_w = weight_gradient(plan, transpose, "rows", x, saved, d_hidden, handle, num_home(w))
        return d_x, d_weights, d_w, None
    if x is None:
        return *multiply_with_combine(*back, d_hidden, d_row_weights, w, handle), None, None
    form, behind = save_as or plan.saved_as, handle
    if form is None:
        form, saved = _sent_again(plan, x, handle, d_hidden)
        behind = exchange.later(handle, saved)
    d_x, d_weights = multiply_with_combine(*back, d_hidden, d_row_weights, w, behind)
    d_w = weight_gradient(plan, transpose, form, x, saved, d_hidden, handle, num_home(w))
    return d_x, d_weights, d_w, None


def _sent_again(plan: ExchangeGemmPlan, x: Array, handle: Handle, after: Array) -> tuple[str, Array]:
    """Dispatched tokens and their form, once `after` is known, for `weight_gradient`, whose own gradients go to `x`."""
    x, after = lax.optimization_barrier((lax.stop_gradient(x), after))
    if handle.layout.num_ranks == 1:
        return "tokens", x  # read where they lie
    return "rows", dispatch_apart(plan, x, None, exchange.later(handle, after))[0]


type _CombineSaved = tuple[Array, GemmWeights, Handle, Bias | None]


def _combine_forward(
    plan: ExchangeGemmPlan, transpose: bool, h: Array, row_weights: Array | None, *others: Any
) -> tuple[_Sums, _CombineSaved]:
    return multiply_with_combine(plan, transpose, h, row_weights, *others), (h, *others)


def _combine_backward(
    plan: ExchangeGemmPlan, transpose: bool, residuals: _CombineSaved, cotangents: _Sums
) -> tuple[Array, Array | None, GemmWeights, None, Bias | None]:
    h, w, handle, bias = residuals
    d_sums, d_slots = cotangents[0].astype(h.dtype), cotangents[1]
    plan = plan.transposed
    # The tokens are needed at once, as rows, and not kept.
    back = dispatch_with_multiply(plan, not transpose, "rows", d_sums, d_slots, w, handle)
    d_w = weight_gradient(plan, not transpose, "rows", d_sums, back.saved, h, handle, num_home(w))
    rows, sizes = cast(Array, back.saved), handle.group_sizes
    d_bias = None if bias is None else bias_gradient(plan.sums, rows, bias, sizes)
    return back.hidden, back.row_weights, d_w, None, d_bias


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def dispatch_then(
    plan: _DispatchPlan, gemm: _Gemm, x: Array, weights: Array | None, w: Any, handle: Handle
) -> tuple[Array, Array | None]:
    """`[T, H]` tokens to rows, and `gemm(rows, w, group_sizes)` of them; and `[T, K]` weights to `[R]`."""
    return _then_forward(plan, gemm, x, weights, w, handle)[0]


def _then_forward(
    plan: _DispatchPlan, gemm: _Gemm, x: Array | None, weights: Array | None, w: Any, handle: Handle
) -> tuple[_Sums, _Saved]:
    rows, row_weights = exchange.dispatch_tokens(plan.exchange, x, weights, handle)
    kept = None
    if plan.options.schedule.keep_tokens:
        rows = kept = checkpoint_name(rows, TOKENS_NAME)
        x = None
    return (gemm(rows, w, handle.group_sizes), row_weights), (x, kept, w, handle)


def _then_backward(
    plan: _DispatchPlan, gemm: _Gemm, residuals: _Saved, cotangents: _Sums
) -> tuple[Array, Array | None, Any, None]:
    x, rows, w, handle = residuals
    d_hidden, d_row_weights = cotangents
    behind = handle
    if rows is None:
        rows = exchange.dispatch_again(plan.exchange, cast(Array, x), handle, d_hidden)
        behind = exchange.later(handle, rows)
    _, pull = jax.vjp(lambda rows, w: gemm(rows, w, behind.group_sizes), rows, w)  # XLA removes the unused GEMM
    d_rows, d_w = pull(d_hidden)
    d_x, d_weights = exchange.combine_tokens(plan.exchange, d_rows, d_row_weights, handle)
    return d_x, d_weights, d_w, None


def _weight_gradient_forward(
    plan: ExchangeGemmPlan, transpose: bool, saved_as: str, *operands: *tuple[Array, Array, Array, Handle, int]
) -> tuple[GemmWeights, tuple[Array, Array, Handle]]:
    x, _, rows, handle, _ = operands
    return weight_gradient(plan, transpose, saved_as, *operands), (x, rows, handle)


def _weight_gradient_backward(
    plan: ExchangeGemmPlan,
    transpose: bool,
    saved_as: str,
    num_home: int,
    residuals: tuple[Array, Array, Handle],
    cotangent: GemmWeights,
) -> tuple[Array, None, Array, None]:
    x, rows, handle = residuals
    d_x, _ = multiply_with_combine(plan, not transpose, rows, None, cotangent, handle)
    d_rows = dispatch_with_multiply(plan, transpose, None, x, None, cotangent, handle).hidden
    return d_x, None, d_rows, None  # of what was saved, which is x


dispatch_then.defvjp(_then_forward, _then_backward)
dispatch_with_multiply.defvjp(_dispatch_forward, _dispatch_backward, symbolic_zeros=True)
multiply_with_combine.defvjp(_combine_forward, _combine_backward)
weight_gradient.defvjp(_weight_gradient_forward, _weight_gradient_backward)
