"""Training through jax_ep.moe on four ranks follows dense training on one device, step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from harness import EXPERT

NUM_RANKS, TOKENS, TOP_K, EXPERTS, HIDDEN, SIZE = 4, 8, 2, 8, 12, 6
STEPS, LEARNING_RATE = 10, 0.2


def route(x, router):
    scores, topk_idx = jax.lax.top_k(jax.nn.softmax(x @ router), TOP_K)
    return topk_idx.astype(jnp.int32), scores / jnp.sum(scores, axis=-1, keepdims=True)


def dense_layer(parameters, x):
    """Apply every expert to every token, without dispatch and rows."""
    topk_idx, topk_weights = route(x, parameters["router"])
    z = jnp.einsum("th,ehc->tec", x, parameters["w_gate_up"])
    out = jnp.einsum("tei,eih->teh", jax.nn.silu(z[..., :SIZE]) * z[..., SIZE:], parameters["w_down"])
    gates = jnp.einsum("tk,tke->te", topk_weights, jax.nn.one_hot(topk_idx, EXPERTS, dtype=x.dtype))
    return jnp.einsum("te,teh->th", gates, out)


def parallel_layer(implementation, mesh):
    def body(parameters, x):
        topk_idx, topk_weights = route(x, parameters["router"])
        experts, options = (parameters["w_gate_up"], parameters["w_down"]), {"implementation": implementation}
        return jax_ep.moe(x, topk_idx, topk_weights, *experts, num_experts=EXPERTS, **options)

    specs = {"router": P(), "w_gate_up": P(EXPERT), "w_down": P(EXPERT)}
    return jax.shard_map(body, mesh=mesh, in_specs=(specs, P(EXPERT)), out_specs=P(EXPERT))


def train_step(layer):
    def loss(parameters, x, target):
        return jnp.mean(jnp.square(x + layer(parameters, x) - target))

    @jax.jit
    def step(parameters, x, target):
        value, gradients = jax.value_and_grad(loss)(parameters, x, target)
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, parameters, gradients), value

    return step


@pytest.mark.slow
def test_ten_steps(implementation, expert_mesh):
    # A fixed seed: a near tie in the router could send the two runs to different experts.
    rng = np.random.default_rng(0)

    def normal(*shape, scale=1.0):
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    parameters = {
        "router": normal(HIDDEN, EXPERTS),
        "w_gate_up": normal(EXPERTS, HIDDEN, 2 * SIZE, scale=HIDDEN**-0.5),
        "w_down": normal(EXPERTS, SIZE, HIDDEN, scale=SIZE**-0.5),
    }
    initial, parallel, dense = parameters, parameters, parameters
    parallel_step = train_step(parallel_layer(implementation, expert_mesh(NUM_RANKS)))
    dense_step = train_step(dense_layer)
    chosen = jax.jit(lambda x, router: route(x, router)[0])
    losses, routes = [], set()
    data = [normal(NUM_RANKS * TOKENS, HIDDEN) for _ in range(2)]
    targets = [normal(NUM_RANKS * TOKENS, HIDDEN) for _ in range(2)]
    for i in range(STEPS):
        batch = data[i % 2], targets[i % 2]
        routes.add(np.asarray(chosen(batch[0], dense["router"])).tobytes())
        parallel, got = parallel_step(parallel, *batch)
        dense, want = dense_step(dense, *batch)
        losses.append(float(want))
        np.testing.assert_allclose(float(got), float(want), rtol=1e-5, err_msg=f"loss at step {i}")
        for name in parameters:
            np.testing.assert_allclose(
                np.asarray(parallel[name]), np.asarray(dense[name]), rtol=1e-4, atol=1e-5, err_msg=f"{name}, step {i}"
            )
    # The comparison is meaningful: every parameter moved, the loss fell, and the routing changed.
    assert losses[-1] < 0.9 * losses[1]
    assert len(routes) > 2
    for name, value in initial.items():
        assert np.abs(np.asarray(dense[name]) - value).max() > 1e-3, name
