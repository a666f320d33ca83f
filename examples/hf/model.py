"""A decoder in Flax NNX for checkpoints of Qwen3-MoE, Mixtral and gpt-oss, with experts of `jax_ep.flax.MoE`.

Modules are named like the tensors of these checkpoints: `model.layers[3].self_attn.q_proj.kernel` is the transpose of
the tensor `model.layers.3.self_attn.q_proj.weight`. hf/loading.py relies on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from hf.config import DecoderConfig
from jax_ep.flax import MoE, MoEMetrics
from jax_ep.serving import ExpertWeights
from jax_ep.sharding import MeshAxes
from lm.attention import Cache, RMSNorm, attend, rotate
from lm.generation import last_rows, serving_weights

Array = jax.Array


class DecoderOutput(NamedTuple):
    """Output of a pass through the layers.

    Attributes:
      hidden: `[B, S, H]` after the last norm, for `Decoder.logits`.
      cache: updated cache of each layer; None without a cache.
      metrics: metrics of each MoE layer.
    """

    hidden: Array
    cache: list[Cache] | None
    metrics: list[MoEMetrics]


class Attention(nnx.Module):
    """Causal self-attention with grouped heads and rotary positions, and the variants of the families."""

    def __init__(self, config: DecoderConfig, window: int | None, *, rngs: nnx.Rngs, **dtypes: Any) -> None:
        self.config, self.window = config, window
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=config.attention_bias, rngs=rngs, **dtypes)

        self.q_proj = linear(config.hidden_size, queries)
        self.k_proj = linear(config.hidden_size, keys)
        self.v_proj = linear(config.hidden_size, keys)
        self.o_proj = linear(queries, config.hidden_size)
        norm = {"eps": config.norm_eps, "param_dtype": dtypes["param_dtype"]}
        self.q_norm = RMSNorm(config.head_dim, **norm) if config.head_norms else None
        self.k_norm = RMSNorm(config.head_dim, **norm) if config.head_norms else None
        self.sinks = nnx.Param(jnp.zeros(config.num_heads, dtypes["param_dtype"])) if config.sinks else None

    def __call__(self, x: Array, positions: Array, cache: Cache | None) -> tuple[Array, Cache | None]:
        config, (batch, length, _) = self.config, x.shape
        query, key, value = (
            project(x).reshape(batch, length, -1, config.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        frequencies = jnp.array(config.rope.frequencies, jnp.float32)
        query, key = (rotate(x, positions, frequencies, config.rope.scale) for x in (query, key))
        sinks = None if self.sinks is None else self.sinks[...]
        mixed, cache = attend(query, key, value, positions, cache, window=self.window, sinks=sinks)
        return self.o_proj(mixed.reshape(batch, length, -1)), cache


class GatedMLP(nnx.Module):
    """A dense layer, `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, **dtypes: Any) -> None:
        self.gate_proj = nnx.Linear(config.hidden_size, config.mlp_size, use_bias=False, rngs=rngs, **dtypes)
        self.up_proj = nnx.Linear(config.hidden_size, config.mlp_size, use_bias=False, rngs=rngs, **dtypes)
        self.down_proj = nnx.Linear(config.mlp_size, config.hidden_size, use_bias=False, rngs=rngs, **dtypes)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """Attention and `mlp`, dense or MoE, each after a norm and added to the residual stream."""

    def __init__(
        self, config: DecoderConfig, window: int | None, mlp: MoE | GatedMLP, *, rngs: nnx.Rngs, **dtypes: Any
    ) -> None:
        norm = {"eps": config.norm_eps, "param_dtype": dtypes["param_dtype"]}
        self.input_layernorm = RMSNorm(config.hidden_size, **norm)
        self.self_attn = Attention(config, window, rngs=rngs, **dtypes)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, **norm)
        self.mlp = mlp

    def __call__(
        self,
        x: Array,
        positions: Array,
        token_mask: Array | None,
        cache: Cache | None,
        serving: ExpertWeights | None,
    ) -> tuple[Array, Cache | None, MoEMetrics | None]:
        mixed, cache = self.self_attn(self.input_layernorm(x), positions, cache)
        x = x + mixed
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MoE):
            y, metrics = self.mlp(normed, serving, token_mask=token_mask)
        else:
            y, metrics = self.mlp(normed), None
        return x + y, cache, metrics


class _Body(nnx.Module):
    """The part that checkpoints call `model`: everything except the head."""

    def __init__(self, embed_tokens: nnx.Embed, layers: list[Layer], norm: RMSNorm) -> None:
        self.embed_tokens = embed_tokens
        self.layers = nnx.List(layers)
        self.norm = norm


class Decoder(nnx.Module):
    """A decoder from token ids to logits.

    Args:
      config: configuration of everything except the experts.
      moe_options: keyword arguments of the `MoE` of each MoE layer.
      moe_layers: which layers are MoE.
      mesh: (data, expert) mesh, see lm/devices.py, or None for one device.
      dtype: dtype of the computation; norms, softmax, routers and logits use float32.
      param_dtype: dtype of the parameters; routers stay in float32.
      rngs: for parameters, which a checkpoint replaces.
    """

    def __init__(
        self,
        config: DecoderConfig,
        moe_options: dict[str, Any],
        moe_layers: Sequence[int],
        *,
        mesh: jax.sharding.Mesh | None,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        self.config, self.dtype = config, dtype
        self.moe_layers = tuple(moe_layers)
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        axes = MeshAxes(batch=() if mesh is None else "data")

        def layer(index: int, window: int | None) -> Layer:
            if index in self.moe_layers:
                mlp = MoE(**moe_options, mesh=mesh, axes=axes, rngs=rngs, **dtypes)
            else:
                mlp = GatedMLP(config, rngs=rngs, **dtypes)
            return Layer(config, window, mlp, rngs=rngs, **dtypes)

        self.model = _Body(
            nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs, **dtypes),
            [layer(index, window) for index, window in enumerate(config.windows)],
            RMSNorm(config.hidden_size, config.norm_eps, param_dtype=param_dtype),
        )
        if config.tied:
            self.lm_head = None
        else:
            self.lm_head = nnx.Linear(config.hidden_size, config.vocab_size, use_bias=False, rngs=rngs, **dtypes)

    def __call__(
        self,
        tokens: Array,
        *,
        positions: Array | None = None,
        cache: list[Cache] | None = None,
        token_mask: Array | None = None,
        serving: list[ExpertWeights | None] | None = None,
    ) -> DecoderOutput:
        """Run `tokens [B, S]` through all layers.

        Args:
          tokens: `[B, S]` ids.
          positions: `[B, S]` of the tokens in their texts; None counts from 0.
          cache: keys and values of earlier positions, or None to attend to `tokens` only.
          token_mask: `[B, S]` bool, False for padding, which goes to no expert. Padding must follow the text, because
            only causality keeps it out of attention.
          serving: the expert weights of each layer for the low-latency path; see `jax_ep.flax.MoE`.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        x = self.model.embed_tokens(tokens)
        filled, metrics = [], []
        for index, layer in enumerate(self.model.layers):
            of_layer = (None if part is None else part[index] for part in (cache, serving))
            x, layer_cache, layer_metrics = layer(x, positions, token_mask, *of_layer)
            filled.append(layer_cache)
            metrics += [] if layer_metrics is None else [layer_metrics]
        return DecoderOutput(self.model.norm(x), None if cache is None else filled, metrics)

    def logits(self, hidden: Array) -> Array:
        """Return logits `[..., vocab_size]` float32 of the next token, from `hidden [..., H]`."""
        head = self.model.embed_tokens.attend if self.lm_head is None else self.lm_head
        return head(hidden).astype(jnp.float32)

    def empty_cache(self, batch: int, length: int) -> list[Cache]:
        """Create the caches of all layers for `length` positions of each of `batch` texts."""
        zeros = jnp.zeros((batch, length, self.config.num_kv_heads, self.config.head_dim), self.dtype)
        return [Cache(zeros, zeros) for _ in self.config.windows]

    def serving_weights(self, experts: str) -> list[ExpertWeights | None]:
        """Return the expert weights of each layer; None for dense layers."""
        prepare = nnx.jit(lambda moe: serving_weights(moe, experts))
        return [prepare(layer.mlp) if isinstance(layer.mlp, MoE) else None for layer in self.model.layers]

    def decode(
        self, tokens: Array, last: Array, cache: list[Cache], **options: Any
    ) -> tuple[Array, list[Cache] | None]:
        """Return logits `[B, vocab_size]` after index `last [B]` of each text, and the cache."""
        output = self(tokens, cache=cache, **options)
        return self.logits(last_rows(output.hidden, last)), output.cache
