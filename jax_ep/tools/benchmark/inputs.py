"""Inputs of the benchmarks: sizes of models, meshes, routing and random arrays."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

AXIS = ("expert",)
_CHUNK = 1 << 28


class Model(NamedTuple):
    """Sizes of an expert layer."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int


MODELS = {
    "deepseek-v3": Model(7168, 2048, 256, 8),
    "deepseek-v3-quarter": Model(7168, 2048, 64, 8),  # with a quarter of the experts, one GPU can train it
    "qwen3-235b": Model(4096, 1536, 128, 8),
    "mixtral-8x7b": Model(4096, 14336, 8, 2),
    "qwen3-30b": Model(2048, 768, 128, 8),
    "gpt-oss-120b": Model(2880, 2880, 128, 4),
    "glm-4.5": Model(5120, 1536, 160, 8),
    "glm-4.5-air": Model(4096, 1408, 128, 8),
    "llama-4-maverick": Model(5120, 8192, 128, 1),
    "deepseek-v2-lite": Model(2048, 1408, 64, 6),
    "tiny": Model(128, 128, 8, 2),
}
DEFAULT, QUICK = "deepseek-v3", "tiny"


def expert_mesh(num_ranks: int) -> jax.sharding.Mesh:
    """Return a mesh of the first devices, on the axis of the experts."""
    if num_ranks > jax.device_count():
        raise ValueError(f"--ranks {num_ranks}: there are {jax.device_count()} devices")
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((num_ranks,), AXIS, axis_types=auto, devices=jax.devices()[:num_ranks])


def popularity(kind: str, experts: int, rng: np.random.Generator, exponent: float = 1.0) -> np.ndarray:
    """Return `[experts]` logarithms of popularities: uniform, or by Zipf's law in a random order."""
    if kind != "zipf":
        return np.zeros(experts)
    return -exponent * np.log(1 + rng.permutation(experts))


def choose(popularity: np.ndarray, num_tokens: int, top_k: int, rng: np.random.Generator) -> np.ndarray:
    """Draw `[num_tokens, top_k]` different experts per token, without replacement, by popularity."""
    if num_tokens * top_k >= 1 << 31:
        raise ValueError(f"{num_tokens} tokens of all ranks with {top_k} experts each: more than int32 numbers")
    ids = np.empty((num_tokens, top_k), np.int32)
    for start in range(0, num_tokens, 8192):  # Gumbel top-k
        scores = popularity + rng.gumbel(size=(min(8192, num_tokens - start), len(popularity)))
        ids[start : start + len(scores)] = np.argpartition(-scores, top_k, axis=1)[:, :top_k]
    return ids


def routing(kind: str, num_tokens: int, model: Model, rng: np.random.Generator) -> np.ndarray:
    """Draw `[num_tokens, top_k]` different experts per token, uniformly or by Zipf's law."""
    return choose(popularity(kind, model.experts, rng), num_tokens, model.top_k, rng)


def on_ranks(mesh: jax.sharding.Mesh, shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Array:
    """Make random bfloat16 numbers of this shape on every rank, in chunks that need little extra memory."""
    chunks = next(n for n in range(1, shape[0] + 1) if shape[0] % n == 0 and math.prod(shape) <= n * _CHUNK)

    def make(rank: Array) -> Array:
        def chunk(key: Array) -> Array:
            # Numbers drawn in bfloat16 have few distinct values, and the GPU would draw less power.
            numbers = scale * jax.random.normal(key, (shape[0] // chunks, *shape[1:]), jnp.float32)
            return numbers.astype(jnp.bfloat16)

        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), rank[0]), chunks)
        return lax.map(chunk, keys).reshape(shape)

    made = jax.shard_map(make, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
    return jax.jit(made)(jnp.arange(mesh.devices.size))


def make_weights(mesh: jax.sharding.Mesh, model: Model) -> tuple[Array, Array]:
    """Make the weights of all experts, `[E, H, 2I]` and `[E, I, H]`, sharded."""
    num_local = model.experts // mesh.devices.size
    gate_up = on_ranks(mesh, (num_local, model.hidden, 2 * model.intermediate), 0, model.hidden**-0.5)
    return gate_up, on_ranks(mesh, (num_local, model.intermediate, model.hidden), 1, model.intermediate**-0.5)
