"""Exchanges in two launches: which launches there are, ranks that run ahead, finishes that never come, and failures."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from test_interpreter_failures import until

import harness
import jax_ep
from cases import BF16, Shape
from jax_ep import context
from jax_ep.interpreter import activity
from jax_ep.megakernels import low_latency, low_latency_parts, masked
from jax_ep.ops import registry
from jax_ep.types import Layout
from layers import Layer

SHAPE = Shape(num_tokens=7, top_k=3, num_experts=8, hidden=128, intermediate=128)
KERNELS = [
    "low_latency_dispatch_start",
    "low_latency_dispatch_start",
    "low_latency_dispatch_finish",
    "low_latency_combine_start",
    "low_latency_dispatch_finish",
    "low_latency_combine_start",
    "low_latency_combine_finish",
]


@pytest.fixture
def mesh(two_ranks: Mesh) -> Mesh:
    return two_ranks


def moe(num_micro_batches: int, num_layers: int = 1, num_experts: int = 8) -> Any:
    def fn(x, ids, weights, w_gate_up, w_down):
        matrices = w_gate_up.swapaxes(1, 2), w_down.swapaxes(1, 2)
        options = {"num_experts": num_experts, "num_micro_batches": num_micro_batches, "implementation": "triton"}
        for _ in range(num_layers):
            x = x + 0.1 * jax_ep.low_latency_moe(x, ids, weights, *matrices, **options)
        return x

    return fn


def layer(rng: np.random.Generator, num_ranks: int = 2, shape: Shape = SHAPE, routing: str = "duplicates") -> Layer:
    return Layer(rng, routing, num_ranks, shape, BF16)


class Launches:
    """What workers launch, by name, and what happens before one of them; None ends the order that the pool gives."""

    def __init__(self, patch: pytest.MonkeyPatch, before: Callable[[int, int], None] | None = None) -> None:
        self.pool = context.heap("test")._memory.pool
        self.names: dict[int, list[str]] = {0: [], 1: []}
        self.ended = {0: 0, 1: 0}
        self._before = before
        for index in range(2):
            worker = self.pool._workers[index]
            patch.setattr(worker, "run", self._recorded(worker.run, index))

    def _recorded(self, run: Callable[..., Any], index: int) -> Callable[..., Any]:
        def recorded(launch: Any, *args: Any) -> Any:
            if launch.function.startswith("low_latency"):
                self.names[index].append(launch.function)
                if self._before is not None:
                    self._before(index, len(self.names[index]) - 1)
            result = run(launch, *args)
            self.ended[index] += launch.function.startswith("low_latency")
            return result

        return recorded

    def state(self) -> int:
        return int(self.pool._activity[0][activity.STATE])


def unordered(patch: pytest.MonkeyPatch) -> None:
    """Each worker launches when its own program comes to it, as GPUs do: ranks may be far apart."""
    pool = context.heap("test")._memory.pool
    launch = pool.launch

    def alone(what: Any, *, worker: int, group_size: int, site: object) -> Any:
        return launch(what, worker=worker, group_size=1, site=(site, worker))

    patch.setattr(pool, "launch", alone)


@pytest.mark.parametrize("comparisons", [0, 1 << 20], ids=["many tokens", "few tokens"])
@pytest.mark.parametrize("programs", [1, 2, 5])
@pytest.mark.slow(unless={"programs": [2], "comparisons": [0]})
def test_the_bits_of_one_batch_in_this_order(mesh, rng, monkeypatch, programs, comparisons):
    monkeypatch.setattr(low_latency, "_MOST_COMPARISONS", comparisons)
    monkeypatch.setattr(low_latency, "_MOST_ROWS", 1 << 20)
    for module in (low_latency, low_latency_parts, masked):
        monkeypatch.setattr(module, "num_programs", lambda tasks, each=1: programs)
    inputs = layer(rng)
    want = harness.run(moe(1), mesh, *inputs.args)
    call = harness.compiled(moe(2), mesh)
    call(*inputs.args)
    launches = Launches(monkeypatch)
    np.testing.assert_array_equal(call(*inputs.args), want)
    assert launches.names == {0: KERNELS, 1: KERNELS}


@pytest.mark.slow
def test_other_groups_sizes_and_kernels_in_between(mesh, rng):
    jax_ep.finalize()
    jax_ep.init(transport="shared_memory")
    others = Mesh(np.array(jax.devices())[[1, 2]], (harness.EXPERT,))
    four = harness.make_mesh((4,), (harness.EXPERT,))
    large = Shape(num_tokens=18, top_k=2, num_experts=8, hidden=256, intermediate=128)
    calls = [
        (m, s, n, harness.compiled(moe(n), m)) for m in (mesh, others, four) for s in (SHAPE, large) for n in (1, 2)
    ]
    for index in rng.permutation(2 * len(calls)):
        where, shape, _, call = calls[index % len(calls)]
        inputs = layer(rng, where.size, shape)
        want = inputs.x.astype(np.float64) + 0.1 * inputs.oracle().forward()
        got = call(*inputs.args).astype(np.float64)
        assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)


@pytest.mark.parametrize("stops", ["every launch", "some"])
@pytest.mark.slow
def test_a_rank_runs_ahead_as_far_as_it_can(mesh, rng, monkeypatch, stops):
    """The other one is stopped until it waits, so that it has sent all that it may: no bit is overwritten too early."""
    num_layers = 3
    inputs, call = layer(rng), harness.compiled(moe(2, num_layers), mesh)
    want = call(*inputs.args)
    total = num_layers * len(KERNELS)
    chosen = (
        set(range(total)) if stops == "every launch" else set(rng.choice(total, total // 3, replace=False).tolist())
    )
    ahead = []

    def before(index: int, number: int) -> None:
        if index == 1 and number in chosen:
            pid = launches.pool._workers[1].process.pid

            def resume() -> None:
                until(lambda: launches.state() == activity.WAITING or launches.ended[0] == total)
                ahead.append(launches.ended[0] - number)
                os.kill(pid, signal.SIGCONT)

            os.kill(pid, signal.SIGSTOP)
            threading.Thread(target=resume).start()

    unordered(monkeypatch)
    launches = Launches(monkeypatch, before)
    np.testing.assert_array_equal(call(*inputs.args), want)
    assert len(ahead) == len(chosen)
    # Both starts, of which no one waits; the first finish waits for a peer that has not started.
    assert max(ahead) >= 2


def starts(number: int, finishes: int = 0) -> Any:
    """Dispatches that are started, one after another, and of which the last or the first are finished, or none."""

    def fn(x, ids):
        options = registry.options("low_latency_moe", harness.EXPERT, "triton")
        layout = Layout(2, SHAPE.num_experts, SHAPE.num_tokens, SHAPE.top_k, 0, axis=(harness.EXPERT,))
        sent: list[Any] = []
        for _ in range(number):
            after = sent[-1] if sent else None
            whole = slice(0, SHAPE.num_tokens)
            sent.append(low_latency_parts.start_dispatch(options, x, ids, None, layout, None, whole, after))
        if finishes:
            return low_latency_parts.finish_dispatch(sent[-finishes], sent[-1])[0].astype(jnp.float32)
        return sent[-1].arrays.exchange_ptr

    return fn


@pytest.mark.parametrize("number", [1, 2, 7])
@pytest.mark.slow(unless={"number": [7]})
def test_finishes_that_never_come_harm_nobody(mesh, rng, monkeypatch, number):
    """A rank that has gone on to starts alone may not write what the other one has not read yet."""
    inputs = layer(rng)

    def layer_and_starts(x, ids, *rest):
        y = moe(2)(x, ids, *rest)
        return y, starts(number)(y, ids)

    call, alone = harness.compiled(layer_and_starts, mesh), harness.compiled(moe(2), mesh)
    want, begun = call(*inputs.args)
    np.testing.assert_array_equal(alone(*inputs.args), want)

    def before(index: int, launch: int) -> None:
        if index == 1 and launches.names[1][launch] == KERNELS[-1]:
            pid = launches.pool._workers[1].process.pid

            def resume() -> None:
                until(lambda: launches.state() == activity.WAITING or launches.ended[0] == len(KERNELS) + number)
                os.kill(pid, signal.SIGCONT)

            os.kill(pid, signal.SIGSTOP)
            threading.Thread(target=resume).start()

    unordered(monkeypatch)
    launches = Launches(monkeypatch, before)
    got, now = call(*inputs.args)
    np.testing.assert_array_equal(got, want)
    assert (now != begun).any()
    monkeypatch.undo()
    np.testing.assert_array_equal(alone(*inputs.args), want)
    assert context.heap("test").failure() is None


def counted(tokens: Any, sizes: Any) -> Any:
    """Rows of experts, zero past their numbers."""
    return jnp.where((jnp.arange(tokens.shape[1])[None, :] < sizes[:, None])[..., None], tokens, 0)


@pytest.mark.slow
def test_a_layer_between_the_start_of_an_exchange_and_its_finish(mesh, rng):
    """As of calls that do not depend on each other, whose launches XLA may mix: each exchange keeps its lane."""
    inputs = layer(rng)

    def fn(x, ids, *rest):
        options = registry.options("low_latency_moe", harness.EXPERT, "triton")
        layout = Layout(2, SHAPE.num_experts, SHAPE.num_tokens, SHAPE.top_k, 0, axis=(harness.EXPERT,))
        sent = low_latency_parts.start_dispatch(options, x, ids, None, layout, None, slice(0, SHAPE.num_tokens), None)
        never = (sent.arrays.exchange_ptr[0, 0] == -12345).astype(x.dtype)
        y = moe(2, 2)(x + never, ids, *rest)
        never = (y[0, 0] == 12345.678).astype(jnp.int32)
        held = sent._replace(arrays=sent.arrays._replace(exchange_ptr=sent.arrays.exchange_ptr + never))
        tokens, _, sizes, _ = low_latency_parts.finish_dispatch(held, held)
        return y, counted(tokens, sizes)

    def alone(x, ids):
        sizes = {"num_experts": SHAPE.num_experts, "max_tokens_per_rank": SHAPE.num_tokens, "quantize": False}
        d = jax_ep.low_latency_dispatch(x, ids, **sizes, implementation="triton")
        return counted(d.tokens, d.group_sizes)

    call = harness.compiled(fn, mesh)
    want = harness.run(moe(2, 2), mesh, *inputs.args), harness.run(alone, mesh, *inputs.args[:2])
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, tuple(call(*inputs.args)), want)


@pytest.mark.slow
def test_calls_that_do_not_depend_on_each_other(mesh, rng):
    first, second = layer(rng), layer(rng, routing="uniform")

    def both(*args):
        return moe(2)(*args[:5]), moe(2)(*args[5:])

    call, one = harness.compiled(both, mesh), harness.compiled(moe(2), mesh)
    want = [one(*inputs.args) for inputs in (first, second)]
    for _ in range(10):
        for got, exact in zip(call(*first.args, *second.args), want, strict=True):
            np.testing.assert_array_equal(got, exact)


def test_a_finish_that_comes_too_late_says_so(mesh, rng, after_failures):
    """Of the last four starts each may be finished; the one before has lost its lane."""
    inputs = layer(rng)
    arguments = inputs.x, inputs.topk_idx
    heap = context.heap("test")
    last = harness.run(starts(4, 1), mesh, *arguments)
    real = ~np.isnan(last)
    np.testing.assert_array_equal(harness.run(starts(4, 4), mesh, *arguments)[real], last[real])
    with contextlib.suppress(jax.errors.JaxRuntimeError, ValueError):  # where a check came after the failure
        assert np.isnan(harness.run(starts(5, 5), mesh, *arguments)).all()
    story = heap.failure()
    assert story is not None
    assert re.search(r"rank \d was too late to finish exchange 3 in low_latency_dispatch with rank 0", story), story
    assert "it had started exchange 4 before" in story and "num_micro_batches=2" in story


MISSING = {
    # The other rank believes that a lane is taken, and sends in the next one.
    "finish": (5, r"rank \d (timed out after 1 s|met another launch) in low_latency_dispatch.*rank \d"),
    # It waits to be allowed to send in a lane, for an exchange that there was not.
    "start": (1, r"rank \d timed out after 1 s in low_latency_(dispatch|combine).*waiting for rank \d"),
}


@pytest.mark.parametrize("where", MISSING)
@pytest.mark.slow
def test_a_peer_that_takes_part_in_other_exchanges_is_named(where, two_impatient_ranks, rng, after_failures, caplog):
    inputs, call = layer(rng), harness.compiled(moe(2), two_impatient_ranks)
    call(*inputs.args)
    heap = context.heap("test")
    words = harness.words_of(heap, heap.buffers_of(8), 1)
    words[64 + MISSING[where][0] * heap.layout.num_devices] += 1
    with contextlib.suppress(jax.errors.JaxRuntimeError, ValueError):  # where a check came after the failure
        assert np.isnan(call(*inputs.args).astype(np.float32)).any()
    story = heap.failure()
    assert story is not None and re.search(MISSING[where][1], story), story
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"refuses work after a failure"):
        context.heap("test")


@pytest.mark.slow
def test_a_dead_peer_between_start_and_finish_is_named(mesh, rng, monkeypatch, after_failures):
    inputs, call = layer(rng), harness.compiled(moe(2), mesh)
    call(*inputs.args)

    def before(index: int, number: int) -> None:
        if index == 1 and KERNELS[number] == "low_latency_dispatch_finish":
            os.kill(launches.pool._workers[1].process.pid, signal.SIGKILL)

    launches = Launches(monkeypatch, before)
    with pytest.raises(Exception, match=r"died with exit code -9|stopped"):
        call(*inputs.args)
    assert re.match(r"kernel low_latency_dispatch_finish, worker 1 \(process \d+\) died", str(launches.pool.close()))


@pytest.mark.slow
def test_programs_compiled_before_the_buffers_grew(mesh, rng):
    """Also where they grow between the start of an exchange and its finish, as for rows that are larger than tokens."""
    inputs, call = layer(rng), harness.compiled(moe(2), mesh)
    want = call(*inputs.args)
    before = context.heap("test").buffers_of(8)
    large = Shape(num_tokens=120, top_k=8, num_experts=8, hidden=1024, intermediate=128)
    wide = layer(rng, shape=large, routing="uniform")
    got = harness.run(moe(2), mesh, *wide.args).astype(np.float64)
    exact = wide.x.astype(np.float64) + 0.1 * wide.oracle().forward()
    assert np.linalg.norm(got - exact) < 0.01 * np.linalg.norm(exact)
    assert context.heap("test").buffers_of(8).id > before.id
    np.testing.assert_array_equal(call(*inputs.args), want)
