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
        return round_up(4 * (_CONTROL_WORDS + 3 * self.num_devices), _PAGE)

    @property
    def data(self) -> int:
        """Byte offset of the data area."""
        return round_up(self.flags + 8 * self.num_devices * MAX_BLOCKS, _PAGE)


class Memory(Protocol):
    """Where heaps live: one allocation per device, and a status record beside each."""

    devices: list[jax.Device]

    def allocate(self, num_bytes: int) -> None:
        """Makes zeroed heaps of `num_bytes` and drops earlier ones; no launch may be running."""

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

    def allocate(self, num_bytes: int) -> None:
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
        self._size = 0
        for status in memory.statuses():
            status.register(self.id)
        if num_bytes is not None:
            self._allocate(num_bytes)

    @property
    def num_table_entries(self) -> int:
        """Heap addresses of all devices, status record, timeout in ns, own number."""
        return self.layout.num_devices + 3

    def reserve(self, function: str, data_bytes: int) -> None:
        """Makes sure that the data area has `data_bytes`.

        Raises:
          ValueError: the heap was given a size, and that is too small.
        """
        needed = self.layout.data + data_bytes
        if needed <= self._size:
            return
        if self._limit is not None:
            raise ValueError(
                f"{function}: the symmetric heap has heap_bytes={self._limit} per device, but this call needs {needed};"
                f" call finalize() and init(heap_bytes={needed}), or leave heap_bytes out to let it grow."
            )
        self._allocate(round_up(needed, 1 << 20))

    def _allocate(self, num_bytes: int) -> None:
        if num_bytes < self.layout.data:
            raise ValueError(
                f"init: heap_bytes={num_bytes}, expected at least {self.layout.data} for the flags of"
                f" {self.layout.num_devices} devices; raise heap_bytes or leave it out."
            )
        wait_for_devices(self._memory.devices)
        self._memory.allocate(num_bytes)
        self._size = num_bytes
        for number, device in enumerate(self._memory.devices):
            entries = [*self._memory.addresses(number), self._memory.status_address(number), self._timeout_ns, number]
            ffi.register_table(self.id, device, entries)

    def failure(self) -> str | None:
        """The story of the first failure that a kernel has recorded, or None."""
        records = (status.read() for status in self._memory.statuses())
        return next((ffi.format_status(r) for r in records if r.state not in (ffi.State.OK, ffi.State.WRITING)), None)

    def close(self) -> None:
        """Waits for the devices and gives everything back."""
        wait_for_devices(self._memory.devices)
        ffi.unregister_table(self.id)
        ffi.unregister_status(self.id)
        self._memory.close()


def wait_for_devices(devices: list[jax.Device]) -> None:
    """Waits until every program launched so far on these devices has ended."""
    for device in devices:
        jax.block_until_ready(jax.jit(lambda x: x + 1)(jax.device_put(np.int32(0), device)))
