"""Generations of heaps: growth, stable addresses, and ids."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ffi_calls import FAILED
from jax_ep import ffi
from jax_ep.heap import symmetric
from jax_ep.heap.symmetric import SymmetricHeap

DEVICES = 2
AREA, TRACE = DEVICES + 3, DEVICES + 5  # Positions in a table, see kernels/failures.py.
DATA = symmetric.HeapLayout(DEVICES).data
MIB = 1 << 20


class HostTraceArea:
    def __init__(self, header, num_words):
        self._words = [np.concatenate([header, np.full((num_words - header.size,), n)]) for n in range(DEVICES)]
        self.addresses = {number: words.ctypes.data for number, words in enumerate(self._words)}

    def read(self, device):
        return self._words[device]


class HostMemory:
    """Memory with fake addresses; allocations can fail."""

    def __init__(self):
        self.devices = jax.devices()[:DEVICES]
        self.sizes: list[int] = []
        self.fails = False
        self._statuses = [ffi.alloc_status(*ffi.device_key(device)) for device in self.devices]

    def allocate(self, num_bytes, function):
        if self.fails:
            raise RuntimeError(f"{function}: {num_bytes} bytes, and there are none")
        base = (1 + len(self.sizes)) << 50
        self.sizes.append(num_bytes)
        return {number: [base + (peer << 45) for peer in range(DEVICES)] for number in range(DEVICES)}

    def status_address(self, device):
        return self._statuses[device].device_address

    def statuses(self):
        return self._statuses

    def trace_area(self, header, num_words):
        return HostTraceArea(header, num_words)

    def close(self):
        for status in self._statuses:
            status.free()
        self._statuses = []


_bases = itertools.count(10_000, 100)
base = 0


def new_ids():
    """Forget the bytes that programs have used per id, as in a new process."""
    global base
    base = next(_bases)
    symmetric._DATA, symmetric._BUFFERS = base + 1, base + 2


@pytest.fixture(autouse=True)
def other_ids(monkeypatch):
    """Use ids from `base` on, for this test only."""
    monkeypatch.setattr(symmetric, "_DATA", 0)
    monkeypatch.setattr(symmetric, "_BUFFERS", 0)
    new_ids()


def ids_of(*generations):
    return [one.id - base for one in generations]


@pytest.fixture
def memory():
    return HostMemory()


@pytest.fixture
def grown(memory):
    made = SymmetricHeap(memory, None, 5.0)
    yield made
    made.close()


def fetch(table_id, num_bytes=0):
    """Return the table that a program compiled for `num_bytes` gets."""
    program = jax.jit(lambda: ffi.pointer_table(base + table_id, TRACE + 1, num_bytes=num_bytes))
    return np.asarray(program()).tolist()


def test_heap_grows_without_moving(memory, grown):
    """The table of programs traced before keeps its id, its addresses and its sizes."""
    grown.reserve("dispatch", 1000, 2000)
    first = (grown.data, grown.buffers)
    tables = [fetch(i, one.reserved) for i, one in zip((1, 2), first, strict=True)]
    grown.reserve("dispatch", 1 << 26, 1 << 24)
    assert ids_of(*first, grown.data, grown.buffers) == [1, 2, 3, 4]
    assert [fetch(i, one.reserved) for i, one in zip((1, 2), first, strict=True)] == tables
    new = fetch(3, 1 << 26)
    assert not {*new[:DEVICES]} & {*tables[0][:DEVICES], *tables[1][:DEVICES]}
    assert fetch(4)[AREA:TRACE] == [grown.layout.buffers, grown.buffers.buffer_bytes]
    assert grown.buffers.buffer_bytes >= 1 << 24
    assert len(memory.sizes) == 4


def test_heap_trace_area_during_recording(grown):
    """The area is in every table, including those of new heaps, and in none after the recording."""
    grown.reserve("dispatch", 1000, 2000)
    assert [fetch(i)[TRACE] for i in (1, 2)] == [0, 0]
    grown.begin_traces(np.arange(3), 5)
    address = grown._traces.addresses[0]
    grown.reserve("dispatch", 1 << 26)
    assert [fetch(i)[TRACE] for i in (1, 2, 3)] == [address] * 3
    with pytest.raises(RuntimeError, match="is already recording"):
        grown.begin_traces(np.arange(3), 5)
    words = grown.end_traces()
    assert {number: found.tolist() for number, found in words.items()} == {0: [0, 1, 2, 0, 0], 1: [0, 1, 2, 1, 1]}
    assert [fetch(i)[TRACE] for i in (1, 2, 3)] == [0] * 3
    with pytest.raises(RuntimeError, match="finalized during the recording"):
        grown.end_traces()


def test_heap_buffers_and_data_grow_separately(memory, grown):
    grown.reserve("dispatch", 1 << 26)
    grown.reserve("low_latency_dispatch", 0, 1000)
    assert memory.sizes[1] < memory.sizes[0] / 2  # No second data area next to the buffers.
    grown.reserve("low_latency_dispatch", 0, 1 << 24)
    assert len(memory.sizes) == 3
    assert ids_of(grown.data, grown.buffers) == [1, 4]


def test_heap_reserve_within_capacity(memory, grown):
    grown.reserve("dispatch", 1000, 1000)
    grown.reserve("dispatch", grown.data.num_bytes, grown.buffers.num_bytes)
    assert len(memory.sizes) == 2


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 1 << 34), min_size=1, max_size=12))
def test_heap_growth_total_bytes(needs):
    new_ids()
    memory = HostMemory()
    made = SymmetricHeap(memory, None, 5.0)
    for need in needs:
        made.reserve("dispatch", need)
        assert made.data.num_bytes >= need
    assert all(after >= 1.4 * before for before, after in itertools.pairwise(memory.sizes))
    small = len(memory.sizes) * (DATA + MIB) + 16 * MIB
    assert sum(memory.sizes) <= 4.5 * max(needs) + small
    made.close()


def test_heap_allocation_fails(memory, grown):
    grown.reserve("dispatch", 1000)
    table, memory.fails = fetch(1, 1000), True
    with pytest.raises(RuntimeError, match=r"combine: .* and there are none"):
        grown.reserve("combine", 1 << 26)
    memory.fails = False
    assert (ids_of(grown.data), fetch(1, 1000)) == ([1], table)
    grown.reserve("combine", 1 << 26)
    assert ids_of(grown.data) == [3]


def places(made):
    """Return the byte ranges of the data and the buffers that programs use, in order."""
    spans = [(0, made.layout.data + made.data.reserved)]
    for one in made._buffers:
        assert one.addresses[0][0] == made.data.addresses[0][0] + one.start
        spans.append((one.start, one.start + made.layout.bytes_with_buffers(one.buffer_bytes)))
    return sorted(spans)


def test_heap_buffers_do_not_overlap(memory):
    made = SymmetricHeap(memory, DATA + MIB, 5.0)
    made.reserve("dispatch", 100_000, 1000)
    made.reserve("combine", 200_000, 3000)
    made.reserve("combine", 300_000, 20_000)
    spans = places(made)
    assert len(spans) == 4
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= DATA + MIB
    assert memory.sizes == [DATA + MIB]
    assert ids_of(*made._buffers) == [2, 4, 6]
    assert fetch(2)[TRACE - 1] == 1024
    with pytest.raises(ValueError, match=r"combine: .*needs \d+; call finalize\(\) and init\(heap_bytes=\d+\)"):
        made.reserve("combine", made.data.num_bytes + 1)
    made.reserve("combine", made.data.num_bytes)
    assert places(made)[0][1] <= places(made)[1][0]
    made.close()


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 16)), min_size=1, max_size=4))
@pytest.mark.slow
def test_heap_error_size_suffices(needs):
    size = DATA
    for _ in range(2 * len(needs) + 1):
        new_ids()
        made = SymmetricHeap(HostMemory(), size, 5.0)
        try:
            for data_bytes, buffer_bytes in needs:
                made.reserve("dispatch", data_bytes, buffer_bytes)
            break
        except ValueError as error:
            larger = int(str(error).split("init(heap_bytes=")[1].split(")")[0])
            assert larger > size
            size = larger
        finally:
            made.close()
    else:
        pytest.fail("each call needed more than the error before said")


def test_heap_buffers_avoid_deserialized_program(memory):
    """A program compiled in another process has reserved nothing in this one."""
    made = SymmetricHeap(memory, DATA + MIB, 5.0)
    fetch(1, MIB - 8192)
    with pytest.raises(ValueError, match=r"low_latency_dispatch: .*heap_bytes="):
        made.reserve("low_latency_dispatch", 0, 20_000)
    made.reserve("low_latency_dispatch", 0, 256)
    with pytest.raises(FAILED, match=r"compiled for 1048576.*init\(heap_bytes=\.\.\.\)"):
        fetch(1, MIB)
    made.close()


def life(limit, earlier, *needs):
    """Return the sizes after a context in which programs needed the given bytes."""
    made = SymmetricHeap(HostMemory(), limit, 5.0, earlier)
    for data_bytes, buffer_bytes in needs:
        made.reserve("dispatch", data_bytes, buffer_bytes)
    made.close()
    return made.sizes


def test_heap_tables_of_earlier_context(memory):
    """All earlier generations are replaced by one with all their ids, and at least as much memory."""
    sizes = life(None, None, (1000, 1000), (1 << 26, 1 << 24))
    assert sorted(sizes) == [base + i for i in (1, 2, 3, 4)]
    with pytest.raises(FAILED, match=r"is not registered.*init\(\).*clear_caches"):
        fetch(3, sizes[base + 3])
    made = SymmetricHeap(memory, None, 5.0, sizes)
    assert len(memory.sizes) == 2
    assert (
        fetch(1, sizes[base + 1]) == fetch(3, sizes[base + 3]) != fetch(2, sizes[base + 2]) == fetch(4, sizes[base + 4])
    )
    made.reserve("dispatch", 1 << 26, 1 << 24)
    assert len(memory.sizes) == 2
    assert ids_of(made.data, made.buffers) == [3, 4]
    made.reserve("dispatch", 1 << 28)
    assert ids_of(made.data) == [5]
    made.close()
    assert all(made.sizes[i] >= size for i, size in sizes.items())


def test_heap_smaller_uses_new_ids(memory):
    """A graph captured with a table may be replayed, so an id never gets less memory than before."""
    sizes = life(None, None, (1 << 26, 1 << 24))
    made = SymmetricHeap(memory, DATA + MIB, 5.0, sizes)
    with pytest.raises(FAILED, match="is not registered"):
        fetch(1, sizes[base + 1])
    made.reserve("dispatch", 1000, 1000)
    assert ids_of(made.data, made.buffers) == [3, 4]
    made.close()
    after = SymmetricHeap(HostMemory(), 1 << 28, 5.0, made.sizes)  # A large enough heap restores all.
    assert fetch(1, sizes[base + 1]) == fetch(3) != fetch(2, sizes[base + 2]) == fetch(4)
    after.close()


def test_heap_smaller_restores_what_fits(memory):
    """Programs of an earlier context may have been larger than those of the last one."""
    sizes = life(DATA + MIB, life(None, None, (1 << 26, 1 << 24)), (1000, 1000))
    assert sorted(sizes) == [base + i for i in (1, 2, 3, 4)]
    made = SymmetricHeap(memory, DATA + MIB, 5.0, sizes)
    fetch(3, sizes[base + 3])
    assert fetch(4)[TRACE - 1] == sizes[base + 4] == 1024
    for i in (1, 2):
        with pytest.raises(FAILED, match="is not registered"):
            fetch(i)
    made.close()


def test_heap_same_ids_per_context():
    sizes = life(DATA + MIB, None, (1000, 1000))
    assert sorted(sizes) == sorted(life(DATA + MIB, sizes, (1000, 1000))) == [base + 1, base + 2]
    assert sorted(life(DATA + MIB, sizes, (2000, 2000))) == [base + 1, base + 2, base + 4]


def test_heap_close_order(memory, monkeypatch):
    """New launches find no table, running ones are waited for, and only then tables and memory are freed."""
    made = SymmetricHeap(memory, None, 5.0)
    made.reserve("dispatch", 1000)
    steps = []
    for module, name in ((symmetric, "wait_for_devices"), (ffi, "unregister_status"), (ffi, "hide_table"),
                         (ffi, "unregister_table"), (memory, "close")):  # fmt: skip
        step = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, step=step, name=name: (steps.append(name), step(*args))[1])
    made.close()
    wait = "wait_for_devices"
    assert steps == [wait, "unregister_status", "hide_table", wait, "unregister_table", "close"]


def test_heap_close_after_partial_registration(memory, monkeypatch):
    """No device keeps a table of freed memory."""
    made = SymmetricHeap(memory, None, 5.0)
    register = ffi.register_table

    def fails_on_the_second(table_id, device, *args):
        if device == memory.devices[1]:
            raise RuntimeError("no memory for a table")
        register(table_id, device, *args)

    monkeypatch.setattr(ffi, "register_table", fails_on_the_second)
    with pytest.raises(RuntimeError, match="no memory for a table"):
        made.reserve("dispatch", 1000)
    assert fetch(1)
    made.close()
    with pytest.raises(FAILED, match="is not registered"):
        fetch(1)
