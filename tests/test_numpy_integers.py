"""Sizes given as NumPy integers, whose own arithmetic would wrap, mean the same as those given as Python's ints."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from harness import make_mesh
from jax_ep import placement, quantization, routing
from jax_ep.sharding import sharded_moe

T, H, E, K = 100, 128, 120, 2
IDS = jnp.stack([jnp.arange(T), jnp.arange(T)[::-1] + 20], axis=1).astype(jnp.int32)
LOGITS = jnp.sin(jnp.arange(T * E, dtype=jnp.float32)).reshape(T, E)
X = jnp.cos(jnp.arange(T * H, dtype=jnp.float32)).reshape(T, H)
WEIGHTS = jnp.ones((T, K))
MATRICES = jnp.ones((E, H, 4)), jnp.ones((E, 2, H))


def dispatch(of):
    return jax_ep.dispatch(X, IDS, WEIGHTS, num_experts=of(E), alignment=of(8), capacity=of(120), axis_name=())


def low_latency(of):
    sizes = {"num_experts": of(E), "max_tokens_per_rank": of(120), "group_size": of(64), "axis_name": ()}
    found = jax_ep.low_latency_dispatch(X, IDS, **sizes)
    rows = jnp.arange(found.tokens.shape[1])[None, :, None] < found.group_sizes[:, None, None]
    return jnp.where(rows, found.scales, 0), found.handle.layout


def layer(of):
    mesh = make_mesh((1,), ("expert",))
    return sharded_moe(mesh, num_experts=of(E), capacity=of(100))(X, IDS, WEIGHTS, *MATRICES)


def plan(of):
    sizes = {"num_slots": 124, "num_ranks": 4, "num_nodes": 2, "num_groups": 60}
    return placement.plan(np.arange(E), **{name: of(size) for name, size in sizes.items()})


def copies(of):
    return placement.Placement(np.arange(E), of(E), of(4), of(2)).rank_loads(np.arange(E))


def summary(of):
    zero = jnp.zeros(())
    metrics = routing.MoEMetrics(load=jnp.arange(E), dropped=zero, load_balancing_loss=zero, router_z_loss=zero)
    return metrics.summary(num_identity_experts=of(20), num_ranks=of(100))


CALLS = {
    "dispatch": dispatch,
    "low_latency_dispatch": low_latency,
    "sharded_moe": layer,
    "plan": plan,
    "Placement": copies,
    "MoEMetrics": summary,
    "quantize_fp8": lambda of: quantization.quantize_fp8(X, group_size=of(64)),
    "identity_experts": lambda of: routing.identity_experts(jax_ep.topk_router(LOGITS, of(100)), of(20)),
    "rows_per_rank": lambda of: jax_ep.Balance(1.1, of(100)).rows_per_rank(of(120)),
}


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.uint64], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_sizes_numpy_integers(call, kind):
    expected = call(int)
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("strict"):
        warnings.simplefilter("error")
        found = call(kind)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
