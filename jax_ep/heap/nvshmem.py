"""Heaps of several processes with one GPU each, in NVSHMEM's symmetric memory (nvshmem4py).

NVSHMEM only allocates memory and maps the memory of every GPU into every process; kernels then write through plain
addresses, as within one process. With several machines or NVLink domains, each domain has its own NVSHMEM and heaps,
and its processes are numbered from 0; XLA's collectives connect the domains. All processes of all domains still take
each step together, because they trace the same programs.
"""

from __future__ import annotations

import collections
import importlib.util
import os
from typing import Any

import jax
import numpy as np

from jax_ep import ffi
from jax_ep.heap import peer_access
from jax_ep.heap.memory import DeviceTraceArea
from jax_ep.heap.rendezvous import Meetings

_NO_MULTICAST = "NVSHMEM_DISABLE_NVLS"
_left_running = False  # Per process, like NVSHMEM's state.


def unsupported_reason() -> str | None:
    """Return why NVSHMEM does not support the processes of this program, or None if it does."""
    counts = collections.Counter(device.process_index for device in jax.devices())
    process, most = counts.most_common(1)[0]
    if most > 1:
        return (
            f"process {process} of {len(counts)} drives {most} GPUs; it needs one GPU per process, as with"
            " jax.distributed.initialize(local_device_ids=...), or one process that drives every GPU"
        )
    domains = peer_access.domains(jax.devices())
    if len(domains) > 1 and len(domains[0]) == 1:
        return (
            f"devices {domains[0]} of {len(counts)} cannot access the memory of devices {domains[1]}: they belong to"
            f" {len(domains)} machines or NVLink domains (jax.Device.slice_index), which need transport 'xla'"
        )
    if len({len(domain) for domain in domains}) > 1:
        return (
            f"the {len(domains)} machines or NVLink domains (jax.Device.slice_index) have"
            f" {[len(domain) for domain in domains]} GPUs, expected the same number in each"
        )
    if importlib.util.find_spec("nvshmem") is None:
        return "not installed: nvshmem4py (pip install '.[cuda13]')"
    return None


class NvshmemMemory:
    """Heaps of one device per process. All processes create, call and close it together.

    Args:
      timeout_s: how long a process waits for the others before each joint step.
      settings: text of the context's settings, which must agree in all processes.

    Raises:
      ValueError: the environment enables NVLink multicast, which this transport does not support.
      RuntimeError: NVSHMEM is still running, because an earlier `close` could not end it.
      jax.errors.JaxRuntimeError: a process is late or has failed; the message says which.
    """

    def __init__(self, timeout_s: float, settings: str) -> None:
        everyone, self._device = jax.devices(), jax.local_devices()[0]
        domains = [[everyone[place] for place in domain] for domain in peer_access.domains(everyone)]
        self.devices = next(domain for domain in domains if self._device in domain)
        self.numbers = {device: number for domain in domains for number, device in enumerate(domain)}
        self._number = self.numbers[self._device]
        self._meetings = Meetings(timeout_s)
        self._heaps: list[int] = []  # In the order in which all processes allocated them.
        self._new = 0  # Allocated here, but perhaps not in every process.
        self._closed = False
        if _left_running:
            raise RuntimeError("init: an earlier finalize() could not end NVSHMEM; restart the processes.")
        _leave_multicast_off()
        self._meetings.meet("init", "initializing NVSHMEM", same=settings)
        self._start()
        self._status = ffi.alloc_status(*ffi.device_key(self._device))

    def allocate(self, num_bytes: int, function: str) -> dict[int, list[int]]:
        """Allocate memory as `Memory.allocate` describes, with addresses as this process's device sees them.

        Raises:
          jax.errors.JaxRuntimeError: a process is late, requests another size, is out of memory, or cannot access the
            memory of another; the message says which. Then no process keeps the allocation.
        """
        from nvshmem.bindings import nvshmem as bindings

        self._make_current()
        purpose = "allocating the symmetric heap"
        # NVSHMEM would wait forever for a process that is missing or requests another size.
        self._meetings.meet(function, purpose, same=f"{num_bytes} bytes per device")
        # Afterwards all heaps are zeroed, or freed.
        addresses: list[int] = []
        self._meetings.attempt(
            function,
            purpose,
            lambda: self._allocate(num_bytes, addresses, bindings),
            lambda: self._undo_allocation(bindings),
        )
        self._heaps.append(self._new)
        return {self._number: addresses}

    def status_address(self, device: int) -> int:
        return self._status.device_address

    def statuses(self) -> list[ffi.StatusBuffer]:
        return [self._status]

    def trace_area(self, header: np.ndarray, num_words: int) -> DeviceTraceArea:
        return DeviceTraceArea([(self._number, self._device)], header, num_words)

    def close(self) -> None:
        """Free the memory and end NVSHMEM. Idempotent. No kernel may be running.

        Raises:
          jax.errors.JaxRuntimeError: a process is late. NVSHMEM then keeps running until the process exits, because
            ending it would wait for the missing process.
        """
        if self._closed:
            return
        global _left_running
        self._closed, _left_running = True, True
        self._status.free()
        self._meetings.meet("finalize", "ending NVSHMEM")
        self._free()
        self._make_current()
        _core().finalize()
        _left_running = False

    def _start(self) -> None:
        """Initialize NVSHMEM for this domain; ranks are device numbers in `devices`."""
        unique_ids = self._meetings.attempt("init", "loading NVSHMEM", self._load)
        unique_id = _core().get_unique_id(empty=True)
        data = bytes.fromhex(unique_ids[self.devices[0].process_index])
        unique_id._data[:] = np.frombuffer(data, unique_id._data.dtype)
        self._meetings.attempt("init", "initializing NVSHMEM", lambda: self._initialize(unique_id))

    def _load(self) -> str:
        """Create the domain's unique id in the process of its first device; return it as hex."""
        unique_id = _core().get_unique_id(empty=self._number != 0)
        return unique_id._data.tobytes().hex() if self._number == 0 else ""

    def _initialize(self, unique_id: Any) -> str:
        device = self._make_current()
        ranks = {"rank": self._number, "nranks": len(self.devices)}
        _core().init(device=device, uid=unique_id, **ranks, initializer_method="uid")
        return ""

    def _allocate(self, num_bytes: int, addresses: list[int], bindings: Any) -> str:
        """Allocate a heap, and append its address and those of the peers' heaps to `addresses`."""
        self._new = int(bindings.malloc(num_bytes))
        if not self._new:
            raise MemoryError(
                f"NVSHMEM cannot allocate {num_bytes} bytes on {self._device}. It uses the memory that XLA leaves"
                " free: lower XLA_PYTHON_CLIENT_MEM_FRACTION, 0.75 by default, or the capacity of the layers"
            )
        _fill_with_zeros(self._new, num_bytes)
        addresses.extend(int(bindings.ptr(self._new, number) or 0) for number in range(len(self.devices)))
        unreachable = [device for device, at in zip(self.devices, addresses, strict=True) if not at]
        if unreachable:
            raise RuntimeError(
                f"{self._device} cannot write to the memory of {unreachable[0]} (NVSHMEM has no address of it here)."
                " Kernels need GPUs of one node with NVLink or PCIe peer access; without it, call"
                " init(transport='xla')"
            )
        return ""

    def _undo_allocation(self, bindings: Any) -> None:
        """Undo an allocation that failed in some process.

        Freeing memory synchronizes all processes with a barrier. A process whose allocation failed has nothing to free,
        so it joins the barrier explicitly.
        """
        if self._new:
            bindings.free(self._new)
        else:
            bindings.barrier_all()

    def _free(self) -> None:
        """Free all heaps, in the same order in all processes."""
        if self._heaps:
            from nvshmem.bindings import nvshmem as bindings

            self._make_current()
            for heap in self._heaps:
                bindings.free(heap)
            self._heaps = []

    def _make_current(self) -> Any:
        """Make this process's GPU the current device of this thread, which NVSHMEM uses; return it."""
        from cuda.core import Device

        device = Device(self._device.local_hardware_id)
        device.set_current()
        return device


def _core() -> Any:
    import nvshmem.core

    return nvshmem.core


def _leave_multicast_off() -> None:
    """Disable NVLink multicast before NVSHMEM reads its environment: it can make the drivers of a shared host fail."""
    value = os.environ.setdefault(_NO_MULTICAST, "1")
    if value != "1":
        raise ValueError(
            f"init: the environment has {_NO_MULTICAST}={value}, but transport 'nvshmem' does not use NVLink"
            f" multicast; unset it, or set {_NO_MULTICAST}=1."
        )


def _fill_with_zeros(address: int, num_bytes: int) -> None:
    """Zero memory of the current device and wait until that is done."""
    from cuda.bindings import driver

    for (code,) in (driver.cuMemsetD8(address, 0, num_bytes), driver.cuCtxSynchronize()):
        if int(code) != 0:
            raise RuntimeError(f"filling {num_bytes} bytes of symmetric memory failed with CUDA error {int(code)}")
