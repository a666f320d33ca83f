"""Segments by `lax.ragged_all_to_all`: what travels is what there is. XLA has it on GPUs and TPUs."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.core.collectives import Axis, exchange
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.types import Array
from jax_ep.xla.segments import Segments, starts


def send[Tree](rows_of: Callable[[Array], Tree], segments: Segments, num_received: int, axis: Axis) -> Tree:
    """What the ranks send here, in rank order, in `num_received` places; zeros behind it.

    Args:
      rows_of: from what is sent `[C]`, -1 for nothing, to arrays `[C, ...]`.
      segments: of this rank.
      num_received: places of the result.
      axis: mesh axes of the ranks.
    """
    receive_starts = starts(segments.receive_counts)
    at_peers = exchange(receive_starts, axis)
    sizes = (starts(segments.send_counts), segments.send_counts, at_peers, segments.receive_counts)

    def one(operand: Array) -> Array:
        bits = lax.bitcast_convert_type(operand, jnp.uint8) if operand.dtype.itemsize == 1 else operand
        output = jnp.zeros((num_received, *operand.shape[1:]), bits.dtype)
        arguments = vary_alike((bits, output, *sizes))
        return lax.bitcast_convert_type(lax.ragged_all_to_all(*arguments, axis_name=axis), operand.dtype)

    return jax.tree.map(one, rows_of(segments.sent))
