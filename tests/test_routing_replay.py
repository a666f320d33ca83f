"""Replay of a routing: `topk_router(topk_idx=)` and `MoE(..., topk_idx=)`, and the scalars of `MoEMetrics.summary`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_ep
from jax_ep import Router
from jax_ep.flax import MoE
from jax_ep.routing import MoEMetrics

ROUTERS = [
    Router(),
    Router("sigmoid", renormalize=False, scale=2.5),
    Router("sigmoid", num_groups=4, topk_groups=2, selection_bias=True),
]


@pytest.mark.parametrize("router", ROUTERS)
def test_topk_router_replays_its_own_choice(router, rng):
    logits = rng.standard_normal((9, 8)).astype(np.float32)
    bias = rng.standard_normal(8).astype(np.float32) if router.selection_bias else None

    def run(logits, topk_idx):
        routing = jax_ep.topk_router(logits, 3, router=router, bias=bias, topk_idx=topk_idx)
        return jnp.sum(jnp.sin(routing.topk_weights)), routing

    (_, want), want_gradient = jax.value_and_grad(run, has_aux=True)(logits, None)
    (_, got), gradient = jax.value_and_grad(run, has_aux=True)(logits, want.topk_idx)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    np.testing.assert_array_equal(gradient, want_gradient)


def test_topk_router_replay_weights_of_other_experts(rng):
    logits = rng.standard_normal((5, 4)).astype(np.float32)
    topk_idx = np.array([[0, 1], [3, -1], [-1, -1], [2, 0], [1, 3]], np.int32)
    scores = np.exp(logits.astype(np.float64))
    taken = np.where(topk_idx < 0, 0, np.take_along_axis(scores, np.maximum(topk_idx, 0), 1))
    want = taken / np.maximum(taken.sum(1, keepdims=True), 1e-30)
    routing = jax_ep.topk_router(logits, 2, topk_idx=topk_idx)
    np.testing.assert_array_equal(routing.topk_idx, topk_idx)
    np.testing.assert_allclose(routing.topk_weights, want, rtol=1e-6)


@pytest.mark.parametrize(
    ("router", "topk_idx", "message"),
    [
        (Router(), np.zeros((5, 3), np.int32), "K of topk_idx"),
        (Router(), np.zeros((4, 2), np.int32), "topk_idx"),
        (Router(), np.full((5, 2), 9, np.int32), "topk_idx"),
        (Router("sparsemixer"), np.zeros((5, 2), np.int32), "leave topk_idx out"),
    ],
)
def test_topk_router_replay_errors(router, topk_idx, message):
    with pytest.raises(ValueError, match=message):
        jax_ep.topk_router(np.zeros((5, 4), np.float32), 2, router=router, topk_idx=topk_idx)


@pytest.mark.parametrize("devices", [0, 4])
def test_moe_replays_the_routing_of_another_pass(devices, rng):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("expert",), axis_types=auto, devices=jax.devices()[:devices]) if devices else None
    if mesh is None:
        mesh = jax.make_mesh((1,), ("expert",), axis_types=auto, devices=jax.devices()[:1])
    router = Router(renormalize=False, num_identity_experts=4)
    layer = MoE(16, 8, 4, 2, router=router, dtype=jnp.float32, mesh=mesh, rngs=nnx.Rngs(0))
    x, other = (rng.standard_normal((3, 5, 16)).astype(np.float32) for _ in range(2))
    y, metrics = layer(x)
    assert metrics.topk_idx.shape == (3, 5, 2)
    again, same = layer(x, topk_idx=metrics.topk_idx)
    np.testing.assert_array_equal(again, y)
    moved, replayed = layer(other, topk_idx=metrics.topk_idx)
    np.testing.assert_array_equal(replayed.topk_idx, metrics.topk_idx)
    np.testing.assert_array_equal(replayed.load, same.load)
    assert not np.array_equal(moved, layer(other)[0])
    with pytest.raises(ValueError, match=r"MoE: topk_idx has shape \(5, 2\), expected rank 3, \[3, 5, 2\]"):
        layer(x, topk_idx=metrics.topk_idx[0])


def test_moe_metrics_summary():
    load = jnp.array([[4, 4, 4, 4], [16, 0, 0, 0], [8, 8, 0, 0]])
    nothing = jnp.zeros(3)
    metrics = MoEMetrics(load=load, dropped=jnp.array([0, 4, 0]), load_balancing_loss=nothing, router_z_loss=nothing)
    found = {name: np.asarray(value).tolist() for name, value in metrics.summary(num_ranks=2).items()}
    assert found["load"] == [1, 4, 2] and found["rank_load"] == [1, 2, 2]
    assert found["dead_experts"] == [0, 3, 2] and found["dropped_share"] == [0, 0.25, 0]
    np.testing.assert_allclose(found["entropy"], [1, 0, 0.5], atol=1e-6)
    assert "rank_load" not in metrics.summary()
