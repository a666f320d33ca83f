"""Edge cases of custom activations, token counts and masks in expert layers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from harness import make_mesh, per_rank
from jax_ep import Experts
from jax_ep.sharding import sharded_moe

T, H, INNER, E, K = 4, 8, 6, 4, 2


class Arrays:
    """Arrays of one rank, including assignments without an expert."""

    def __init__(self, rng, dtype=jnp.float32):
        draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
        self.x, self.w_gate_up, self.w_down = draw(T, H), draw(E, H, 2 * INNER), draw(E, INNER, H)
        self.idx = jnp.asarray([[0, 1], [2, -1], [1, 3], [-1, 0]], jnp.int32)
        self.weights = jnp.asarray(rng.random((T, K)), jnp.float32)

    def moe(self, **options):
        arrays = (self.x, self.idx, self.weights, self.w_gate_up, self.w_down)
        return jax_ep.fused_moe(*arrays, implementation="xla", **options)

    def low_latency(self, **options):
        run = partial(jax_ep.low_latency_moe, num_experts=E, axis_name=(), implementation="xla")
        return run(self.x, self.idx, self.weights, self.w_gate_up, self.w_down, **options)


def halves(hidden):
    return hidden[:, :INNER], hidden[:, INNER:]


@pytest.mark.slow
def test_experts_weight_on_input_float64(rng):
    with jax.enable_x64(True):
        arrays, experts = Arrays(rng, jnp.float64), Experts(weight_on="input")
        np.testing.assert_allclose(
            arrays.low_latency(experts=experts), arrays.moe(experts=experts), rtol=1e-12, atol=1e-12
        )


@pytest.mark.slow
def test_experts_custom_activation_with_loop(rng):
    """Under `shard_map`'s type checks."""
    mesh = make_mesh((2,), ("expert",))
    arrays = Arrays(rng)
    shared = (jnp.stack([a, a]) for a in (arrays.x, arrays.idx, arrays.weights))
    matrices = (w.reshape(2, E // 2, *w.shape[1:]) for w in (arrays.w_gate_up, arrays.w_down))

    def layer(scale, *args):
        def own(hidden):
            gate, up = halves(hidden)
            return jax.lax.fori_loop(0, 2, lambda i, rows: rows * scale[None], gate) * up

        return jax_ep.moe(*args, num_experts=E, experts=Experts(own), implementation="xla")

    y = jax.jit(per_rank(layer, mesh))(jnp.full((2, 1), 3.0), *shared, *matrices)
    want = arrays.moe(experts=Experts(lambda hidden: 9 * halves(hidden)[0] * halves(hidden)[1]))
    np.testing.assert_allclose(y, jnp.stack([want, want]), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_experts_custom_activation_closure_not_cached(rng):
    class Scaled:
        scale = 1.0

        def __call__(self, hidden):
            return self.scale * halves(hidden)[0] * halves(hidden)[1]

    arrays, own = Arrays(rng), Scaled()
    experts = Experts(own)
    first = arrays.low_latency(experts=experts)
    own.scale = 2.0
    np.testing.assert_allclose(arrays.low_latency(experts=experts), 2 * first, rtol=1e-5)
    box = [jnp.float32(0)]
    boxed = Experts(lambda hidden: box[0] * halves(hidden)[0] * halves(hidden)[1])

    def run(scale):
        box[0] = scale
        return arrays.low_latency(experts=boxed)

    for number, call in ((3.0, jax.jit(run)), (5.0, jax.jit(lambda scale: run(scale + 0)))):
        np.testing.assert_allclose(call(number), number * first, rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="train with moe"):
        jax.grad(lambda scale: jnp.sum(run(scale)))(1.0)


@pytest.mark.slow
def test_experts_custom_activation_nan_derivative_at_zero(rng):
    """Rows without a token are not zero for the custom function."""
    arrays = Arrays(rng)

    def loss(scale):
        def own(hidden):
            return scale * hidden[:, :INNER] / jnp.linalg.norm(hidden, axis=1, keepdims=True)

        return jnp.sum(arrays.moe(experts=Experts(own)))

    value, slope = jax.jit(jax.value_and_grad(loss))(np.float32(2))
    np.testing.assert_allclose(slope, value / 2, rtol=1e-4)


@pytest.mark.parametrize("call", [Arrays.moe, Arrays.low_latency], ids=["moe", "low latency"])
def test_experts_custom_activation_invalid_result(call, rng):
    arrays = Arrays(rng)
    wrong = [
        (lambda hidden: hidden, ValueError, rf"{2 * INNER}\], expected \[\d+, {INNER}\]"),
        (lambda hidden: None, ValueError, "NoneType, expected"),
        (lambda hidden: hidden[0], ValueError, "expected"),
        (lambda hidden: hidden[:, :INNER].astype(jnp.complex64), TypeError, "complex"),
        (lambda hidden: jnp.int32(hidden[:, :INNER]), TypeError, "int32"),
    ]
    for own, error, message in wrong:
        with pytest.raises(error, match=message):
            jax.eval_shape(partial(call, arrays, experts=Experts(own)))


@pytest.mark.slow
def test_experts_ids_past_num_tokens(rng):
    """Ids past num_tokens may be anything, even if values are known; other ids may not."""
    arrays = Arrays(rng)
    arrays.idx = arrays.idx.at[3].set(777)
    with pytest.raises(ValueError, match="777"):
        arrays.moe()
    handle = jax_ep.dispatch(arrays.x, arrays.idx, num_experts=E, axis_name=(), num_tokens=2).handle
    with pytest.raises(ValueError, match=r"num_tokens.*handle"):
        jax_ep.dispatch(arrays.x, None, num_experts=E, axis_name=(), num_tokens=1, handle=handle)
    mesh, mask = make_mesh((2,), ("expert",)), jnp.asarray([True, True, True, False])
    layer = sharded_moe(mesh, num_experts=E, implementation="xla")
    args = (arrays.x, arrays.idx, arrays.weights, arrays.w_gate_up, arrays.w_down)
    masked = layer(*args, token_mask=mask)
    assert not np.asarray(masked)[3].any() and np.isfinite(masked).all()
    with pytest.raises(ValueError, match="777"):
        layer(*args, token_mask=~mask)


def test_experts_biases_global_arrays_invalid(rng):
    arrays, mesh = Arrays(rng), make_mesh((2,), ("expert",))
    args = (arrays.x, arrays.idx, arrays.weights, arrays.w_gate_up, arrays.w_down)
    layer = sharded_moe(mesh, num_experts=E)
    wrong = [
        (([1.0], None), TypeError, "b_gate_up is a list"),
        ((None, jnp.ones((3, H))), ValueError, r"b_down.*\(3, 8\), expected \[4, 8\]"),
        ((jnp.ones((E, INNER)), None), ValueError, r"b_gate_up.*\(4, 6\), expected \[4, 12\]"),
        ((None, jnp.ones((E, H), jnp.int32)), TypeError, "b_down.*int32"),
        (jnp.ones((E, H)), TypeError, r"biases is an array, expected a pair \(b_gate_up, b_down\)"),
    ]
    for biases, error, message in wrong:
        with pytest.raises(error, match=f"sharded_moe.*{message}"):
            layer(*args, biases=biases)
