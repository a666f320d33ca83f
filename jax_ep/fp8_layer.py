"""The expert layer whose forward pass multiplies in FP8: checks, and its halves from checked arguments."""

from __future__ import annotations

from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jax_ep import backends, fp8_vjp, fused_vjp, operations, vjp
from jax_ep import masked_validation as check_fp8
from jax_ep import validation as check
from jax_ep.dtypes import FP8
from jax_ep.mesh_axes import axis_tuple, vary_alike
from jax_ep.operations import Call
from jax_ep.types import HIDDEN_NAME, Array


def is_wanted(function: str, forward_dtype: DTypeLike | None, hidden: int, intermediate: int) -> bool:
    """Whether products run in FP8, after checking that they can."""
    return forward_dtype is not None and check_fp8.forward(function, forward_dtype, hidden, intermediate)


def expert_layer(
    call: Call,
    x: Array,
    topk_idx: Array,
    topk_weights: Array,
    w_gate_up: Array,
    w_down: Array,
    num_experts: int,
    activation: str,
    gated: bool,
    capacity: int | None,
) -> Array:
    """See `jax_ep.moe` with `forward_dtype`; `[T, H]`, to be named by the caller."""
    columns = w_gate_up.shape[2]
    prepared = operations.prepare(call, x, topk_idx, topk_weights, num_experts, capacity, 1, None, columns)
    name, handle = prepared.name, prepared.handle
    axis = axis_tuple(call.axis_name)
    route = vjp.Route(name, axis, check.wire(call.function, call.wire_dtype, x))
    product = backends.choose(call.implementation, backends.Request(call.function, FP8, x.shape[1], "gemm"))
    gradient = call.choose("activation", x)

    def config(w: Array) -> fp8_vjp.Fp8Config:
        fuses = route.wire_dtype is None and backends.get(name).fuses(handle.layout, x.dtype, *w.shape[1:])
        fused = fused_vjp.FusedConfig(name, axis, mode=call.mode, dispatch_mode=call.dispatch_mode) if fuses else None
        backward = call.choose_gemms(x, w, handle.layout.capacity)
        return fp8_vjp.Fp8Config(route, product, backward, gradient, fused, activation, gated)

    operands = (prepared.x, prepared.topk_weights, w_gate_up, w_down, handle)
    tokens, weights, w_gate_up, w_down, handle = vary_alike(operands, over=axis)
    hidden, row_weights = fp8_vjp.dispatch_gemm(config(w_gate_up), tokens, weights, w_gate_up, handle)
    hidden = checkpoint_name(hidden, HIDDEN_NAME)
    return fp8_vjp.gemm_combine(config(w_down), hidden, row_weights, w_down, handle)
