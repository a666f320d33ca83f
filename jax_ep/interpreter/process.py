"""A worker of the interpreter pool as the parent process sees it."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_WORKER = Path(__file__).with_name("worker.py")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_ANSWER_S = 60


@dataclasses.dataclass(frozen=True)
class Launch:
    """What one worker is asked to run; parameters that `constants` does not name are operands, then results."""

    path: str
    function: str
    operands: tuple[tuple[str, bytes], ...]  # element type as Triton names it, contents
    results: tuple[tuple[str, int], ...]  # element type, bytes
    num_programs: int
    constants: dict[str, Any]
    # Of each operand, then of each result: shape, strides and block shape, in elements, where the kernel takes a tensor
    # descriptor; else None.
    descriptors: tuple[tuple[tuple[int, ...], ...] | None, ...] = ()


class Worker:
    """A worker process and the connection to it; one request at a time.

    Args:
      index: its number in messages.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER), str(theirs.fileno())],
                env={**os.environ, **_ONE_THREAD, "TRITON_INTERPRET": "1"},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
        self._sending = threading.Lock()

    def map(self, name: str, descriptors: Sequence[int]) -> list[int]:
        """Addresses of the files in the worker."""
        try:
            with self._sending:
                self._connection.send(("map", name, len(descriptors)))
                for descriptor in descriptors:
                    reduction.send_handle(self._connection, descriptor, self.process.pid)
        except OSError as error:
            raise RuntimeError(self._death()) from error
        return self._receive(_ANSWER_S)

    def run(self, launch: Launch, serial: int, timeout_s: float) -> list[bytes]:
        """Results of a launch."""
        try:
            with self._sending:
                self._connection.send(("run", {**dataclasses.asdict(launch), "serial": serial}))
        except OSError as error:
            raise RuntimeError(self._death()) from error
        return self._receive(timeout_s)

    def abort(self, serial: int) -> None:
        """Ends the polls of launches up to `serial`."""
        try:
            with self._sending:
                self._connection.send(("abort", serial))
        except OSError:
            pass  # it is dead, and nothing of it polls

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()  # upon which the worker ends itself
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _receive(self, timeout_s: float) -> Any:
        try:
            if not self._connection.poll(timeout_s):
                self.process.kill()
                raise RuntimeError(f"worker {self.index} was killed: it had not answered for {timeout_s:g} s")
            status, value = self._connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(self._death()) from error
        if status == "error":
            raise RuntimeError(f"worker {self.index}:\n{value}")
        return value

    def _death(self) -> str:
        try:
            code = self.process.wait(5)
        except subprocess.TimeoutExpired:
            return f"worker {self.index} (process {self.process.pid}) closed its connection"
        return f"worker {self.index} (process {self.process.pid}) died with exit code {code}"
