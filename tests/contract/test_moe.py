"""The expert layer in all its forms, alone and with its gradients: moe, and fused_moe of one device."""

import functools

import jax
import numpy as np
import pytest

import jax_ep
import oracle
from cases import BASE, BF16, F16, F32, FP8_WIRE, SHAPES, Shape, assert_close, assert_same_bits, reals, relative_error
from harness import compiled, run, to_numpy
from layers import NAMES, Layer, check_gradients, with_gradients
from routings import FEW_ROUTINGS, ROUTINGS

VARIANTS = [(activation, gated) for activation in ("silu", "gelu", "relu") for gated in (True, False)]


def moe(shape, implementation, **options):
    return functools.partial(jax_ep.moe, num_experts=shape.num_experts, implementation=implementation, **options)


def both(call, mesh):
    """Compile a layer alone, and with its gradients: two programs; the first keeps nothing."""
    return compiled(call, mesh), compiled(with_gradients(call), mesh)


def check(programs, layer, rng, activation="silu", tolerance=None, **layout):
    """Compare the results of both programs with the oracle; `tolerance` is that of the gradients."""
    alone, differentiated = programs
    dtype = layer.x.dtype
    got = alone(*layer.args)
    assert got.dtype == dtype
    assert_close(got, layer.oracle(activation, **layout).forward(), "moe")
    d_out = reals(rng, *layer.x.shape, dtype=dtype)
    got = differentiated(*layer.args, d_out)
    assert [array.dtype for array in got] == [dtype, dtype, F32, dtype, dtype]
    check_gradients(got, layer, d_out, activation, tolerance, **layout)


def test_moe_routings(implementation, every_mesh, rng, subtests):
    programs = both(moe(BASE, implementation), every_mesh)
    for routing in ROUTINGS:
        with subtests.test(routing):
            check(programs, Layer(rng, routing, every_mesh.size, BASE), rng)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.slow(unless={"name": ["prime_tokens", "one_token"]})
def test_moe_shapes(implementation, name, expert_mesh, rng):
    num_ranks, shape = SHAPES[name]
    check(both(moe(shape, implementation), expert_mesh(num_ranks)), Layer(rng, "duplicates", num_ranks, shape), rng)


@pytest.mark.parametrize(("activation", "gated"), VARIANTS)
@pytest.mark.slow(unless={"gated": [True]})
def test_moe_activations(implementation, activation, gated, expert_mesh, rng):
    call = moe(BASE, implementation, experts=jax_ep.Experts(activation, gated=gated))
    # The slope of gelu at a negative number is a difference of nearly equal numbers.
    tolerance = 5e-5 if activation == "gelu" else None
    check(both(call, expert_mesh(2)), Layer(rng, "duplicates", 2, BASE, gated=gated), rng, activation, tolerance)


# Gradients are three GEMMs deep, each with its own roundings, so more than one GEMM's tolerance.
@pytest.mark.parametrize(("dtype", "tolerance"), [(BF16, 4e-2), (F16, 6e-3)], ids=["bfloat16", "float16"])
def test_moe_dtypes(implementation, dtype, tolerance, expert_mesh, rng):
    layer = Layer(rng, "uniform", 2, BASE, dtype)
    check(both(moe(BASE, implementation), expert_mesh(2)), layer, rng, tolerance=tolerance)


@pytest.mark.parametrize("capacity", [3, 10, 16])
@pytest.mark.slow(unless={"capacity": [10]})
def test_moe_capacity(implementation, capacity, expert_mesh, rng, subtests):
    """Dropped rows neither contribute to nor receive gradients; the others do not change."""
    programs = both(moe(BASE, implementation, capacity=capacity), expert_mesh(2))
    for routing in ("zipf", "one_hot_every_slot"):
        with subtests.test(routing):
            layer = Layer(rng, routing, 2, BASE)
            assert layer.oracle(capacity=capacity).lay.dropped.sum() > 0
            check(programs, layer, rng, capacity=capacity)


def test_moe_capacity_beyond_all_rows(implementation, expert_mesh, rng):
    layer = Layer(rng, "uniform", 2, BASE)
    got, want = (
        run(moe(BASE, implementation, capacity=rows), expert_mesh(2), *layer.args) for rows in (2**31 - 1, None)
    )
    assert_same_bits(got, want)


def test_moe_fp8_wire(implementation, expert_mesh, rng):
    """Results equal those of quantized tokens and cotangents, up to the rounding in combine."""
    shape = Shape(hidden=128)
    layer = Layer(rng, "uniform", 2, shape)
    d_out = reals(rng, *layer.x.shape)
    alone, differentiated = both(moe(shape, implementation, schedule=FP8_WIRE), expert_mesh(2))
    got = alone(*layer.args), *differentiated(*layer.args, d_out)
    of = layer.oracle()
    exact = of.forward(), of.forward(), *of.gradients(d_out)
    layer.x = oracle.to_wire(layer.x, oracle.FP8)
    of = layer.oracle()
    want = of.forward(), of.forward(), *of.gradients(oracle.to_wire(d_out, oracle.FP8))
    for name, g, e, w in zip(("y", *NAMES), got, exact, want, strict=True):
        assert relative_error(g, e) > 1e-3, f"{name}: nothing was quantized"
        if name in ("y", "dx"):  # These are sent: partial sums are off by 2**-4 at most, by a third on average.
            assert relative_error(g, w) < 2**-4, name
        else:  # Weight gradients are never sent: with the quantized operands they are exact.
            assert_close(g.reshape(w.shape), w, name, tolerance=5e-5)


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


def test_fused_moe_gradients(implementation, rng):
    """The single-device layer has the same gradients."""
    layer = Layer(rng, "some_without_expert", 1, BASE)
    d_out = reals(rng, *layer.x.shape)
    fn = with_gradients(functools.partial(jax_ep.fused_moe, implementation=implementation))
    got = to_numpy(jax.jit(fn)(*(a[0] for a in layer.args), d_out[0]))
    check_gradients(got, layer, d_out)
