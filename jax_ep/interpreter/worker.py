"""One device of the interpreter pool: a process that runs kernels in Triton's interpreter.

process.py runs it as a script, `python -P worker.py FD INDEX`. It imports neither jax nor the package, so that a worker
starts fast, and Triton only for its first kernel. Pickled messages on the Unix socket FD:

  ("map", name, n), then n file descriptors   -> ("ok", n addresses): maps shared memory, replacing that of `name`
  ("run", fields of a Launch)                 -> ("ok", list of bytes) or ("error", text)
  ("abort", serial)                           no reply: polls of launches up to `serial` stop with an error

A SIGINT, which a terminal sends to the parent and its workers, ends a worker that runs a kernel: the parent may be
unable to handle signals until the kernel ends. Idle workers ignore it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import mmap
import os
import queue
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

ALIGNMENT = 128
_HERE = Path(__file__).resolve().parent
_PACKAGE = _HERE.parent


class Memory:
    """The shared memory of all devices as this process sees it."""

    def __init__(self) -> None:
        self._maps: dict[str, list[mmap.mmap]] = {}

    def words(self, name: str, count: int) -> list[np.ndarray]:
        """Return the first int64 words of each file of `name`."""
        return [np.frombuffer(block, np.int64, count) for block in self._maps[name]]

    def map(self, name: str, descriptors: list[int]) -> list[int]:
        """Map whole files and close the descriptors; return an address per file."""
        maps = []
        for descriptor in descriptors:
            maps.append(mmap.mmap(descriptor, os.fstat(descriptor).st_size))
            os.close(descriptor)
        self._maps[name] = maps
        return [ctypes.addressof(ctypes.c_char.from_buffer(block)) for block in maps]


class Buffer:
    """An aligned memory block with guard bytes that the interpreter accepts as a tensor: address and element type."""

    def __init__(self, num_bytes: int, element_type: str, poison: int) -> None:
        storage = np.full(num_bytes + 3 * ALIGNMENT, poison, np.uint8)
        start = ALIGNMENT - storage.ctypes.data % ALIGNMENT
        self._guards = storage[:start], storage[start + num_bytes :]
        self._poison = poison
        self.bytes = storage[start : start + num_bytes]
        self.dtype = element_type

    def is_intact(self) -> bool:
        """Return whether the guard bytes on both sides are unchanged."""
        return all((guard == self._poison).all() for guard in self._guards)

    def data_ptr(self) -> int:
        """Return the address, as Triton expects of a tensor."""
        return self.bytes.ctypes.data


def executor(
    kernel: Any, num_programs: int, waits: tuple[Callable[..., Any], Callable[[], None]]
) -> tuple[Callable[..., None], Callable[..., Any]]:
    """Return functions that run a kernel and that make an argument of a buffer and the blocks of its descriptor.

    `waits` are the first functions that patches.py takes.
    """
    if hasattr(kernel, "is_gluon"):  # Triton's interpreter replaces its own functions, but not those of Gluon.
        emulator = load(_HERE / "gluon.py")
        emulator.wait_by(*waits)
        return functools.partial(emulator.run, kernel, num_programs), emulator.argument
    return kernel[(num_programs,)], describe


def describe(buffer: Buffer, blocks: tuple[tuple[int, ...], ...] | None) -> Any:
    """Create a host-side tensor descriptor for Triton; the kernel's first use of it checks the alignment."""
    if blocks is None:
        return buffer
    from triton.tools.tensor_descriptor import TensorDescriptor

    shape, strides, block_shape = map(list, blocks)
    descriptor = TensorDescriptor.__new__(TensorDescriptor)  # Its constructor needs torch dtypes.
    sizes = {"shape": shape, "strides": strides, "block_shape": block_shape}
    vars(descriptor).update(base=buffer, **sizes, padding="zero", round_f32_to_tf32=False)
    return descriptor


def fields(name: str, kind: Any) -> list[str]:
    """Return the names of the arrays of a parameter."""
    return [name] if kind is None else [f"{name}.{field}" for field in kind._fields]


class Folders(importlib.abc.MetaPathFinder):
    """Import finder that loads folders of the package without their `__init__.py`, which may import jax."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return a package spec without an `__init__.py` for a folder of this package."""
        folder = _PACKAGE.parent.joinpath(*name.split("."))
        if not folder.is_relative_to(_PACKAGE) or not folder.is_dir():
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec


class Requests:
    """Reads the socket in a thread: a closed connection ends the process, and aborts reach a running kernel."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.aborted = -1
        threading.Thread(target=self._read, daemon=True).start()

    def next(self) -> tuple[Any, ...]:
        """Return the next request, in the order of sending."""
        return self._queue.get()

    def _read(self) -> None:
        try:
            while True:
                request = self._connection.recv()
                if request[0] == "abort":
                    self.aborted = max(self.aborted, request[1])
                    continue
                if request[0] == "map":
                    request = (*request[:2], [reduction.recv_handle(self._connection) for _ in range(request[2])])
                self._queue.put(request)
        except (EOFError, OSError):
            os._exit(0)  # Also during a kernel that waits forever.


class Runner:
    """Runs launches one after another, until `requests` has an abort; `memory` holds all workers' activity words."""

    def __init__(self, requests: Requests, memory: Memory, index: int) -> None:
        self._requests, self._memory, self._index = requests, memory, index
        self._serial = -1
        # Not if this process ignores it, as background jobs of shells do.
        self._ends_by_sigint = signal.signal(signal.SIGINT, signal.SIG_IGN) is not signal.SIG_IGN
        self._activity: Any = None
        self._words: list[np.ndarray] = []

    def run(self, launch: dict[str, Any]) -> list[bytes]:
        self._prepare()
        self._serial = launch["serial"]
        own = self._words[self._index]
        self._activity.begin(own)
        if self._ends_by_sigint:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            return self._run(launch)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._activity.end(own)

    def _run(self, launch: dict[str, Any]) -> list[bytes]:
        kernel = getattr(load(Path(launch["path"])), launch["function"])
        structs = load(_PACKAGE / "core" / "structs.py")
        if launch["code"] not in (None, structs.code_digest(kernel.fn)):
            raise RuntimeError(
                f"{launch['function']} of {launch['path']} has another code here than in the parent process, which"
                " loaded the file at another time; call finalize, then init"
            )
        poison = launch["poison"]
        buffers = [Buffer(len(data), element_type, poison) for element_type, data in launch["operands"]]
        for buffer, (_, data) in zip(buffers, launch["operands"], strict=True):
            buffer.bytes[:] = np.frombuffer(data, np.uint8)
        results = [Buffer(num_bytes, element_type, poison) for element_type, num_bytes in launch["results"]]
        for operand, result in launch["written"]:
            results[result].bytes[:] = buffers[operand].bytes
            buffers[operand] = results[result]
        buffers += results
        descriptors = launch["descriptors"] or [None] * len(buffers)
        constants = launch["constants"]
        run, describe = executor(kernel, launch["num_programs"], (self._begin_wait, self._check_aborted))
        arguments = [describe(buffer, blocks) for buffer, blocks in zip(buffers, descriptors, strict=True)]
        names = [name for name in kernel.arg_names if name not in constants]
        parameters = launch["parameters"] or [None] * len(names)
        arguments = structs.regrouped(arguments, parameters)
        with np.errstate(all="ignore"):  # As on a GPU.
            run(**dict(zip(names, arguments, strict=True)), **constants)
        names = [name for parameter in zip(names, parameters, strict=True) for name in fields(*parameter)]
        if broken := [name for name, buffer in zip(names, buffers, strict=True) if not buffer.is_intact()]:
            raise RuntimeError(f"{launch['function']} wrote outside of {', '.join(broken)}")
        return [result.bytes.tobytes() for result in results]

    def _prepare(self) -> None:
        """Before the first launch, load Triton and the activity words of all workers."""
        if self._activity is None:
            run_asm = load(_HERE / "inline_asm.py").run
            load(_HERE / "patches.py").apply(self._begin_wait, self._check_aborted, run_asm)
            load(_HERE / "cached.py").apply()
            self._activity = load(_HERE / "activity.py")
            self._words = self._memory.words("activity", self._activity.NUM_WORDS)

    def _begin_wait(self, timeout_ns: int | None) -> Any:
        return self._activity.Wait(self._words, self._index, timeout_ns)

    def _check_aborted(self) -> None:
        if self._requests.aborted >= self._serial:
            raise RuntimeError("stopped: the launch failed on another worker")


def load(path: Path) -> types.ModuleType:
    """Import the module of a file; outside of the package, its folder becomes a package for relative imports."""
    folder = path.resolve().parent
    if folder.is_relative_to(_PACKAGE):
        return importlib.import_module(".".join((*folder.relative_to(_PACKAGE.parent).parts, path.stem)))
    package = f"kernels_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    if package not in sys.modules:
        module = types.ModuleType(package)
        module.__path__ = [str(folder)]
        sys.modules[package] = module
    try:
        return importlib.import_module(f"{package}.{path.stem}")
    except Exception as error:
        raise ImportError(
            f"cannot import {path}, which has the kernel ({type(error).__name__}: {error}), expected a module that does"
            " not run the program; move the kernels to another file"
        ) from error


def main(descriptor: int, index: int) -> None:
    """Handle requests until the parent closes its end."""
    connection = Connection(descriptor)
    requests, memory = Requests(connection), Memory()
    runner = Runner(requests, memory, index)
    with contextlib.suppress(OSError):  # The parent has exited.
        os.setpgid(0, os.getpgid(os.getppid()))  # process.py starts it outside of the terminal's process group.
    while True:
        answer: tuple[str, Any]
        kind, *arguments = requests.next()
        try:
            answer = "ok", memory.map(*arguments) if kind == "map" else runner.run(*arguments)
        except Exception:  # Any error of a kernel is reported to the parent.
            answer = "error", traceback.format_exc()
        with contextlib.suppress(OSError):  # The parent has exited, and this process ends with its next request.
            connection.send(answer)


if __name__ == "__main__":
    sys.meta_path.insert(0, Folders())
    main(int(sys.argv[1]), int(sys.argv[2]))
