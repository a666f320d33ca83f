"""Rates of this machine: the best that a link, the memory and the tensor cores do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.settings.file import Rates
from jax_ep.tools.benchmark import harness, links

_ROUNDS = 7


def measure(*, quick: bool) -> Rates:
    """Measure all rates; `quick` uses small arrays, whose rates have no meaning."""
    link = None
    if len(jax.local_devices()) > 1:
        pairs = itertools.permutations(jax.local_devices()[:2], 2)
        link = min(links.peak(1 << (16 if quick else 28), pair) for pair in pairs)
    return Rates(link, _memory(1 << (16 if quick else 31)), _gemms(64 if quick else 8192, 0.0 if quick else 1.0))


def _memory(num_bytes: int) -> float:
    """Measure the bytes per second that a sum reads."""
    x = jnp.ones((num_bytes // 4,), jnp.float32)

    def sums(n: int) -> Callable[[], Any]:
        # Each sum needs a zero of the previous one, which only the device knows.
        chain = jax.jit(lambda x: lax.fori_loop(0, n, lambda _, zero: jnp.max(x + zero) * 0, jnp.zeros(())))
        return lambda: chain(x)

    return num_bytes / _seconds(sums, (1, 11))


def _gemms(size: int, settle_s: float) -> float:
    """Measure the operations per second of square bfloat16 GEMMs, after `settle_s` seconds of the same."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.float32).astype(jnp.bfloat16) for i in range(2))
    b /= size**0.5

    def gemms(n: int) -> Callable[[], Any]:
        chain = jax.jit(lambda a, b: lax.fori_loop(0, n, lambda _, x: x @ b, a))
        return lambda: chain(a, b)

    return 2 * size**3 / _seconds(gemms, (1, 21), settle_s)


def _seconds(make: Callable[[int], Callable[[], Any]], lengths: tuple[int, int], settle_s: float = 0.0) -> float:
    """Measure the time of one call: the difference of a long and a short chain."""
    short, long = lengths
    times = harness.measure_interleaved({n: make(n) for n in lengths}, _ROUNDS, settle_s=settle_s / _ROUNDS)
    return max(1e-9, (times[long].median - times[short].median) / (long - short))
