"""Heaps of several processes with one GPU each: NVSHMEM's symmetric memory, by way of nvshmem4py.

NVSHMEM only allocates, and maps the memory of every GPU into every process; the kernels then write through plain
addresses, as they do within one process. Where there are several machines or NVLink domains, each has an NVSHMEM and
heaps of its own, whose processes are numbered from 0; what goes between them is for XLA's collectives. All processes
of all domains still take each step together, as they trace the same programs.
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
from jax_ep.heap.rendezvous import Meetings
from jax_ep.heap.trace_area import DeviceTraceArea

_NO_MULTICAST = "NVSHMEM_DISABLE_NVLS"
_left_running = False  # of the whole process, as NVSHMEM's own state is


def missing() -> str | None:
    """Why NVSHMEM cannot serve the processes of this program, or None."""
    counts = collections.Counter(device.process_index for device in jax.devices())
    process, most = counts.most_common(1)[0]
    if most > 1:
        return (
            f"process {process} of {len(counts)} drives {most} GPUs; it needs one GPU per process, as by"
            " jax.distributed.initialize(local_device_ids=...), or one process that drives every GPU"
        )
    domains = peer_access.domains(jax.devices())
    if len(domains) > 1 and len(domains[0]) == 1:
        return (
            f"devices {domains[0]} of {len(counts)} cannot reach the memory of devices {domains[1]}: they are of"
            f" {len(domains)} machines or NVLink domains (jax.Device.slice_index), between which collectives of `xla`"
            " go"
        )
    if len({len(domain) for domain in domains}) > 1:
        return (
            f"the {len(domains)} machines or NVLink domains (jax.Device.slice_index) have"
            f" {[len(domain) for domain in domains]} GPUs, expected as many in each"
        )
    if importlib.util.find_spec("nvshmem") is None:
        return "not installed: nvshmem4py (pip install '.[cuda13]')"
    return None


class NvshmemMemory:
    """Heaps of one device per process; see `jax_ep.heap.memory.Memory`. All processes make, call and close it together.

    Args:
      timeout_s: how long a process waits for the others before each step that they take together.
      settings: of the context, in words; they must be the same in all processes.

    Raises:
      ValueError: the environment asks for NVLink multicast, which this transport leaves off.
      RuntimeError: NVSHMEM is still running, because an earlier `close` could not end it.
      jax.errors.JaxRuntimeError: a process has not come in time or has failed; the message says which.
    """

    def __init__(self, timeout_s: float, settings: str) -> None:
        everyone, self._device = jax.devices(), jax.local_devices()[0]
        domains = [[everyone[place] for place in domain] for domain in peer_access.domains(everyone)]
        self.devices = next(domain for domain in domains if self._device in domain)
        self.numbers = {device: number for domain in domains for number, device in enumerate(domain)}
        self._number = self.numbers[self._device]
        self._meetings = Meetings(timeout_s)
        self._heaps: list[int] = []  # in the order in which all processes have allocated them
        self._new = 0  # allocated here, but perhaps not everywhere
        self._closed = False
        if _left_running:
            raise RuntimeError("init: an earlier finalize() could not end NVSHMEM; start the processes again.")
        _leave_multicast_off()
        self._meetings.meet("init", "initialising NVSHMEM", same=settings)
        self._start()
        self._status = ffi.alloc_status(*ffi.device_key(self._device))

    def allocate(self, num_bytes: int, function: str) -> dict[int, list[int]]:
        """See `jax_ep.heap.memory.Memory`: the addresses as the device of this process sees them.

        Raises:
          jax.errors.JaxRuntimeError: a process has not come in time, asks for another size, has no memory left, or
            cannot reach the memory of another; the message says which. Nothing is allocated then in any process.
        """
        from nvshmem.bindings import nvshmem as bindings

        self._make_current()
        purpose = "allocating the symmetric heap"
        # NVSHMEM would wait without an end for a process that does not come, or comes with another size.
        self._meetings.meet(function, purpose, same=f"{num_bytes} bytes per device")
        # After this all heaps are zero, or given back.
        addresses: list[int] = []
        self._meetings.attempt(
            function, purpose, lambda: self._allocate(num_bytes, addresses, bindings), lambda: self._give_back(bindings)
        )
        self._heaps.append(self._new)
        return {self._number: addresses}

    def status_address(self, device: int) -> int:
        """Address of the status record of `device`, that of this process, as it sees it."""
        return self._status.device_address

    def statuses(self) -> list[ffi.StatusBuffer]:
        """The record of this process's device as the host sees it."""
        return [self._status]

    def trace_area(self, header: np.ndarray, num_words: int) -> DeviceTraceArea:
        """See `jax_ep.heap.memory.Memory`."""
        return DeviceTraceArea([(self._number, self._device)], header, num_words)

    def close(self) -> None:
        """Gives the memory back and ends NVSHMEM; calling it again does nothing. No launch may be running.

        Raises:
          jax.errors.JaxRuntimeError: a process has not come in time. NVSHMEM then stays as it is until the process
            ends, because ending it would wait for the missing one.
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
        """Initialises that of the domain: the number of a device in `devices` is that of its process there."""
        said = self._meetings.attempt("init", "loading NVSHMEM", self._load)
        unique_id = _core().get_unique_id(empty=True)
        data = bytes.fromhex(said[self.devices[0].process_index])
        unique_id._data[:] = np.frombuffer(data, unique_id._data.dtype)
        self._meetings.attempt("init", "initialising NVSHMEM", lambda: self._initialise(unique_id))

    def _load(self) -> str:
        """The unique id, from the process of the first device of each domain."""
        unique_id = _core().get_unique_id(empty=self._number != 0)
        return unique_id._data.tobytes().hex() if self._number == 0 else ""

    def _initialise(self, unique_id: Any) -> str:
        device = self._make_current()
        ranks = {"rank": self._number, "nranks": len(self.devices)}
        _core().init(device=device, uid=unique_id, **ranks, initializer_method="uid")
        return ""

    def _allocate(self, num_bytes: int, addresses: list[int], bindings: Any) -> str:
        """Allocates a heap here, and appends its addresses and those of the peers' heaps."""
        self._new = int(bindings.malloc(num_bytes))
        if not self._new:
            raise MemoryError(
                f"NVSHMEM cannot allocate {num_bytes} bytes on {self._device}. It takes what XLA leaves: set"
                " XLA_PYTHON_CLIENT_MEM_FRACTION lower, 0.75 by default, or the capacity of the layers"
            )
        _fill_with_zeros(self._new, num_bytes)
        addresses.extend(int(bindings.ptr(self._new, number) or 0) for number in range(len(self.devices)))
        unreachable = [device for device, at in zip(self.devices, addresses, strict=True) if not at]
        if unreachable:
            raise RuntimeError(
                f"{self._device} cannot write to the memory of {unreachable[0]} (NVSHMEM has no address of it here)."
                " Kernels need GPUs of one node that reach each other by NVLink or PCIe peer access; where they do"
                " not, call init(transport='xla')"
            )
        return ""

    def _give_back(self, bindings: Any) -> None:
        """Undoes an allocation that has failed in some process.

        To free is to meet in a barrier of all processes first. One that has got nothing has nothing to free, and would
        leave the others waiting there.
        """
        if self._new:
            bindings.free(self._new)
        else:
            bindings.barrier_all()

    def _free(self) -> None:
        """Frees all heaps, in the same order in all processes."""
        if self._heaps:
            from nvshmem.bindings import nvshmem as bindings

            self._make_current()
            for heap in self._heaps:
                bindings.free(heap)
            self._heaps = []

    def _make_current(self) -> Any:
        """The GPU, made the one of this thread: NVSHMEM works on the thread's current device."""
        from cuda.core import Device

        device = Device(self._device.local_hardware_id)
        device.set_current()
        return device


def _core() -> Any:
    import nvshmem.core

    return nvshmem.core


def _leave_multicast_off() -> None:
    """NVSHMEM reads its environment once; multicast memory can make the drivers of a shared host fail."""
    value = os.environ.setdefault(_NO_MULTICAST, "1")
    if value != "1":
        raise ValueError(
            f"init: the environment has {_NO_MULTICAST}={value}, but transport 'nvshmem' uses no NVLink multicast;"
            f" unset it, or set {_NO_MULTICAST}=1."
        )


def _fill_with_zeros(address: int, num_bytes: int) -> None:
    """Fills memory of the current device, and waits until that is done."""
    from cuda.bindings import driver

    for (code,) in (driver.cuMemsetD8(address, 0, num_bytes), driver.cuCtxSynchronize()):
        if int(code) != 0:
            raise RuntimeError(f"filling {num_bytes} bytes of symmetric memory failed with CUDA error {int(code)}")
