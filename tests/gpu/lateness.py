"""Delays of ranks, by the GPU or by the host, and an order of calls that the runtime does not order."""

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ON_GPU = jax.default_backend() == "gpu"
SIZE, PRODUCTS = (4096, 150) if ON_GPU else (8, 2)
SECONDS = 0.05


def busy(x, is_late):
    """Return `x` after this rank's GPU has multiplied large matrices for about ten milliseconds, if `is_late`."""
    # The identity matrix, but the compiler cannot know, because it depends on x.
    matrix = jnp.eye(SIZE, dtype=jnp.bfloat16) + 0 * x.reshape(-1)[0].astype(jnp.bfloat16)
    number = jnp.where(is_late, PRODUCTS, 0) + 0 * jnp.asarray(matrix[0, 0], jnp.int32)
    product = lax.while_loop(lambda c: c[0] > 0, lambda c: (c[0] - 1, c[1] @ c[1]), (number, matrix))[1]
    return after(x, product)


def asleep(x, is_late):
    """Return `x` after this rank's host has slept in the middle of the program, if `is_late`."""
    return _in_host(lambda: time.sleep(SECONDS), x, is_late)


def when(condition, x, is_late):
    """Return `x` after this rank's host has seen that `condition` holds, if `is_late`."""

    def wait():
        while not condition():
            time.sleep(0.01)

    return _in_host(wait, x, is_late)


def _in_host(act, x, is_late):
    def nap(is_late, first):
        if np.asarray(is_late):
            act()
        return np.zeros((), np.float32)

    first = x.reshape(-1)[0].astype(jnp.float32)
    result = jax.ShapeDtypeStruct((), np.float32, manual_axis_type=jax.typeof(first).manual_axis_type)
    return after(x, jax.pure_callback(nap, result, is_late, first))


def after(x, *earlier):
    """Return `x` unchanged, with a data dependence on `earlier`."""
    for array in earlier:
        never = array.reshape(-1)[0].astype(jnp.float32) == 12345.678
        x = jnp.where(never, jnp.zeros((), x.dtype), x)
    return x


def in_order(x, *earlier):
    """Return `x`; on CPU devices after `earlier`, because their runtime starts independent work in any order."""
    return x if ON_GPU else after(x, *earlier)
