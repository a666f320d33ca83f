"""Plans of inference: quantized weights, masked blocks, decode-sized batches, the layer of one device in one launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_matrices import ExpertWeights, QuantizedWeights, as_array, is_stored_transposed
from jax_ep.core.facts import (
    ExchangeFacts,
    Facts,
    FusedMoEFacts,
    GemmFacts,
    LowLatencyFacts,
    LowLatencyGemmFacts,
    MaskedActivationFacts,
    MaskedGemmFacts,
    Part,
    QuantizedGemmFacts,
)
from jax_ep.core.router import Router
from jax_ep.formats import format_of, needs_decoder
from jax_ep.ops import registry
from jax_ep.ops.plan import (
    ActivationPlan,
    AroundExchange,
    ExchangePlan,
    LayerSizes,
    activation,
    exchange,
    fp8_operands,
    resolution,
)
from jax_ep.types import Array, Experts, Layout, Options


@dataclasses.dataclass(frozen=True)
class QuantizedGemmPlan:
    """GEMM of rows and quantized weights: of "quantized_gemm", or of "grouped_gemm".

    The latter takes both in FP8, where the weights ask for it and `operands` rounds the rows, or dequantized weights.
    """

    options: Options
    gemm: Part
    operands: Part | None

    @property
    def dequantizes(self) -> bool:
        """Whether weights are dequantized before the GEMM."""
        return self.gemm.operation == "grouped_gemm" and self.operands is None


@resolution
def quantized_gemm(
    options: Options,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    rhs: QuantizedWeights,
    out_dtype: DTypeLike,
    rows_in_use: int | None = None,
) -> QuantizedGemmPlan:
    """Resolve the GEMM of rows of this shape, `[M, K]` or `[G, M, K]`, and quantized weights.

    About `rows_in_use` of M rows are in groups; None: all.
    """
    multiplied, out = multiplied_dtype(dtype, rhs), jnp.dtype(out_dtype)
    operands = fp8_operands(options, dtype, shape) if rhs.activations == "fp8" else None
    groups, depth, columns = rhs.shape
    dense = GemmFacts(multiplied, shape[0], depth, columns, groups, out)
    if multiplied == FP8 and format_of(rhs).is_fp8_operand and len(shape) == 2:
        return QuantizedGemmPlan(options, registry.choose(options, dense), operands)
    part = registry.choose(options, QuantizedGemmFacts(multiplied, shape, rhs, out))
    if part.implementation == "triton" and rhs.activations is None and len(shape) == 2:
        from jax_ep.megakernels.quantized_gemm import dequantizes_first

        rows = shape[0] if rows_in_use is None else rows_in_use
        if dequantizes_first(rows // max(groups, 1), multiplied, rhs):
            part = registry.choose(options, dense)
    return QuantizedGemmPlan(options, part, operands)


@resolution
def masked_gemm(
    options: Options, shape: tuple[int, ...], dtype: DTypeLike, rhs: QuantizedWeights, out_dtype: DTypeLike
) -> QuantizedGemmPlan:
    """Resolve the masked grouped GEMM of blocks `[L, M, K]`: of "quantized_gemm", or else of "masked"."""
    if needs_decoder(rhs):
        return quantized_gemm(options, shape, dtype, rhs, out_dtype)
    facts = MaskedGemmFacts(multiplied_dtype(dtype, rhs), shape[2])
    return QuantizedGemmPlan(options, registry.choose(options, facts), None)


@dataclasses.dataclass(frozen=True)
class PartPlan:
    """A call with one part."""

    options: Options
    part: Part


@resolution
def one_part(options: Options, facts: Facts) -> PartPlan:
    """Resolve a call with one part."""
    return PartPlan(options, registry.choose(options, facts))


@dataclasses.dataclass(frozen=True)
class LowLatencyGemmPlan:
    """The second GEMM of experts and combine, in one launch or in two."""

    gemm: QuantizedGemmPlan
    combine: PartPlan
    fused: Part | None

    @property
    def options(self) -> Options:
        """Options of the call."""
        return self.combine.options


@resolution
def low_latency_gemm_combine(
    options: Options,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    rhs: QuantizedWeights,
    out_dtype: DTypeLike,
    layout: Layout,
    *,
    is_foreign: bool = False,
) -> LowLatencyGemmPlan:
    """Resolve the GEMM of rows `[L, M, I]` of `dtype` and weights `[L, I, H]`, and the combine of its rows."""
    out = jnp.dtype(out_dtype)
    combine = one_part(options, LowLatencyFacts(out, rhs.shape[2], layout, is_foreign))
    multiplied = multiplied_dtype(dtype, rhs)
    name, facts = combine.part.implementation, LowLatencyGemmFacts(multiplied, shape, rhs, out, layout)
    fused = None if registry.unsupported_reason(name, facts, options) else Part("low_latency", name)
    return LowLatencyGemmPlan(masked_gemm(options, shape, dtype, rhs, out), combine, fused)


@dataclasses.dataclass(frozen=True)
class LowLatencyLayerPlan:
    """The expert layer of decode-sized batches."""

    dispatch: PartPlan
    first: QuantizedGemmPlan
    activation: PartPlan
    second: LowLatencyGemmPlan


@resolution
def low_latency_layer(
    options: Options, experts: Experts, layout: Layout, weights: ExpertWeights, dtype: DTypeLike, out_dtype: DTypeLike
) -> LowLatencyLayerPlan:
    """Resolve the layer of tokens of `dtype`."""
    up, down = weights[:2]
    wire, second = (FP8 if w.activations == "fp8" else jnp.dtype(dtype) for w in (up, down))
    shape = layout.num_local_experts, layout.num_ranks * layout.num_tokens
    quantize = second == FP8 and not callable(experts.activation)
    return LowLatencyLayerPlan(
        one_part(options, LowLatencyFacts(wire, up.shape[1], layout)),
        masked_gemm(options, (*shape, up.shape[1]), wire, up, dtype),
        one_part(options, MaskedActivationFacts(jnp.dtype(dtype), quantize)),
        low_latency_gemm_combine(options, (*shape, down.shape[1]), second, down, out_dtype, layout),
    )


@dataclasses.dataclass(frozen=True)
class GatheredLayerPlan:
    """The expert layer of decode-sized batches, one launch on each rank for the tokens of all ranks."""

    dispatch: PartPlan | None  # of all tokens to all ranks; None: there is one rank
    layer: Part
    combine: PartPlan | None  # of one row per token and rank

    @staticmethod
    def to_ranks(layout: Layout) -> Layout:
        """Return the layout of an all-to-all whose experts are the ranks."""
        ranks = layout.num_ranks
        return dataclasses.replace(layout, num_experts=ranks, top_k=ranks, capacity=ranks * layout.num_tokens)


@resolution
def gathered_layer(
    options: Options, experts: Experts, layout: Layout, weights: ExpertWeights, dtype: DTypeLike, out_dtype: DTypeLike
) -> GatheredLayerPlan | None:
    """Resolve whether the layer of tokens of `dtype` gathers them, as the schedule says or where that is faster.

    Raises:
      ValueError: the schedule asks for it, and no launch is the layer of a rank.
    """
    if is_stored_transposed(weights.w_gate_up) and not options.schedule.single_launch:
        return None  # such a launch would copy these weights
    up, down = map(as_array, weights[:2])
    facts = FusedMoEFacts(jnp.dtype(dtype), experts, layout.num_slots, up, down, layout.num_ranks)
    layer = single_launch(dataclasses.replace(options, axis=()), facts, ())
    if layer is None:
        return None
    if layout.num_ranks == 1:
        return GatheredLayerPlan(None, layer, None)
    to_ranks, hidden = GatheredLayerPlan.to_ranks(layout), down.shape[2]
    sent, returned = (LowLatencyFacts(jnp.dtype(kind), hidden, to_ranks) for kind in (dtype, out_dtype))
    if options.schedule.single_launch is None:
        from jax_ep.megakernels.fused_moe import gathers

        if registry.unsupported_reason(layer.implementation, sent, options) is not None or not gathers(facts):
            return None
    return GatheredLayerPlan(one_part(options, sent), layer, one_part(options, returned))


def multiplied_dtype(dtype: DTypeLike, rhs: QuantizedWeights) -> np.dtype:
    """Return the dtype of rows that a GEMM with these weights reads."""
    return {None: jnp.dtype(dtype), "fp8": FP8, "int8": jnp.dtype(jnp.int8)}[rhs.activations]


@dataclasses.dataclass(frozen=True)
class QuantizedLayerPlan(AroundExchange):
    """The expert layer of quantized weights, one operation after another; `back` is the plan of combine."""

    back: ExchangePlan
    first: QuantizedGemmPlan
    second: QuantizedGemmPlan
    activation: ActivationPlan


@resolution
def quantized_layer(
    options: Options,
    facts: ExchangeFacts,
    experts: Experts,
    sizes: LayerSizes,
    weights: tuple[QuantizedWeights, QuantizedWeights],
    sum_dtype: DTypeLike,
) -> QuantizedLayerPlan:
    """Resolve the layer of quantized weights."""
    layout, dtype = facts.layout, facts.dtype
    w_gate_up, w_down = weights
    # What is multiplied in FP8 loses nothing by travelling so.
    wire = FP8 if w_gate_up.activations == "fp8" else None
    whole = exchange(options, dataclasses.replace(facts, columns=sizes.columns), wire_dtype=wire)
    back = whole.with_sums(sum_dtype)
    if wire is not None:
        whole = dataclasses.replace(whole, options=dataclasses.replace(options, wire_dtype=wire))
    rows, in_use = layout.capacity, min(layout.capacity, layout.num_tokens * layout.top_k)
    return QuantizedLayerPlan(
        whole,
        back,
        quantized_gemm(options, (rows, facts.hidden), dtype, w_gate_up, dtype, in_use),
        quantized_gemm(options, (rows, sizes.intermediate), dtype, w_down, dtype, in_use),
        activation(options, experts, dtype, rows, sizes.columns, layout.num_local_experts),
    )


@resolution
def single_launch(options: Options, facts: FusedMoEFacts, others: Sequence[str]) -> Part | None:
    """Resolve whether the layer of one device is one launch, as the schedule says or where that is faster; None: no.

    `others` are the keywords given that such a launch does not have.

    Raises:
      ValueError: the schedule asks for it, and there is none.
    """
    schedule = options.schedule
    if schedule.single_launch is False:
        return None
    if schedule.single_launch:
        part = registry.choose(options, facts)
        reason = _reason_against_one_launch(options, part.implementation, facts, others)
        if reason is not None:
            raise ValueError(f"{options.function}: single_launch=True, but {reason}; leave it None in the schedule.")
        return part
    modes = schedule.dispatch_mode, schedule.combine_mode
    name = (options.implementation or registry.available("fused_moe"))[0]
    if modes != (None, None) or registry.unsupported_reason(name, facts, options) is not None:
        return None
    if _reason_against_one_launch(options, name, facts, others) is not None:
        return None
    from jax_ep.megakernels.fused_moe import is_fastest

    num_experts, hidden, columns = facts.w_gate_up.shape
    gemm_facts = GemmFacts(facts.dtype, facts.own_slots, hidden, columns, num_experts, facts.dtype)
    specialized = registry.is_specialized(name, gemm_facts)
    if is_fastest(facts.own_slots, facts.dtype, facts.w_gate_up, facts.w_down, specialized=specialized):
        return Part("fused_moe", name)
    return None


@resolution
def router(
    layer: Part | None, experts: Experts, chosen_by: Router, top_k: int, x: Array, logits: Array, parts: ExpertWeights
) -> Part:
    """Resolve what chooses experts: the launch that is the whole `layer`, or XLA where there is a reason against it."""
    if layer is None:
        return Part("router", "xla", "the layer is not one launch")
    from jax_ep.megakernels.fused_moe import reason_against_router

    reason = reason_against_router(experts, chosen_by, top_k, x, logits, parts)
    return Part("router", "xla" if reason else layer.implementation, reason)


def _reason_against_one_launch(options: Options, name: str, facts: FusedMoEFacts, others: Sequence[str]) -> str | None:
    if options.axis:
        return f"experts are spread over {options.axis}, and the single kernel is for one device"
    if others:
        return f"no such kernel exists with {', '.join(others)}"
    weights = facts.w_gate_up, facts.w_down
    from jax_ep.megakernels.fused_moe import fuses

    if fuses(facts.experts, facts.num_slots, facts.dtype, *weights):
        return None
    shapes = " and ".join(str(tuple(w.shape)) for w in weights)
    return (
        f"{name!r} has no such kernel for {facts.num_slots} assignments of {facts.dtype} tokens, weights {shapes} and"
        f" {facts.experts}: it takes tokens of 16 bits, sizes that are multiples of 8, or of 16 or 32 where weights"
        " have 8 or 4 bits, scales of 16 to 128 elements in int4, no tokens in int8, and no custom activation"
    )
