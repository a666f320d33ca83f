"""Calls of decode_kernels.py, for decoder.py: a decode step in few launches."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

from jax_ep.core.kernel import Config, Kernel
from jax_ep.core.layout import power_of_two
from jax_ep.megakernels.launch import launch, num_programs, unsliced
from jax_ep.tools.benchmark import decode_kernels
from jax_ep.tools.benchmark.decode_kernels import Attention, Cache, Parts, Route, Routed

_ROUTE, _ATTEND = Kernel(decode_kernels.route), Kernel(decode_kernels.attend)
_BLOCK = 64  # positions
_PARTS = 4  # of a router's columns


def route(x: Array, weights: Array, bias: Array | None, zeros: Array, top_k: int) -> tuple[Array, Array, Array]:
    """Choose experts by a softmax over the best logits, like `Router()`.

    Args:
      x: `[B, H]` tokens.
      weights: `[H, E]`.
      bias: `[E]`, or None.
      zeros: `[B * kv_heads]` int32, counters that all kernels of a step take and leave.
      top_k: experts per token.

    Returns:
      `[B, K]` int32 ids, `[B, K]` float32 weights, and the zeros.
    """
    rows, experts = x.shape[0], weights.shape[1]
    sizes = Route(*x.shape, experts, top_k, _PARTS, power_of_two(experts), power_of_two(top_k))
    routed = Routed(
        jax.ShapeDtypeStruct((_PARTS, rows, experts), jnp.float32),
        jax.ShapeDtypeStruct((rows, top_k), jnp.int32),
        jax.ShapeDtypeStruct((rows, top_k), jnp.float32),
    )
    programs = -(-rows // sizes.block_rows) * -(-experts // sizes.block_experts) * _PARTS
    operands, results = (x, weights, bias, zeros), (routed, jax.ShapeDtypeStruct(zeros.shape, zeros.dtype))
    found, zeros = launch(
        _ROUTE, operands, results, Config(programs, num_warps=8, num_stages=4), {"S": sizes}, written={-1: -1}
    )
    return found.topk_idx_ptr, found.topk_weights_ptr, zeros


def attend(
    rows: Array,
    cache: tuple[Array, Array],
    position: Array,
    zeros: Array,
    *,
    heads: int,
    base: float,
    norm: Array | None = None,
    sinks: Array | None = None,
    window: int | None = None,
) -> tuple[Array, tuple[Array, Array], Array]:
    """Compute attention of one token per text, and put its keys and values into the cache.

    Args:
      rows: `[B, (heads + 2 * kv_heads) * D]` queries, keys and values of the tokens.
      cache: keys and values `[B, S, kv_heads, D]`, written in place if nothing else uses them.
      position: `[]` int32, of the tokens.
      zeros: see `route`.
      heads: query heads; h belongs to key head `h % kv_heads`.
      base: of the rotary frequencies.
      norm: `[heads + kv_heads, D]` float32, scales of root-mean-square norms of queries and keys.
      sinks: `[heads]`, a logit of each head without a value.
      window: number of positions that are attended to, with the token's own; None: all.

    Returns:
      `[B, heads * D]`, the cache, and the zeros.
    """
    keys, values = cache
    batch, length, kv_heads, size = keys.shape
    groups, block_heads = batch * kv_heads, max(16, power_of_two(heads // kv_heads + 1))
    blocks = -(-min(window or length, length) // _BLOCK)
    parts = max(1, min(blocks, num_programs(1 << 30, 2) // groups))
    sizes = Attention(
        heads,
        kv_heads,
        size,
        length,
        window or length,
        parts,
        power_of_two(parts),
        _BLOCK,
        block_heads,
        scale=size**-0.5,
        log2_base=math.log2(base),
    )
    part = (groups * parts, block_heads)
    results = (
        jax.ShapeDtypeStruct((batch, heads * size), rows.dtype),
        Parts(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*part, size), part, part))),
        Cache(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values, zeros))),
    )
    operands = unsliced((rows, norm, sinks, position, Cache(keys, values, zeros)))
    config, written = Config(groups * parts, num_warps=4, num_stages=3), {-3: -3, -2: -2, -1: -1}
    mixed, _, after = unsliced(launch(_ATTEND, operands, results, config, {"S": sizes}, written=written))
    return mixed, (after.keys_ptr, after.values_ptr), after.counters_ptr
