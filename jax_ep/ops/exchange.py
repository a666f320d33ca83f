"""Dispatch and combine: the per-shard functions that move tokens to their experts and back.

Symbols: T tokens per rank, H hidden, K experts per token, E experts, W ranks on the expert axis, L = E / W local
experts, R rows of the expert-major layout.

Dispatch and combine are each other's transpose over the same handle, for tokens and for weights. So each backward pass
consists of functions of this file, and gradients of any order exist.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_ep import context
from jax_ep.core import check
from jax_ep.core.autodiff import batched_alike, transposes, without_gradient
from jax_ep.core.balance import Balance
from jax_ep.core.check import operation
from jax_ep.core.dtypes import accumulation_dtype
from jax_ep.core.facts import ExchangeFacts
from jax_ep.core.layout import count_invalid, dropless_capacity, handle_by_assignment, row_groups
from jax_ep.core.mesh_axes import known_after, spread_axes, sum_in_order, takes_global_arrays, vary_alike
from jax_ep.ops import balanced, hierarchical, registry
from jax_ep.ops import plan as plans
from jax_ep.ops.plan import ExchangePlan
from jax_ep.types import (
    Array,
    AxisName,
    Dispatched,
    Handle,
    HierarchicalHandle,
    Layout,
    Options,
    Quantized,
    Schedule,
    Tokens,
    Topology,
)

_NO_GRADIENT_OF_PAIRS = (
    "dispatch of a (values, scales) pair has no gradient: pass the tokens themselves, with FP8 as wire_dtype of the"
    " schedule."
)


@overload
def dispatch[Rows: (Array, Quantized)](
    x: Rows,
    topk_idx: Array | None,
    topk_weights: Array,
    *,
    num_experts: int,
    axis_name: str | tuple[str, ...] = "expert",
    capacity: int | None = None,
    balance: Balance | None = None,
    alignment: int = 1,
    num_tokens: Array | int | None = None,
    handle: Handle | None = None,
    schedule: Schedule | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Dispatched[Rows, Array, Handle]: ...


@overload
def dispatch[Rows: (Array, Quantized)](
    x: Rows,
    topk_idx: Array | None,
    topk_weights: None = None,
    *,
    num_experts: int,
    axis_name: str | tuple[str, ...] = "expert",
    capacity: int | None = None,
    balance: Balance | None = None,
    alignment: int = 1,
    num_tokens: Array | int | None = None,
    handle: Handle | None = None,
    schedule: Schedule | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Dispatched[Rows, None, Handle]: ...


@overload
def dispatch[Rows: (Array, Quantized), Weights: (Array, None)](
    x: Rows,
    topk_idx: Array | None,
    topk_weights: Weights = ...,
    *,
    num_experts: int,
    axis_name: Topology,
    capacity: int | None = None,
    alignment: int = 1,
    num_tokens: Array | int | None = None,
    handle: HierarchicalHandle | None = None,
    schedule: Schedule | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Dispatched[Rows, Weights, HierarchicalHandle]: ...


@operation
@takes_global_arrays()
def dispatch(
    x: Tokens,
    topk_idx: Array | None,
    topk_weights: Array | None = None,
    *,
    num_experts: int,
    axis_name: AxisName = "expert",
    capacity: int | None = None,
    balance: Balance | None = None,
    alignment: int = 1,
    num_tokens: Array | int | None = None,
    handle: Handle | HierarchicalHandle | None = None,
    schedule: Schedule | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Dispatched[Any, Any, Any]:
    """Send every token to the ranks that hold its experts, and order the rows by expert.

    Rows are ordered by expert, then source rank, token and k. Every `(token, k)` with a valid id has a row; the same
    expert twice in one token gives two. It is differentiable in `x` and `topk_weights`: the transpose is `combine` over
    the same handle.

    Args:
      x: `[T, H]` bfloat16, float16, float32 or float64 tokens of this rank, or FP8 tokens as a pair
        `(values [T, H] float8_e4m3fn, scales [T, H // 128] float32)`, which is sent bit for bit and has no gradient.
      topk_idx: `[T, K]` int32 expert ids; -1 is no expert. Other ids outside `[0, E)` raise outside of jit,
        where values are known. Under jit they count as -1, and `handle.num_invalid` counts them. May be None with
        `handle`.
      topk_weights: `[T, K]` float32 router weights, or None.
      num_experts: E over all ranks; rank r owns experts `[r * L, (r + 1) * L)`.
      axis_name: mesh axis, or tuple of axes, over which experts are spread; `()` on one device without a mesh. Or a
        `Topology`, whose node axis tokens cross once per node: rows of an expert are then ordered by local rank before
        node, and the handle is a `HierarchicalHandle`.
      capacity: R, static rows on each rank. None: enough for any routing (W * T * K plus alignment padding), so that
        nothing is dropped. Rows past it, in row order, are dropped and counted.
      balance: let every rank have at most `balance.rows * T * K` rows, and alignment padding, see `Balance`. Ranks with
        room have rows of copies of other ranks' experts: `jax_ep.placement.with_copies` returns their weights, and
        `group_sizes` and `row_experts` have S more groups. With `spare_experts=None`, S is L, and nothing is dropped; a
        smaller S bounds the memory of weights, and assignments that it cannot place are dropped and counted. Not with
        `capacity`, `handle` or a `Topology`; one rank has nothing to balance.
      alignment: every expert starts at a multiple of this many rows; `group_sizes` include that padding.
      num_tokens: `[]` int32, tokens at and past this index of this rank are ignored, as if their ids were -1: they have
        no rows, and may hold anything; None: all T count. Not with `handle`, which contains this.
      handle: handle of an earlier dispatch with the same ids, whose rows are reused.
      schedule: how kernels share the GPU, see `Schedule`; None: the package chooses.
      implementation: name, names in order of preference, or None for the best that fits.

    Returns:
      `Dispatched(tokens [R, H], weights [R] or None, group_sizes [L] int32, handle, dropped [] int32)`; padding rows
      are zero.

    Raises:
      ValueError: shapes, sizes or axes that do not fit; ids out of range where they are known.
      TypeError: unsupported dtypes or kinds of arguments.
      NotImplementedError: no requested implementation supports the call.

    Example:
      >>> import jax, jax.numpy as jnp, jax_ep
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((jax.device_count(),), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> def layer(x, idx, weights):  # per shard: [T, H], [T, K], [T, K]
      ...     d = jax_ep.dispatch(x, idx, weights, num_experts=16)
      ...     return jax_ep.combine(d.tokens * d.weights[:, None], d.handle)
      >>> x, idx = jnp.ones((16, 8)), jnp.arange(32, dtype=jnp.int32).reshape(16, 2) % 16
      >>> run = jax.shard_map(layer, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
      >>> float(jax.jit(run)(x, idx, jnp.full((16, 2), 0.5)).sum())
      128.0

    Source: the expert-major layout is that of MegaBlocks (arXiv:2211.15841).
    """
    sizes: dict[str, Any] = {"num_experts": num_experts, "capacity": capacity, "alignment": alignment}
    sizes["num_tokens"] = num_tokens
    balanced.check_balance("dispatch", balance, axis_name, capacity, handle)
    if isinstance(axis_name, Topology):
        schedule = registry.checked_schedule("dispatch", schedule, axis_name)
        over_nodes = cast(HierarchicalHandle | None, handle)
        sizes |= {"schedule": schedule, "handle": over_nodes, "implementation": implementation}
        return hierarchical.dispatch(dispatch, x, topk_idx, topk_weights, axis_name=axis_name, **sizes)
    options = registry.options("dispatch", axis_name, implementation, schedule)
    here = cast(Handle | None, handle)  # `checked` checks its type
    given = checked(options, check.tokens("dispatch", x), topk_idx, topk_weights, handle=here, **sizes)
    moved: dict[str, Any] = {}
    if balance is not None and given.facts.layout.num_ranks > 1 and given.topk_idx.size:
        given, moved = _balanced(balance, given)
    return _dispatched(given, moved)


def _dispatched(given: Checked, moved: dict[str, Any]) -> Dispatched[Tokens, Array | None, Handle]:
    """Run the dispatch of checked arguments; `moved` are the fields of the handle that balancing adds."""
    plan = plans.exchange(given.options, given.facts)
    (x, topk_weights, handle), _ = located(plan, given, None)
    tokens: Tokens
    if isinstance(x, tuple):
        pair = without_gradient(_NO_GRADIENT_OF_PAIRS, x)
        tokens, weights = dispatch_pair(plan, pair, topk_weights, handle)
    elif moved:
        tokens, weights, moved["order"] = _dispatch_in_order(plan, x, topk_weights, handle)
    else:
        tokens, weights = dispatch_tokens(plan, x, topk_weights, handle)
    if moved:
        # Copies travel after the tokens on all ranks.
        moved["copies"] = known_after(moved["copies"], jax.tree.leaves(tokens)[0])
        handle = vary_alike(dataclasses.replace(handle, **moved), over=given.options.axis)
    return Dispatched(tokens, weights, handle.group_sizes, handle, handle.num_dropped)


@operation
@takes_global_arrays()
def combine(
    y: Array,
    handle: Handle | HierarchicalHandle,
    *,
    axis_name: AxisName = "expert",
    preferred_element_type: DTypeLike | None = None,
    schedule: Schedule | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Array:
    """Send expert outputs back to the ranks of their tokens and sum them there, unweighted.

    Multiply the rows by `Dispatched.weights` first for a weighted sum. Rows of one token on one rank are added in order
    of k in float32, rounded to the wire format, and added at the source in rank order in float32. Over a `Topology` the
    sums of a node are rounded to the wire format too, and added in node order. The result is deterministic. It is
    differentiable in `y`: the transpose is `dispatch` over the same handle.

    Args:
      y: `[R, H]` rows in the order of the dispatch; padding rows are never read.
      handle: `Dispatched.handle`.
      axis_name: the axis of the dispatch.
      preferred_element_type: dtype of the result, such as float32 for sums that are not rounded to bfloat16 again; the
        wire keeps the dtype of y. None: that of y.
      schedule: see `dispatch`.
      implementation: see `dispatch`.

    Returns:
      `[T, H]`; zero for tokens without experts.

    Raises:
      ValueError: y or the axis does not fit the handle.
      TypeError: unsupported dtypes, or `handle` is not a handle.
      NotImplementedError: no requested implementation supports the call.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> d = jax_ep.dispatch(jnp.ones((2, 4)), jnp.array([[0, 1], [1, -1]]), num_experts=2, axis_name=())
      >>> jax_ep.combine(d.tokens, d.handle, axis_name=())[:, 0].tolist()
      [2.0, 1.0]
    """
    function = "combine"
    if isinstance(axis_name, Topology):
        return hierarchical.combine(
            combine,
            y,
            cast(HierarchicalHandle, handle),  # checked there
            axis_name=axis_name,
            schedule=registry.checked_schedule(function, schedule, axis_name),
            preferred_element_type=preferred_element_type,
            implementation=implementation,
        )
    options = registry.options(function, axis_name, implementation, schedule)
    layout = check.handle(function, handle, Handle, axis_name)
    remedy = "pass one row per row of the dispatch that made the handle"
    y = check.floating(function, "y", y, "[R, H >= 1]", remedy=remedy, R=layout.capacity)
    sum_dtype = check.result_dtype(function, preferred_element_type, y.dtype)
    wire_dtype = check.wire(function, options.wire_dtype, y.dtype, y.shape[1])
    options = dataclasses.replace(options, wire_dtype=wire_dtype, sum_dtype=sum_dtype)
    context.compare(function, layout, wire_dtype, y)
    y, handle = vary_alike((y, handle), over=options.axis)
    flat = cast(Handle, handle)  # checked above
    plan = plans.exchange(options, plans.exchange_facts(y.dtype, y.shape[1], flat))
    return combine_tokens(plan, y, None, flat)[0]


@operation
@takes_global_arrays()
def row_experts(handle: Handle | HierarchicalHandle) -> Array:
    """Return the local expert of every row of a dispatch, for your own expert functions.

    Args:
      handle: `Dispatched.handle`, of one rank.

    Returns:
      `[R]` int32 in `[0, L)`; -1 for padding.

    Raises:
      TypeError: `handle` is not a handle.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> d = jax_ep.dispatch(jnp.ones((2, 4)), jnp.array([[1], [0]]), num_experts=2, axis_name=(), capacity=3)
      >>> jax_ep.row_experts(d.handle).tolist()
      [0, 1, -1]
    """
    handle = handle.local if isinstance(handle, HierarchicalHandle) else handle
    remedy = "pass Dispatched.handle"
    check.instance("row_experts", "handle", handle, Handle, "the Handle of a dispatch", remedy=remedy)
    check.one_rank("row_experts", handle)
    groups = row_groups(handle.group_sizes, handle.row_to_assignment.shape[0])
    return jnp.where(handle.row_to_assignment < 0, -1, groups)


class Checked(NamedTuple):
    """Checked arguments of a dispatch, where `x` may be a quantized pair, and the facts on which its plan depends."""

    options: Options
    facts: ExchangeFacts
    x: Any  # tokens, or a quantized pair
    topk_idx: Any  # or None with a handle
    topk_weights: Any  # or None
    handle: Handle | None


def checked(
    options: Options,
    x: Tokens,
    topk_idx: Array | None,
    topk_weights: Array | None,
    *,
    num_experts: int,
    capacity: int | None = None,
    alignment: int = 1,
    num_tokens: Array | int | None = None,
    handle: Handle | None = None,
) -> Checked:
    """Check the arguments of a dispatch of checked tokens."""
    function = options.function
    values = x[0] if isinstance(x, tuple) else x
    num_experts, num_ranks = check.experts(function, num_experts, options.axis)
    if options.axis:
        check.known_rows(function, "x", "on a mesh axis", values.shape[0])
    topk_idx = check.counted_ids(function, topk_idx, (values.shape[0], num_experts), num_tokens, handle)
    top_k = 0 if topk_idx is None else topk_idx.shape[1]
    wanted = Layout(num_ranks, num_experts, values.shape[0], top_k, 0, alignment, spread_axes(options.axis))
    layout = _layout(options, wanted, capacity, handle)
    if topk_weights is not None:
        topk_weights = check.router_weights(function, topk_weights, (layout.num_tokens, layout.top_k), values.dtype)
    # FP8 values travel as they are.
    wire_dtype = check.wire(function, options.wire_dtype, values.dtype, values.shape[1])
    options = dataclasses.replace(options, wire_dtype=wire_dtype)
    is_foreign = handle is not None and handle.group is None
    facts = ExchangeFacts(values.dtype, values.shape[1], layout, is_foreign)
    return Checked(options, facts, x, topk_idx, topk_weights, handle)


def without_unused_rows(given: Checked) -> Checked:
    """Limit the capacity, which memory is allocated for, to the rows that some routing needs."""
    layout = given.facts.layout
    most = dropless_capacity(layout.num_slots, layout.num_local_experts, layout.alignment)
    if not isinstance(most, int) or layout.capacity <= most:
        return given
    return given._replace(facts=dataclasses.replace(given.facts, layout=dataclasses.replace(layout, capacity=most)))


def _balanced(balance: Balance, given: Checked) -> tuple[Checked, dict[str, Any]]:
    """Move assignments to ranks with room; return also what the handle then has."""
    layout, ids = given.facts.layout, given.topk_idx
    passes, (slots, copies, _), (left, _) = balanced.place(balance, given.options, given.facts, ids)
    groups = layout.num_local_experts + passes.spare
    sizes: dict[str, Any] = {"num_experts": layout.num_ranks * groups, "alignment": layout.alignment}
    sizes["capacity"] = dropless_capacity(passes.rows, groups, layout.alignment)
    dropped, invalid = jnp.sum(left >= 0, dtype=jnp.int32), count_invalid(ids, layout.num_experts)
    moved = {"copies": copies, "order": jnp.zeros((), jnp.float32), "num_dropped": dropped, "num_invalid": invalid}
    return checked(given.options, given.x, slots, given.topk_weights, **sizes), moved


class Located(NamedTuple):
    """Tokens and weights that vary over the same mesh axes, and the handle of their all-to-all."""

    x: Any  # tokens, or a quantized pair
    topk_weights: Any  # or None
    handle: Handle


def located[Weights](plan: ExchangePlan, given: Checked, weights: Weights) -> tuple[Located, Weights]:
    """Make the handle where there is none; expert weights vary over the same mesh axes then."""
    options, layout = plan.options, given.facts.layout
    arrays = given.x, given.topk_idx, given.topk_weights, given.handle, weights
    x, topk_idx, topk_weights, handle, weights = vary_alike(arrays, over=options.axis)
    context.compare(options.function, layout, given.options.wire_dtype, (x, topk_weights))
    if handle is None:
        run = registry.EXCHANGE.by(plan.handle.implementation)
        handle = run.plan(options, topk_idx, layout)
    if layout.num_tokens != 0:  # without tokens, XLA of JAX 0.11.2 rejects the call whose operands are all empty
        x, topk_weights = batched_alike((x, topk_weights), (handle, weights))
    return Located(x, topk_weights, handle), weights


def _layout(options: Options, wanted: Layout, capacity: int | None, handle: Handle | None) -> Layout:
    """Return the static sizes of a dispatch: `wanted` with its capacity, or those of the handle that it reuses."""
    function = options.function
    alignment = check.integer(function, "alignment", wanted.alignment)
    capacity = check.capacity(function, capacity, alignment)
    if handle is not None:
        return check.reused_layout(function, handle, wanted, capacity, options.axis)
    if wanted.top_k == 0:
        raise ValueError(f"{function}: topk_idx is None and handle is None; pass the expert ids [T, K], or a handle.")
    # Rows past the capacity are numbered too, before they are dropped.
    most = dropless_capacity(wanted.num_slots, wanted.num_local_experts, alignment)
    sizes = f"{wanted.num_ranks} ranks * {wanted.num_tokens} tokens * K={wanted.top_k} with {alignment=}"
    check.int32_rows(function, sizes, most, "pass fewer tokens in each call, or a smaller alignment")
    return dataclasses.replace(wanted, capacity=most if capacity is None else capacity, alignment=alignment)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch_tokens(plan: ExchangePlan, x: Array, weights: Array | None, handle: Handle) -> tuple[Array, Array | None]:
    """`[T, H]` tokens and `[T, K]` weights to `[R, H]` and `[R]` rows; transpose of `combine_tokens`."""
    return registry.EXCHANGE.by(plan.dispatch.implementation).dispatch_tokens(plan.options, x, weights, handle)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine_tokens(
    plan: ExchangePlan, y: Array, row_weights: Array | None, handle: Handle
) -> tuple[Array, Array | None]:
    """`[R, H]` rows to `[T, H]` sums, and `[R]` row values to their `[T, K]` slots; transpose of `dispatch_tokens`."""
    run, options = registry.EXCHANGE.by(plan.combine.implementation).combine_tokens, plan.options
    if not plan.adds_at_sources:
        return run(options, y, row_weights, handle)
    wide, shape = accumulation_dtype(y.dtype), (handle.layout.num_tokens, handle.layout.top_k)
    unrounded = dataclasses.replace(options, sum_dtype=y.dtype if options.wire_dtype is None else wide)
    rows, slots = run(unrounded, y, row_weights, handle_by_assignment(handle))
    total = sum_in_order(jnp.swapaxes(rows.reshape(*shape, -1), 0, 1).astype(wide))
    return total.astype(options.sum_dtype or y.dtype), None if slots is None else slots.reshape(shape)


def dispatch_again(plan: ExchangePlan, x: Array, handle: Handle, after: Array) -> Array:
    """`[T, H]` tokens that were sent before to `[R, H]` rows, once `after` is known.

    Else XLA might make one dispatch of both, and keep its rows.
    """
    x, after = lax.optimization_barrier((x, after))
    return dispatch_tokens(plan, x, None, later(handle, after))[0]


def later(handle: Handle, earlier: Array) -> Handle:
    """Make the launches that use a handle wait for `earlier`, since kernels need one order on all ranks.

    Each launch reads one of three arrays, which get the data dependence.
    """
    if handle.group is None or handle.layout.num_ranks == 1:
        return handle
    names = "row_to_assignment", "assignment_to_row", "group_sizes"
    changed: dict[str, Any] = {name: known_after(getattr(handle, name), earlier) for name in names}
    return dataclasses.replace(handle, **changed)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatch_in_order(
    plan: ExchangePlan, x: Array, weights: Array | None, handle: Handle
) -> tuple[Array, Array | None, Array]:
    """`dispatch_tokens`, and `Handle.order`: its gradient is known once those of copies are home; combine follows."""
    order = vary_alike((jnp.zeros((), jnp.float32), x))[0]
    return *dispatch_tokens(plan, x, weights, handle), order


transposes(
    _dispatch_in_order,
    lambda plan, y, row_weights, order, handle: combine_tokens(plan, y, row_weights, later(handle, order)),
)
transposes(dispatch_tokens, combine_tokens)
transposes(combine_tokens, dispatch_tokens)


def dispatch_quantized(
    plan: ExchangePlan, x: Array, weights: Array | None, handle: Handle
) -> tuple[Quantized, Array | None]:
    """`[T, H]` tokens to `[R]` rows in FP8, as they travel, with scales; and `[T, K]` weights to `[R]`: no gradient."""
    return registry.EXCHANGE.by(plan.dispatch.implementation).dispatch_quantized(plan.options, x, weights, handle)


def dispatch_pair(
    plan: ExchangePlan, pair: Quantized, weights: Array | None, handle: Handle
) -> tuple[Quantized, Array | None]:
    """FP8 values and scales of `[T]` tokens to `[R]` rows, bit for bit, and the weights of the rows."""
    values = registry.EXCHANGE.by(plan.dispatch.implementation).dispatch_rows(plan.options, pair[0], handle)
    # Dispatch the scales as float32 tokens, so that the router weights have a gradient.
    scales, row_weights = dispatch_tokens(plan, pair[1], weights, later(handle, values))
    return (values, scales), row_weights
