"""The whole expert layer over a mesh axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jax_ep.core import check
from jax_ep.core.activations import HiddenRows
from jax_ep.core.autodiff import HIDDEN_NAME, OUTPUT_NAME
from jax_ep.core.balance import Balance
from jax_ep.core.check import operation
from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_matrices import ExpertWeights, LoraWeights, QArray, QuantizedWeights, as_array, base_of
from jax_ep.core.facts import ExchangeFacts, FusedMoEFacts, Part
from jax_ep.core.layout import add_bias
from jax_ep.core.mesh_axes import takes_global_arrays, vary_alike
from jax_ep.core.router import Router, RouterInputs
from jax_ep.formats import check_quantized
from jax_ep.formats.qarrays import own_weights
from jax_ep.ops import (
    balanced,
    exchange,
    hierarchical,
    moe_fp8,
    moe_lora,
    plan_lora,
    plan_serving,
    quantized_gemm,
    registry,
)
from jax_ep.ops import plan as plans
from jax_ep.ops.activation import activate, is_one_pass
from jax_ep.ops.activation_gemm_combine import bias_of_result, ffn_hidden, with_activated_rows, with_hidden_rows
from jax_ep.routing import topk_router
from jax_ep.types import Array, AxisName, Biases, Experts, Handle, Options, Schedule, Topology

type Plan = (
    plans.LayerPlan
    | tuple[plans.Fp8LayerPlan, plans.Fp8LayerPlan]
    | plan_serving.QuantizedLayerPlan
    | plan_lora.LoraLayerPlan
)


@operation
@takes_global_arrays(keeps_rows=True)
def moe(
    x: Array,
    topk_idx: Array,
    topk_weights: Array,
    w_gate_up: Array | QuantizedWeights | QArray | LoraWeights,
    w_down: Array | QuantizedWeights | QArray | LoraWeights,
    *,
    num_experts: int,
    experts: Experts | None = None,
    biases: Biases | None = None,
    axis_name: AxisName = "expert",
    capacity: int | None = None,
    balance: Balance | None = None,
    recipe: str | None = None,
    preferred_element_type: DTypeLike | None = None,
    schedule: Schedule | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Array:
    """Run the expert layer: `y[t] = sum_k weight[t, k] * (act(x[t] @ gate) * (x[t] @ up)) @ down`, expert `idx[t, k]`.

    It is differentiable in x, the router weights, the expert weights and the biases. For the backward pass it keeps x,
    the result of the first GEMM and the routing; the schedule decides whether it also keeps dispatched tokens. Under
    `jax.checkpoint` a policy can save or recompute the names `jax_ep.tokens` (dispatched tokens), `jax_ep.hidden`
    (result of the first GEMM, and the routing) and `jax_ep.output`.

    Args:
      x: `[T, H]` tokens of this rank.
      topk_idx: `[T, K]` int32 expert ids; -1 is no expert, as for padding, and costs nothing.
      topk_weights: `[T, K]` router weights in float32, or in a narrower dtype that is widened; they scale the rows in
        float32 before the second GEMM.
      w_gate_up: `[L, H, 2 * I]`, gate in the first I columns and up in the last; `[L, H, I]` for experts without a
        gate; any number of columns for a custom activation. With `recipe="fp8"` in any floating dtype. Or
        `QuantizedWeights`: those with a master are for `recipe="fp8"`, and their gradient is in `master`. Others are
        for inference and have no gradient; their GEMMs run in the dtype of x, or as their `activations` say. With
        "fp8", tokens are sent in FP8, too. Or `LoraWeights`, frozen weights with trained adapters: the GEMMs of such
        a layer are separate kernels, and quantized weights have a gradient of the tokens. A `qwix.QArray` is converted
        in each call, see `jax_ep.integrations.qwix.from_qarray`.
      w_down: `[L, I, H]`, or `QuantizedWeights`, a `qwix.QArray` or `LoraWeights` of it.
      num_experts: E over all ranks.
      experts: what an expert computes, see `Experts`; None: `Experts()`.
      biases: `(b_gate_up [L, 2 * I], b_down [L, H])` of the two GEMMs, or None for one of them; router weights
        scale `b_down`, too. None: no biases.
      axis_name: mesh axis, or tuple of axes, that the experts are spread over; or a `Topology`: tokens then cross its
        node axis once per node, and so do their sums.
      capacity: static number of rows per rank, see `dispatch`; None: nothing is dropped. Not with several blocks of a
        `Topology`.
      balance: compute at most `balance.rows * T * K` rows per rank, with copies of hot experts on other ranks, and drop
        nothing; see `Balance`. None: experts stay on their ranks. Not with a `capacity` or a `Topology`.
      recipe: None: compute in the dtype of x. "fp8": run the GEMMs of both passes in FP8, and send FP8. Each operand
        has one scale for 128 elements along the axis that is summed over; weights have one for a block of 128 by 128.
        Rounding is differentiated as the identity, sums run in float32, and gradients have the dtypes of the
        parameters. Each call quantizes the tokens once, and weights that are not `QuantizedWeights`.
      preferred_element_type: dtype of the result, such as float32 for sums of bfloat16 experts that are not rounded
        again; GEMMs and the wire keep the dtype of x. None: that of x.
      schedule: how kernels share the GPU, see `Schedule`: its modes apply to both GEMMs and their gradients.
        None: the package chooses.
      implementation: see `dispatch`.

    Returns:
      `[T, H]`.

    Raises:
      ValueError: shapes, sizes, axes or an activation that do not fit; an unknown recipe; with `recipe="fp8"`, an H or
        I that is not a multiple of 128, a custom activation, or another wire dtype.
      TypeError: unsupported or different dtypes; a second derivative with `recipe="fp8"` or `balance`.
      NotImplementedError: no implementation supports the call.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> x, idx, weights = jnp.ones((2, 4)), jnp.array([[0], [1]]), jnp.ones((2, 1))
      >>> w_gate_up, w_down = jnp.ones((2, 4, 6)), jnp.ones((2, 3, 4))
      >>> experts = jax_ep.Experts("relu", clamp=3.0)
      >>> jax_ep.moe(x, idx, weights, w_gate_up, w_down, num_experts=2, axis_name=(), experts=experts)[0, 0].item()
      27.0

    Source: Mixture of Experts as in Mixtral (arXiv:2401.04088) with GLU experts (arXiv:2002.05202); "fp8" as in
    DeepSeek-V3 (arXiv:2412.19437, section 3.3); what is kept is as in SonicMoE (arXiv:2512.14080).
    """
    x = check.plain_tokens("moe", x)
    w_gate_up, w_down = own_weights("moe", "w_gate_up", w_gate_up), own_weights("moe", "w_down", w_down)
    recipe, schedule = check.recipe("moe", recipe), registry.checked_schedule("moe", schedule, axis_name)
    balanced.check_balance("moe", balance, axis_name, capacity)
    wire_dtype = FP8 if recipe == "fp8" else schedule.wire_dtype
    for name, value in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        if value is None:
            check.array("moe", name, value, "[T, K]")  # raises
    if isinstance(axis_name, Topology):
        inside = partial(moe, w_gate_up=w_gate_up, w_down=w_down, experts=experts, biases=biases, recipe=recipe)
        inside = partial(inside, schedule=dataclasses.replace(schedule, wire_dtype=None), implementation=implementation)
        tokens, sum_dtype = (x, topk_idx, topk_weights), preferred_element_type
        return _over_nodes(inside, tokens, num_experts, axis_name, capacity, wire_dtype, sum_dtype)
    options = registry.options("moe", axis_name, implementation, schedule)
    options = dataclasses.replace(options, recipe=recipe, wire_dtype=wire_dtype)
    parts = ExpertWeights(w_gate_up, w_down, *check.biases("moe", biases))
    routing = topk_idx, topk_weights
    layer, given, parts = _checked(options, x, routing, parts, num_experts, experts, capacity, preferred_element_type)
    run = _on_tokens if balance is None or given.facts.layout.num_ranks == 1 else partial(_balanced, balance)
    return checkpoint_name((run if x.shape[0] else _without_tokens)(layer, given, parts), OUTPUT_NAME)


@operation
@takes_global_arrays(keeps_rows=True)
def routed_moe(
    x: Array,
    logits: Array,
    k: int,
    w_gate_up: Array | QuantizedWeights | QArray | LoraWeights,
    w_down: Array | QuantizedWeights | QArray | LoraWeights,
    *,
    router: Router | None = None,
    bias: Array | None = None,
    token_mask: Array | None = None,
    experts: Experts | None = None,
    biases: Biases | None = None,
    preferred_element_type: DTypeLike | None = None,
    schedule: Schedule | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Array, Array]:
    """Choose experts and run their layer on one device: `topk_router` and `fused_moe`, for few tokens in one launch.

    If the layer is one launch for at most 512 assignments, that launch chooses the experts, too, unless they form
    groups. In all other cases XLA chooses them. `jax_ep.explain` shows which of the two does, as the part "router". The
    gradients are those of the two functions, and take several launches.

    Args:
      x: `[T, H]` tokens.
      logits: `[T, E]` floating, see `topk_router`.
      k: experts per token.
      w_gate_up: `[E, H, 2 * I]`, see `moe`.
      w_down: `[E, I, H]`, see `moe`.
      router: how experts are chosen, see `Router`, without identity experts; None: `Router()`.
      bias: `[E]`, added to the scores for selection only, see `topk_router`.
      token_mask: `[T]` bool, False for tokens without experts, whose rows of the output are zero.
      experts: see `moe`.
      biases: see `moe`.
      preferred_element_type: see `moe`.
      schedule: see `moe`.
      implementation: see `dispatch`.

    Returns:
      The output `[T, H]`, and the ids `[T, k]` int32 of the chosen experts, best first; -1 for none.

    Raises:
      ValueError, TypeError, NotImplementedError: as `topk_router` and `moe` do.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep.serving import routed_moe
      >>> w_gate_up, w_down = jnp.ones((3, 4, 6)), jnp.ones((3, 3, 4))
      >>> y, topk_idx = routed_moe(jnp.ones((2, 4)), jnp.eye(2, 3), 1, w_gate_up, w_down)
      >>> y.shape, topk_idx.tolist()
      ((2, 4), [[0], [1]])

    Source: the router in the launch of the layer, as in FlashInfer's MonoMoE.
    """
    function = "routed_moe"
    x, logits = check.plain_tokens(function, x), check.floating(function, "logits", logits, "[T, E]")
    router = check.value_of(function, "router", router, Router, "jax_ep.Router") or Router()
    if router.num_identity_experts:
        raise ValueError(
            f"{function}: num_identity_experts={router.num_identity_experts} of the Router, expected 0; call"
            " topk_router, identity_experts and fused_moe."
        )
    check.size(function, "T of logits", logits.shape[0], x.shape[0], "pass one row per token of x")
    routing = topk_router(logits, k, router=router, bias=bias, token_mask=token_mask)
    pair = routing.topk_idx, routing.topk_weights.astype(jnp.float32)  # of float64 logits they are float64
    options = registry.options(function, (), implementation, registry.checked_schedule(function, schedule, ()))
    w_gate_up, w_down = own_weights(function, "w_gate_up", w_gate_up), own_weights(function, "w_down", w_down)
    parts = ExpertWeights(w_gate_up, w_down, *check.biases(function, biases))
    layer, given, parts = _checked(options, x, pair, parts, logits.shape[1], experts, None, preferred_element_type)
    if not x.shape[0]:
        return _without_tokens(layer, given, parts), routing.topk_idx
    whole = _single_launch(layer, given.options, given.facts, parts)
    if plan_serving.router(whole, layer.experts, router, pair[0].shape[1], x, logits, parts).implementation == "xla":
        return checkpoint_name(_on_tokens(layer, given, parts), OUTPUT_NAME), routing.topk_idx
    arrays = RouterInputs(logits, bias, token_mask), given.topk_idx, given.x, given.topk_weights, parts
    y, topk_idx = _routed_launch(layer, given.options, given.facts, router, *vary_alike(arrays))
    return checkpoint_name(y, OUTPUT_NAME), topk_idx


def _checked(
    options: Options,
    x: Array,
    routing: tuple[Array, Array],
    parts: ExpertWeights,
    num_experts: int,
    experts: Experts | None,
    capacity: int | None,
    sum_dtype: DTypeLike | None,
) -> tuple[_Layer, exchange.Checked, ExpertWeights]:
    """Check the arguments of a layer of tokens `[T, H]` against each other."""
    function = options.function
    experts, sizes, parts = _check_experts(options, x.shape, x.dtype, parts, num_experts, experts)
    layer = _Layer(experts, sizes, capacity, check.result_dtype(function, sum_dtype, x.dtype))
    given = exchange.checked(options, x, *routing, num_experts=num_experts, capacity=capacity)
    return layer, exchange.without_unused_rows(given), parts


class _Layer(NamedTuple):
    """Checked arguments of `moe` that are not arrays."""

    experts: Experts
    sizes: plans.LayerSizes
    capacity: int | None
    sum_dtype: DTypeLike


def _over_nodes(
    inside: Callable[..., Array],
    tokens: tuple[Array, Array, Array],
    num_experts: int,
    topology: Topology,
    capacity: int | None,
    wire_dtype: DTypeLike | None,
    sum_dtype: DTypeLike | None,
) -> Array:
    """`moe`, as `inside`, in each node of a `Topology`, between two all-to-alls over the nodes."""
    if capacity is not None and topology.num_blocks > 1:
        raise ValueError(
            f"moe: {capacity=} with num_blocks={topology.num_blocks} of the Topology, expected one of the two, since"
            " each block has its own rows, fewer than the whole; leave one out."
        )
    wires = wire_dtype, wire_dtype
    inside = partial(inside, capacity=capacity)
    y = hierarchical.layer("moe", inside, tokens, num_experts, topology, wires, sum_dtype)
    return checkpoint_name(y, OUTPUT_NAME)


def _balanced(balance: Balance, layer: _Layer, given: exchange.Checked, parts: ExpertWeights) -> Array:
    """`moe` in passes of at most `balance.rows * T * K` rows per rank."""
    options = given.options
    arrays = given.x, given.topk_idx, given.topk_weights, parts
    experts, closed = _without_closure(layer, balance, given.topk_idx, vary_alike(arrays, over=options.axis)[0])

    # It is static, so it must not close over arrays.
    def one_pass(
        x: Array, topk_idx: Array, topk_weights: Array, parts: ExpertWeights, closed: list[Array], **sizes: Any
    ) -> Array:
        dtype = sizes.pop("preferred_element_type")
        tokens = exchange.checked(options, x, topk_idx, topk_weights, **sizes)
        one = _Layer(experts(closed), layer.sizes, sizes["capacity"], dtype)
        return _on_tokens(one, tokens, parts, after=topk_idx)

    sizes: dict[str, Any] = {"num_experts": given.facts.layout.num_experts, "options": options}
    return balanced.run(balance, one_pass, *arrays, closed, **sizes, sum_dtype=layer.sum_dtype)


def _without_closure(
    layer: _Layer, balance: Balance, topk_idx: Array, x: Array
) -> tuple[Callable[[list[Array]], Experts], list[Array]]:
    """Return the arrays that the activation closes over, and the experts as a function of such arrays."""
    if not callable(function := layer.experts.activation):
        return lambda closed: layer.experts, []
    hidden = jnp.broadcast_to(x[:1, :1], (balance.rows_per_rank(topk_idx.size), layer.sizes.columns))
    traced = jax.make_jaxpr(lambda rows: check.activation_rows("moe", function(rows), rows, None))(hidden)

    def experts(closed: list[Array]) -> Experts:
        run = jax.extend.core.jaxpr_as_fun(traced.replace(consts=closed))
        return dataclasses.replace(layer.experts, activation=lambda rows: run(rows)[0])

    return experts, traced.consts


def _without_tokens(layer: _Layer, given: exchange.Checked, parts: ExpertWeights) -> Array:
    """Return the empty result; XLA's compiler for GPUs crashes at some programs without rows."""
    _plan(layer, given.options, given.facts, parts)  # the same errors
    # Gradients are zeros that have the shardings of what they belong to.
    arrays = jax.tree.leaves((given.topk_weights, parts))
    zeros = given.x + sum(jnp.sum(a[:0]).astype(given.x.dtype) for a in arrays)
    return zeros.astype(layer.sum_dtype)


def _on_tokens(layer: _Layer, given: exchange.Checked, parts: ExpertWeights, *, after: Array | None = None) -> Array:
    """`moe` of checked arguments: in one kernel, or as its plan says.

    Launches of the backward pass follow `after`, computed again there.
    """
    options, facts = given.options, given.facts
    if _single_launch(layer, options, facts, parts) is not None:
        arrays = vary_alike((given.topk_idx, given.x, given.topk_weights, parts))
        return _in_one_launch(layer, options, facts, *arrays)
    plan = _plan(layer, options, facts, parts)
    whole = plan[0].exchange if isinstance(plan, tuple) else plan.exchange
    (x, weights, handle), parts = exchange.located(whole, given, parts)
    handle = checkpoint_name(handle, HIDDEN_NAME)
    handle = handle if after is None else exchange.later(handle, after)
    if isinstance(plan, plan_lora.LoraLayerPlan):
        return moe_lora.run(plan, x, weights, handle, parts)
    if isinstance(plan, plan_serving.QuantizedLayerPlan):
        return _by_quantized(plan, x, weights, handle, parts)
    if isinstance(plan, tuple):
        return _by_fp8(plan, x, weights, handle, parts)
    run = with_hidden_rows if plan.activated is None else with_activated_rows
    return run(plan, x, weights, handle, parts)


def _check_experts(
    options: Options,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    parts: ExpertWeights,
    num_experts: int,
    experts: Experts | None,
) -> tuple[Experts, plans.LayerSizes, ExpertWeights]:
    """Check experts, their sizes and their weights against each other and the shape of the tokens."""
    function = options.function
    num_experts, num_ranks = check.experts(function, num_experts, options.axis)
    num_local, (num_tokens, hidden) = num_experts // num_ranks, shape
    bases = parts._replace(w_gate_up=base_of(parts.w_gate_up), w_down=base_of(parts.w_down))
    experts, found = check_quantized.layer(function, experts, bases, num_local, hidden, dtype, recipe=options.recipe)
    w_gate_up, w_down = map(as_array, found[:2])
    is_quantized = isinstance(w_gate_up, QuantizedWeights)
    if options.recipe is not None or is_quantized:
        check.known_rows(function, "x", "in FP8 and with quantized experts", num_tokens)
    if options.recipe is not None:
        moe_fp8.check_layer(options, experts, found.b_gate_up, w_down)
    elif is_quantized:
        check_quantized.no_fused_gemms(options)
    if _has_adapters(parts):
        w_gate_up, w_down = moe_lora.checked_layer(options, parts, (w_gate_up, w_down), dtype)
    sizes = plans.LayerSizes(w_gate_up.shape[2], w_down.shape[1], found.b_gate_up is not None)
    return experts, sizes, found._replace(w_gate_up=w_gate_up, w_down=w_down)


def _has_adapters(parts: ExpertWeights) -> bool:
    return any(isinstance(w, LoraWeights) for w in parts[:2])


def _plan(layer: _Layer, options: Options, facts: ExchangeFacts, parts: ExpertWeights) -> Plan:
    """Resolve the layer of these arguments."""
    w_gate_up, w_down = parts[:2]
    if _has_adapters(parts):
        return plan_lora.lora_layer(options, facts, layer.experts, layer.sizes, (w_gate_up, w_down), layer.sum_dtype)
    if options.recipe is not None:
        up, down = (getattr(w, "master", w).dtype for w in (w_gate_up, w_down))
        return plans.fp8_layer(options, facts, layer.experts, layer.sizes, layer.sum_dtype, (up, down))
    if isinstance(w_gate_up, QuantizedWeights):
        weights = w_gate_up, w_down
        return plan_serving.quantized_layer(options, facts, layer.experts, layer.sizes, weights, layer.sum_dtype)
    return plans.layer(options, facts, layer.experts, layer.sizes, layer.sum_dtype)


def _single_launch(layer: _Layer, options: Options, facts: ExchangeFacts, parts: ExpertWeights) -> Part | None:
    """Resolve the kernel that is the whole layer; None: there is none, or several are faster."""
    num_slots = facts.layout.num_tokens * facts.layout.top_k
    whole = FusedMoEFacts(facts.dtype, layer.experts, num_slots, *map(base_of, parts[:2]))
    others = {"recipe": options.recipe, "wire_dtype": options.wire_dtype, "capacity": layer.capacity}
    others["LoraWeights"] = _has_adapters(parts) or None
    return plan_serving.single_launch(options, whole, [name for name, value in others.items() if value is not None])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _in_one_launch(
    layer: _Layer,
    options: Options,
    facts: ExchangeFacts,
    topk_idx: Array,
    x: Array,
    topk_weights: Array,
    parts: ExpertWeights,
) -> Array:
    """`moe` on one device by the launch that is all of it; for a gradient the layer runs in several launches."""
    from jax_ep.megakernels.fused_moe import fused_moe

    return fused_moe(layer.experts, x, topk_idx, topk_weights, parts, out_dtype=layer.sum_dtype)


type _Pull = Callable[[Array], tuple[Any, ...]]


def _one_launch_forward(
    layer: _Layer, options: Options, facts: ExchangeFacts, topk_idx: Array, *operands: Any
) -> tuple[Array, _Pull]:
    quantized_gemm.refuse_gradient(options, operands[2][:2])
    apart = dataclasses.replace(options, schedule=dataclasses.replace(options.schedule, single_launch=False))

    def unfused(x: Array, topk_weights: Array, parts: ExpertWeights) -> Array:
        return _on_tokens(layer, exchange.Checked(apart, facts, x, topk_idx, topk_weights, None), parts)

    return jax.vjp(unfused, *operands)


_in_one_launch.defvjp(_one_launch_forward, lambda layer, options, facts, pull, cotangent: (None, *pull(cotangent)))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _routed_launch(
    layer: _Layer,
    options: Options,
    facts: ExchangeFacts,
    router: Router,
    inputs: RouterInputs,
    topk_idx: Array,
    x: Array,
    topk_weights: Array,
    parts: ExpertWeights,
) -> tuple[Array, Array]:
    """`routed_moe` by one launch, which does not read ids and weights: a gradient does, and reaches the logits so."""
    from jax_ep.megakernels.fused_moe import routed_moe

    return routed_moe(layer.experts, router, facts.layout.top_k, x, inputs, parts, out_dtype=layer.sum_dtype)


def _routed_forward(
    layer: _Layer, options: Options, facts: ExchangeFacts, router: Router, inputs: RouterInputs, *operands: Any
) -> tuple[tuple[Array, Array], _Pull]:
    y, pull = _one_launch_forward(layer, options, facts, *operands)
    return (y, operands[0]), pull


_routed_launch.defvjp(
    _routed_forward, lambda layer, options, facts, router, pull, cotangents: (None, None, *pull(cotangents[0]))
)


def _by_fp8(
    plan: tuple[plans.Fp8LayerPlan, plans.Fp8LayerPlan], x: Array, weights: Array, handle: Handle, parts: ExpertWeights
) -> Array:
    """Run `moe` with `recipe="fp8"`; the backward pass keeps the result of the first GEMM."""
    first, second = plan
    hidden, row_weights = moe_fp8.dispatch_and_multiply(first, x, weights, parts.w_gate_up, handle)
    between = ffn_hidden(second.activation.experts, hidden, row_weights, parts)
    return moe_fp8.multiply_and_combine(second, between, parts.w_down, handle)


def _by_quantized(
    plan: plan_serving.QuantizedLayerPlan, x: Array, weights: Array, handle: Handle, parts: ExpertWeights
) -> Array:
    """`moe` of `QuantizedWeights`, one operation after another."""
    options, experts, sizes = plan.options, plan.activation.experts, handle.group_sizes
    first, second = (w.activations == "fp8" for w in (parts.w_gate_up, parts.w_down))
    if first:
        dispatch = partial(exchange.dispatch_quantized, plan.exchange)
        tokens, row_weights = quantized_gemm.without_gradient(options, dispatch, x, weights, handle)
        hidden = quantized_gemm.multiply_fp8(plan.first, x.dtype, tokens, parts.w_gate_up, sizes)
    else:
        rows, row_weights = exchange.dispatch_tokens(plan.exchange, x, weights, handle)
        hidden = quantized_gemm.multiply(plan.first, x.dtype, rows, parts.w_gate_up, sizes)
    row_weights, inner = cast(Array, row_weights), parts.w_down.shape[1]
    hidden_rows = HiddenRows(hidden, row_weights, parts.b_gate_up, sizes)
    if second and is_one_pass(experts, parts.b_gate_up):
        between = partial(quantized_gemm.fp8_operands(plan.second).activate_quantized, experts)
        quantized = quantized_gemm.without_gradient(options, between, hidden_rows)
        results = quantized_gemm.multiply_fp8(plan.second, x.dtype, quantized, parts.w_down, sizes)
    else:
        rows = activate(plan.activation, inner, hidden_rows)
        results = quantized_gemm.multiply(plan.second, x.dtype, rows, parts.w_down, sizes)
    bias = bias_of_result(experts, parts.b_down, row_weights)
    if bias is not None:
        results = add_bias(results, bias, sizes)
    return exchange.combine_tokens(plan.back, results, None, handle)[0]
