"""One device of the interpreter pool: a process that runs kernels in Triton's interpreter.

Run as a script, `python -P worker.py FD`, by process.py. It imports neither jax nor the package, so that a
worker starts fast, and Triton only when its first kernel arrives. Messages, pickled, over the Unix socket FD:

  ("map", name, n), then n file descriptors   -> ("ok", n addresses): maps shared memory, replacing what `name` had
  ("run", fields of a Launch)                 -> ("ok", list of bytes) or ("error", traceback)
  ("abort", serial)                           no reply: polls of launches up to `serial` stop with an error
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.util
import mmap
import os
import queue
import sys
import threading
import traceback
import types
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

ALIGNMENT = 128
POISON = 0xFF


class Memory:
    """The shared memory of all devices as this process sees it."""

    def __init__(self) -> None:
        self._maps: dict[str, list[mmap.mmap]] = {}

    def map(self, name: str, descriptors: list[int]) -> list[int]:
        """Maps whole files and closes the descriptors; an address per file."""
        maps = []
        for descriptor in descriptors:
            maps.append(mmap.mmap(descriptor, os.fstat(descriptor).st_size))
            os.close(descriptor)
        self._maps[name] = maps
        return [ctypes.addressof(ctypes.c_char.from_buffer(block)) for block in maps]


class Buffer:
    """An aligned piece of memory that the interpreter takes for a tensor: an address and an element type."""

    def __init__(self, num_bytes: int, element_type: str) -> None:
        storage = np.full(num_bytes + ALIGNMENT, POISON, np.uint8)
        start = -storage.ctypes.data % ALIGNMENT
        self.bytes = storage[start : start + num_bytes]
        self.dtype = element_type

    def data_ptr(self) -> int:
        """What Triton asks a tensor for."""
        return self.bytes.ctypes.data


def describe(buffer: Buffer, shape: tuple[int, ...], strides: tuple[int, ...], block_shape: tuple[int, ...]) -> Any:
    """What Triton takes for a tensor descriptor made on the host; the kernel's first use of it checks the alignment."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    descriptor = TensorDescriptor.__new__(TensorDescriptor)  # its own checks want the dtypes of torch
    fields = {"base": buffer, "shape": list(shape), "strides": list(strides), "block_shape": list(block_shape)}
    vars(descriptor).update(fields, padding="zero", round_f32_to_tf32=False)
    return descriptor


class Requests:
    """Reads the socket in a thread of its own: the parent's end closes the process, and aborts overtake a kernel."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.aborted = -1
        threading.Thread(target=self._read, daemon=True).start()

    def next(self) -> tuple[Any, ...]:
        """The next request, in the order in which they were sent."""
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
            os._exit(0)  # even from within a kernel that waits for ever


class Runner:
    """Runs launches one after another."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._serial = -1
        self._patched = False

    def run(self, launch: dict[str, Any]) -> list[bytes]:
        """The bytes of the results of one launch."""
        self._patch()
        self._serial = launch["serial"]
        kernel = getattr(load(Path(launch["path"])), launch["function"])
        buffers = [Buffer(len(data), element_type) for element_type, data in launch["operands"]]
        for buffer, (_, data) in zip(buffers, launch["operands"], strict=True):
            buffer.bytes[:] = np.frombuffer(data, np.uint8)
        results = [Buffer(num_bytes, element_type) for element_type, num_bytes in launch["results"]]
        buffers += results
        descriptors = launch["descriptors"] or [None] * len(buffers)
        pairs = zip(buffers, descriptors, strict=True)
        arguments = [buffer if blocks is None else describe(buffer, *blocks) for buffer, blocks in pairs]
        constants = launch["constants"]
        names = [name for name in kernel.arg_names if name not in constants]
        with np.errstate(all="ignore"):  # as on a GPU
            kernel[(launch["num_programs"],)](**dict(zip(names, arguments, strict=True)), **constants)
        return [result.bytes.tobytes() for result in results]

    def _patch(self) -> None:
        if not self._patched:
            patches = load(Path(__file__).with_name("patches.py"))
            patches.apply(self._check_aborted)
            load(Path(__file__).with_name("remembered.py")).apply()
            self._patched = True

    def _check_aborted(self) -> None:
        if self._requests.aborted >= self._serial:
            raise RuntimeError("stopped: the launch failed on another worker")


def load(path: Path) -> types.ModuleType:
    """The module in the file `path`; its folder becomes a package, so that relative imports between kernels work."""
    folder = path.resolve().parent
    package = f"kernels_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    if package not in sys.modules:
        # Without running the folder's __init__.py, which may import jax.
        module = types.ModuleType(package)
        module.__path__ = [str(folder)]
        sys.modules[package] = module
    return importlib.import_module(f"{package}.{path.stem}")


def main(descriptor: int) -> None:
    """Serves until the parent closes its end."""
    connection = Connection(descriptor)
    requests = Requests(connection)
    memory, runner = Memory(), Runner(requests)
    while True:
        kind, *arguments = requests.next()
        try:
            reply = memory.map(*arguments) if kind == "map" else runner.run(*arguments)
            connection.send(("ok", reply))
        except Exception:  # whatever a kernel raises belongs to the parent
            connection.send(("error", traceback.format_exc()))


if __name__ == "__main__":
    main(int(sys.argv[1]))
