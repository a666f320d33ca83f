"""Symmetric heaps: one region of the same layout in the memory of every device, which its peers can write.

Kernels find the addresses in a table that the FFI library hands to each device at run time, so a heap can grow, or be
replaced after a failure, without compiling anything again.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import ffi
from jax_ep.layout import round_up

_PAGE = 4096
_CONTROL_WORDS = 64
_REGION_UNIT = 256
MAX_BLOCKS = 32768
"""Flags per device and parity: a launch has at most this many blocks of tokens."""


@dataclasses.dataclass(frozen=True)
class HeapLayout:
    """Static offsets of a heap; kernels/protocol.py describes what lies there.

    Attributes:
      num_devices: D, devices that share the heap.
    """

    num_devices: int

    @property
    def flags(self) -> int:
        """Byte offset of the block flags."""
        return round_up(4 * (_CONTROL_WORDS + 4 * self.num_devices), _PAGE)

    @property
    def data(self) -> int:
        """Byte offset of the data area."""
        return round_up(self.flags + 8 * self.num_devices * MAX_BLOCKS, _PAGE)

    def regions(self, num_bytes: int, region_bytes: int) -> int:
        """Byte offset of the low-latency area, which ends a heap of `num_bytes`: two regions per device."""
        return (num_bytes - 2 * self.num_devices * region_bytes) // _REGION_UNIT * _REGION_UNIT


class Memory(Protocol):
    """Where heaps live: one allocation per device, and a status record beside each.

    `devices` are those of all processes, in one order; the methods that take a device take its number in it, and know
    the devices of this process only.
    """

    devices: list[jax.Device]

    def allocate(self, num_bytes: int, function: str = "init") -> None:
        """Makes zeroed heaps of `num_bytes` for `function` and drops earlier ones; no launch may be running."""

    def addresses(self, device: int) -> list[int]:
        """Addresses of all heaps as `device` sees them."""

    def status_address(self, device: int) -> int:
        """Address of the status record as `device` sees it."""

    def statuses(self) -> list[ffi.StatusBuffer]:
        """The records of this process's devices as the host sees them."""

    def close(self) -> None:
        """Gives the memory back."""


class PeerMemory:
    """Heaps of one process that drives every device: shards of a JAX array, since XLA enables peer access for them."""

    def __init__(self) -> None:
        self.devices = jax.devices()
        self._mesh = jax.sharding.Mesh(np.array(self.devices), ("device",))
        self._statuses = [ffi.alloc_status(*ffi.device_key(device)) for device in self.devices]
        self._heap: jax.Array | None = None

    def allocate(self, num_bytes: int, function: str = "init") -> None:
        """Makes zeroed heaps of `num_bytes` and drops earlier ones; no launch may be running."""
        self._heap = None
        sharding = NamedSharding(self._mesh, P("device"))
        shape = (len(self.devices), num_bytes)
        self._heap = jax.block_until_ready(jax.jit(lambda: jnp.zeros(shape, jnp.uint8), out_shardings=sharding)())
        by_device = {shard.device: shard.data.unsafe_buffer_pointer() for shard in self._heap.addressable_shards}
        self._addresses = [by_device[device] for device in self.devices]

    def addresses(self, device: int) -> list[int]:
        """Addresses of all heaps as `device` sees them: the same for each, in one address space."""
        return self._addresses

    def status_address(self, device: int) -> int:
        """Address of the status record as `device` sees it."""
        return self._statuses[device].device_address

    def statuses(self) -> list[ffi.StatusBuffer]:
        """The records as the host sees them."""
        return self._statuses

    def close(self) -> None:
        """Gives the memory back."""
        self._heap = None
        for status in self._statuses:
            status.free()


_ids = itertools.count(1)


class SymmetricHeap:
    """The heap of one context, its pointer tables and its status records.

    Args:
      memory: where it lives.
      num_bytes: bytes per device that the user allows, or None to grow as needed.
      timeout_s: how long a kernel waits for a peer.
    """

    def __init__(self, memory: Memory, num_bytes: int | None, timeout_s: float) -> None:
        self.id = next(_ids)  # of the pointer tables and of the status records
        self.layout = HeapLayout(len(memory.devices))
        self._memory = memory
        self._limit = num_bytes
        self._timeout_ns = int(timeout_s * 1e9)
        self._size, self._data_bytes, self._region_bytes = 0, 0, 0
        here = jax.process_index()
        self._own = [(number, d) for number, d in enumerate(memory.devices) if d.process_index == here]
        for status in memory.statuses():
            status.register(self.id)
        if num_bytes is not None:
            try:
                self._allocate(num_bytes, 0, "init")
            except Exception:
                self.close()
                raise

    @property
    def num_table_entries(self) -> int:
        """Heap addresses of all devices, status record, timeout in ns, own number, low-latency area, region bytes."""
        return self.layout.num_devices + 5

    def numbers(self, mesh: jax.sharding.Mesh) -> np.ndarray | None:
        """int32 numbers of the devices of a mesh, in its shape; None where one of them has no heap."""
        number_of = {device: number for number, device in enumerate(self._memory.devices)}
        if not number_of.keys() >= set(mesh.devices.flat):
            return None
        numbers = [number_of[device] for device in mesh.devices.flat]
        return np.array(numbers, np.int32).reshape(mesh.devices.shape)

    def reserve(self, function: str, data_bytes: int, region_bytes: int = 0) -> None:
        """Makes sure that the data area has `data_bytes`, and each low-latency region `region_bytes`.

        Raises:
          ValueError: the heap was given a size, and that is too small.
        """
        data_bytes = max(data_bytes, self._data_bytes)
        region_bytes = max(round_up(region_bytes, _REGION_UNIT), self._region_bytes)
        regions = round_up(self.layout.data + data_bytes, _REGION_UNIT)
        needed = regions + 2 * self.layout.num_devices * region_bytes
        if self._limit is not None and needed > self._limit:
            raise ValueError(
                f"{function}: the symmetric heap has heap_bytes={self._limit} per device, but this call needs {needed};"
                f" call finalize() and init(heap_bytes={needed}), or leave heap_bytes out to let it grow."
            )
        if needed > self._size or region_bytes > self._region_bytes:
            # Larger regions lie elsewhere, and so need a heap that nobody uses yet, even one of the same size.
            self._allocate(self._limit or round_up(needed, 1 << 20), region_bytes, function)
        self._data_bytes = data_bytes

    def _allocate(self, num_bytes: int, region_bytes: int, function: str) -> None:
        if num_bytes < self.layout.data:
            raise ValueError(
                f"init: heap_bytes={num_bytes}, expected at least {self.layout.data} for the flags of"
                f" {self.layout.num_devices} devices; raise heap_bytes or leave it out."
            )
        self._wait()
        self._size = 0
        try:
            self._memory.allocate(num_bytes, function)
        except Exception:
            ffi.unregister_table(self.id)  # programs compiled before must not write to where a heap was
            raise
        self._size, self._region_bytes = num_bytes, region_bytes
        area = [self.layout.regions(num_bytes, region_bytes), region_bytes]
        for number, device in self._own:
            own = [self._memory.status_address(number), self._timeout_ns, number]
            ffi.register_table(self.id, device, [*self._memory.addresses(number), *own, *area])

    def _wait(self) -> None:
        """Waits for the devices of this process: no other can be asked, and their own processes wait for them."""
        wait_for_devices([device for _, device in self._own])

    def failure(self) -> str | None:
        """The story of the first failure that a kernel has recorded, or None."""
        records = (status.read() for status in self._memory.statuses())
        failures = [r for r in records if r.state not in (ffi.State.OK, ffi.State.WRITING)]
        # A wrong mesh is the cause of the timeouts beside it.
        first = min(failures, key=lambda record: record.state != ffi.State.WRONG_MESH, default=None)
        return None if first is None else ffi.format_status(first)

    def close(self) -> str | None:
        """Waits for the devices and gives everything back; the story of a failure, if there was one."""
        self._wait()
        story = self.failure()
        ffi.unregister_table(self.id)
        ffi.unregister_status(self.id)
        self._memory.close()
        return story


def wait_for_devices(devices: list[jax.Device]) -> None:
    """Waits until every program launched so far on these devices has ended."""
    for device in devices:
        jax.block_until_ready(jax.jit(lambda x: x + 1)(jax.device_put(np.int32(0), device)))
