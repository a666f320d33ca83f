"""Sums in another dtype than that of tokens: the same sums except for the last rounding, and the same gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from cases import BF16, F32, FP8_WIRE, Shape, assert_close, assert_same_bits, reals
from harness import compiled
from layers import Layer, second_derivative

SHAPE = Shape(num_tokens=12, hidden=16, intermediate=8)
LAYERS = {
    "scatter": {"schedule": jax_ep.Schedule(combine_mode="scatter")},
    "serial": {"schedule": jax_ep.Schedule(combine_mode="serial", dispatch_mode="serial")},
    "dropping": {"capacity": 20},
    "biased": {"biased": True},
    "fp8 wire": {"schedule": FP8_WIRE},
    "fp8 products": {"recipe": "fp8"},
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.slow(unless={"kind": ["scatter"]})
def test_result_dtype_moe(implementation, kind, expert_mesh, rng):
    shape = Shape(num_tokens=12, hidden=128, intermediate=128) if "fp8" in kind else SHAPE
    layer = Layer(rng, "uniform", 2, shape, BF16)
    options = dict(LAYERS[kind])
    biases = ()
    if options.pop("biased", False):
        biases = (layer.per_rank(reals(rng, shape.num_experts, shape.hidden, dtype=BF16)),)

    def moe(x, topk_weights, w_gate_up, w_down, *biases, ids, dtype):
        pair = (None, *biases) if biases else None
        call = partial(jax_ep.moe, num_experts=shape.num_experts, implementation=implementation, biases=pair, **options)
        return call(x, ids, topk_weights, w_gate_up, w_down, preferred_element_type=dtype)

    x, ids, topk_weights, w_gate_up, w_down = layer.args
    mesh = expert_mesh(2)

    def fn(d_y, ids, *args):
        found = []
        for dtype in (jnp.bfloat16, jnp.float32):
            y, pull = jax.vjp(partial(moe, ids=ids, dtype=dtype), *args)
            found.append((y, pull(d_y.astype(dtype))))
        return found

    d_y = np.broadcast_to((1 + np.arange(shape.hidden) % 3).astype(BF16), x.shape)
    (narrow, gradients), (wide, same) = compiled(fn, mesh)(d_y, ids, x, topk_weights, w_gate_up, w_down, *biases)
    assert wide.dtype == F32
    assert np.any(wide != wide.astype(BF16).astype(F32)), "the sums were rounded"
    assert_same_bits(wide.astype(BF16), narrow)
    for got, want in zip(same, gradients, strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_result_dtype_halves(implementation, dtype, expert_mesh, rng):
    """`combine` and `grouped_gemm_combine`, also of float32 rows to bfloat16."""
    other = BF16 if dtype == F32 else F32
    layer = Layer(rng, "uniform", 2, SHAPE, dtype)

    def fn(x, ids, w_down):
        dispatched = jax_ep.dispatch(x, ids, num_experts=8, implementation=implementation)
        rows, handle = dispatched.tokens, dispatched.handle
        calls = (
            partial(jax_ep.combine, rows, handle, implementation=implementation),
            partial(jax_ep.grouped_gemm_combine, rows[:, :8], w_down, handle, implementation=implementation),
        )
        return [[call(), call(preferred_element_type=jnp.dtype(other))] for call in calls]

    x, ids, *_, w_down = layer.args
    for own, preferred in compiled(fn, expert_mesh(2))(x, ids, w_down):
        assert (own.dtype, preferred.dtype) == (dtype, other)
        wide, narrow = (preferred, own) if other == F32 else (own, preferred)
        assert_same_bits(wide.astype(BF16), narrow)


@pytest.mark.slow
def test_result_dtype_second_derivatives(implementation, expert_mesh, rng):
    layer = Layer(rng, "uniform", 2, SHAPE, BF16)
    x, ids, weights, w_gate_up, w_down = layer.args

    def fn(x, ids, weights, w_gate_up, w_down):
        def moe(x, w, **options):
            call = partial(jax_ep.moe, num_experts=8, implementation=implementation, **options)
            return call(x, ids, weights, w_gate_up, w)

        return [second_derivative(partial(moe, preferred_element_type=d))(x, w_down) for d in (None, jnp.float32)]

    for narrow, wide in zip(*compiled(fn, expert_mesh(2))(x, ids, weights, w_gate_up, w_down), strict=True):
        assert wide.dtype == narrow.dtype == BF16
        assert_close(wide, narrow.astype(F32), tolerance=0.1)


@pytest.mark.parametrize("quantize", [False, True])
def test_result_dtype_low_latency(implementation, quantize, expert_mesh, rng):
    shape = Shape(num_tokens=3, hidden=128, intermediate=128)
    layer = Layer(rng, "uniform", 2, shape, BF16)
    x, ids, weights, w_gate_up, w_down = layer.args

    def fn(x, ids, weights, w_gate_up, w_down):
        form = {"format": "fp8", "activations": "fp8"} if quantize else {"format": None}
        matrices = jax_ep.serving.serving_weights(w_gate_up, w_down, **form)
        operands = (x, ids, weights, matrices.w_gate_up, matrices.w_down)
        layer = partial(jax_ep.low_latency_moe, *operands, num_experts=8, implementation=implementation)
        sizes = {"num_experts": 8, "max_tokens_per_rank": 3, "quantize": False, "implementation": implementation}
        d = jax_ep.low_latency_dispatch(x, ids, **sizes)
        back = partial(jax_ep.low_latency_combine, d.tokens, ids, weights, d.handle, implementation=implementation)
        return [[call(), call(preferred_element_type=jnp.float32)] for call in (layer, back)]

    (layers, sums) = compiled(fn, expert_mesh(2))(x, ids, weights, w_gate_up, w_down)
    for narrow, wide in (layers, sums):
        assert (narrow.dtype, wide.dtype) == (BF16, F32)
        assert_close(wide, narrow.astype(F32), tolerance=2e-2)
    assert_same_bits(sums[1].astype(BF16), sums[0])
