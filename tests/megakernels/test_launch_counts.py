"""Launches of a program: their number, shared calls, and chosen GEMMs."""

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import jax_ep
from cases import BF16, Shape, assert_close
from harness import run
from jax_ep import tracing
from jax_ep.ffi import library
from jax_ep.megakernels import grouped_gemm
from jax_ep.types import Schedule
from layers import Layer, low_latency_round_trip

pytest.importorskip("triton")

W, T, K, E, H, INNER = 2, 6, 2, 4, 128, 128
OPTIONS = {"num_experts": E, "implementation": "triton"}


def round_trip(x, ids, weights, *_):
    sent = jax_ep.dispatch(x, ids, weights, **OPTIONS)
    return jax_ep.combine(sent.tokens * sent.weights[:, None].astype(x.dtype), sent.handle, implementation="triton")


def layer(**options):
    schedule = {name: options.pop(name) for name in ("dispatch_mode", "combine_mode", "wire_dtype")}
    return lambda *args: jax_ep.moe(*args, **OPTIONS, **options, schedule=Schedule(**schedule))


MODES = {"dispatch_mode": "fused", "combine_mode": "scatter", "wire_dtype": None}
SERIAL = {"dispatch_mode": "serial", "combine_mode": "serial", "wire_dtype": None}
FP8 = {"wire_dtype": jnp.float8_e4m3fn}
# Forward, and both passes: tokens are sent again for the gradient of the first weights.
PROGRAMS = {
    "dispatch, combine": (round_trip, {"dispatch": 1, "combine": 1}, {"dispatch": 2, "combine": 2}),
    "one launch": (
        layer(**MODES),
        {"dispatch_gemm": 1, "gemm_combine": 1},
        {"dispatch_gemm": 2, "gemm_combine": 2, "dispatch": 1},
    ),
    "two launches": (layer(**SERIAL), {"dispatch": 1, "combine": 1}, {"dispatch": 3, "combine": 2}),
    "fp8 wire": (layer(**SERIAL | FP8), {"dispatch": 1, "combine": 1}, {"dispatch": 3, "combine": 2}),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.slow(unless={"name": ["dispatch, combine"]})
def test_launch_counts_router_weights(name, two_ranks, rng):
    fn, forward, both = PROGRAMS[name]
    x, ids, *others = problem(rng)

    def both_passes(x, ids, *others):
        y, pull = jax.vjp(lambda x, *others: fn(x, ids, *others), x, *others)
        return y, pull(jnp.ones_like(y))

    for program, wanted in ((fn, forward), (both_passes, both)):
        counts = {kernel: W * count for kernel, count in ({"plan": 1} | wanted).items()}
        assert launches(program, two_ranks, x, ids, *others) == counts


def test_launch_counts_constant_group(two_ranks, rng):
    """Under `jax.checkpoint` all launches of a program name their ranks in one constant, so XLA merges their tables."""

    balanced = jax.checkpoint(partial(jax_ep.moe, **OPTIONS, balance=jax_ep.Balance()))

    def gradient(x, *others):
        return jax.grad(lambda x: jnp.sum(balanced(x, *others)))(x)

    text = jax.jit(harness.per_rank(gradient, two_ranks)).lower(*problem(rng)).as_text()
    assert len(re.findall(r"dense<\[\[0, 1\]\]> : tensor<1x2xi32>", text)) == 1


def test_launch_counts_frozen_weights(two_ranks, rng):
    """Tokens are not sent again for a gradient that is not needed."""
    x, ids, *others = problem(rng)

    def gradient(x, ids, *others):
        return jax.grad(lambda x: jnp.sum(layer(**MODES)(x, ids, *others).astype(jnp.float32)))(x)

    # The result is not needed, so only the backward pass combines.
    assert launches(gradient, two_ranks, x, ids, *others) == {"plan": W, "dispatch_gemm": 2 * W, "gemm_combine": W}


def problem(rng):
    """Return arguments of the layer on all ranks."""
    return Layer(rng, "uniform", W, Shape(T, K, E, H, INNER), BF16).args


def launches(program, mesh, *arguments):
    """Return the number of launches of each kernel that communicates."""
    with tracing.record() as recording:
        harness.run(program, mesh, *arguments)
    return Counter(launch.kernel for launch in recording.trace.launches.values())


LAYERS = 3


def unrolled(layer, x, *routing):
    for _ in range(LAYERS):
        x = layer(x, *routing)
    return x


def scanned(layer, x, *routing):
    return jax.lax.scan(lambda x, _: (layer(x, *routing), None), x, None, length=LAYERS)[0]


@pytest.mark.parametrize("layer", [low_latency_round_trip, round_trip])
@pytest.mark.parametrize("loop", [unrolled, scanned])
@pytest.mark.slow(unless={"loop": [scanned]})
def test_custom_calls_shared_per_program(layer, loop, two_ranks):
    """A check runs on the host: between two launches it would split their CUDA graph."""
    fn = jax.jit(harness.per_rank(lambda *arguments: loop(layer, *arguments), two_ranks))
    arguments = np.ones((2, 4, 64), np.float32), np.ones((2, 4, 2), np.int32), np.ones((2, 4, 2), np.float32)
    compiled = fn.lower(*map(jnp.asarray, arguments)).compile().as_text()
    # With an operand: calls without one fetch the device number for each launch of the interpreter.
    calls = re.findall(r'custom-call\([^)]+\), custom_call_target="(\w+)"', compiled)
    assert {name: calls.count(name) for name in (library.CHECK_STATUS, library.POINTER_TABLE)} == {
        library.CHECK_STATUS: 1,
        library.POINTER_TABLE: 1,
    }


@pytest.mark.parametrize("mode", ["serial", "fused"])
@pytest.mark.slow
def test_gemm_choice_activation_follows_gemm(mode, two_ranks, rng, monkeypatch):
    """If the GEMM is a separate launch without gradients."""
    launched, launch = [], grouped_gemm.gemm_activation

    def note(rows, *others, **options):
        launched.append(rows.shape)
        return launch(rows, *others, **options)

    monkeypatch.setattr(grouped_gemm, "gemm_activation", note)
    shape = Shape(num_tokens=13, top_k=2, num_experts=4, hidden=64, intermediate=64)
    layer = Layer(rng, "some_without_expert", 2, shape, BF16)
    schedule = Schedule(dispatch_mode=mode, combine_mode="scatter")

    def call(x, topk_idx, *others):
        return jax_ep.moe(x, topk_idx, *others, num_experts=4, schedule=schedule, implementation="triton")

    with jax_ep.tuning.override("grouped_gemm", gluon=True):
        assert_close(run(call, two_ranks, *layer.args), layer.oracle().forward(), "layer")
    assert bool(launched) == (mode == "serial")
