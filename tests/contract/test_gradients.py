"""Gradients of the exchange, bit for bit and with FP8 on the wire; finite differences of layers in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
import oracle
from cases import BASE, BF16, F64, FP8_WIRE, Shape, integers, probabilities, reals
from harness import check_directional_derivatives, compiled, per_rank
from routings import FEW_ROUTINGS, ROUTINGS

TINY = Shape(num_tokens=3, top_k=2, num_experts=4, hidden=3, intermediate=2)


def layer_arrays(rng, num_ranks, *, gated=True):
    """Draw x, topk_weights and both weights of each rank, in float64."""
    tokens, experts = (num_ranks, TINY.num_tokens), (num_ranks, TINY.num_experts // num_ranks)
    columns = TINY.intermediate * (2 if gated else 1)
    w_gate_up = reals(rng, *experts, TINY.hidden, columns, dtype=F64)
    w_down = reals(rng, *experts, TINY.intermediate, TINY.hidden, dtype=F64)
    weights = probabilities(rng, *tokens, TINY.top_k, dtype=F64)
    return reals(rng, *tokens, TINY.hidden, dtype=F64), weights, w_gate_up, w_down


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


def loss_of(layer, topk_idx, mesh, rng):
    """Return a scalar of stacked arrays, for derivatives that include the transpose of shard_map."""
    stacked = per_rank(layer, mesh)
    probe = rng.standard_normal((*topk_idx.shape[:2], TINY.hidden))
    return lambda *arrays: jnp.sum(jnp.sin(stacked(*arrays, topk_idx)) * probe)


def with_slopes(loss, arrays):
    return jax.value_and_grad(loss, argnums=tuple(range(len(arrays))))


def test_gradients_dispatch_combine_finite_differences(implementation, expert_mesh, rng, float64):
    """Differentiate weights and tokens through dispatch, a nonlinearity, and combine."""
    topk_idx = ROUTINGS["duplicates"](rng, 2, TINY)
    topk_idx[0, 0, 0] = -1
    arrays = layer_arrays(rng, 2)[:2]

    def layer(x, topk_weights, topk_idx):
        out = jax_ep.dispatch(
            x, topk_idx, topk_weights, num_experts=4, alignment=2, capacity=10, implementation=implementation
        )
        return jax_ep.combine(jnp.tanh(out.tokens) * out.weights[:, None], out.handle, implementation=implementation)

    loss = loss_of(layer, topk_idx, expert_mesh(2), rng)
    check_directional_derivatives(jax.jit(with_slopes(loss, arrays)), arrays, rng)


def test_gradients_halves_finite_differences(implementation, expert_mesh, rng, float64):
    """Chain dispatch_grouped_gemm and grouped_gemm_combine."""
    topk_idx, arrays = ROUTINGS["uniform"](rng, 2, TINY), layer_arrays(rng, 2, gated=False)

    def layer(x, topk_weights, w_gate_up, w_down, topk_idx):
        first = jax_ep.dispatch_grouped_gemm(
            x, topk_idx, topk_weights, w_gate_up, num_experts=4, alignment=2, implementation=implementation
        )
        hidden = jnp.tanh(first.hidden) * first.weights[:, None]
        return jax_ep.grouped_gemm_combine(hidden, w_down, first.handle, implementation=implementation)

    loss = loss_of(layer, topk_idx, expert_mesh(2), rng)
    check_directional_derivatives(jax.jit(with_slopes(loss, arrays)), arrays, rng)


def test_gradients_moe_finite_differences(implementation, expert_mesh, rng, float64):
    """First and second order, from one function: g(a) = sum(sin(moe(a))), then h(a) = <grad g(a), u>."""
    topk_idx, arrays = ROUTINGS["duplicates"](rng, 2, TINY), layer_arrays(rng, 2)
    along = [rng.standard_normal(array.shape) for array in arrays]

    def layer(x, topk_weights, w_gate_up, w_down, topk_idx):
        return jax_ep.moe(x, topk_idx, topk_weights, w_gate_up, w_down, num_experts=4, implementation=implementation)

    gradient = with_slopes(loss_of(layer, topk_idx, expert_mesh(2), rng), arrays)

    def slope(*arrays):
        return sum(jnp.vdot(g, u) for g, u in zip(gradient(*arrays)[1], along, strict=True))

    check_directional_derivatives(jax.jit(gradient), arrays, rng)
    check_directional_derivatives(jax.jit(with_slopes(slope, arrays)), arrays, rng, tolerance=1e-6)
