"""A decoder with a key-value cache, with the widths of a published model and random weights; see serve.py.

RMSNorm, grouped-query attention with norms of queries and keys and rotary positions, a top-k router, experts in any
format, and a language model head. Models of gpt-oss have biases, sinks and windows instead of these norms; their
rotary positions lack YaRN, which takes no time. Everything except experts is in bfloat16. Layers are unrolled,
because a scan copies each layer's weights. On GPUs attention to a prompt runs in cuDNN; a decode step runs attention
and its router in the kernels of decode.py. Query head h belongs to key head `h % kv_heads`, so that a decode step
needs no transpose; published weights have `h // (heads // kv_heads)`, and need a permutation once. The cache is
updated in place when the state is donated.

On a mesh, `on_mesh` runs a program on each device: texts and experts are split over the devices, and dense weights are
replicated.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import Experts, low_latency_moe, moe, topk_router
from jax_ep.serving import ExpertWeights, serving_weights
from jax_ep.tools.benchmark import inputs
from jax_ep.tools.benchmark.fused_moe import FORMATS
from jax_ep.tools.benchmark.train import ARCHITECTURES, ROTARY_BASE, Architecture, Params, rms_norm, rotate

_SWIGLU = Experts(interleaved=True, alpha=1.702, clamp=7.0, up_offset=1.0)
_GPT_OSS = {"biases": True, "function": _SWIGLU}
MODELS = {
    "qwen3-30b": ARCHITECTURES["qwen3-30b"],
    "gpt-oss-120b": Architecture(inputs.MODELS["gpt-oss-120b"], 64, 8, 64, 201_088, 36, window=128, **_GPT_OSS),
    "tiny": ARCHITECTURES["tiny"]._replace(shared=0),
    "tiny-gpt-oss": Architecture(inputs.Model(192, 96, 8, 2), 8, 2, 32, 256, 3, window=8, **_GPT_OSS),
}
_FEWEST_ROWS = 16  # of a matmul on tensor cores
SCOPES = ("attention", "router", "experts", "head")
"""Named scopes of the operations of a step."""


class State(NamedTuple):
    """State that one decode step hands to the next one."""

    token: Array  # `[B]` int32 ids that are chosen, but not yet in the cache
    position: Array  # int32, of these tokens; all texts have the same length
    cache: list[tuple[Array, Array]]  # keys and values of each layer, `[B, S, kv_heads, head_dim]`
    topk_idx: Array  # `[layers, B, K]` experts of the last token of each text


type Layer = tuple[Params, ExpertWeights]
"""The dense weights of a layer by name, and those of its experts."""
LAYER_SPECS = P(), P(inputs.AXIS)
STATE_SPECS = State(P(inputs.AXIS), P(), P(inputs.AXIS), P(None, inputs.AXIS))


def on_mesh(mesh: Mesh | None, function: Any, in_specs: Any, out_specs: Any, **options: Any) -> Any:
    """Return the compiled function of each device's part of the arrays; without a mesh, of whole ones on one device."""
    if mesh is None:
        return jax.jit(function, **options)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    shardings = [jax.tree.map(partial(NamedSharding, mesh), specs) for specs in (in_specs, out_specs)]
    return jax.jit(mapped, in_shardings=shardings[0], out_shardings=shardings[1], **options)


def _axis() -> tuple[str, ...]:
    """Return the mesh axis of the experts inside `on_mesh`; (): one device."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def _normal(key: Array, *shape: int, scale: float) -> Array:
    return (jax.random.normal(key, shape, jnp.float32) * scale).astype(jnp.bfloat16)


def _matrix(key: Array, rows: int, columns: int) -> Array:
    return _normal(key, rows, columns, scale=rows**-0.5)


def _biases(key: Array, **widths: int) -> Params:
    keys = jax.random.split(key, len(widths))
    return {name: _normal(key, width, scale=0.1) for key, (name, width) in zip(keys, widths.items(), strict=True)}


def _init_expert(model: Architecture, weight_format: str, keys: Array) -> ExpertWeights:
    """Return the random weights of one expert in a format."""
    hidden, inner, *_ = model.experts
    made = ExpertWeights(_matrix(keys[0], hidden, 2 * inner), _matrix(keys[1], inner, hidden))
    if model.biases:
        made = made._replace(**_biases(jax.random.fold_in(keys[0], 1), b_gate_up=2 * inner, b_down=hidden))
    if weight_format == "bfloat16" and not _axis():
        return made
    # `low_latency_moe` reads transposed weights.
    formats: dict[str, Any] = {"format": None} if weight_format == "bfloat16" else FORMATS[weight_format]
    w_gate_up, w_down, *biases = jax.tree.map(lambda leaf: leaf[None], made)
    served = serving_weights(w_gate_up, w_down, **formats, experts=model.function, biases=tuple(biases))
    return jax.tree.map(lambda leaf: leaf[0], served)


def _init_layer(model: Architecture, weight_format: str, keys: Array, expert_keys: Array) -> Layer:
    """Return the random weights of one layer; experts one by one, which needs little extra memory."""
    hidden, _, num_experts, _ = model.experts
    query, kv = model.widths
    made = {
        "qkv": _matrix(keys[0], hidden, query + 2 * kv),
        "out": _matrix(keys[1], query, hidden),
        "router": _matrix(keys[2], hidden, num_experts),
    }
    norms: dict[str, Any] = {"attention_norm": hidden, "experts_norm": hidden}
    if model.biases:
        widths = {"qkv_bias": query + 2 * kv, "out_bias": hidden, "router_bias": num_experts, "sinks": model.heads}
        made |= _biases(jax.random.fold_in(keys[0], 1), **widths)
    else:  # one scale per head, so that one kernel applies all
        norms["qk_norm"] = (model.heads + model.kv_heads, model.head_dim)
    made |= {name: jnp.ones(shape, jnp.float32) for name, shape in norms.items()}
    return made, lax.map(partial(_init_expert, model, weight_format), expert_keys)


def specs_of(layers: int) -> Params:
    """Return partition specs of the weights: experts are split, the rest is replicated."""
    return {"embedding": P(), "head": P(), "norm": P(), "layers": [LAYER_SPECS] * layers}


def _init_ends(model: Architecture, key: Array) -> Params:
    """Return the random embedding and head."""
    hidden, keys = model.experts.hidden, jax.random.split(key)
    embedding = _matrix(keys[0], model.vocabulary, hidden) * jnp.bfloat16(math.sqrt(model.vocabulary))
    head = _matrix(keys[1], hidden, model.vocabulary)
    return {"embedding": embedding, "head": head, "norm": jnp.ones(hidden, jnp.float32)}


def init_params(model: Architecture, layers: int, weight_format: str, mesh: Mesh | None = None) -> Params:
    """Return random weights, the same on any mesh; one program per layer, so that there is never a second copy."""
    make = partial(_init_layer, model, weight_format)
    layer = on_mesh(mesh, make, (P(), P(inputs.AXIS)), LAYER_SPECS)

    def init_layer(key: Array) -> Layer:
        first, second, *rest = jax.random.split(key, 5)
        expert_keys = [jax.random.split(key, model.experts.experts) for key in (first, second)]
        return layer(jnp.stack(rest), jnp.stack(expert_keys, axis=1))

    made = on_mesh(mesh, partial(_init_ends, model), P(), P())(jax.random.key(0))
    return made | {"layers": [init_layer(jax.random.key(1 + i)) for i in range(layers)]}


def abstract_params(model: Architecture, layers: int, weight_format: str, mesh: Mesh | None = None) -> Params:
    """Return the shapes and dtypes of the weights."""
    return jax.eval_shape(partial(init_params, model, layers, weight_format, mesh))


def init_state(model: Architecture, layers: int, batch: int, length: int, mesh: Mesh | None = None) -> State:
    """Return a state with a random cache of `length` positions and random tokens.

    On a mesh whose devices do not divide the batch, the first texts are repeated until they do: a batch of 1 runs on
    each device.
    """
    shape = (batch, length, model.kv_heads, model.head_dim)
    rows = batch if mesh is None else batch + -batch % mesh.size
    sharding = None if mesh is None else NamedSharding(mesh, P(inputs.AXIS))

    @partial(jax.jit, out_shardings=sharding)
    def pair(key: Array) -> tuple[Array, Array]:
        keys, values = jax.random.normal(key, (2, *shape), jnp.bfloat16)
        return jnp.resize(keys, (rows, *shape[1:])), jnp.resize(values, (rows, *shape[1:]))

    tokens = jnp.resize(jax.random.randint(jax.random.key(0), (batch,), 0, model.vocabulary, jnp.int32), rows)
    topk_idx = jnp.zeros((layers, rows, model.experts.top_k), jnp.int32)
    return State(tokens, jnp.int32(0), [pair(jax.random.key(1 + i)) for i in range(layers)], topk_idx)


def window_of(model: Architecture, layer: int) -> int | None:
    """Return the positions that a layer sees; None: all."""
    return model.window if layer % 2 == 0 else None


def _attention(query: Array, keys: Array, values: Array, sinks: Array | None, **options: Any) -> Array:
    """Compute attention of `[B, T, heads, D]`; query head h belongs to key head `h % kv_heads`.

    `options` are those of `jax.nn.dot_product_attention`.
    """
    batch, length, heads, size = query.shape
    grouped = query.reshape(batch, length, -1, keys.shape[2], size).swapaxes(2, 3)
    run = partial(jax.nn.dot_product_attention, **options)
    if sinks is None:
        mixed = run(grouped.reshape(query.shape), keys, values)
    else:
        mixed, log_sum = run(grouped.reshape(query.shape), keys, values, return_residual=True)
        sinks = sinks.reshape(-1, keys.shape[2]).T.reshape(heads)
        # The share of the softmax that sinks, which have no values, leave to the keys.
        share = jax.nn.sigmoid(log_sum.astype(jnp.float32) - sinks.astype(jnp.float32))
        mixed = (mixed * share[..., None]).astype(mixed.dtype)
    return mixed.reshape(batch, length, keys.shape[2], -1, size).swapaxes(2, 3).reshape(batch, length, heads * size)


def _attend_to_cache(
    query: Array, keys: Array, values: Array, position: Array, window: int | None, sinks: Array | None
) -> Array:
    """Compute attention of one query `[B, 1, heads, D]` to all positions up to its own, or to the last `window`."""
    first, seen = jnp.int32(0), min(window or keys.shape[1], keys.shape[1])
    if seen < keys.shape[1]:
        first = jnp.maximum(position + 1 - seen, 0)
        keys, values = (lax.dynamic_slice_in_dim(x, first, seen, axis=1) for x in (keys, values))
    lengths = jnp.full(len(query), position + 1 - first)
    return _attention(query, keys, values, sinks, key_value_seq_lengths=lengths, implementation="xla")


def _project(weights: Params, name: str, x: Array) -> Array:
    """Multiply `[B, T, .]` by dense weights, and add their bias, if any."""
    rows = x.reshape(-1, x.shape[-1])
    # XLA multiplies fewer rows without tensor cores, and reads the weights at a third of the rate.
    padded = jnp.pad(rows, ((0, max(0, _FEWEST_ROWS - len(rows))), (0, 0)))
    y = (padded @ weights[name])[: len(rows)].reshape(*x.shape[:-1], -1)
    return y + weights[f"{name}_bias"] if f"{name}_bias" in weights else y


def _run_experts(
    model: Architecture, weights: ExpertWeights, x: Array, topk_idx: Array, topk_weights: Array, *, decodes: bool
) -> Array:
    """Run the expert layer on `[T, H]`: on one device, or over the mesh axis."""
    layer = low_latency_moe if _axis() and decodes else moe
    return layer(
        x,
        topk_idx,
        topk_weights,
        weights.w_gate_up,
        weights.w_down,
        num_experts=model.experts.experts,
        experts=model.function,
        biases=weights[2:] if model.biases else None,
        axis_name=_axis(),
    )


def uses_kernels() -> bool:
    """Return whether a decode step runs the kernels of decode.py."""
    return jax.default_backend() == "gpu"


def _attend(
    model: Architecture,
    window: int | None,
    weights: Params,
    rows: Array,
    position: Array,
    cache: tuple[Array, Array] | None,
    zeros: Array | None,
) -> tuple[Array, tuple[Array, Array], Array | None]:
    """Compute attention of `rows [B, T, .]`, queries, keys and values; return it, the cache, and the zeros."""
    norm, sinks = weights.get("qk_norm"), weights.get("sinks")
    if cache is not None and zeros is not None:
        from jax_ep.tools.benchmark import decode  # imports Triton

        options: dict[str, Any] = {"heads": model.heads, "base": ROTARY_BASE, "window": window}
        mixed, cache, zeros = decode.attend(rows[:, 0], cache, position, zeros, norm=norm, sinks=sinks, **options)
        return mixed[:, None], cache, zeros
    heads = rows.reshape(*rows.shape[:2], -1, model.head_dim)
    normed = heads[:, :, : model.heads + model.kv_heads]
    if norm is not None:
        normed = rms_norm(normed, norm)
    query, key = jnp.split(rotate(normed, position), (model.heads,), axis=2)
    value = heads[:, :, model.heads + model.kv_heads :]
    if cache is None:
        options = {"is_causal": True, "local_window_size": None if window is None else (window - 1, 0)}
        options["implementation"] = "cudnn" if jax.default_backend() == "gpu" else "xla"
        return _attention(query, key, value, sinks, **options), (key, value), None
    keys, values = (
        lax.dynamic_update_slice_in_dim(old, new, position, axis=1)
        for old, new in zip(cache, (key, value), strict=True)
    )
    return _attend_to_cache(query, keys, values, position, window, sinks), (keys, values), None


def _route(model: Architecture, weights: Params, x: Array, zeros: Array | None) -> tuple[Array, Array, Array | None]:
    """Choose the experts of `x [T, H]`; return ids, weights and the zeros."""
    if zeros is not None:
        from jax_ep.tools.benchmark import decode

        return decode.route(x, weights["router"], weights.get("router_bias"), zeros, model.experts.top_k)
    logits = jnp.dot(x, weights["router"], preferred_element_type=jnp.float32)
    if "router_bias" in weights:
        logits += weights["router_bias"].astype(jnp.float32)
    routing = topk_router(logits, model.experts.top_k)
    return routing.topk_idx, routing.topk_weights, None


@partial(jax.jit, static_argnums=(0, 1))  # traced and lowered once for all layers of a window
def run_layer(
    model: Architecture,
    window: int | None,
    layer: Layer,
    x: Array,
    position: Array,
    cache: tuple[Array, Array] | None,
    zeros: Array | None,
) -> tuple[Array, tuple[Array, Array], Array, Array | None]:
    """Run one layer on `x [B, T, H]`: a whole prompt without a cache, or one token of each text with one.

    Returns:
      The output, the keys and values, the chosen experts `[B * T, K]`, and the zeros.
    """
    (weights, experts), decodes = layer, cache is not None
    with jax.named_scope("attention"):
        rows = _project(weights, "qkv", rms_norm(x, weights["attention_norm"]))
        mixed, cache, zeros = _attend(model, window, weights, rows, position, cache, zeros)
        x = x + _project(weights, "out", mixed)
    with jax.named_scope("router"):
        flat = rms_norm(x, weights["experts_norm"]).reshape(-1, x.shape[-1])
        *routing, zeros = _route(model, weights, flat, zeros)
    with jax.named_scope("experts"):
        y = _run_experts(model, experts, flat, *routing, decodes=decodes)
        return x + y.reshape(x.shape), cache, routing[0], zeros


def _logits(params: Params, x: Array) -> Array:
    """Return float32 logits `[B, V]` of the next token, from the last position of `x [B, T, H]`."""
    with jax.named_scope("head"):
        last = rms_norm(x[:, -1], params["norm"])
        return jnp.dot(last, params["head"], preferred_element_type=jnp.float32)


def _run(model: Architecture, params: Params, tokens: Array, position: Array, cache: Any) -> tuple[State, Array]:
    """Run tokens `[B, T]` through all layers, and choose the most likely next ones."""
    x = params["embedding"][tokens]
    has_kernels = cache is not None and uses_kernels()
    caches, experts, zeros = [], [], jnp.zeros(len(x) * model.kv_heads, jnp.int32) if has_kernels else None
    for index, layer in enumerate(params["layers"]):
        layer_cache = None if cache is None else cache[index]
        window = window_of(model, index)
        x, layer_cache, topk_idx, zeros = run_layer(model, window, layer, x, position, layer_cache, zeros)
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
