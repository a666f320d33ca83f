"""Gradients: closed forms of the oracle in float32, finite differences in float64, FP8 on the wire in both passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
import oracle
from cases import BASE, BF16, F32, FP8_WIRE, Shape, assert_close, integers, probabilities, reals
from harness import check_directional_derivatives, compiled, per_rank, run, to_numpy
from layers import NAMES, Layer, check_gradients, check_routings, with_gradients
from routings import FEW_ROUTINGS, ROUTINGS

TINY = Shape(num_tokens=3, top_k=2, num_experts=4, hidden=3, intermediate=2)
VARIANTS = [(activation, gated) for activation in ("silu", "gelu", "relu") for gated in (True, False)]


def layer_arrays(rng, num_ranks, shape, dtype=F32, *, gated=True):
    """Draw x, topk_weights, and global weights [E, ...]."""
    x = reals(rng, num_ranks, shape.num_tokens, shape.hidden, dtype=dtype)
    weight_dtype = np.float64 if dtype == np.float64 else F32
    topk_weights = probabilities(rng, num_ranks, shape.num_tokens, shape.top_k, dtype=weight_dtype)
    size = shape.intermediate
    w_gate_up = reals(rng, shape.num_experts, shape.hidden, size * (2 if gated else 1), dtype=dtype)
    return x, topk_weights, w_gate_up, reals(rng, shape.num_experts, size, shape.hidden, dtype=dtype)


def split_experts(weights, num_ranks):
    return weights.reshape(num_ranks, -1, *weights.shape[1:])


def moe_gradients(shape, implementation, **options):
    call = functools.partial(jax_ep.moe, num_experts=shape.num_experts, implementation=implementation, **options)
    return with_gradients(call)


def test_moe_gradients_routings(implementation, every_mesh, rng, subtests):
    call = compiled(moe_gradients(BASE, implementation), every_mesh)
    check_routings(call, ROUTINGS, every_mesh, rng, subtests, BASE)


@pytest.mark.parametrize(("activation", "gated"), VARIANTS)
@pytest.mark.slow(unless={"gated": [True]})
def test_moe_gradients_activations(implementation, activation, gated, expert_mesh, rng):
    layer = Layer(rng, "duplicates", 2, BASE, gated=gated)
    d_out = reals(rng, *layer.x.shape)
    fn = moe_gradients(BASE, implementation, experts=jax_ep.Experts(activation, gated=gated))
    # The slope of gelu at a negative number is a difference of nearly equal numbers.
    tolerance = 5e-5 if activation == "gelu" else None
    check_gradients(run(fn, expert_mesh(2), *layer.args, d_out), layer, d_out, activation, tolerance)


def test_moe_gradients_capacity(implementation, expert_mesh, rng, subtests):
    """Dropped rows neither contribute to nor receive gradients."""
    call = compiled(moe_gradients(BASE, implementation, capacity=10), expert_mesh(2))
    for routing in ("zipf", "one_hot_every_slot"):
        with subtests.test(routing):
            layer = Layer(rng, routing, 2, BASE)
            d_out = reals(rng, *layer.x.shape)
            assert layer.oracle(capacity=10).lay.dropped.sum() > 0
            check_gradients(call(*layer.args, d_out), layer, d_out, capacity=10)


def test_moe_gradients_bfloat16(implementation, expert_mesh, rng):
    layer = Layer(rng, "uniform", 2, BASE, BF16)
    d_out = reals(rng, *layer.x.shape, dtype=BF16)
    got = run(moe_gradients(BASE, implementation), expert_mesh(2), *layer.args, d_out)
    assert [g.dtype for g in got] == [BF16, BF16, F32, BF16, BF16]
    # Three GEMMs deep, each with its own roundings, so more than one GEMM's tolerance.
    check_gradients(got, layer, d_out, tolerance=4e-2)


def dispatch_combine_vjp(implementation, **options):
    """Return the transposes of dispatch (tokens and weights) and combine, for given cotangents."""
    wire = {"schedule": options.get("schedule")}

    def fn(x, topk_weights, topk_idx, y, d_tokens, d_weights, d_out):
        def dispatch(x, topk_weights):
            out = jax_ep.dispatch(
                x, topk_idx, topk_weights, num_experts=BASE.num_experts, implementation=implementation, **options
            )
            return (out.tokens, out.weights), out.handle

        _, dispatch_vjp, handle = jax.vjp(dispatch, x, topk_weights, has_aux=True)
        _, combine_vjp = jax.vjp(lambda y: jax_ep.combine(y, handle, implementation=implementation, **wire), y)
        return *dispatch_vjp((d_tokens, d_weights)), *combine_vjp(d_out)

    return fn


# Cotangents of small integers sum exactly, so the transposes compare bit for bit.
@pytest.mark.parametrize("options", [{}, {"alignment": 4}, {"capacity": 12, "alignment": 2}], ids=str)
def test_gradients_transposes(implementation, options, mesh, rng, subtests):
    call = compiled(dispatch_combine_vjp(implementation, **options), mesh)
    for routing in FEW_ROUTINGS:
        with subtests.test(routing):
            topk_idx = ROUTINGS[routing](rng, mesh.size, BASE)
            lay = oracle.layout(topk_idx, BASE.num_experts, **options)
            x, d_out = (integers(rng, mesh.size, BASE.num_tokens, BASE.hidden, dtype=BF16) for _ in range(2))
            y, d_tokens = (integers(rng, *lay.source.shape, BASE.hidden, dtype=BF16) for _ in range(2))
            d_weights = integers(rng, *lay.source.shape)
            weights = probabilities(rng, *topk_idx.shape)
            dx, d_topk_weights, dy = call(x, weights, topk_idx, y, d_tokens, d_weights, d_out)
            np.testing.assert_array_equal(dx, oracle.combine(d_tokens, lay).astype(BF16))
            np.testing.assert_array_equal(d_topk_weights, oracle.scatter_weights(d_weights, lay))
            np.testing.assert_array_equal(dy, oracle.gather(d_out, lay))


def test_gradients_fp8_wire_straight_through(implementation, expert_mesh, rng):
    """The backward pass quantizes the cotangent like tokens, and ignores the rounding of the forward pass."""
    call = compiled(dispatch_combine_vjp(implementation, schedule=FP8_WIRE), expert_mesh(2))
    topk_idx = ROUTINGS["uniform"](rng, 2, BASE)
    lay = oracle.layout(topk_idx, BASE.num_experts)
    x, y = reals(rng, 2, BASE.num_tokens, 128), reals(rng, *lay.source.shape, 128)
    # Use scales that are exact in any arithmetic: a single 448 in every quantized block.
    d_out = integers(rng, 2, BASE.num_tokens, 128, largest=200)
    d_out[..., 0] = 448
    d_tokens = integers(rng, *lay.source.shape, 128, largest=100)
    d_tokens[..., 0] = 0
    for rank in range(2):
        first = {(source, token): row for row, source, token, _, _ in reversed(lay.rows(rank))}
        d_tokens[rank, list(first.values()), 0] = 448
    d_weights = integers(rng, *lay.source.shape)
    weights = probabilities(rng, *topk_idx.shape)
    dx, d_topk_weights, dy = call(x, weights, topk_idx, y, d_tokens, d_weights, d_out)
    want = oracle.combine(d_tokens, lay, oracle.FP8)
    assert np.abs(want - oracle.combine(d_tokens, lay)).max() > 0
    np.testing.assert_array_equal(dx, want)
    np.testing.assert_array_equal(dy, oracle.gather(oracle.to_wire(d_out, oracle.FP8), lay))
    np.testing.assert_array_equal(d_topk_weights, oracle.scatter_weights(d_weights, lay))


def test_moe_gradients_fp8_wire(implementation, expert_mesh, rng):
    """Gradients match the layer with quantized tokens and cotangents."""
    shape = Shape(hidden=128)
    layer = Layer(rng, "uniform", 2, shape)
    d_out = reals(rng, *layer.x.shape)
    fn = moe_gradients(shape, implementation, schedule=FP8_WIRE)
    got = run(fn, expert_mesh(2), *layer.args, d_out)[1:]
    exact = layer.oracle().gradients(d_out)
    for name, g, e in zip(NAMES[1:], got, exact, strict=True):
        assert np.linalg.norm(g.reshape(e.shape) - e) > 1e-3 * np.linalg.norm(e), f"{name}: nothing was quantized"
    layer.x = oracle.to_wire(layer.x, oracle.FP8)
    want = layer.oracle().gradients(oracle.to_wire(d_out, oracle.FP8))
    # Weight gradients are never sent: with the quantized operands they are exact.
    for name, g, w in list(zip(NAMES[1:], got, want, strict=True))[1:]:
        assert_close(g.reshape(w.shape), w, name, tolerance=5e-5)
    # dx is sent: every partial sum is off by 2**-4 at most, by a third of that on average.
    assert np.linalg.norm(got[0] - want[0]) < 2**-4 * np.linalg.norm(want[0])


def global_loss(fn, mesh, probe):
    """Return a scalar of the stacked arrays, so that the transpose of shard_map is part of the gradient."""
    stacked = per_rank(fn, mesh)
    return lambda *args: jnp.sum(jnp.sin(stacked(*args)) * probe)


def test_dispatch_combine_gradients_finite_differences(implementation, expert_mesh, rng, float64):
    """Differentiate weights and tokens through dispatch, a nonlinearity, and combine."""
    topk_idx = ROUTINGS["duplicates"](rng, 2, TINY)
    topk_idx[0, 0, 0] = -1
    x, topk_weights, _, _ = layer_arrays(rng, 2, TINY, np.dtype(np.float64))

    def fn(x, topk_weights, topk_idx):
        out = jax_ep.dispatch(
            x, topk_idx, topk_weights, num_experts=4, alignment=2, capacity=10, implementation=implementation
        )
        return jax_ep.combine(jnp.tanh(out.tokens) * out.weights[:, None], out.handle, implementation=implementation)

    loss = global_loss(fn, expert_mesh(2), rng.standard_normal(x.shape))
    check = jax.jit(jax.value_and_grad(lambda x, w: loss(x, w, topk_idx), argnums=(0, 1)))
    check_directional_derivatives(check, (x, topk_weights), rng)


def test_moe_gradients_finite_differences(implementation, expert_mesh, rng, float64):
    """First and second order, from one function: g(a) = sum(sin(moe(a))), then h(a) = <grad g(a), u>."""
    topk_idx = ROUTINGS["duplicates"](rng, 2, TINY)
    arrays = layer_arrays(rng, 2, TINY, np.dtype(np.float64))
    args = *arrays[:2], *(split_experts(w, 2) for w in arrays[2:])

    def layer(x, topk_weights, w_gate_up, w_down, topk_idx):
        return jax_ep.moe(x, topk_idx, topk_weights, w_gate_up, w_down, num_experts=4, implementation=implementation)

    stacked = global_loss(layer, expert_mesh(2), rng.standard_normal(arrays[0].shape))
    gradient = jax.value_and_grad(lambda *a: stacked(*a, topk_idx), argnums=(0, 1, 2, 3))
    along = [rng.standard_normal(a.shape) for a in args]

    def slope(*a):
        return sum(jnp.vdot(g, u) for g, u in zip(gradient(*a)[1], along, strict=True))

    check_directional_derivatives(jax.jit(gradient), args, rng)
    check_directional_derivatives(jax.jit(jax.value_and_grad(slope, argnums=(0, 1, 2, 3))), args, rng, tolerance=1e-6)


def test_halves_gradients_finite_differences(implementation, expert_mesh, rng, float64):
    """Chain dispatch_grouped_gemm and grouped_gemm_combine."""
    topk_idx = ROUTINGS["uniform"](rng, 2, TINY)
    x, topk_weights, w_gate_up, w_down = layer_arrays(rng, 2, TINY, np.dtype(np.float64), gated=False)
    args = x, topk_weights, split_experts(w_gate_up, 2), split_experts(w_down, 2)

    def layer(x, topk_weights, w_gate_up, w_down, topk_idx):
        first = jax_ep.dispatch_grouped_gemm(
            x, topk_idx, topk_weights, w_gate_up, num_experts=4, alignment=2, implementation=implementation
        )
        hidden = jnp.tanh(first.hidden) * first.weights[:, None]
        return jax_ep.grouped_gemm_combine(hidden, w_down, first.handle, implementation=implementation)

    stacked = global_loss(layer, expert_mesh(2), rng.standard_normal(x.shape))
    gradient = jax.jit(jax.value_and_grad(lambda *a: stacked(*a, topk_idx), argnums=(0, 1, 2, 3)))
    check_directional_derivatives(gradient, args, rng)


def test_fused_moe_gradients(implementation, rng):
    """The single-device layer has the same gradients."""
    layer = Layer(rng, "some_without_expert", 1, BASE)
    d_out = reals(rng, *layer.x.shape)
    fn = with_gradients(functools.partial(jax_ep.fused_moe, implementation=implementation))
    got = to_numpy(jax.jit(fn)(*(a[0] for a in layer.args), d_out[0]))
    check_gradients(got, layer, d_out)
