"""Redistribution of rows between ranks: each row is sent once per target, without padding.

Each row sent is an edge from a source to a target rank. The edges are colored so that no rank sends or receives two
rows of one color, with as many colors as the busiest rank has edges (Koenig's theorem). Each color is one
`lax.ppermute`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep.core.mesh_axes import permute, rank_on, vary_alike
from jax_ep.types import Array


@dataclasses.dataclass(frozen=True, eq=False)
class Relayout:
    """The static plan of a redistribution: which rank sends which row to which rank."""

    axis: tuple[str, ...]  # mesh axes of the ranks, in order; empty for one rank
    num_sources: int  # source rows per rank
    # `[W, S]` local source row of each target row, or `num_sources` if another rank sends it. May be traced if there is
    # one rank.
    own_rows: np.ndarray | Array
    pairs: tuple[tuple[tuple[int, int], ...], ...]  # for each round the pairs (source, target) of ranks
    sent_rows: np.ndarray  # `[rounds, W]` row that each rank sends
    received_rows: np.ndarray  # `[rounds, W]` target row that each rank receives, or S for none


def make(sources: np.ndarray | Array, num_source_rows: int, num_ranks: int, axis: tuple[str, ...]) -> Relayout:
    """Plan a redistribution in which global target row i copies global source row `sources[i]`, `[S * W]`.

    `sources` may be traced if there is one rank.
    """
    if num_ranks == 1:
        nothing = np.zeros((0, 1), np.int32)
        return Relayout(axis, num_source_rows, sources.astype(np.int32)[None], (), nothing, nothing)
    sources = np.asarray(sources)
    num_sources, num_targets = num_source_rows // num_ranks, len(sources) // num_ranks
    source_rank, row = np.divmod(sources, num_sources)
    target_rank, slot = np.divmod(np.arange(len(sources)), num_targets)
    own = source_rank == target_rank
    own_rows = np.where(own, row, num_sources).reshape(num_ranks, num_targets).astype(np.int32)
    moved = np.flatnonzero(~own)
    edges = [(int(source_rank[i]), int(target_rank[i])) for i in moved]
    colors = color(edges, num_ranks)
    num_rounds = 1 + max(colors, default=-1)
    sent_rows = np.zeros((num_rounds, num_ranks), np.int32)
    received_rows = np.full((num_rounds, num_ranks), num_targets, np.int32)
    pairs: list[list[tuple[int, int]]] = [[] for _ in range(num_rounds)]
    for i, (source, target), found in zip(moved, edges, colors, strict=True):
        pairs[found].append((source, target))
        sent_rows[found, source], received_rows[found, target] = row[i], slot[i]
    return Relayout(axis, num_sources, own_rows, tuple(map(tuple, pairs)), sent_rows, received_rows)


def color(edges: Sequence[tuple[int, int]], num_ranks: int) -> list[int]:
    """Color the edges (source, target) with as few colors as possible; edges that share a source or a target differ."""
    degrees = [np.bincount(side, minlength=num_ranks).max() for side in np.array(edges).T] if edges else [0]
    used = np.full((2, num_ranks, max(degrees)), -1)  # Edge of each color at each source and target.
    colors = [-1] * len(edges)
    for new, ends in enumerate(edges):
        at_source, at_target = (int(np.argmin(used[side, ends[side]] >= 0)) for side in (0, 1))
        # An alternating path from the target that starts with the source's free color never reaches the source.
        path, side, node, wanted = [], 1, ends[1], at_source
        while (edge := int(used[side, node, wanted])) >= 0:
            path.append(edge)
            side = 1 - side
            node, wanted = edges[edge][side], at_source + at_target - wanted
        for edge in path:
            for side in (0, 1):
                used[side, edges[edge][side], colors[edge]] = -1
        for edge, found in (*((edge, at_source + at_target - colors[edge]) for edge in path), (new, at_source)):
            colors[edge] = found
            for side in (0, 1):
                used[side, edges[edge][side], found] = edge
    return colors


def gather(plan: Relayout, w: Array) -> Array:
    """Gather the target rows `[S, ...]` from the source rows, inside a `shard_map` over the plan's axes."""
    (w,) = vary_alike((w,), over=plan.axis)
    run = _gather if jnp.issubdtype(w.dtype, jnp.floating) else _copy
    return run(plan, w, _own_rows(plan))


def scatter(plan: Relayout, w: Array) -> Array:
    """Apply the transpose of `gather`: sum into each source row the target rows that copy it."""
    (w,) = vary_alike((w,), over=plan.axis)
    run = _scatter if jnp.issubdtype(w.dtype, jnp.floating) else _add
    return run(plan, w, _own_rows(plan))


def _own_rows(plan: Relayout) -> Array:
    return jnp.asarray(plan.own_rows)[rank_on(plan.axis)]


def _copy(plan: Relayout, w: Array, own_rows: Array) -> Array:
    rank, out = rank_on(plan.axis), w.at[own_rows].get(mode="fill", fill_value=0)
    for pairs, sent, received in zip(plan.pairs, plan.sent_rows, plan.received_rows, strict=True):
        row = permute(w[jnp.asarray(sent)[rank]], plan.axis, pairs)
        out = out.at[jnp.asarray(received)[rank]].set(row, mode="drop")
    return out


def _add(plan: Relayout, w: Array, own_rows: Array) -> Array:
    """Sum rows one by one in a fixed order, so that results are deterministic; 16-bit floats accumulate in float32."""
    small = jnp.issubdtype(w.dtype, jnp.floating) and w.dtype.itemsize < 4
    dtype = jnp.dtype(jnp.float32) if small else w.dtype
    total, _ = vary_alike((jnp.zeros((plan.num_sources, *w.shape[1:]), dtype), w))

    def add_own(i: Array, total: Array) -> Array:
        return total.at[own_rows[i]].add(w[i].astype(dtype), mode="drop")

    rank, total = rank_on(plan.axis), lax.fori_loop(0, w.shape[0], add_own, total)
    for pairs, sent, received in zip(plan.pairs, plan.sent_rows, plan.received_rows, strict=True):
        row = w.at[jnp.asarray(received)[rank]].get(mode="fill", fill_value=0)
        row = permute(row, plan.axis, [(target, source) for source, target in pairs])
        total = total.at[jnp.asarray(sent)[rank]].add(row.astype(dtype))
    return total.astype(w.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(plan: Relayout, w: Array, own_rows: Array) -> Array:
    return _copy(plan, w, own_rows)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scatter(plan: Relayout, w: Array, own_rows: Array) -> Array:
    return _add(plan, w, own_rows)


_gather.defvjp(
    lambda plan, w, own_rows: (_gather(plan, w, own_rows), own_rows),
    lambda plan, own_rows, cotangent: (_scatter(plan, cotangent, own_rows), None),
)
_scatter.defvjp(
    lambda plan, w, own_rows: (_scatter(plan, w, own_rows), own_rows),
    lambda plan, own_rows, cotangent: (_gather(plan, cotangent, own_rows), None),
)
