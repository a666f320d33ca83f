"""Expert layers with a recipe, their inputs, and their gradients."""

import functools

import jax_ep
import layers
from cases import F32, Shape, reals

SHAPE = Shape(num_tokens=5, top_k=2, num_experts=8, hidden=256, intermediate=128)


class Layer(layers.Layer):
    """A layer with a cotangent of its result."""

    def __init__(self, rng, routing, num_ranks, shape=SHAPE, dtype=F32, *, gated=True):
        super().__init__(rng, routing, num_ranks, shape, dtype, gated=gated)
        self.probe = reals(rng, *self.x.shape, dtype=dtype)


def moe(**options):
    """Return the layer with these options, of `SHAPE` and with `recipe="fp8"` unless they say otherwise."""
    return functools.partial(jax_ep.moe, **{"num_experts": SHAPE.num_experts, "recipe": "fp8", **options})
