"""Symmetric heaps: memory of the same layout on every device, which its peers can write.

Kernels find the addresses in a table that the FFI library passes to each device at run time. A program refers to its
table by id and keeps that id. Heaps come in generations. When a program needs more than the newest generation has, a
larger one is allocated with its own table, control words, flags and counts. Newly traced programs use that. Running
programs never lose their memory, and growing waits for no program. All memory is freed when the context ends.

The data area of the throughput kernels and the buffers of the low-latency kernels grow separately: each generation
serves one of them. Each generation is at least 1.5 times its predecessor of the same kind, so all of a kind take at
most 4.5 times the bytes that the largest program needs. If the user gives a size, there is one allocation for
everything: one generation for data that grows from its start, and generations of buffers that grow down from its end.
A byte of it never changes between data and buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jax_ep import ffi
from jax_ep.core.layout import round_up
from jax_ep.heap.memory import Generation, Memory, TraceArea, allocation_bytes, next_generation_bytes, wait_for_devices

_PAGE = 4096
_CONTROL_WORDS = 64  # Before those of each device: EPOCHS in kernels/failures.py.
_WORDS_OF_A_DEVICE = 6
_BUFFER_UNIT = 256
_BUFFERS_OF_A_DEVICE = 2  # See kernels/low_latency_buffers.py.
_DATA, _BUFFERS = 1, 2  # First id of each kind.
_STEP = 2  # From an id to the next of its kind.
MAX_BLOCKS = 32768
"""Flags per device and parity, which bound the blocks of tokens of a launch."""


@dataclasses.dataclass(frozen=True)
class HeapLayout:
    """Static offsets of a heap; kernels/failures.py names the control words at its start."""

    num_devices: int  # D, devices that share the heap

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
        """Return the bytes of a heap with buffers of this size."""
        return self.buffers + _BUFFERS_OF_A_DEVICE * self.num_devices * buffer_bytes

    def most_buffer_bytes(self, num_bytes: int) -> int:
        """Return the size of the largest buffers that fit in a heap of `num_bytes`."""
        each = (num_bytes - self.buffers) // (_BUFFERS_OF_A_DEVICE * self.num_devices)
        return each // _BUFFER_UNIT * _BUFFER_UNIT


class SymmetricHeap:
    """The heaps of one context, their pointer tables and their status records.

    Ids are small numbers in tracing order, because they are compiled into programs: the same program has the same ids
    in every run, so JAX's compilation cache finds it. Each context starts again at the same ids, so that programs
    traced for an earlier context find the heaps of this one. The memory of an id never shrinks.

    Args:
      memory: provider of the heap memory.
      num_bytes: bytes per device, all allocated now, or None to grow as needed.
      timeout_s: how long a kernel waits for a peer.
      earlier: `sizes` of the previous context, which this one allocates again, as far as `num_bytes` allows.

    Raises:
      ValueError: `num_bytes` is too small for the control words and flags.
      RuntimeError: memory is insufficient.
    """

    def __init__(
        self, memory: Memory, num_bytes: int | None, timeout_s: float, earlier: Mapping[int, int] | None = None
    ) -> None:
        self.layout = HeapLayout(len(memory.devices))
        self._memory = memory
        self._limit = num_bytes
        self._end = 0  # With a given size, buffers occupy the heap from here on.
        self._timeout_ns = int(timeout_s * 1e9)
        self._data: list[Generation] = []
        self._buffers: list[Generation] = []
        self._num_allocations = 0
        self.num_bytes = 0  # Of all allocations, per device.
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
        """JAX ids of the devices in number order, which also identify devices of other processes."""
        return [device.id for device in self._memory.devices]

    @property
    def num_table_entries(self) -> int:
        """Number of table entries: heap addresses of all devices, then those in kernels/failures.py."""
        return self.layout.num_devices + 6

    @property
    def data(self) -> Generation:
        """The generation for newly traced programs that use the data area; call `reserve` first."""
        return self._data[-1]

    @property
    def buffers(self) -> Generation:
        """The generation for newly traced programs that use low-latency buffers; call `reserve` first."""
        return self._buffers[-1]

    @property
    def generations(self) -> list[Generation]:
        """Generations of the heap, those for data first."""
        return [*self._data, *self._buffers]

    @property
    def sizes(self) -> dict[int, int]:
        """The most bytes that a program of this process uses or may use, by table id."""
        sizes = dict(self._sizes)
        for generation in self.generations:
            for i in generation.ids:
                sizes[i] = max(sizes.get(i, 0), generation.reserved, self._used_bytes([i]))
        return sizes

    def numbers(self, mesh: jax.sharding.Mesh) -> np.ndarray | None:
        """Return int32 numbers of the devices of a mesh, in its shape, or None if a device has no heap."""
        number_of = self._memory.numbers
        if not number_of.keys() >= set(mesh.devices.flat):
            return None
        numbers = [number_of[device] for device in mesh.devices.flat]
        return np.array(numbers, np.int32).reshape(mesh.devices.shape)

    def reserve(self, function: str, data_bytes: int, buffer_bytes: int = 0) -> None:
        """Ensure that the newest generations have `data_bytes` of data, and low-latency buffers of `buffer_bytes`.

        Raises:
          ValueError: the heap has a given size, which is too small.
          RuntimeError: memory is insufficient.
        """
        if not self._data or data_bytes > self.data.reserved:
            self._reserve_data(function, data_bytes)
        if buffer_bytes and (not self._buffers or buffer_bytes > self.buffers.reserved):
            self._reserve_buffers(function, round_up(buffer_bytes, _BUFFER_UNIT))

    def begin_traces(self, header: np.ndarray, num_words: int) -> None:
        """Give the kernels of each device of this process `num_words` int64 to record in, starting with `header`.

        Raises:
          RuntimeError: a recording is active, or memory is insufficient.
        """
        if self._traces is not None:
            raise RuntimeError("record: the context is already recording; end that recording first.")
        self._wait()  # Do not record kernels launched earlier.
        self._set_traces(self._memory.trace_area(header, num_words))

    def end_traces(self) -> dict[int, np.ndarray]:
        """Stop recording and return the recorded words by device number; waits for running kernels."""
        area = self._traces
        if area is None:
            raise RuntimeError("record: the context was finalized during the recording; finalize it afterwards.")
        self._wait()
        self._set_traces(None)
        self._wait()  # Wait for kernels launched by other threads in the meantime.
        return {number: area.read(number) for number, _ in self._own}

    def _set_traces(self, area: TraceArea | None) -> None:
        self._traces = area
        for generation in self.generations:
            self._register(generation)

    def _begin(self) -> None:
        """Allocate the heap if its size is given, and what programs of earlier contexts need."""
        data, buffers = self._ids_of_kind(_DATA), self._ids_of_kind(_BUFFERS)
        if self._limit is None:
            if data:
                self._data.append(self._allocate_data("init", self._max_bytes(data), data))
            if buffers:
                self._buffers.append(self._allocate_buffers("init", self._max_bytes(buffers), buffers))
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
        whole = Generation(data, addresses, 0, 0, room, reserved=round_up(self._max_bytes(data), _PAGE))
        self._data.append(self._register(whole))
        buffers = [i for i in buffers if self._buffers_start(self._sizes[i]) is not None]
        if buffers and (start := self._buffers_start(size := self._max_bytes(buffers))) is not None:
            self._split(start, size, buffers)

    def _reserve_data(self, function: str, num_bytes: int) -> None:
        if self._limit is None:
            size = max(num_bytes, next_generation_bytes(self._data))
            self._data.append(self._allocate_data(function, size, [self._next_id(_DATA)]))
            return
        if num_bytes > self.data.num_bytes:
            raise self._too_small(function, round_up(self.layout.data + num_bytes, _PAGE))
        self.data.reserved = round_up(num_bytes, _PAGE)

    def _reserve_buffers(self, function: str, num_bytes: int) -> None:
        size = max(num_bytes, round_up(next_generation_bytes(self._buffers), _BUFFER_UNIT))
        ids = [self._next_id(_BUFFERS)]
        if self._limit is None:
            self._buffers.append(self._allocate_buffers(function, size, ids))
            return
        for buffer_bytes in (size, num_bytes):  # Prefer to fit without headroom over failing.
            if (start := self._buffers_start(buffer_bytes)) is not None:
                self._split(start, buffer_bytes, ids)
                return
        needed = round_up(self.layout.bytes_with_buffers(num_bytes), _PAGE)
        raise self._too_small(function, self._data_end() + needed)

    def _too_small(self, function: str, other_bytes: int) -> ValueError:
        """Return the error for a heap of a given size that needs `other_bytes` in addition to its current buffers."""
        needed = other_bytes + (self._limit or 0) // _PAGE * _PAGE - self._end
        return ValueError(
            f"{function}: the symmetric heap has heap_bytes={self._limit} per device, but this call needs {needed};"
            f" call finalize() and init(heap_bytes={needed}), or leave heap_bytes out to let it grow."
        )

    def _allocate_data(self, function: str, size: int, ids: Sequence[int]) -> Generation:
        total = allocation_bytes(self.layout.data + size)
        num_bytes, number = total - self.layout.data, self._num_allocations
        addresses = self._allocate(function, total)
        return self._register(Generation(ids, addresses, number, 0, num_bytes, reserved=num_bytes))

    def _allocate_buffers(self, function: str, size: int, ids: Sequence[int]) -> Generation:
        total = allocation_bytes(self.layout.bytes_with_buffers(size))
        num_bytes, number = self.layout.most_buffer_bytes(total), self._num_allocations
        addresses = self._allocate(function, total)
        return self._register(Generation(ids, addresses, number, 0, num_bytes, num_bytes, num_bytes))

    def _data_end(self) -> int:
        """Return the end of data that programs use now or may use later: buffers may begin there."""
        return round_up(self.layout.data + max(self.data.reserved, self._used_bytes(self.data.ids)), _PAGE)

    def _buffers_start(self, buffer_bytes: int) -> int | None:
        """Return where a new generation of buffers would begin in a heap of a given size, or None without room."""
        start = (self._end - self.layout.bytes_with_buffers(buffer_bytes)) // _PAGE * _PAGE
        return start if start >= self._data_end() else None

    def _split(self, start: int, buffer_bytes: int, ids: Sequence[int]) -> None:
        """Turn the unused end of the data area into buffers; no program has used it, so it is still zero."""
        num_bytes = self.data.num_bytes
        self.data.num_bytes = start - self.layout.data
        try:
            self._register(self.data)  # Fails if a deserialized program has just begun to use this part.
        except Exception:
            self.data.num_bytes = num_bytes
            raise
        self._end = start
        addresses = {number: [heap + start for heap in heaps] for number, heaps in self.data.addresses.items()}
        buffers = Generation(ids, addresses, 0, start, buffer_bytes, buffer_bytes, buffer_bytes)
        self._buffers.append(self._register(buffers))

    def _allocate(self, function: str, num_bytes: int) -> dict[int, list[int]]:
        addresses = self._memory.allocate(num_bytes, function)
        self._num_allocations += 1
        self.num_bytes += num_bytes
        return addresses

    def _register(self, generation: Generation) -> Generation:
        """Register the tables and status records of a generation, so that programs find them."""
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

    def _max_bytes(self, ids: Sequence[int]) -> int:
        """Return the most bytes that a program of an earlier context may use under these ids."""
        return max(self._sizes.get(i, 0) for i in ids)

    def _ids_of_kind(self, first: int) -> list[int]:
        """Return the existing ids of one kind, sorted; `first` is the first id of the kind."""
        return sorted(i for i in self._sizes if i % _STEP == first % _STEP)

    def _next_id(self, first: int) -> int:
        """Return the next id of a kind, which no earlier context has used."""
        return max(self._ids_of_kind(first), default=first - _STEP) + _STEP

    def _used_bytes(self, ids: Sequence[int]) -> int:
        """Return the most bytes that any program, including deserialized ones, has used under these ids."""
        return max(ffi.used_bytes(i, device) for i in ids for _, device in self._own)

    def _wait(self) -> None:
        """Wait for the devices of this process; other processes wait for their own."""
        wait_for_devices([device for _, device in self._own])

    def failure(self) -> str | None:
        """Return the message of the first failure that a kernel recorded, or None."""
        records = (status.read() for status in self._memory.statuses())
        failures = [r for r in records if r.state not in (ffi.State.OK, ffi.State.WRITING)]
        # A wrong mesh or another launch causes timeouts on other devices: report the cause.
        first = min(failures, key=lambda record: record.state == ffi.State.TIMEOUT, default=None)
        return None if first is None else ffi.format_status(first)

    def close(self) -> str | None:
        """Wait for the devices and free everything; return the message of a failure, if there was one.

        Programs launched earlier end normally. Programs that other threads launch from now on find no table, or already
        have it and are waited for: only then are the device tables set to null and the memory freed.
        """
        ids = list(self._sizes)  # Includes a generation that was registered on some devices only.
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
