"""`Schedule(reproducible=True)`: neither ranks, nor other tokens, nor balance change the bits of a token."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from cases import BF16, F32, FP8_WIRE, Shape, assert_same_bits, probabilities, reals
from harness import compiled, per_rank
from jax_ep.ops import balanced
from jax_ep.types import Schedule
from routings import ROUTINGS

NUM_RANKS = 2
BITS = Schedule(reproducible=True)
WIRES = {"plain_wire": BITS, "fp8_wire": replace(FP8_WIRE, reproducible=True)}
# On GPUs, enough rows for other tiles and modes than those of the smaller batch.
SIZES = (512, 2048, 768) if jax.default_backend() == "gpu" else (12, 128, 16)
SHAPE = Shape(SIZES[0], 5, 16, *SIZES[1:])
DTYPES = [BF16, pytest.param(F32, marks=pytest.mark.slow)]


class Layer(NamedTuple):
    """Arrays of all ranks: tokens `[N, H]`, ids and router weights `[N, K]`, expert weights, and a cotangent."""

    x: np.ndarray
    topk_idx: np.ndarray
    topk_weights: np.ndarray
    w_gate_up: np.ndarray
    w_down: np.ndarray
    d_out: np.ndarray

    def first_tokens(self, number):
        """Return the layer with the first tokens of each of `NUM_RANKS`."""
        tokens = {name: getattr(self, name) for name in ("x", "topk_idx", "topk_weights", "d_out")}
        return self._replace(**{name: first_tokens(a, number) for name, a in tokens.items()})


def first_tokens(a, number):
    return a.reshape(NUM_RANKS, -1, *a.shape[1:])[:, :number].reshape(-1, *a.shape[1:])


def make_layer(rng, routing, dtype, shape=SHAPE):
    """Make a layer; with "few_experts" those of one rank have all tokens, more than one pass places."""
    if routing == "few_experts":
        ids = rng.integers(shape.num_experts // 4, size=(NUM_RANKS, shape.num_tokens, shape.top_k)).astype(np.int32)
    else:
        ids = ROUTINGS[routing](rng, NUM_RANKS, shape)
    ids, (size, hidden) = ids.reshape(-1, shape.top_k), (shape.intermediate, shape.hidden)
    w_gate_up = reals(rng, shape.num_experts, hidden, 2 * size) / np.float32(hidden**0.5)
    w_down = reals(rng, shape.num_experts, size, hidden) / np.float32(size**0.5)
    x, d_out = (reals(rng, len(ids), hidden, dtype=dtype) for _ in range(2))
    return Layer(x, ids, probabilities(rng, *ids.shape), w_gate_up.astype(dtype), w_down.astype(dtype), d_out)


def results_of(implementation, mesh, balance=None, schedule=BITS, experts=None):
    """Return a function to the result with and without a gradient, the gradient of the tokens, and the passes."""

    def fn(x, topk_idx, topk_weights, w_gate_up, w_down, d_out):
        def layer(x):
            options = {"implementation": implementation, "balance": balance, "schedule": schedule, "experts": experts}
            if experts is not None:  # with biases
                options["biases"] = w_gate_up[:, 0], w_down[:, 0]
            with balanced.recording() as work:
                arrays = x, topk_idx, topk_weights, w_gate_up, w_down
                y = jax_ep.moe(*arrays, num_experts=SHAPE.num_experts, **options)
            return y, work[0]["passes"] if work else jnp.int32(1)

        alone, passes = layer(x)
        y, pull, _ = jax.vjp(layer, x + 0 * alone[:1], has_aux=True)  # sequentially
        return alone, y, *pull(d_out), passes

    run = compiled(fn, mesh)

    def call(layer):
        *found, passes = run(*(a.reshape(mesh.size, -1, *a.shape[1:]) for a in layer))
        names = "y without a gradient", "y", "dx"
        return {name: a.reshape(-1, a.shape[-1]) for name, a in zip(names, found, strict=True)}, int(passes.max())

    return call


def assert_same(got, want):
    for name, a in got.items():
        assert_same_bits(a, want[name], name)


@pytest.mark.slow
def test_reproducible_balance(implementation, expert_mesh, rng, subtests):
    mesh = expert_mesh(NUM_RANKS)
    plain, spread = (results_of(implementation, mesh, b) for b in (None, jax_ep.Balance(1.0, 1)))
    for routing, several in (("zipf", False), ("one_hot_every_slot", False), ("few_experts", True)):
        with subtests.test(routing):
            layer = make_layer(rng, routing, BF16)
            want, _ = plain(layer)
            got, passes = spread(layer)
            assert_same(got, want)
            assert passes > 1 or not several
            assert_same({"y": want["y"]}, {"y": want["y without a gradient"]})


@pytest.mark.slow
def test_reproducible_weights_on_the_input_with_biases(implementation, expert_mesh, rng):
    """The products with router weights and the sums with biases are in programs of different sizes."""
    experts, mesh = jax_ep.Experts(weight_on="input"), expert_mesh(NUM_RANKS)
    plain, spread = (results_of(implementation, mesh, b, experts=experts) for b in (None, jax_ep.Balance(1.25, 1)))
    layer = make_layer(rng, "zipf", F32)
    for number in (1, 3):
        assert_same(spread(layer.first_tokens(number))[0], plain(layer.first_tokens(number))[0])


@pytest.mark.parametrize(
    ("wire", "num_ranks", "dtype"),
    [
        ("plain_wire", 1, BF16),
        pytest.param("plain_wire", 8, BF16, marks=pytest.mark.slow),
        pytest.param("plain_wire", 4, F32, marks=pytest.mark.slow),
        pytest.param("fp8_wire", 4, BF16, marks=pytest.mark.slow),
        pytest.param("fp8_wire", 1, F32, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow_interpreted
def test_reproducible_ranks(
    implementation,
    wire,
    num_ranks,
    dtype,
    expert_mesh,
    rng,
    subtests,
):
    options = {"schedule": WIRES[wire]}
    call = results_of(implementation, expert_mesh(num_ranks), **options)
    expected = results_of(implementation, expert_mesh(NUM_RANKS), **options)
    for routing in ("zipf", "some_without_expert"):
        with subtests.test(routing):
            layer = make_layer(rng, routing, dtype)
            assert_same(call(layer)[0], expected(layer)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.slow_interpreted
def test_reproducible_other_tokens(implementation, dtype, expert_mesh, rng):
    """A token of each rank alone, and some of them, have the bits that they have among others."""
    layer = make_layer(rng, "zipf", dtype)
    call = results_of(implementation, expert_mesh(NUM_RANKS))
    want = call(layer)[0]
    for number in (1, 5):
        assert_same(call(layer.first_tokens(number))[0], {name: first_tokens(a, number) for name, a in want.items()})


@pytest.mark.slow
def test_reproducible_modes(implementation, expert_mesh, rng):
    """The cost model may choose any mode: kernels with and without an all-to-all compute the same bits."""
    layer, mesh = make_layer(rng, "zipf", BF16), expert_mesh(NUM_RANKS)
    modes = [replace(BITS, dispatch_mode=d, combine_mode=c) for d, c in (("fused", "scatter"), ("serial", "serial"))]
    assert_same(*(results_of(implementation, mesh, schedule=mode)(layer)[0] for mode in modes))


REJECTED = {
    "recipe": (jax_ep.moe, {"recipe": "fp8"}, "leave recipe None"),
    "single_launch": (jax_ep.moe, {"schedule": Schedule(reproducible=True, single_launch=True)}, "reproducible=True"),
    "pallas": (jax_ep.moe, {"implementation": "pallas"}, "`triton` supports"),
    "low_latency": (jax_ep.low_latency_moe, {}, "`moe` with weights .* runs without it"),
    "topology": (jax_ep.moe, {"axis_name": jax_ep.Topology("a", "b")}, r"pass the tuple \('a', 'b'\)"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_reproducible_unsupported(name, expert_mesh):
    function, options, remedy = REJECTED[name]
    call = partial(function, num_experts=2, **{"axis_name": (), "schedule": BITS} | options)
    ids = jnp.zeros((1, 4, 2), jnp.int32)
    arrays = jnp.ones((1, 4, 128), BF16), ids, jnp.ones(ids.shape), jnp.ones((1, 2, 128, 256), BF16)
    with pytest.raises(NotImplementedError, match=rf"{function.__name__}: .*{remedy}"):
        jax.eval_shape(per_rank(call, expert_mesh(1)), *arrays, jnp.ones((1, 2, 128, 128), BF16))


def test_reproducible_programs(implementation, expert_mesh, rng):
    """A layer with biases computes the same bits as `fused_moe` and as `moe`, also where XLA optimizes CPU programs."""
    on_gpu = jax.default_backend() == "gpu"
    shape, dtype = (SHAPE, BF16) if on_gpu else (Shape(10, 4, 8, 8, 16), F32)
    x, topk_idx, topk_weights, *weights, _ = make_layer(rng, "uniform", dtype, shape)
    biases = None, reals(rng, shape.num_experts, shape.hidden, dtype=dtype)
    options = {"biases": biases, "schedule": BITS, "implementation": implementation}

    def on_one_device(x):
        return jax_ep.fused_moe(x, topk_idx, topk_weights, *weights, **options)

    def on_mesh(x):
        return jax_ep.moe(x, topk_idx, topk_weights, *weights, num_experts=shape.num_experts, **options)

    flags = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    run = partial(jax.jit, compiler_options=None if on_gpu else flags)
    got = run(per_rank(on_mesh, expert_mesh(1)))(x[None])[0]
    assert_same_bits(np.asarray(got), np.asarray(run(on_one_device)(x)))
