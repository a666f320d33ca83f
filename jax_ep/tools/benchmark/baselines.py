"""Baselines: the expert layer in plain JAX, on several GPUs and on one.

`ragged_layer` drops no token: it sorts rows by expert and uses `lax.ragged_all_to_all` and `lax.ragged_dot`.
`capacity_layer` is that of GShard (arXiv:2006.16668) and Switch Transformers (arXiv:2101.03961). It has a fixed number
of rows for each pair of source rank and expert, `lax.all_to_all` and one batched GEMM; rows beyond the capacity are
dropped.

These are functions of one rank inside `shard_map`, with contiguous experts per rank, and compute `jax_ep.moe` with
SwiGLU. Rows are moved by gathers, in the backward pass too: the transpose that JAX derives for a gather is a scatter,
which is far slower on GPUs. The backward pass recomputes the activation, like `jax_ep.moe`, which saves memory traffic.
JAX differentiates everything else.

Shapes: T tokens per rank, H hidden, K experts per token, E experts, W ranks, L = E / W, I intermediate.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

_AXIS = "expert"
RAGGED_OPTIONS = {"xla_gpu_unsupported_enable_ragged_all_to_all_decomposer": True}
"""Compiler options for the fastest `lax.ragged_all_to_all` on GPUs: 62 instead of 8 GB/s on 4 H200s."""


# --- moving rows ----------------------------------------------------------------------------------------------------


class Slots(NamedTuple):
    """Rows and assignments: `row_to_assignment [N]` is `token * K + k`; `assignment_to_row [T, K]` inverts it."""

    row_to_assignment: Array
    assignment_to_row: Array

    @property
    def row_token(self) -> Array:
        """`[N]` the token of each row."""
        return jnp.where(self.row_to_assignment < 0, -1, self.row_to_assignment // self.assignment_to_row.shape[1])


def gather(source: Array, index: Array) -> Array:
    """Return `source[index]`, with zeros where the index is -1."""
    return source.at[jnp.where(index < 0, source.shape[0], index)].get(mode="fill", fill_value=0)


@jax.custom_vjp
def spread(x: Array, slots: Slots) -> Array:
    """Gather `[T, H]` tokens to `[N, H]` rows."""
    return gather(x, slots.row_token)


def _sum_slots(rows: Array, weights: Array | None, slots: Slots) -> Array:
    """Sum `[N, H]` rows to `[T, H]` in float32 with one rounding, in one fused kernel without `[T, K, H]` in memory."""
    total = jnp.zeros((), jnp.float32)
    for k in range(slots.assignment_to_row.shape[1]):
        row = gather(rows, slots.assignment_to_row[:, k]).astype(jnp.float32)
        total = total + (row if weights is None else row * weights[:, k, None])
    return total.astype(rows.dtype)


spread.defvjp(lambda x, slots: (spread(x, slots), slots), lambda slots, d_rows: (_sum_slots(d_rows, None, slots), None))


@jax.custom_vjp
def collect(rows: Array, weights: Array, slots: Slots) -> Array:
    """Compute weighted sums `[T, H]` of `[N, H]` rows with `[T, K]` weights."""
    return _sum_slots(rows, weights, slots)


def _collect_backward(residuals: Any, d_out: Array) -> tuple[Array, Array, None]:
    rows, weights, slots = residuals
    scale = gather(weights.reshape(-1), slots.row_to_assignment)
    d_rows = gather(d_out, slots.row_token).astype(jnp.float32) * scale[:, None]
    taken = gather(rows, slots.assignment_to_row).astype(jnp.float32)
    d_weights = jnp.sum(taken * d_out[:, None].astype(jnp.float32), axis=-1)
    return d_rows.astype(rows.dtype), d_weights, None


collect.defvjp(lambda rows, weights, slots: (collect(rows, weights, slots), (rows, weights, slots)), _collect_backward)


@jax.custom_vjp
def permute(rows: Array, index: Array, inverse: Array) -> Array:
    """Return `rows[index]`; `inverse` is the inverse of `index`."""
    return gather(rows, index)


permute.defvjp(
    lambda rows, index, inverse: (gather(rows, index), inverse), lambda inverse, d: (gather(d, inverse), None, None)
)


@jax.checkpoint
def swiglu(hidden: Array) -> Array:
    """Compute silu of the first half times the second half, in float32 with one rounding."""
    gate, up = jnp.split(hidden.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(hidden.dtype)


class _Sorted(NamedTuple):
    """Assignments sorted by expert: `slots [N]`, `experts [N]`, and `counts [E]` per expert."""

    slots: Array
    experts: Array
    counts: Array

    @property
    def starts(self) -> Array:
        """`[E]` first sorted assignment of each expert."""
        return jnp.cumsum(self.counts, dtype=jnp.int32) - self.counts


def _sort_slots(topk_idx: Array, num_experts: int) -> _Sorted:
    ids = topk_idx.reshape(-1)
    experts, slots = lax.sort((ids, lax.iota(jnp.int32, ids.shape[0])), num_keys=1, is_stable=True)
    counts = jnp.sum(ids[:, None] == lax.iota(jnp.int32, num_experts)[None, :], axis=0, dtype=jnp.int32)
    return _Sorted(slots, experts, counts)


# --- fixed capacity -------------------------------------------------------------------------------------------------


def fixed_slots(topk_idx: Array, num_experts: int, capacity: int) -> Slots:
    """Assign row `expert * capacity + i` to the i-th assignment of each expert; beyond the capacity, none."""
    found = _sort_slots(topk_idx, num_experts)
    position = lax.iota(jnp.int32, found.slots.shape[0]) - found.starts[found.experts]
    num_rows = num_experts * capacity
    row = jnp.where(position < capacity, found.experts * capacity + position, num_rows)
    row_to_assignment = jnp.full((num_rows,), -1, jnp.int32).at[row].set(found.slots, mode="drop")
    assignment_to_row = jnp.zeros_like(row).at[found.slots].set(jnp.where(row < num_rows, row, -1), unique_indices=True)
    return Slots(row_to_assignment, assignment_to_row.reshape(topk_idx.shape))


def capacity_layer(*arguments: Array, num_experts: int, capacity: int) -> Array:
    """Compute the layer with a fixed number of rows for each pair of source rank and expert; drop the rest.

    The arguments are those of `jax_ep.moe`; `capacity`: rows of one expert for the tokens of one rank.
    """
    x, topk_idx, topk_weights, w_gate_up, w_down = arguments
    hidden_size = x.shape[1]
    slots = fixed_slots(topk_idx, num_experts, capacity)
    sent = spread(x, slots).reshape(num_experts, capacity, hidden_size)
    received = lax.all_to_all(sent, _AXIS, 0, 1, tiled=True)  # [L, W * capacity, H]
    hidden = jnp.einsum("lmh,lhf->lmf", received, w_gate_up)
    rows = jnp.einsum("lmi,lih->lmh", swiglu(hidden), w_down)
    returned = lax.all_to_all(rows, _AXIS, 1, 0, tiled=True)  # [E, capacity, H]
    return collect(returned.reshape(-1, hidden_size), topk_weights, slots)


# --- ragged ---------------------------------------------------------------------------------------------------------


class Route(NamedTuple):
    """Sizes and offsets of one rank's all-to-alls, and the order of its rows."""

    # Arguments of `lax.ragged_all_to_all` on the way to the experts: input offsets, send sizes, output offsets and
    # receive sizes, each `[W]`.
    there: tuple[Array, ...]
    back: tuple[Array, ...]  # the same on the way back
    regroup: Array  # `[R]` for each row by (expert, source), its row by (source, expert); rows past the last stay there
    ungroup: Array  # `[R]` the inverse
    group_sizes: Array  # `[L]`


def plan_route(sizes: Array, rank: Array, num_rows: int) -> Route:
    """Plan the route of one rank from `sizes [W, W, L]`: rows from each source for each expert of each destination."""
    totals = jnp.sum(sizes, axis=2, dtype=jnp.int32)
    sent_from = jnp.cumsum(totals, axis=1, dtype=jnp.int32) - totals  # first row for each rank on each source
    arrive_at = jnp.cumsum(totals, axis=0, dtype=jnp.int32) - totals  # first row of each source on each rank
    of = partial(lax.dynamic_index_in_dim, index=rank, keepdims=False)
    there = (of(sent_from, axis=0), of(totals, axis=0), of(arrive_at, axis=0), of(totals, axis=1))
    back = (of(arrive_at, axis=1), of(totals, axis=1), of(sent_from, axis=1), of(totals, axis=0))
    mine = of(sizes, axis=1)  # [W, L]
    num_local = mine.shape[1]
    ends = jnp.cumsum(mine.reshape(-1), dtype=jnp.int32)
    segments = jnp.searchsorted(ends, lax.iota(jnp.int32, num_rows), side="right")
    experts = jnp.where(segments < ends.shape[0], segments % num_local, num_local)
    regroup = jnp.argsort(experts, stable=True)
    return Route(there, back, regroup, jnp.argsort(regroup), jnp.sum(mine, axis=0, dtype=jnp.int32))


def ragged_layer(*arguments: Array, num_experts: int, capacity: int) -> Array:
    """Compute the layer without dropped tokens, by `lax.ragged_all_to_all` and `lax.ragged_dot`.

    The arguments are those of `jax_ep.moe`; `capacity`: R, the rows that one rank can receive; it must hold all rows.
    """
    x, topk_idx, topk_weights, w_gate_up, w_down = arguments
    num_ranks, hidden_size = lax.axis_size(_AXIS), x.shape[1]
    found = _sort_slots(topk_idx, num_experts)
    slots = Slots(found.slots, jnp.argsort(found.slots).reshape(topk_idx.shape))
    sizes = lax.all_gather(found.counts, _AXIS).reshape(num_ranks, num_ranks, -1)
    route = plan_route(sizes, lax.axis_index(_AXIS), capacity)

    arrived = jnp.zeros((capacity, hidden_size), x.dtype)
    arrived = lax.ragged_all_to_all(spread(x, slots), arrived, *route.there, axis_name=_AXIS)
    rows = permute(arrived, route.regroup, route.ungroup)
    hidden = lax.ragged_dot(rows, w_gate_up, route.group_sizes)
    rows = lax.ragged_dot(swiglu(hidden), w_down, route.group_sizes)
    returned = jnp.zeros((topk_idx.size, hidden_size), x.dtype)
    rows = permute(rows, route.ungroup, route.regroup)
    returned = lax.ragged_all_to_all(rows, returned, *route.back, axis_name=_AXIS)
    return collect(returned, topk_weights, slots)


# --- one device -----------------------------------------------------------------------------------------------------


def ragged_dot_layer(x: Array, ids: Array, weights: Array, w_gate_up: Array, w_down: Array) -> Array:
    """Compute the layer with `lax.ragged_dot`; assignments without an expert here are sorted behind all groups."""
    num_experts = w_down.shape[0]
    groups = jnp.where(ids < 0, num_experts, ids).reshape(-1)
    order = jnp.argsort(groups, stable=True)
    sizes = jnp.bincount(groups, length=num_experts)[:num_experts].astype(jnp.int32)
    rows = lax.ragged_dot(x[order // ids.shape[1]], w_gate_up, sizes)
    rows = lax.ragged_dot(swiglu(rows), w_down, sizes)
    scaled = rows.astype(jnp.float32) * weights.reshape(-1)[order][:, None]
    scaled = jnp.where((groups[order] < num_experts)[:, None], scaled, 0)
    return jnp.zeros((x.shape[0], x.shape[1]), jnp.float32).at[order // ids.shape[1]].add(scaled).astype(x.dtype)


def batched(x: Array, w_gate_up: Array, w_down: Array) -> Array:
    """Compute both GEMMs of `[E, M, H]` rows."""
    return jnp.einsum("emi,eih->emh", swiglu(jnp.einsum("emh,ehf->emf", x, w_gate_up)), w_down)
