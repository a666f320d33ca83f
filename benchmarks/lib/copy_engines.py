"""What the copy engines of GPUs move, as the most that an exchange can reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from lib import harness

PEAK_BYTES, QUICK_BYTES = 1 << 30, 1 << 22


def peak(num_bytes: int = PEAK_BYTES) -> float:
    """Bytes per second of one large copy from the first GPU to the second."""
    source, target = jax.devices()[:2]
    data = jax.device_put(jnp.zeros((num_bytes,), jnp.uint8), source)

    def copies(n: int) -> Callable[[], list[jax.Array]]:
        return lambda: [jax.device_put(data, target) for _ in range(n)]

    times = harness.measure_interleaved({1: copies(1), 9: copies(9)}, 8)
    return 8 * num_bytes / (times[9].median - times[1].median)


def peak_together(devices: Sequence[jax.Device], num_bytes: int = PEAK_BYTES) -> float:
    """Bytes per second that each GPU sends while every GPU copies to all others, one large copy for each pair."""
    data = [jax.device_put(jnp.zeros((num_bytes,), jnp.uint8), device) for device in devices]
    others = range(1, len(devices))

    def copies(n: int) -> Callable[[], list[jax.Array]]:
        pairs = [(i, (i + step) % len(devices)) for _ in range(n) for step in others for i in range(len(devices))]
        return lambda: [jax.device_put(data[source], devices[target]) for source, target in pairs]

    times = harness.measure_interleaved({1: copies(1), 5: copies(5)}, 8)
    return 4 * len(others) * num_bytes / (times[5].median - times[1].median)
