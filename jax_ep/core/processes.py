"""Devices and the processes that drive them."""

from __future__ import annotations

import collections
from collections.abc import Iterable

import jax


def numbers_in_processes(devices: Iterable[jax.Device]) -> dict[jax.Device, int]:
    """Return the position of each device among the devices of its process."""
    counts = collections.Counter[int]()
    found = {}
    for device in devices:
        found[device] = counts[device.process_index]
        counts[device.process_index] += 1
    return found
