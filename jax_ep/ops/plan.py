"""What a public call runs, resolved once: the implementation and mode of each part, forward and backward.

A plan is frozen and hashable. It is the static argument of the custom VJPs, carries the checked keywords of the call as
`options`, and is passed on: nothing below chooses again. The backward pass runs parts of the same plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep.core import fp8, operations
from jax_ep.core.dtypes import FP8, TOKEN_DTYPES
from jax_ep.core.facts import (
    ActivationFacts,
    ExchangeFacts,
    Fp8OperandFacts,
    FusedFacts,
    FusedModes,
    GemmActivationFacts,
    GemmFacts,
    Part,
)
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.layout import layout_by_assignment
from jax_ep.ops import registry
from jax_ep.types import Array, Experts, Handle, Layout, Options

_resolved: ContextVar[list[object] | None] = ContextVar("jax_ep_resolved", default=None)
_trace = jax.make_user_context(default_value=None)


def resolution[**Arguments, Plan](resolve: Callable[Arguments, Plan]) -> Callable[Arguments, Plan]:
    """Decorate a function that resolves a plan: `recording` collects it, but not those that it consists of.

    The function raises NotImplementedError if no requested implementation supports a part.
    """

    @functools.wraps(resolve)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Plan:
        found = _resolved.get()
        if found is None:
            return resolve(*args, **kwargs)
        token = _resolved.set(None)
        try:
            plan = resolve(*args, **kwargs)
        finally:
            _resolved.reset(token)
        if plan is not None:
            found.append(plan)
        return plan

    return run


@contextlib.contextmanager
def recording() -> Iterator[list[object]]:
    """Collect the plans that are resolved in this block, where cached traces do not count."""
    found: list[object] = []
    token = _resolved.set(found)
    try:
        with _trace(object()):
            yield found
    finally:
        _resolved.reset(token)


FEWEST_COLUMNS = 8
"""Of a GEMM that adds up rows: 16 bytes of 16-bit elements."""


@dataclasses.dataclass(frozen=True)
class ExchangePlan:
    """Dispatch and combine, each the backward pass of the other.

    With `adds_at_sources`, combine sends each row of a token to its rank, which adds them in order of k.
    """

    options: Options
    handle: Part
    dispatch: Part
    combine: Part
    adds_at_sources: bool

    @property
    def transposed(self) -> ExchangePlan:
        """Plan of the backward pass."""
        return dataclasses.replace(self, options=self.options.transposed)

    def with_sums(self, dtype: DTypeLike) -> ExchangePlan:
        """Return the plan of a combine whose sums have this dtype."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, sum_dtype=dtype))


@resolution
def exchange(options: Options, facts: ExchangeFacts, *, wire_dtype: DTypeLike | None = None) -> ExchangePlan:
    """Resolve dispatch and combine of tokens; `wire_dtype` overrides that of the options for dispatch."""
    handle = registry.choose(options, facts)
    with_wire = dataclasses.replace(options, wire_dtype=wire_dtype)
    dispatch = handle if wire_dtype is None else registry.choose(with_wire, facts)
    # Without a wire, one rank adds in this order anyway.
    at_sources = bool(options.schedule.reproducible) and (facts.layout.num_ranks > 1 or options.wire_dtype is not None)
    layout = layout_by_assignment(facts.layout) if at_sources else facts.layout
    combine = registry.choose(options, dataclasses.replace(facts, layout=layout, is_combine=True))
    return ExchangePlan(options, handle, dispatch, combine, at_sources)


@dataclasses.dataclass(frozen=True)
class GemmPlan:
    """A grouped GEMM; its transposes and the gradient of its weights are the backward pass."""

    forward: Part
    backward: Part

    @property
    def transposed(self) -> GemmPlan:
        """Plan of the backward pass."""
        return dataclasses.replace(self, forward=self.backward)

    @property
    def run(self) -> operations.GroupedGemm:
        """The functions of the forward pass."""
        return registry.GROUPED_GEMM.by(self.forward.implementation)


@resolution
def gemm(options: Options, facts: GemmFacts) -> GemmPlan:
    """Resolve a grouped GEMM."""
    forward = registry.choose(options, facts)
    if facts.out_dtype == facts.dtype:
        return GemmPlan(forward, forward)
    return GemmPlan(forward, registry.choose(options, dataclasses.replace(facts, out_dtype=facts.dtype)))


def group_sums(options: Options, dtype: DTypeLike, num_rows: int, columns: int, groups: int) -> GemmPlan:
    """Resolve the GEMM that adds up rows `[num_rows, columns]` of each group, as the gradient of a bias needs."""
    dtype = jnp.dtype(dtype)
    return gemm(options, GemmFacts(dtype, num_rows, FEWEST_COLUMNS, columns, groups, dtype))


@dataclasses.dataclass(frozen=True)
class AroundExchange:
    """Base of the plans of an all-to-all, `exchange`, and what is computed next to it."""

    exchange: ExchangePlan

    @property
    def options(self) -> Options:
        return self.exchange.options

    @property
    def transposed(self) -> Self:
        """Plan of the backward pass."""
        return dataclasses.replace(self, exchange=self.exchange.transposed)


@dataclasses.dataclass(frozen=True)
class ExchangeGemmPlan(AroundExchange):
    """An all-to-all of tokens `[T, hidden]` with GEMMs by `[hidden, columns]` weights or their transposes."""

    gemm: GemmPlan  # the GEMM in a separate kernel
    fused: Part | None  # the fused kernels; None: all-to-all and GEMM run one after the other
    modes: FusedModes | None  # modes of the fused kernels
    # The form in which dispatched tokens are saved for the gradient of weights, if they are saved: whichever takes less
    # memory. "tokens" are `[W * T, hidden]` by source rank and token, "rows" `[R, hidden]`.
    saved_as: str | None
    sums: GemmPlan  # sums of the gradients of biases, over the columns of the result of the GEMM
    reason: str = ""  # why there are no fused kernels; else empty

    def mode(self, save_as: str | None) -> str:
        """Return the mode of dispatch + GEMM that saves tokens in the form `save_as`."""
        return _known(self.modes).dispatch_mode(save_as)

    @property
    def combine_mode(self) -> str:
        """Mode of GEMM + combine."""
        return "serial" if self.modes is None else self.modes.combine


def _known[Value](value: Value | None) -> Value:
    if value is None:
        raise ValueError("this plan has no fused kernels for all-to-all and GEMM; call them one after the other.")
    return value


@resolution
def exchange_gemm(
    options: Options, facts: ExchangeFacts, *, out_columns: int, sum_dtype: DTypeLike | None = None
) -> ExchangeGemmPlan:
    """Resolve both directions of an all-to-all with GEMMs by `[facts.hidden, facts.columns]` weights.

    The result of the GEMM has `out_columns`, the sums of combine `sum_dtype`.
    """
    from jax_ep.megakernels.cost_model import fused_modes

    layout, columns = facts.layout, _known(facts.columns)
    whole = exchange(dataclasses.replace(options, sum_dtype=sum_dtype), facts)
    groups = layout.num_local_experts
    gemm_facts = GemmFacts(facts.dtype, layout.capacity, facts.hidden, columns, groups, facts.dtype)
    sums = group_sums(options, facts.dtype, layout.capacity, out_columns, groups)
    fused, name = FusedFacts(facts.dtype, facts.hidden, columns, layout), whole.handle.implementation
    reason = registry.unsupported_reason(name, fused, options)
    if reason is not None:
        return ExchangeGemmPlan(whole, gemm(options, gemm_facts), None, None, None, sums, f"{name}: {reason}")
    # A separate GEMM is that of the fastest implementation, whichever runs the all-to-all.
    apart = gemm(dataclasses.replace(options, implementation=None), gemm_facts)
    schedule = options.schedule
    if whole.adds_at_sources and schedule.combine_mode is None:
        schedule = dataclasses.replace(schedule, combine_mode="scatter")  # the same sums in one kernel
    specialized = registry.is_specialized(apart.forward.implementation, gemm_facts)
    modes = fused_modes(schedule, fused, specialized=specialized, in_gluon=registry.is_specialized(name, gemm_facts))
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
    experts: Experts
    sums: GemmPlan

    @property
    def run(self) -> operations.Activation:
        """Functions of the chosen implementation."""
        return registry.ACTIVATION.by(self.part.implementation)


def activation(
    options: Options, experts: Experts, dtype: DTypeLike, num_rows: int, columns: int, groups: int
) -> ActivationPlan:
    """Resolve the activation of hidden rows `[num_rows, columns]`."""
    facts = ActivationFacts(jnp.dtype(dtype), experts, num_rows, columns, groups)
    sums = group_sums(options, dtype, num_rows, columns, groups)
    return ActivationPlan(options, registry.choose(options, facts), experts, sums)


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """The expert layer with weights in the dtype of the tokens."""

    first: ExchangeGemmPlan  # dispatch and the first GEMM
    second: ExchangeGemmPlan  # the second GEMM and combine
    activation: ActivationPlan  # between them
    # The first GEMM where it stores activated rows, for calls without a gradient; None: it does not.
    activated: Part | None

    @property
    def exchange(self) -> ExchangePlan:
        """Plan of dispatch and combine."""
        return self.first.exchange


@dataclasses.dataclass(frozen=True)
class LayerSizes:
    """Columns of hidden rows and of activated ones, and whether the first GEMM has a bias."""

    columns: int
    intermediate: int
    has_bias: bool


@resolution
def layer(
    options: Options, facts: ExchangeFacts, experts: Experts, sizes: LayerSizes, sum_dtype: DTypeLike
) -> LayerPlan:
    """Resolve both directions of the layer; `sizes.has_bias` is that of the first GEMM."""
    layout, dtype = facts.layout, facts.dtype
    facts = dataclasses.replace(facts, columns=sizes.columns)
    first = exchange_gemm(options, facts, out_columns=sizes.columns)
    facts = dataclasses.replace(facts, columns=sizes.intermediate)
    second = exchange_gemm(options, facts, out_columns=facts.hidden, sum_dtype=sum_dtype)
    groups = layout.num_local_experts
    between = activation(options, experts, dtype, layout.capacity, sizes.columns, groups)
    activated = None
    if not sizes.has_bias:
        gemm_facts = GemmFacts(dtype, layout.capacity, facts.hidden, sizes.columns, groups, dtype)
        name = first.gemm.forward.implementation
        if registry.unsupported_reason(name, GemmActivationFacts(dtype, experts, gemm_facts), options) is None:
            activated = Part("gemm_activation", name)
    return LayerPlan(first, second, between, activated)


_MOST_SLOTS, _MOST_SPARE_BYTES = 128, 2 << 30  # of a rank, if it gets a spare slot for each expert at home


@dataclasses.dataclass(frozen=True)
class BalancedPlan:
    """A balanced call."""

    part: Part  # what plans its passes and moves copies of experts
    rows: int  # per rank
    spare: int  # copies per rank
    num_bytes: int  # of the copies
    # Whether copies of weights that are not quantized yet are read from a second array, and gradients are written to
    # two; else weights and copies are copied into one array.
    splits: bool


@resolution
def balanced(options: Options, facts: ExchangeFacts, wanted: int | None, weights: Sequence[Array]) -> BalancedPlan:
    """Resolve a balanced call whose passes are exchanges of these facts, for experts with weights `[L, ...]`.

    `wanted` are the spare slots per rank. None: L, with which one pass is enough for any routing, if that is at most
    128, copies travel by peer memory, are not joined with the weights, and take at most 2 GiB; else 2.
    """
    found = registry.choose(options, facts)
    name = "triton" if found.implementation == "triton" else "xla"
    sizes = [math.prod(w.shape[1:]) * w.dtype.itemsize for w in weights]
    wide = all(w.dtype in TOKEN_DTYPES for w in weights)
    layout, num_local = facts.layout, facts.layout.num_local_experts
    if wanted is None:
        # Copies and their gradients, and the heap that the gradients of one array return through.
        most = num_local * 2 * sum(sizes) + layout.num_experts * max(sizes, default=0)
        is_cheap = name == "triton" and wide and num_local <= _MOST_SLOTS and most <= _MOST_SPARE_BYTES
        wanted = num_local if is_cheap else min(2, num_local)
    spare = min(wanted, layout.num_experts - num_local)
    num_bytes = spare * sum(sizes)
    joined = "" if wide else "weights in 8 bits and their copies are copied into one array"
    part = Part("balance_plan", name, reason="; ".join(filter(None, (found.reason, joined))))
    return BalancedPlan(part, facts.layout.capacity, spare, num_bytes, wide or options.recipe is not None)


@dataclasses.dataclass(frozen=True)
class Fp8GemmPlan:
    """A grouped GEMM in FP8, its transpose, and the gradient of its weights; `operands` rounds their operands."""

    forward: Part
    gradient: Part
    operands: Part
    sums: GemmPlan


@dataclasses.dataclass(frozen=True)
class Fp8LayerPlan(AroundExchange):
    """Half of the layer with GEMMs in FP8 in both directions: dispatch and GEMM, or GEMM and combine.

    `activation` is what comes in front of the second GEMM.
    """

    gemm: Fp8GemmPlan
    activation: ActivationPlan

    @property
    def operands(self) -> operations.Activation:
        """The functions that round operands."""
        return registry.ACTIVATION.by(self.gemm.operands.implementation)


def fp8_operands(options: Options, dtype: DTypeLike, sizes: tuple[int, ...], depth: int = GROUP_SIZE) -> Part:
    """Resolve the passes that round arrays of these sizes to FP8, with scales for blocks of `depth`."""
    return registry.choose(options, Fp8OperandFacts(jnp.dtype(dtype), sizes, depth % GROUP_SIZE == 0))


def _fp8_gemm(options: Options, gemm_facts: GemmFacts, weight_dtype: DTypeLike, out_columns: int) -> Fp8GemmPlan:
    places = fp8.num_blocks(gemm_facts.num_rows, gemm_facts.groups) * GROUP_SIZE
    dtype = jnp.dtype(weight_dtype)
    gradient = dataclasses.replace(gemm_facts, num_rows=places, out_dtype=dtype)
    sizes = gemm_facts.num_rows, gemm_facts.depth, gemm_facts.columns
    return Fp8GemmPlan(
        registry.choose(options, gemm_facts),
        registry.choose(options, gradient),
        fp8_operands(options, max(gemm_facts.out_dtype, gradient.out_dtype, key=lambda dtype: dtype.itemsize), sizes),
        group_sums(options, gemm_facts.out_dtype, gemm_facts.num_rows, out_columns, gemm_facts.groups),
    )


@resolution
def fp8_layer(
    options: Options,
    facts: ExchangeFacts,
    experts: Experts,
    sizes: LayerSizes,
    sum_dtype: DTypeLike,
    weight_dtypes: tuple[DTypeLike, DTypeLike],
) -> tuple[Fp8LayerPlan, Fp8LayerPlan]:
    """Resolve both halves of the layer with GEMMs in FP8, forward and backward."""
    layout, dtype, hidden = facts.layout, facts.dtype, facts.hidden
    whole = exchange(options, dataclasses.replace(facts, columns=sizes.columns))
    rows, groups = layout.capacity, layout.num_local_experts
    between = activation(options, experts, dtype, rows, sizes.columns, groups)
    first = GemmFacts(FP8, rows, hidden, sizes.columns, groups, dtype)
    second = dataclasses.replace(first, depth=sizes.intermediate, columns=hidden)
    return (
        Fp8LayerPlan(whole, _fp8_gemm(options, first, weight_dtypes[0], sizes.columns), between),
        Fp8LayerPlan(whole.with_sums(sum_dtype), _fp8_gemm(options, second, weight_dtypes[1], hidden), between),
    )


def exchange_facts(dtype: DTypeLike, hidden: int, handle: Handle) -> ExchangeFacts:
    """Return the facts of an all-to-all over a handle."""
    return ExchangeFacts(jnp.dtype(dtype), hidden, handle.layout, handle.group is None)
