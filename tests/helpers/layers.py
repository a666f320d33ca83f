"""Random inputs of an expert layer, and derivatives used by tests of several layers."""

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
import oracle
from cases import F32, assert_close, probabilities, reals
from oracle_experts import MoE
from routings import ROUTINGS


class Layer:
    """Random inputs of one layer; weights are `[E, ...]` here and `[W, L, ...]` for the ranks."""

    def __init__(self, rng, routing, num_ranks, shape, dtype=F32, *, gated=True):
        experts, hidden, size = shape.num_experts, shape.hidden, shape.intermediate
        self.topk_idx = ROUTINGS[routing](rng, num_ranks, shape)
        self.x = reals(rng, num_ranks, shape.num_tokens, hidden, dtype=dtype)
        self.topk_weights = probabilities(rng, *self.topk_idx.shape)
        columns = size * (2 if gated else 1)
        self.w_gate_up = (rng.standard_normal((experts, hidden, columns)) / np.sqrt(hidden)).astype(dtype)
        self.w_down = (rng.standard_normal((experts, size, hidden)) / np.sqrt(size)).astype(dtype)

    def per_rank(self, weights):
        return weights.reshape(len(self.x), -1, *weights.shape[1:])

    @property
    def args(self):
        weights = self.per_rank(self.w_gate_up), self.per_rank(self.w_down)
        return self.x, self.topk_idx, self.topk_weights, *weights

    def oracle(self, activation="silu", **layout):
        lay = oracle.layout(self.topk_idx, len(self.w_down), **layout)
        return MoE(self.x, self.topk_weights, self.w_gate_up, self.w_down, lay, activation)


NAMES = ("y", "dx", "d_topk_weights", "d_w_gate_up", "d_w_down")


def with_gradients(call):
    """Return a function of a layer's arrays and a cotangent that returns the results called `NAMES`, and others."""

    def fn(x, topk_idx, *others):
        *others, d_out = others
        y, pull = jax.vjp(lambda x, *others: call(x, topk_idx, *others), x, *others)
        # After the forward pass, like a cotangent: the interpreter does not order independent work.
        return y, *pull(d_out + (y.reshape(-1)[:1] == 12345.678).sum().astype(d_out.dtype))

    return fn


def check_gradients(got, layer, d_out, activation="silu", tolerance=None, **layout):
    """Compare the results of `with_gradients` with the oracle."""
    reference = layer.oracle(activation, **layout)
    wanted = reference.forward(), *reference.gradients(d_out.astype(np.float64))
    for name, g, w in zip(NAMES, got, wanted, strict=True):
        assert_close(g.reshape(w.shape), w, name, tolerance=tolerance)


def check_routings(call, routings, mesh, rng, subtests, shape, dtype=F32, **options):
    """Compare results of a compiled `with_gradients` with the oracle for each routing; see `check_gradients`."""
    for routing in routings:
        with subtests.test(routing):
            layer = Layer(rng, routing, mesh.size, shape, dtype)
            d_out = reals(rng, *layer.x.shape, dtype=dtype)
            check_gradients(call(*layer.args, d_out), layer, d_out, **options)


def round_trip(x, topk_idx, *_, num_experts=4, schedule=None):
    """Dispatch and combine every row with kernels: each token times its number of experts."""
    options = {"schedule": schedule, "implementation": "triton"}
    sent = jax_ep.dispatch(x, topk_idx, num_experts=num_experts, **options)
    return jax_ep.combine(sent.tokens, sent.handle, **options)


def low_latency_round_trip(x, topk_idx, topk_weights=None, *_, num_experts=4):
    """Do the same with the low-latency kernels: each token times the weights of its experts, by default 1."""
    topk_weights = jnp.ones(topk_idx.shape, jnp.float32) if topk_weights is None else topk_weights
    sizes = {"num_experts": num_experts, "max_tokens_per_rank": x.shape[0], "quantize": False}
    sent = jax_ep.low_latency_dispatch(x, topk_idx, **sizes, implementation="triton")
    return jax_ep.low_latency_combine(sent.tokens, topk_idx, topk_weights, sent.handle, implementation="triton")


def first_tokens(ids, count):
    """Ids `[T, K]` without those of the tokens at and past `count`."""
    return jnp.where(jnp.arange(ids.shape[0])[:, None] < count, ids, -1)


def second_derivative(call):
    """Return gradients of the sum of squared gradients, for the loss `sum(call(x, w)**2)`."""

    def loss(x, w):
        return jnp.sum(call(x, w).astype(jnp.float32) ** 2)

    def slope(x, w):
        dx, dw = jax.grad(loss, (0, 1))(x, w)
        return jnp.sum(dx.astype(jnp.float32) ** 2) + jnp.sum(dw.astype(jnp.float32) ** 2)

    return jax.grad(slope, (0, 1))
