"""Dispatch + grouped GEMM and grouped GEMM + combine, each in one launch where the implementation has it.

They are each other's transpose with the transposed matrices, so the backward pass of each is the other kernel. The
gradient of the matrices multiplies rows with dispatched tokens, which are sent again, or were kept where the schedule
says so; an implementation may have one launch for it and for what travels in the backward pass. All are closed under
differentiation, so gradients of any order exist.

Source: tokens that are not kept as they were dispatched are those of SonicMoE (arXiv:2512.14080).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.typing import DTypeLike

from jax_ep.core import check
from jax_ep.core.bias import Bias
from jax_ep.core.mesh_axes import takes_global_arrays, vary_alike
from jax_ep.core.named_scopes import operation
from jax_ep.ops import exchange, grouped_gemm, registry
from jax_ep.ops.grouped_gemm import bias_gradient, multiply
from jax_ep.types import TOKENS_NAME, Array, AxisName, DispatchedGemm, Handle, Layout, Options, Schedule


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
    wire_dtype: DTypeLike | None = None,
    handle: Handle | None = None,
    schedule: Schedule | None = None,
    implementation: str | Sequence[str] | None = None,
) -> DispatchedGemm:
    """`dispatch`, then the rows of each expert times its matrix.

    Args:
      x: `[T, H]` tokens; see `dispatch` for this and all arguments not named here.
      topk_idx: `[T, K]` int32 expert ids.
      topk_weights: `[T, K]` float32 router weights, or None.
      w: `[L, H, N]` matrices of this rank's experts, in the dtype of x.
      num_experts: E.
      axis_name: expert axis.
      capacity: R.
      alignment: rows at whose multiples experts start.
      wire_dtype: FP8 on the wire.
      handle: layout to be used again.
      schedule: how launches share the GPU, see `Schedule`: here its `dispatch_mode` and `num_communicating_programs`,
        and, for the backward pass, `keep_tokens`, `fuse_weight_gradients` and `combine_mode`.
      implementation: see `dispatch`.

    Returns:
      `DispatchedGemm(hidden [R, N], weights [R] or None, group_sizes [L] int32, handle, dropped [] int32)`.

    Raises:
      ValueError: `fuse_weight_gradients=True` where there is no such launch; and as `dispatch` and `grouped_gemm` do.
      TypeError: as `dispatch` and `grouped_gemm` do.
      NotImplementedError: none of the implementations asked for can serve the call, in the modes of the schedule.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> x, w = jnp.ones((2, 4)), jnp.ones((2, 4, 3))
      >>> out = jax_ep.dispatch_grouped_gemm(x, jnp.array([[0], [1]]), None, w, num_experts=2, axis_name=())
      >>> out.hidden.shape
      (2, 3)
    """
    options = registry.options("dispatch_grouped_gemm", axis_name, implementation, wire_dtype, schedule)
    x = check.matrix(options.function, "x", x, "[T, H]")
    num_experts, num_ranks = check.experts(options.function, num_experts, axis_name)
    w = check.expert_weights(options.function, "w", w, (num_experts // num_ranks, x.shape[1]), x.dtype)
    prepared = exchange.prepare(
        options,
        x,
        topk_idx,
        topk_weights,
        num_experts=num_experts,
        capacity=capacity,
        alignment=alignment,
        handle=handle,
        columns=w.shape[2],
    )
    options, tokens, weights, handle = prepared
    check_weight_gradients(options, handle.layout, tokens, w)
    tokens, weights, w, handle = vary_alike((tokens, weights, w, handle))
    if fuses(options, tokens, w.shape[2], handle):
        hidden, _, row_weights = dispatch_and_multiply(options, False, None, tokens, weights, w, handle)
    else:
        hidden, row_weights = dispatch_then_multiply(options, tokens, weights, w, handle)
    return DispatchedGemm(hidden, row_weights, handle.group_sizes, handle, handle.num_dropped)


@operation
@takes_global_arrays()
def grouped_gemm_combine(
    h: Array,
    w: Array,
    handle: Handle,
    *,
    axis_name: AxisName = "expert",
    wire_dtype: DTypeLike | None = None,
    preferred_element_type: DTypeLike | None = None,
    schedule: Schedule | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Array:
    """The rows of each expert times its matrix, then `combine`.

    Where the sums are made is a matter of speed, and of the schedule's `combine_mode`. "serial" rounds as `combine`
    does after `grouped_gemm`: the products to the dtype of h, then the sum of each expert rank, then that of the ranks.
    "scatter" rounds the products, and the sum of all K of them. Each gives the same bits on every run.

    Args:
      h: `[R, I]` rows in the order of the dispatch.
      w: `[L, I, H]` matrices of this rank's experts, in the dtype of h.
      handle: `Dispatched.handle`.
      axis_name: the axis of the dispatch.
      wire_dtype: see `combine`.
      preferred_element_type: dtype of the result, see `combine`; products are rounded to that of h. None: that of h.
      schedule: how launches share the GPU, see `Schedule`: here its `combine_mode`, and, for the backward pass,
        `dispatch_mode`.
      implementation: see `dispatch`.

    Returns:
      `[T, H]` unweighted sums.

    Raises:
      ValueError, TypeError: as `combine` and `grouped_gemm` do.
      NotImplementedError: none of the implementations asked for can serve the call, in the mode of the schedule.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> x, w = jnp.ones((2, 4)), jnp.ones((2, 4, 3))
      >>> out = jax_ep.dispatch_grouped_gemm(x, jnp.array([[0], [1]]), None, w, num_experts=2, axis_name=())
      >>> jax_ep.grouped_gemm_combine(out.hidden, jnp.ones((2, 3, 4)), out.handle, axis_name=()).tolist()[0]
      [12.0, 12.0, 12.0, 12.0]
    """
    function = "grouped_gemm_combine"
    options = registry.options(function, axis_name, implementation, wire_dtype, schedule)
    h = check.matrix(function, "h", h, "[R, I]")
    layout = check.handle(function, handle, Handle, axis_name)
    remedy = "pass one row per row of the dispatch that made the handle"
    check.size(function, "the number of rows of h", h.shape[0], layout.capacity, remedy)
    w = check.expert_weights(function, "w", w, (layout.num_local_experts, h.shape[1]), h.dtype)
    travels = jax.ShapeDtypeStruct((layout.capacity, w.shape[2]), h.dtype)
    sum_dtype = check.result_dtype(function, preferred_element_type, h.dtype)
    options = dataclasses.replace(options, wire_dtype=check.wire(function, wire_dtype, travels), sum_dtype=sum_dtype)
    h, w, handle = vary_alike((h, w, handle), over=options.axis)
    if fuses(options, h, w.shape[2], handle):
        return multiply_and_combine(options, False, h, None, w, handle)[0]
    y = multiply(options, False, h.dtype, h, w, handle.group_sizes)
    return exchange.combine_tokens(options, y, None, handle)[0]


def fuses(options: Options, rows: Array, columns: int, handle: Handle) -> bool:
    """Whether an exchange and the product of rows `[., K]` with matrices `[K, columns]` are for the functions below."""
    name = exchange.choose(options, rows, handle.layout, handle, columns)  # refuses a mode that it cannot serve
    if options.wire_dtype is not None or name not in registry.available("exchange_gemm"):
        return False
    return registry.get("exchange_gemm", name).fuses(handle.layout, rows.dtype, rows.shape[1], columns)


def product_apart(options: Options, x: Array, w: Array, handle: Handle) -> str | None:
    """The implementation of the product of dispatched tokens with `w [L, H, N]` where it is a launch by itself."""
    if fuses(options, x, w.shape[2], handle):
        run = implementation(options, x, w, handle)
        return cast(str | None, run.product_apart(options.schedule, handle.layout, x.dtype, *w.shape[1:]))
    return registry.choose(options, "grouped_gemm", x.dtype, handle.layout.capacity, *w.shape[1:], w.shape[0])


def dispatch_apart(
    options: Options, x: Array, weights: Array | None, w: Array, handle: Handle
) -> tuple[Array, Array | None]:
    """What comes before such a product: `[T, H]` tokens and `[T, K]` weights to `[R, H]` and `[R]`."""
    if fuses(options, x, w.shape[2], handle):
        run = implementation(options, x, w, handle)
        return cast(tuple[Array, Array | None], run.dispatch_apart(options, x, weights, handle))
    return exchange.dispatch_tokens(options, x, weights, handle)


def check_weight_gradients(options: Options, layout: Layout, x: Array, w: Array) -> None:
    """Raises ValueError where the schedule wants a launch that the backward pass of `x`, then `w [L, H, N]`, lacks."""
    if not options.schedule.fuse_weight_gradients:
        return
    hidden, columns = w.shape[1:]
    name = exchange.choose(options, x, layout, columns=columns)
    if options.wire_dtype is not None:
        reason = f"with wire_dtype={jnp.dtype(options.wire_dtype).name} exchanges and products have their own launches"
        remedy = "pass wire_dtype=None"
    elif name in registry.available("exchange_gemm") and _fuses_weight_gradient(options, name, layout, w):
        return
    else:
        reason = f"{name!r} has no such launch for tokens of {w.dtype} and matrices of [{hidden}, {columns}]"
        remedy = "'triton' has it on GPUs with TMA, for bfloat16 and float16 and sizes that are multiples of 8"
    raise ValueError(
        f"{options.function}: fuse_weight_gradients=True, but {reason}; {remedy}, or leave it None in the schedule."
    )


def _fuses_weight_gradient(options: Options, name: str, layout: Layout, w: Array) -> bool:
    run, (hidden, columns) = registry.get("exchange_gemm", name), w.shape[1:]
    fused = run.fuses(layout, w.dtype, hidden, columns)
    return fused and run.fuses_weight_gradient(options.schedule, layout, w.dtype, columns, hidden)


class Dispatched(NamedTuple):
    """`hidden [R, N]`, the saved tokens or None, `row_weights [R]` or None."""

    hidden: Array
    saved: Array | None
    row_weights: Array | None


def _kept_as(options: Options, layout: Layout) -> str | None:
    """What is kept of tokens for the gradient of the matrices: whichever takes less memory; or None.

    "tokens" are `[W * T, H]` by source rank and token, "rows" `[R, H]`. On one device the former would be x itself.
    """
    if not options.schedule.keep_tokens:
        return None
    few = layout.capacity <= layout.num_ranks * layout.num_tokens
    return "rows" if few or layout.num_ranks == 1 else "tokens"


def implementation(options: Options, rows: Array, w: Array, handle: Handle) -> Any:
    """The implementation's functions of fused operations."""
    return registry.get("exchange_gemm", exchange.choose(options, rows, handle.layout, handle, w.shape[2]))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def dispatch_and_multiply(
    options: Options,
    transpose_rhs: bool,
    save_as: str | None,
    x: Array,
    weights: Array | None,
    w: Array,
    handle: Handle,
) -> Dispatched:
    """`[T, H]` tokens to rows, times `w [L, H, N]` (`[L, N, H]` if `transpose_rhs`); and `[T, K]` weights to `[R]`.

    `save_as` says which dispatched tokens it returns, see `_kept_as`; None: none. Transpose of `multiply_and_combine`.
    """
    run = implementation(options, x, w, handle).dispatch_grouped_gemm
    return Dispatched(*run(options, x, weights, w, handle, transpose_rhs=transpose_rhs, save_as=save_as))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def multiply_and_combine(
    options: Options, transpose_rhs: bool, h: Array, row_weights: Array | None, w: Array, handle: Handle
) -> tuple[Array, Array | None]:
    """`[R, F]` rows times `w [L, F, H]` to sums `[T, H]`; and `[R]` to `[T, K]`.

    Transpose of `dispatch_and_multiply`.
    """
    run = implementation(options, h, w, handle)
    return run.grouped_gemm_combine(options, h, row_weights, w, handle, transpose_rhs=transpose_rhs)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply_and_combine_with_bias(options: Options, h: Array, w: Array, handle: Handle, bias: Bias) -> Array:
    """`multiply_and_combine` by `[L, F, H]`, of rows with the bias of their experts, without row weights."""
    run = implementation(options, h, w, handle)
    return cast(Array, run.grouped_gemm_combine(options, h, None, w, handle, transpose_rhs=False, bias=bias)[0])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def weight_gradient(
    options: Options, transpose: bool, saved_as: str, x: Array, saved: Array, rows: Array, handle: Handle
) -> Array:
    """Per local expert, dispatched tokens times rows: `[L, H, N]`, or `[L, N, H]` with `transpose`.

    `saved` holds what became of the tokens `x` on the way; gradients go to `x` alone.
    """
    name = exchange.choose(options, x, handle.layout, handle, rows.shape[1])
    run = registry.get("exchange_gemm", name)
    return run.weight_gradient(saved, rows, handle, transpose=transpose, saved_as=saved_as)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def multiply_and_combine_with_weight_gradient(
    options: Options,
    transpose_rhs: bool,
    saved_as: str,
    h: Array,
    row_weights: Array | None,
    x: Array,
    saved: Array,
    w: Array,
    handle: Handle,
) -> tuple[Array, Array | None, Array]:
    """`multiply_and_combine`, and `weight_gradient` of the same rows in the shape of `w`, which share a launch."""
    run = implementation(options, h, w, handle).grouped_gemm_combine_with_weight_gradient
    return run(options, h, row_weights, w, saved, handle, transpose_rhs=transpose_rhs, saved_as=saved_as)


def _dispatch_forward(options: Options, transpose_rhs: bool, save_as: str | None, *arguments: Any) -> Any:
    """Keeps no tokens for matrices of which nobody wants the gradient."""
    trains = arguments[2].perturbed
    x, weights, w, handle = custom_vjp_primal_tree_values(arguments)
    form = save_as or (_kept_as(options, handle.layout) if trains else None)
    found = dispatch_and_multiply(options, transpose_rhs, form, x, weights, w, handle)
    saved = None if found.saved is None else checkpoint_name(found.saved, TOKENS_NAME)
    kept = (x, saved) if trains else (None, None)
    return found._replace(saved=saved if save_as else None), (*kept, w, handle)


def _dispatch_backward(
    options: Options, transpose_rhs: bool, save_as: str | None, residuals: Any, cotangents: Dispatched
) -> Any:
    x, saved, w, handle = residuals
    d_hidden, d_row_weights = cotangents.hidden, cotangents.row_weights
    if isinstance(d_hidden, SymbolicZero):
        d_hidden = vary_alike((jnp.zeros(d_hidden.shape, d_hidden.dtype), w))[0]
    if isinstance(d_row_weights, SymbolicZero):
        d_row_weights = None
    back = (options, not transpose_rhs)
    if save_as == "rows" and not isinstance(cotangents.saved, SymbolicZero):
        # Of rows that something else than `weight_gradient` has read, as the gradient of a bias does.
        d_rows = multiply(*back, w.dtype, d_hidden, w, handle.group_sizes) + cast(Array, cotangents.saved)
        d_x, d_weights = exchange.combine_tokens(options, d_rows, d_row_weights, handle)
        d_w = None if x is None else weight_gradient(options, transpose_rhs, "rows", x, saved, d_hidden, handle)
        return d_x, d_weights, d_w, None
    if x is None:
        return *multiply_and_combine(*back, d_hidden, d_row_weights, w, handle), None, None
    run = implementation(options, d_hidden, w, handle)
    form, behind = save_as or _kept_as(options, handle.layout), handle
    if form is None:
        form, saved = _sent_again(options, run, x, handle, d_hidden)
        behind = exchange.later(handle, saved)
    sizes = (d_hidden.shape[1], x.shape[1])
    if run.fuses_weight_gradient(options.schedule, handle.layout, x.dtype, *sizes):
        operands = (d_hidden, d_row_weights, x, saved, w, handle)
        return *multiply_and_combine_with_weight_gradient(*back, form, *operands), None
    d_x, d_weights = multiply_and_combine(*back, d_hidden, d_row_weights, w, behind)
    return d_x, d_weights, weight_gradient(options, transpose_rhs, form, x, saved, d_hidden, handle), None


def _sent_again(options: Options, run: Any, x: Array, handle: Handle, after: Array) -> tuple[str, Array]:
    """Dispatched tokens and their form, once `after` is known, for `weight_gradient`, whose own gradients go to `x`."""
    x, after = lax.optimization_barrier((lax.stop_gradient(x), after))
    if handle.layout.num_ranks == 1:
        return "tokens", x  # read where they lie
    return "rows", run.dispatch_apart(options, x, None, exchange.later(handle, after))[0]


def _combine_forward(
    options: Options, transpose_rhs: bool, h: Array, row_weights: Array | None, w: Array, handle: Handle
) -> Any:
    return multiply_and_combine(options, transpose_rhs, h, row_weights, w, handle), (h, w, handle)


def _combine_backward(
    options: Options, transpose_rhs: bool, residuals: Any, cotangents: tuple[Array, Array | None]
) -> Any:
    h, w, handle = residuals
    d_sums, d_slots = cotangents[0].astype(h.dtype), cotangents[1]
    options = options.transposed
    # The tokens are needed at once, as rows, and not kept.
    back = dispatch_and_multiply(options, not transpose_rhs, "rows", d_sums, d_slots, w, handle)
    d_w = weight_gradient(options, not transpose_rhs, "rows", d_sums, back.saved, h, handle)
    return back.hidden, back.row_weights, d_w, None


def _combine_with_bias_forward(options: Options, h: Array, w: Array, handle: Handle, bias: Bias) -> Any:
    return multiply_and_combine_with_bias(options, h, w, handle, bias), (h, w, handle, bias)


def _combine_with_bias_backward(
    options: Options, residuals: Any, d_sums: Array
) -> tuple[Array, Array | None, None, Bias]:
    h, w, handle, bias = residuals
    options, d_sums = options.transposed, d_sums.astype(h.dtype)
    back = dispatch_and_multiply(options, True, "rows", d_sums, None, w, handle)
    d_w = weight_gradient(options, True, "rows", d_sums, back.saved, h, handle)
    return back.hidden, d_w, None, bias_gradient(options, cast(Array, back.saved), bias, handle.group_sizes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch_then_multiply(
    options: Options, x: Array, weights: Array | None, w: Array, handle: Handle
) -> tuple[Array, Array | None]:
    """`dispatch_and_multiply` by `w [L, H, N]` for all that has no function of its own for both."""
    rows, row_weights = exchange.dispatch_tokens(options, x, weights, handle)
    return multiply(options, False, x.dtype, rows, w, handle.group_sizes), row_weights


def _then_multiply_forward(options: Options, x: Array, weights: Array | None, w: Array, handle: Handle) -> Any:
    if not options.schedule.keep_tokens:
        return dispatch_then_multiply(options, x, weights, w, handle), (x, None, w, handle)
    rows, row_weights = exchange.dispatch_tokens(options, x, weights, handle)
    rows = checkpoint_name(rows, TOKENS_NAME)
    return (multiply(options, False, x.dtype, rows, w, handle.group_sizes), row_weights), (None, rows, w, handle)


def _then_multiply_backward(options: Options, residuals: Any, cotangents: Any) -> Any:
    x, rows, w, handle = residuals
    d_hidden, d_row_weights = cotangents
    behind = handle
    if rows is None:
        rows = exchange.dispatch_again(options, x, handle, d_hidden)
        behind = exchange.later(handle, rows)
    d_rows = multiply(options, True, w.dtype, d_hidden, w, behind.group_sizes)
    d_x, d_weights = exchange.combine_tokens(options, d_rows, d_row_weights, handle)
    return d_x, d_weights, grouped_gemm.weight_gradient(options, w.dtype, rows, d_hidden, handle.group_sizes), None


def _weight_gradient_forward(options: Options, transpose: bool, saved_as: str, *arguments: Any) -> Any:
    return weight_gradient(options, transpose, saved_as, *arguments), arguments


def _weight_gradient_backward(
    options: Options, transpose: bool, saved_as: str, residuals: Any, cotangent: Array
) -> Any:
    x, _, rows, handle = residuals
    d_x, _ = multiply_and_combine(options, not transpose, rows, None, cotangent, handle)
    d_rows = dispatch_and_multiply(options, transpose, None, x, None, cotangent, handle).hidden
    return d_x, None, d_rows, None  # of what was saved, which is x


def _with_weight_gradient_forward(
    options: Options, transpose_rhs: bool, saved_as: str, h: Array, row_weights: Array | None, *others: Any
) -> Any:
    found = multiply_and_combine_with_weight_gradient(options, transpose_rhs, saved_as, h, row_weights, *others)
    return found, (h, *others)


def _with_weight_gradient_backward(
    options: Options, transpose_rhs: bool, saved_as: str, residuals: Any, cotangents: tuple[Array, Array | None, Array]
) -> Any:
    """The sum of the backward passes of both parts."""
    h, x, saved, w, handle = residuals
    d_sums, d_slots, d_gradient = cotangents
    d_h, d_row_weights, d_w, _ = _combine_backward(options, transpose_rhs, (h, w, handle), (d_sums, d_slots))
    d_x, d_saved, d_rows, _ = _weight_gradient_backward(
        options, not transpose_rhs, saved_as, (x, saved, h, handle), d_gradient
    )
    return d_h + d_rows, d_row_weights, d_x, d_saved, d_w, None


dispatch_then_multiply.defvjp(_then_multiply_forward, _then_multiply_backward)
dispatch_and_multiply.defvjp(_dispatch_forward, _dispatch_backward, symbolic_zeros=True)
multiply_and_combine.defvjp(_combine_forward, _combine_backward)
multiply_and_combine_with_bias.defvjp(_combine_with_bias_forward, _combine_with_bias_backward)
weight_gradient.defvjp(_weight_gradient_forward, _weight_gradient_backward)
multiply_and_combine_with_weight_gradient.defvjp(_with_weight_gradient_forward, _with_weight_gradient_backward)
