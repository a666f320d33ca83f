"""Symmetric heaps: memory of the same layout on every device, which its peers can write.

Kernels find the addresses in a table that the FFI library hands to each device at run time. A program names the table
by its id, and keeps it: heaps come in generations. Where a program needs more than the newest generation has, another
one is allocated beside it, with a table, control words, flags and counts of its own, and the programs traced from then
on use that. So nothing that runs, or may run, ever loses its memory, and growing waits for nobody. All of it goes back
when the context ends.

The data area of the throughput kernels and the buffers of the low-latency kernels grow apart: each generation is for
one of them. One is at least half as large again as the one before of its kind, so all of a kind have at most 4.5 times
the bytes that the largest program needs. Where the user gives a size, there is one allocation for
everything: one generation for data, from its start on, and generations of buffers, from its end down; each place there
has one use for ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jax_ep import ffi
from jax_ep.core.layout import round_up
from jax_ep.heap.memory import Generation, Memory, allocation_bytes, half_as_much_again, wait_for_devices
from jax_ep.heap.trace_area import TraceArea

_PAGE = 4096
_CONTROL_WORDS = 64  # before those of each device: EPOCHS of kernels/table.py
_WORDS_OF_A_DEVICE = 6
_BUFFER_UNIT = 256
_BUFFERS_OF_A_DEVICE = 2  # kernels/low_latency_buffers.py
_DATA, _BUFFERS = 1, 2  # the first ids of either kind
_STEP = 2  # from an id to the next of its kind
MAX_BLOCKS = 32768
"""Flags per device and parity: a launch has at most this many blocks of tokens."""


@dataclasses.dataclass(frozen=True)
class HeapLayout:
    """Static offsets of a heap; kernels/table.py names the control words at its start.

    Attributes:
      num_devices: D, devices that share the heap.
    """

    num_devices: int

    @property
    def flags(self) -> int:
        """Byte offset of the block flags."""
        return round_up(4 * (_CONTROL_WORDS + _WORDS_OF_A_DEVICE * self.num_devices), _PAGE)

    @property
    def data(self) -> int:
        """Byte offset of the data area."""
        return round_up(self.flags + 8 * self.num_devices * MAX_BLOCKS, _PAGE)

    @property
    def buffers(self) -> int:
        """Byte offset of the low-latency buffers, which have no block flags before them."""
        return self.flags

    def bytes_with_buffers(self, buffer_bytes: int) -> int:
        """Bytes of a heap with buffers of this size."""
        return self.buffers + _BUFFERS_OF_A_DEVICE * self.num_devices * buffer_bytes

    def most_buffer_bytes(self, num_bytes: int) -> int:
        """The largest buffers that a heap of `num_bytes` holds."""
        each = (num_bytes - self.buffers) // (_BUFFERS_OF_A_DEVICE * self.num_devices)
        return each // _BUFFER_UNIT * _BUFFER_UNIT


class SymmetricHeap:
    """The heaps of one context, their pointer tables and their status records.

    Ids are small numbers in the order of tracing, because they become part of what is compiled: the same program has
    the same ones in every run, and JAX's compilation cache finds it. They start again with each context, so that
    programs traced for an earlier one find the heaps of this one, under an id that never stands for less than before.

    Args:
      memory: where they live.
      num_bytes: bytes per device that the user allows, all allocated now, or None to grow as needed.
      timeout_s: how long a kernel waits for a peer.
      earlier: `sizes` of the context before, which this one makes room for, as far as `num_bytes` allows.

    Raises:
      ValueError: `num_bytes` is too small for what every heap has.
      RuntimeError: there is not so much memory.
    """

    def __init__(
        self, memory: Memory, num_bytes: int | None, timeout_s: float, earlier: Mapping[int, int] | None = None
    ) -> None:
        self.layout = HeapLayout(len(memory.devices))
        self._memory = memory
        self._limit = num_bytes
        self._end = 0  # where a heap of a given size has its buffers: they lie from here on
        self._timeout_ns = int(timeout_s * 1e9)
        self._data: list[Generation] = []
        self._buffers: list[Generation] = []
        self._num_allocations = 0
        self._traces: TraceArea | None = None
        self._sizes = dict(earlier or {})
        here = jax.process_index()
        self._own = [(number, d) for number, d in enumerate(memory.devices) if d.process_index == here]
        try:
            self._begin()
        except Exception:
            self.close()
            raise

    @property
    def device_ids(self) -> list[int]:
        """JAX's ids of the devices by their numbers, which another machine or process has too."""
        return [device.id for device in self._memory.devices]

    @property
    def num_table_entries(self) -> int:
        """Heap addresses of all devices, and what kernels/table.py names behind them."""
        return self.layout.num_devices + 6

    @property
    def data(self) -> Generation:
        """The generation for programs traced now that use the data area; after a `reserve`."""
        return self._data[-1]

    @property
    def buffers(self) -> Generation:
        """The generation for programs traced now that use low-latency buffers; after a `reserve` of some."""
        return self._buffers[-1]

    @property
    def generations(self) -> list[Generation]:
        """All of them."""
        return [*self._data, *self._buffers]

    @property
    def sizes(self) -> dict[int, int]:
        """By id of a table, the most bytes that a program of this process may use, or has used, of its memory."""
        sizes = dict(self._sizes)
        for generation in self.generations:
            for i in generation.ids:
                sizes[i] = max(sizes.get(i, 0), generation.reserved, self._used([i]))
        return sizes

    def numbers(self, mesh: jax.sharding.Mesh) -> np.ndarray | None:
        """int32 numbers of the devices of a mesh, in its shape; None where one of them has no heap."""
        number_of = self._memory.numbers
        if not number_of.keys() >= set(mesh.devices.flat):
            return None
        numbers = [number_of[device] for device in mesh.devices.flat]
        return np.array(numbers, np.int32).reshape(mesh.devices.shape)

    def reserve(self, function: str, data_bytes: int, buffer_bytes: int = 0) -> None:
        """Makes sure that the newest generations have `data_bytes` of data, and low-latency buffers of `buffer_bytes`.

        Raises:
          ValueError: the heap was given a size, and that is too small.
          RuntimeError: there is not so much memory.
        """
        if not self._data or data_bytes > self.data.reserved:
            self._reserve_data(function, data_bytes)
        if buffer_bytes and (not self._buffers or buffer_bytes > self.buffers.reserved):
            self._reserve_buffers(function, round_up(buffer_bytes, _BUFFER_UNIT))

    def begin_traces(self, header: np.ndarray, num_words: int) -> None:
        """Gives the kernels of each device of this process `num_words` int64 to record in, which begin with `header`.

        Raises:
          RuntimeError: they are recording already, or there is not so much memory.
        """
        if self._traces is not None:
            raise RuntimeError("record: the context records already; end that recording first.")
        self._wait()  # what runs was launched before, and is not to be seen
        self._show_traces(self._memory.trace_area(header, num_words))

    def end_traces(self) -> dict[int, np.ndarray]:
        """What they have recorded, by the number of the device; launches under way are waited for."""
        area = self._traces
        if area is None:
            raise RuntimeError("record: the context has been finalized while it recorded; finalize it afterwards.")
        self._wait()
        self._show_traces(None)
        self._wait()  # for what another thread has launched meanwhile
        return {number: area.read(number) for number, _ in self._own}

    def _show_traces(self, area: TraceArea | None) -> None:
        self._traces = area
        for generation in self.generations:
            self._registered(generation)

    def _begin(self) -> None:
        """Allocates a heap of a given size, and what programs of earlier contexts need."""
        data, buffers = self._ids(_DATA), self._ids(_BUFFERS)
        if self._limit is None:
            if data:
                self._data.append(self._allocate_data("init", self._most(data), data))
            if buffers:
                self._buffers.append(self._allocate_buffers("init", self._most(buffers), buffers))
            return
        self._end = self._limit // _PAGE * _PAGE
        room = self._end - self.layout.data
        if room < 0:
            raise ValueError(
                f"init: heap_bytes={self._limit}, expected at least {self.layout.data} for the flags of"
                f" {self.layout.num_devices} devices; raise heap_bytes or leave it out."
            )
        addresses = self._allocate("init", self._limit)
        data = [i for i in data if self._sizes[i] <= room] or [self._next_id(_DATA)]
        whole = Generation(data, addresses, 0, 0, room, reserved=round_up(self._most(data), _PAGE))
        self._data.append(self._registered(whole))
        buffers = [i for i in buffers if self._place_of_buffers(self._sizes[i]) is not None]
        if buffers and (start := self._place_of_buffers(size := self._most(buffers))) is not None:
            self._split(start, size, buffers)

    def _reserve_data(self, function: str, num_bytes: int) -> None:
        if self._limit is None:
            size = max(num_bytes, half_as_much_again(self._data))
            self._data.append(self._allocate_data(function, size, [self._next_id(_DATA)]))
            return
        if num_bytes > self.data.num_bytes:
            raise self._too_small(function, round_up(self.layout.data + num_bytes, _PAGE))
        self.data.reserved = round_up(num_bytes, _PAGE)

    def _reserve_buffers(self, function: str, num_bytes: int) -> None:
        size = max(num_bytes, round_up(half_as_much_again(self._buffers), _BUFFER_UNIT))
        ids = [self._next_id(_BUFFERS)]
        if self._limit is None:
            self._buffers.append(self._allocate_buffers(function, size, ids))
            return
        for buffer_bytes in (size, num_bytes):  # rather no reserve than no room
            if (start := self._place_of_buffers(buffer_bytes)) is not None:
                self._split(start, buffer_bytes, ids)
                return
        needed = round_up(self.layout.bytes_with_buffers(num_bytes), _PAGE)
        raise self._too_small(function, self._end_of_data() + needed)

    def _too_small(self, function: str, beside_buffers: int) -> ValueError:
        """The error for a heap of a given size that needs this many bytes beside the buffers it has."""
        needed = beside_buffers + (self._limit or 0) // _PAGE * _PAGE - self._end
        return ValueError(
            f"{function}: the symmetric heap has heap_bytes={self._limit} per device, but this call needs {needed};"
            f" call finalize() and init(heap_bytes={needed}), or leave heap_bytes out to let it grow."
        )

    def _allocate_data(self, function: str, size: int, ids: Sequence[int]) -> Generation:
        total = allocation_bytes(self.layout.data + size)
        num_bytes, number = total - self.layout.data, self._num_allocations
        addresses = self._allocate(function, total)
        return self._registered(Generation(ids, addresses, number, 0, num_bytes, reserved=num_bytes))

    def _allocate_buffers(self, function: str, size: int, ids: Sequence[int]) -> Generation:
        total = allocation_bytes(self.layout.bytes_with_buffers(size))
        num_bytes, number = self.layout.most_buffer_bytes(total), self._num_allocations
        addresses = self._allocate(function, total)
        return self._registered(Generation(ids, addresses, number, 0, num_bytes, num_bytes, num_bytes))

    def _end_of_data(self) -> int:
        """Where no data lies, now or ever: buffers may begin there."""
        return round_up(self.layout.data + max(self.data.reserved, self._used(self.data.ids)), _PAGE)

    def _place_of_buffers(self, buffer_bytes: int) -> int | None:
        """Where a generation of buffers would begin in a heap of a given size, if there is room."""
        start = (self._end - self.layout.bytes_with_buffers(buffer_bytes)) // _PAGE * _PAGE
        return start if start >= self._end_of_data() else None

    def _split(self, start: int, buffer_bytes: int, ids: Sequence[int]) -> None:
        """Makes a generation of buffers of the end of the data area: no program has ever used that, so it is zero."""
        num_bytes = self.data.num_bytes
        self.data.num_bytes = start - self.layout.data
        try:
            self._registered(self.data)  # refuses where a program that came from elsewhere has just begun to use it
        except Exception:
            self.data.num_bytes = num_bytes
            raise
        self._end = start
        addresses = {number: [heap + start for heap in heaps] for number, heaps in self.data.addresses.items()}
        buffers = Generation(ids, addresses, 0, start, buffer_bytes, buffer_bytes, buffer_bytes)
        self._buffers.append(self._registered(buffers))

    def _allocate(self, function: str, num_bytes: int) -> dict[int, list[int]]:
        addresses = self._memory.allocate(num_bytes, function)
        self._num_allocations += 1
        return addresses

    def _registered(self, generation: Generation) -> Generation:
        """Lets programs find the tables and status records of a generation."""
        area = [self.layout.buffers if generation.buffer_bytes else 0, generation.buffer_bytes]
        traces = {} if self._traces is None else self._traces.addresses
        for i in generation.ids:
            self._sizes.setdefault(i, 0)
            for number, device in self._own:
                own = [self._memory.status_address(number), self._timeout_ns, number]
                values = [*generation.addresses[number], *own, *area, traces.get(number, 0)]
                ffi.register_table(i, device, values, generation.num_bytes)
            for status in self._memory.statuses():
                status.register(i)
        return generation

    def _most(self, ids: Sequence[int]) -> int:
        """The most bytes that a program of an earlier context may use under one of these ids."""
        return max(self._sizes.get(i, 0) for i in ids)

    def _ids(self, first: int) -> list[int]:
        """The ids so far of the kind that begins with this one, in order."""
        return sorted(i for i in self._sizes if i % _STEP == first % _STEP)

    def _next_id(self, first: int) -> int:
        """The next id of that kind: never one that stood for less, also in an earlier context."""
        return max(self._ids(first), default=first - _STEP) + _STEP

    def _used(self, ids: Sequence[int]) -> int:
        """The most bytes that a program has used under these ids, whoever has compiled it."""
        return max(ffi.used_bytes(i, device) for i in ids for _, device in self._own)

    def _wait(self) -> None:
        """Waits for the devices of this process: no other can be asked, and their own processes wait for them."""
        wait_for_devices([device for _, device in self._own])

    def failure(self) -> str | None:
        """The message of the first failure that a kernel has recorded, or None."""
        records = (status.read() for status in self._memory.statuses())
        failures = [r for r in records if r.state not in (ffi.State.OK, ffi.State.WRITING)]
        # A wrong mesh, or another launch, is the cause of the timeouts beside it.
        first = min(failures, key=lambda record: record.state == ffi.State.TIMEOUT, default=None)
        return None if first is None else ffi.format_status(first)

    def close(self) -> str | None:
        """Waits for the devices and gives everything back; the message of a failure, if there was one.

        What was launched before ends as it should. What another thread launches from now on finds no table, or has it
        already, and is waited for too: only then do the copies of tables on devices become nulls, and the memory goes.
        """
        ids = list(self._sizes)  # also of a generation that could be registered on some devices only
        self._wait()
        for i in ids:
            ffi.unregister_status(i)
            ffi.hide_table(i)
        self._wait()
        message = self.failure()
        self._traces = None
        for i in ids:
            ffi.unregister_table(i)
        self._memory.close()
        return message
