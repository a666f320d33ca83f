"""What a public call runs, resolved once: the implementation and mode of each part, forward and backward.

A plan is frozen and hashable. It is the static argument of the custom VJPs, carries the checked keywords of the call as
`options`, and is passed on: nothing below chooses again. The backward pass runs parts of the same plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep.core import fp8_columns, operations
from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_matrices import QuantizedExperts
from jax_ep.core.facts import (
    ActivationFacts,
    ExchangeFacts,
    Facts,
    Fp8OperandFacts,
    FusedFacts,
    FusedModes,
    FusedMoEFacts,
    GemmActivationFacts,
    GemmFacts,
    LowLatencyFacts,
    LowLatencyGemmFacts,
    MaskedActivationFacts,
    MaskedGemmFacts,
    Part,
    QuantizedGemmFacts,
    SortFacts,
    Weights,
)
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.formats import check_quantized, format_of
from jax_ep.ops import registry
from jax_ep.types import Experts, Handle, Layout, Options

FEWEST_COLUMNS = 8
"""Of a GEMM that adds up rows: 16 bytes of 16-bit elements."""


@dataclasses.dataclass(frozen=True)
class ExchangePlan:
    """Dispatch and combine, each the backward pass of the other."""

    options: Options
    handle: Part
    dispatch: Part
    combine: Part

    @property
    def transposed(self) -> ExchangePlan:
        """That of the backward pass."""
        return dataclasses.replace(self, options=self.options.transposed)


def exchange(options: Options, facts: ExchangeFacts, *, wire_dtype: DTypeLike | None = None) -> ExchangePlan:
    """Resolve the exchange of such tokens, which are dispatched in `wire_dtype`, if given, and not as the options say.

    Raises:
      NotImplementedError: none of the implementations asked for supports it.
    """
    handle = registry.choose(options, facts)
    dispatch = handle if wire_dtype is None else registry.choose(_with_wire(options, wire_dtype), facts)
    combine = registry.choose(options, dataclasses.replace(facts, is_combine=True))
    return ExchangePlan(options, handle, dispatch, combine)


def _with_wire(options: Options, wire_dtype: DTypeLike) -> Options:
    return dataclasses.replace(options, wire_dtype=wire_dtype)


@dataclasses.dataclass(frozen=True)
class GemmPlan:
    """A grouped GEMM; its transposes and the gradient of its weights are the backward pass."""

    options: Options
    forward: Part
    backward: Part

    @property
    def transposed(self) -> GemmPlan:
        """That of the backward pass."""
        return dataclasses.replace(self, forward=self.backward)

    @property
    def run(self) -> operations.GroupedGemm:
        """The functions of the forward pass."""
        return registry.get("grouped_gemm", self.forward.implementation)


def gemm(options: Options, facts: GemmFacts) -> GemmPlan:
    """Resolve a grouped GEMM.

    Raises:
      NotImplementedError: none of the implementations asked for supports it.
    """
    forward = registry.choose(options, facts)
    if facts.out_dtype == facts.dtype:
        return GemmPlan(options, forward, forward)
    return GemmPlan(options, forward, registry.choose(options, dataclasses.replace(facts, out_dtype=facts.dtype)))


def group_sums(options: Options, dtype: DTypeLike, num_rows: int, columns: int, groups: int) -> GemmPlan:
    """Resolve the GEMM that adds up rows `[num_rows, columns]` of each group, as the gradient of a bias needs."""
    dtype = jnp.dtype(dtype)
    return gemm(options, GemmFacts(dtype, num_rows, FEWEST_COLUMNS, columns, groups, dtype))


@dataclasses.dataclass(frozen=True)
class ExchangeGemmPlan:
    """Exchange of tokens `[T, hidden]` with GEMMs by `[hidden, columns]` weights or their transposes.

    Attributes:
      exchange: of the tokens.
      gemm: in launches of their own.
      fused: the functions for both; None: they run one after the other.
      modes: of these functions.
      saved_as: the form in which dispatched tokens are saved for the gradient of weights, where they are; whichever
        takes less memory. "tokens" are `[W * T, hidden]` by source rank and token, "rows" `[R, hidden]`.
      sums: of biases' gradients, whose columns are those that the GEMM gives.
    """

    exchange: ExchangePlan
    gemm: GemmPlan
    fused: Part | None
    modes: FusedModes | None
    saved_as: str | None
    sums: GemmPlan

    @property
    def options(self) -> Options:
        """Of the call."""
        return self.exchange.options

    @property
    def transposed(self) -> ExchangeGemmPlan:
        """That of the backward pass."""
        return dataclasses.replace(self, exchange=self.exchange.transposed)

    @property
    def run(self) -> operations.ExchangeGemm:
        """The functions for both."""
        return registry.get("exchange_gemm", _known(self.fused).implementation)

    def mode(self, save_as: str | None) -> str:
        """Of dispatch + GEMM that saves tokens so."""
        return _known(self.modes).dispatch_mode(save_as)

    @property
    def combine_mode(self) -> str:
        """Of GEMM + combine."""
        return "serial" if self.modes is None else self.modes.combine

    @property
    def gradient_mode(self) -> str:
        """Of GEMM + combine in one launch with the gradient of the weights; empty: that has its own."""
        return (self.modes and self.modes.combine_with_gradient) or ""


def _known[Value](value: Value | None) -> Value:
    if value is None:
        raise ValueError("exchange and GEMM have no functions for both in this plan; call them one after the other.")
    return value


def exchange_gemm(
    options: Options, facts: ExchangeFacts, *, out_columns: int, sum_dtype: DTypeLike | None = None
) -> ExchangeGemmPlan:
    """Resolve both directions of an exchange with GEMMs by `[facts.hidden, facts.columns]` weights.

    Args:
      options: of the call.
      facts: of the exchange.
      out_columns: of the rows that the GEMM gives.
      sum_dtype: of the sums of combine.

    Raises:
      NotImplementedError: none of the implementations asked for supports it.
    """
    layout, columns = facts.layout, _known(facts.columns)
    whole = exchange(dataclasses.replace(options, sum_dtype=sum_dtype), facts)
    groups = layout.num_local_experts
    product = GemmFacts(facts.dtype, layout.capacity, facts.hidden, columns, groups, facts.dtype)
    sums = group_sums(options, facts.dtype, layout.capacity, out_columns, groups)
    fused, name = FusedFacts(facts.dtype, facts.hidden, columns, layout), whole.handle.implementation
    reason = registry.unsupported_reason(name, fused, options)
    if reason is not None:
        return ExchangeGemmPlan(whole, gemm(options, product), None, None, None, sums)
    # A GEMM of its own is that of the fastest implementation, whichever one exchanges.
    apart = gemm(dataclasses.replace(options, implementation=None), product)
    modes = registry.get("exchange_gemm", name).fused_modes(
        options.schedule, fused, by_pallas=apart.forward.implementation == "pallas"
    )
    part = Part("exchange_gemm", name)
    return ExchangeGemmPlan(whole, apart, part, modes, _saved_as(options, layout), sums)


def _saved_as(options: Options, layout: Layout) -> str | None:
    if not options.schedule.keep_tokens:
        return None
    few = layout.capacity <= layout.num_ranks * layout.num_tokens
    return "rows" if few or layout.num_ranks == 1 else "tokens"  # on one device "tokens" would be x itself


@dataclasses.dataclass(frozen=True)
class ActivationPlan:
    """The activation between the GEMMs and its gradient; `sums` are those of the gradient of its bias."""

    options: Options
    part: Part
    sums: GemmPlan

    @property
    def run(self) -> operations.Activation:
        """Its functions."""
        return registry.get("activation", self.part.implementation)


def activation(
    options: Options, experts: Experts, dtype: DTypeLike, num_rows: int, columns: int, groups: int
) -> ActivationPlan:
    """Resolve the activation of hidden rows `[num_rows, columns]`."""
    facts = ActivationFacts(jnp.dtype(dtype), experts, num_rows, columns, groups)
    return ActivationPlan(
        options, registry.choose(options, facts), group_sums(options, dtype, num_rows, columns, groups)
    )


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """The expert layer with weights in the dtype of the tokens.

    Attributes:
      first: dispatch and the first GEMM.
      second: the second GEMM and combine.
      activation: between them.
      activated: the first GEMM where it stores activated rows, for calls without a gradient; None: it does not.
    """

    first: ExchangeGemmPlan
    second: ExchangeGemmPlan
    activation: ActivationPlan
    activated: Part | None

    @property
    def exchange(self) -> ExchangePlan:
        """Of the tokens."""
        return self.first.exchange


@dataclasses.dataclass(frozen=True)
class LayerSizes:
    """Columns of hidden rows and of activated ones, and whether the first GEMM has a bias."""

    columns: int
    intermediate: int
    has_bias: bool


def layer(
    options: Options, facts: ExchangeFacts, experts: Experts, sizes: LayerSizes, sum_dtype: DTypeLike
) -> LayerPlan:
    """Resolve both directions of the layer; `sizes.has_bias` is that of the first GEMM.

    Raises:
      NotImplementedError: none of the implementations asked for supports it.
    """
    layout, dtype = facts.layout, facts.dtype
    facts = dataclasses.replace(facts, columns=sizes.columns)
    first = exchange_gemm(options, facts, out_columns=sizes.columns)
    facts = dataclasses.replace(facts, columns=sizes.intermediate)
    second = exchange_gemm(options, facts, out_columns=facts.hidden, sum_dtype=sum_dtype)
    groups = layout.num_local_experts
    between = activation(options, experts, dtype, layout.capacity, sizes.columns, groups)
    activated = None
    if not sizes.has_bias and (first.modes is None or first.modes.dispatch == "serial"):
        product = GemmFacts(dtype, layout.capacity, facts.hidden, sizes.columns, groups, dtype)
        name = first.gemm.forward.implementation
        if registry.unsupported_reason(name, GemmActivationFacts(dtype, experts, product), options) is None:
            activated = Part("gemm_activation", name)
    return LayerPlan(first, second, between, activated)


@dataclasses.dataclass(frozen=True)
class Fp8GemmPlan:
    """A grouped GEMM in FP8, its transpose, and the gradient of its weights; `operands` rounds what they multiply."""

    product: Part
    gradient: Part
    operands: Part
    sums: GemmPlan


@dataclasses.dataclass(frozen=True)
class Fp8LayerPlan:
    """Half of the layer with GEMMs in FP8 in both directions: dispatch and GEMM, or GEMM and combine.

    `activation` is what comes in front of the second GEMM.
    """

    exchange: ExchangePlan
    gemm: Fp8GemmPlan
    activation: ActivationPlan

    @property
    def options(self) -> Options:
        """Of the call."""
        return self.exchange.options

    @property
    def transposed(self) -> Fp8LayerPlan:
        """That of the backward pass."""
        return dataclasses.replace(self, exchange=self.exchange.transposed)

    @property
    def operands(self) -> operations.Activation:
        """The functions that round operands."""
        return registry.get("activation", self.gemm.operands.implementation)


def fp8_operands(options: Options, dtype: DTypeLike, sizes: tuple[int, ...], depth: int = GROUP_SIZE) -> Part:
    """Resolve the passes that round arrays of these sizes to FP8, with scales for blocks of `depth`."""
    return registry.choose(options, Fp8OperandFacts(jnp.dtype(dtype), sizes, depth % GROUP_SIZE == 0))


def _fp8_gemm(options: Options, product: GemmFacts, weight_dtype: DTypeLike, out_columns: int) -> Fp8GemmPlan:
    places = fp8_columns.num_blocks(product.num_rows, product.groups) * GROUP_SIZE
    gradient = dataclasses.replace(product, num_rows=places, out_dtype=jnp.dtype(weight_dtype))
    sizes = product.num_rows, product.depth, product.columns
    return Fp8GemmPlan(
        registry.choose(options, product),
        registry.choose(options, gradient),
        fp8_operands(options, max(product.out_dtype, gradient.out_dtype, key=lambda dtype: dtype.itemsize), sizes),
        group_sums(options, product.out_dtype, product.num_rows, out_columns, product.groups),
    )


def fp8_layer(
    options: Options,
    facts: ExchangeFacts,
    experts: Experts,
    sizes: LayerSizes,
    sum_dtype: DTypeLike,
    weight_dtypes: tuple[DTypeLike, DTypeLike],
) -> tuple[Fp8LayerPlan, Fp8LayerPlan]:
    """Resolve both halves of the layer with GEMMs in FP8, forward and backward.

    Raises:
      NotImplementedError: none of the implementations asked for supports it.
    """
    layout, dtype, hidden = facts.layout, facts.dtype, facts.hidden
    whole = exchange(options, dataclasses.replace(facts, columns=sizes.columns))
    rows, groups = layout.capacity, layout.num_local_experts
    between = activation(options, experts, dtype, rows, sizes.columns, groups)
    first = GemmFacts(FP8, rows, hidden, sizes.columns, groups, dtype)
    second = dataclasses.replace(first, depth=sizes.intermediate, columns=hidden)
    back = dataclasses.replace(whole, options=dataclasses.replace(options, sum_dtype=sum_dtype))
    return (
        Fp8LayerPlan(whole, _fp8_gemm(options, first, weight_dtypes[0], sizes.columns), between),
        Fp8LayerPlan(back, _fp8_gemm(options, second, weight_dtypes[1], hidden), between),
    )


@dataclasses.dataclass(frozen=True)
class QuantizedGemmPlan:
    """GEMM of rows and quantized weights: of "quantized_gemm", or of "grouped_gemm" where both are in FP8.

    `operands` rounds rows to FP8, where the weights ask for it.
    """

    options: Options
    product: Part
    operands: Part | None


def quantized_gemm(
    options: Options, shape: tuple[int, ...], dtype: DTypeLike, rhs: QuantizedExperts, out_dtype: DTypeLike
) -> QuantizedGemmPlan:
    """Resolve the GEMM of rows of this shape, `[M, K]` or `[G, M, K]`, and quantized weights.

    Raises:
      NotImplementedError: none of the implementations asked for supports it.
    """
    multiplied, out = multiplied_dtype(dtype, rhs), jnp.dtype(out_dtype)
    operands = None
    if rhs.activations == "fp8":
        operands = fp8_operands(options, dtype, shape)
    if multiplied == FP8 and format_of(rhs).is_fp8_operand and len(shape) == 2:
        facts: Facts = GemmFacts(FP8, shape[0], shape[1], rhs.shape[1], rhs.shape[0], out)
    else:
        facts = QuantizedGemmFacts(multiplied, shape, rhs, out)
    return QuantizedGemmPlan(options, registry.choose(options, facts), operands)


def masked_gemm(
    options: Options, shape: tuple[int, ...], dtype: DTypeLike, rhs: Weights, out_dtype: DTypeLike
) -> QuantizedGemmPlan:
    """Resolve the masked grouped GEMM of blocks `[L, M, K]`: of "quantized_gemm", or else of "masked".

    Raises:
      NotImplementedError: none of the implementations asked for supports it.
    """
    weights = check_quantized.as_pair(options.function, "rhs", rhs)
    if isinstance(weights, QuantizedExperts):
        return quantized_gemm(options, shape, dtype, weights, out_dtype)
    facts = MaskedGemmFacts(FP8 if isinstance(weights, tuple) else jnp.dtype(dtype), shape[2])
    return QuantizedGemmPlan(options, registry.choose(options, facts), None)


@dataclasses.dataclass(frozen=True)
class PartPlan:
    """A call with one part."""

    options: Options
    part: Part


def masked_activation(options: Options, dtype: DTypeLike, *, quantize: bool) -> PartPlan:
    """Resolve the activation of masked blocks, to FP8 with `quantize`."""
    return PartPlan(options, registry.choose(options, MaskedActivationFacts(jnp.dtype(dtype), quantize)))


def sort(options: Options, num_slots: int, num_experts: int) -> PartPlan:
    """Resolve the sort of so many assignments to so many experts."""
    return PartPlan(options, registry.choose(options, SortFacts(jnp.dtype(jnp.int32), num_slots, num_experts)))


def low_latency(options: Options, dtype: DTypeLike, hidden: int, layout: Layout, *, is_foreign: bool) -> PartPlan:
    """Resolve low-latency dispatch or combine of rows of `dtype` with `hidden` columns."""
    return PartPlan(options, registry.choose(options, LowLatencyFacts(jnp.dtype(dtype), hidden, layout, is_foreign)))


@dataclasses.dataclass(frozen=True)
class LowLatencyGemmPlan:
    """The second GEMM of experts and combine, in one launch or in two."""

    product: QuantizedGemmPlan
    combine: PartPlan
    fused: Part | None

    @property
    def options(self) -> Options:
        """Of the call."""
        return self.combine.options


def low_latency_gemm_combine(
    options: Options,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    rhs: Weights,
    out_dtype: DTypeLike,
    layout: Layout,
    *,
    is_foreign: bool = False,
) -> LowLatencyGemmPlan:
    """Resolve the GEMM of rows `[L, M, I]` of `dtype` and weights `[L, H, I]`, and the combine of its rows.

    Raises:
      NotImplementedError: none of the implementations asked for supports it.
    """
    out = jnp.dtype(out_dtype)
    combine = low_latency(options, out, rhs.shape[1], layout, is_foreign=is_foreign)
    multiplied = multiplied_dtype(dtype, rhs) if isinstance(rhs, QuantizedExperts) else jnp.dtype(dtype)
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


def multiplied_dtype(dtype: DTypeLike, rhs: QuantizedExperts) -> np.dtype:
    """Of rows, as their GEMM with these weights takes them."""
    return {None: jnp.dtype(dtype), "fp8": FP8, "int8": jnp.dtype(jnp.int8)}[rhs.activations]


@dataclasses.dataclass(frozen=True)
class QuantizedLayerPlan:
    """The expert layer of quantized weights, one operation after another; `back` is the exchange of combine."""

    exchange: ExchangePlan
    back: ExchangePlan
    first: QuantizedGemmPlan
    second: QuantizedGemmPlan
    activation: ActivationPlan

    @property
    def options(self) -> Options:
        """Of the call."""
        return self.exchange.options


def quantized_layer(
    options: Options,
    facts: ExchangeFacts,
    experts: Experts,
    weights: tuple[QuantizedExperts, QuantizedExperts],
    sum_dtype: DTypeLike,
) -> QuantizedLayerPlan:
    """Resolve the layer of quantized weights.

    Raises:
      NotImplementedError: none of the implementations asked for supports it.
    """
    layout, dtype = facts.layout, facts.dtype
    w_gate_up, w_down = weights
    # What is multiplied in FP8 loses nothing by travelling so.
    wire = FP8 if w_gate_up.activations == "fp8" else None
    whole = exchange(options, dataclasses.replace(facts, columns=w_gate_up.shape[1]), wire_dtype=wire)
    back = dataclasses.replace(whole, options=dataclasses.replace(options, sum_dtype=sum_dtype))
    if wire is not None:
        whole = dataclasses.replace(whole, options=_with_wire(options, wire))
    rows = layout.capacity
    return QuantizedLayerPlan(
        whole,
        back,
        quantized_gemm(options, (rows, facts.hidden), dtype, w_gate_up, dtype),
        quantized_gemm(options, (rows, w_down.shape[2]), dtype, w_down, dtype),
        activation(options, experts, dtype, rows, w_gate_up.shape[1], layout.num_local_experts),
    )


def single_launch(options: Options, facts: FusedMoEFacts, others: Sequence[str]) -> Part | None:
    """Resolve whether the layer of one device is one launch, as the schedule says or where that is faster; None: no.

    `others` are the keywords given that such a launch does not have.

    Raises:
      ValueError: the schedule asks for it, and there is none.
      NotImplementedError: likewise, with none of the implementations asked for.
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
    modes = schedule.dispatch_mode, schedule.combine_mode, schedule.fuse_weight_gradients
    name = (options.implementation or registry.available("fused_moe"))[0]
    if modes != (None, None, None) or registry.unsupported_reason(name, facts, options) is not None:
        return None
    if _reason_against_one_launch(options, name, facts, others) is not None:
        return None
    run = registry.get("fused_moe", name)
    num_experts, first, second = facts.w_gate_up.shape
    hidden, columns = (second, first) if isinstance(facts.w_gate_up, QuantizedExperts) else (first, second)
    product = GemmFacts(facts.dtype, facts.num_slots, hidden, columns, num_experts, facts.dtype)
    apart = registry.choose(dataclasses.replace(options, implementation=None), product)
    by_pallas = apart.implementation == "pallas"
    if run.is_fastest(facts.num_slots, facts.w_gate_up, facts.w_down, by_pallas=by_pallas):
        return Part("fused_moe", name)
    return None


def _reason_against_one_launch(options: Options, name: str, facts: FusedMoEFacts, others: Sequence[str]) -> str | None:
    if options.axis:
        return f"experts are spread over {options.axis}, and one launch serves one device"
    if others:
        return f"there is no such launch with {', '.join(others)}"
    weights = facts.w_gate_up, facts.w_down
    if registry.get("fused_moe", name).fuses(facts.experts, facts.num_slots, facts.dtype, *weights):
        return None
    shapes = " and ".join(str(tuple(w.shape)) for w in weights)
    return (
        f"{name!r} has no such launch for {facts.num_slots} slots of {facts.dtype} tokens with matrices {shapes} and"
        f" {facts.experts}: it takes tokens of 16 bits, sizes that are multiples of 8, or of 16 or 32 where matrices"
        " have 8 or 4 bits, scales of 16 to 128 elements in int4, no tokens in int8, and no function of the caller's"
    )


def exchange_facts(dtype: DTypeLike, hidden: int, handle: Handle, columns: int | None = None) -> ExchangeFacts:
    """The facts of an exchange over a handle."""
    return ExchangeFacts(jnp.dtype(dtype), hidden, handle.layout, handle.group is None, columns)
