"""Exchanges over a mesh axis as plain lax collectives, shared by implementations. `axis=()` is one rank."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from jax_ep.types import Array

Axis = tuple[str, ...]


def rank_on(axis: Axis) -> Array | int:
    """This rank's position on the axis."""
    return lax.axis_index(axis) if axis else 0


def all_gather(x: Array, axis: Axis) -> Array:
    """`[...]` of this rank to `[W, ...]` of all; FP8 travels as bytes, which every platform can move."""
    if not axis:
        return x[None]
    if x.dtype.itemsize > 1:
        return lax.all_gather(x, axis)
    return lax.bitcast_convert_type(lax.all_gather(lax.bitcast_convert_type(x, jnp.uint8), axis), x.dtype)


def exchange(parts: Array, axis: Axis) -> Array:
    """`[W, ...]` for each rank to `[W, ...]` from each rank."""
    if not axis:
        return parts
    if parts.dtype.itemsize > 1:
        return lax.all_to_all(parts, axis, 0, 0)
    return lax.bitcast_convert_type(lax.all_to_all(lax.bitcast_convert_type(parts, jnp.uint8), axis, 0, 0), parts.dtype)


def known_after(x: Array, earlier: Array) -> Array:
    """Integers `x`, not known before the floats `earlier` are: a data dependence, which orders launches.

    A barrier would not do: XLA takes it out before it orders what it runs.
    """
    first = earlier[(0,) * earlier.ndim]
    return x + ((first != first) & (first == 0)).astype(x.dtype)  # never, but XLA does not know


def sum_in_order(parts: Array | Sequence[Array]) -> Array:
    """Sum over the first axis, or of several arrays, in index order: the result does not depend on how XLA reduces."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
