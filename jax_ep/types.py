"""Static configurations and result pytrees: everything that crosses a function boundary, with its shapes.

Symbols, per shard: T tokens per rank, H hidden size, K experts per token, E experts, W ranks on the expert axis,
L = E / W local experts, I expert intermediate size, R rows of the expert-major layout.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np
from jax.typing import DTypeLike

TOKENS_NAME = "jax_ep.tokens"
"""What `jax.checkpoint` policies know dispatched tokens as."""
HIDDEN_NAME = "jax_ep.hidden"
"""And the results of the first product."""
OUTPUT_NAME = "jax_ep.output"
"""And those of the layer."""
Array = jax.Array
Quantized = tuple[Array, Array]
"""FP8 rows: `(values float8_e4m3fn [N, H], scales float32 [N, H // group_size])`."""
Tokens = Array | Quantized
"""Rows `[N, H]` as they are, or in FP8."""


def result_type[Result](cls: type[Result]) -> type[Result]:
    """Registers a class of the package that crosses function boundaries: a pytree that `jax.export` can serialize.

    A NamedTuple, a dataclass whose static fields say so in their metadata, or a class with the methods that
    `jax.tree_util.register_pytree_with_keys_class` wants. Static values are what JSON has, or a `Layout`.
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
        serialize_auxdata=lambda static: json.dumps(static, default=dataclasses.asdict).encode(),
        deserialize_auxdata=lambda text: tuple(json.loads(text, object_hook=_layout)),
    )


def _layout(fields: dict[str, Any]) -> Layout:
    return Layout(**fields | {"axis": tuple(fields["axis"])})


def type_name(value: object) -> str:
    """The type of a value with its article, as errors give it: "an int"."""
    if isinstance(value, jax.Array):
        return "a traced array" if isinstance(value, jax.core.Tracer) else "an array"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


@dataclasses.dataclass(frozen=True)
class Topology:
    """Mesh axes of the experts of which one is slow: tokens cross it once per node, and spread inside the node.

    Taken as `axis_name` in the place of the tuple `(node, local)`, with the same experts on the same ranks: those of a
    node are contiguous, and so are those of a rank. The tuple alone means one exchange among all ranks.

    Attributes:
      node: mesh axis, or tuple of axes, between nodes.
      local: mesh axis, or tuple of axes, inside a node.
      num_blocks: of a layer, into how many blocks its tokens `[T, H]` are divided, each with exchanges and products of
        its own, so that one block can cross nodes while another is multiplied. Other functions do not read it.
      node_capacity: tokens that a rank keeps at most of those that come to it over the node axis, its own among them,
        in the order of nodes; in a layer, of each block. Their slots in this node are counted as dropped where more
        come. None: as many as there are, the ranks of `node` times T.

    Raises:
      ValueError: an axis that is named twice, or none; a number less than one.
      TypeError: a value of another type.

    Example:
      >>> import jax_ep
      >>> jax_ep.Topology(node="node", local="expert").axes
      ('node', 'expert')

    Source: the exchange limited to nodes of DeepSeek-V3 (arXiv:2412.19437, section 3.2.2).
    """

    node: str | tuple[str, ...]
    local: str | tuple[str, ...]
    num_blocks: int = 1
    node_capacity: int | None = None

    def __post_init__(self) -> None:
        for field in ("node", "local"):
            value = getattr(self, field)
            names = (value,) if isinstance(value, str) else value
            if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
                raise TypeError(
                    f"Topology: {field}={value!r} is {type_name(value)}, expected the name of a mesh axis, a str,"
                    " or a tuple of names; pass e.g. Topology(node='node', local='expert')."
                )
            if not names:
                raise ValueError(
                    f"Topology: {field}={value!r} names no axis, expected at least one; pass the other axes alone as"
                    " axis_name."
                )
        if len(set(self.axes)) != len(self.axes):
            raise ValueError(
                f"Topology: node={self.node!r} and local={self.local!r} name an axis twice; expected different axes:"
                " remove the repeated one."
            )
        for field in ("num_blocks", "node_capacity"):
            value = getattr(self, field)
            if value is None and field == "node_capacity":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"Topology: {field}={value!r} is {type_name(value)}, expected an int; pass one.")
            if value < 1:
                raise ValueError(f"Topology: {field}={value}, expected 1 or more; pass a positive number.")

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
        """All axes, nodes first: in this order they number the ranks."""
        return self.node_axes + self.local_axes


AxisName = str | tuple[str, ...] | Topology
"""One mesh axis, several with one exchange over all of them, or several of which some are slow."""

DISPATCH_MODES = ("fused", "serial")
COMBINE_MODES = ("scatter", "serial")
ACTIVATIONS = ("silu", "gelu", "gelu_exact", "relu", "relu_squared")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How an operation's launches share the GPU. It changes times and memory, and of results some roundings' order.

    Everything is the package's choice where it is None. A mode, or `fuse_weight_gradients=True`, is an error where
    there is no such launch; numbers that a launch has no use for are not read. A handle does not depend on the
    schedule: one may be used with several.

    Attributes:
      dispatch_mode: "fused": one kernel for dispatch and product, in which tokens travel while the rows of those that
        have arrived are multiplied; "serial": a kernel for each. "fused" exists in `triton`, for tokens of 16 bits
        without `wire_dtype`.
      combine_mode: "scatter": one kernel for product and combine, which stores every row at the rank of its token,
        where the K rows of a token are added and rounded once; "serial": a kernel for each, which rounds the sum of
        each expert rank, then that of the ranks. "scatter" exists where "fused" does. Gradients are the same in both.
      fuse_weight_gradients: True: in the backward pass of dispatch + product, the gradient of the matrices comes from
        the launch that sends the gradient of the tokens, whose other programs multiply meanwhile; False: from a launch
        of its own. True exists where "fused" does.
      keep_tokens: of dispatch + product: True: tokens are kept for the gradient of the matrices as they have arrived,
        under the name `jax_ep.tokens`; False, as None: they are sent again in the backward pass, or on one device read
        where they lie, which takes one more exchange, or a copy, and no memory between the passes.
      num_communicating_programs: of dispatch + product in one kernel, how many programs, of one per multiprocessor,
        send tokens before they multiply too: fewer leave more to the first products, more send sooner. Of a dispatch
        alone, at most how many it has.
      num_combining_programs: at most how many programs a launch of combine has.
      num_summing_programs: of combine beside the gradient of the matrices, how many programs make sums; the others
        multiply.
      num_warps: of each program of dispatch and of combine, a power of two up to 16.
      tokens_per_block: of dispatch and combine, tokens that share a flag, a power of two: fewer tell of arrivals
        sooner, more cost fewer flags.
      rows_in_flight: rows on their way to each program of combine while it adds others, 1 to 10.
      single_launch: True: the whole layer of one device, `fused_moe`, is one launch; False: several. True exists in
        `triton`, for tokens of 16 bits. Where a gradient is wanted, the layer runs in several in any case.

    Raises:
      ValueError: an unknown mode, or a number out of its range.
      TypeError: a value of another type.

    Example:
      >>> import jax_ep
      >>> jax_ep.Schedule(dispatch_mode="serial").combine_mode is None
      True
    """

    dispatch_mode: str | None = None
    combine_mode: str | None = None
    fuse_weight_gradients: bool | None = None
    keep_tokens: bool | None = None
    num_communicating_programs: int | None = None
    num_combining_programs: int | None = None
    num_summing_programs: int | None = None
    num_warps: int | None = None
    tokens_per_block: int | None = None
    rows_in_flight: int | None = None
    single_launch: bool | None = None

    def __post_init__(self) -> None:
        for name, known in (("dispatch_mode", DISPATCH_MODES), ("combine_mode", COMBINE_MODES)):
            mode = getattr(self, name)
            if mode is not None and (not isinstance(mode, str) or mode not in known):
                raise ValueError(
                    f"Schedule: {name}={mode!r}, expected one of {known}, or None for what should be fastest."
                )
        for name in ("fuse_weight_gradients", "keep_tokens", "single_launch"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise TypeError(
                    f"Schedule: {name}={value!r} is {type_name(value)}, expected True, False, or None for the"
                    " package's choice."
                )
        for name in ("num_communicating_programs", "num_combining_programs", "num_summing_programs"):
            self._check_number(name, 1, 1 << 16)
        self._check_number("num_warps", 1, 16, power_of_two=True)
        self._check_number("tokens_per_block", 1, 1024, power_of_two=True)
        self._check_number("rows_in_flight", 1, 10)

    def _check_number(self, name: str, least: int, most: int, *, power_of_two: bool = False) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(
                f"Schedule: {name}={value!r} is {type_name(value)}, expected an int, or None for the default."
            )
        if not least <= value <= most or (power_of_two and value & (value - 1)):
            kind = "a power of two" if power_of_two else "a number"
            raise ValueError(
                f"Schedule: {name}={value}, expected {kind} from {least} to {most}; None takes the default."
            )


@dataclasses.dataclass(frozen=True)
class Experts:
    """What an expert computes: `act(gate) * (up + up_offset)` between its matrices, or `act(hidden)` without gates.

    The hidden rows are `x @ w_gate_up`, plus `b_gate_up` where the experts have biases. All fields beside `activation`
    and `weight_on` are of the activations of this package; a function of the caller's does all by itself.

    Attributes:
      activation: "silu", "gelu" (the tanh approximation), "gelu_exact", "relu" or "relu_squared"; or a JAX function of
        hidden rows `[R, N]`, all their columns, to rows `[R, I]`, each from the row in its place. Such a function may
        use arrays from around it, which get gradients. It runs as a pass of its own. Pass the same function object in
        every call, or programs are compiled again. Where a tensor axis splits I, it gets a rank's share of the columns,
        so it must make a column of each kind by itself.
      gated: half of the columns are gates. Of a function of the caller's, that layers which make their own matrices
        give it 2 * I columns, and else I; other functions take any number.
      interleaved: gates are in the even columns and what they multiply in the odd ones; else in halves.
      alpha: of "silu", `x * sigmoid(alpha * x)`.
      clamp: gates are at most this much, and what they multiply at most and, negative, at least; None: no limit.
      up_offset: added to what gates multiply.
      weight_on: "output": router weights scale what experts return; "input": what they get, as in Llama 4.

    Raises:
      ValueError: an unknown name, a field for gates where there are none, or a limit that is not positive.
      TypeError: a value of another type.

    Example:
      >>> import jax_ep
      >>> of_gpt_oss = jax_ep.Experts("silu", interleaved=True, alpha=1.702, clamp=7.0, up_offset=1.0)
      >>> of_gpt_oss.gated, jax_ep.Experts("relu_squared", gated=False).gated
      (True, False)

    Source: gated linear units (arXiv:2002.05202); limits and offset as in gpt-oss (arXiv:2508.10925).
    """

    activation: str | Callable[[Array], Array] = "silu"
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    clamp: float | None = None
    up_offset: float = 0.0
    weight_on: str = "output"

    def __post_init__(self) -> None:
        if isinstance(self.activation, str) and self.activation not in ACTIVATIONS:
            raise ValueError(
                f"Experts: activation={self.activation!r}, expected one of {ACTIVATIONS}, or a JAX function of the"
                " hidden rows."
            )
        if not isinstance(self.activation, str) and not callable(self.activation):
            raise TypeError(
                f"Experts: activation is {type_name(self.activation)}, expected one of {ACTIVATIONS}, or a JAX"
                " function of the hidden rows."
            )
        if self.weight_on not in ("output", "input"):
            raise ValueError(f"Experts: weight_on={self.weight_on!r}, expected 'output' or 'input'; pass one of them.")
        for name in ("gated", "interleaved"):
            if not isinstance(getattr(self, name), bool):
                value = getattr(self, name)
                raise TypeError(f"Experts: {name}={value!r} is {type_name(value)}, expected True or False.")
        for name in ("alpha", "clamp", "up_offset"):
            self._check_number(name)
        self._check_fields()

    def _check_number(self, name: str) -> None:
        value = getattr(self, name)
        if name == "clamp" and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
            raise TypeError(f"Experts: {name}={value!r} is {type_name(value)}, expected a number; pass a float.")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        object.__setattr__(self, name, value)
        if not math.isfinite(value) or (name == "clamp" and value <= 0):
            kind = "a positive number, or None for no limit" if name == "clamp" else "a finite number"
            raise ValueError(f"Experts: {name}={value}, expected {kind}; pass one.")

    def _check_fields(self) -> None:
        """What has no meaning beside the activation or without a gate."""
        changed = {f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        if callable(self.activation):
            useless = changed - {"activation", "gated", "weight_on"}
            reason = "a function of the caller's gets whole hidden rows and does all by itself"
        elif not self.gated:
            useless, reason = changed & {"interleaved", "up_offset"}, "experts without a gate have one kind of columns"
        else:
            useless, reason = set(), ""
        if self.activation != "silu" and "alpha" in changed:
            useless, reason = useless | {"alpha"}, reason or "only 'silu' has it"
        if useless:
            raise ValueError(f"Experts: {sorted(useless)} with {self.activation=}, {self.gated=}: {reason}; leave out.")


@dataclasses.dataclass(frozen=True)
class Options:
    """What the keywords of one public call settle, checked once and passed on unchanged: static, hashable.

    Attributes:
      function: the public function, for messages.
      axis: mesh axes over which the experts are spread; `()` for one device.
      implementation: names in order of preference, or None for the best that fits.
      wire_dtype: FP8 where tokens are quantised to travel, or None to send them as they are.
      schedule: how launches share the GPU.
      sum_dtype: of the sums that combine returns, or None for that of the rows that it adds. Their transposes take and
        return what the rows are made of, see `transposed`.
      recipe: "fp8", or None for products in the dtype of the tokens.
    """

    function: str
    axis: tuple[str, ...] = ()
    implementation: tuple[str, ...] | None = None
    wire_dtype: DTypeLike | None = None
    schedule: Schedule = Schedule()
    sum_dtype: DTypeLike | None = None
    recipe: str | None = None

    @property
    def transposed(self) -> Options:
        """Those of the backward pass."""
        return dataclasses.replace(self, sum_dtype=None)

    @property
    def alone(self) -> bool:
        """Whether the caller named one implementation, and none to fall back to."""
        return self.implementation is not None and len(self.implementation) == 1


@dataclasses.dataclass(frozen=True)
class Layout:
    """What is static in one dispatch: its sizes, from which it alone derives every other, and its mesh axes.

    Attributes:
      num_ranks: W, ranks on the expert axis.
      num_experts: E, experts over all ranks, contiguous per rank.
      num_tokens: T, tokens per rank.
      top_k: K, experts per token.
      capacity: R, rows of the expert-major layout on each rank.
      alignment: every group starts at a multiple of this many rows.
      axis: mesh axes over which the experts are spread, in order, without those of one rank, which change nothing.
    """

    num_ranks: int
    num_experts: int
    num_tokens: int
    top_k: int
    capacity: int
    alignment: int = 1
    axis: tuple[str, ...] = ()

    @property
    def num_local_experts(self) -> int:
        """L = E / W."""
        return self.num_experts // self.num_ranks

    @property
    def num_slots(self) -> int:
        """W * T * K: the (source rank, token, k) triples that can ask for a row."""
        return self.num_ranks * self.num_tokens * self.top_k


@result_type
@dataclasses.dataclass(frozen=True)
class Handle:
    """Where every row of a dispatch came from, and where every slot went; a pytree, so a value like any other.

    Attributes:
      row_slot: `[R]` int32. `(source_rank * T + token) * K + k` of each row; -1 marks padding.
      slot_row: `[W, T, K]` int32. The row of each slot on this rank; -1: not here, dropped or no expert.
      group_sizes: `[L]` int32. Rows of each local expert, alignment padding included.
      ids: `[W, T, K]` int32. Expert ids of the tokens of all ranks.
      group: `[W + 1]` int32, device numbers of the ranks and this rank's position, where the implementation writes to
        its peers' memory; else None.
      num_invalid: `[]` int32. Ids of this rank's tokens outside `[0, E)` other than -1; they were treated as -1.
      num_dropped: `[]` int32. Slots that should have had a row on this rank, but lay past its capacity.
      layout: static sizes and axes.
    """

    row_slot: Array
    slot_row: Array
    group_sizes: Array
    ids: Array
    group: Array | None
    num_invalid: Array
    num_dropped: Array
    layout: Layout = dataclasses.field(metadata={"static": True})


@result_type
@dataclasses.dataclass(frozen=True)
class HierarchicalHandle:
    """Where the rows of a dispatch over a `Topology` came from: one handle for each leg; a pytree.

    Attributes:
      node: of the exchange between the ranks of the same place in their nodes, whose "experts" are the nodes: its rows
        are the tokens that came to this rank, ordered by node and token.
      local: of the exchange inside the node, whose tokens are these rows.
      num_invalid: `[]` int32, see `Handle`.
      num_dropped: `[]` int32. Slots that should have had a row on this rank and lay past its capacity, and slots in
        this node of tokens that came to this rank past `Topology.node_capacity`.
    """

    node: Handle
    local: Handle
    num_invalid: Array
    num_dropped: Array

    @property
    def group_sizes(self) -> Array:
        """`[L]` int32, see `Handle`."""
        return self.local.group_sizes


@result_type
class Dispatched(NamedTuple):
    """Tokens in expert-major order on the rank that owns the experts.

    Attributes:
      tokens: `[R, H]`, ordered by expert, source rank, token, k; padding rows are zero. A `(values, scales)` pair
        when the input was one.
      weights: `[R]` router weight of each row (0 for padding), or None when no weights were given.
      group_sizes: `[L]` int32, ready for `grouped_gemm` and `lax.ragged_dot`.
      handle: what `combine` and a later `dispatch(handle=...)` need.
      dropped: `[]` int32, rows that did not fit this rank's `capacity`.
    """

    tokens: Tokens
    weights: Array | None
    group_sizes: Array
    handle: Handle | HierarchicalHandle
    dropped: Array


@result_type
class DispatchedGemm(NamedTuple):
    """`Dispatched` whose rows went through the local experts' matrices.

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
    """Slots of one device sorted by expert, every expert padded to whole blocks.

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
    """Where the rows of a low-latency dispatch came from.

    Attributes:
      source_token: `[L, W * max_tokens_per_rank]` int32, token index on its source rank; -1 past the count.
      source_start: `[L, W]` int32, first row of each source rank within each expert.
      source_count: `[L, W]` int32, rows of each source rank within each expert.
      slot_row: `[W, max_tokens_per_rank, K]` int32, row `expert * W * max_tokens_per_rank + i` of each slot on this
        rank; -1: not here.
      num_invalid: `[]` int32, see `Handle`.
      layout: static sizes and axes; `num_tokens` is `max_tokens_per_rank`, `capacity` is `L * W * max_tokens_per_rank`.
      own_ids: `[max_tokens_per_rank, K]` int32, expert ids of this rank's tokens, -1 for those that do not count; None
        where `group` is.
      group: see `Handle`.
    """

    source_token: Array
    source_start: Array
    source_count: Array
    slot_row: Array
    num_invalid: Array
    layout: Layout = dataclasses.field(metadata={"static": True})
    own_ids: Array | None = None
    group: Array | None = None


@result_type
class LowLatencyDispatched(NamedTuple):
    """Tokens of a decode-sized batch, in one fixed block of rows per local expert.

    Attributes:
      tokens: `[L, W * max_tokens_per_rank, H]`, float8_e4m3fn where quantised; rows past the count hold anything.
      scales: `[L, W * max_tokens_per_rank, H // group_size]` float32, or None where not quantised.
      group_sizes: `[L]` int32, rows received by each local expert.
      handle: what `low_latency_combine` needs.
    """

    tokens: Array
    scales: Array | None
    group_sizes: Array
    handle: LowLatencyHandle


@result_type
class Routing(NamedTuple):
    """What a router decided.

    Attributes:
      topk_idx: `[T, K]` int32 expert ids, best first.
      topk_weights: `[T, K]` float32 (float64 for float64 logits), differentiable with respect to the logits.
      scores: `[T, E]` like the weights, the scores before selection, for `load_balancing_loss`.
    """

    topk_idx: Array
    topk_weights: Array
    scores: Array
