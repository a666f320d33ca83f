"""Heaps that grow while programs run, and programs that outlive their context. Also on GPUs of one process."""

import concurrent.futures
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import jax_ep
from jax_ep import context
from jax_ep.heap import symmetric
from layers import low_latency_round_trip as decode
from layers import round_trip

W, T, K, E, H = 2, 5, 2, 4, 8
ALSO_ON_GPUS = True
TRANSPORT = "shared_memory" if jax.default_backend() == "cpu" else None


def inputs(num_tokens=T):
    rng = np.random.default_rng(num_tokens)
    x = rng.integers(-8, 8, size=(W, num_tokens, H)).astype(np.float32)
    return x, rng.integers(0, E, size=(W, num_tokens, K), dtype=np.int32)


def lower(fn, mesh, num_tokens, hidden):
    """Trace a program, which grows the heap for it, without running it."""
    shapes = [(W, num_tokens, hidden), (W, num_tokens, K)]
    types = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, (jnp.float32, jnp.int32), strict=True)]
    jax.jit(harness.per_rank(fn, mesh)).lower(*types)


@pytest.mark.parametrize("fn", [round_trip, decode], ids=["data", "buffers"])
def test_growth_while_program_runs(mesh, fn):
    """A second thread traces ever larger programs; the first program keeps running in its original heap."""
    jax_ep.init(mesh, transport=TRANSPORT)
    x, ids = inputs()
    call = harness.compiled(fn, mesh)
    np.testing.assert_array_equal(call(x, ids), K * x)
    heap = context.heap("test")
    before = (heap.data.id, [heap.buffers.id] if fn is decode else [])
    stop = threading.Event()

    def run():
        finished = 0
        while not stop.is_set() or finished < 3:
            np.testing.assert_array_equal(call(x, ids), K * x)
            finished += 1

    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = pool.submit(run)
        try:
            for factor in range(1, 5):
                lower(fn, mesh, 64 << factor, 4096)
        finally:
            stop.set()
        running.result()
    after = (heap.data.id, [heap.buffers.id] if fn is decode else [])
    assert after > before
    np.testing.assert_array_equal(harness.run(fn, mesh, *inputs(3 * T)), K * inputs(3 * T)[0])
    np.testing.assert_array_equal(call(x, ids), K * x)


def test_growth_concurrent_tracing(mesh):
    """Each thread gets room for its own program, whichever grows the heap first."""
    jax_ep.init(mesh, transport=TRANSPORT)

    def trace(num_tokens):
        for fn in (round_trip, decode):
            lower(fn, mesh, num_tokens, 4096)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(trace, [128 << i for i in range(4)]))
    assert context.heap("test").data.num_bytes >= W * 1024 * 4096 * 4
    x, ids = inputs()
    np.testing.assert_array_equal(harness.run(round_trip, mesh, x, ids), K * x)


@pytest.mark.parametrize("heap_bytes", [None, 8 << 20], ids=["growing", "fixed"])
def test_growth_programs_in_later_context(mesh, heap_bytes):
    """Also in a third context, and for programs of other generations; between contexts an error states the remedy."""
    jax_ep.init(mesh, transport=TRANSPORT, heap_bytes=heap_bytes)
    x, ids = inputs()
    calls = [harness.compiled(fn, mesh) for fn in (round_trip, decode)]
    for call in calls:
        np.testing.assert_array_equal(call(x, ids), K * x)
    if heap_bytes is None:
        lower(round_trip, mesh, 1024, 4096)  # So that the next context has a larger heap under the old id.
    for _ in range(2):
        jax_ep.finalize()
        with pytest.raises(Exception, match=r"Call jax_ep\.init\(\).*jax\.clear_caches\(\)"):
            calls[0](x, ids)
        jax_ep.init(mesh, transport=TRANSPORT, heap_bytes=heap_bytes)
        for call in calls:
            np.testing.assert_array_equal(call(x, ids), K * x)
    wide = inputs(2 * T)
    for fn in (round_trip, decode):
        np.testing.assert_array_equal(harness.run(fn, mesh, *wide), K * wide[0])


@pytest.mark.parametrize("then_one_device", [False, True])
def test_finalize_with_enqueued_work(mesh, then_one_device, monkeypatch):
    """Programs of two devices, and single-device programs that take their results, end before the heap is freed."""
    jax_ep.init(mesh, transport=TRANSPORT, timeout_s=harness.PATIENCE_S)
    x, ids = inputs()
    call = jax.jit(harness.per_rank(round_trip, mesh))
    same, sizes = jnp.eye(H, dtype=jnp.bfloat16)[None], jnp.array([T], jnp.int32)
    alone = jax.jit(lambda x: jax_ep.grouped_gemm(x.astype(jnp.bfloat16), same, sizes, implementation="triton"))
    jax.block_until_ready([call(x, ids), alone(x[0])])
    go = threading.Event()  # While `finalize` waits.
    if TRANSPORT:
        worker, wait = context.heap("test")._memory.pool._workers[0], symmetric.wait_for_devices
        run = worker.run
        monkeypatch.setattr(worker, "run", lambda *args: (go.wait(), run(*args))[1])
        later = threading.Timer(0.3, go.set)
        monkeypatch.setattr(symmetric, "wait_for_devices", lambda d: (go.is_set() or later.start(), wait(d))[1])
    results = [call(x, ids) for _ in range(4)]
    last = [alone(result.addressable_shards[0].data[0]) for result in results * then_one_device]
    jax_ep.finalize()
    for result in results:
        np.testing.assert_array_equal(result, K * x)
    for result in last:
        np.testing.assert_array_equal(result, K * x[0])


def test_growth_later_context_too_small(mesh):
    jax_ep.init(mesh, transport=TRANSPORT)
    x, ids = inputs()
    call = harness.compiled(round_trip, mesh)
    np.testing.assert_array_equal(call(x, ids), K * x)
    jax_ep.finalize()
    jax_ep.init(mesh, transport=TRANSPORT, heap_bytes=4 << 20)
    with pytest.raises(Exception, match=r"unless its heap_bytes is too small.*jax\.clear_caches\(\)"):
        call(x, ids)
    jax.clear_caches()
    np.testing.assert_array_equal(call(x, ids), K * x)


def test_growth_context_ends_during_tracing(mesh, monkeypatch):
    """The thread's reservation is gone, and the new heap may be smaller."""
    jax_ep.init(mesh, transport=TRANSPORT)
    reserve = context.reserve

    def restart():
        jax_ep.finalize()
        jax_ep.init(mesh, transport=TRANSPORT, heap_bytes=8 << 20)

    def reserve_in_vain(*args):
        reserve(*args)
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            executor.submit(restart).result()

    monkeypatch.setattr(context, "reserve", reserve_in_vain)
    with pytest.raises(RuntimeError, match=r"finalized by another thread .* trace it again"):
        harness.run(round_trip, mesh, *inputs())
    monkeypatch.undo()
    np.testing.assert_array_equal(harness.run(round_trip, mesh, *inputs()), K * inputs()[0])


@pytest.mark.parametrize("heap_bytes", [1 << 46, 1 << 60], ids=["memory", "addresses"])
def test_growth_out_of_memory(mesh, heap_bytes):
    message = rf"init: .*{heap_bytes}.*(free|can spare)"
    with pytest.raises((RuntimeError, ValueError), match=message):
        jax_ep.init(mesh, transport=TRANSPORT, heap_bytes=heap_bytes)
    jax_ep.init(mesh, transport=TRANSPORT)
    np.testing.assert_array_equal(harness.run(round_trip, mesh, *inputs()), K * inputs()[0])
