"""A failed launch returns no valid numbers: its results are poisoned, and the next call reports the failure."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import harness
import jax_ep
from cases import BF16, FP8_WIRE, integers
from jax_ep import context, ffi
from jax_ep.core.kernel import Kernel
from jax_ep.interpreter import Pool
from jax_ep.megakernels import launch
from jax_ep.megakernels.kernels import combine as combine_kernels
from jax_ep.megakernels.kernels import dispatch as dispatch_kernels
from jax_ep.megakernels.launch import launch_identity
from jax_ep.types import Schedule

W, T, K, E, H, F = 2, 5, 2, 4, 16, 32
OPTIONS = {"num_experts": E, "implementation": "triton"}
GIVEN = {"implementation": "triton"}
SHORT_S = 0.3
pytestmark = pytest.mark.usefixtures("no_context")
EPOCHS = 64  # The first of the control words that count launches.


def all_control_words(heap, rank):
    return [harness.words_of(heap, generation, rank) for generation in heap.generations]


def shorten_waits(heap):
    """Shorten all waits from now on; nothing after this has to succeed."""
    heap._timeout_ns = int(SHORT_S * 1e9)
    for generation in heap.generations:
        heap._register(generation)


def exchange(x, ids, w, h):
    d = jax_ep.dispatch(x, ids, jnp.ones(ids.shape, jnp.float32), **OPTIONS)
    back = jax_ep.combine(d.tokens, d.handle, **GIVEN)
    return d.tokens, d.weights, back, d.handle.row_to_assignment, d.handle.num_invalid


def dispatch_alone(x, ids, w, h):
    d = jax_ep.dispatch(x, ids, **OPTIONS)
    return d.tokens, d.handle.row_to_assignment, d.handle.assignment_to_row, d.handle.topk_idx


def quantized(x, ids, w, h):
    d = jax_ep.dispatch(x, ids, schedule=FP8_WIRE, **OPTIONS)
    return d.tokens, jax_ep.combine(d.tokens, d.handle, schedule=FP8_WIRE, **GIVEN)


def dispatch_gemm(x, ids, w, h):
    weights, schedule = jnp.ones(ids.shape, jnp.float32), Schedule(dispatch_mode="fused")
    d = jax_ep.dispatch_grouped_gemm(x.astype(jnp.bfloat16), ids, weights, w, schedule=schedule, **OPTIONS)
    return d.hidden, d.weights, d.handle.row_to_assignment


def dispatch_gemm_in_gluon(*arrays):
    with jax_ep.tuning.override("grouped_gemm", gluon=True):
        return dispatch_gemm(*arrays)


def gemm_combine(mode):
    def fn(x, ids, w, h):
        handle = jax_ep.dispatch(x.astype(jnp.bfloat16), ids, **OPTIONS).handle
        schedule = Schedule(combine_mode=mode)
        return (jax_ep.grouped_gemm_combine(h, w.swapaxes(1, 2), handle, schedule=schedule, **GIVEN),)

    return fn


def layer_gradients(x, ids, w, h):
    def loss(x, w, weights):
        y = jax_ep.moe(x, ids, weights, w, w[..., : F // 2].swapaxes(1, 2), **OPTIONS)
        return y.astype(jnp.float32).sum()

    return jax.grad(loss, argnums=(0, 1, 2))(x.astype(jnp.bfloat16), w, jnp.ones(ids.shape, jnp.float32))


def low_latency_dispatch(x, ids, w, h):
    d = jax_ep.low_latency_dispatch(x, ids, max_tokens_per_rank=T, quantize=False, **OPTIONS)
    return d.tokens, d.handle.source_token, d.handle.assignment_to_row, d.handle.own_topk_idx, d.handle.num_invalid


def low_latency_round_trip(x, ids, w, h):
    d = jax_ep.low_latency_dispatch(x, ids, max_tokens_per_rank=T, quantize=False, **OPTIONS)
    return (jax_ep.low_latency_combine(d.tokens, ids, jnp.ones(ids.shape, jnp.float32), d.handle, **GIVEN),)


def low_latency_gemm_combine(x, ids, w, h):
    d = jax_ep.low_latency_dispatch(x.astype(jnp.bfloat16), ids, max_tokens_per_rank=T, quantize=False, **OPTIONS)
    arguments = (d.tokens, w[..., :H], d.group_sizes, ids, jnp.ones(ids.shape, jnp.float32), d.handle)
    run = jax_ep.ops.moe_low_latency.low_latency_gemm_combine
    return (run(*arguments, preferred_element_type=jnp.float32, **GIVEN),)


PROGRAMS = {
    "exchange": exchange,
    "dispatch alone": dispatch_alone,
    "fp8 wire": quantized,
    "dispatch + GEMM": dispatch_gemm,
    "dispatch + GEMM in Gluon": dispatch_gemm_in_gluon,
    "GEMM + combine, scatter": gemm_combine("scatter"),
    "GEMM + combine, serial": gemm_combine("serial"),
    "layer, gradients": layer_gradients,
    "low-latency dispatch": low_latency_dispatch,
    "low-latency round trip": low_latency_round_trip,
    "low-latency GEMM + combine": low_latency_gemm_combine,
}


def inputs(rng, hidden=H):
    x = rng.normal(size=(W, T, hidden)).astype(np.float32)
    ids = rng.integers(0, E, size=(W, T, K), dtype=np.int32)
    w = integers(rng, W, E // W, hidden, F, dtype=BF16)
    return x, ids, w, integers(rng, W, W * T * K, F, dtype=BF16)


def is_poisoned(array):
    if np.issubdtype(array.dtype, np.integer):
        return bool((array == -1).all())
    return bool(np.isnan(array.astype(np.float32)).all())


def run(call, *args):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.block_until_ready(call(*args)))]


def started(name, mesh, rng):
    """Return a call of a program in a new context, its results, and the heap."""
    jax_ep.init(mesh, transport="shared_memory")
    args, fn = inputs(rng, 128 if name == "fp8 wire" else H), harness.compiled(PROGRAMS[name], mesh)
    return lambda: run(fn, *args), run(fn, *args), context.heap("test")


def leave_ones(patch):
    """Set the interpreter's fill byte to 1, so that unwritten results do not look poisoned."""
    launch = Pool.launch
    patch.setattr(Pool, "launch", lambda pool, x, **rest: launch(pool, dataclasses.replace(x, poison=1), **rest))


def identity(request):
    """Return the identity of the launch on the heap, or 0 without one."""
    heap = request.constants.get("HEAP")
    return 0 if heap is None else heap.launch_id


@pytest.mark.parametrize("name", PROGRAMS)
def test_failed_launch_missing_poisons_results(monkeypatch, mesh, rng, name):
    call, right, heap = started(name, mesh, rng)
    assert not any(is_poisoned(leaf) for leaf in right)
    for rank in range(W):  # Each counts its peer differently, so neither sees the epoch that it waits for.
        for words in all_control_words(heap, rank):
            words[EPOCHS : EPOCHS + 2 * len(jax.devices())] += 2 * rank
    shorten_waits(heap)
    leave_ones(monkeypatch)
    for leaf in call():
        assert is_poisoned(leaf), (name, leaf)
    story = heap.failure()
    assert story is not None and "rank 0" in story and "rank 1" in story
    with pytest.raises(Exception, match="timed out"):
        call()


def test_failed_launch_other_mesh_poisons_results(monkeypatch, rng):
    leave_ones(monkeypatch)
    monkeypatch.setattr("jax_ep.interpreter.pool.State", SimpleNamespace(WRONG_MESH=None))  # As GPUs, do not check.
    devices = jax.devices()[:W]
    jax_ep.init(Mesh(np.array(devices), (harness.EXPERT,)), transport="shared_memory")
    other = Mesh(np.array(devices[::-1]), (harness.EXPERT,))
    call = harness.compiled(dispatch_alone, other)
    for leaf in run(call, *inputs(rng)):
        assert is_poisoned(leaf)
    with pytest.raises(Exception, match="is another device in dispatch"):
        run(call, *inputs(rng))


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("dispatch alone", "dispatch"),
        ("exchange", "combine"),
        ("dispatch + GEMM", "dispatch_grouped_gemm"),
        ("GEMM + combine, scatter", "grouped_gemm_combine"),
        ("low-latency dispatch", "low_latency_dispatch"),
        ("low-latency round trip", "low_latency_combine"),
        ("low-latency GEMM + combine", "low_latency_gemm_combine"),
    ],
)
def test_failed_launch_timeout_names_operation(monkeypatch, mesh, rng, name, operation):
    call, _, heap = started(name, mesh, rng)
    launch = Pool.launch

    def launch_out_of_step(pool, request, *, worker, **rest):
        if worker == 1 and identity(request) & 0xFF == ffi.Operation[operation.upper()]:
            for words in all_control_words(heap, 1):
                words[EPOCHS : EPOCHS + 2 * len(jax.devices())] += 2
        return launch(pool, request, worker=worker, **rest)

    monkeypatch.setattr(Pool, "launch", launch_out_of_step)
    shorten_waits(heap)
    call()
    story = heap.failure()
    assert story is not None and "timed out" in story and f" in {operation} " in story


def test_launch_identity_operation(monkeypatch, mesh, rng):
    """Every launch on the heap has an operation, and every operation has a launch."""
    jax_ep.init(mesh, transport="shared_memory")
    found, launch_identity = set(), launch.launch_identity

    def record(kernel, arrays, constants):
        found.add((kernel.name, ffi.Operation(kernel.operation).name.lower()))
        return launch_identity(kernel, arrays, constants)

    monkeypatch.setattr(launch, "launch_identity", record)
    for program in PROGRAMS.values():
        jax.eval_shape(harness.per_rank(program, mesh), *inputs(rng, 128))
    names = ["dispatch", "combine", "low_latency_dispatch", "low_latency_combine", "low_latency_gemm_combine"]
    of_parts = {
        "plan": "dispatch",
        "dispatch_gemm": "dispatch_grouped_gemm",
        "dispatch_gemm16": "dispatch_grouped_gemm",
        "gemm_combine": "grouped_gemm_combine",
    }
    assert found == {*((name, name) for name in names), *of_parts.items()}
    assert {operation for _, operation in found} == {x.name.lower() for x in ffi.Operation if x}


@pytest.mark.parametrize(
    ("name", "operation", "other"),
    [
        ("dispatch alone", "dispatch", ffi.Operation.COMBINE),
        ("exchange", "combine", None),
        ("dispatch + GEMM", "dispatch_grouped_gemm", None),
        ("GEMM + combine, scatter", "grouped_gemm_combine", ffi.Operation.COMBINE),
        ("low-latency dispatch", "low_latency_dispatch", None),
        ("low-latency round trip", "low_latency_combine", ffi.Operation.LOW_LATENCY_DISPATCH),
        ("low-latency GEMM + combine", "low_latency_gemm_combine", None),
    ],
)
def test_failed_launch_mismatch_sends_nothing(monkeypatch, mesh, rng, name, operation, other):
    """For example with a `lax.cond` that differs between ranks, one rank's data would be taken for another's."""
    call, _, heap = started(name, mesh, rng)
    launch = Pool.launch

    def launch_something_else(pool, request, *, worker, **rest):
        found = identity(request)
        if worker == 1 and found & 0xFF == ffi.Operation[operation.upper()]:
            changed = found ^ 256 if other is None else found >> 8 << 8 | other
            other_launch = dataclasses.replace(request.constants["HEAP"], launch_id=changed)
            request = dataclasses.replace(request, constants={**request.constants, "HEAP": other_launch})
        return launch(pool, request, worker=worker, **rest)

    monkeypatch.setattr(Pool, "launch", launch_something_else)
    shorten_waits(heap)
    assert is_poisoned(call()[2 if name == "exchange" else 0])
    story = heap.failure()
    assert story is not None and "met another launch in" in story
    with pytest.raises(Exception, match="met another launch"):
        call()
    names = {operation, other.name.lower()} if other else {operation}
    assert any(f"in {one} " in story for one in names)
    assert ("launched other sizes" if other is None else " launched ") in story


def test_launch_identity(mesh):
    """Sizes, dtypes and kernels distinguish launches; equal ones are identical."""
    body, operation = dispatch_kernels.dispatch, ffi.Operation.DISPATCH
    kernel, x = Kernel(body, operation), jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
    sizes = {"T": 4, "H": 8}
    one = launch_identity(kernel, (x,), sizes)
    assert one == launch_identity(kernel, (x,), dict(reversed(sizes.items())))
    assert 0 < one < 2**31 and one & 0xFF == ffi.Operation.DISPATCH
    others = [
        launch_identity(kernel, (x,), sizes | {"T": 5}),
        launch_identity(kernel, (jax.ShapeDtypeStruct((4, 8), jnp.float16),), sizes),
        launch_identity(Kernel(combine_kernels.combine, operation), (x,), sizes),
        launch_identity(Kernel(body, ffi.Operation.COMBINE), (x,), sizes),
    ]
    assert len({one, *others}) == 5


@pytest.mark.parametrize("name", ["exchange", "low-latency round trip", "GEMM + combine, scatter"])
def test_launch_epoch_wraps_around(mesh, rng, name):
    call, want, heap = started(name, mesh, rng)
    for start in (2**31 - 3, -3):  # The sign changes, and numbers wrap around.
        for rank in range(W):
            for words in all_control_words(heap, rank):
                words[EPOCHS : EPOCHS + 2 * len(jax.devices())] = start
        for _ in range(6):
            for leaf, expected in zip(call(), want, strict=True):
                np.testing.assert_array_equal(leaf, expected)
