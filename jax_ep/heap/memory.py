"""Memory of symmetric heaps: the `Memory` protocol, and its implementation for one process that drives every GPU."""

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
from jax_ep.core.mesh_axes import numbers_in_processes

_LEAST_BYTES, _UNIT = 16 << 20, 1 << 20  # Allocation sizes.


@dataclasses.dataclass
class Generation:
    """Heaps of one size, one per device, that keep their addresses until `finalize`."""

    # Ids of their pointer tables and status records; newly traced programs use the last one. After a `finalize`, one
    # generation may replace several earlier ones and keep their ids.
    ids: Sequence[int]
    # Heap addresses of all devices as each device of this process sees them, by its number.
    addresses: dict[int, list[int]]
    allocation: int  # index of the allocation that contains the heaps
    start: int  # byte offset within that allocation
    num_bytes: int  # usable bytes of the data area, or of each buffer
    buffer_bytes: int = 0  # size of a low-latency buffer; 0 in a generation for data
    reserved: int = 0  # the most bytes that a program traced so far may use

    @property
    def id(self) -> int:
        """Id of the table and the status record for newly traced programs."""
        return self.ids[-1]


def next_generation_bytes(generations: Sequence[Generation]) -> int:
    """Return the minimum size of the next generation: 1.5 times the last one, which bounds their sum."""
    return generations[-1].num_bytes * 3 // 2 if generations else 0


def allocation_bytes(needed: int) -> int:
    """Return the size of an allocation that holds `needed` bytes."""
    return max(round_up(needed, _UNIT), _LEAST_BYTES)


class TraceArea(Protocol):
    """Areas of int64 words, one for each device of this process."""

    addresses: dict[int, int]  # address of each device's area, by device number

    def read(self, device: int) -> np.ndarray:
        """Return the words of one area. Call it once, after all writes have ended."""


class Memory(Protocol):
    """Provider of heaps: allocations on every device, and one status record per device.

    `devices` lists the devices of all processes that can access each other's memory, in one order; device numbers are
    positions in it. `numbers` maps all devices of the program, including those of other memory domains, to their
    numbers.
    """

    devices: list[jax.Device]
    numbers: dict[jax.Device, int]

    def allocate(self, num_bytes: int, function: str) -> dict[int, list[int]]:
        """Allocate `num_bytes` of zeroed memory on every device; earlier allocations stay valid.

        Programs may be running. Return the addresses of all devices' memory, in device order, as each device of this
        process sees them, by its number. `function` is the public function to name in errors.

        Raises:
          RuntimeError: memory is insufficient; the message gives the size and the remedy.
        """

    def status_address(self, device: int) -> int:
        """Return the address of the status record as `device`, one of this process, sees it."""

    def statuses(self) -> list[ffi.StatusBuffer]:
        """Return the status records of this process's devices as the host sees them."""

    def trace_area(self, header: np.ndarray, num_words: int) -> TraceArea:
        """Allocate trace memory on each device of this process, replacing the previous trace memory."""

    def close(self) -> None:
        """Free all memory."""


class DeviceTraceArea:
    """Trace areas of `num_words` in GPU memory, as JAX arrays: the int64 words of the header, then zeros.

    Raises:
      jax.errors.JaxRuntimeError: memory is insufficient.
    """

    def __init__(self, devices: Sequence[tuple[int, jax.Device]], header: np.ndarray, num_words: int) -> None:
        halves = header.view(np.uint32)  # JAX may be in 32-bit mode.

        def make() -> jax.Array:
            return jnp.zeros((2 * num_words,), jnp.uint32).at[: halves.size].set(halves)

        self._areas = {
            number: jax.block_until_ready(jax.jit(make, out_shardings=jax.sharding.SingleDeviceSharding(device))())
            for number, device in devices
        }
        self.addresses = {number: area.unsafe_buffer_pointer() for number, area in self._areas.items()}

    def read(self, device: int) -> np.ndarray:
        """Return the words of one area. The array is dropped, because JAX would return its cached host copy."""
        return np.asarray(self._areas.pop(device)).view(np.int64)


class PeerMemory:
    """Heaps of the devices of one process, as shards of JAX arrays, between which XLA enables peer access."""

    def __init__(self) -> None:
        self.devices = jax.local_devices()
        self.numbers = numbers_in_processes(jax.devices())
        self._mesh = jax.sharding.Mesh(np.array(self.devices), ("device",))
        self._statuses = [ffi.alloc_status(*ffi.device_key(device)) for device in self.devices]
        self._heaps: list[jax.Array] = []

    def allocate(self, num_bytes: int, function: str) -> dict[int, list[int]]:
        """Allocate memory as `Memory.allocate` describes; all devices see the same addresses."""
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
        return self._statuses[device].device_address

    def statuses(self) -> list[ffi.StatusBuffer]:
        return self._statuses

    def trace_area(self, header: np.ndarray, num_words: int) -> TraceArea:
        return DeviceTraceArea(list(enumerate(self.devices)), header, num_words)

    def close(self) -> None:
        self._heaps = []
        for status in self._statuses:
            status.free()


def wait_for_devices(devices: list[jax.Device]) -> None:
    """Wait until every program launched so far on these devices has ended, successfully or not.

    A GPU runs programs in launch order. CPU devices do so only for programs of several devices; a single-device program
    runs when its operands are ready, so this also waits for all live arrays.
    """
    groups = [[device] for device in devices]
    if devices[0].platform == "cpu":
        groups = [devices]
        for array in jax.live_arrays("cpu"):
            with contextlib.suppress(RuntimeError):  # Its program failed, or the array was donated in the meantime.
                array.block_until_ready()
    for group in groups:
        sharding = NamedSharding(jax.sharding.Mesh(np.array(group), ("device",)), P("device"))
        jax.block_until_ready(jax.jit(lambda x: x + 1)(jax.device_put(np.zeros(len(group), np.int32), sharding)))
