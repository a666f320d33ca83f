"""Rates of this machine: what a link, the memory and the tensor cores do at their best."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.settings.file import Rates

_ROUNDS = 7


def measure(*, quick: bool) -> Rates:
    """All rates; `quick` takes small arrays, whose figures mean nothing."""
    devices = jax.local_devices()
    link = None
    if len(devices) > 1:
        num_bytes = 1 << (16 if quick else 28)
        link = min(_link(*pair, num_bytes) for pair in itertools.permutations(devices[:2], 2))
    return Rates(link, _memory(1 << (16 if quick else 31)), _products(64 if quick else 8192, 0.0 if quick else 1.0))


def _link(source: jax.Device, target: jax.Device, num_bytes: int) -> float:
    """Bytes per second of a copy from one device to another."""
    data = jax.device_put(jnp.zeros((num_bytes,), jnp.uint8), source)

    def copies(n: int) -> Callable[[], Any]:
        return lambda: [jax.device_put(data, target) for _ in range(n)]

    return num_bytes / _seconds_of_one(copies, (1, 9))


def _memory(num_bytes: int) -> float:
    """Bytes per second read by a sum."""
    x = jnp.ones((num_bytes // 4,), jnp.float32)

    def sums(n: int) -> Callable[[], Any]:
        def chain(x: jax.Array) -> jax.Array:
            # The next one needs the last one's, of which only the device knows that it is zero.
            return lax.fori_loop(0, n, lambda _, offset: jnp.max(x + offset) * 0, jnp.zeros(()))

        compiled = jax.jit(chain)
        return lambda: compiled(x)

    return num_bytes / _seconds_of_one(sums, (1, 11))


def _products(size: int, settle_s: float) -> float:
    """Operations per second of square products in bfloat16, after so many seconds of the same."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.float32).astype(jnp.bfloat16) for i in range(2))
    b /= size**0.5

    def products(n: int) -> Callable[[], Any]:
        chain = jax.jit(lambda a, b: lax.fori_loop(0, n, lambda _, x: x @ b, a))
        return lambda: chain(a, b)

    return 2 * size**3 / _seconds_of_one(products, (1, 21), settle_s)


def _seconds_of_one(make: Callable[[int], Callable[[], Any]], lengths: tuple[int, int], settle_s: float = 0.0) -> float:
    """Of a long chain less a short one; the median over rounds."""
    short, long = map(make, lengths)
    jax.block_until_ready((short(), long()))
    settled = time.perf_counter() + settle_s
    while time.perf_counter() < settled:
        jax.block_until_ready(long())
    samples = []
    for _ in range(_ROUNDS):
        times = []
        for run in (short, long):
            start = time.perf_counter()
            jax.block_until_ready(run())
            times.append(time.perf_counter() - start)
        samples.append((times[1] - times[0]) / (lengths[1] - lengths[0]))
    return max(1e-9, statistics.median(samples))
