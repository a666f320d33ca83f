"""The interpreter pool: dtypes, kernels that communicate across processes, order of launches, memory."""

import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton.language as tl
from jax.sharding import Mesh
from kernel_calls import BASES, H, W, exchange, heap_tables, kernel, ranks, run_one

import harness
from jax_ep import interpreter
from jax_ep.core.kernel import Config
from jax_ep.ffi.status import StatusRecord
from jax_ep.formats import kernels as formats_kernels
from jax_ep.megakernels import kernels
from jax_ep.megakernels.launch import launch

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "float64"]


def doubled(x):
    return run_one(("elementwise", "scale"), x, num_programs=2, SIZE=x.size, BLOCK=16, FACTOR=2)


@pytest.mark.parametrize("name", INTEGERS + FLOATS)
def test_interpreter_dtypes(pool, float64, name):
    dtype = jnp.dtype(name)
    x = jnp.asarray(np.arange(-20, 20) if dtype.kind != "u" else np.arange(40)).astype(dtype)

    expected = (np.asarray(x).astype(np.float64) * 2).astype(dtype)
    for run in (doubled, jax.jit(doubled)):
        y = run(x)
        assert y.dtype == dtype
        np.testing.assert_array_equal(np.asarray(y), expected)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16"])
def test_interpreter_conversions_round_to_nearest_even(pool, rng, name):
    dtype = jnp.dtype(name)
    x = (rng.standard_normal(1024) * np.exp2(rng.integers(-12, 9, 1024))).astype(np.float32)
    x[:3] = 1e6, -1e6, np.nan
    y = np.asarray(run_one(("elementwise", "convert"), jnp.asarray(x), dtype, SIZE=1024))
    limit = float(jnp.finfo(dtype).max)
    saturated = np.clip(x, -limit, limit) if dtype.itemsize == 1 else x
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(y.astype(np.float32), saturated.astype(dtype).astype(np.float32))
    back = run_one(("elementwise", "convert"), jnp.asarray(y), jnp.float32, SIZE=1024)
    np.testing.assert_array_equal(np.asarray(back), y.astype(np.float32))


def test_interpreter_asm_reads_before_writes():
    """Compilers may keep a result in the register of an argument, unless it is declared early-clobber."""
    found = 0
    names = [f"{p.__name__}.{m.name}" for p in (kernels, formats_kernels) for m in pkgutil.iter_modules(p.__path__)]
    constants = ((name, x) for name in names for x in vars(importlib.import_module(name)).values())
    for name, code in ((name, x.value) for name, x in constants if isinstance(x, tl.constexpr)):
        if not isinstance(code, str) or not code.startswith("{"):
            continue
        lines = [line.split(maxsplit=1)[1].rstrip(";").split(", ") for line in code.strip("{} \n").splitlines()]
        results = {target for target, *_ in lines if target.startswith("$")}
        assert results, code
        first = min(i for i, (target, *_) in enumerate(lines) if target in results)
        late = {x for line in lines[first + 1 :] for x in line[1:] if x.startswith("$")}
        assert late <= results, f"{name}: {late} behind {lines[first][0]}: {code}"
        found += 1
    assert found >= 7


def test_interpreter_asm_adjacent_elements(pool, rng):
    """Two bytes whose results share a register are adjacent; the other two of a pack come from other positions."""
    x = rng.integers(0, 256, 64).astype(np.uint8)

    def widened(first, second):
        asm = f"prmt.b32 $0, $2, 0, {first}; prmt.b32 $1, $2, 0, {second};"
        return np.asarray(run_one(("elementwise", "widen_bytes"), jnp.asarray(x), jnp.int16, SIZE=64, ASM=asm))

    np.testing.assert_array_equal(widened("0x4140", "0x4342"), x)
    np.testing.assert_array_equal(widened("0x4041", "0x4243"), x.reshape(-1, 2)[:, ::-1].reshape(-1))
    np.testing.assert_array_equal(widened("0x4342", "0x4140"), np.roll(x, 32))


def test_interpreter_results_poisoned(pool):
    y = run_one(("elementwise", "write_half"), jnp.arange(8, dtype=jnp.int32), SIZE=8)
    assert np.asarray(y).tolist() == [0, 1, 2, 3, -1, -1, -1, -1]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("compile_it", [True, False], ids=["jit", "eager"])
def test_interpreter_exchange_between_processes(pool, mesh4, rng, check_vma, compile_it):
    x = rng.standard_normal((W, W, H)).astype(np.float32)
    fn = harness.per_rank(exchange, mesh4, check_vma=check_vma)
    y = (jax.jit(fn) if compile_it else fn)(ranks(), np.full(W, 5, np.int32), heap_tables(pool), x)
    np.testing.assert_array_equal(np.asarray(y), x.swapaxes(0, 1))
    flags = [pool.heap(worker)[: 4 * W].view(np.int32).tolist() for worker in range(W)]
    assert flags == [[5] * W] * W  # The heaps mapped in this process are those of the workers.


def test_interpreter_group_of_two_axes(pool, rng):
    mesh = harness.make_mesh((2, 2), ("data", harness.EXPERT))
    x = rng.standard_normal((2, 2, W, H)).astype(np.float32)
    by_axes = [a.reshape(2, 2, *a.shape[1:]) for a in (ranks(), np.full(W, 1, np.int32), heap_tables(pool))]
    y = harness.run(exchange, mesh, *by_axes, x)
    np.testing.assert_array_equal(y.reshape(W, W, H), x.reshape(W, W, H).swapaxes(0, 1))


def test_interpreter_worker_per_device(pool, rng):
    mesh = Mesh(np.array([jax.devices()[i] for i in (3, 1, 0, 2)]), (harness.EXPERT,))
    x = rng.standard_normal((W, W, H)).astype(np.float32)
    order = np.array([3, 1, 0, 2])
    # Addresses of each device's own view, heaps in mesh order: a wrong worker would read a wrong mapping.
    tables = heap_tables(pool)[order][:, order]
    y = harness.run(exchange, mesh, ranks(), np.ones(W, np.int32), tables, x)
    np.testing.assert_array_equal(y, x.swapaxes(0, 1))
    for rank, device in enumerate(order):
        received = pool.heap(device)[64 : 64 + W * H * 4].view(np.float32).reshape(W, H)
        np.testing.assert_array_equal(received, x[:, rank])


def test_interpreter_concurrent_groups(pool, rng):
    """The devices of two programs overlap in one device, which launches a site more often than the others."""
    meshes = [Mesh(np.array(jax.devices())[list(pair)], (harness.EXPERT,)) for pair in ((0, 1), (1, 2))]
    x = np.arange(8, dtype=np.int32).reshape(2, 4)
    programs = [jax.jit(harness.per_rank(doubled, mesh)) for mesh in meshes]
    results = [programs[i % 2](x + i) for i in range(8)]
    for i, y in enumerate(results):
        np.testing.assert_array_equal(np.asarray(y), 2 * (x + i))


def test_interpreter_symmetric_heap():
    memory = interpreter.SharedMemory(timeout_s=30)
    try:
        pool = memory.pool
        seen = [memory.allocate(size, "test") for size in (1 << 16, 1 << 12)]
        assert len(memory.devices) == jax.device_count()
        statuses = memory.statuses()
        statuses[1].write(StatusRecord(state=1, rank=1, peer=2))
        assert interpreter.current_pool().status(1).tolist() == [1, 0, 1, 2, 0, 0, -1, 0]
        assert statuses[0].read() == StatusRecord()
        assert doubled(jnp.arange(4, dtype=jnp.int32)).tolist() == [0, 2, 4, 6]
        for number, (size, addresses) in enumerate(zip((1 << 16, 1 << 12), seen, strict=True)):
            assert addresses == {device: pool.heap_addresses(device, number) for device in range(len(memory.devices))}
            assert pool.heap(1, number).size == size
    finally:
        memory.close()
    assert interpreter.current_pool() is None


def test_interpreter_launch_order(pool, mesh4, rng):
    x = rng.standard_normal((W, len(BASES), W, H)).astype(np.float32)
    tables = heap_tables(pool)

    def both(rank, epoch, heaps, x):
        # Whichever the ranks' runtimes reach first: each waits in its kernel for all peers.
        return jnp.stack([exchange(rank, epoch, heaps, x[i], base) for i, base in enumerate(BASES)])

    compiled = harness.compiled(both, mesh4)
    for epoch in range(1, 9):
        y = compiled(ranks(), np.full(W, epoch, np.int32), tables, x * epoch)
        np.testing.assert_array_equal(y, (x * epoch).swapaxes(0, 2))


def test_interpreter_poll_timeout(pool, mesh4):
    for worker in range(W):
        pool.heap(worker)[: 4 * W].view(np.int32)[:] = np.arange(W) == worker

    def fn(rank, heaps):
        result = jax.ShapeDtypeStruct((1 + W,), jnp.int32)
        constants = {"W": W, "TIMEOUT_NS": 100_000_000}
        return launch(kernel("exchange", "wait"), (rank, heaps), (result,), Config(1), constants)[0]

    seen = harness.run(fn, mesh4, ranks(), heap_tables(pool))
    np.testing.assert_array_equal(seen[:, 0], ranks() == 0)  # The scalar poll looks at flag 0.
    np.testing.assert_array_equal(seen[:, 1:], np.eye(W))


def test_interpreter_more_heaps_and_reset(pool, mesh4, rng):
    """New heaps leave earlier ones in place, with their content."""
    x = rng.standard_normal((W, W, H)).astype(np.float32)
    run = harness.compiled(exchange, mesh4)
    tables, size = heap_tables(pool), pool.heap(0).size
    run(ranks(), np.ones(W, np.int32), tables, x)
    held = [pool.heap(worker).copy() for worker in range(W)]
    addresses = pool.allocate(2 * size)
    np.testing.assert_array_equal(heap_tables(pool), tables)
    assert not set(np.ravel(addresses)) & set(np.ravel([pool.heap_addresses(worker) for worker in range(W)]))
    assert [pool.heap(worker, 1).size for worker in range(W)] == [2 * size] * W
    assert not any(pool.heap(worker, 1).any() for worker in range(W))
    np.testing.assert_array_equal([pool.heap(worker) for worker in range(W)], held)
    np.testing.assert_array_equal(run(ranks(), np.full(W, 2, np.int32), tables, -x), -x.swapaxes(0, 1))
    pool.heap(0, 1)[:] = 1
    pool.reset()
    assert not any(pool.heap(worker, number).any() for worker in range(W) for number in range(2))


def test_interpreter_allocation_fails(pool):
    with pytest.raises(MemoryError, match=f"{1 << 62} bytes for each of {W} workers"):
        pool.allocate(1 << 62)
    assert doubled(jnp.arange(4, dtype=jnp.int32)).tolist() == [0, 2, 4, 6]


def test_interpreter_status_records_cleared(pool):
    for worker in range(W):
        assert StatusRecord(*pool.status(worker).tolist()) == StatusRecord()
        assert len(set(pool.status_addresses(worker))) == W
