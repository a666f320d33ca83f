"""The processes that stand for the GPUs of a CPU run: one worker per device, and memory that all of them map."""

from __future__ import annotations

import atexit
import collections
import dataclasses
import itertools
import mmap
import os
import threading
from typing import Any

import numpy as np

from jax_ep.ffi.status import NUM_BYTES, StatusRecord
from jax_ep.interpreter.process import Launch, Worker


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
      heap_bytes: of each device.
      gang_timeout_s: how long a launch waits until all devices of its group have come to it.
      launch_timeout_s: how long a kernel may run before its worker is killed.
    """

    def __init__(
        self, num_workers: int, heap_bytes: int, *, gang_timeout_s: float = 60, launch_timeout_s: float = 120
    ) -> None:
        if num_workers < 1 or heap_bytes < 1:
            raise ValueError(f"num_workers={num_workers}, heap_bytes={heap_bytes}; both must be at least 1.")
        self.num_workers = num_workers
        self.heap_bytes = 0
        self._gang_timeout_s, self._launch_timeout_s = gang_timeout_s, launch_timeout_s
        self._condition = threading.Condition()
        self._failure: str | None = None
        self._closed = False
        self._serials = itertools.count()
        self._forget_launches()
        self._num_active = 0
        self._maps: dict[str, list[mmap.mmap]] = {}
        self._addresses: dict[str, list[list[int]]] = {}
        self._workers = [Worker(index) for index in range(num_workers)]
        atexit.register(self.close)
        self._allocate("status", mmap.PAGESIZE)
        self.grow(heap_bytes)
        self._clear_status()

    def heap(self, worker: int) -> np.ndarray:
        """The heap of a worker, as bytes, here; `grow` detaches it."""
        return np.frombuffer(self._maps["heap"][worker], np.uint8)[: self.heap_bytes]

    def status(self, worker: int) -> np.ndarray:
        """The status record of a worker, as int32, here."""
        return np.frombuffer(self._maps["status"][worker], np.int32)[: NUM_BYTES // 4]

    def heap_addresses(self, worker: int) -> list[int]:
        """Where `worker` sees the heap of each worker; `grow` changes it."""
        return list(self._addresses["heap"][worker])

    def status_addresses(self, worker: int) -> list[int]:
        """Where `worker` sees the status record of each worker."""
        return list(self._addresses["status"][worker])

    def grow(self, heap_bytes: int) -> None:
        """Replaces all heaps by larger ones, zero filled, at other addresses; waits until no launch is under way."""
        if heap_bytes < self.heap_bytes:
            raise ValueError(f"grow: heap_bytes={heap_bytes}, but the heaps have {self.heap_bytes} bytes already.")
        with self._condition:
            self._check()
            self._wait_until_idle("grow")
            self._allocate("heap", heap_bytes)
            self.heap_bytes = heap_bytes

    def reset(self) -> None:
        """Forgets a failure and clears heaps and status records; waits until no launch is under way."""
        with self._condition:
            if self._closed:
                raise RuntimeError("reset: the interpreter pool is closed; make a new one.")
            dead = [worker.index for worker in self._workers if worker.process.poll() is not None]
            if dead:
                raise RuntimeError(f"reset: workers {dead} have died; close the pool and make a new one.")
            self._wait_until_idle("reset")
            self._failure = None
            self._forget_launches()
            for worker in range(self.num_workers):
                self.heap(worker)[:] = 0
            self._clear_status()

    def close(self) -> None:
        """Ends the workers; calling it again does nothing."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
            self._fail("the interpreter pool is closed")
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.close()

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
                self._wait_for_turn(gang, launch, worker, group_size)
            except BaseException:
                self._num_active -= 1
                self._condition.notify_all()
                raise
        try:
            return self._workers[worker].run(launch, gang.serial, self._launch_timeout_s)
        except Exception as error:
            message = f"kernel {launch.function}, {error}"
            with self._condition:
                self._fail(message)
            raise RuntimeError(message) from error
        finally:
            with self._condition:
                self._num_active -= 1
                self._queues[worker].popleft()
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
            for member in gang.joined:
                self._queues[member].append(gang)
            self._condition.notify_all()
        return gang

    def _wait_for_turn(self, gang: _Gang, launch: Launch, worker: int, group_size: int) -> None:
        ready = self._condition.wait_for(lambda: gang.started or self._failure, self._gang_timeout_s)
        if not ready:
            self._fail(
                f"kernel {launch.function}: worker {worker} waited {self._gang_timeout_s:g} s for its peers, but only"
                f" workers {sorted(gang.joined)} of {group_size} have come to this launch"
            )
        self._check()
        self._condition.wait_for(lambda: self._queues[worker][0] is gang or self._failure)
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"{self._failure}\n(The pool refuses launches until it is reset or made anew.)")

    def _fail(self, message: str) -> None:
        if self._failure is None:
            self._failure = message
            last = next(self._serials)
            for worker in self._workers:
                worker.abort(last)
        self._condition.notify_all()

    def _wait_until_idle(self, function: str) -> None:
        if not self._condition.wait_for(lambda: self._num_active == 0, self._launch_timeout_s):
            raise RuntimeError(f"{function}: launches are still under way after {self._launch_timeout_s:g} s.")

    def _forget_launches(self) -> None:
        self._waiting: collections.defaultdict[Any, list[_Gang]] = collections.defaultdict(list)
        self._queues: list[collections.deque[_Gang]] = [collections.deque() for _ in range(self.num_workers)]

    def _allocate(self, name: str, num_bytes: int) -> None:
        descriptors = [os.memfd_create(f"jax_ep_{name}") for _ in self._workers]
        try:
            for descriptor in descriptors:
                os.ftruncate(descriptor, num_bytes)
            self._maps[name] = [mmap.mmap(descriptor, num_bytes) for descriptor in descriptors]
            self._addresses[name] = [worker.map(name, descriptors) for worker in self._workers]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _clear_status(self) -> None:
        for worker in range(self.num_workers):
            self.status(worker)[:] = dataclasses.astuple(StatusRecord())
