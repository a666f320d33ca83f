"""Rows of arrays that are spread over ranks, moved to other ranks and copied there: each travels once, and unpadded.

What travels is an edge from one rank to another. The edges are coloured so that no rank has two of one colour on either
side, with as few colours as the busiest rank has edges (Koenig's theorem); each colour is one `lax.ppermute`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep.core.mesh_axes import vary_alike
from jax_ep.types import Array


@dataclasses.dataclass(frozen=True, eq=False)
class Relayout:
    """Who sends which row where; static.

    Attributes:
      axis: mesh axes of the ranks, in order; none for one rank.
      num_sources: rows of each rank before.
      own_rows: `[W, S]` own row of each row afterwards, or `num_sources` where another rank sends it; traced sources
        of one rank are here alone.
      pairs: for each round the pairs (source, target) of ranks.
      sent_rows: `[rounds, W]` row that a rank sends.
      received_rows: `[rounds, W]` row afterwards that a rank receives, or S for none.
    """

    axis: tuple[str, ...]
    num_sources: int
    own_rows: np.ndarray | Array
    pairs: tuple[tuple[tuple[int, int], ...], ...]
    sent_rows: np.ndarray
    received_rows: np.ndarray


def make(sources: np.ndarray | Array, num_source_rows: int, num_ranks: int, axis: tuple[str, ...]) -> Relayout:
    """Of `sources [S * W]`, the row of all ranks' rows before that each of their rows afterwards repeats.

    Where there is one rank, they may be traced.
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
    travelling = np.flatnonzero(~own)
    edges = [(int(source_rank[i]), int(target_rank[i])) for i in travelling]
    colours = colour(edges, num_ranks)
    num_rounds = 1 + max(colours, default=-1)
    sent_rows = np.zeros((num_rounds, num_ranks), np.int32)
    received_rows = np.full((num_rounds, num_ranks), num_targets, np.int32)
    pairs: list[list[tuple[int, int]]] = [[] for _ in range(num_rounds)]
    for i, (source, target), found in zip(travelling, edges, colours, strict=True):
        pairs[found].append((source, target))
        sent_rows[found, source], received_rows[found, target] = row[i], slot[i]
    return Relayout(axis, num_sources, own_rows, tuple(map(tuple, pairs)), sent_rows, received_rows)


def colour(edges: Sequence[tuple[int, int]], num_ranks: int) -> list[int]:
    """A colour of each edge (source, target), as few as there can be, so that those of a rank differ on either side."""
    degrees = [np.bincount(side, minlength=num_ranks).max() for side in np.array(edges).T] if edges else [0]
    used = np.full((2, num_ranks, max(degrees)), -1)  # the edge that a source, and a target, has of a colour
    colours = [-1] * len(edges)
    for new, ends in enumerate(edges):
        at_source, at_target = (int(np.argmin(used[side, ends[side]] >= 0)) for side in (0, 1))
        # What begins at the target with the source's free colour, and alternates, never comes to the source.
        path, side, node, wanted = [], 1, ends[1], at_source
        while (edge := int(used[side, node, wanted])) >= 0:
            path.append(edge)
            side = 1 - side
            node, wanted = edges[edge][side], at_source + at_target - wanted
        for edge in path:
            for side in (0, 1):
                used[side, edges[edge][side], colours[edge]] = -1
        for edge, found in (*((edge, at_source + at_target - colours[edge]) for edge in path), (new, at_source)):
            colours[edge] = found
            for side in (0, 1):
                used[side, edges[edge][side], found] = edge
    return colours


def gather(plan: Relayout, w: Array) -> Array:
    """Rows afterwards `[S, ...]` from those before, inside a `shard_map` over the plan's axes."""
    (w,) = vary_alike((w,), over=plan.axis)
    return (
        _gather(plan, w, _own_rows(plan)) if jnp.issubdtype(w.dtype, jnp.floating) else _copy(plan, w, _own_rows(plan))
    )


def scatter(plan: Relayout, w: Array) -> Array:
    """The transpose of `gather`: rows before, each the sum of what repeats it."""
    (w,) = vary_alike((w,), over=plan.axis)
    return (
        _scatter(plan, w, _own_rows(plan)) if jnp.issubdtype(w.dtype, jnp.floating) else _add(plan, w, _own_rows(plan))
    )


def _own_rows(plan: Relayout) -> Array:
    return jnp.asarray(plan.own_rows)[_rank(plan)]


def _rank(plan: Relayout) -> Array | int:
    return lax.axis_index(plan.axis) if plan.axis else 0


def _copy(plan: Relayout, w: Array, own_rows: Array) -> Array:
    rank, out = _rank(plan), w.at[own_rows].get(mode="fill", fill_value=0)
    for pairs, sent, received in zip(plan.pairs, plan.sent_rows, plan.received_rows, strict=True):
        row = lax.ppermute(w[jnp.asarray(sent)[rank]], plan.axis, pairs)
        out = out.at[jnp.asarray(received)[rank]].set(row, mode="drop")
    return out


def _add(plan: Relayout, w: Array, own_rows: Array) -> Array:
    """One row after another, in one order, so that sums have the same bits in every run; of short floats in float32."""
    small = jnp.issubdtype(w.dtype, jnp.floating) and w.dtype.itemsize < 4
    dtype = jnp.dtype(jnp.float32) if small else w.dtype
    total, _ = vary_alike((jnp.zeros((plan.num_sources, *w.shape[1:]), dtype), w))

    def add_own(i: Array, total: Array) -> Array:
        return total.at[own_rows[i]].add(w[i].astype(dtype), mode="drop")

    rank, total = _rank(plan), lax.fori_loop(0, w.shape[0], add_own, total)
    for pairs, sent, received in zip(plan.pairs, plan.sent_rows, plan.received_rows, strict=True):
        row = w.at[jnp.asarray(received)[rank]].get(mode="fill", fill_value=0)
        row = lax.ppermute(row, plan.axis, [(target, source) for source, target in pairs])
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
