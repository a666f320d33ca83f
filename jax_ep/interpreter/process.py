"""A worker of the interpreter pool as the parent process sees it."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jax_ep.interpreter.activity import is_stopped

_WORKER = Path(__file__).with_name("worker.py")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_CHECK_S = 0.1


@dataclasses.dataclass(frozen=True)
class Launch:
    """What one worker is asked to run; parameters that `constants` does not name are operands, then results.

    Classes that constants and parameters have are those of modules which a worker can load: without JAX.
    """

    path: str
    function: str
    operands: tuple[tuple[str, bytes], ...]  # element type as Triton names it, contents
    results: tuple[tuple[str, int], ...]  # element type, bytes
    num_programs: int
    constants: dict[str, Any]
    # Of each parameter that is no constant the NamedTuple that it is; None: a single operand or result.
    parameters: tuple[type | None, ...] = ()
    # Of each operand, then of each result: shape, strides and block shape, in elements, where the kernel takes a tensor
    # descriptor; else None.
    descriptors: tuple[tuple[tuple[int, ...], ...] | None, ...] = ()
    poison: int = 0xFF  # what the bytes of a result are before the kernel writes them


class Worker:
    """A worker process and the connection to it; one request at a time.

    It answers when its work is done, however long that takes; but one that is stopped, as by a debugger, is killed.

    Args:
      index: its number, that of its device.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER), str(theirs.fileno()), str(index)],
                env={**os.environ, **_ONE_THREAD, "TRITON_INTERPRET": "1"},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                process_group=0,  # until it handles the terminal's signals
            )
        self._connection = Connection(ours.detach())
        self._sending = threading.Lock()
        self._turn = threading.Lock()  # of a request, from the first word to the answer

    def map(self, name: str, descriptors: Sequence[int], timeout_s: float) -> list[int]:
        """Addresses of the files in the worker; waits until it runs nothing.

        Args:
          name: of the files, all of one kind.
          descriptors: of a file per worker.
          timeout_s: how long it may be stopped.
        """
        with self._turn:
            try:
                with self._sending:
                    self._connection.send(("map", name, len(descriptors)))
                    for descriptor in descriptors:
                        reduction.send_handle(self._connection, descriptor, self.process.pid)
            except OSError as error:
                raise RuntimeError(self._death()) from error
            return self._receive(timeout_s)

    def run(self, launch: Launch, serial: int, timeout_s: float) -> list[bytes]:
        """Results of a launch; the worker may be stopped for `timeout_s`."""
        with self._turn:
            try:
                with self._sending:
                    self._connection.send(("run", {**vars(launch), "serial": serial}))
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

    def kill(self) -> None:
        """Ends the process at once: nobody will take its answer."""
        self.process.kill()

    def disown(self) -> None:
        """In a forked child, whose parent's the worker is: only the parent's end may keep the worker alive."""
        self._connection.close()
        self.process.returncode = 0  # for the destructor: it is not this process that must wait for it

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()  # upon which the worker ends itself
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _receive(self, timeout_s: float) -> Any:
        stopped_since = None
        try:
            while not self._connection.poll(_CHECK_S):
                if not is_stopped(self.process.pid):
                    stopped_since = None
                elif stopped_since is None:
                    stopped_since = time.monotonic()
                elif time.monotonic() > stopped_since + timeout_s:
                    self.process.kill()
                    raise RuntimeError(
                        f"worker {self.index} (process {self.process.pid}) was killed: it had been stopped, as by"
                        f" SIGSTOP, for {timeout_s:g} s"
                    )
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
