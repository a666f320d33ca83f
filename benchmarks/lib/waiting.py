"""Arrays that are known only once others are: XLA can neither merge the calls of a chain nor start one early."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def zero_after(result: Array) -> Array:
    """An int32 zero, of which only the device knows that it is one, once it has the first element of `result`."""
    return (result.reshape(-1)[0].astype(jnp.float32) == 12345.678).astype(jnp.int32)  # never true


def after(array: Array, result: Array) -> Array:
    """The same array, but known only once all of `result` is."""
    return array + zero_after(lax.optimization_barrier(result)).astype(array.dtype)
