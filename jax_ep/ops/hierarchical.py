"""All-to-alls in two legs: between nodes, where links are slow, and inside each node.

First, ranks with the same local index exchange tokens, each token once per node that holds one of its experts. This is
the portable all-to-all, with nodes as its experts. Then the tokens that arrived pass an ordinary all-to-all, or layer,
inside the node, on the fastest implementation there. Sums return the same way: first inside the node, then across.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_ep import context
from jax_ep.core import check, operations
from jax_ep.core.autodiff import transposes
from jax_ep.core.layout import count_invalid, gather_rows, row_tokens
from jax_ep.core.mesh_axes import all_gather, axis_size, rank_on, spread_axes, vary_alike
from jax_ep.ops import registry
from jax_ep.types import (
    Array,
    Dispatched,
    Handle,
    HierarchicalHandle,
    Layout,
    Options,
    Schedule,
    Tokens,
    Topology,
)


def _exchange() -> operations.Exchange:
    """XLA's collectives, which reach other machines."""
    return registry.EXCHANGE.by("xla")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _to_nodes(options: Options, x: Array, handle: Handle) -> Array:
    """`[T, H]` tokens to `[N, H]`, those that have come to this rank; transpose of `_from_nodes`."""
    return _exchange().dispatch_tokens(options, x, None, handle)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _from_nodes(options: Options, y: Array, handle: Handle) -> Array:
    """`[N, H]` sums of nodes to those of tokens `[T, H]`, in the order of nodes; transpose of `_to_nodes`."""
    return _exchange().combine_tokens(options, y, None, handle)[0]


transposes(_to_nodes, _from_nodes)
transposes(_from_nodes, _to_nodes)


class Arrived(NamedTuple):
    """N tokens that arrived at a rank over the node axis, as inputs of the all-to-all inside the node."""

    x: Tokens  # `[N, H]` tokens, or a pair of FP8 values and scales; zero in slots without a token
    topk_idx: Array | None  # `[N, K]` experts, numbered from 0 in this node, or None if a handle was given
    topk_weights: Array | None  # `[N, K]`, or None
    handle: Handle  # of the all-to-all between nodes
    num_dropped: Array  # `[]` assignments of tokens that had no room


def _options(function: str, topology: Topology, wire_dtype: DTypeLike | None = None) -> Options:
    return Options(function, topology.node_axes, ("xla",), wire_dtype)


def send(
    options: Options, topology: Topology, x: Tokens, topk_idx: Array, topk_weights: Array | None, num_experts: int
) -> Arrived:
    """Send tokens to the nodes of their experts; all arguments are checked and vary over the same mesh axes."""
    num_nodes = axis_size(options.axis, function=options.function)
    per_node = num_experts // num_nodes
    num_tokens, top_k = topk_idx.shape
    layout = _layout(options, topology, num_tokens, top_k, num_nodes)
    sizes = f"over nodes, {topology}, {num_experts=}, K={top_k}, {layout}"
    context.compare(options.function, sizes, options.wire_dtype, (x, topk_weights))
    handle = _plan(options, topk_idx, per_node, layout)
    ids = all_gather(topk_idx, options.axis).reshape(-1, topk_idx.shape[1]) - rank_on(options.axis) * per_node
    is_here = (ids >= 0) & (ids < per_node)
    tokens = row_tokens(handle)
    ids_here = gather_rows(jnp.where(is_here, ids + 1, 0), tokens) - 1  # -1 in rows without a token
    num_dropped = jnp.sum(is_here, dtype=jnp.int32) - jnp.sum(ids_here >= 0, dtype=jnp.int32)
    rows, row_weights = _send_along(options, x, topk_weights, handle)
    return Arrived(rows, ids_here, row_weights, handle, num_dropped)


def _send_along(options: Options, x: Tokens, topk_weights: Array | None, handle: Handle) -> tuple[Tokens, Array | None]:
    """Send tokens and their weights to the nodes of a handle."""
    if isinstance(x, tuple):
        values, scales = (_exchange().dispatch_rows(options, part, handle) for part in x)
        rows: Tokens = (values, scales)
    else:
        rows = _to_nodes(options, x, handle)
    if topk_weights is not None:
        topk_weights = _to_nodes(dataclasses.replace(options, wire_dtype=None), topk_weights, handle)
    return rows, topk_weights


def _layout(options: Options, topology: Topology, num_tokens: int, top_k: int, num_nodes: int) -> Layout:
    capacity = num_nodes * num_tokens
    if topology.node_capacity is not None:
        capacity = min(capacity, topology.node_capacity)
    return Layout(num_nodes, num_nodes, num_tokens, min(num_nodes, top_k), capacity, axis=spread_axes(options.axis))


def _plan(options: Options, topk_idx: Array, per_node: int, layout: Layout) -> Handle:
    """Plan the all-to-all between nodes, in which each token goes to a node at most once."""
    valid = (topk_idx >= 0) & (topk_idx < layout.num_ranks * per_node)
    nodes = jnp.where(valid, topk_idx // per_node, -1)
    is_same = nodes[:, :, None] == nodes[:, None, :]
    is_repeated = jnp.any(is_same & jnp.tri(topk_idx.shape[1], k=-1, dtype=jnp.bool_)[None], axis=2)
    nodes = lax.top_k(jnp.where(is_repeated, -1, nodes), layout.top_k)[0]
    return _exchange().plan(options, nodes, layout)


def dispatch(
    inside: Callable[..., Dispatched[Any, Any, Handle]],
    x: Tokens,
    topk_idx: Array | None,
    topk_weights: Array | None,
    *,
    num_experts: int,
    axis_name: Topology,
    num_tokens: Array | int | None,
    schedule: Schedule,
    handle: HierarchicalHandle | None,
    **keywords: object,
) -> Dispatched[Tokens, Array | None, HierarchicalHandle]:
    """`dispatch` over nodes, then `inside`, which is `dispatch`, in the node with further keywords."""
    topology = axis_name
    num_experts, _ = check.experts("dispatch", num_experts, topology)
    x, topk_idx, topk_weights = _checked(x, topk_idx, topk_weights, num_experts, topology, num_tokens, handle)
    values = x[0] if isinstance(x, tuple) else x
    wire_dtype = check.wire("dispatch", schedule.wire_dtype, values.dtype, values.shape[1])
    options = _options("dispatch", topology, wire_dtype)
    x, topk_idx, topk_weights, handle = vary_alike((x, topk_idx, topk_weights, handle), over=topology.axes)
    if handle is None:
        topk_idx = cast(Array, topk_idx)
        arrived = send(options, topology, x, topk_idx, topk_weights, num_experts)
        num_invalid, local = count_invalid(topk_idx, num_experts), None
    else:
        rows, row_weights = _send_along(options, x, topk_weights, handle.node)
        arrived = Arrived(rows, None, row_weights, handle.node, handle.num_dropped - handle.local.num_dropped)
        num_invalid, local = handle.num_invalid, handle.local
    d = inside(
        *arrived[:3],
        num_experts=num_experts // axis_size(topology.node_axes, function="dispatch"),
        axis_name=topology.local,
        handle=local,
        schedule=dataclasses.replace(schedule, wire_dtype=None),
        **keywords,
    )
    num_dropped = arrived.num_dropped + d.dropped
    both = HierarchicalHandle(arrived.handle, d.handle, num_invalid, num_dropped)
    return Dispatched(d.tokens, d.weights, d.group_sizes, both, num_dropped)


def _checked(
    x: Tokens,
    topk_idx: Array | None,
    topk_weights: Array | None,
    num_experts: int,
    topology: Topology,
    num_tokens: Array | int | None,
    handle: HierarchicalHandle | None,
) -> tuple[Tokens, Array | None, Array | None]:
    """Check the arrays of a `dispatch` over nodes; ids of tokens that do not count become -1."""
    function = "dispatch"
    x = check.tokens(function, x)
    values = x[0] if isinstance(x, tuple) else x
    num_rows = values.shape[0]
    check.known_rows(function, "x", "on a mesh axis", num_rows)
    topk_idx = check.counted_ids(function, topk_idx, (num_rows, num_experts), num_tokens, handle)
    if handle is not None:
        top_k = checked_handle(function, handle, topology, num_rows)
    elif topk_idx is not None:
        top_k = topk_idx.shape[1]
    else:
        raise ValueError(f"{function}: topk_idx is None and handle is None; pass the expert ids [T, K], or a handle.")
    if topk_weights is not None:
        topk_weights = check.router_weights(function, topk_weights, (num_rows, top_k), values.dtype)
    return x, topk_idx, topk_weights


def checked_handle(function: str, handle: Any, topology: Topology, num_tokens: int | None = None) -> int:
    """Check a handle of these axes, for this many tokens; return K."""
    expected, remedy = "the HierarchicalHandle of the matching dispatch", f"pass one of axis_name={topology!r}"
    check.instance(function, "handle", handle, HierarchicalHandle, expected, remedy=remedy)
    layout = check.handle(function, handle.node, Handle, topology.node)
    check.handle(function, handle.local, Handle, topology.local)
    if num_tokens is not None:
        remedy = "pass as many tokens as to the dispatch that made the handle"
        check.size(function, "the number of tokens", num_tokens, layout.num_tokens, remedy)
    return handle.local.layout.top_k


def combine(
    inside: Callable[..., Array],
    y: Array,
    handle: HierarchicalHandle,
    *,
    axis_name: Topology,
    schedule: Schedule,
    preferred_element_type: DTypeLike | None,
    **keywords: object,
) -> Array:
    """Sum rows with `inside`, which is `combine`, in the node, and then across nodes."""
    function = "combine"
    y = check.floating(function, "y", y, "[R, H >= 1]")
    checked_handle(function, handle, axis_name)
    sum_dtype = check.result_dtype(function, preferred_element_type, y.dtype)
    options = _options(function, axis_name, check.wire(function, schedule.wire_dtype, y.dtype, y.shape[1]))
    context.compare(function, f"over nodes, {axis_name}", options.wire_dtype, y)
    y, handle = vary_alike((y, handle), over=axis_name.axes)
    sums = inside(
        y, handle.local, axis_name=axis_name.local, schedule=dataclasses.replace(schedule, wire_dtype=None), **keywords
    )
    return _from_nodes(dataclasses.replace(options, sum_dtype=sum_dtype), sums, handle.node)


def layer(
    function: str,
    inside: Callable[..., Array],
    tokens: tuple[Array, Array, Array],
    num_experts: int,
    topology: Topology,
    wire_dtypes: tuple[DTypeLike | None, DTypeLike | None],
    sum_dtype: DTypeLike | None,
) -> Array:
    """Send tokens across nodes, run the layer `inside` each node, and send its sums back across nodes.

    `wire_dtypes` are those of dispatch and of combine. Blocks of tokens are independent, so XLA may send one while it
    computes another.
    """
    x, topk_idx, topk_weights = tokens
    check.known_rows(function, "x", "on a mesh axis", x.shape[0])
    num_experts, _ = check.experts(function, num_experts, topology)
    topk_idx = check.expert_ids(function, topk_idx, x.shape[0], num_experts)
    topk_weights = check.router_weights(function, topk_weights, topk_idx.shape, x.dtype)
    wires = (check.wire(function, dtype, x.dtype, x.shape[1]) for dtype in wire_dtypes)
    out, back = (_options(function, topology, wire) for wire in wires)
    back = dataclasses.replace(back, sum_dtype=check.result_dtype(function, sum_dtype, x.dtype))
    arrays = vary_alike((x, topk_idx, topk_weights), over=topology.axes)
    inside = partial(
        inside, num_experts=num_experts // axis_size(out.axis, function=function), axis_name=topology.local
    )
    if x.shape[0] == 0:
        return inside(*arrays).astype(back.sum_dtype)
    size = -(-x.shape[0] // topology.num_blocks)
    sums = []
    for start in range(0, x.shape[0], size):
        block = [a[start : start + size] for a in arrays]
        arrived = send(out, topology, block[0], block[1], block[2], num_experts)
        sums.append(_from_nodes(back, inside(*arrived[:3]), arrived.handle))
    return sums[0] if len(sums) == 1 else jnp.concatenate(sums)
