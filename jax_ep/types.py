"""Static configurations and result pytrees that cross function boundaries, with their shapes.

Symbols, per shard: T tokens per rank, H hidden size, K experts per token, E experts, W ranks on the expert axis,
L = E / W local experts, I expert intermediate size, R rows of the expert-major layout.

An assignment is one (token, k) pair. A row of the expert-major layout holds one assignment.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep.values import FLAG, Values, axis_names, choice, finite, flag, integer, number, shown, type_name

Array = jax.Array
Quantized = tuple[Array, Array]
"""FP8 rows: `(values float8_e4m3fn [N, H], scales float32 [N, H // group_size])`."""
Biases = tuple[Array | None, Array | None]
"""Biases of the two GEMMs of an expert, `(b_gate_up, b_down)`; each may be None."""
Tokens = Array | Quantized
"""Rows `[N, H]`, or quantized FP8 rows."""


def result_type[Result](cls: type[Result]) -> type[Result]:
    """Register a class of the package as a pytree that `jax.export` can serialize.

    The class is a NamedTuple, a dataclass whose metadata marks static fields, or a class with the methods that
    `jax.tree_util.register_pytree_with_keys_class` needs. Static values are JSON types or a `Layout`.
    """
    name = f"jax_ep.{cls.__name__}"
    if issubclass(cls, tuple):
        jax.export.register_namedtuple_serialization(cls, serialized_name=name)
        return cls
    if dataclasses.is_dataclass(cls) and not hasattr(cls, "tree_flatten"):
        jax.tree_util.register_dataclass(cls)
    else:
        jax.tree_util.register_pytree_with_keys_class(cls)
    return jax.export.register_pytree_node_serialization(
        cls,
        serialized_name=name,
        serialize_auxdata=lambda static: json.dumps(static, default=_fields).encode(),
        deserialize_auxdata=lambda text: tuple(json.loads(text, object_hook=_layout)),
    )


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, Layout):
        return dataclasses.asdict(value)
    raise NotImplementedError(
        f"export: a handle of {value} tokens, a symbolic number, expected a known one in arguments and results of a"
        " program that is serialized; return arrays alone, or export one program per batch size."
    )


def _layout(fields: dict[str, Any]) -> Layout:
    return Layout(**fields | {"axis": tuple(fields["axis"])})


@dataclasses.dataclass(frozen=True)
class Topology:
    """Expert mesh axes with one slow axis: tokens cross it once per node and then fan out inside the node.

    Pass it as `axis_name` instead of the tuple `(node, local)`; experts stay on the same ranks. Experts of a node are
    contiguous, and so are those of a rank. The plain tuple means one all-to-all over all ranks.

    Attributes:
      node: mesh axis, or tuple of axes, between nodes.
      local: mesh axis, or tuple of axes, inside a node.
      num_blocks: number of micro-batches into which a layer divides its tokens `[T, H]`. Each has its own all-to-alls
        and matmuls, so that one can cross nodes while another computes. Functions other than layers ignore it.
      node_capacity: maximum number of tokens that a rank accepts over the node axis, including its own, in node order;
        in a layer, per micro-batch. Assignments of further tokens to this node are dropped and counted. None accepts
        all, at most the ranks of `node` times T.

    Raises:
      ValueError: an axis is named twice, no axis or an empty name is given, or a number is less than one.
      TypeError: a value has a wrong type.

    Example:
      >>> import jax_ep
      >>> jax_ep.Topology(node="node", local="expert").axes
      ('node', 'expert')

    Source: the node-limited all-to-all of DeepSeek-V3 (arXiv:2412.19437, section 3.2.2).
    """

    node: str | tuple[str, ...]
    local: str | tuple[str, ...]
    num_blocks: int = 1
    node_capacity: int | None = None

    def __post_init__(self) -> None:
        for field in ("node", "local"):
            value = getattr(self, field)
            names = axis_names(f"Topology: {field}", value, "Topology(node='node', local='expert')")
            object.__setattr__(self, field, value if isinstance(value, str) else names)
            if not names:
                raise ValueError(
                    f"Topology: {field}={shown(value)} names no axis, expected at least one; pass only the other axes"
                    " as axis_name."
                )
        if len(set(self.axes)) != len(self.axes):
            raise ValueError(
                f"Topology: node={self.node!r} and local={self.local!r} name an axis twice, expected distinct axes;"
                " remove the repeated one."
            )
        for field in ("num_blocks", "node_capacity"):
            if field == "num_blocks" or self.node_capacity is not None:
                object.__setattr__(self, field, integer("Topology", field, getattr(self, field)))

    @property
    def node_axes(self) -> tuple[str, ...]:
        """The axes between nodes."""
        return (self.node,) if isinstance(self.node, str) else self.node

    @property
    def local_axes(self) -> tuple[str, ...]:
        """The axes inside a node."""
        return (self.local,) if isinstance(self.local, str) else self.local

    @property
    def axes(self) -> tuple[str, ...]:
        """Node axes, then local axes; this order numbers the ranks."""
        return self.node_axes + self.local_axes


AxisName = str | tuple[str, ...] | Topology
"""One mesh axis, several axes with one all-to-all over all of them, or a `Topology` with a slow axis."""

DispatchMode = Literal["fused", "serial"]
CombineMode = Literal["scatter", "serial"]
DISPATCH_MODES: tuple[DispatchMode, ...] = get_args(DispatchMode)
COMBINE_MODES: tuple[CombineMode, ...] = get_args(CombineMode)
SCHEDULE_VALUES: Mapping[str, Values] = {
    "dispatch_mode": Values(choices=DISPATCH_MODES),
    "combine_mode": Values(choices=COMBINE_MODES),
    "keep_tokens": FLAG,
    "num_communicating_programs": Values(1, 1 << 16),
    "num_combining_programs": Values(1, 1 << 16),
    "num_warps": Values(1, 16, power_of_two=True),
    "tokens_per_block": Values(1, 1024, power_of_two=True),
    "rows_in_flight": Values(1, 10),
    "single_launch": FLAG,
    "reproducible": FLAG,
}
"""Values of the fields of `Schedule`, besides `wire_dtype` and None."""
Activation = Literal["silu", "gelu", "gelu_exact", "relu", "relu_squared"]
ACTIVATIONS = get_args(Activation)


def _checked_wire(value: Any) -> np.dtype | None:
    """Return the dtype of FP8, or None."""
    try:
        if value is None:
            return None
        if not isinstance(value, jax.Array) and np.dtype(value) == jnp.float8_e4m3fn:
            return np.dtype(value)
    except (TypeError, ValueError):  # The latter about numbers of many digits, and names that are not Unicode.
        pass
    raise TypeError(
        f"Schedule: wire_dtype={shown(value)}, expected float8_e4m3fn or None; pass jnp.float8_e4m3fn, or None to send"
        " the tokens as they are."
    )


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How an operation runs: its kernels, what they send, and how they share the GPU.

    None lets the package choose. A mode is an error if no kernel supports it; numbers that a kernel does not use are
    ignored. Handles do not depend on the schedule. Only `wire_dtype` affects results by more than the order of
    roundings.

    Attributes:
      dispatch_mode: "fused": one kernel for dispatch and grouped GEMM, which computes on rows that have arrived while
        other tokens are in flight; "serial": two kernels. "fused" exists in `triton`, for 16-bit tokens without
        `wire_dtype`.
      combine_mode: "scatter": one kernel for grouped GEMM and combine. It stores every row at the rank of its token,
        where the K rows of a token are added and rounded once. "serial": two kernels, which round the sum on each
        expert rank, then the sum over ranks. "scatter" exists where "fused" does. Gradients are the same in both modes.
      wire_dtype: dtype of the tokens between ranks, forward + backward: `jnp.float8_e4m3fn` for FP8 with one scale per
        128 columns; None: the dtype of the tokens, or FP8 with `recipe="fp8"`.
      keep_tokens: for dispatch + grouped GEMM. True: save the dispatched tokens for the weight gradients, under the
        name `jax_ep.tokens`. False, the default: dispatch them again in the backward pass, which costs one more
        all-to-all and no memory between the passes; on one device they are read in place.
      num_communicating_programs: for dispatch + grouped GEMM in one kernel, how many programs, of one per
        multiprocessor, send tokens before they compute. For a separate dispatch, the maximum number of its programs.
      num_combining_programs: maximum number of programs of a combine kernel.
      num_warps: warps per program of dispatch and combine, a power of two up to 16.
      tokens_per_block: for dispatch and combine, tokens that share a flag, a power of two: fewer signal arrivals
        sooner, more need fewer flags.
      rows_in_flight: rows that each combine program prefetches while it adds others, 1 to 10; fewer if its registers
        hold fewer.
      single_launch: True: `fused_moe`, the whole layer on one device, is one kernel; False: several. True exists in
        `triton`, for 16-bit tokens. With gradients the layer always uses several. For `low_latency_moe`, True: each
        rank gets the tokens of all ranks, and one kernel runs its experts; False: rows go to their experts.
      reproducible: True: neither other tokens, nor the number of ranks, nor `Balance` change the bits of a token's
        result and gradient, see docs/numerics.md. False and None: rows are added where that is fastest.

    Raises:
      ValueError: a mode is unknown, or a number is out of range.
      TypeError: a value has a wrong type, or `wire_dtype` is not FP8.

    Example:
      >>> import jax_ep
      >>> jax_ep.Schedule(dispatch_mode="serial").combine_mode is None
      True
    """

    dispatch_mode: DispatchMode | None = None
    combine_mode: CombineMode | None = None
    wire_dtype: DTypeLike | None = None
    keep_tokens: bool | None = None
    num_communicating_programs: int | None = None
    num_combining_programs: int | None = None
    num_warps: int | None = None
    tokens_per_block: int | None = None
    rows_in_flight: int | None = None
    single_launch: bool | None = None
    reproducible: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "wire_dtype", _checked_wire(self.wire_dtype))
        for name, values in SCHEDULE_VALUES.items():
            if (value := getattr(self, name)) is not None:
                values.check("Schedule", name, value, "None for the package's choice")


@dataclasses.dataclass(frozen=True)
class Experts:
    """The function of an expert: `act(gate) * (up + up_offset)` between its weights, or `act(hidden)` without gates.

    The hidden rows are `x @ w_gate_up`, plus `b_gate_up` if the experts have biases. Fields other than `activation`,
    `gated` and `weight_on` apply to built-in activations only; a custom function replaces them.

    Attributes:
      activation: "silu", "gelu" (the tanh approximation), "gelu_exact", "relu" or "relu_squared"; or a JAX function of
        hidden rows `[R, N]`, all their columns, to rows `[R, I]`, applied row by row. Such a function may close over
        arrays, which get gradients. It runs as a separate pass. Pass the same function object in every call to avoid
        recompilation. With a tensor axis that splits I, it gets this rank's columns, so it must work on any share of
        them.
      gated: half of the columns are gates. For a custom function: layers that create their own weights pass it 2 * I
        columns if True, else I; other functions pass any number.
      interleaved: gate and up columns alternate, gate first; otherwise the first half is gate.
      alpha: for "silu", `x * sigmoid(alpha * x)`.
      clamp: limits gate to at most `clamp` and up to `[-clamp, clamp]`; None: no limit.
      up_offset: added to up.
      weight_on: "output": router weights scale the experts' outputs; "input": their inputs, as in Llama 4.

    Raises:
      ValueError: a name is unknown, a field for gates is set without gates, or a limit is not positive.
      TypeError: a value has a wrong type.

    Example:
      >>> import jax_ep
      >>> of_gpt_oss = jax_ep.Experts("silu", interleaved=True, alpha=1.702, clamp=7.0, up_offset=1.0)
      >>> of_gpt_oss.gated, jax_ep.Experts("relu_squared", gated=False).gated
      (True, False)

    Source: gated linear units (arXiv:2002.05202); limits and offset as in gpt-oss (arXiv:2508.10925).
    """

    activation: Activation | Callable[[Array], Array] = "silu"
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    clamp: float | None = None
    up_offset: float = 0.0
    weight_on: Literal["output", "input"] = "output"

    def __post_init__(self) -> None:
        expected = f"expected one of {ACTIVATIONS}, or a JAX function of the hidden rows."
        if isinstance(self.activation, str) and self.activation not in ACTIVATIONS:
            raise ValueError(f"Experts: activation={shown(self.activation)}, {expected}")
        if not isinstance(self.activation, str) and not callable(self.activation):
            raise TypeError(f"Experts: activation is {type_name(self.activation)}, {expected}")
        choice("Experts", "weight_on", self.weight_on, ("output", "input"))
        for name in ("gated", "interleaved"):
            object.__setattr__(self, name, flag("Experts", name, getattr(self, name)))
        for name in ("alpha", "up_offset"):
            object.__setattr__(self, name, finite("Experts", name, getattr(self, name)))
        if self.clamp is not None:
            clamp = number("Experts", "clamp", self.clamp)
            if not 0 < clamp < math.inf:
                expected = "expected a positive float32, or None for no limit"
                raise ValueError(f"Experts: clamp={shown(self.clamp)}, {expected}; pass one.")
            object.__setattr__(self, "clamp", clamp)
        self._check_fields()

    def _check_fields(self) -> None:
        """Check that no field is set that the activation, or experts without a gate, would ignore."""
        changed = {f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        if callable(self.activation):
            useless = changed - {"activation", "gated", "weight_on"}
            reason = "a custom activation function replaces them"
        elif not self.gated:
            useless, reason = changed & {"interleaved", "up_offset"}, "experts without a gate have no gate columns"
        else:
            useless, reason = set(), ""
        if self.activation != "silu" and "alpha" in changed:
            useless, reason = useless | {"alpha"}, reason or "only 'silu' has it"
        if useless:
            raise ValueError(
                f"Experts: {', '.join(sorted(useless))} with activation={self.activation!r} and gated={self.gated},"
                f" expected the default, since {reason}; leave out."
            )


@dataclasses.dataclass(frozen=True)
class Options:
    """The checked settings of one public call, passed on unchanged: static, hashable."""

    function: str  # the public function, for error messages
    axis: tuple[str, ...] = ()  # mesh axes over which the experts are sharded; `()` for one device
    implementation: tuple[str, ...] | None = None  # names in order of preference, or None for the best one
    wire_dtype: DTypeLike | None = None  # FP8 to quantize tokens before they are sent, or None to send them unchanged
    schedule: Schedule = Schedule()  # how kernels share the GPU
    # Dtype of the sums that combine returns, or None for that of its rows. Transposed operations use the dtype of the
    # rows, see `transposed`.
    sum_dtype: DTypeLike | None = None
    recipe: str | None = None  # "fp8", or None for matmuls in the dtype of the tokens

    @property
    def transposed(self) -> Options:
        """The options of the backward pass."""
        return dataclasses.replace(self, sum_dtype=None)

    @property
    def alone(self) -> bool:
        """Whether the caller named exactly one implementation, without a fallback."""
        return self.implementation is not None and len(self.implementation) == 1


@dataclasses.dataclass(frozen=True)
class Layout:
    """The static facts of one dispatch: its sizes, from which all others follow, and its mesh axes."""

    num_ranks: int  # W, ranks on the expert axis
    num_experts: int  # E, experts over all ranks, contiguous per rank
    num_tokens: int  # T, tokens per rank
    top_k: int  # K, experts per token
    capacity: int  # R, rows of the expert-major layout on each rank
    alignment: int = 1  # every group starts at a multiple of this many rows
    axis: tuple[str, ...] = ()  # mesh axes over which the experts are sharded, in order, without axes of size one

    @property
    def num_local_experts(self) -> int:
        """Number of experts per rank, L = E / W."""
        return self.num_experts // self.num_ranks

    @property
    def num_slots(self) -> int:
        """Number of assignments (source rank, token, k), W * T * K."""
        return self.num_ranks * self.num_tokens * self.top_k


@result_type
@dataclasses.dataclass(frozen=True)
class Handle:
    """The source of every row of a dispatch, and the row of every assignment; a pytree.

    Attributes:
      row_to_assignment: `[R]` int32, `(source_rank * T + token) * K + k` of each row; -1 marks padding.
      assignment_to_row: `[W, T, K]` int32, the row of each assignment on this rank; -1: not here, dropped or no expert.
      group_sizes: `[L]` int32, rows of each local expert, including alignment padding.
      topk_idx: `[W, T, K]` int32, expert ids of the tokens of all ranks.
      group: `[W + 1]` int32, device numbers of the ranks and this rank's position, if the implementation writes to
        peers' memory; else None.
      num_invalid: `[]` int32, ids of this rank's tokens outside `[0, E)` other than -1, which were treated as -1.
      num_dropped: `[]` int32, assignments to this rank that were dropped because of its capacity; with balance, those
        of its tokens that had no place.
      layout: static sizes and axes.
      copies: `[W, S]` int32 with balance, expert in each spare slot, -1 in free ones; else None. Each rank then has
        L + S groups, and `topk_idx` holds `rank * (L + S) + group` of each assignment.
      order: `[]` float32 with `copies`, 0; its gradient orders launches of the backward pass.
    """

    row_to_assignment: Array
    assignment_to_row: Array
    group_sizes: Array
    topk_idx: Array
    group: Array | None
    num_invalid: Array
    num_dropped: Array
    layout: Layout = dataclasses.field(metadata={"static": True})
    copies: Array | None = None
    order: Array | None = None


@result_type
@dataclasses.dataclass(frozen=True)
class HierarchicalHandle:
    """The sources of the rows of a dispatch over a `Topology`: one handle per stage; a pytree.

    Attributes:
      node: handle of the all-to-all between the ranks with the same position in their nodes, whose "experts" are the
        nodes. Its rows are the tokens that this rank received, ordered by node and token.
      local: handle of the all-to-all inside the node, whose tokens are these rows.
      num_invalid: `[]` int32, see `Handle`.
      num_dropped: `[]` int32, assignments dropped because of this rank's capacity, and assignments to this node of
        tokens past `Topology.node_capacity`.
    """

    node: Handle
    local: Handle
    num_invalid: Array
    num_dropped: Array

    @property
    def group_sizes(self) -> Array:
        """Rows of each local expert, `[L]` int32, see `Handle`."""
        return self.local.group_sizes


@result_type
class Dispatched[Rows: Tokens, Weights: Array | None, Source: Handle | HierarchicalHandle](NamedTuple):
    """Tokens in expert-major order on the rank that owns the experts.

    Type parameters, for type checkers, are those of `tokens`, `weights` and `handle`.

    Attributes:
      tokens: `[R, H]`, ordered by expert, source rank, token, k; padding rows are zero. A `(values, scales)` pair if
        the input was one.
      weights: `[R]` router weight of each row (0 for padding), or None when no weights were given.
      group_sizes: `[L]` int32, ready for `grouped_gemm` and `lax.ragged_dot`.
      handle: the input of `combine` and of a later `dispatch(handle=...)`.
      dropped: `[]` int32, rows that did not fit this rank's `capacity`.
    """

    tokens: Rows
    weights: Weights
    group_sizes: Array
    handle: Source
    dropped: Array


@result_type
class DispatchedGemm(NamedTuple):
    """Results of a dispatch followed by the grouped GEMM of the local experts.

    Attributes:
      hidden: `[R, N]`; padding rows are zero.
      weights: `[R]` router weight of each row, or None.
      group_sizes: `[L]` int32.
      handle: see `Dispatched`.
      dropped: `[]` int32.
    """

    hidden: Array
    weights: Array | None
    group_sizes: Array
    handle: Handle
    dropped: Array


@result_type
class SortedTokens(NamedTuple):
    """Assignments of one device sorted by expert, every expert padded to whole blocks.

    Attributes:
      slots: `[P]` int32, `token * K + k` of each row; -1 marks padding.
      weights: `[P]` router weights (0 for padding), or None.
      block_expert: `[P // block_size]` int32, the local expert of each block; -1 past the last used block.
      group_sizes: `[L]` int32, rows of each local expert, padding included.
      num_rows: `[]` int32, the sum of `group_sizes`; `num_rows // block_size` blocks are in use.
    """

    slots: Array
    weights: Array | None
    block_expert: Array
    group_sizes: Array
    num_rows: Array


@result_type
@dataclasses.dataclass(frozen=True)
class LowLatencyHandle:
    """The sources of the rows of a low-latency dispatch.

    Attributes:
      source_token: `[L, W * max_tokens_per_rank]` int32, token index on its source rank; -1 past the count.
      source_start: `[L, W]` int32, first row of each source rank within each expert.
      source_count: `[L, W]` int32, rows of each source rank within each expert.
      assignment_to_row: `[W, max_tokens_per_rank, K]` int32, row `expert * W * max_tokens_per_rank + i` of each
        assignment on this rank; -1: not here.
      num_invalid: `[]` int32, see `Handle`.
      layout: static sizes and axes; `num_tokens` is `max_tokens_per_rank`, `capacity` is `L * W * max_tokens_per_rank`.
      own_topk_idx: `[max_tokens_per_rank, K]` int32, expert ids of this rank's tokens, -1 for masked tokens; None if
        `group` is None.
      group: see `Handle`.
    """

    source_token: Array
    source_start: Array
    source_count: Array
    assignment_to_row: Array
    num_invalid: Array
    layout: Layout = dataclasses.field(metadata={"static": True})
    own_topk_idx: Array | None = None
    group: Array | None = None


@result_type
class LowLatencyDispatched(NamedTuple):
    """Tokens of a decode-sized batch, in one fixed block of rows per local expert.

    Attributes:
      tokens: `[L, W * max_tokens_per_rank, H]`, float8_e4m3fn if quantized; rows past the count are undefined.
      scales: `[L, W * max_tokens_per_rank, H // group_size]` float32, or None if not quantized.
      group_sizes: `[L]` int32, rows received by each local expert.
      handle: the input of `low_latency_combine`.
    """

    tokens: Array
    scales: Array | None
    group_sizes: Array
    handle: LowLatencyHandle


@result_type
class Routing(NamedTuple):
    """Decisions of a router.

    Attributes:
      topk_idx: `[T, K]` int32 expert ids, best first.
      topk_weights: `[T, K]` float32 (float64 for float64 logits), differentiable with respect to the logits.
      scores: `[T, E]` like the weights, the scores before selection, for `load_balancing_loss`.
    """

    topk_idx: Array
    topk_weights: Array
    scores: Array
