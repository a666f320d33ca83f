"""The processes that stand for the GPUs of a CPU run: one worker per device, and memory that all of them map."""

from __future__ import annotations

import atexit
import collections
import dataclasses
import functools
import itertools
import math
import mmap
import os
import threading
import time
import weakref
from typing import Any

import numpy as np

from jax_ep.ffi.status import NUM_BYTES, StatusRecord
from jax_ep.interpreter import activity
from jax_ep.interpreter.process import Launch, Worker

_STATUS, _ACTIVITY, _FIRST_HEAP = range(3)  # what is mapped, in this order


class _Gang:
    """One launch on all workers of a group; it starts when the last of them has asked for it."""

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.joined: set[int] = set()
        self.started = False


class Pool:
    """Workers, their heaps and their status records.

    Worker i stands for device i of the process. Memory is anonymous POSIX shared memory: nothing of it
    stays behind, however the processes end.

    A failure of any launch is final: what runs is stopped, and later launches are refused, until `reset`.

    Args:
      num_workers: devices.
      heap_bytes: of the first heap of each device; 0: without one.
      timeout_s: how long a launch waits for devices of its group that have not come to it and have nothing else to do,
        and how long a worker may be stopped. A kernel may run as long as it likes.
    """

    def __init__(self, num_workers: int, heap_bytes: int = 0, *, timeout_s: float = 30) -> None:
        if num_workers < 1 or heap_bytes < 0:
            raise ValueError(f"num_workers={num_workers}, expected at least 1; heap_bytes={heap_bytes}, at least 0.")
        self.num_workers = num_workers
        self.timeout_s = timeout_s
        self._condition = threading.Condition()
        self._failure: str | None = None
        self._closed = False
        self._serials = itertools.count()
        self._groups: collections.defaultdict[Any, set[frozenset[int]]] = collections.defaultdict(set)
        self._num_active = 0
        # What is mapped stays mapped: status records, activity, then each allocation of heaps; by worker.
        self._maps: list[list[mmap.mmap]] = []
        self._addresses: list[list[list[int]]] = []
        self._traces: list[mmap.mmap] = []
        self._allocating = threading.Lock()
        self._activity: list[np.ndarray] = []
        self._forget_launches()
        self._workers = [Worker(index) for index in range(num_workers)]
        atexit.register(self.close)
        os.register_at_fork(after_in_child=functools.partial(_disown, weakref.ref(self)))
        self._map(mmap.PAGESIZE, "status")
        self._map(mmap.PAGESIZE, "activity")
        self._activity = [np.frombuffer(memory, np.int64) for memory in self._maps[_ACTIVITY]]
        for worker, words in zip(self._workers, self._activity, strict=True):
            words[activity.PID] = worker.process.pid
        if heap_bytes:
            self.allocate(heap_bytes)
        self._clear_status()

    def heap(self, worker: int, allocation: int = 0) -> np.ndarray:
        """The heap of a worker that came with an allocation, as bytes, here."""
        return np.frombuffer(self._maps[_FIRST_HEAP + allocation][worker], np.uint8)

    def status(self, worker: int) -> np.ndarray:
        """The status record of a worker, as int32, here."""
        return np.frombuffer(self._maps[_STATUS][worker], np.int32)[: NUM_BYTES // 4]

    def heap_addresses(self, worker: int, allocation: int = 0) -> list[int]:
        """Where `worker` sees the heap of each worker that came with an allocation."""
        return list(self._addresses[_FIRST_HEAP + allocation][worker])

    def status_addresses(self, worker: int) -> list[int]:
        """Where `worker` sees the status record of each worker."""
        return list(self._addresses[_STATUS][worker])

    def allocate(self, heap_bytes: int) -> list[list[int]]:
        """One more heap of each worker, zero filled; where each worker sees that of each.

        Launches may be under way. Whole pages come into being when they are first used.

        Raises:
          MemoryError: so much cannot be mapped.
          RuntimeError: a launch has failed.
        """
        with self._condition:
            self._check()
        # Not under the condition: a worker answers when it has run its kernel, which may wait for one that another
        # thread is about to launch.
        with self._allocating:
            return self._map(heap_bytes, f"heap{len(self._maps)}")

    def allocate_traces(self, header: np.ndarray, num_words: int) -> list[int]:
        """Memory of each worker for the traces of its kernels, in place of what it had; where it sees its own.

        Launches that use what it had must have ended.
        """
        with self._allocating:
            addresses = self._map(8 * num_words, "traces")
            self._traces = self._maps.pop()
            self._addresses.pop()
        for worker in range(self.num_workers):
            self.traces(worker)[: header.size] = header
        return [addresses[worker][worker] for worker in range(self.num_workers)]

    def traces(self, worker: int) -> np.ndarray:
        """The traces of a worker, int64, here."""
        return np.frombuffer(self._traces[worker], np.int64)

    def reset(self) -> None:
        """Forgets a failure and clears heaps and status records; waits until no launch is under way."""
        with self._condition:
            if self._closed:
                raise RuntimeError("reset: the interpreter pool is closed; make a new one.")
            dead = [worker.index for worker in self._workers if worker.process.poll() is not None]
            if dead:
                raise RuntimeError(f"reset: workers {dead} have died; close the pool and make a new one.")
            self._wait_until_idle()
            self._failure = None
            self._forget_launches()
            for worker, allocation in itertools.product(range(self.num_workers), range(len(self._maps) - _FIRST_HEAP)):
                self.heap(worker, allocation)[:] = 0
            self._clear_status()

    def close(self) -> str | None:
        """Ends the workers; calling it again does nothing.

        Returns:
          The failure after which launches were refused, or None.
        """
        with self._condition:
            failure = self._failure
            if self._closed:
                return failure
            self._closed = True
            self._fail("the interpreter pool is closed")
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.close()
        return failure

    def launch(self, launch: Launch, *, worker: int, group_size: int, site: object) -> list[bytes]:
        """Runs a kernel on one worker, at the same place in the order of launches as on the others of its group.

        Args:
          launch: what to run.
          worker: which device this is.
          group_size: how many workers launch together, each once.
          site: which call of the program this is; the same on all workers of the group. The n-th launch of a site on
            one of them belongs to the n-th on the others.

        Returns:
          The bytes of each result.
        """
        if worker >= self.num_workers or group_size > self.num_workers:
            raise RuntimeError(
                f"kernel {launch.function}: device {worker}, of a mesh of {group_size} devices, but the interpreter"
                f" pool has {self.num_workers} workers; it needs one per device."
            )
        with self._condition:
            self._num_active += 1
            try:
                gang = self._join(worker, group_size, site)
                self._wait_for_turn(gang, launch, worker, group_size, site)
            except BaseException:
                self._num_active -= 1
                self._fail(
                    f"kernel {launch.function}, worker {worker}: KeyboardInterrupt"
                )  # unless it has failed already
                raise
        try:
            return self._workers[worker].run(launch, gang.serial, self.timeout_s)
        except Exception as error:
            message = f"kernel {launch.function}, {error}"
            with self._condition:
                first = self._failure
                self._fail(message)
            # XLA may show this error and not that of the device whose launch failed first.
            raise RuntimeError(message if first is None else f"{message} First, {first}") from error
        except BaseException:  # a KeyboardInterrupt, where this is the main thread
            self._workers[worker].kill()
            with self._condition:
                self._fail(f"kernel {launch.function}, worker {worker}: KeyboardInterrupt")
            raise
        finally:
            with self._condition:
                self._num_active -= 1
                self._queues[worker].popleft()
                self._activity[worker][activity.LAUNCHES] -= 1
                self._left_s[worker] = time.monotonic()
                self._condition.notify_all()

    def _join(self, worker: int, group_size: int, site: object) -> _Gang:
        self._check()
        waiting = self._waiting[site, group_size]
        gang = next((gang for gang in waiting if worker not in gang.joined), None)
        if gang is None:
            gang = _Gang(next(self._serials))
            waiting.append(gang)
        gang.joined.add(worker)
        if len(gang.joined) == group_size:
            # All queues at once: any two launches are in the same order on all workers that they share.
            waiting.remove(gang)
            gang.started = True
            self._groups[site, group_size].add(frozenset(gang.joined))
            for member in gang.joined:
                self._queues[member].append(gang)
                words = self._activity[member]
                if words[activity.LAUNCHES] == 0:
                    words[activity.STATE] = activity.IDLE
                words[activity.LAUNCHES] += 1
            self._condition.notify_all()
        return gang

    def _wait_for_turn(self, gang: _Gang, launch: Launch, worker: int, group_size: int, site: object) -> None:
        came_s = time.monotonic()
        while not (gang.started or self._failure):
            left_s = self._idle_deadline(gang, came_s) - time.monotonic()
            if left_s <= 0:
                self._fail(f"kernel {launch.function}: {self._missing(gang, worker, group_size, site)}")
            self._condition.wait(min(left_s, threading.TIMEOUT_MAX))
        self._check()
        self._condition.wait_for(lambda: self._queues[worker][0] is gang or self._failure)
        self._check()

    def _idle_deadline(self, gang: _Gang, came_s: float) -> float:
        """Until when a launch waits for the rest of its group: one that is still at an earlier launch is on its way."""
        absent = [worker for worker in range(self.num_workers) if worker not in gang.joined]
        if any(self._queues[worker] for worker in absent):
            return math.inf
        return max([came_s, *(self._left_s[worker] for worker in absent)]) + self.timeout_s

    def _missing(self, gang: _Gang, worker: int, group_size: int, site: object) -> str:
        """Who has not come to a launch, as far as that can be told: which devices a group has shows when all come."""
        everyone = frozenset(range(self.num_workers))
        groups = [group for group in self._groups[site, group_size] if group >= gang.joined] or [everyone]
        absent = sorted(frozenset().union(*groups) - gang.joined)
        num_missing = group_size - len(gang.joined)
        who = f"device{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
        if num_missing < len(absent):
            who = f"{num_missing} of {who}"
        return (
            f"device {worker} waited {self.timeout_s:g} s for {who}: of {group_size} devices that launch it together,"
            f" only {', '.join(map(str, sorted(gang.joined)))} came"
        )

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"{self._failure}\n(Kernels are refused after a failure: call jax_ep.finalize() and jax_ep.init().)"
            )

    def _fail(self, message: str) -> None:
        if self._failure is None:
            self._failure = message
            last = next(self._serials)
            for worker in self._workers:
                worker.abort(last)
        self._condition.notify_all()

    def _wait_until_idle(self) -> None:
        """Every launch ends: waits have a bound, what waits in a worker that has died or stopped is ended."""
        self._condition.wait_for(lambda: self._num_active == 0)

    def _forget_launches(self) -> None:
        self._waiting: collections.defaultdict[Any, list[_Gang]] = collections.defaultdict(list)
        self._queues: list[collections.deque[_Gang]] = [collections.deque() for _ in range(self.num_workers)]
        self._left_s = [-math.inf] * self.num_workers
        for words in self._activity:
            words[activity.LAUNCHES] = 0

    def _map(self, num_bytes: int, name: str) -> list[list[int]]:
        """Memory of each worker, mapped by all workers and here; its addresses, by who sees it."""
        descriptors = [os.memfd_create(f"jax_ep_{name}") for _ in self._workers]
        try:
            for descriptor in descriptors:
                os.ftruncate(descriptor, num_bytes)
            maps = [mmap.mmap(descriptor, num_bytes) for descriptor in descriptors]
            addresses = [worker.map(name, descriptors, self.timeout_s) for worker in self._workers]
        except (OSError, OverflowError) as error:
            raise MemoryError(f"{num_bytes} bytes for each of {self.num_workers} workers: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._maps.append(maps)
        self._addresses.append(addresses)
        return addresses

    def _clear_status(self) -> None:
        for worker in range(self.num_workers):
            self.status(worker)[:] = dataclasses.astuple(StatusRecord())

    def _disown(self) -> None:
        self._condition = threading.Condition()  # a thread that the child does not have may hold the old one
        self._closed = True
        self._failure = "the interpreter pool belongs to the process that this one was forked from"
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.disown()


def _disown(pool: weakref.ref[Pool]) -> None:
    """In a forked child: lets go of the parent's workers, which end when nobody holds the other end of their sockets.

    And which the child must neither end nor use.
    """
    if (ours := pool()) is not None:
        ours._disown()
