"""The whole expert layer, over a mesh axis (`moe`) and on one device (`fused_moe`), and the sorting step alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jax_ep import fp8_layer, fused_options, operations
from jax_ep import validation as check
from jax_ep.layout import dropless_capacity, sort_tokens
from jax_ep.named_scopes import operation
from jax_ep.operations import Call
from jax_ep.types import HIDDEN_NAME, Array, AxisName, SortedTokens

OUTPUT_NAME = "jax_ep.output"


@operation
def moe(
    x: Array,
    topk_idx: Array,
    topk_weights: Array,
    w_gate_up: Array,
    w_down: Array,
    *,
    num_experts: int,
    activation: str = "silu",
    axis_name: AxisName = "expert",
    capacity: int | None = None,
    wire_dtype: DTypeLike | None = None,
    forward_dtype: DTypeLike | None = None,
    combine_mode: str | None = None,
    fuse_weight_gradients: bool | None = None,
    num_communicating_programs: int | None = None,
    dispatch_mode: str | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Array:
    """The expert layer: `y[t] = sum_k weight[t, k] * (act(x[t] @ gate) * (x[t] @ up)) @ down` of expert `idx[t, k]`.

    Differentiable in x, the router weights and the matrices. Under `jax.checkpoint` the names `jax_ep.tokens`
    (dispatched tokens), `jax_ep.hidden` (first product) and `jax_ep.output` can be saved or recomputed by a policy.

    Args:
      x: `[T, H]` tokens of this rank.
      topk_idx: `[T, K]` int32 expert ids; -1 is no expert.
      topk_weights: `[T, K]` float32 router weights; they scale the rows in float32 before the second product.
      w_gate_up: `[L, H, 2 * I]`, gate in the first I columns and up in the last; or `[L, H, I]` for experts without a
        gate, whose hidden rows are `act(x @ w)`.
      w_down: `[L, I, H]`.
      num_experts: E over all ranks.
      activation: "silu", "gelu" (the tanh approximation) or "relu".
      axis_name: mesh axis, or tuple of axes, over which experts are spread.
      capacity: static rows per rank; None: nothing is dropped. See `dispatch`.
      wire_dtype: `jnp.float8_e4m3fn` for FP8 on the wire, both ways, forward and backward.
      forward_dtype: `jnp.float8_e4m3fn` runs both products of the forward pass in FP8: tokens and activated rows with
        one scale per 128 columns, matrices, quantised in each call, with one per block of 128 by 128. The backward pass
        is that of the layer without it, in the dtype of x at the hidden rows of the forward pass; rounding counts as
        the identity. Tokens that travel in FP8 too (`wire_dtype`) are quantised once. None: the dtype of x.
      combine_mode: the `mode` of `grouped_gemm_combine` for the second product and the way back, and for the gradient
        of the tokens; None: what should be fastest.
      fuse_weight_gradients: of the first product, see `dispatch_grouped_gemm`; True needs no `forward_dtype`.
      num_communicating_programs: of the first product and of the backward pass of the second, see
        `dispatch_grouped_gemm`; needs no `forward_dtype`.
      dispatch_mode: the `mode` of `dispatch_grouped_gemm` for the first product, and for the backward pass of the
        second; None: what should be faster.
      implementation: see `dispatch`.

    Returns:
      `[T, H]` in the dtype of x.

    Raises:
      ValueError: shapes, sizes, axes, an activation or a mode that do not fit; `fuse_weight_gradients=True` or
        `num_communicating_programs` where there is no such launch; with `forward_dtype`, H or I is not a multiple of
        128.
      TypeError: unsupported or different dtypes; by the second derivative with `forward_dtype`.
      NotImplementedError: none of the implementations asked for can serve the call.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> x, idx, weights = jnp.ones((2, 4)), jnp.array([[0], [1]]), jnp.ones((2, 1))
      >>> w_gate_up, w_down = jnp.ones((2, 4, 6)), jnp.ones((2, 3, 4))
      >>> jax_ep.moe(x, idx, weights, w_gate_up, w_down, num_experts=2, axis_name=(), activation="relu")[0, 0].item()
      48.0

    Source: Mixture of Experts as in Mixtral (arXiv:2401.04088) with GLU experts (arXiv:2002.05202).
    """
    mode = operations.combine_mode("moe", "combine_mode", combine_mode)
    wanted = fused_options.fuse_weight_gradients("moe", fuse_weight_gradients)
    communicating = fused_options.num_communicating_programs("moe", num_communicating_programs)
    dispatching = operations.dispatch_mode("moe", "dispatch_mode", dispatch_mode, communicating)
    call = Call("moe", axis_name, wire_dtype, implementation, mode, wanted, communicating, dispatching)
    weights = (w_gate_up, w_down)
    return _expert_layer(call, x, topk_idx, topk_weights, *weights, num_experts, activation, capacity, forward_dtype)


def _expert_layer(
    call: Call,
    x: Array,
    topk_idx: Array,
    topk_weights: Array,
    w_gate_up: Array,
    w_down: Array,
    num_experts: int,
    activation: str,
    capacity: int | None,
    forward_dtype: DTypeLike | None,
) -> Array:
    x = check.matrix(call.function, "x", x, "[T, H]")
    gated = _check_experts(call, x, w_gate_up, w_down, num_experts, activation)
    if topk_weights is None:
        raise TypeError(
            f"{call.function}: topk_weights is None, expected a float32 array [T, K]; pass jnp.ones for an"
            " unweighted sum."
        )
    layer = functools.partial(
        _layer, call, num_experts=num_experts, activation=activation, gated=gated, capacity=capacity
    )
    if fp8_layer.is_wanted(call.function, forward_dtype, x.shape[1], w_down.shape[1]):
        wanted = {name: getattr(call, name) for name in ("fuse_weight_gradients", "num_communicating_programs")}
        fused_options.check_none(call.function, forward_dtype, **wanted)
        layer = functools.partial(fp8_layer.expert_layer, *layer.args, **layer.keywords)
    arguments = (x, topk_idx, topk_weights, w_gate_up, w_down)
    if x.shape[0] == 0:
        # The same errors, but nothing to compile: XLA's compiler for GPUs crashes at some programs without a row.
        jax.eval_shape(layer, *arguments)
        # Gradients are zeros that have the shardings of what they belong to.
        return x + sum(jnp.sum(a[:0]).astype(x.dtype) for a in (topk_weights, w_gate_up, w_down))
    return checkpoint_name(layer(*arguments), OUTPUT_NAME)


def _layer(
    call: Call,
    x: Array,
    topk_idx: Array,
    topk_weights: Array,
    w_gate_up: Array,
    w_down: Array,
    *,
    num_experts: int,
    activation: str,
    gated: bool,
    capacity: int | None,
) -> Array:
    d = operations.dispatch_gemm(
        call, x, topk_idx, topk_weights, w_gate_up, num_experts=num_experts, capacity=capacity, name="w_gate_up"
    )
    d = d._replace(hidden=checkpoint_name(d.hidden, HIDDEN_NAME))
    rows = operations.activate(call, d, activation, gated)
    return operations.gemm_combine(call, rows, w_down, d.handle, name="w_down")


def _check_experts(call: Call, x: Array, w_gate_up: Array, w_down: Array, num_experts: int, activation: str) -> bool:
    """Checks the two matrices against the tokens and each other; returns whether the experts are gated."""
    function, num_local = call.function, call.num_local_experts(num_experts)
    check.activation(function, activation)
    w_gate_up = check.expert_weights(function, "w_gate_up", w_gate_up, (num_local, x.shape[1]), x.dtype)
    columns = w_gate_up.shape[2]
    w_down = check.array(function, "w_down", w_down, 3, f"[{num_local}, I, {x.shape[1]}]")
    intermediate = w_down.shape[1]
    w_down = check.expert_weights(function, "w_down", w_down, (num_local, intermediate), x.dtype)
    if columns not in (intermediate, 2 * intermediate):
        raise ValueError(
            f"{function}: w_gate_up has {columns} columns and w_down has I={intermediate} rows, expected 2 * I ="
            f" {2 * intermediate} columns (gated) or I = {intermediate} (not gated); change one of the two."
        )
    check.size(function, "the number of columns of w_down", w_down.shape[2], x.shape[1], "it must return to H of x")
    return columns == 2 * intermediate


@operation
def fused_moe(
    x: Array,
    topk_idx: Array,
    topk_weights: Array,
    w_gate_up: Array,
    w_down: Array,
    *,
    activation: str = "silu",
    forward_dtype: DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Array:
    """The expert layer on one device: `moe` without a mesh axis.

    Args:
      x: `[T, H]` tokens.
      topk_idx: `[T, K]` int32 expert ids; -1 is no expert.
      topk_weights: `[T, K]` float32 router weights.
      w_gate_up: `[E, H, 2 * I]`, or `[E, H, I]` for experts without a gate.
      w_down: `[E, I, H]`.
      activation: "silu", "gelu" (the tanh approximation) or "relu".
      forward_dtype: see `moe`.
      implementation: see `dispatch`.

    Returns:
      `[T, H]` in the dtype of x.

    Raises:
      ValueError, TypeError, NotImplementedError: as `moe` does.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> x, idx, weights = jnp.ones((2, 4)), jnp.array([[0], [1]]), jnp.ones((2, 1))
      >>> jax_ep.fused_moe(x, idx, weights, jnp.ones((2, 4, 6)), jnp.ones((2, 3, 4)), activation="relu").shape
      (2, 4)
    """
    call = Call("fused_moe", implementation=implementation)
    w_gate_up = check.array(call.function, "w_gate_up", w_gate_up, 3, "[E, H, 2 * I]")
    weights = (w_gate_up, w_down)
    num_experts = w_gate_up.shape[0]
    return _expert_layer(call, x, topk_idx, topk_weights, *weights, num_experts, activation, None, forward_dtype)


@operation
def moe_sort(topk_idx: Array, topk_weights: Array | None = None, *, num_experts: int, block_size: int) -> SortedTokens:
    """Sorts the slots of one device by expert and pads every expert to whole blocks, for block-wise kernels.

    Args:
      topk_idx: `[T, K]` int32 expert ids; -1 is no expert.
      topk_weights: `[T, K]` float32 router weights, or None.
      num_experts: E.
      block_size: rows per block.

    Returns:
      `SortedTokens(slots [P] int32, weights [P] or None, block_expert [P // block_size] int32, group_sizes [E] int32,
      num_rows [] int32)` with `P = round_up(T * K + min(E, T * K) * (block_size - 1), block_size)`, which holds any
      routing.

    Raises:
      ValueError: shapes or sizes that do not fit, or ids out of range where they are known.
      TypeError: unsupported dtypes.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> jax_ep.moe_sort(jnp.array([[1], [0], [1]]), num_experts=2, block_size=2).slots.tolist()
      [1, -1, 0, 2, -1, -1]

    Source: the block-aligned sort that vLLM's fused MoE kernel takes as its input.
    """
    function = "moe_sort"
    num_experts = check.positive(function, "num_experts", num_experts)
    block_size = check.positive(function, "block_size", block_size)
    topk_idx = check.expert_ids(function, topk_idx, None, num_experts)
    num_rows = dropless_capacity(topk_idx.size, num_experts, block_size)
    sizes = f"topk_idx of shape {topk_idx.shape} with {num_experts=} and {block_size=}"
    check.countable(function, sizes, num_rows, "pass fewer tokens in each call, or a smaller block_size")
    if topk_weights is not None:
        topk_weights = check.router_weights(function, topk_weights, topk_idx.shape, topk_weights)
    return sort_tokens(topk_idx, topk_weights, num_experts, block_size)
