"""The expert layer in all its forms: moe, its two fused halves, and the single-device fused_moe with its sort."""

import functools

import jax
import numpy as np
import pytest

import jax_ep
import oracle
from cases import BASE, BF16, F16, F32, FP8_WIRE, SHAPES, Shape, assert_close, assert_same_bits
from harness import compiled, in_turn, run
from layers import Layer
from routings import FEW_ROUTINGS, ROUTINGS

VARIANTS = [(activation, gated) for activation in ("silu", "gelu", "relu") for gated in (True, False)]


def moe(shape, implementation, **options):
    return functools.partial(jax_ep.moe, num_experts=shape.num_experts, implementation=implementation, **options)


def test_moe_routings(implementation, every_mesh, rng, subtests):
    call = compiled(moe(BASE, implementation), every_mesh)
    for routing in ROUTINGS:
        with subtests.test(routing):
            layer = Layer(rng, routing, every_mesh.size, BASE)
            assert_close(call(*layer.args), layer.oracle().forward(), "moe")


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.slow(unless={"name": ["prime_tokens", "one_token"]})
def test_moe_shapes(implementation, name, expert_mesh, rng):
    num_ranks, shape = SHAPES[name]
    layer = Layer(rng, "duplicates", num_ranks, shape)
    got = run(moe(shape, implementation), expert_mesh(num_ranks), *layer.args)
    assert_close(got, layer.oracle().forward(), "moe")


def test_moe_activations(implementation, mesh, rng, subtests):
    layers = {gated: Layer(rng, "uniform", mesh.size, BASE, gated=gated) for gated in (True, False)}

    def fn(gated_args, plain_args):
        layers = [
            (moe(BASE, implementation, experts=jax_ep.Experts(a, gated=g)), gated_args if g else plain_args)
            for a, g in VARIANTS
        ]
        return in_turn(layers)

    got = run(fn, mesh, layers[True].args, layers[False].args)
    for out, (activation, gated) in zip(got, VARIANTS, strict=True):
        with subtests.test(f"{activation}, gated {gated}"):
            assert_close(out, layers[gated].oracle(activation).forward(), "moe")


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_moe_dtypes(implementation, dtype, expert_mesh, rng):
    layer = Layer(rng, "uniform", 2, BASE, dtype)
    got = run(moe(BASE, implementation), expert_mesh(2), *layer.args)
    assert got.dtype == dtype
    assert_close(got, layer.oracle().forward(), "moe")


@pytest.mark.parametrize("capacity", [3, 16])
@pytest.mark.slow(unless={"capacity": [3]})
def test_moe_capacity(implementation, capacity, expert_mesh, rng, subtests):
    """Dropped rows are left out of the layer; the others do not change."""
    call = compiled(moe(BASE, implementation, capacity=capacity), expert_mesh(2))
    for routing in ("zipf", "one_hot_every_slot"):
        with subtests.test(routing):
            layer = Layer(rng, routing, 2, BASE)
            want = layer.oracle(capacity=capacity)
            assert want.lay.dropped.sum() > 0
            assert_close(call(*layer.args), want.forward(), "moe")


def test_moe_capacity_beyond_all_rows(implementation, expert_mesh, rng):
    layer = Layer(rng, "uniform", 2, BASE)
    got, want = (
        run(moe(BASE, implementation, capacity=rows), expert_mesh(2), *layer.args) for rows in (2**31 - 1, None)
    )
    assert_same_bits(got, want)


def test_moe_fp8_wire(implementation, expert_mesh, rng):
    """The result equals the layer of the quantized tokens, up to the rounding in combine."""
    shape = Shape(hidden=128)
    layer = Layer(rng, "uniform", 2, shape)
    got = run(moe(shape, implementation, schedule=FP8_WIRE), expert_mesh(2), *layer.args)
    exact = layer.oracle().forward()
    layer.x = oracle.to_wire(layer.x, oracle.FP8)
    want = layer.oracle().forward()
    assert np.linalg.norm(got - exact) > 1e-3 * np.linalg.norm(exact), "the wire lost nothing: it was not FP8"
    # Partial sums are off by 2**-4 at most, by a third of that on average.
    assert np.linalg.norm(got - want) < 2**-4 * np.linalg.norm(want)


def test_fused_moe(implementation, rng, subtests):
    """One device, no mesh: every activation, several routings, three dtypes."""

    @jax.jit
    def fn(gated_args, plain_args):
        return [
            jax_ep.fused_moe(
                *(gated_args if g else plain_args), experts=jax_ep.Experts(a, gated=g), implementation=implementation
            )
            for a, g in VARIANTS
        ]

    def one_device(layer):
        return [layer.x[0], layer.topk_idx[0], layer.topk_weights[0], layer.w_gate_up, layer.w_down]

    for dtype, routings in {F32: ROUTINGS, BF16: FEW_ROUTINGS}.items():
        for routing in routings:
            layers = {g: Layer(rng, routing, 1, BASE, dtype, gated=g) for g in (True, False)}
            got = fn(one_device(layers[True]), one_device(layers[False]))
            for out, (activation, gated) in zip(got, VARIANTS, strict=True):
                with subtests.test(f"{dtype} {routing} {activation} gated {gated}"):
                    assert out.dtype == dtype
                    assert_close(np.asarray(out), layers[gated].oracle(activation).forward()[0], "fused_moe")
