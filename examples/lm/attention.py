"""Parts of both examples' models: a norm, rotary positions, and causal attention with a cache of keys and values."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

Array = jax.Array


class Cache(NamedTuple):
    """Keys and values of one layer at all positions so far: `[B, S, kv_heads, head_dim]`."""

    keys: Array
    values: Array


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32, with a scale per channel."""

    def __init__(self, size: int, eps: float = 1e-6, *, param_dtype: Any = jnp.float32) -> None:
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(size, param_dtype))

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return jnp.einsum("...h,h->...h", wide, self.scale[...].astype(jnp.float32)).astype(x.dtype)


def rotate(x: Array, positions: Array, frequencies: Array, scale: float = 1.0) -> Array:
    """Apply rotary embedding to `x [B, S, heads, D]` at `positions [B, S]`, in float32.

    Args:
      x: queries or keys.
      positions: their positions.
      frequencies: `[D // 2]` radians per position of each channel pair.
      scale: factor of cosines and sines.
    """
    angle = positions[:, :, None, None].astype(jnp.float32) * frequencies[None, None, None, :]
    cos, sin = scale * jnp.cos(angle), scale * jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attend(
    query: Array,
    key: Array,
    value: Array,
    positions: Array,
    cache: Cache | None,
    *,
    window: int | None = None,
    sinks: Array | None = None,
) -> tuple[Array, Cache | None]:
    """Return softmax-weighted values `[B, S, heads, head_dim]` of each query, and the cache with the new positions.

    All scores are in memory at once: a prompt of S tokens takes S * S of them per head.

    Args:
      query: `[B, S, heads, head_dim]`; each group of `heads / kv_heads` of them shares one head of keys and values.
      key, value: `[B, S, kv_heads, head_dim]`.
      positions: `[B, S]` of the tokens in their texts.
      cache: keys and values of earlier positions, or None to attend to the given ones only.
      window: number of positions that a query sees, including its own; None: all up to its own.
      sinks: `[heads]` logits that take part in the softmax and add nothing; or None.
    """
    batch, length, kv_heads, head_dim = key.shape
    key_positions = positions
    if cache is not None:
        rows = jnp.arange(batch)[:, None]
        cache = Cache(cache.keys.at[rows, positions].set(key), cache.values.at[rows, positions].set(value))
        key, value = cache
        key_positions = jnp.arange(key.shape[1])[None]
    # A cache slot past the query's position is empty or padding: the causal mask hides it.
    ahead = positions[:, :, None] - key_positions[:, None, :]
    visible = (ahead >= 0) if window is None else (ahead >= 0) & (ahead < window)
    query = query.reshape(batch, length, kv_heads, -1, head_dim)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", query, key, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, None], scores * head_dim**-0.5, -jnp.inf)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : key.shape[1]].astype(value.dtype)
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights, value).reshape(batch, length, -1, head_dim), cache
