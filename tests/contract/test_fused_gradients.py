"""The weight gradient fused with communication, in implementations that support it."""

import functools

import jax
import numpy as np
import pytest

import facts_of
import jax_ep
import oracle
from cases import BF16, Shape, assert_close, assert_same_bits, reals
from harness import compiled, run
from jax_ep.types import Layout, Schedule
from layers import Layer, check_gradients, second_derivative, with_gradients

# Groups end within tiles, and T is not a multiple of a block.
SHAPE = Shape(num_tokens=13, top_k=2, num_experts=8, hidden=40, intermediate=24)
TOLERANCE = 4e-2  # Two GEMMs deep; each one rounds its inputs and outputs.


@pytest.fixture(autouse=True)
def needs_fused_products(implementation):
    if not facts_of.fuses(implementation, Layout(2, 8, 13, 2, 52), BF16, SHAPE.hidden, SHAPE.intermediate):
        pytest.skip(f"{implementation} fuses no products with exchanges")


def layer(implementation, shape=SHAPE, *, fuse=True, mode=None, **options):
    schedule = Schedule(fuse_weight_gradients=fuse, combine_mode=mode)
    common = {"num_experts": shape.num_experts, "implementation": implementation, "schedule": schedule}
    return functools.partial(jax_ep.moe, **common, **options)


def inputs(rng, routing, num_ranks, shape=SHAPE):
    """Return a layer and a cotangent of its result."""
    problem = Layer(rng, routing, num_ranks, shape, BF16)
    return problem, reals(rng, *problem.x.shape, dtype=BF16)


@pytest.mark.parametrize(("num_ranks", "mode"), [(2, "scatter"), (2, "serial"), (4, "serial")])
@pytest.mark.slow_interpreted(unless={"num_ranks": [2]})
def test_fused_gradients_layer(implementation, num_ranks, mode, expert_mesh, rng, subtests):
    """Results have the same bits in every run."""
    call = compiled(with_gradients(layer(implementation, mode=mode)), expert_mesh(num_ranks))
    for routing in ("uniform", "zipf", "one_hot", "empty_experts") if num_ranks == 2 else ("some_without_expert",):
        with subtests.test(routing):
            problem, d_out = inputs(rng, routing, num_ranks)
            got = call(*problem.args, d_out)
            check_gradients(got, problem, d_out, tolerance=TOLERANCE)
    for first, again in zip(got, call(*problem.args, d_out), strict=True):
        assert_same_bits(again, first)


@pytest.mark.parametrize("mode", ["scatter", "serial"])
def test_fused_gradients_capacity(implementation, mode, expert_mesh, rng):
    """Assignments without a row add nothing, whatever earlier calls left in the heap."""
    call = compiled(with_gradients(layer(implementation, capacity=16, mode=mode)), expert_mesh(2))
    for _ in range(2):
        problem, d_out = inputs(rng, "zipf", 2)
        check_gradients(call(*problem.args, d_out), problem, d_out, tolerance=TOLERANCE, capacity=16)


@pytest.mark.parametrize("mode", ["scatter", "serial"])
def test_fused_gradients_one_token(implementation, mode, expert_mesh, rng):
    shape = Shape(num_tokens=1, top_k=2, num_experts=4, hidden=16, intermediate=8)
    problem, d_out = inputs(rng, "uniform", 2, shape)
    got = run(with_gradients(layer(implementation, shape, mode=mode)), expert_mesh(2), *problem.args, d_out)
    check_gradients(got, problem, d_out, tolerance=TOLERANCE)


def test_fused_gradients_dispatch_grouped_gemm(implementation, expert_mesh, rng):
    """With padding between the groups, compare with the same gradients from separate launches."""
    x, topk_idx, topk_weights, w, _ = Layer(rng, "duplicates", 2, SHAPE, BF16).args
    rows = oracle.layout(topk_idx, SHAPE.num_experts, alignment=4)
    d_hidden = reals(rng, *rows.source.shape, w.shape[-1], dtype=BF16)
    d_hidden[rows.is_padding] = 0
    d_weights = reals(rng, *rows.source.shape)

    def fn(wanted, x, topk_idx, topk_weights, w, d_hidden, d_weights):
        def call(x, topk_weights, w):
            options = {"num_experts": SHAPE.num_experts, "implementation": implementation, "alignment": 4}
            options["schedule"] = Schedule(fuse_weight_gradients=wanted)
            d = jax_ep.dispatch_grouped_gemm(x, topk_idx, topk_weights, w, **options)
            return d.hidden, d.weights

        return jax.vjp(call, x, topk_weights, w)[1]((d_hidden, d_weights))

    args = x, topk_idx, topk_weights, w, d_hidden, d_weights
    got, wanted = (run(functools.partial(fn, one), expert_mesh(2), *args) for one in (True, False))
    for name, g, want in zip(("dx", "d_weights", "dw"), got, wanted, strict=True):
        assert_close(g, want.astype(np.float64), name)


def test_fused_gradients_scan_and_remat(implementation, expert_mesh, rng):
    """Gradients of two layers are those without scan and remat."""
    problem, d_out = inputs(rng, "uniform", 2)
    x, topk_idx, topk_weights, *matrices = problem.args
    layers = [np.stack([w, np.roll(w, 1, axis=1)], axis=1) for w in matrices]

    def fn(scanned, x, topk_idx, topk_weights, w_gate_up, w_down, d_out):
        def block(x, w):
            return x + layer(implementation)(x, topk_idx, topk_weights, *w), None

        def forward(x, *w):
            if scanned:
                return jax.lax.scan(jax.checkpoint(block), x, w)[0]
            for i in range(2):
                x = block(x, tuple(array[i] for array in w))[0]
            return x

        return jax.vjp(forward, x, w_gate_up, w_down)[1](d_out)

    args = x, topk_idx, topk_weights, *layers, d_out
    got, wanted = (run(functools.partial(fn, scanned), expert_mesh(2), *args) for scanned in (True, False))
    for name, g, w in zip(("dx", "d_gate_up", "d_down"), got, wanted, strict=True):
        assert_close(g, w.astype(np.float64), name)


def test_fused_gradients_second_derivative(implementation, expert_mesh, rng):
    """The backward pass can be differentiated; compare with the portable implementation in float32."""
    shape = Shape(num_tokens=9, top_k=2, num_experts=4, hidden=16, intermediate=8)
    args = Layer(rng, "uniform", 2, shape, BF16).args

    def fn(implementation, wanted, x, topk_idx, topk_weights, w_gate_up, w_down):
        call = layer(implementation, shape, fuse=wanted)
        return second_derivative(lambda x, w: call(x, topk_idx, topk_weights, w, w_down))(x, w_gate_up)

    got = run(functools.partial(fn, implementation, True), expert_mesh(2), *args)
    single = [a.astype(np.float32) if a.dtype == BF16 else a for a in args]
    wanted = run(functools.partial(fn, "xla", None), expert_mesh(2), *single)
    for name, g, w in zip(("x", "w_gate_up"), got, wanted, strict=True):
        assert_close(g, w, name, tolerance=0.1)
