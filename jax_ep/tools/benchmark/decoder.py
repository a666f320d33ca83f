"""A decoder with a key-value cache in plain JAX, with the widths of a published model and random weights; see serve.py.

RMSNorm, grouped-query attention with norms of queries and keys and rotary positions, a top-k router, experts in any
format, and a language model head. Everything except experts is in bfloat16. Layers are unrolled, because a scan copies
each layer's weights. Attention runs in cuDNN on GPUs. Query head h belongs to key head `h % kv_heads`, so that a decode
step needs no transpose; published weights have `h // (heads // kv_heads)`, and need a permutation once. The cache is
updated in place when the state is donated.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_ep import fused_moe, topk_router
from jax_ep.serving import serving_weights
from jax_ep.tools.benchmark.fused_moe import FORMATS
from jax_ep.tools.benchmark.train import ARCHITECTURES, Architecture, Params, rms_norm, rotate

MODELS = {"qwen3-30b": ARCHITECTURES["qwen3-30b"], "tiny": ARCHITECTURES["tiny"]._replace(shared=0)}
SCOPES = ("attention", "router", "experts", "head")
"""Named scopes of the operations of a step."""


class State(NamedTuple):
    """State that one decode step hands to the next one.

    Attributes:
      token: `[B]` int32 ids that are chosen, but not yet in the cache.
      position: int32, of these tokens; all texts have the same length.
      cache: keys and values of each layer, `[B, S, kv_heads, head_dim]`.
      topk_idx: `[layers, B, K]` experts of the last token of each text.
    """

    token: Array
    position: Array
    cache: list[tuple[Array, Array]]
    topk_idx: Array


def _matrix(key: Array, *shape: int) -> Array:
    """Return random bfloat16 weights, one matrix at a time, which needs little extra memory."""

    def one(key: Array) -> Array:
        return (jax.random.normal(key, shape[-2:], jnp.float32) * shape[-2] ** -0.5).astype(jnp.bfloat16)

    return one(key) if len(shape) == 2 else lax.map(one, jax.random.split(key, shape[0]))


@partial(jax.jit, static_argnums=(0, 1))
def init_layer(model: Architecture, weight_format: str, key: Array) -> Params:
    """Return the random weights of one layer, with its experts in a format."""
    hidden, inner, num_experts, _ = model.experts
    query, kv = model.widths
    keys = jax.random.split(key, 5)
    experts = _matrix(keys[0], num_experts, hidden, 2 * inner), _matrix(keys[1], num_experts, inner, hidden)
    if weight_format != "bfloat16":
        experts = serving_weights(*experts, **FORMATS[weight_format])[:2]
    qk_norm = (model.heads + model.kv_heads, model.head_dim)  # one scale per head, so that one kernel applies all
    norms = {"attention_norm": hidden, "experts_norm": hidden, "qk_norm": qk_norm}
    return {
        "qkv": _matrix(keys[2], hidden, query + 2 * kv),
        "out": _matrix(keys[3], query, hidden),
        "router": _matrix(keys[4], hidden, num_experts),
        "experts": experts,
    } | {name: jnp.ones(shape, jnp.float32) for name, shape in norms.items()}


@partial(jax.jit, static_argnums=0)
def init_ends(model: Architecture, key: Array) -> Params:
    """Return the random embedding and head."""
    hidden, keys = model.experts.hidden, jax.random.split(key)
    embedding = _matrix(keys[0], model.vocabulary, hidden) * jnp.bfloat16(math.sqrt(model.vocabulary))
    head = _matrix(keys[1], hidden, model.vocabulary)
    return {"embedding": embedding, "head": head, "norm": jnp.ones(hidden, jnp.float32)}


def init_params(model: Architecture, layers: int, weight_format: str) -> Params:
    """Return random weights; one program per layer, so that there is never a second copy."""
    made = init_ends(model, jax.random.key(0))
    return made | {"layers": [init_layer(model, weight_format, jax.random.key(1 + i)) for i in range(layers)]}


def abstract_params(model: Architecture, layers: int, weight_format: str) -> Params:
    """Return the shapes and dtypes of the weights."""
    return jax.eval_shape(partial(init_params, model, layers, weight_format))


def init_state(model: Architecture, layers: int, batch: int, length: int) -> State:
    """Return a state with a random cache of `length` positions and random tokens."""
    shape = (batch, length, model.kv_heads, model.head_dim)

    @jax.jit
    def pair(key: Array) -> tuple[Array, Array]:
        keys, values = jax.random.normal(key, (2, *shape), jnp.bfloat16)
        return keys, values

    tokens = jax.random.randint(jax.random.key(0), (batch,), 0, model.vocabulary, jnp.int32)
    topk_idx = jnp.zeros((layers, batch, model.experts.top_k), jnp.int32)
    return State(tokens, jnp.int32(0), [pair(jax.random.key(1 + i)) for i in range(layers)], topk_idx)


def attend(query: Array, key: Array, value: Array, lengths: Array | None = None) -> Array:
    """Compute attention of `[B, T, heads, D]`: causal, or to the first `lengths [B]` keys."""
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=lengths is None,
        key_value_seq_lengths=lengths,
        implementation="cudnn" if jax.default_backend() == "gpu" else "xla",
    )


def attend_to_prompt(query: Array, key: Array, value: Array) -> Array:
    """Compute causal attention of `[B, T, heads, D]`; query head h belongs to key head `h % kv_heads`."""
    batch, length, heads, size = query.shape
    grouped = query.reshape(batch, length, -1, key.shape[2], size).swapaxes(2, 3)
    mixed = attend(grouped.reshape(query.shape), key, value)
    return mixed.reshape(batch, length, key.shape[2], -1, size).swapaxes(2, 3).reshape(batch, length, heads * size)


def attend_to_cache(query: Array, keys: Array, values: Array, position: Array) -> Array:
    """Compute attention of one query `[B, 1, heads, D]` to all positions up to its own."""
    batch, _, heads, size = query.shape
    # The query heads of a key head become its queries: they all see the same positions, and keys are read once.
    grouped = query.reshape(batch, -1, keys.shape[2], size)
    mixed = attend(grouped, keys, values, jnp.full((batch,), position + 1, jnp.int32))
    return mixed.reshape(batch, 1, heads * size)


@partial(jax.jit, static_argnums=0)  # traced and lowered once for all layers
def run_layer(
    model: Architecture, weights: Params, x: Array, position: Array, cache: tuple[Array, Array] | None
) -> tuple[Array, tuple[Array, Array], Array]:
    """Run one layer on `x [B, T, H]`: a whole prompt without a cache, or one token of each text with one.

    Returns:
      The output, the keys and values, and the chosen experts `[B * T, K]`.
    """
    with jax.named_scope("attention"):
        rows = rms_norm(x, weights["attention_norm"]) @ weights["qkv"]
        heads = rows.reshape(*x.shape[:2], -1, model.head_dim)
        rotated = rotate(rms_norm(heads[:, :, : model.heads + model.kv_heads], weights["qk_norm"]), position)
        query, key = jnp.split(rotated, (model.heads,), axis=2)
        value = heads[:, :, model.heads + model.kv_heads :]
        if cache is None:
            cache, mixed = (key, value), attend_to_prompt(query, key, value)
        else:
            keys, values = (
                lax.dynamic_update_slice_in_dim(old, new, position, axis=1)
                for old, new in zip(cache, (key, value), strict=True)
            )
            cache, mixed = (keys, values), attend_to_cache(query, keys, values, position)
        x = x + mixed @ weights["out"]
    with jax.named_scope("router"):
        flat = rms_norm(x, weights["experts_norm"]).reshape(-1, x.shape[-1])
        logits = jnp.dot(flat, weights["router"], preferred_element_type=jnp.float32)
        routing = topk_router(logits, model.experts.top_k)
    with jax.named_scope("experts"):
        y = fused_moe(flat, routing.topk_idx, routing.topk_weights, *weights["experts"])
        return x + y.reshape(x.shape), cache, routing.topk_idx


def _logits(params: Params, x: Array) -> Array:
    """Return float32 logits `[B, V]` of the next token, from the last position of `x [B, T, H]`."""
    with jax.named_scope("head"):
        last = rms_norm(x[:, -1], params["norm"])
        return jnp.dot(last, params["head"], preferred_element_type=jnp.float32)


def _run(model: Architecture, params: Params, tokens: Array, position: Array, cache: Any) -> tuple[State, Array]:
    """Run tokens `[B, T]` through all layers, and choose the most likely next ones."""
    x = params["embedding"][tokens]
    caches, experts = [], []
    for index, weights in enumerate(params["layers"]):
        x, layer_cache, topk_idx = run_layer(model, weights, x, position, None if cache is None else cache[index])
        caches.append(layer_cache)
        experts.append(topk_idx.reshape(*tokens.shape, -1)[:, -1])
    logits = _logits(params, x)
    with jax.named_scope("head"):
        chosen = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return State(chosen, position + tokens.shape[1], caches, jnp.stack(experts)), logits


def prefill(model: Architecture, params: Params, tokens: Array) -> tuple[State, Array]:
    """Read prompts `[B, T]`; the cache of the result has no room for further positions."""
    return _run(model, params, tokens, jnp.int32(0), None)


def step(model: Architecture, params: Params, state: State) -> tuple[State, Array]:
    """Decode one token of each text; also return the logits that the next one is chosen from."""
    return _run(model, params, state.token[:, None], state.position, state.cache)


def decode(model: Architecture, steps: int, params: Params, state: State) -> State:
    """Decode `steps` tokens of each text."""
    return lax.fori_loop(0, steps, lambda _, state: step(model, params, state)[0], state)
