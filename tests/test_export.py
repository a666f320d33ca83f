"""Result types in `jax.export`: each can be serialized, as an argument and as a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jax_ep
from jax_ep.core.expert_matrices import TrainingWeights
from jax_ep.placement import plan
from jax_ep.quantization import quantize_experts, quantize_master_weights
from jax_ep.routing import MoEMetrics
from jax_ep.serving import ServingWeights, serving_weights
from jax_ep.types import Layout

LAYOUT = Layout(2, 4, 3, 2, 16, axis=("node", "expert"))
ONE = jnp.ones((2, 3))
HANDLE = jax_ep.Handle(ONE, ONE, ONE, ONE, None, ONE, ONE, LAYOUT)
IDS = jnp.zeros((4, 2), jnp.int32)
W = jnp.ones((2, 128, 128))
VALUES: dict[str, Callable[[], Any]] = {
    "Routing": lambda: jax_ep.Routing(IDS, ONE, ONE),
    "Handle": lambda: HANDLE,
    "HierarchicalHandle": lambda: jax_ep.HierarchicalHandle(HANDLE, HANDLE, ONE, ONE),
    "Dispatched": lambda: jax_ep.dispatch(jnp.ones((4, 8)), IDS, num_experts=2, axis_name=()),
    "DispatchedGemm": lambda: jax_ep.DispatchedGemm(ONE, None, ONE, HANDLE, ONE),
    "SortedTokens": lambda: jax_ep.SortedTokens(ONE, None, ONE, ONE, ONE),
    "LowLatencyHandle": lambda: jax_ep.LowLatencyHandle(ONE, ONE, ONE, ONE, ONE, LAYOUT),
    "LowLatencyDispatched": lambda: jax_ep.LowLatencyDispatched(
        ONE, None, ONE, jax_ep.LowLatencyHandle(ONE, ONE, ONE, ONE, ONE, LAYOUT, own_ids=ONE)
    ),
    "QuantizedExperts": lambda: quantize_experts(W, "int8", activations="int8"),
    "Fp8Weights": lambda: quantize_master_weights(W),
    "TrainingWeights": lambda: TrainingWeights(quantize_master_weights(W), quantize_master_weights(W)),
    "ServingWeights": lambda: serving_weights(W, W[:, :64]),
    "ServingWeights mxfp4": lambda: ServingWeights(quantize_experts(W, "mxfp4"), W),
    "MoEMetrics": lambda: MoEMetrics(load=ONE, load_balancing_loss=ONE, router_z_loss=ONE, dropped=ONE),
    "Placement": lambda: plan(np.arange(4), num_slots=6, num_ranks=2),
}


@pytest.mark.parametrize("name", VALUES)
def test_export_round_trip_of_a_result_type(name: str) -> None:
    value = VALUES[name]()
    exported = export.export(jax.jit(lambda value: value))(value)
    again = export.deserialize(exported.serialize())
    assert again.in_tree == exported.in_tree and again.out_tree == exported.out_tree
    got = again.call(value)
    assert type(got) is type(value) and jax.tree.structure(got) == jax.tree.structure(value)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32)), got, value)


def test_every_public_pytree_can_be_exported() -> None:
    covered = {name.split()[0] for name in VALUES}
    assert {name for name in jax_ep.__all__ if name in ("Routing", "SortedTokens") or "Dispatched" in name} <= covered
    assert {name for name in jax_ep.__all__ if "Handle" in name or "Weights" in name or "Quantized" in name} <= covered


def _layer(x: jax.Array, logits: jax.Array, **options: Any) -> jax.Array:
    weights = jnp.linspace(-0.2, 0.2, 4 * 8 * 12).reshape(4, 8, 12), jnp.linspace(-0.2, 0.2, 4 * 6 * 8).reshape(4, 6, 8)
    routing = jax_ep.topk_router(logits, 2)
    return jax_ep.fused_moe(x, routing.topk_idx, routing.topk_weights, *weights, implementation="xla", **options)


@pytest.mark.parametrize("constraints", [(), ("n >= 8", "n <= 65536")])
def test_export_of_a_symbolic_number_of_tokens(constraints: tuple[str, ...], rng: np.random.Generator) -> None:
    """One program for every batch size: a layer and its gradients."""

    def both(x: jax.Array, logits: jax.Array) -> Any:
        return _layer(x, logits), jax.grad(lambda *a: jnp.sum(jnp.sin(_layer(*a))), argnums=(0, 1))(x, logits)

    (n,) = export.symbolic_shape("n", constraints=constraints)
    exported = export.export(jax.jit(both))(*(jax.ShapeDtypeStruct((n, size), jnp.float32) for size in (8, 4)))
    for size in (8, 33):
        arrays = [rng.normal(size=(size, columns)).astype(np.float32) for columns in (8, 4)]
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), exported.call(*arrays), both(*arrays)
        )


def test_export_of_a_symbolic_number_of_tokens_in_fp8() -> None:
    (n,) = export.symbolic_shape("n")
    shapes = jax.ShapeDtypeStruct((n, 128), jnp.float32), jax.ShapeDtypeStruct((n, 4), jnp.float32)
    w = quantize_experts(jnp.ones((4, 128, 256)), "int8"), quantize_experts(jnp.ones((4, 128, 128)), "int8")

    def layer(x: jax.Array, logits: jax.Array) -> jax.Array:
        routing = jax_ep.topk_router(logits, 2)
        return jax_ep.fused_moe(x, routing.topk_idx, routing.topk_weights, *w)

    with pytest.raises(NotImplementedError, match="x has n tokens, a symbolic number, expected a known one"):
        export.export(jax.jit(layer))(*shapes)
