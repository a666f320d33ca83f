"""Activity of the pool's workers, in shared memory, so that timeouts of waits count idle time only.

A kernel's timeout is meant for a peer that never arrives. Workers share few cores with each other and with other work,
and the first kernel of each loads Triton, so a peer may take long and still arrive. A wait therefore expires after the
timeout has passed without any worker running, and after every waiting worker has polled unsuccessfully.

This file imports neither jax nor the package: worker.py loads it by path.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

# Words of each worker, int64. The pool writes the first two, and the state of a worker without a launch.
PID, LAUNCHES, STATE, MOVES, LOOKS = range(5)
NUM_WORDS = 5
IDLE, RUNNING, WAITING, GAVE_UP = range(4)
_CHECK_NS = 5_000_000


def is_stopped(pid: int) -> bool:
    """Return whether a process has ended, or is stopped, for example by SIGSTOP or a debugger."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state in b"TtZX"


def begin(own: np.ndarray) -> None:
    """Mark the start of a launch."""
    own[STATE] = RUNNING
    own[MOVES] += 1


def end(own: np.ndarray) -> None:
    """Mark the end of a launch."""
    if own[STATE] != GAVE_UP:
        own[STATE] = IDLE
        own[MOVES] += 1


class Wait:
    """One wait of the kernel on worker `own`, which expires after `timeout_ns` of idle time; None: never.

    `words` are `[NUM_WORDS]` of each worker.
    """

    def __init__(self, words: Sequence[np.ndarray], own: int, timeout_ns: int | None) -> None:
        self._own = words[own]
        self._others = [other for index, other in enumerate(words) if index != own]
        self._timeout_ns = timeout_ns
        self._own[STATE] = WAITING
        self._idle_since = self._next_check = 0
        self._last_moves: list[int] = []
        self._last_looks: list[int] = []
        self._restart(time.monotonic_ns())

    def expired(self) -> bool:
        self._own[LOOKS] += 1
        now = time.monotonic_ns()
        if self._timeout_ns is None or now < self._next_check:
            return False
        self._next_check = now + min(_CHECK_NS, self._timeout_ns)
        if self._moves() != self._last_moves or any(_is_at_work(other) for other in self._others):
            self._restart(now)
            return False
        if now < self._idle_since + self._timeout_ns or not self._all_have_looked():
            return False
        self._own[STATE] = GAVE_UP
        return True

    def succeeded(self) -> None:
        self._own[STATE] = RUNNING
        self._own[MOVES] += 1

    def _restart(self, now: int) -> None:
        self._idle_since = self._next_check = now
        self._last_moves = self._moves()
        self._last_looks = [int(other[LOOKS]) for other in self._others]

    def _moves(self) -> list[int]:
        return [int(other[MOVES]) for other in self._others]

    def _all_have_looked(self) -> bool:
        """Return whether all waiting workers have polled twice since the idle time began, so once fully within it."""
        pairs = zip(self._others, self._last_looks, strict=True)
        return all(
            other[LOOKS] >= looks + 2 or other[STATE] != WAITING or is_stopped(int(other[PID]))
            for other, looks in pairs
            if other[LAUNCHES] > 0
        )


def _is_at_work(words: np.ndarray) -> bool:
    if words[LAUNCHES] == 0 or words[STATE] == WAITING:
        return False
    # A worker that gave up sends nothing anymore, so others must not wait for it.
    if words[STATE] == GAVE_UP and words[LAUNCHES] == 1:
        return False
    return not is_stopped(int(words[PID]))
