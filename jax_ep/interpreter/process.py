"""The parent's view of a worker process of the interpreter pool."""

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
    """One launch on a worker; parameters that `constants` does not name are operands, then results.

    Classes of constants and parameters must be from modules that a worker can load without JAX.
    """

    path: str
    function: str
    operands: tuple[tuple[str, bytes], ...]  # element type as Triton names it, contents
    results: tuple[tuple[str, int], ...]  # element type, bytes
    num_programs: int
    constants: dict[str, Any]
    # For each non-constant parameter its NamedTuple type, or None for a single operand or result.
    parameters: tuple[type | None, ...] = ()
    # For each operand, then each result: shape, strides and block shape in elements of its tensor descriptor, or None
    # for a pointer.
    descriptors: tuple[tuple[tuple[int, ...], ...] | None, ...] = ()
    written: tuple[tuple[int, int], ...] = ()  # operands that are written in place, and the results that they become
    poison: int = 0xFF  # Initial bytes of results.
    code: str | None = None  # `core.structs.code_digest` of the function; None: not checked


class Worker:
    """A worker process and its connection; handles one request at a time.

    Requests have no timeout, but a stopped process, for example in a debugger, is killed after a while.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        ours, theirs = socket.socketpair()
        # Bytecode of kernels must be that of this process, which may be `python -OO`.
        optimize = {"PYTHONOPTIMIZE": str(sys.flags.optimize or "")}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER), str(theirs.fileno()), str(index)],
                env={**os.environ, **_ONE_THREAD, **optimize, "TRITON_INTERPRET": "1"},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                process_group=0,  # Until it handles the terminal's signals itself.
            )
        self._connection = Connection(ours.detach())
        self._sending = threading.Lock()
        self._turn = threading.Lock()  # Held from the start of a request to its reply.

    def map(self, name: str, descriptors: Sequence[int], timeout_s: float) -> list[int]:
        """Map files of a kind, one per worker, after the worker's current request; return their addresses there.

        The process may be stopped for `timeout_s`.
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
        """Run a launch and return its results; the process may be stopped for `timeout_s`."""
        with self._turn:
            try:
                with self._sending:
                    self._connection.send(("run", {**vars(launch), "serial": serial}))
            except OSError as error:
                raise RuntimeError(self._death()) from error
            return self._receive(timeout_s)

    def abort(self, serial: int) -> None:
        """End the polls of launches up to `serial`."""
        try:
            with self._sending:
                self._connection.send(("abort", serial))
        except OSError:
            pass  # The process is dead and does not poll.

    def kill(self) -> None:
        """Kill the process; its reply is not needed."""
        self.process.kill()

    def disown(self) -> None:
        """Detach a forked child from its parent's worker: only the parent's socket may keep the worker alive."""
        self._connection.close()
        self.process.returncode = 0  # The destructor must not wait for the parent's child.

    def close(self) -> None:
        """End the process."""
        self._connection.close()  # The worker exits when its connection closes.
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
