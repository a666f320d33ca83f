"""Expert layers with a recipe, their inputs, and their gradients."""

import jax
import numpy as np

import jax_ep
import layers
from cases import F32, Shape, reals

SHAPE = Shape(num_tokens=5, top_k=2, num_experts=8, hidden=256, intermediate=128)
NAMES = ("y", "x", "topk_weights", "w_gate_up", "w_down")


class Layer(layers.Layer):
    """A layer with a cotangent of its result."""

    def __init__(self, rng, routing, num_ranks, shape=SHAPE, dtype=F32, *, gated=True):
        super().__init__(rng, routing, num_ranks, shape, dtype, gated=gated)
        self.probe = reals(rng, *self.x.shape, dtype=dtype)


def relative(got, want):
    want = want.astype(np.float64)
    return float(np.linalg.norm(got.astype(np.float64).reshape(want.shape) - want) / np.linalg.norm(want))


def with_gradients(**options):
    """Return a function of `(x, ids, weights, w_gate_up, w_down, probe)` that returns the arrays of `NAMES`."""
    options = {"num_experts": SHAPE.num_experts, "recipe": "fp8", **options}

    def fn(x, topk_idx, topk_weights, w_gate_up, w_down, probe):
        def layer(x, weights, up, down):
            return jax_ep.moe(x, topk_idx, weights, up, down, **options)

        y, pull = jax.vjp(layer, x, topk_weights, w_gate_up, w_down)
        # After the forward pass, like a cotangent: the interpreter does not order independent work.
        return y, *pull(probe + (y.reshape(-1)[0] == 12345.678).astype(probe.dtype))

    return fn
