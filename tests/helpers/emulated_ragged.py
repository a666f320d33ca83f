"""Emulation of `lax.ragged_all_to_all` for CPU devices, for which XLA lacks it."""

import jax.numpy as jnp
from jax import lax


def emulated_ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name, axis_index_groups=None
):
    """Do what the primitive documents; if sizes or offsets contradict, all bits of the result are ones."""
    sources, me = lax.all_gather(operand, axis_name), lax.axis_index(axis_name)
    first, count, place = (lax.all_gather(a, axis_name)[:, me] for a in (input_offsets, send_sizes, output_offsets))
    row = lax.iota(jnp.int32, output.shape[0])
    bad = jnp.any(recv_sizes != count) | jnp.any(place + count > output.shape[0])
    bad |= jnp.any(first + count > operand.shape[0]) | jnp.any(jnp.minimum(jnp.minimum(first, place), count) < 0)
    written = jnp.zeros_like(row)
    for source in range(sources.shape[0]):
        inside = (row >= place[source]) & (row < place[source] + count[source])
        taken = sources[source][jnp.where(inside, first[source] + row - place[source], 0)]
        output = jnp.where(inside.reshape(-1, *[1] * (output.ndim - 1)), taken, output)
        written += inside.astype(jnp.int32)
    bits = jnp.full_like(output, -1, dtype=f"i{output.dtype.itemsize}")
    return jnp.where(bad | jnp.any(written > 1), lax.bitcast_convert_type(bits, output.dtype), output)
