"""Rates of this machine: the best that links, the memory and the tensor cores do.

Sizes are large on GPUs and tiny on CPU devices, whose rates have no meaning.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.settings.file import Rates
from jax_ep.tools.benchmark import harness

_ROUNDS = 8


def measure() -> Rates:
    """Measure all rates; the rate of a link is that of the slower direction."""
    devices = jax.local_devices()
    slowest = min(link(*pair) for pair in itertools.permutations(devices[:2])) if len(devices) > 1 else None
    return Rates(slowest, memory(), _gemms(8192 if _on_gpus() else 64, 1.0 if _on_gpus() else 0.0))


def _on_gpus() -> bool:
    return jax.default_backend() == "gpu"


def link(source: jax.Device, target: jax.Device) -> float:
    """Measure the bytes per second of a large copy from one GPU to another."""
    return _copies([source], lambda data: [(data[0], target)])


def links_together(devices: Sequence[jax.Device]) -> float:
    """Measure the bytes per second that each GPU sends while all GPUs copy to all others, one copy per pair."""
    steps = range(1, len(devices))

    def pairs(data: list[jax.Array]) -> list[tuple[jax.Array, jax.Device]]:
        return [(data[i], devices[(i + step) % len(devices)]) for step in steps for i in range(len(devices))]

    return len(steps) * _copies(devices, pairs)


def _copies(
    sources: Sequence[jax.Device], pairs: Callable[[list[jax.Array]], list[tuple[jax.Array, jax.Device]]]
) -> float:
    """Measure the bytes per second of the copies that each source makes to one target."""
    num_bytes = 1 << (30 if _on_gpus() else 22)
    todo = pairs([jax.device_put(jnp.zeros((num_bytes,), jnp.uint8), device) for device in sources])

    def copies(n: int) -> Callable[[], list[jax.Array]]:
        return lambda: [jax.device_put(array, target) for _ in range(n) for array, target in todo]

    return num_bytes / _seconds(copies, (1, 5))


def memory() -> float:
    """Measure the bytes per second that a sum reads."""
    num_bytes = 1 << (31 if _on_gpus() else 16)
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
