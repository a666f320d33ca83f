"""Router weights are sent bit for bit, and so are their cotangents, by all launches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
import oracle
from cases import BF16, FP8_WIRE, Shape, assert_same_bits, reals
from harness import compiled, run
from jax_ep.types import Schedule
from routings import ROUTINGS

SHAPE = Shape(num_tokens=11, top_k=3, num_experts=4, hidden=128, intermediate=24)
FUSED = {
    "one launch": Schedule(dispatch_mode="fused", combine_mode="scatter"),
    "two launches": Schedule(dispatch_mode="serial", combine_mode="serial"),
}
WIRES = {"as it is": {}, "fp8": {"schedule": FP8_WIRE}, "pair": {}}
LAYOUTS = {  # Routing, and the options of its layout.
    "with padding": ("uniform", {"alignment": 4}),
    "duplicates": ("duplicates", {}),
    "rows past the capacity": ("some_without_expert", {"capacity": 12}),
    "no experts": ("no_experts", {}),
}
ODD = np.array([0x7FC00001, 0x7FA5A5A5, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x80000000, 0x00000001], np.uint32)
"""NaN of either kind and sign with payloads, infinities, -0, and the smallest number."""


def any_bits(rng, *shape):
    bits = rng.integers(0, 1 << 32, shape, np.uint32)
    return np.where(rng.random(shape) < 0.5, rng.choice(ODD, shape), bits).view(np.float32)


def there_and_back(path, implementation, **layout):
    """Return weights `[R]` of rows, and the cotangents `[T, K]` for cotangents `[R]`."""
    options = {"num_experts": SHAPE.num_experts, "implementation": implementation, **layout}

    def fn(x, topk_idx, topk_weights, w, d_rows):
        def send(topk_weights, w):
            if path in FUSED:
                out = jax_ep.dispatch_grouped_gemm(x, topk_idx, topk_weights, w, schedule=FUSED[path], **options)
                return out.hidden, out.weights
            tokens = (x.astype(jnp.float8_e4m3fn), x[:, :1].astype(jnp.float32)) if path == "pair" else x
            out = jax_ep.dispatch(tokens, topk_idx, topk_weights, **options, **WIRES[path])
            return (), out.weights

        (hidden, row_weights), pull = jax.vjp(send, topk_weights, w)
        return row_weights, pull((jax.tree.map(jnp.ones_like, hidden), d_rows))[0]

    return fn


@pytest.mark.parametrize("path", [*WIRES, *FUSED])
@pytest.mark.slow_interpreted(unless={"path": ["as it is", "one launch"]})
def test_router_weights_bits(path, implementation, expert_mesh, rng, subtests):
    matrices = (2, SHAPE.num_experts // 2, SHAPE.hidden, SHAPE.intermediate)
    for name, (routing, layout) in LAYOUTS.items():
        with subtests.test(name):
            if routing == "no_experts":
                topk_idx = np.full((2, SHAPE.num_tokens, SHAPE.top_k), -1, np.int32)
            else:
                topk_idx = ROUTINGS[routing](rng, 2, SHAPE)
            lay = oracle.layout(topk_idx, SHAPE.num_experts, **layout)
            weights, d_rows = any_bits(rng, *topk_idx.shape), any_bits(rng, *lay.source.shape)
            x, w = reals(rng, 2, SHAPE.num_tokens, SHAPE.hidden, dtype=BF16), reals(rng, *matrices, dtype=BF16)
            call = there_and_back(path, implementation, **layout)
            there, back = run(call, expert_mesh(2), x, topk_idx, weights, w, d_rows)
            assert_same_bits(there, oracle.gather_weights(weights, lay), "weights of rows")
            assert_same_bits(back, oracle.scatter_weights(d_rows, lay), "gradients of weights")


def test_router_weights_one_device(implementation, rng):
    topk_idx = ROUTINGS["duplicates"](rng, 1, SHAPE)
    lay = oracle.layout(topk_idx, SHAPE.num_experts)
    weights, d_rows = any_bits(rng, *topk_idx.shape), any_bits(rng, *lay.source.shape)
    x = reals(rng, SHAPE.num_tokens, SHAPE.hidden, dtype=BF16)
    w = reals(rng, SHAPE.num_experts, SHAPE.hidden, SHAPE.intermediate, dtype=BF16)
    call = jax.jit(there_and_back("as it is", implementation, axis_name=()))
    there, back = jax.device_get(call(x, topk_idx[0], weights[0], w, d_rows[0]))
    assert_same_bits(there, oracle.gather_weights(weights, lay)[0], "weights of rows")
    assert_same_bits(back, oracle.scatter_weights(d_rows, lay)[0], "gradients of weights")


def test_router_weights_float64(implementation, expert_mesh, rng, float64):
    """Numbers that float32 cannot represent, in both directions."""
    topk_idx = ROUTINGS["duplicates"](rng, 2, SHAPE)
    lay = oracle.layout(topk_idx, SHAPE.num_experts)
    weights, d_rows = rng.normal(size=topk_idx.shape), rng.normal(size=lay.source.shape)
    x = rng.normal(size=(2, SHAPE.num_tokens, SHAPE.hidden))
    w = np.zeros((2, 1))
    call = compiled(there_and_back("as it is", implementation), expert_mesh(2))
    there, back = call(x, topk_idx, weights, w, d_rows)
    assert_same_bits(there, oracle.gather_weights(weights, lay), "weights of rows")
    assert_same_bits(back, oracle.scatter_weights(d_rows, lay), "gradients of weights")
