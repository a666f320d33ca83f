"""Plan of one balanced pass: which rank computes which rows, and which experts it needs copies of.

T tokens per rank, K experts per token, E experts, W ranks, L = E / W experts at home, R rows that a rank computes in a
pass, S spare slots for copies of experts per rank.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jax_ep.core.balance import PassPlan
from jax_ep.types import Array


class _Moves(NamedTuple):
    """State of the search. `home [E]`: rows that stay at home; `loads [W]`: rows per rank; `copies`, `moved [W, S]`."""

    home: Array
    loads: Array
    copies: Array
    moved: Array


def plan_pass(counts: Array, rows: int, spare: int) -> PassPlan:
    """Plan a pass in which no rank computes more than `rows` rows or holds more than `spare` copies.

    While a rank has more than `rows`, each move takes rows of the largest expert of the most loaded rank to the rank
    with the most room. An even move takes no more than brings the giver down to the mean; a filling move takes all that
    fits, so the giver may receive rows itself later, which hands surpluses on in chains. A move is even as long as the
    free slots are then certain to hold the remaining excess. Moving down to the mean instead of to `rows` makes no more
    copies, and the layer takes as long as the most loaded rank.

    One pass is enough if `sum(min(room, spare * (rows // L + 1))) >= sum(excess)`, hence always with `spare >= L`. The
    largest expert of an overloaded rank has at least `chunk = rows // L + 1` rows, so a filling move places this many
    or fills the receiver. Let F be the sum over ranks of `min(room, free slots * chunk)`. A filling move of n rows
    lowers F by at most n at the receiver, and what the giver hands over beyond its excess returns to F as room. So it
    never lowers F minus the total excess, and an even move leaves it at 0 or more. While there is excess there is
    another move. There are at most `W * spare`.

    Args:
      counts: `[W, E]` int32 assignments from each source rank to each expert.
      rows: R, at least the mean number of assignments per rank.
      spare: S.
    """
    num_ranks = counts.shape[0]
    totals = _sum(counts, 0)
    copies = jnp.full_like(counts, -1, shape=(num_ranks, spare))
    moves = _Moves(totals, _sum(totals.reshape(num_ranks, -1), 1), copies, jnp.zeros_like(copies))
    # A fixed number of steps needs no synchronization with the host; steps without excess move nothing.
    moves = lax.fori_loop(0, num_ranks * spare, lambda _, state: _move(state, rows), moves)
    share = _shares(moves)
    # A rank that is still overloaded computes its first rows, by expert.
    kept = jnp.clip(rows - (_cumsum(share, 1) - share), 0, share)
    own = jnp.minimum(counts, kept)
    travelling = counts - own
    starts = _cumsum(travelling, 0) - travelling
    ends = _cumsum(kept - own, 0)
    left = travelling - jnp.clip(ends[-1:] - starts, 0, travelling)
    return PassPlan(moves.copies, own, ends, starts, left)


def _move(state: _Moves, rows: int) -> _Moves:
    """Move rows of one expert, or nothing if no rank has excess or none has room and a free slot."""
    home, loads, copies, moved = state
    num_ranks, num_local = loads.shape[0], home.shape[0] // loads.shape[0]
    free = _sum(copies < 0, 1)
    room, excess = jnp.maximum(rows - loads, 0), jnp.maximum(loads - rows, 0)
    usable = jnp.where(free > 0, room, 0)
    giver, receiver = _argmax(loads), _argmax(usable)
    at_giver = jnp.where(_arange(home.shape[0]) // num_local == giver, home, -1)
    expert = _argmax(at_giver)
    fill = jnp.minimum(usable[receiver], home[expert])
    even = jnp.minimum(fill, loads[giver] - _sum(loads) // num_ranks)
    is_receiver = (_arange(num_ranks) == receiver).astype(jnp.int32)
    direction = is_receiver - (_arange(num_ranks) == giver).astype(jnp.int32)
    room_after = jnp.maximum(rows - loads - even * direction, 0)
    certain = _sum(jnp.minimum(room_after, (free - is_receiver) * (rows // num_local + 1)))
    total = _sum(excess)
    is_even = certain >= total - jnp.minimum(even, excess[giver])
    n = jnp.where(total > 0, jnp.where(is_even, even, fill), 0)
    slot = jnp.where(n > 0, copies.shape[1] - free[receiver], copies.shape[1])  # past the end: nothing is stored
    return _Moves(
        home.at[expert].add(-n),
        loads + n * direction,
        copies.at[receiver, slot].set(expert, mode="drop"),
        moved.at[receiver, slot].set(n, mode="drop"),
    )


def _shares(moves: _Moves) -> Array:
    """Rows of each expert that each rank computes, `[W, E]`."""
    num_ranks, num_experts = moves.loads.shape[0], moves.home.shape[0]
    rank, expert = _arange(num_ranks)[:, None], _arange(num_experts)[None]
    at_home = jnp.where(expert // (num_experts // num_ranks) == rank, moves.home[None], 0)
    columns = jnp.where(moves.copies < 0, num_experts, moves.copies)
    return at_home.at[rank, columns].add(moves.moved, mode="drop")


def place_assignments(topk_idx: Array, counts: Array, plan: PassPlan, rank: Array | int) -> tuple[Array, Array]:
    """Slot of each assignment in this pass, and the expert ids that remain for later passes.

    Args:
      topk_idx: `[T, K]` int32 expert ids of this rank; -1 is no expert.
      counts: `[W, E]` for which the pass was planned; row `rank` counts `topk_idx`.
      plan: of the pass.
      rank: this rank.

    Returns:
      `[T, K]` slots `holder * (L + S) + i`, where i < L is an expert at home and `L + s` is spare slot s, or -1; and
      `[T, K]` expert ids left, or -1.
    """
    num_ranks, num_experts = counts.shape
    num_local, spare = num_experts // num_ranks, plan.copies.shape[1]
    ids = topk_idx.reshape(-1)
    is_used = ids >= 0
    # Position of each assignment among those of this rank to the same expert, in order of token and k.
    order = jnp.argsort(jnp.where(is_used, ids, num_experts), stable=True)
    mine = counts[rank]
    first = (_cumsum(mine, 0) - mine)[ids[order]]
    position = jnp.zeros_like(ids).at[order].set(_arange(ids.size) - first)
    own = plan.own[rank, ids]
    place = plan.starts[rank, ids] + position - own
    holder = jnp.where(position < own, rank, _sum(place[None] >= plan.ends[:, ids], 0))  # W: a later pass
    is_now = is_used & (holder < num_ranks)
    copy = num_local + _argmax(plan.copies[jnp.minimum(holder, num_ranks - 1)] == ids[:, None], 1)
    slot = jnp.where(holder == ids // num_local, ids % num_local, copy)
    slots = jnp.where(is_now, holder * (num_local + spare) + slot, -1)
    return slots.reshape(topk_idx.shape), jnp.where(is_now, -1, ids).reshape(topk_idx.shape)


def _sum(x: Array, axis: int | None = None) -> Array:
    return jnp.sum(x, axis, dtype=jnp.int32)  # JAX widens sums of integers where 64-bit types are on


def _cumsum(x: Array, axis: int) -> Array:
    return jnp.cumsum(x, axis, dtype=jnp.int32)


def _arange(size: int) -> Array:
    return jnp.arange(size, dtype=jnp.int32)


def _argmax(x: Array, axis: int | None = None) -> Array:
    return jnp.argmax(x, axis).astype(jnp.int32)
