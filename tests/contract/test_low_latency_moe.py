"""low_latency_moe: the layer of moe for few tokens, in FP8 and in the dtype of the tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from cases import BF16, Shape, assert_close, relative_error
from harness import compiled
from layers import Layer
from stored_experts import quantized

SHAPE = Shape(num_tokens=6, top_k=3, num_experts=8, hidden=256, intermediate=128)
# Roundings to 3 mantissa bits, each of 0.026 in the root mean square: two in each GEMM, where gate and up both count.
# That makes 0.06 to 0.075 for the few tokens of these tests.
FP8_ERROR = 0.1


def layer(implementation, fp8, **options):
    def fn(x, topk_idx, topk_weights, w_gate_up, w_down):
        prepare = partial(quantized, format="fp8", activations="fp8") if fp8 else (lambda w: w)
        experts = prepare(w_gate_up), prepare(w_down)
        sizes = {"num_experts": SHAPE.num_experts, "implementation": implementation}
        return jax_ep.low_latency_moe(x, topk_idx, topk_weights, *experts, **sizes, **options)

    return fn


def test_low_latency_moe_routings(implementation, expert_mesh, rng, subtests):
    call = compiled(layer(implementation, fp8=False), expert_mesh(2))
    fp8_call = compiled(layer(implementation, fp8=True), expert_mesh(2))
    for routing in ("uniform", "duplicates", "some_without_expert", "one_hot_every_slot", "out_of_range"):
        with subtests.test(routing):
            problem = Layer(rng, routing, 2, SHAPE, BF16)
            got = call(*problem.args)
            assert got.dtype == BF16
            want = problem.oracle().forward()
            assert_close(got, want, tolerance=2e-2)  # Three roundings to bfloat16, one after another.
            error = relative_error(fp8_call(*problem.args), want)
            assert 0.02 < error < FP8_ERROR


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_low_latency_moe_activations(implementation, activation, expert_mesh, rng):
    problem = Layer(rng, "uniform", 2, SHAPE, BF16)
    call = compiled(layer(implementation, fp8=True, experts=jax_ep.Experts(activation)), expert_mesh(2))
    assert relative_error(call(*problem.args), problem.oracle(activation).forward()) < FP8_ERROR


def test_low_latency_moe_padding(implementation, expert_mesh, rng):
    """Tokens without experts, whose number differs by rank, get zeros and change nothing."""
    problem, counts = Layer(rng, "uniform", 2, SHAPE, BF16), np.array([2, 5], np.int32)
    ignored = np.arange(SHAPE.num_tokens) >= counts[:, None]
    problem.topk_idx[ignored] = -1
    want, problem.x[ignored] = problem.oracle().forward(), np.nan
    got = compiled(layer(implementation, fp8=False, max_tokens_per_rank=9), expert_mesh(2))(*problem.args)
    assert_close(got, want, tolerance=2e-2)
    assert not got[ignored].any()


def test_low_latency_moe_matches_moe(implementation, expert_mesh, rng):
    """In float32 both agree to float32 precision, so that a program may switch between them."""
    problem = Layer(rng, "uniform", 2, SHAPE)

    def moe(x, topk_idx, topk_weights, w_gate_up, w_down):
        return jax_ep.moe(x, topk_idx, topk_weights, w_gate_up, w_down, num_experts=8, implementation="xla")

    mesh = expert_mesh(2)
    got = compiled(layer(("xla",), fp8=False), mesh)(*problem.args)
    np.testing.assert_allclose(got, compiled(moe, mesh)(*problem.args), rtol=1e-4, atol=1e-5)


def test_low_latency_moe_no_tokens():
    w, down = (quantized(jnp.ones((2, 128, n)), "fp8", activations="fp8") for n in (256, 128))
    call = jax.jit(partial(jax_ep.low_latency_moe, num_experts=2, axis_name=(), implementation="xla"))
    out = call(jnp.ones((0, 128)), jnp.ones((0, 2), jnp.int32), jnp.ones((0, 2)), w, down)
    assert out.shape == (0, 128)


def small_layer():
    """Return x, ids, weights, and expert weights in the layout of `moe`, for four experts."""
    rng = np.random.default_rng(0)
    shapes = ((3, 128), (4, 128, 256), (4, 128, 128))
    x, up, down = (jnp.asarray(rng.normal(size=shape) / 11, jnp.float32) for shape in shapes)
    return x * 11, jnp.array([[0, 1], [2, 3], [1, -1]], jnp.int32), jnp.full((3, 2), 0.5), up, down


@pytest.mark.parametrize("other", ["fp8", "fp8_channel", "mxfp4", "int4"])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.slow(unless={"other": ["fp8_channel", "mxfp4"]})
def test_low_latency_moe_two_weight_formats(other, swapped):
    """As in `fused_moe`, each weight determines how its rows are quantized."""
    x, ids, weights, *matrices = small_layer()
    fp8 = {"format": "fp8", "activations": "fp8"}
    formats = [fp8, {"format": other, "activations": None if other == "fp8" else "fp8"}]
    kinds = formats[::-1] if swapped else formats
    w = [quantized(m, **kind) for m, kind in zip(matrices, kinds, strict=True)]
    calls = partial(jax_ep.low_latency_moe, num_experts=4, axis_name=()), jax_ep.fused_moe
    got, want = (np.asarray(jax.jit(partial(c, implementation="xla"))(x, ids, weights, *w)) for c in calls)
    assert relative_error(got, want) < 0.05, "but for the rounding of tokens on their way"


@pytest.mark.parametrize("jit", [False, True])
def test_low_latency_ids_past_num_tokens(jit):
    """They may be anything, in dispatch and combine."""
    x, ids, weights, up, down = small_layer()
    keywords = {"num_experts": 4, "axis_name": (), "implementation": "xla"}
    matrices = up, down
    others = ids.at[2].set(jnp.array([99, -7]))
    dispatch = partial(jax_ep.low_latency_dispatch, max_tokens_per_rank=4, num_tokens=2, quantize=False, **keywords)
    dispatched = (jax.jit(dispatch) if jit else dispatch)(x, others)
    assert dispatched.group_sizes.tolist() == [1, 1, 1, 1]
    combine = partial(jax_ep.low_latency_combine, dispatched.tokens, topk_weights=weights, handle=dispatched.handle)
    got, same = (combine(topk_idx=some, axis_name=(), implementation="xla") for some in (others, ids))
    np.testing.assert_array_equal(got[:2], same[:2])
    with pytest.raises(ValueError, match="topk_idx contains"):
        jax_ep.low_latency_moe(x, others, weights, *matrices, **keywords)


@pytest.mark.parametrize("argument", ["topk_weights", "biases"])
def test_low_latency_moe_no_gradient_per_array(argument):
    """Whether an implementation fuses it or not, on each kind of device."""
    x, ids, weights, up, down = small_layer()
    given = {"topk_weights": weights, "biases": (None, jnp.ones((4, 128)))}

    def loss(value):
        arrays = given | {argument: value}
        matrices = {"w_gate_up": up, "w_down": down}
        call = partial(jax_ep.low_latency_moe, num_experts=4, axis_name=(), implementation="xla")
        return call(x, ids, **arrays, **matrices).sum()

    with pytest.raises(TypeError, match="no gradient"):
        jax.grad(loss)(given[argument])
