"""Which tokens travel between which ranks, once per token and rank, and where they lie: a segment per pair of ranks.

On a rank with experts there is a place for each token, of any rank, that has rows here, ordered by source rank and
token. On the token's own rank there is a place for each other end, ordered by the rank of the experts and the token.
Both orders follow from the handle alone, so tokens travel without numbers of theirs.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jax_ep.core.collectives import Axis, exchange
from jax_ep.types import Array, Handle, Layout, LowLatencyHandle


class Segments(NamedTuple):
    """What one rank sends and gets, one segment per peer, in rank order and without gaps.

    Attributes:
      sent: `[C]` int32, which token, or sum, fills each place of what is sent; -1 past it.
      send_counts: `[W]` int32, places sent to each rank.
      receive_counts: `[W]` int32, places that each rank sends here.
    """

    sent: Array
    send_counts: Array
    receive_counts: Array


class Places(NamedTuple):
    """Places of tokens at both ends, -1 for none: `here [W, T]` of any rank's tokens, `home [W, T]` of this rank's."""

    here: Array
    home: Array


def _number(mask: Array) -> Array:
    """Consecutive numbers for what is in `mask`, in order; -1 elsewhere."""
    count = jnp.cumsum(mask.reshape(-1), dtype=jnp.int32).reshape(mask.shape)
    return jnp.where(mask, count - 1, -1)


def starts(counts: Array) -> Array:
    """`[W]` int32 first place of each segment."""
    return jnp.cumsum(counts, dtype=jnp.int32) - counts


def places(handle: Handle | LowLatencyHandle, axis: Axis) -> Places:
    """Of tokens that have rows: ranks tell each other for which tokens that is so, one byte each."""
    arrived = jnp.any(handle.slot_row >= 0, axis=-1)
    sent = exchange(arrived.astype(jnp.uint8), axis) != 0
    return Places(_number(arrived), _number(sent))


def most_here(layout: Layout) -> int:
    """Places for tokens of all ranks here: each has a row."""
    return min(layout.capacity, layout.num_ranks * layout.num_tokens)


def most_ranks(layout: Layout) -> int:
    """Ranks to which one token can go."""
    return min(layout.top_k, layout.num_ranks)


def most_home(layout: Layout) -> int:
    """Places for the other ends of this rank's tokens."""
    return layout.num_tokens * most_ranks(layout)


def _fill(place: Array, size: int) -> Array:
    """`[size]` int32: at each place, the position in `place` of what lies there; -1 where nothing does."""
    position = lax.iota(jnp.int32, place.size)
    empty = jnp.full_like(position, -1, shape=(size,))
    return empty.at[jnp.where(place < 0, size, place).reshape(-1)].set(position, mode="drop")


def to_experts(ends: Places, layout: Layout) -> Segments:
    """Tokens `[T]` to the ranks of their experts."""
    sent = _fill(ends.home, most_home(layout))
    sent = jnp.where(sent < 0, -1, sent % layout.num_tokens)
    return Segments(sent, _count(ends.home), _count(ends.here))


def to_sources(ends: Places, layout: Layout) -> Segments:
    """Sums `[W * T]`, one for each token of all ranks, back to the ranks of those tokens."""
    return Segments(_fill(ends.here, most_here(layout)), _count(ends.here), _count(ends.home))


def _count(place: Array) -> Array:
    return jnp.sum(place >= 0, axis=-1, dtype=jnp.int32)


def in_rank_order(home: Array, num: int) -> Array:
    """`[num, T]` places at home of what came back for each token, from the first of its ranks to the last; -1: none."""
    sent = home >= 0
    nth = jnp.where(sent, jnp.cumsum(sent, axis=0, dtype=jnp.int32) - 1, num)
    token = lax.broadcasted_iota(jnp.int32, home.shape, 1)
    return jnp.full_like(home, -1, shape=(num, home.shape[1])).at[nth, token].set(home, mode="drop")


def put(result: Array, arrived: Array, rows: Array) -> Array:
    """`result [R, ...]` with `arrived [N, ...]` in the rows `[N, C]`; -1 is nowhere."""
    index = jnp.where(rows < 0, result.shape[0], rows)
    for column in range(rows.shape[1]):
        result = result.at[index[:, column]].set(arrived, mode="drop")
    return result
