"""Which GPUs can write to each other's memory: those of this process, and those of several processes."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterable

import jax


@functools.cache
def missing() -> str | None:
    """The first pair of GPUs without peer access, in words, or None where every pair has it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"the CUDA driver cannot be loaded: {error}"
    can = ctypes.c_int()
    numbers = [device.local_hardware_id for device in jax.local_devices()]
    for first, second in itertools.permutations(numbers, 2):
        code = driver.cuDeviceCanAccessPeer(ctypes.byref(can), first, second)
        if code != 0:
            return f"cuDeviceCanAccessPeer({first}, {second}) failed with CUDA error {code}"
        if not can.value:
            return f"GPU {first} cannot write to the memory of GPU {second}"
    return None


def domains(devices: Iterable[jax.Device]) -> list[list[int]]:
    """Positions of the devices that reach each other's memory, as JAX knows it: one list per NVLink domain.

    JAX's `slice_index` numbers the machines, or what one NVLink fabric connects over several of them;
    `jax.distributed.initialize(partition_index=...)` sets it. Devices without it are of one domain.
    """
    found: dict[int, list[int]] = {}
    for position, device in enumerate(devices):
        found.setdefault(getattr(device, "slice_index", None) or 0, []).append(position)
    return list(found.values())
