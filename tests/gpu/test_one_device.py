"""The expert layer of one device in the sizes of models: from one token to thousands, of few experts and of many."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_ep
from cases import F32
from harness import to_numpy
from jax_ep.quantization import dequantize_experts, quantize_experts

ON_GPU = jax.default_backend() == "gpu"
TOKENS = [1, 7, 129, 1000, 4099, 16384] if ON_GPU else [1, 7, 33]
HIDDEN, INNER, TOP_K = (1024, 768, 8) if ON_GPU else (128, 128, 2)


def in_float32(x: Any, ids: Any, weights: Any, w_gate_up: Any, w_down: Any) -> Any:
    """The layer expert by expert, of all tokens, as if every one had a row of each."""

    def add(total: Any, expert: Any) -> tuple[Any, None]:
        index, up, down = expert
        gate, factor = jnp.split(jnp.dot(x, up, precision="highest"), 2, axis=-1)
        share = jnp.sum(jnp.where(ids == index, weights, 0), axis=1, keepdims=True)
        return total + share * jnp.dot(jax.nn.silu(gate) * factor, down, precision="highest"), None

    experts = jnp.arange(len(w_down), dtype=jnp.int32), w_gate_up, w_down
    return lax.scan(add, jnp.zeros_like(x), experts)[0]


@pytest.mark.parametrize("one", [True, False], ids=["one launch", "several launches"])
@pytest.mark.parametrize("expert_format", [None, "fp8", "mxfp4"])
@pytest.mark.parametrize("routing", ["uniform", "one expert", "some without"])
@pytest.mark.parametrize("num_experts", [8, 512] if ON_GPU else [8])
@pytest.mark.slow
def test_layer(one_process: None, num_experts: int, routing: str, expert_format: str | None, one: bool) -> None:
    rng = np.random.default_rng(num_experts)
    shapes = (num_experts, HIDDEN, 2 * INNER), (num_experts, INNER, HIDDEN)
    keys = jax.random.split(jax.random.key(num_experts))
    make = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16) * shape[1] ** -0.5, static_argnums=1)
    matrices: Any = [make(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    wide = [w.astype(F32) for w in matrices]
    if expert_format is not None:
        matrices = [jax.jit(partial(quantize_experts, format=expert_format))(w) for w in matrices]
        wide = [jnp.swapaxes(dequantize_experts(q, jnp.float32), -1, -2) for q in matrices]
    call = jax.jit(partial(jax_ep.fused_moe, schedule=jax_ep.Schedule(single_launch=one), implementation="triton"))
    for tokens in TOKENS:
        scores = rng.random((tokens, num_experts), np.float32)
        ids = np.argpartition(scores, TOP_K - 1, axis=1)[:, :TOP_K].astype(np.int32)
        if routing == "one expert":
            ids[:] = -1
            ids[:, 1] = 3
        elif routing == "some without":
            ids[rng.random(ids.shape) < 0.3] = -1
        weights = rng.random(ids.shape, np.float32)
        x = jax.random.normal(jax.random.key(tokens), (tokens, HIDDEN), jnp.bfloat16)
        got = to_numpy(call(x, ids, weights, *matrices)).astype(np.float64)
        want = to_numpy(jax.jit(in_float32)(x.astype(F32), ids, weights, *wide)).astype(np.float64)
        assert np.linalg.norm(got - want) <= 1.2e-2 * np.linalg.norm(want), tokens
        assert np.array_equal(np.any(got, axis=1), np.any(want, axis=1)), "a token with an expert has no result"
