"""What the links of GPUs carry: measured copies, and the specification."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ep.tools.benchmark import harness

PEAK_BYTES, QUICK_BYTES = 1 << 30, 1 << 22


def peak(num_bytes: int = PEAK_BYTES, devices: Sequence[jax.Device] | None = None) -> float:
    """Measure the bytes per second of a large copy from one GPU to another; by default from the first to the second."""
    source, target = devices or jax.devices()[:2]
    data = jax.device_put(jnp.zeros((num_bytes,), jnp.uint8), source)

    def copies(n: int) -> Callable[[], list[jax.Array]]:
        return lambda: [jax.device_put(data, target) for _ in range(n)]

    times = harness.measure_interleaved({1: copies(1), 9: copies(9)}, 8)
    return 8 * num_bytes / (times[9].median - times[1].median)


def peak_together(devices: Sequence[jax.Device], num_bytes: int = PEAK_BYTES) -> float:
    """Measure the bytes per second that each GPU sends while all GPUs copy to all others, one copy per pair."""
    data = [jax.device_put(jnp.zeros((num_bytes,), jnp.uint8), device) for device in devices]
    others = range(1, len(devices))

    def copies(n: int) -> Callable[[], list[jax.Array]]:
        pairs = [(i, (i + step) % len(devices)) for _ in range(n) for step in others for i in range(len(devices))]
        return lambda: [jax.device_put(data[source], devices[target]) for source, target in pairs]

    times = harness.measure_interleaved({1: copies(1), 5: copies(5)}, 8)
    return 4 * len(others) * num_bytes / (times[5].median - times[1].median)


class Links(NamedTuple):
    """NVLink of the GPU that has least of it.

    Attributes:
      bytes_per_s: of all its links together, in one direction; None if unknown.
      said: number and rate of the links, or why the rate is unknown.
    """

    bytes_per_s: float | None
    said: str


def nvlink() -> Links:
    """Read the specified rate from `nvidia-smi nvlink --status`, which lists each link of each GPU."""
    command = ["nvidia-smi", "nvlink", "--status"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return Links(None, "unknown: there is no nvidia-smi")
    except subprocess.TimeoutExpired:
        return Links(None, "unknown: nvidia-smi nvlink --status does not answer")
    if done.returncode:
        return Links(None, f"unknown: nvidia-smi nvlink --status failed with exit status {done.returncode}")
    return parse(done.stdout)


def parse(status: str) -> Links:
    """Parse the output of `nvidia-smi nvlink --status`; inactive links have no rate."""
    rates: list[list[float]] = []
    for line in status.splitlines():
        if line.startswith("GPU "):
            rates.append([])
        elif rates and (found := re.match(r"\s*Link \d+: ([\d.]+) GB/s", line)):
            rates[-1].append(1e9 * float(found[1]))
    least = min(rates, key=sum, default=[])
    if not sum(least):
        return Links(None, "unknown: nvidia-smi lists no active NVLink on every GPU")
    each = sorted({f"{rate / 1e9:g} GB/s" for rate in least})
    return Links(sum(least), f"{len(least)} links of {' and '.join(each)}, by nvidia-smi")
