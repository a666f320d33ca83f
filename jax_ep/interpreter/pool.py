"""A pool of worker processes that each simulate one GPU on the CPU, with memory that all of them map."""

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

from jax_ep.ffi.status import NUM_BYTES, State, StatusRecord, format_status
from jax_ep.interpreter import activity
from jax_ep.interpreter.process import Launch, Worker

_STATUS, _ACTIVITY, _FIRST_HEAP = range(3)  # Indices of the mappings.


class _GroupLaunch:
    """One launch on all workers of a group, which starts when the last of them has requested it."""

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.joined: set[int] = set()
        self.started = False


class Pool:
    """Workers, their heaps and their status records.

    Worker i simulates device i of the process. Memory is anonymous POSIX shared memory, which disappears however the
    processes end.

    A failure of any launch is final: running launches are stopped and later ones fail, until `reset`.

    Args:
      num_workers: number of devices.
      heap_bytes: size of each device's first heap; 0 allocates none.
      timeout_s: how long a launch waits for devices of its group that have not reached it and are idle, and how long a
        worker process may be stopped. A kernel may run for any time.
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
        # Mappings are permanent: status records, activity, then each allocation of heaps; indexed by worker.
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
        """Return a worker's heap of one allocation as bytes, mapped in this process."""
        return np.frombuffer(self._maps[_FIRST_HEAP + allocation][worker], np.uint8)

    def status(self, worker: int) -> np.ndarray:
        """Return a worker's status record as int32, mapped in this process."""
        return np.frombuffer(self._maps[_STATUS][worker], np.int32)[: NUM_BYTES // 4]

    def heap_addresses(self, worker: int, allocation: int = 0) -> list[int]:
        """Return the addresses, as `worker` sees them, of the heaps of all workers of one allocation."""
        return list(self._addresses[_FIRST_HEAP + allocation][worker])

    def status_addresses(self, worker: int) -> list[int]:
        """Return the addresses, as `worker` sees them, of the status records of all workers."""
        return list(self._addresses[_STATUS][worker])

    def allocate(self, heap_bytes: int) -> list[list[int]]:
        """Allocate another zeroed heap for each worker; return the addresses of all heaps as each worker sees them.

        Launches may be running. The operating system commits pages on first use.

        Raises:
          MemoryError: the memory cannot be mapped.
          RuntimeError: a launch has failed.
        """
        with self._condition:
            self._check()
        # Do not hold the condition here: a worker replies after its kernel, which may wait for a kernel that another
        # thread is about to launch.
        with self._allocating:
            return self._map(heap_bytes, f"heap{len(self._maps)}")

    def allocate_traces(self, header: np.ndarray, num_words: int) -> list[int]:
        """Allocate trace memory for each worker, replacing the previous one; return the address of each worker's area.

        Launches that use the previous memory must have ended.
        """
        with self._allocating:
            addresses = self._map(8 * num_words, "traces")
            self._traces = self._maps.pop()
            self._addresses.pop()
        for worker in range(self.num_workers):
            self.traces(worker)[: header.size] = header
        return [addresses[worker][worker] for worker in range(self.num_workers)]

    def traces(self, worker: int) -> np.ndarray:
        """Return a worker's traces as int64, mapped in this process."""
        return np.frombuffer(self._traces[worker], np.int64)

    def reset(self) -> None:
        """Clear a failure, heaps and status records; waits until no launch is running."""
        with self._condition:
            if self._closed:
                raise RuntimeError("reset: the interpreter pool is closed; make a new one.")
            dead = [worker.index for worker in self._workers if worker.process.poll() is not None]
            if dead:
                raise RuntimeError(f"reset: workers {dead} have died; close the pool and make a new one.")
            # Waits have timeouts, and launches on dead or stopped workers are ended.
            self._condition.wait_for(lambda: self._num_active == 0)
            self._failure = None
            self._forget_launches()
            for worker, allocation in itertools.product(range(self.num_workers), range(len(self._maps) - _FIRST_HEAP)):
                self.heap(worker, allocation)[:] = 0
            self._clear_status()

    def close(self) -> str | None:
        """End the workers. Idempotent.

        Returns:
          The failure after which launches were rejected, or None.
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
        """Run a kernel on one worker, in the same order of launches as on the other workers of its group.

        Args:
          launch: the kernel and its arguments.
          worker: index of the device.
          group_size: how many workers launch together, each once.
          site: identifies the call in the program, equally on all workers of the group. The n-th launches of a site on
            all workers belong together.

        Returns:
          The bytes of each result.
        """
        if worker >= self.num_workers or group_size > self.num_workers:
            raise RuntimeError(
                f"kernel {launch.function}: device {worker}, in a launch of {group_size} devices, but the interpreter"
                f" pool has {self.num_workers} workers; it needs one per device."
            )
        with self._condition:
            self._num_active += 1
            try:
                group_launch = self._join(worker, group_size, site)
                self._wait_for_turn(group_launch, launch, worker, group_size, site)
            except BaseException:
                self._num_active -= 1
                self._fail("Keeps an earlier failure.")  # unless it has failed already
                raise
        try:
            outputs = self._workers[worker].run(launch, group_launch.serial, self.timeout_s)
            if (record := StatusRecord(*self.status(worker))).state == State.WRONG_MESH:
                raise RuntimeError(format_status(record))  # On GPUs, the next launch fails.
            return outputs
        except Exception as error:
            message = f"kernel {launch.function}, {error}"
            with self._condition:
                first = self._failure
                self._fail(message)
            # XLA may report this error instead of that of the device whose launch failed first.
            raise RuntimeError(message if first is None else f"{message} First, {first}") from error
        except BaseException:  # A KeyboardInterrupt in the main thread.
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

    def _join(self, worker: int, group_size: int, site: object) -> _GroupLaunch:
        self._check()
        waiting = self._waiting[site, group_size]
        group_launch = next((group_launch for group_launch in waiting if worker not in group_launch.joined), None)
        if group_launch is None:
            group_launch = _GroupLaunch(next(self._serials))
            waiting.append(group_launch)
        group_launch.joined.add(worker)
        if len(group_launch.joined) == group_size:
            # Update all queues at once, so that any two launches have the same order on all workers that they share.
            waiting.remove(group_launch)
            group_launch.started = True
            self._groups[site, group_size].add(frozenset(group_launch.joined))
            for member in group_launch.joined:
                self._queues[member].append(group_launch)
                words = self._activity[member]
                if words[activity.LAUNCHES] == 0:
                    words[activity.STATE] = activity.IDLE
                words[activity.LAUNCHES] += 1
            self._condition.notify_all()
        return group_launch

    def _wait_for_turn(
        self, group_launch: _GroupLaunch, launch: Launch, worker: int, group_size: int, site: object
    ) -> None:
        arrived_s = time.monotonic()
        while not (group_launch.started or self._failure):
            left_s = self._idle_deadline(group_launch, arrived_s) - time.monotonic()
            if left_s <= 0:
                self._fail(f"kernel {launch.function}: {self._missing(group_launch, worker, group_size, site)}")
            self._condition.wait(min(left_s, threading.TIMEOUT_MAX))
        self._check()
        self._condition.wait_for(lambda: self._queues[worker][0] is group_launch or self._failure)
        self._check()

    def _idle_deadline(self, group_launch: _GroupLaunch, arrived_s: float) -> float:
        """Return a launch's deadline for its group: none while a missing worker still runs an earlier launch."""
        absent = [worker for worker in range(self.num_workers) if worker not in group_launch.joined]
        if any(self._queues[worker] for worker in absent):
            return math.inf
        return max([arrived_s, *(self._left_s[worker] for worker in absent)]) + self.timeout_s

    def _missing(self, group_launch: _GroupLaunch, worker: int, group_size: int, site: object) -> str:
        """Describe the devices that have not reached a launch, from the groups seen so far at its site."""
        everyone = frozenset(range(self.num_workers))
        groups = [group for group in self._groups[site, group_size] if group >= group_launch.joined] or [everyone]
        absent = sorted(frozenset().union(*groups) - group_launch.joined)
        num_missing = group_size - len(group_launch.joined)
        who = f"device{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
        if num_missing < len(absent):
            who = f"{num_missing} of {who}"
        return (
            f"device {worker} waited {self.timeout_s:g} s for {who}: of {group_size} devices that launch it together,"
            f" only {', '.join(map(str, sorted(group_launch.joined)))} arrived; run the same programs on all"
            " devices, or set NPROC=16 before Python starts if all threads of XLA, one per core, wait for launches"
        )

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"{self._failure}\n(Kernels cannot run after a failure: call jax_ep.finalize() and jax_ep.init().)"
            )

    def _fail(self, message: str) -> None:
        if self._failure is None:
            self._failure = message
            last = next(self._serials)
            for worker in self._workers:
                worker.abort(last)
        self._condition.notify_all()

    def _forget_launches(self) -> None:
        self._waiting: collections.defaultdict[Any, list[_GroupLaunch]] = collections.defaultdict(list)
        self._queues: list[collections.deque[_GroupLaunch]] = [collections.deque() for _ in range(self.num_workers)]
        self._left_s = [-math.inf] * self.num_workers
        for words in self._activity:
            words[activity.LAUNCHES] = 0

    def _map(self, num_bytes: int, name: str) -> list[list[int]]:
        """Map memory of each worker in all workers and here; return addresses by viewing worker."""
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
        self._condition = threading.Condition()  # A thread that does not exist in the child may hold the old one.
        self._closed = True
        self._failure = "the interpreter pool belongs to the process that this one was forked from"
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.disown()


def _disown(pool: weakref.ref[Pool]) -> None:
    """Detach a forked child from the parent's workers, which end when all copies of their sockets are closed."""
    if (ours := pool()) is not None:
        ours._disown()
