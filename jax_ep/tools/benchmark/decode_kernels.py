"""Triton kernels of a decode step, for decode.py: the choice of experts, and attention.

A decode step runs many small kernels one after another, so what counts is how few they are, and how much memory each
has in flight. So many programs share a row, and each kernel ends with work for which several programs must be done. The
last of them to take a number from a counter does it, so no program waits; then it sets the counter back to zero, for
the next kernel.

Floor: the filled part of the cache, or the router's weights, read once at the rate of the memory, plus a launch.

Source: parts of the keys per program, and their combination, as in Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023).
"""

import dataclasses
from typing import NamedTuple

import triton
import triton.language as tl

from jax_ep.megakernels.kernels.gemm_structs import Pointer
from jax_ep.megakernels.kernels.route import LOG2_E

EPSILON = tl.constexpr(1e-6)  # of the norms
HIDDEN_LOGIT = tl.constexpr(-1e30)  # of positions that are not attended to; finite, so that differences of two exist


@dataclasses.dataclass(frozen=True)
class Route:
    """Static sizes of a router."""

    num_tokens: int
    hidden: int
    num_experts: int
    top_k: int
    parts: int  # programs that share the columns of a token
    padded_experts: int  # power of two
    padded_top_k: int  # power of two
    block_rows: int = 16
    block_experts: int = 16
    block_hidden: int = 128


@dataclasses.dataclass(frozen=True)
class Attention:
    """Static sizes of the attention of a decode step."""

    heads: int
    kv_heads: int
    head_dim: int
    length: int  # positions of the cache
    window: int  # last positions that are attended to
    parts: int  # programs that share the positions of a key head
    padded_parts: int  # power of two
    block: int  # positions loaded at a time
    block_heads: int  # more than heads / kv_heads
    scale: float  # of the logits
    log2_base: float  # of the rotary frequencies


class Cache(NamedTuple):
    """Arrays that a step writes in place."""

    keys_ptr: Pointer  # [texts, length, kv_heads, head_dim]
    values_ptr: Pointer
    counters_ptr: Pointer  # [texts * kv_heads] int32, zero before and after: programs that have finished


class Parts(NamedTuple):
    """Attention to a part of the positions, [texts, kv_heads, parts, block_heads], before its division by the sum."""

    mixed_ptr: Pointer  # [., head_dim]
    max_ptr: Pointer  # largest logit, times log2(e)
    sum_ptr: Pointer  # of the powers of two of logits minus the largest


class Routed(NamedTuple):
    """Results of a router."""

    logits_ptr: Pointer  # [parts, tokens, experts] float32, to be added
    topk_idx_ptr: Pointer  # [tokens, top_k] int32
    topk_weights_ptr: Pointer  # [tokens, top_k] float32


@triton.jit
def is_last(counters_ptr, number, num_programs):
    """Return whether all other programs of a counter are done, and what they stored can be read."""
    # All threads have stored before the program takes a number.
    tl.debug_barrier()
    last = tl.atomic_add(counters_ptr + number, 1, sem="acq_rel") == num_programs - 1
    if last:
        tl.store(counters_ptr + number, 0)
    return last


@triton.jit
def choose_experts(routed, bias_ptr, rows, S: tl.constexpr):
    """Add the parts of the logits of some rows and choose their experts, best first.

    Weights are the softmax over the chosen logits.
    """
    K: tl.constexpr = S.top_k
    PARTS: tl.constexpr = S.parts
    inside = rows < S.num_tokens
    experts = tl.arange(0, S.padded_experts)[None, :]
    choices = tl.arange(0, S.padded_top_k)[None, :]
    logits = tl.zeros((S.block_rows, S.padded_experts), tl.float32)
    for part in tl.static_range(PARTS):
        source = routed.logits_ptr + (part * S.num_tokens + rows) * S.num_experts + experts
        logits += tl.load(source, mask=inside & (experts < S.num_experts), other=0.0, cache_modifier=".cg")
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + experts, mask=experts < S.num_experts, other=0.0).to(tl.float32)
    left = tl.where(experts < S.num_experts, logits, -float("inf"))
    best = tl.max(left, axis=1)
    chosen = tl.zeros((S.block_rows, S.padded_top_k), tl.int32)
    weights = tl.zeros((S.block_rows, S.padded_top_k), tl.float32)
    for k in tl.static_range(K):
        logit, expert = tl.max(left, axis=1, return_indices=True, return_indices_tie_break_left=True)
        chosen = tl.where(choices == k, expert[:, None], chosen)
        weights = tl.where(choices == k, tl.exp2((logit - best) * LOG2_E)[:, None], weights)
        left = tl.where(experts == expert[:, None], -float("inf"), left)
    weights /= tl.sum(weights, axis=1)[:, None]
    target, exist = rows * K + choices, inside & (choices < K)
    tl.store(routed.topk_idx_ptr + target, chosen, mask=exist)
    tl.store(routed.topk_weights_ptr + target, weights, mask=exist)


@triton.jit
def route(x_ptr, weights_ptr, bias_ptr, counters_ptr, routed, counters_after_ptr, S: tl.constexpr):
    """Compute a router's logits, and choose experts.

    A program multiplies a part of the depth of some rows by a tile of experts; the last one of these rows chooses.
    """
    PARTS: tl.constexpr = S.parts
    tiles: tl.constexpr = (S.num_experts + S.block_experts - 1) // S.block_experts
    block, program = tl.program_id(0) // (tiles * PARTS), tl.program_id(0) % (tiles * PARTS)
    rows = (block * S.block_rows + tl.arange(0, S.block_rows))[:, None]
    experts = (program // PARTS * S.block_experts + tl.arange(0, S.block_experts))[None, :]
    part, share = program % PARTS, tl.cdiv(S.hidden, PARTS * S.block_hidden) * S.block_hidden
    logits = tl.zeros((S.block_rows, S.block_experts), tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, S.hidden), S.block_hidden):
        columns = start + tl.arange(0, S.block_hidden)
        inside = columns < S.hidden
        x = tl.load(x_ptr + rows * S.hidden + columns[None, :], mask=(rows < S.num_tokens) & inside[None, :], other=0.0)
        source = weights_ptr + columns[:, None] * S.num_experts + experts
        weights = tl.load(source, mask=inside[:, None] & (experts < S.num_experts), other=0.0)
        logits = tl.dot(x, weights, logits)
    target = routed.logits_ptr + (part * S.num_tokens + rows) * S.num_experts + experts
    tl.store(target, logits, mask=(rows < S.num_tokens) & (experts < S.num_experts))
    if is_last(counters_ptr, block, tiles * PARTS):
        choose_experts(routed, bias_ptr, rows, S)


@triton.jit
def load_heads(source_ptr, norm_ptr, heads, mask, position, S: tl.constexpr):
    """Load heads `[heads, head_dim]` of one row, normalize and rotate them."""
    half: tl.constexpr = S.head_dim // 2
    lanes = tl.arange(0, S.head_dim)
    # Each element is rotated with that of the other half.
    partners = (lanes + half) % S.head_dim
    x = tl.load(source_ptr + heads[:, None] * S.head_dim + lanes[None, :], mask=mask[:, None], other=0.0)
    partner = tl.load(source_ptr + heads[:, None] * S.head_dim + partners[None, :], mask=mask[:, None], other=0.0)
    dtype: tl.constexpr = x.dtype
    x, partner = x.to(tl.float32), partner.to(tl.float32)
    if norm_ptr is not None:
        factors = tl.rsqrt(tl.sum(x * x, axis=1) / S.head_dim + EPSILON)[:, None]
        scale = tl.load(norm_ptr + heads[:, None] * S.head_dim + lanes[None, :], mask=mask[:, None], other=0.0)
        other = tl.load(norm_ptr + heads[:, None] * S.head_dim + partners[None, :], mask=mask[:, None], other=0.0)
        x = (x * factors * scale).to(dtype).to(tl.float32)
        partner = (partner * factors * other).to(dtype).to(tl.float32)
    frequency = tl.exp2((lanes % half).to(tl.float32) * (-S.log2_base / half))
    angle = (position.to(tl.float32) * frequency)[None, :]
    partner = tl.where((lanes < half)[None, :], -partner, partner)
    return (x * tl.cos(angle) + partner * tl.sin(angle)).to(dtype)


@triton.jit
def store_new_position(rows, is_key, row_ptr, cache, head, entry, S: tl.constexpr):
    """Store the key, one of the rows, and the value of the step's token in the cache."""
    lanes = tl.arange(0, S.head_dim)
    value = tl.load(row_ptr + (S.heads + S.kv_heads + head) * S.head_dim + lanes)
    target = tl.broadcast_to(cache.keys_ptr + entry * S.head_dim + lanes[None, :], (S.block_heads, S.head_dim))
    tl.store(target, rows, mask=is_key[:, None])  # of this row only
    tl.store(cache.values_ptr + entry * S.head_dim + lanes, value)


@triton.jit
def combine_parts(parts, sinks_ptr, heads, exist, first_part, S: tl.constexpr):
    """Add the parts of all programs of a key head; return attention `[block_heads, head_dim]` in float32."""
    PARTS: tl.constexpr = S.parts
    rows = tl.arange(0, S.block_heads)
    lanes = tl.arange(0, S.head_dim)[None, :]
    # The largest logit of all parts, then the weight of each.
    numbers = tl.arange(0, S.padded_parts)[None, :]
    source = (first_part + numbers) * S.block_heads + rows[:, None]
    bests = tl.load(parts.max_ptr + source, mask=numbers < S.parts, other=HIDDEN_LOGIT, cache_modifier=".cg")
    totals = tl.load(parts.sum_ptr + source, mask=numbers < S.parts, other=0.0, cache_modifier=".cg")
    best = tl.max(bests, axis=1)
    # A sink is a logit without a value.
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + heads, mask=exist, other=0.0).to(tl.float32) * LOG2_E
        best = tl.maximum(best, sink)
    total = tl.sum(totals * tl.exp2(bests - best[:, None]), axis=1)
    if sinks_ptr is not None:
        total += tl.exp2(sink - best)
    mixed = tl.zeros((S.block_heads, S.head_dim), tl.float32)
    for part in tl.static_range(PARTS):
        source = (first_part + part) * S.block_heads + rows
        weight = tl.exp2(tl.load(parts.max_ptr + source, cache_modifier=".cg") - best) / total
        part_mixed = tl.load(parts.mixed_ptr + source[:, None] * S.head_dim + lanes, cache_modifier=".cg")
        mixed += part_mixed * weight[:, None]
    return mixed


@triton.jit
def attend(
    row_ptr,
    norm_ptr,
    sinks_ptr,
    position_ptr,
    cache,
    out_ptr,
    parts,
    cache_after,
    S: tl.constexpr,
):
    """Compute attention of one new token per text to the cache, and put its key and value there.

    A program serves one key head of a text, whose query heads are rows of its products, and a part of the positions.
    Query head h belongs to key head `h % kv_heads`.
    """
    part = tl.program_id(0) % S.parts
    group = tl.program_id(0) // S.parts
    text, head = group // S.kv_heads, group % S.kv_heads
    position = tl.load(position_ptr)
    row_ptr += text.to(tl.int64) * (S.heads + 2 * S.kv_heads) * S.head_dim
    members = tl.arange(0, S.block_heads)
    # A token's row has the key right after the group's query heads, and so has the block of rows here.
    heads, exist = head + members * S.kv_heads, members < S.heads // S.kv_heads
    is_key = members == S.heads // S.kv_heads
    query = load_heads(row_ptr, norm_ptr, heads, exist | is_key, position, S)
    # This program's positions, in whole blocks.
    begin = tl.maximum(position + 1 - S.window, 0)
    share = tl.cdiv(position + 1 - begin, S.parts * S.block) * S.block
    begin += part * share
    end = tl.minimum(begin + share, position + 1)
    entry = text.to(tl.int64) * S.length * S.kv_heads + head
    if (begin <= position) & (end == position + 1):
        store_new_position(query, is_key, row_ptr, cache, head, entry + position * S.kv_heads, S)
        tl.debug_barrier()
    lanes = tl.arange(0, S.head_dim)
    best = tl.full((S.block_heads,), HIDDEN_LOGIT, tl.float32)
    total = tl.zeros((S.block_heads,), tl.float32)
    mixed = tl.zeros((S.block_heads, S.head_dim), tl.float32)
    for start in range(begin, end, S.block):
        positions = start + tl.arange(0, S.block)
        offsets = (entry + positions.to(tl.int64) * S.kv_heads)[:, None] * S.head_dim + lanes[None, :]
        inside = (positions < end)[:, None]
        keys = tl.load(cache.keys_ptr + offsets, mask=inside, other=0.0)
        values = tl.load(cache.values_ptr + offsets, mask=inside, other=0.0)
        logits = tl.dot(query, tl.trans(keys)) * (S.scale * LOG2_E)
        logits = tl.where((positions < end)[None, :], logits, HIDDEN_LOGIT)
        higher = tl.maximum(best, tl.max(logits, axis=1))
        weights, before = tl.exp2(logits - higher[:, None]), tl.exp2(best - higher)
        total = total * before + tl.sum(weights, axis=1)
        mixed = tl.dot(weights.to(values.dtype), values, mixed * before[:, None])
        best = higher
    # The parts meet in memory.
    source = (group * S.parts + part) * S.block_heads + members
    tl.store(parts.max_ptr + source, best)
    tl.store(parts.sum_ptr + source, total)
    tl.store(parts.mixed_ptr + source[:, None] * S.head_dim + lanes[None, :], mixed)
    if is_last(cache.counters_ptr, group, S.parts):
        mixed = combine_parts(parts, sinks_ptr, heads, exist, group * S.parts, S)
        target = out_ptr + (text.to(tl.int64) * S.heads + heads)[:, None] * S.head_dim + lanes[None, :]
        tl.store(target, mixed.to(out_ptr.dtype.element_ty), mask=exist[:, None])
