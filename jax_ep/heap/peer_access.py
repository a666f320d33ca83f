"""Which GPUs can write to each other's memory: those of one process, and those of several processes."""

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


def missing_in_processes() -> str | None:
    """Why each of several processes cannot run kernels among the GPUs that it drives, or None."""
    counts = sorted(collections.Counter(device.process_index for device in jax.devices()).values())
    if counts[-1] == 1:
        return "each process drives one device, expected several; leave the transport None for the best one here"
    if counts[0] < counts[-1]:
        return f"processes drive {counts[0]} to {counts[-1]} devices, expected as many in each"
    return None


def domains(devices: Iterable[jax.Device], *, of_processes: bool = False) -> list[list[int]]:
    """Positions of the devices that reach each other's memory, as JAX knows it: one list per NVLink domain.

    JAX's `slice_index` numbers the machines, or what one NVLink fabric connects over several of them;
    `jax.distributed.initialize(partition_index=...)` sets it. Devices without it are of one domain. With `of_processes`
    a domain has the devices of one process.
    """
    found: dict[tuple[int, int], list[int]] = {}
    for position, device in enumerate(devices):
        process = device.process_index if of_processes else 0
        found.setdefault((getattr(device, "slice_index", None) or 0, process), []).append(position)
    return list(found.values())


def apart(mesh: jax.sharding.Mesh, axis: tuple[str, ...], *, of_processes: bool = False) -> str | None:
    """Why ranks on these axes of the mesh cannot all write to each other's memory, or None where they can."""
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
        f"ranks of the axes {axis} are of several of the {len(found)} {what}, and cannot write to each other's memory;"
        " with a jax_ep.Topology whose local axis stays in one, kernels exchange inside each"
    )
