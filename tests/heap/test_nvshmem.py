"""Several processes with one GPU each, on a fake NVSHMEM: joint allocation, and processes that do not take part."""

import dataclasses
import importlib.util
import logging
import os
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fake_nvshmem
from jax_ep import context, ffi
from jax_ep.core.facts import LowLatencyFacts
from jax_ep.heap import nvshmem, peer_access, rendezvous, transports
from jax_ep.heap.nvshmem import NvshmemMemory
from jax_ep.heap.symmetric import SymmetricHeap
from jax_ep.megakernels import requirements
from jax_ep.ops import registry
from jax_ep.tools import doctor
from jax_ep.types import Layout, Options
from run_processes import run_pair


@dataclasses.dataclass(frozen=True, eq=False)
class Other:
    """A GPU of another process, in the NVLink domain `slice_index`."""

    process_index: int
    slice_index: int = 0
    platform: str = "gpu"


PEER = Other(1)


class Store:
    """The key-value store as process 0 sees it; the others, by default one, publish the same text unless overridden."""

    def __init__(self):
        self.values: dict[str, str] = {}
        self.others = [1]
        self.peer_comes = True
        self.peer_says: dict[str, str] = {}  # By a part of the text of process 0.

    def key_value_set(self, key, value):
        self.values[key] = value
        if self.peer_comes:
            head, _, own = value.partition("\n")
            theirs = next((text for part, text in self.peer_says.items() if part in head), None)
            for other in self.others:
                text = own if theirs is None else theirs
                self.values[key.removesuffix("0") + str(other)] = f"{head}\n{text}"

    def wait_at_barrier(self, name, timeout_in_ms):
        if not self.peer_comes:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out.")

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.values.items() if key.startswith(folder)]

    def key_value_delete(self, key):
        self.values.pop(key, None)


@pytest.fixture
def store(monkeypatch):
    context.finalize()  # Heaps of tests use the ids of the context.
    store = Store()
    own = jax.local_devices()[0]
    monkeypatch.setattr(rendezvous, "_client", lambda function: store)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "devices", lambda: [own, PEER])
    monkeypatch.setattr(jax, "local_devices", lambda: [own])
    return store


@pytest.fixture
def fake(monkeypatch, store):
    fake = fake_nvshmem.Fake()
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(nvshmem, "_left_running", False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ.pop("NVSHMEM_DISABLE_NVLS", None)
    return fake


@pytest.fixture
def memory(fake):
    memory = NvshmemMemory(1.0, "settings")
    yield memory
    memory.close()


GROWTH = ["set_current", "malloc", "fill", "synchronize"]
END = ["set_current", "finalize"]


def frees(count):
    """Return the calls at the end of a context with `count` heaps."""
    return ["set_current", *["free"] * count, *END]


def test_nvshmem_lifecycle(fake):
    """Every call uses the right device; memory is zeroed before use, and freed in allocation order."""
    memory = NvshmemMemory(1.0, "settings")
    assert fake.names == ["set_current", "init"]
    (_, ordinal, rank, count, method, multicast, unique_id) = fake.calls[1]
    assert (ordinal, rank, count, method, multicast) == (jax.local_devices()[0].local_hardware_id, 0, 2, "uid", "1")
    assert any(unique_id)
    fake.calls.clear()
    found = [memory.allocate(100, "dispatch"), memory.allocate(200, "combine")]
    assert fake.names == [*GROWTH, *GROWTH]
    for addresses, size in zip(found, (100, 200), strict=True):  # The first one stays valid.
        ((number, (own, peer)),) = addresses.items()
        assert number == 0
        assert fake.bytes_at(own) == bytes(size)
        assert peer == own + 2 * fake_nvshmem.PEER_STRIDE
    fake.calls.clear()
    memory.close()
    memory.close()
    assert fake.names == frees(2)
    assert [size for name, *size in fake.calls if name == "free"] == [[100], [200]]


def test_nvshmem_heap_own_device(fake):
    """The table of this process's device has the addresses of all devices; the peer registers its own."""
    memory = NvshmemMemory(1.0, "settings")
    heap = SymmetricHeap(memory, None, 5.0)
    heap.reserve("dispatch", 1000, 2000)
    status = memory.statuses()[0]
    for generation, area in ((heap.data, [0, 0]), (heap.buffers, [heap.layout.buffers, heap.buffers.buffer_bytes])):
        i = generation.id
        table = np.asarray(jax.jit(lambda i=i: ffi.pointer_table(i, heap.num_table_entries))())
        assert table.tolist() == [*generation.addresses[0], status.device_address, 5_000_000_000, 0, *area, 0]
    assert heap.failure() is None
    status.write(ffi.StatusRecord(state=ffi.State.TIMEOUT, rank=0, peer=1))
    assert "1" in (heap.failure() or "")
    heap.close()
    assert fake.names[-1] == "finalize"


def test_nvshmem_allocation_fails(fake):
    """Programs traced before keep working, and a later allocation is not affected by the failure."""
    memory = NvshmemMemory(1.0, "settings")
    heap = SymmetricHeap(memory, None, 5.0)
    heap.reserve("dispatch", 1000)
    first = heap.data
    program = jax.jit(lambda: ffi.pointer_table(first.id, heap.num_table_entries))
    jax.block_until_ready(program())
    fake.out_of_memory = True
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"combine: allocating.* process 0: MemoryError"):
        heap.reserve("combine", 1 << 25)
    assert np.asarray(program())[0] == first.addresses[0][0]
    fake.out_of_memory = False
    fake.calls.clear()
    heap.reserve("combine", 1 << 25)
    assert (first.id, heap.data.id) == (1, 3)
    assert np.asarray(program())[0] == first.addresses[0][0] != heap.data.addresses[0][0]
    heap.close()
    assert fake.names == [*GROWTH, *frees(2)]


def test_nvshmem_allocation_fails_in_one_process(memory, store, fake):
    """Freeing is a barrier of all processes, so the one without memory joins a barrier instead."""
    store.peer_says["allocating"] = "failed: MemoryError: full"
    with pytest.raises(jax.errors.JaxRuntimeError, match="process 1: MemoryError: full"):
        memory.allocate(100, "dispatch")
    assert fake.names[-5:] == [*GROWTH, "free"]
    store.peer_says.clear()
    fake.out_of_memory = True
    with pytest.raises(jax.errors.JaxRuntimeError, match="process 0: MemoryError: NVSHMEM cannot"):
        memory.allocate(100, "dispatch")
    assert fake.names[-3:] == ["set_current", "malloc", "barrier_all"]
    fake.calls.clear()
    memory.close()
    assert fake.names == END  # Nothing is left to free.


def test_nvshmem_heap_bytes_allocated_once(fake):
    memory = NvshmemMemory(1.0, "settings")
    heap = SymmetricHeap(memory, 1 << 20, 5.0)
    heap.reserve("dispatch", 1000, 1000)
    heap.reserve("combine", 2000, 2000)
    assert [call for call in fake.calls if call[0] == "malloc"] == [("malloc", 1 << 20)]
    with pytest.raises(ValueError, match=r"heap_bytes=1048576.*init\(heap_bytes="):
        heap.reserve("dispatch", 1 << 21)
    heap.close()
    assert fake.names[-4:] == frees(1)
    with pytest.raises(ValueError, match="heap_bytes=10, expected at least"):
        SymmetricHeap(NvshmemMemory(1.0, "settings"), 10, 5.0)
    assert fake.names[-1] == "finalize"


def test_nvshmem_unreachable_peer(memory, fake):
    fake.unreachable = {1}
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        memory.allocate(100, "dispatch")
    assert fake.names[-1] == "free"
    assert "dispatch: allocating" in str(caught.value)
    assert f"{jax.local_devices()[0]} cannot write to the memory of {PEER}" in str(caught.value)
    assert "transport='xla'" in str(caught.value)


def test_nvshmem_missing_peer(memory, store, fake):
    """The waiting process changes nothing and cannot start again, because NVSHMEM would wait forever for the other."""
    memory.allocate(100, "dispatch")
    fake.calls.clear()
    store.peer_comes = False
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"allocating.*processes \[1\].*within 1 s") as caught:
        memory.allocate(200, "dispatch")
    assert "dispatch" in str(caught.value)
    store.peer_comes = True
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"finalize: .*no longer in step: processes .1."):
        memory.close()
    memory.close()
    assert fake.names == ["set_current"]
    with pytest.raises(RuntimeError, match=r"init: an earlier finalize.* restart the processes"):
        NvshmemMemory(1.0, "settings")


@pytest.mark.parametrize("value", ["0", "false", ""])
def test_nvshmem_multicast_disabled(fake, value):
    os.environ["NVSHMEM_DISABLE_NVLS"] = value
    with pytest.raises(ValueError, match=f"NVSHMEM_DISABLE_NVLS={value}, .*NVSHMEM_DISABLE_NVLS=1"):
        NvshmemMemory(1.0, "settings")
    assert fake.calls == []


def test_nvshmem_unsupported_reason(fake, monkeypatch):
    assert nvshmem.unsupported_reason() is None
    own = jax.local_devices()[0]
    with monkeypatch.context() as patch:
        patch.setattr(jax, "devices", lambda: [own, PEER, PEER])
        assert "process 1 of 2 drives 2 GPUs; it needs one GPU per process" in (nvshmem.unsupported_reason() or "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert nvshmem.unsupported_reason() == "not installed: nvshmem4py (pip install '.[cuda13]')"


@pytest.mark.parametrize("place", [0, 1], ids=["the first of its domain", "the second"])
def test_nvshmem_per_domain(place, fake, store, monkeypatch):
    """A domain has its own numbers, and its id comes from its first process."""
    own, near, far = jax.local_devices()[0], [PEER], [Other(2, slice_index=1), Other(3, slice_index=1)]
    near.insert(place, own)
    store.others = [1, 2, 3]
    store.peer_says["loading NVSHMEM"] = "ff" * 128
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(jax, "devices", lambda: [far[0], *near, far[1]])
    assert nvshmem.unsupported_reason() is None
    memory = NvshmemMemory(1.0, "settings")
    (_, _, rank, count, _, _, unique_id) = next(call for call in fake.calls if call[0] == "init")
    assert (rank, count, memory.devices) == (place, 2, near)
    assert (unique_id == b"\xff" * 128) == (place == 1)
    assert [memory.numbers[device] for device in (*near, *far)] == [0, 1, 0, 1]
    heap = SymmetricHeap(memory, None, 5.0)
    assert heap.layout.num_devices == 2
    heap.reserve("dispatch", 1000)
    assert [len(addresses) for addresses in heap.data.addresses.values()] == [2]
    heap.close()


def test_nvshmem_unequal_domains(fake, monkeypatch):
    own = jax.local_devices()[0]
    monkeypatch.setattr(jax, "devices", lambda: [own, PEER, Other(2, slice_index=1)])
    assert "have [2, 1] GPUs, expected the same number in each" in (nvshmem.unsupported_reason() or "")


@pytest.fixture
def gpus(fake, monkeypatch):
    """Simulate two processes with one GPU each."""
    context.finalize()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(requirements, "_capability", lambda: "9.0")
    registry._warn_once.cache_clear()
    yield
    context.finalize()
    registry._warn_once.cache_clear()


MESH = jax.make_mesh((2,), ("expert",), devices=jax.devices()[:2])
# Tokens that a kernel sends.
SENT = LowLatencyFacts(jnp.dtype(jnp.bfloat16), 256, Layout(1, 8, 16, 2, 32))


def test_nvshmem_processes_need_init(gpus, caplog, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: types.SimpleNamespace())  # all is installed
    facts = SENT
    reason = "several processes: call jax_ep.init() in each of them first"
    with caplog.at_level(logging.WARNING, "jax_ep"):
        used = [registry.choose(Options("dispatch"), facts).implementation for _ in range(2)]
        assert used == ["xla", "xla"]
    assert [record.getMessage() for record in caplog.records] == [f"implementation triton is not used: {reason}"]
    with pytest.raises(NotImplementedError, match=f"triton: {re.escape(reason)}"):
        registry.choose(Options("dispatch", (), ("triton",)), facts)
    with pytest.raises(RuntimeError, match=r"dispatch: several processes: call jax_ep.init"):
        context.heap("dispatch")
    context.init(MESH)
    assert registry.choose(Options("dispatch"), facts).implementation == "triton"
    assert context.transport() == "nvshmem"


def test_nvshmem_init_and_finalize_meet(gpus, fake, store):
    made = context.init(MESH, heap_bytes=1 << 20)
    assert (made.transport, made.num_ranks) == ("nvshmem", 2)
    assert context.init(MESH, heap_bytes=1 << 20) is made
    assert fake.names == ["set_current", "init", *GROWTH]
    context.finalize()
    context.finalize()
    assert fake.names[-4:] == frees(1)
    store.peer_comes = False
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"init: .*processes \[1\].*within 20 s"):
        context.init(MESH, timeout_s=2.0)
    assert context.transport() is None


def test_nvshmem_exit(gpus, store, fake, monkeypatch, caplog):
    """A program that ends by an exception does not wait for the others, and nothing fails at exit."""
    context.init(MESH)
    monkeypatch.setattr(sys, "last_exc", ValueError("of the program"), raising=False)
    context._finalize_at_exit()
    assert "finalize" not in fake.names
    monkeypatch.delattr(sys, "last_exc")
    store.peer_comes = False
    with caplog.at_level(logging.WARNING, "jax_ep"):
        context._finalize_at_exit()
    assert "processes [1] have not arrived" in caplog.text
    assert "finalize" not in fake.names


def test_transports_and_processes(gpus, caplog, monkeypatch):
    with pytest.raises(ValueError, match=r"transport='peer': each process drives one device, expected several"):
        context.init(MESH, transport="peer")
    with monkeypatch.context() as patch:
        patch.setattr(nvshmem, "unsupported_reason", lambda: "a reason")
        with pytest.raises(ValueError, match="transport='nvshmem': a reason"):
            context.init(MESH, transport="nvshmem")
        with caplog.at_level(logging.WARNING, "jax_ep"):
            assert context.init(MESH).transport == "xla"
        assert "transport nvshmem is not used: a reason" in caplog.text
        context.finalize()
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    assert transports.best() == "peer"
    with pytest.raises(ValueError, match=r"'nvshmem' needs several processes.*process_count.. is 1"):
        context.init(MESH, transport="nvshmem")
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(ValueError, match="'nvshmem' needs gpu devices, but this process has cpu"):
        context.init(MESH, transport="nvshmem")


def test_peer_access_one_process():
    """JAX may know domains within a process; without them, no axis is unreachable."""
    mesh = jax.make_mesh((2, 2), ("node", "expert"), devices=jax.devices()[:4])
    for of_processes in (False, True):
        assert peer_access.domains(mesh.devices.flat, of_processes=of_processes) == [[0, 1, 2, 3]]
        assert peer_access.unreachable_reason(mesh, ("node", "expert"), of_processes=of_processes) is None


def test_peer_access_several_gpus_per_process(gpus, caplog, monkeypatch):
    """Kernels run among the GPUs of a process if they have peer access and each process has as many."""
    own = jax.local_devices()[0]
    monkeypatch.setattr(jax, "devices", lambda: [own, Other(0), PEER, PEER])
    monkeypatch.setattr(peer_access, "unsupported_reason", lambda: None)
    assert transports.best() == transports.resolve("peer") == "peer"
    assert transports.describe("peer").endswith("in each of 2 processes, which XLA's collectives connect")
    assert peer_access.unsupported_processes_reason() is None
    with monkeypatch.context() as patch:
        patch.setattr(peer_access, "unsupported_reason", lambda: "a reason")
        with caplog.at_level(logging.WARNING, "jax_ep"):
            assert transports.best() == "xla"
        assert "transport peer is not used: a reason" in caplog.text
        patch.setattr(jax, "devices", lambda: [own, Other(0), PEER])
        with pytest.raises(ValueError, match="transport='peer': processes drive 1 to 2 devices"):
            transports.resolve("peer")
    findings = {finding.topic: finding for finding in doctor._transport()}
    assert findings["transport"].state == "ok" and "each of 2 processes" in findings["transport"].text


def test_peer_access_other_machines(gpus, caplog, monkeypatch):
    """Fall back to `xla`; all errors and logs give the reason."""
    assert peer_access.domains(jax.devices()) == [[0, 1]]
    far = Other(2, slice_index=1)
    devices = [jax.local_devices()[0], far, PEER, far]
    assert peer_access.domains(devices) == [[0, 2], [1, 3]]
    monkeypatch.setattr(jax, "devices", lambda: [devices[0], far])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: types.SimpleNamespace())  # Everything is installed.
    reason = "devices [0] of 2 cannot access the memory of devices [1]: they belong to 2 machines or NVLink domains"
    with pytest.raises(ValueError, match=rf"transport='nvshmem': {re.escape(reason)}"):
        context.init(MESH, transport="nvshmem")
    findings = {finding.topic: finding for finding in doctor._transport()}
    assert findings["transport"].state == "warning" and reason in findings["transport"].text
    with caplog.at_level(logging.WARNING, "jax_ep"):
        assert context.init(MESH).transport == "xla"
    assert reason in caplog.text
    facts = SENT
    assert registry.choose(Options("dispatch"), facts).implementation == "xla"
    with pytest.raises(NotImplementedError, match=f"triton: {re.escape(reason)}"):
        registry.choose(Options("dispatch", (), ("triton",)), facts)


def test_transports_unordered_launches(gpus, caplog):
    """XLA's flag is in the environment; the last one of several applies."""
    flag = "--xla_gpu_command_buffer_scheduling_mode="
    os.environ["XLA_FLAGS"] = f"{flag}CONCURRENT {flag}LHS --xla_x=1"
    assert transports.best() == "nvshmem"
    os.environ["XLA_FLAGS"] = f"{flag}LHS {flag}concurrent --xla_x=1"
    with pytest.raises(ValueError, match=rf"transport='nvshmem': XLA_FLAGS has {flag}CONCURRENT.*remove the flag"):
        context.init(MESH, transport="nvshmem")
    with caplog.at_level(logging.WARNING, "jax_ep"):
        assert context.init(MESH).transport == "xla"
    assert "CONCURRENT" in caplog.text
    context.finalize()


@pytest.mark.slow
def test_nvshmem_two_processes():
    """Use the real key-value store, barriers and timeouts; meeting_processes.py is the program."""
    zero, one = run_pair("meeting_processes.py", XLA_FLAGS="")
    ids = []
    for life in ("first", "second"):
        for process, found in enumerate((zero[life], one[life])):
            assert found["table"][:2] == found["addresses"]
            assert found["table"][3:5] == [5_000_000_000, process]
            assert found["nonzero"] == 0
            names = [name for name, *_ in found["calls"]]
            failed = [["malloc", "fill", "synchronize", "free"], ["malloc", "barrier_all"]][process]
            assert names[2:] == [*GROWTH, "set_current", *failed, *GROWTH, *frees(2)]
            assert "combine: allocating the symmetric heap: process 1: MemoryError: NVSHMEM" in found["no room in one"]
        inits = [[call for call in found[life]["calls"] if call[0] == "init"][-1] for found in (zero, one)]
        assert [init[2:4] for init in inits] == [["0", "2"], ["1", "2"]]
        assert inits[0][-1] == inits[1][-1]  # One unique id for both.
        ids.append(inits[0][-1])
    assert ids[0] != ids[1]
    wishes = "process 0: dispatch: allocating, 100 bytes; process 1: dispatch: allocating, 101 "
    for found in (zero, one):
        assert found["payloads"] == ["I am 0\nreally", "I am 1\nreally"]
        assert wishes in found["other wish"]
        assert "process 0: dispatch: allocating; process 1: combine: allocating." in found["other function"]
        assert found["one fails"] == "JaxRuntimeError: init: loading: process 1: OSError: no such library"
        assert "timeout_s=0; process 1: init: initializing NVSHMEM, timeout_s=1" in found["settings"]
        assert found["in step again"] == found["in step after all"] == ["yes", "yes"]
    assert "dispatch: allocating takes all 2 processes together" in zero["late"]
    assert "processes [1] have not arrived within 3 s" in zero["late"]
    assert "some arrived after the others had given up, after 3 s" in one["late"]
    assert zero["alone"].startswith("JaxRuntimeError: finalize: ending NVSHMEM takes all 2 processes together")
    assert "processes [1] have not arrived within 3 s" in zero["alone"]
    assert zero["still alone"].endswith("restart the processes.")
