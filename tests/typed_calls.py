"""Types that a user's checker sees: `make lint` checks this file, which nothing runs."""

from typing import assert_type

import jax
from flax import nnx

import jax_ep
from jax_ep.flax import MoE
from jax_ep.types import Dispatched, Handle, HierarchicalHandle


def layer(x: jax.Array, idx: jax.Array, weights: jax.Array, w: jax.Array) -> jax.Array:
    d = jax_ep.dispatch(x, idx, weights, num_experts=8)
    assert_type(d, Dispatched[jax.Array, jax.Array, Handle])
    rows = jax_ep.grouped_gemm(d.tokens, w, d.group_sizes)
    jax_ep.placement.with_copies(w, d.handle)
    return jax_ep.combine(rows * d.weights[:, None], d.handle)


def other_dispatches(x: jax.Array, idx: jax.Array, weights: jax.Array | None) -> None:
    assert_type(jax_ep.dispatch(x, idx, num_experts=8), Dispatched[jax.Array, None, Handle])
    assert_type(jax_ep.dispatch(x, idx, weights, num_experts=8).weights, jax.Array | None)
    assert_type(jax_ep.dispatch((x, x), idx, num_experts=8).tokens, tuple[jax.Array, jax.Array])
    nodes = jax_ep.Topology("node", "gpu")
    assert_type(jax_ep.dispatch(x, idx, num_experts=8, axis_name=nodes).handle, HierarchicalHandle)


def names_of_configurations() -> None:
    jax_ep.Experts("relu_squared", gated=False, weight_on="input")
    jax_ep.Experts("relu2")  # type: ignore[arg-type]
    jax_ep.Router("sigmod")  # type: ignore[arg-type]


def modules_on_demand(x: jax.Array) -> None:
    assert_type(jax_ep.flax.MoE(4, 4, 4, 2, rngs=nnx.Rngs(0)), MoE)
    jax_ep.checkpoints.Checkpoint("folder").close()
    jax_ep.moee  # type: ignore[attr-defined]
