"""Collectives over a mesh axis in plain lax, shared by the implementations. `axis=()` means one rank."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from jax_ep.types import Array

Axis = tuple[str, ...]


def rank_on(axis: Axis) -> Array | int:
    """Return this rank's position on the axis."""
    return lax.axis_index(axis) if axis else 0


def all_gather(x: Array, axis: Axis) -> Array:
    """Gather `[...]` of each rank into `[W, ...]`. FP8 is sent as bytes, which every platform supports."""
    if not axis:
        return x[None]
    if x.dtype.itemsize > 1:
        return lax.all_gather(x, axis)
    return lax.bitcast_convert_type(lax.all_gather(lax.bitcast_convert_type(x, jnp.uint8), axis), x.dtype)


def exchange(parts: Array, axis: Axis) -> Array:
    """Send `parts[i]` of `[W, ...]` to rank i; return `[W, ...]` with one part from each rank."""
    if not axis:
        return parts
    if parts.dtype.itemsize > 1:
        return lax.all_to_all(parts, axis, 0, 0)
    return lax.bitcast_convert_type(lax.all_to_all(lax.bitcast_convert_type(parts, jnp.uint8), axis, 0, 0), parts.dtype)


def known_after(x: Array, earlier: Array) -> Array:
    """Return integers `x` with a data dependence on the floats `earlier`, to order kernel launches.

    An optimization barrier does not work: XLA removes it before it schedules.
    """
    first = earlier[(0,) * earlier.ndim]
    return x + ((first != first) & (first == 0)).astype(x.dtype)  # Always adds 0, but XLA cannot know.


def sum_in_order(parts: Array | Sequence[Array]) -> Array:
    """Sum over the first axis, or over several arrays, in index order, so that the result is deterministic."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
