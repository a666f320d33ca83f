"""Segments of the all-to-all: for each pair of ranks the tokens to send, once per token and rank, and their places.

A rank with experts has a place for each token of any rank that has rows here, ordered by source rank and token. A
token's own rank has a place for each (expert rank, token) pair, in that order. Both orders follow from the handle, so
no indices are sent with the tokens.

Segments are sent in rounds of a padded all-to-all. A round sends the next tokens of each segment, in all a quarter of a
rank's tokens, whatever the number of ranks. There are as many rounds as the longest segment of any rank needs, which
the ranks agree on first. Balanced routings thus send little padding, and no routing sends more than "all tokens to all
ranks", except for the padding of the last round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.core.mesh_axes import Axis, exchange, vary_alike
from jax_ep.types import Array, Handle, Layout

_ROUNDS_OF_ALL = 4  # On CPU devices as fast as one round, with less memory.


class Segments(NamedTuple):
    """The segments that one rank sends and receives, one per peer, in rank order and without gaps."""

    sent: Array  # `[C]` int32, index of the token, or sum, in each place of the send buffer; -1 past the end
    send_counts: Array  # `[W]` int32, places sent to each rank
    receive_counts: Array  # `[W]` int32, places that each rank sends here


class Places(NamedTuple):
    """Places of tokens at both ends, -1 for none: `here [W, T]` of any rank's tokens, `home [W, T]` of this rank's."""

    here: Array
    home: Array


def _number(mask: Array) -> Array:
    """Assign consecutive numbers to the True elements of `mask`; -1 for the others."""
    count = jnp.cumsum(mask.reshape(-1), dtype=jnp.int32).reshape(mask.shape)
    return jnp.where(mask, count - 1, -1)


def _starts(counts: Array) -> Array:
    """Return the first place of each segment, `[W]` int32."""
    return jnp.cumsum(counts, dtype=jnp.int32) - counts


def places(handle: Handle, axis: Axis) -> Places:
    """Return the places of tokens that have rows; ranks tell each other which tokens do, with one byte each."""
    arrived = jnp.any(handle.assignment_to_row >= 0, axis=-1)
    sent = exchange(arrived.astype(jnp.uint8), axis) != 0
    return Places(_number(arrived), _number(sent))


def most_here(layout: Layout) -> int:
    """Return the maximum number of places for tokens of all ranks here: each has a row."""
    return min(layout.capacity, layout.num_ranks * layout.num_tokens)


def most_ranks(layout: Layout) -> int:
    """Return the maximum number of ranks that one token goes to."""
    return min(layout.top_k, layout.num_ranks)


def most_home(layout: Layout) -> int:
    """Return the maximum number of places at home of this rank's tokens."""
    return layout.num_tokens * most_ranks(layout)


def _fill(place: Array, size: int) -> Array:
    """Invert `place`: return the position in `place` of each of `size` places, int32; -1 for empty places."""
    position = lax.iota(jnp.int32, place.size)
    empty = jnp.full_like(position, -1, shape=(size,))
    return empty.at[jnp.where(place < 0, size, place).reshape(-1)].set(position, mode="drop")


def to_experts(ends: Places, layout: Layout) -> Segments:
    """Build the segments that send tokens `[T]` to the ranks of their experts."""
    sent = _fill(ends.home, most_home(layout))
    sent = jnp.where(sent < 0, -1, sent % layout.num_tokens)
    return Segments(sent, _count(ends.home), _count(ends.here))


def to_sources(ends: Places, layout: Layout) -> Segments:
    """Build the segments that return sums `[W * T]`, one per token of all ranks, to the tokens' ranks."""
    return Segments(_fill(ends.here, most_here(layout)), _count(ends.here), _count(ends.home))


def _count(place: Array) -> Array:
    return jnp.sum(place >= 0, axis=-1, dtype=jnp.int32)


def in_rank_order(home: Array, num: int) -> Array:
    """Return the places at home of each token's returned sums, `[num, T]`, in rank order; -1 for none."""
    sent = home >= 0
    nth = jnp.where(sent, jnp.cumsum(sent, axis=0, dtype=jnp.int32) - 1, num)
    token = lax.broadcasted_iota(jnp.int32, home.shape, 1)
    return jnp.full_like(home, -1, shape=(num, home.shape[1])).at[nth, token].set(home, mode="drop")


def send[Tree](rows_of: Callable[[Array], Tree], segments: Segments, num_rows: int, axis: Axis, layout: Layout) -> Tree:
    """Return what the ranks send here in rank order, in `num_rows` rows; rows past it are zero.

    Args:
      rows_of: maps sent indices `[N]`, -1 for nothing, to arrays `[N, ...]`; called once per round.
      segments: segments of this rank.
      num_rows: rows of the result.
      axis: mesh axes of the ranks.
      layout: static sizes.
    """
    num_ranks = layout.num_ranks
    size = max(1, -(-layout.num_tokens // (_ROUNDS_OF_ALL * num_ranks)))  # tokens of a segment per round
    num_rounds = -(-lax.pmax(jnp.max(segments.send_counts), axis) // size)
    send_starts, receive_starts = _starts(segments.send_counts), _starts(segments.receive_counts)

    def one_round(i: Array, received: Tree) -> Tree:
        offset = i * size + lax.broadcasted_iota(jnp.int32, (num_ranks, size), 1)
        last = segments.sent.shape[0] - 1
        index = segments.sent[jnp.minimum(send_starts[:, None] + offset, last)]
        parts = rows_of(jnp.where(offset < segments.send_counts[:, None], index, -1).reshape(-1))
        is_used = offset < segments.receive_counts[:, None]
        place = jnp.where(is_used, receive_starts[:, None] + offset, num_rows).reshape(-1)

        def put(whole: Array, part: Array) -> Array:
            arrived = exchange(part.reshape(num_ranks, size, *part.shape[1:]), axis)
            return whole.at[place].set(arrived.reshape(part.shape), mode="drop")

        return jax.tree.map(put, received, parts)

    shapes = jax.eval_shape(rows_of, segments.sent)
    empty = jax.tree.map(lambda part: jnp.zeros((num_rows, *part.shape[1:]), part.dtype), shapes)
    return lax.fori_loop(0, num_rounds, one_round, vary_alike((empty, segments.sent), over=axis)[0])
