"""Whether the GPUs of this process can write to each other's memory."""

from __future__ import annotations

import ctypes
import functools
import itertools

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
