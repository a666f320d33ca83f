"""Checked and routed operations, from which the public functions are made.

Each takes a `Call` that says for whom it works, so that messages name the function the user called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, cast

from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jax_ep import backends, fused_options, fused_vjp, vjp
from jax_ep import masked_validation as check_fp8
from jax_ep import validation as check
from jax_ep.layout import dropless_capacity
from jax_ep.mesh_axes import axis_tuple, spread_axes, vary_alike
from jax_ep.no_gradient import call_without_gradient
from jax_ep.types import (
    COMBINE_MODES,
    DISPATCH_MODES,
    TOKENS_NAME,
    Array,
    AxisName,
    Dispatched,
    DispatchedGemm,
    Handle,
    Layout,
    Quantized,
)


@dataclasses.dataclass(frozen=True)
class Call:
    """Who called, and the keywords that all operations of one call share.

    Attributes:
      function: the public function, for messages.
      axis_name: expert axis; `()` for one device.
      wire_dtype: FP8 on the wire, or None.
      implementation: name, names, or None.
      mode: of `types.COMBINE_MODES` for a product and its combine, or None.
      fuse_weight_gradients: whether the backward pass of dispatch + GEMM is one launch; None: where that should be
        faster.
      num_communicating_programs: of dispatch + GEMM, those that send tokens before they multiply, or None.
      dispatch_mode: of `types.DISPATCH_MODES` for a dispatch and its product, or None.
    """

    function: str
    axis_name: AxisName = ()
    wire_dtype: DTypeLike | None = None
    implementation: str | Sequence[str] | None = None
    mode: str | None = None
    fuse_weight_gradients: bool | None = None
    num_communicating_programs: int | None = None
    dispatch_mode: str | None = None

    def choose(
        self,
        operation: str,
        rows: Array,
        layout: Layout | None = None,
        handle: Handle | None = None,
        columns: int | None = None,
        product: tuple[int, int, int, int] | None = None,
    ) -> str:
        """The implementation of `operation` for `rows [N, H]`, for the handle that it must work with, and for matrices
        of so many columns or a product of such sizes, see `backends.Request`.
        """
        request = backends.Request(
            self.function,
            rows.dtype,
            rows.shape[-1],
            operation,
            layout,
            self.wire_dtype,
            self.mode,
            columns,
            product,
            foreign_handle=handle is not None and handle.group is None,
            dispatch_mode=self.dispatch_mode,
        )
        return backends.choose(self.implementation, request)

    def choose_gemms(self, lhs: Array, rhs: Array, num_rows: int) -> vjp.Gemms:
        """The implementations of grouped GEMMs of `num_rows` rows like those of lhs, and of their gradients."""
        groups, depth, columns = rhs.shape
        product = (num_rows, depth, columns, groups)
        return vjp.Gemms(self.choose("gemm", lhs, product=product), self.choose("gemm_weights", lhs, product=product))

    def num_local_experts(self, num_experts: int) -> int:
        """L = E / W."""
        num_experts, num_ranks = check.experts(self.function, num_experts, self.axis_name)
        return num_experts // num_ranks


def combine_mode(function: str, argument: str, mode: str | None) -> str | None:
    """A known way to run a product and its combine, or None."""
    return _mode(function, argument, mode, COMBINE_MODES)


def dispatch_mode(function: str, argument: str, mode: str | None, num_communicating: int | None) -> str | None:
    """A known way to run a dispatch and its product, or None."""
    mode = _mode(function, argument, mode, DISPATCH_MODES)
    if mode == "serial" and num_communicating is not None:
        raise ValueError(
            f"{function}: {argument}='serial' and num_communicating_programs={num_communicating}: only the launch of"
            f" {argument}='fused' has such programs; leave one of them None."
        )
    return mode


def _mode(function: str, argument: str, mode: str | None, known: tuple[str, ...]) -> str | None:
    if mode is not None and (not isinstance(mode, str) or mode not in known):
        raise ValueError(
            f"{function}: {argument}={mode!r}, expected one of {known}, or None for the one that should be fastest."
        )
    return mode


class Prepared(NamedTuple):
    """Checked arguments of a dispatch, alike in the mesh axes over which they vary, and the implementation for them."""

    name: str
    x: Array | Quantized
    topk_weights: Array | None
    handle: Handle


def prepare(
    call: Call,
    x: Array | Quantized,
    topk_idx: Array | None,
    topk_weights: Array | None,
    num_experts: int,
    capacity: int | None,
    alignment: int,
    handle: Handle | None,
    columns: int | None = None,
) -> Prepared:
    """Checks the arguments of a dispatch, chooses an implementation, and makes the handle where there is none."""
    function, axis = call.function, axis_tuple(call.axis_name)
    x = check.tokens(function, x)
    num_tokens = (x[0] if isinstance(x, tuple) else x).shape[0]
    num_experts, num_ranks = check.experts(function, num_experts, call.axis_name)
    if topk_idx is not None:
        topk_idx = check.expert_ids(function, topk_idx, num_tokens, num_experts)
    top_k = 0 if topk_idx is None else topk_idx.shape[1]
    wanted = Layout(num_ranks, num_experts, num_tokens, top_k, 0, alignment, spread_axes(call.axis_name))
    layout = _layout(call, wanted, capacity, handle)
    if topk_weights is not None:
        topk_weights = check.router_weights(function, topk_weights, (layout.num_tokens, layout.top_k), x)
    check.wire(function, call.wire_dtype, x)
    values = x[0] if isinstance(x, tuple) else x
    name = call.choose("exchange", values, layout, handle, columns)
    x, topk_idx, topk_weights, handle = vary_alike((x, topk_idx, topk_weights, handle), over=axis)
    if handle is None:
        handle = backends.get(name).plan(cast(Array, topk_idx), layout, axis)
    return Prepared(name, x, topk_weights, handle)


def dispatch(
    call: Call,
    x: Array | Quantized,
    topk_idx: Array | None,
    topk_weights: Array | None,
    *,
    num_experts: int,
    capacity: int | None = None,
    alignment: int = 1,
    handle: Handle | None = None,
) -> Dispatched:
    """See `jax_ep.dispatch`."""
    return _send(call, prepare(call, x, topk_idx, topk_weights, num_experts, capacity, alignment, handle))


def _send(call: Call, prepared: Prepared) -> Dispatched:
    name, x, topk_weights, handle = prepared
    route = vjp.Route(name, axis_tuple(call.axis_name), check.wire(call.function, call.wire_dtype, x))
    if isinstance(x, tuple):
        tokens: Array | Quantized = vjp.send_quantized(route, x, handle)
        weights = None if topk_weights is None else vjp.scatter_weights(route, topk_weights, handle)[0]
    else:
        tokens, weights = vjp.scatter(route, x, topk_weights, handle)
    return Dispatched(tokens, weights, handle.group_sizes, handle, handle.num_dropped)


def dispatch_gemm(
    call: Call,
    x: Array,
    topk_idx: Array | None,
    topk_weights: Array | None,
    w: Array,
    *,
    num_experts: int,
    capacity: int | None = None,
    alignment: int = 1,
    handle: Handle | None = None,
    name: str = "w",
) -> DispatchedGemm:
    """See `jax_ep.dispatch_grouped_gemm`; `name` is what the caller knows `w` as."""
    prepared = prepare(call, x, topk_idx, topk_weights, num_experts, capacity, alignment, handle, w.shape[2])
    handle = prepared.handle
    if call.fuse_weight_gradients:
        fused_options.check_gradients(call.function, prepared.name, handle.layout, w, call.mode, call.wire_dtype)
    if call.wire_dtype is None and backends.get(prepared.name).fuses(handle.layout, x.dtype, *w.shape[1:]):
        config = _fused_config(call, prepared.name)
        tokens, weights, w, handle = vary_alike((prepared.x, prepared.topk_weights, w, handle))
        hidden, _, row_weights = fused_vjp.scatter_gemm(config, tokens, weights, w, handle)
        return DispatchedGemm(hidden, row_weights, handle.group_sizes, handle, handle.num_dropped)
    if call.num_communicating_programs is not None:
        raise fused_options.no_launch_for(call.function, call.num_communicating_programs, prepared.name, x)
    d = _send(call, prepared)
    tokens = checkpoint_name(cast(Array, d.tokens), TOKENS_NAME)
    hidden = grouped_gemm(call, tokens, w, d.group_sizes, name=name)
    return DispatchedGemm(hidden, d.weights, d.group_sizes, d.handle, d.dropped)


def _fused_config(call: Call, name: str) -> fused_vjp.FusedConfig:
    return fused_vjp.FusedConfig(
        name,
        axis_tuple(call.axis_name),
        mode=call.mode,
        fuse_weight_gradients=call.fuse_weight_gradients,
        num_communicating=call.num_communicating_programs,
        dispatch_mode="fused" if call.num_communicating_programs else call.dispatch_mode,
    )


def activate(call: Call, d: DispatchedGemm, activation: str, gated: bool) -> Array:
    """What comes between the two products: activated rows, scaled by their weights.

    `[R, 2 * I]` (or `[R, I]`) hidden rows to `[R, I]`, in float32 with one final rounding. Hidden rows and weights are
    kept for the backward pass. Rows past the groups may hold anything, as products do not read them.
    """
    config = vjp.ActivationConfig(call.choose("activation", d.hidden), activation, gated)
    return vjp.activate(config, *vary_alike((d.hidden, cast(Array, d.weights), d.group_sizes)))


def gemm_combine(call: Call, h: Array, w: Array, handle: Handle, *, name: str = "w") -> Array:
    """See `jax_ep.grouped_gemm_combine`; `name` is what the caller knows `w` as."""
    chosen = call.choose("exchange", h, handle.layout, handle, w.shape[2])
    if call.wire_dtype is None and backends.get(chosen).fuses(handle.layout, h.dtype, *w.shape[1:]):
        config = _fused_config(call, chosen)
        h, w, handle = vary_alike((h, w, handle), over=axis_tuple(call.axis_name))
        return fused_vjp.gather_gemm(config, h, None, w, handle)[0]
    return combine(call, grouped_gemm(call, h, w, handle.group_sizes, name=name), handle)


def _layout(call: Call, wanted: Layout, capacity: int | None, handle: Handle | None) -> Layout:
    """The static sizes of a dispatch: `wanted` with its capacity, or those of the handle that it reuses."""
    alignment = check.positive(call.function, "alignment", wanted.alignment)
    capacity = check.capacity(call.function, capacity, alignment)
    if handle is not None:
        return check.reused_layout(call.function, handle, wanted, capacity, call.axis_name)
    if wanted.top_k == 0:
        raise ValueError(
            f"{call.function}: topk_idx is None and handle is None; pass the expert ids [T, K], or a handle."
        )
    # Rows past the capacity are numbered too, before they are dropped.
    most = dropless_capacity(wanted.num_slots, wanted.num_local_experts, alignment)
    sizes = f"{wanted.num_ranks} ranks * {wanted.num_tokens} tokens * K={wanted.top_k} with {alignment=}"
    check.countable(call.function, sizes, most, "pass fewer tokens in each call, or a smaller alignment")
    return dataclasses.replace(wanted, capacity=most if capacity is None else capacity)


def combine(call: Call, y: Array, handle: Handle, *, name: str = "y") -> Array:
    """See `jax_ep.combine`; `name` is what the caller knows `y` as."""
    function, axis = call.function, axis_tuple(call.axis_name)
    y = check.matrix(function, name, y, "[R, H]")
    layout = check.handle(function, handle, Handle, call.axis_name)
    remedy = "pass one row per row of the dispatch that made the handle"
    check.size(function, f"the number of rows of {name}", y.shape[0], layout.capacity, remedy)
    wire_dtype = check.wire(function, call.wire_dtype, y)
    route = vjp.Route(call.choose("exchange", y, layout, handle), axis, wire_dtype)
    y, handle = vary_alike((y, handle), over=axis)
    return vjp.gather(route, y, None, handle)[0]


def grouped_gemm(
    call: Call,
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    name: str = "rhs",
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """See `jax_ep.grouped_gemm`; `name` is what the caller knows `rhs` as."""
    function = call.function
    lhs = check.matrix(function, "lhs", lhs, "[M, K]")
    check.countable(function, f"lhs of shape {lhs.shape}", lhs.shape[0], "split it")
    group_sizes = check.group_sizes(function, group_sizes)
    rhs = check.expert_weights(function, name, rhs, (group_sizes.shape[0], lhs.shape[1]), lhs.dtype, "group_sizes")
    out_dtype = check.result_dtype(function, preferred_element_type, lhs.dtype)
    config = vjp.GemmConfig(call.choose_gemms(lhs, rhs, lhs.shape[0]), False, out_dtype)
    return vjp.grouped_gemm(config, *vary_alike((lhs, rhs, group_sizes)))


def grouped_gemm_fp8(
    call: Call,
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    lhs_scales: Array | None,
    rhs_scales: Array | None,
    preferred_element_type: DTypeLike | None,
) -> Array:
    """See `jax_ep.grouped_gemm`, of FP8 operands."""
    function = call.function
    lhs, rhs, group_sizes = check_fp8.ragged_operands(function, lhs, rhs, group_sizes)
    lhs_scales = check_fp8.scales(function, "lhs_scales", lhs_scales, lhs, 1)
    rhs_scales = check_fp8.scales(function, "rhs_scales", rhs_scales, rhs, check_fp8.BLOCK)
    out_dtype = check_fp8.result_dtype(function, preferred_element_type, lhs)
    run = partial(backends.get(call.choose("gemm", lhs)).grouped_gemm_fp8, out_dtype=out_dtype)
    operands = vary_alike((lhs, rhs, group_sizes, lhs_scales, rhs_scales))
    remedy = (
        f"{function} of FP8 operands has no gradient: train with moe(forward_dtype=float8_e4m3fn), or pass the operands"
        " in bfloat16."
    )
    return call_without_gradient(remedy, run, *operands)
