"""The expert layer of one device at model sizes: from one token to thousands, with few and many experts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_ep
from cases import F32
from harness import to_numpy
from jax_ep.core.expert_matrices import QuantizedWeights
from jax_ep.quantization import dequantize
from stored_experts import store

ON_GPU = jax.default_backend() == "gpu"
TOKENS = [1, 129, 4099, 16384] if ON_GPU else [1, 33]
ROUTINGS = ["uniform", "one expert", "some without"]
HIDDEN, INNER, TOP_K = (1024, 768, 8) if ON_GPU else (128, 128, 2)


def in_float32(x, ids, weights, w_gate_up, w_down):
    """Compute the layer expert by expert on all tokens; weights are widened one by one."""

    def wide(matrix):
        if isinstance(matrix, QuantizedWeights):
            one = jax.tree.map(lambda values: values[None], matrix)
            return dequantize(one, jnp.float32)[0]
        return matrix.astype(F32)

    def add(total, expert):
        index, up, down = expert
        gate, factor = jnp.split(jnp.dot(x, wide(up), precision="highest"), 2, axis=-1)
        share = jnp.sum(jnp.where(ids == index, weights, 0), axis=1, keepdims=True)
        return total + share * jnp.dot(jax.nn.silu(gate) * factor, wide(down), precision="highest"), None

    experts = jnp.arange(w_down.shape[0], dtype=jnp.int32), w_gate_up, w_down
    return lax.scan(add, jnp.zeros_like(x), experts)[0]


@pytest.mark.parametrize("one", [True, False], ids=["one launch", "several launches"])
@pytest.mark.parametrize("stored", [None, "fp8", "int4", "mxfp4", "int4 prepacked", "mxfp4 prepacked"])
@pytest.mark.parametrize("num_experts", [8, 512] if ON_GPU else [8])
@pytest.mark.slow
def test_one_device_layer(one_process, num_experts, stored, one):
    rng = np.random.default_rng(num_experts)
    shapes = (num_experts, HIDDEN, 2 * INNER), (num_experts, INNER, HIDDEN)
    keys = jax.random.split(jax.random.key(num_experts))
    make = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16) * shape[1] ** -0.5, static_argnums=1)
    matrices = [make(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    if stored is not None:
        matrices = [store(w, stored) for w in matrices]
    call = jax.jit(partial(jax_ep.fused_moe, schedule=jax_ep.Schedule(single_launch=one), implementation="triton"))
    reference = jax.jit(in_float32)
    for tokens in TOKENS:
        x = jax.random.normal(jax.random.key(tokens), (tokens, HIDDEN), jnp.bfloat16)
        for routing in ROUTINGS:  # With one compilation.
            ids = choose(rng, routing, tokens, num_experts)
            weights = rng.random(ids.shape, np.float32)
            got = to_numpy(call(x, ids, weights, *matrices)).astype(np.float64)
            want = to_numpy(reference(x.astype(F32), ids, weights, *matrices)).astype(np.float64)
            assert np.linalg.norm(got - want) <= 1.2e-2 * np.linalg.norm(want), (tokens, routing)
            assert np.array_equal(np.any(got, axis=1), np.any(want, axis=1)), "a token with an expert has no result"


def choose(rng, routing, tokens, num_experts):
    """Choose `[T, K]` distinct experts of each token, or -1."""
    ids = np.argpartition(rng.random((tokens, num_experts), np.float32), TOP_K - 1, axis=1)[:, :TOP_K].astype(np.int32)
    if routing == "one expert":
        ids[:] = -1
        ids[:, 1] = 3
    elif routing == "some without":
        ids[rng.random(ids.shape) < 0.3] = -1
    return ids
