"""Inputs of the benchmarks: sizes of models, meshes, routing and random arrays."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.core.fp8 import GROUP_SIZE as FP8_BLOCK
from jax_ep.core.layout import round_up
from jax_ep.tools.command import Default
from jax_ep.types import Layout

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
    "qwen3.5-35b": Model(2048, 512, 256, 8),
    "gpt-oss-120b": Model(2880, 2880, 128, 4),
    "glm-4.5": Model(5120, 1536, 160, 8),
    "glm-4.5-air": Model(4096, 1408, 128, 8),
    "llama-4-maverick": Model(5120, 8192, 128, 1),
    "deepseek-v2-lite": Model(2048, 1408, 64, 6),
    "tiny": Model(128, 128, 8, 2),
}
DEFAULT = Default("deepseek-v3", "tiny")


def check_ranks(models: Iterable[str], ranks: Sequence[int]) -> None:
    """Check that some of these numbers of ranks divides the experts of each model."""
    for name in models:
        experts = MODELS[name].experts
        if all(experts % n for n in ranks):
            raise ValueError(
                f"--ranks {' '.join(map(str, ranks))}: none divides the {experts} experts of {name}; pass others."
            )


def expert_mesh(num_ranks: int) -> jax.sharding.Mesh:
    """Return a mesh of the first devices, on the axis of the experts."""
    if num_ranks > jax.device_count():
        raise ValueError(f"--ranks {num_ranks}, expected at most {jax.device_count()}, the devices; pass fewer")
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((num_ranks,), AXIS, axis_types=auto, devices=jax.devices()[:num_ranks])


def initialize(mesh: jax.sharding.Mesh | None = None) -> None:
    """Initialize jax_ep for kernels; without GPUs they run in the interpreter."""
    jax_ep.finalize()
    jax_ep.init(mesh, transport=None if jax.default_backend() == "gpu" else "shared_memory")


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
    """Draw `[num_tokens, top_k]` different experts per token: uniformly, by Zipf's law, or the first ones."""
    if kind == "one-hot":
        return np.tile(np.arange(model.top_k, dtype=np.int32), (num_tokens, 1))
    return choose(popularity(kind, model.experts, rng), num_tokens, model.top_k, rng)


def on_ranks(mesh: jax.sharding.Mesh, shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Array:
    """Make random bfloat16 numbers of this shape on every rank, in chunks that need little extra memory."""
    if math.prod(shape[1:]) > _CHUNK:
        raise ValueError(f"an array {shape} on each rank: expected rows of at most {_CHUNK} elements")
    _check_memory(mesh, shape)
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


def _check_memory(mesh: jax.sharding.Mesh, shape: tuple[int, ...]) -> None:
    """Check that CPU devices have room for an array and work on it; Linux would kill the process without an error."""
    num_bytes = 2 * mesh.devices.size * math.prod(shape)
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    if mesh.devices.flat[0].platform == "cpu" and num_bytes > most:
        raise ValueError(
            f"an array {shape} on each of {mesh.devices.size} CPU devices has {num_bytes / 1e9:.1f} GB, expected at"
            f" most a quarter of this machine's memory, {most / 1e9:.1f} GB; choose smaller sizes, such as --model tiny"
        )


def make_weights(mesh: jax.sharding.Mesh, model: Model) -> tuple[Array, Array]:
    """Make the weights of all experts, `[E, H, 2I]` and `[E, I, H]`, sharded."""
    num_local = model.experts // mesh.devices.size
    gate_up = on_ranks(mesh, (num_local, model.hidden, 2 * model.intermediate), 0, model.hidden**-0.5)
    return gate_up, on_ranks(mesh, (num_local, model.intermediate, model.hidden), 1, model.intermediate**-0.5)


@dataclasses.dataclass(frozen=True)
class Case:
    """Tokens of all ranks and their routing, on the mesh."""

    mesh: jax.sharding.Mesh  # its only axis is that of the experts
    model: Model  # sizes of the layer
    routing: str  # "uniform", "zipf" or "one-hot"
    layout: Layout  # static sizes; the capacity is the most loaded rank's rows, rounded up to 128
    ids: np.ndarray  # `[W * T, K]` expert ids, on the host
    x: Array  # `[W * T, H]` tokens
    topk_idx: Array  # `[W * T, K]` expert ids
    topk_weights: Array  # `[W * T, K]` router weights, which sum to 1 for each token

    @property
    def title(self) -> str:
        """A description for tables."""
        return f"{self.layout.num_tokens} tokens/rank, {self.layout.num_ranks} ranks"

    @property
    def assignments(self) -> int:
        """Assignments of a token to an expert, per rank."""
        return self.layout.num_tokens * self.layout.top_k

    @property
    def owners(self) -> np.ndarray:
        """`[W, T, K]` rank of each expert."""
        return self.ids.reshape(self.layout.num_ranks, -1, self.layout.top_k) // self.layout.num_local_experts

    @property
    def rows(self) -> np.ndarray:
        """`[W]` real rows of each rank."""
        return np.bincount(self.owners.reshape(-1), minlength=self.layout.num_ranks)

    @property
    def remote(self) -> np.ndarray:
        """`[W, W]` number of tokens that each rank sends to each other rank; 0 to itself."""
        return np.minimum(self._remote_rows_of_tokens, 1).sum(axis=1)

    @property
    def remote_rows(self) -> np.ndarray:
        """`[W, W]` the same, once per token and expert."""
        return self._remote_rows_of_tokens.sum(axis=1)

    @property
    def _remote_rows_of_tokens(self) -> np.ndarray:
        """`[W, T, W]` rows of each token of a rank on each other rank."""
        ranks = np.arange(self.layout.num_ranks)
        return (self.owners[..., None] == ranks).sum(axis=2) * (ranks[:, None, None] != ranks)

    def row_bytes(self, wire: str) -> int:
        """Return the bytes of one token sent as "bf16" or "fp8"."""
        hidden = self.model.hidden
        return hidden + 4 * (hidden // FP8_BLOCK) if wire == "fp8" else self.x.dtype.itemsize * hidden


def busiest(counts: np.ndarray) -> float:
    """Return the largest number that a rank sends or receives, of `[W, W]`."""
    return float(max(counts.sum(axis=0).max(), counts.sum(axis=1).max()))


def place(mesh: jax.sharding.Mesh, rows: np.ndarray) -> Array:
    """Place `[W * N, ...]` from the host on the ranks of all processes."""
    return jax.make_array_from_callback(rows.shape, jax.NamedSharding(mesh, P(*AXIS)), lambda index: rows[index])


def make_case(mesh: jax.sharding.Mesh, kind: str, num_tokens: int, model: Model) -> Case:
    """Make random tokens, their routing and its weights."""
    num_ranks = mesh.devices.size
    if model.experts % num_ranks:
        raise ValueError(f"--ranks {num_ranks}: it must divide the {model.experts} experts of the model")
    ids = routing(kind, num_ranks * num_tokens, model, np.random.default_rng(0))
    most = np.bincount(ids.reshape(-1) // (model.experts // num_ranks), minlength=num_ranks).max()
    layout = Layout(num_ranks, model.experts, num_tokens, model.top_k, round_up(int(most), 128), axis=AXIS)
    scores = on_ranks(mesh, (num_tokens, model.top_k), 4)
    weights = jax.jit(lambda scores: jax.nn.softmax(scores.astype(jnp.float32), axis=-1))(scores)
    return Case(
        mesh, model, kind, layout, ids, on_ranks(mesh, (num_tokens, model.hidden), 2), place(mesh, ids), weights
    )


def group_sizes(distribution: str, rows: int, groups: int) -> Array:
    """Return `[groups]` int32 sizes with sum `rows`; Zipf has exponent 1 and groups in random order."""
    rng = np.random.default_rng(groups)
    share = np.full(groups, 1 / groups) if distribution == "multinomial" else 1 / (1 + rng.permutation(groups))
    if distribution == "equal":
        sizes = np.full(groups, rows // groups) + (np.arange(groups) < rows % groups)
    else:
        sizes = rng.multinomial(rows, share / share.sum())
    return jnp.asarray(sizes, jnp.int32)
