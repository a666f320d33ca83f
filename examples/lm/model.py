"""Decoder-only MoE transformer in Flax NNX: pre-norm RMSNorm, RoPE attention, MoE blocks, layers stacked for scan."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jax_ep import Balance, Router, Schedule
from jax_ep.flax import MoE, MoEMetrics, SharedExperts
from jax_ep.serving import ExpertWeights
from jax_ep.sharding import MeshAxes
from lm.attention import Cache, RMSNorm, attend, rotate
from lm.data import NUM_BYTES
from lm.generation import last_rows, serving_weights

Array = jax.Array
# Saved under remat="keep-experts", because recomputing or sending them again is expensive.
_EXPERT_NAMES = ("jax_ep.tokens", "jax_ep.hidden")
_MOST_UNROLLED = 8


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of the model; plain values, so that a checkpoint can store them as JSON."""

    hidden: int = 128
    layers: int = 3
    heads: int = 4
    intermediate: int = 192
    experts: int = 8
    top_k: int = 2
    shared_experts: int = 0
    router_balance: Literal["loss", "bias"] = "loss"
    balance_rows: float = 1.1
    dropout: float = 0.0
    rope_base: float = 10_000.0
    dtype: str = "bfloat16"
    recipe: str | None = None
    remat: Literal["none", "full", "keep-experts"] = "none"
    capacity: int | None = None
    implementation: str | None = None

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden={self.hidden} must be an even multiple of heads={self.heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and less than 1")


def _linear(inputs: int, outputs: int, config: ModelConfig, rngs: nnx.Rngs, **options: Any) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=False, dtype=config.dtype, rngs=rngs, **options)


class Attention(nnx.Module):
    """Causal self-attention with rotary positions and an optional cache."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.qkv = _linear(config.hidden, 3 * config.hidden, config, rngs)
        self.out = _linear(config.hidden, config.hidden, config, rngs)

    def __call__(self, x: Array, positions: Array, cache: Cache | None) -> tuple[Array, Cache | None]:
        config, (batch, length, hidden) = self.config, x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, config.heads, -1)
        query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        half = query.shape[-1] // 2
        frequencies = config.rope_base ** (-jnp.arange(half, dtype=jnp.float32) / half)
        query, key = rotate(query, positions, frequencies), rotate(key, positions, frequencies)
        if cache is None and jax.default_backend() == "gpu" and value.dtype.itemsize == 2:
            # The score matrix never reaches memory in cuDNN's kernel.
            mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
        else:
            mixed, cache = attend(query, key, value, positions, cache)
        return self.out(mixed.reshape(batch, length, hidden)), cache


class Block(nnx.Module):
    """Attention and an MoE layer, each after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, *, mesh: jax.sharding.Mesh, rngs: nnx.Rngs) -> None:
        self.dropout = config.dropout
        self.attention_norm = RMSNorm(config.hidden)
        self.attention = Attention(config, rngs=rngs)
        self.moe_norm = RMSNorm(config.hidden)
        self.moe = MoE(
            config.hidden,
            config.intermediate,
            config.experts,
            config.top_k,
            shared_experts=SharedExperts(config.shared_experts) if config.shared_experts else None,
            router=Router("sigmoid", selection_bias=True) if config.router_balance == "bias" else Router(),
            capacity=config.capacity,
            balance=Balance(config.balance_rows) if config.balance_rows and config.capacity is None else None,
            dtype=config.dtype,
            recipe=config.recipe,
            mesh=mesh,
            axes=MeshAxes(batch="data"),
            schedule=Schedule(keep_tokens=config.remat == "keep-experts"),
            implementation=config.implementation,
            rngs=rngs,
        )

    def __call__(
        self,
        x: Array,
        positions: Array,
        cache: Cache | None,
        key: Array | None,
        weights: ExpertWeights | None,
        token_mask: Array | None,
    ) -> tuple[Array, Cache | None, MoEMetrics]:
        keys = (None, None) if key is None else jax.random.split(key)
        mixed, cache = self.attention(self.attention_norm(x), positions, cache)
        x = x + self._drop(mixed, keys[0])
        y, metrics = self.moe(self.moe_norm(x), weights, token_mask=token_mask)
        return x + self._drop(y, keys[1]), cache, metrics

    def _drop(self, x: Array, key: Array | None) -> Array:
        if key is None or self.dropout == 0.0:
            return x
        kept = jax.random.bernoulli(key, 1.0 - self.dropout, x.shape)
        return jnp.where(kept, x * (1.0 / (1.0 - self.dropout)), jnp.zeros_like(x))


class LanguageModel(nnx.Module):
    """A model from bytes to logits of the next byte. `blocks` stacks the parameters of all layers on the first axis."""

    def __init__(self, config: ModelConfig, *, mesh: jax.sharding.Mesh, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embedding = nnx.Embed(
            NUM_BYTES, config.hidden, dtype=config.dtype, embedding_init=nnx.initializers.normal(0.5), rngs=rngs
        )

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
        def make_blocks(rngs: nnx.Rngs) -> Block:
            return Block(config, mesh=mesh, rngs=rngs)

        self.blocks = make_blocks(rngs)
        self.norm = RMSNorm(config.hidden)
        # Small initial logits, so that the loss starts near that of the uniform distribution.
        self.head = _linear(config.hidden, NUM_BYTES, config, rngs, kernel_init=nnx.initializers.normal(0.02))

    def __call__(
        self,
        tokens: Array,
        *,
        positions: Array | None = None,
        cache: Cache | None = None,
        key: Array | None = None,
        weights: ExpertWeights | None = None,
        token_mask: Array | None = None,
    ) -> tuple[Array, Cache | None, MoEMetrics]:
        """Return logits `[B, S, 256]` float32, the updated cache, and the metrics with one row per layer.

        Args:
          tokens: `[B, S]` bytes.
          positions: `[B, S]` of the tokens in their texts, for calls with a cache; None counts from 0.
          cache: keys and values of earlier positions, or None to attend to `tokens` only.
          key: random key for dropout; None disables dropout.
          weights: expert weights of all layers, for serving or quantized for training; see `jax_ep.flax.MoE`.
          token_mask: `[B, S]` bool, False for padding, which follows the text and goes to no expert.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        keys = None if key is None else jax.random.split(key, self.config.layers)

        def layer(
            x: Array, block: Block, cache: Cache | None, key: Array | None, weights: ExpertWeights | None
        ) -> tuple[Array, Any]:
            x, cache, metrics = block(x, positions, cache, key, weights, token_mask)
            return x, (cache, metrics)

        layers = nnx.scan(
            _remat(layer, self.config.remat),
            in_axes=(nnx.Carry, 0, 0, 0, 0),
            out_axes=(nnx.Carry, 0),
            transform_metadata={nnx.PARTITION_NAME: None},
            # A loop copies each layer's weights and residuals; unrolled layers compile longer.
            unroll=_MOST_UNROLLED if jax.default_backend() == "gpu" else 1,
        )
        x, (cache, metrics) = layers(self.embedding(tokens), self.blocks, cache, keys, weights)
        return self.head(self.norm(x)).astype(jnp.float32), cache, metrics

    def empty_cache(self, batch: int, length: int) -> Cache:
        """Create the caches of all layers, stacked, for `length` positions of each of `batch` texts."""
        config = self.config
        shape = (config.layers, batch, length, config.heads, config.hidden // config.heads)
        return Cache(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype))

    def serving_weights(self, experts: str) -> ExpertWeights:
        """Return the expert weights of all layers, prepared in one program, so that each device processes its own."""
        return nnx.jit(lambda moe: serving_weights(moe, experts))(self.blocks.moe)

    def decode(
        self, tokens: Array, last: Array, cache: Cache, *, serving: ExpertWeights | None, **options: Any
    ) -> tuple[Array, Cache | None]:
        """Return logits `[B, 256]` after index `last [B]` of each text, and the cache."""
        logits, cache, _ = self(tokens, cache=cache, weights=serving, **options)
        return last_rows(logits, last), cache


def _remat(layer: Any, mode: str) -> Any:
    if mode == "none":
        return layer
    policy = jax.checkpoint_policies.save_only_these_names(*_EXPERT_NAMES) if mode == "keep-experts" else None
    # CSE cannot happen inside a scan, so the barrier against it would only cost time.
    return nnx.remat(layer, prevent_cse=False, policy=policy)
