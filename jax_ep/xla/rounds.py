"""Segments in rounds of a padded all-to-all.

A round sends the next tokens of each segment, in all a quarter of a rank's tokens, whatever the number of ranks. There
are as many rounds as the longest segment of any rank needs, which the ranks agree on first. Balanced routings thus send
little padding, and no routing sends more than "all tokens to all ranks", except for the padding of the last round.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.core.mesh_axes import Axis, exchange, vary_alike
from jax_ep.types import Array, Layout
from jax_ep.xla.segments import Segments, starts

_ROUNDS_OF_ALL = 4  # On CPU devices as fast as one round, with less memory.


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
    send_starts, receive_starts = starts(segments.send_counts), starts(segments.receive_counts)

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
