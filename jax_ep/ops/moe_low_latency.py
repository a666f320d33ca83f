"""The expert layer of decode-sized batches: low-latency dispatch, the experts, low-latency combine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep.core import check, check_fp8
from jax_ep.core.autodiff import call_without_gradient
from jax_ep.core.check import operation
from jax_ep.core.dtypes import FP8, accumulation_dtype
from jax_ep.core.expert_matrices import ExpertWeights, QArray, QuantizedWeights, as_array, as_transposed
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.layout import add_bias_of_blocks, local_groups
from jax_ep.core.mesh_axes import rank_on, takes_global_arrays, vary_alike
from jax_ep.formats import check_quantized
from jax_ep.formats.qarrays import own_weights
from jax_ep.ops import hierarchical, plan_serving, registry
from jax_ep.ops.low_latency import check_combine, checked_layout, checked_max_tokens, combine_tokens, dispatch_tokens
from jax_ep.ops.masked import activate, checked_operands, multiply, prepared_rows
from jax_ep.ops.plan_serving import GatheredLayerPlan, LowLatencyGemmPlan
from jax_ep.types import (
    Array,
    AxisName,
    Biases,
    Experts,
    Layout,
    LowLatencyHandle,
    Options,
    Schedule,
    Tokens,
    Topology,
)

_NAME = "low_latency_moe"


@operation
@takes_global_arrays(keeps_rows=True)
def low_latency_moe(
    x: Array,
    topk_idx: Array,
    topk_weights: Array,
    w_gate_up: Array | QuantizedWeights | QArray,
    w_down: Array | QuantizedWeights | QArray,
    *,
    num_experts: int,
    experts: Experts | None = None,
    biases: Biases | None = None,
    axis_name: AxisName = "expert",
    max_tokens_per_rank: int | None = None,
    preferred_element_type: DTypeLike | None = None,
    schedule: Schedule | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Array:
    """Run the expert layer for a few tokens per rank, in FP8 or in the dtype of x: `moe` for decoding.

    It runs `low_latency_dispatch`, `masked_grouped_gemm`, `masked_gated_activation` and `low_latency_gemm_combine`. Or
    all ranks get all tokens, each runs its experts in one launch, as `fused_moe` does, and a combine adds the sums of
    the ranks: with 4-bit weights that is faster, and `single_launch` in the schedule decides otherwise. It is for
    inference and has no gradient.

    Args:
      x: `[T, H]` bfloat16, float16, float32 or float64 tokens of this rank.
      topk_idx: `[T, K]` int32 expert ids; -1 is no expert.
      topk_weights: `[T, K]` router weights.
      w_gate_up: weights of this rank's experts as `moe` takes them, `[L, H, 2 * I]` in the dtype of x, or
        `QuantizedWeights`, multiplied in the dtype of x or as their `activations` say: with "fp8" tokens travel in FP8,
        too. The GEMM reads transposed weights: an array is transposed in each call, so prepare it once with
        `quantize(w, None)`, or with a format. A `qwix.QArray` is converted in each call: prepare it by
        `jax_ep.integrations.qwix.from_qarray`.
      w_down: `[L, I, H]`, or `QuantizedWeights` or a `qwix.QArray`.
      num_experts: E over all ranks.
      experts: what an expert computes, see `Experts`; None: `Experts()`. Experts with their weights on the input
        get each token once for each of its experts, scaled and rounded to the dtype of x.
      biases: `(b_gate_up [L, 2 * I], b_down [L, H])` of the two GEMMs, or None for one of them; None: no biases.
      axis_name: mesh axis, or tuple of axes, over which experts are spread; or a `Topology`, see `moe`.
      max_tokens_per_rank: static, at least T and the same on all ranks: the size of the buffers. Over a `Topology` they
        hold the tokens that can come from all nodes instead. None: T.
      preferred_element_type: dtype of the result, and of the experts' outputs on the wire; None: that of x.
      schedule: see `dispatch`.
      implementation: see `dispatch`.

    Returns:
      `[T, H]`; zero for tokens without experts.

    Raises:
      ValueError: shapes, sizes, axes or an activation that do not fit; with FP8 tokens, H or I that is not a multiple
        of 128.
      TypeError: unsupported or different dtypes, or weights of two kinds; the result is differentiated.
      NotImplementedError: no requested implementation supports the call.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> from jax_ep.quantization import quantize
      >>> x, idx, weights = jnp.ones((2, 128)), jnp.array([[0], [1]]), jnp.ones((2, 1))
      >>> w_gate_up, w_down = jnp.ones((2, 128, 256)), jnp.ones((2, 128, 128))
      >>> pair = [quantize(w, "fp8", activations="fp8") for w in (w_gate_up, w_down)]
      >>> experts = jax_ep.Experts("relu")
      >>> y = jax_ep.low_latency_moe(x, idx, weights, *pair, num_experts=2, axis_name=(), experts=experts)
      >>> y[0, 0].item()  # 128 * 128 from the first GEMM, gated by as much, times 128 from the second
      2097152.0

    Source: the path of DeepSeek-V3's decoding (arXiv:2412.19437, section 3.4.2).
    """
    x, out_dtype = check.plain_tokens(_NAME, x), preferred_element_type
    pair = own_weights(_NAME, "w_gate_up", w_gate_up), own_weights(_NAME, "w_down", w_down)
    if isinstance(axis_name, Topology):
        call: dict[str, Any] = {"w_gate_up": pair[0], "w_down": pair[1], "experts": experts, "biases": biases}
        call |= {"preferred_element_type": out_dtype, "schedule": schedule, "implementation": implementation}
        return _over_nodes(call, x, topk_idx, topk_weights, num_experts, axis_name, max_tokens_per_rank)
    options = registry.options(_NAME, axis_name, implementation, schedule, has_wire=False)
    check.known_rows(_NAME, "x", "in a low-latency layer", x.shape[0])
    num_experts, num_ranks = check.experts(_NAME, num_experts, axis_name)
    topk_idx = check.expert_ids(_NAME, topk_idx, x.shape[0], num_experts)
    topk_weights = check.router_weights(_NAME, topk_weights, topk_idx.shape, x.dtype)
    num_tokens = max(1, x.shape[0]) if max_tokens_per_rank is None else max_tokens_per_rank
    num_tokens = checked_max_tokens(_NAME, x.shape[0], num_tokens)
    out_dtype = check.result_dtype(_NAME, out_dtype, x.dtype)
    given = ExpertWeights(*pair, *check.biases(_NAME, biases))
    experts, parts = check_quantized.layer(_NAME, experts, given, num_experts // num_ranks, x.shape[1], x.dtype)
    tokens, parts = vary_alike(((x, topk_idx, topk_weights), parts), over=options.axis)
    if experts.weight_on == "output":
        return _run_experts(options, experts, num_experts, num_tokens, out_dtype, parts, *tokens)
    top_k, rows = topk_idx.shape[1], _one_token_per_expert(*tokens)
    y = _run_experts(options, experts, num_experts, num_tokens * top_k, out_dtype, parts, *rows)
    return jnp.sum(y.reshape(-1, top_k, y.shape[1]), axis=1, dtype=accumulation_dtype(y.dtype)).astype(y.dtype)


def _over_nodes(
    call: dict[str, Any],
    x: Array,
    topk_idx: Array,
    topk_weights: Array,
    num_experts: int,
    topology: Topology,
    max_tokens_per_rank: int | None,
) -> Array:
    """Run the layer inside each node of a `Topology`, between two all-to-alls over the nodes."""
    if max_tokens_per_rank is not None:
        checked_max_tokens(_NAME, x.shape[0], max_tokens_per_rank)
    w_gate_up = call["w_gate_up"]
    takes_fp8 = isinstance(w_gate_up, QuantizedWeights) and w_gate_up.activations == "fp8"
    inside, wires = partial(low_latency_moe, **call), (FP8 if takes_fp8 else None, None)
    tokens, sum_dtype = (x, topk_idx, topk_weights), call["preferred_element_type"]
    return hierarchical.layer(_NAME, inside, tokens, num_experts, topology, wires, sum_dtype)


def _run_experts(
    options: Options,
    experts: Experts,
    num_experts: int,
    max_tokens: int,
    out_dtype: DTypeLike,
    parts: ExpertWeights,
    x: Array,
    topk_idx: Array,
    topk_weights: Array,
) -> Array:
    """Return the layer's result `[T, H]` for checked arguments."""
    layout = checked_layout(options, num_experts, max_tokens, topk_idx.shape[1])
    whole = plan_serving.gathered_layer(options, experts, layout, parts, x.dtype, out_dtype)
    if whole is not None:
        run = partial(_gather, options, whole, experts, layout, out_dtype)
        return call_without_gradient(_remedy(options), run, x, topk_idx, topk_weights, parts)
    parts = parts._replace(w_gate_up=as_transposed(parts.w_gate_up), w_down=as_transposed(parts.w_down))
    plan = plan_serving.low_latency_layer(options, experts, layout, parts, x.dtype, out_dtype)
    group_size = GROUP_SIZE if parts.w_gate_up.activations == "fp8" else None
    tokens, scales, sizes, handle = dispatch_tokens(plan.dispatch, layout, group_size, x, topk_idx, None)
    rows = max(1, -(-layout.num_ranks * topk_idx.size // layout.num_experts))
    arrived = tokens if scales is None else (tokens, scales)
    hidden = multiply(plan.first, x.dtype, rows, arrived, parts.w_gate_up, sizes)
    quantize, inner = parts.w_down.activations == "fp8", parts.w_down.shape[1]
    values, scales = activate(plan.activation, experts, inner, hidden, sizes, parts.b_gate_up, quantize)
    second = values if scales is None else (values, scales), parts.w_down, sizes
    return _multiply_and_combine(plan.second, out_dtype, rows, topk_weights, handle, parts.b_down, *second)


def _gather(
    options: Options,
    plan: GatheredLayerPlan,
    experts: Experts,
    layout: Layout,
    out_dtype: DTypeLike,
    x: Array,
    topk_idx: Array,
    topk_weights: Array,
    parts: ExpertWeights,
) -> Array:
    """Send all tokens to all ranks; each rank sums the outputs of its experts, and combine adds these sums."""
    from jax_ep.megakernels.fused_moe import fused_moe

    parts = parts._replace(w_gate_up=as_array(parts.w_gate_up), w_down=as_array(parts.w_down))
    if plan.dispatch is None or plan.combine is None:
        if x.shape[0] == 0:
            return x.astype(out_dtype)
        return fused_moe(experts, x, topk_idx, topk_weights, parts, out_dtype=out_dtype)
    to_ranks, top_k = plan.to_ranks(layout), topk_idx.shape[1]
    ranks = jnp.asarray(np.tile(np.arange(layout.num_ranks, dtype=np.int32), (x.shape[0], 1)))
    # Ids, which float32 represents exactly, and router weights travel where FP8 tokens have scales.
    routing = jnp.concatenate([topk_idx.astype(jnp.float32), topk_weights.astype(jnp.float32)], axis=1)
    x, ranks, ones = vary_alike((x, ranks, jnp.ones(ranks.shape, jnp.float32)))
    tokens, routings, sizes, handle = dispatch_tokens(plan.dispatch, to_ranks, None, (x, routing), ranks, None)
    routing, num_local = cast(Array, routings)[0], layout.num_local_experts
    has_token = jnp.arange(tokens.shape[1], dtype=jnp.int32)[:, None] < sizes[0]
    ids = jnp.where(has_token, routing[:, :top_k].astype(jnp.int32), -1)
    groups = local_groups(ids, rank_on(options.axis) * num_local, num_local).reshape(ids.shape)
    weights = jnp.where(groups < num_local, routing[:, top_k:], 0)
    y = fused_moe(experts, tokens[0], groups, weights, parts, out_dtype=out_dtype, num_ranks=layout.num_ranks)
    return combine_tokens(plan.combine, y[None], ones, handle)


def _one_token_per_expert(x: Array, topk_idx: Array, topk_weights: Array) -> tuple[Array, Array, Array]:
    """Return each token once for each of its experts, scaled by its weight, and weights of 1."""
    top_k = topk_idx.shape[1]
    valid = (topk_idx >= 0).reshape(-1, 1)
    # The weight of a slot without an expert may be anything.
    factors = jnp.where(valid, topk_weights.reshape(-1, 1), 0)
    wide = accumulation_dtype(x.dtype)
    scaled = (jnp.repeat(x, top_k, axis=0).astype(wide) * factors.astype(wide)).astype(x.dtype)
    return scaled, topk_idx.reshape(-1, 1), jnp.ones_like(factors)


@operation
@takes_global_arrays()
def low_latency_gemm_combine(
    lhs: Array,
    rhs: Array | QuantizedWeights | QArray,
    group_sizes: Array,
    topk_idx: Array,
    topk_weights: Array,
    handle: LowLatencyHandle,
    *,
    lhs_scales: Array | None = None,
    preferred_element_type: DTypeLike | None = None,
    expected_rows: int | None = None,
    axis_name: AxisName = "expert",
    schedule: Schedule | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Array:
    """Run `masked_grouped_gemm`, then `low_latency_combine`, in one kernel where the implementation has one.

    With `triton`, each tile of the GEMM is stored at the ranks of its tokens as soon as it is computed. It is for
    inference and has no gradient.

    Args:
      lhs: `[L, M, I]` rows in the layout of the dispatch; for this and all operands see `masked_grouped_gemm`.
      rhs: weights `[L, I, H]`, or `QuantizedWeights` of them.
      group_sizes: `[L]` int32, those of the dispatch.
      topk_idx: `[T, K]` int32, the ids of the dispatch.
      topk_weights: `[T, K]` float32 router weights.
      handle: `LowLatencyDispatched.handle`.
      lhs_scales: of an FP8 lhs.
      preferred_element_type: dtype of the rows on the wire and of the result; None: that of lhs, bfloat16 for FP8.
      expected_rows: how many rows an expert has on average.
      axis_name: the axis of the dispatch.
      schedule: see `dispatch`.
      implementation: see `dispatch`.

    Returns:
      `[T, H]`: `sum_k weight[t, k] * y[row of expert idx[t, k]]` with y the result of the GEMM, rounded to the
      dtype of the result before it is sent; added in float32.

    Raises:
      ValueError, TypeError, NotImplementedError: as `masked_grouped_gemm` and `low_latency_combine` do.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> x, idx = jnp.ones((2, 128), jnp.bfloat16), jnp.array([[0, 1], [1, -1]])
      >>> d = jax_ep.low_latency_dispatch(
      ...     x, idx, num_experts=2, max_tokens_per_rank=4, axis_name=(), quantize=False)
      >>> w, weights = jnp.ones((2, 128, 8), jnp.bfloat16), jnp.full((2, 2), 0.5)
      >>> arguments = d.tokens, w, d.group_sizes, idx, weights, d.handle
      >>> y = jax_ep.ops.moe_low_latency.low_latency_gemm_combine(*arguments, axis_name=())
      >>> y[:, 0].tolist()
      [128.0, 64.0]
    """
    function = "low_latency_gemm_combine"
    lhs, rows, rhs, group_sizes = checked_operands(function, lhs, rhs, group_sizes, lhs_scales)
    out_dtype = check_fp8.result_dtype(function, preferred_element_type, lhs)
    if expected_rows is not None:
        expected_rows = check.integer(function, "expected_rows", expected_rows)
    # The checks need only the shape of the result of the GEMM.
    y = jax.ShapeDtypeStruct((*lhs.shape[:2], rhs.shape[2]), out_dtype)
    layout = check.handle(function, handle, LowLatencyHandle, axis_name)
    topk_idx, topk_weights = check_combine(function, "lhs", y, topk_idx, topk_weights, layout)
    options = registry.options(function, axis_name, implementation, schedule, has_wire=False)
    operands = topk_weights, handle, rows, rhs, group_sizes
    topk_weights, handle, *second = cast(Any, vary_alike(operands, over=options.axis))
    plan = plan_serving.low_latency_gemm_combine(
        options, lhs.shape, lhs.dtype, rhs, out_dtype, layout, is_foreign=handle.group is None
    )
    return _multiply_and_combine(plan, out_dtype, expected_rows, topk_weights, handle, None, *second)


def _multiply_and_combine(
    plan: LowLatencyGemmPlan,
    out_dtype: DTypeLike,
    expected_rows: int | None,
    topk_weights: Array,
    handle: LowLatencyHandle,
    bias: Array | None,
    rows: Tokens,
    rhs: QuantizedWeights,
    group_sizes: Array,
) -> Array:
    """Run `low_latency_gemm_combine` on checked operands, with a bias `[L, H]` of the GEMM or None."""
    options = plan.options

    def unfused(rows: Tokens, rhs: QuantizedWeights, group_sizes: Array, *rest: Any) -> Array:
        topk_weights, handle, bias = rest
        y = multiply(plan.gemm, out_dtype, expected_rows, rows, rhs, group_sizes)
        if bias is not None:
            y = add_bias_of_blocks(y, bias)
        return combine_tokens(plan.combine, y, topk_weights, handle)

    def fused(rows: Tokens, rhs: QuantizedWeights, *others: Any) -> Array:
        from jax_ep.megakernels.low_latency import low_latency_gemm_combine

        operands = (prepared_rows(rows, rhs), rhs, *others)
        return low_latency_gemm_combine(options, *operands, out_dtype=out_dtype, expected_rows=expected_rows)

    operands = (rows, rhs, group_sizes, topk_weights, handle, bias)
    run_one = unfused if plan.fused is None else fused
    return call_without_gradient(_remedy(options), run_one, *operands)


def _remedy(options: Options) -> str:
    return f"{options.function} has no gradient: train with moe, or with a layer that is not for serving."
