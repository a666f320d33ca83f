"""Detection of GPUs that can write to each other's memory, within and across processes."""

from __future__ import annotations

import collections
import ctypes
import functools
import itertools
import math
from collections.abc import Iterable

import jax
import numpy as np


@functools.cache
def unsupported_reason() -> str | None:
    """Describe the first pair of GPUs without peer access, or return None if every pair has it."""
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


def unsupported_processes_reason() -> str | None:
    """Return why several processes cannot each run kernels among their own GPUs, or None if they can."""
    counts = sorted(collections.Counter(device.process_index for device in jax.devices()).values())
    if counts[-1] == 1:
        return "each process drives one device, expected several; leave transport=None for the best one here"
    if counts[0] < counts[-1]:
        return f"processes drive {counts[0]} to {counts[-1]} devices, expected the same number in each"
    return None


def domains(devices: Iterable[jax.Device], *, of_processes: bool = False) -> list[list[int]]:
    """Group positions of devices that can access each other's memory, according to JAX: one list per NVLink domain.

    JAX's `slice_index` numbers the machines, or NVLink fabrics that span machines;
    `jax.distributed.initialize(partition_index=...)` sets it. Devices without it form one domain. With `of_processes`,
    a domain contains the devices of one process.
    """
    found: dict[tuple[int, int], list[int]] = {}
    for position, device in enumerate(devices):
        process = device.process_index if of_processes else 0
        found.setdefault((getattr(device, "slice_index", None) or 0, process), []).append(position)
    return list(found.values())


def unreachable_reason(mesh: jax.sharding.Mesh, axis: tuple[str, ...], *, of_processes: bool = False) -> str | None:
    """Return why ranks on these mesh axes cannot all write to each other's memory, or None if they can."""
    found = domains(mesh.devices.flat, of_processes=of_processes)
    of_device = np.empty(mesh.size, np.int32)
    for number, positions in enumerate(found):
        of_device[positions] = number
    places = [mesh.axis_names.index(name) for name in axis]
    in_order = np.moveaxis(of_device.reshape(mesh.devices.shape), places, range(-len(places), 0))
    groups = in_order.reshape(-1, math.prod(mesh.devices.shape[place] for place in places))
    if np.all(groups == groups[:, :1]):
        return None
    what = "processes" if of_processes else "machines or NVLink domains (jax.Device.slice_index)"
    return (
        f"ranks of the axes {axis} span several of the {len(found)} {what} and cannot write to each other's memory;"
        " pass a jax_ep.Topology whose local axis stays within one, so that kernels run inside each"
    )
