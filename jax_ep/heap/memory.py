"""Where symmetric heaps live: generations of them, and the memory of one process that drives every GPU."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import ffi
from jax_ep.core.layout import round_up
from jax_ep.core.processes import numbers_in_processes
from jax_ep.heap.trace_area import DeviceTraceArea, TraceArea

_LEAST_BYTES, _UNIT = 16 << 20, 1 << 20  # of an allocation


@dataclasses.dataclass
class Generation:
    """Heaps of one size, one per device, which stay where they are until `finalize`.

    Attributes:
      ids: of their pointer tables and status records; programs traced now take the last one. Where there were
        several generations before a `finalize`, this one stands for all of them.
      addresses: of the heaps of all devices, by number of the device of this process that sees them so.
      allocation: in which allocation of the memory they lie, and
      start: from which of its bytes on.
      num_bytes: what programs may use of the data area, or of each buffer.
      buffer_bytes: of a low-latency buffer; 0 where this generation is for data.
      reserved: the most that a program traced so far may use.
    """

    ids: Sequence[int]
    addresses: dict[int, list[int]]
    allocation: int
    start: int
    num_bytes: int
    buffer_bytes: int = 0
    reserved: int = 0

    @property
    def id(self) -> int:
        """Of the table and the status record for what is traced now."""
        return self.ids[-1]


def half_as_much_again(generations: Sequence[Generation]) -> int:
    """What the next generation has at least: all of them together then have less than three times what the last has."""
    return generations[-1].num_bytes * 3 // 2 if generations else 0


def allocation_bytes(needed: int) -> int:
    """The size of an allocation that holds so many bytes."""
    return max(round_up(needed, _UNIT), _LEAST_BYTES)


class Memory(Protocol):
    """Where heaps live: allocations on every device, and one status record beside them.

    `devices` are those of all processes that reach each other's memory, in one order; numbers of devices are places in
    it. `numbers` are those of all devices of the program, also where other ones have such a memory of their own.
    """

    devices: list[jax.Device]
    numbers: dict[jax.Device, int]

    def allocate(self, num_bytes: int, function: str) -> dict[int, list[int]]:
        """Zeroed memory of `num_bytes` on every device, for `function`; what there was before stays.

        Programs may be running. The addresses of the memory of all devices, in their order, as each device of this
        process sees them, by its number.

        Raises:
          RuntimeError: there is not so much memory; the message says how much, and the remedy.
        """

    def status_address(self, device: int) -> int:
        """Address of the status record as `device`, one of this process, sees it."""

    def statuses(self) -> list[ffi.StatusBuffer]:
        """The records of this process's devices as the host sees them."""

    def trace_area(self, header: np.ndarray, num_words: int) -> TraceArea:
        """Memory of each device of this process for the traces of its kernels, in place of what it had before."""

    def close(self) -> None:
        """Gives everything back."""


class PeerMemory:
    """Heaps of the devices of a process: shards of JAX arrays, since XLA enables peer access for them."""

    def __init__(self) -> None:
        self.devices = jax.local_devices()
        self.numbers = numbers_in_processes(jax.devices())
        self._mesh = jax.sharding.Mesh(np.array(self.devices), ("device",))
        self._statuses = [ffi.alloc_status(*ffi.device_key(device)) for device in self.devices]
        self._heaps: list[jax.Array] = []

    def allocate(self, num_bytes: int, function: str) -> dict[int, list[int]]:
        """See `Memory`: the addresses are the same for each device, in one address space."""
        sharding = NamedSharding(self._mesh, P("device"))
        shape = (len(self.devices), num_bytes)
        try:
            heap = jax.block_until_ready(jax.jit(lambda: jnp.zeros(shape, jnp.uint8), out_shardings=sharding)())
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise jax.errors.JaxRuntimeError(self._shortage(num_bytes, function)) from error
        self._heaps.append(heap)
        by_device = {shard.device: shard.data.unsafe_buffer_pointer() for shard in heap.addressable_shards}
        addresses = [by_device[device] for device in self.devices]
        return dict.fromkeys(range(len(self.devices)), addresses)

    def _shortage(self, num_bytes: int, function: str) -> str:
        stats = {device: device.memory_stats() or {} for device in self.devices}
        free = {device: s.get("bytes_limit", 0) - s.get("bytes_in_use", 0) for device, s in stats.items()}
        fullest = min(self.devices, key=lambda device: free[device])
        return (
            f"{function}: {num_bytes} bytes of symmetric memory per device, but {fullest} has {free[fullest]} bytes"
            f" free of the {stats[fullest].get('bytes_limit', 0)} that JAX may use; call init() with a smaller"
            " heap_bytes before anything else takes memory, or lower the capacity of the layers."
        )

    def status_address(self, device: int) -> int:
        """Address of the status record as `device` sees it."""
        return self._statuses[device].device_address

    def statuses(self) -> list[ffi.StatusBuffer]:
        """The records as the host sees them."""
        return self._statuses

    def trace_area(self, header: np.ndarray, num_words: int) -> TraceArea:
        """See `Memory`."""
        return DeviceTraceArea(list(enumerate(self.devices)), header, num_words)

    def close(self) -> None:
        """Gives the memory back."""
        self._heaps = []
        for status in self._statuses:
            status.free()


def wait_for_devices(devices: list[jax.Device]) -> None:
    """Wait until every program launched so far on these devices has ended, whether it fails or not.

    A GPU runs programs in the order of their launches. CPU devices do so only with programs of several devices: one of
    a single device runs when its operands are ready, so that all results in memory are waited for too.
    """
    groups = [[device] for device in devices]
    if devices[0].platform == "cpu":
        groups = [devices]
        for array in jax.live_arrays("cpu"):
            with contextlib.suppress(RuntimeError):  # its program failed, or it was donated meanwhile
                array.block_until_ready()
    for group in groups:
        sharding = NamedSharding(jax.sharding.Mesh(np.array(group), ("device",)), P("device"))
        jax.block_until_ready(jax.jit(lambda x: x + 1)(jax.device_put(np.zeros(len(group), np.int32), sharding)))
