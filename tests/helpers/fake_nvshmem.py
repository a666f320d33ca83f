"""Fakes of nvshmem4py and cuda-python for machines without GPUs: they record calls, and allocate host memory."""

import ctypes
import importlib.machinery
import os
import sys
import types
from typing import Any

import numpy as np

PEER_STRIDE = 1 << 40  # Addresses of peers' memory are never read.
UNIQUE_ID = np.dtype([("version", np.int32), ("internal", np.uint8, (124,))])


class Fake:
    """The recorded calls, and injected failures.

    Attributes:
      calls: name and arguments of each, in order.
      unreachable: numbers of the processes whose memory has no address here.
      out_of_memory: whether allocations fail.
    """

    def __init__(self):
        self.calls: list[tuple[Any, ...]] = []
        self.unreachable: set[int] = set()
        self.out_of_memory = False
        self._memory: dict[int, Any] = {}
        self._rank = -1

    @property
    def names(self):
        return [name for name, *_ in self.calls]

    def bytes_at(self, address):
        return bytes(self._memory[address])

    def get_unique_id(self, empty=False):
        data = np.zeros(1, UNIQUE_ID)
        if not empty:
            data["internal"] = np.frombuffer(os.urandom(124), np.uint8)
        return types.SimpleNamespace(_data=data.view(np.recarray))

    def init(self, *, device, uid, rank, nranks, initializer_method):
        multicast = os.environ.get("NVSHMEM_DISABLE_NVLS")
        self.calls.append(("init", device.ordinal, rank, nranks, initializer_method, multicast, uid._data.tobytes()))
        self._rank = rank

    def finalize(self):
        self.calls.append(("finalize",))

    def malloc(self, num_bytes):
        self.calls.append(("malloc", num_bytes))
        if self.out_of_memory:
            return 0
        memory = (ctypes.c_uint8 * num_bytes).from_buffer(bytearray(b"\xff" * num_bytes))
        self._memory[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free(self, address):
        self.calls.append(("free", len(self._memory.pop(address))))

    def barrier_all(self):
        self.calls.append(("barrier_all",))

    def ptr(self, address, process):
        if process in self.unreachable:
            return 0
        return address + (process != self._rank) * (process + 1) * PEER_STRIDE

    def fill(self, address, value, num_bytes):
        self.calls.append(("fill", value, num_bytes))
        ctypes.memset(address, value, num_bytes)
        return (0,)

    def synchronize(self):
        self.calls.append(("synchronize",))
        return (0,)

    def device(self, ordinal):
        def set_current():
            self.calls.append(("set_current", ordinal))

        return types.SimpleNamespace(ordinal=ordinal, set_current=set_current)

    def modules(self):
        """Return the fake modules by name, for `sys.modules`."""
        core = {"get_unique_id": self.get_unique_id, "init": self.init, "finalize": self.finalize}
        bindings = {"malloc": self.malloc, "free": self.free, "ptr": self.ptr, "barrier_all": self.barrier_all}
        driver = {"cuMemsetD8": self.fill, "cuCtxSynchronize": self.synchronize}
        contents = {"nvshmem": {}, "nvshmem.core": core, "nvshmem.bindings": {}}
        contents |= {"nvshmem.bindings.nvshmem": bindings, "cuda": {}, "cuda.core": {"Device": self.device}}
        contents |= {"cuda.bindings": {}, "cuda.bindings.driver": driver}
        made = {name: types.ModuleType(name) for name in contents}
        for name, module in made.items():
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            module.__path__ = []
            vars(module).update(contents[name])
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(made[parent], child, module)
        return made


def install():
    """Install the fakes in this process."""
    fake = Fake()
    sys.modules.update(fake.modules())
    return fake
