"""The router of few tokens inside another launch, in Triton and in Gluon; `topk_router` defines what it computes.

Every program chooses the experts of all tokens by itself, and stores the same ids and weights as the others: so none
waits for another. Floor: none of its own, beside a launch of several microseconds that it replaces.
"""

import dataclasses

import triton
import triton.language as tl

from .indices import as_column, indices, indices_in_row

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-(1 << 63))  # below the key of every expert
NAN = tl.constexpr(0x7FC00000)
HIDDEN = tl.constexpr(-0x7F800001)  # the ordered bits of minus infinity


@dataclasses.dataclass(frozen=True)
class RouterSizes:
    """Static values of a router."""

    score: str  # "softmax" or "sigmoid"
    renormalize: bool
    scale: float
    smallest_sum: float  # that weights are divided by
    has_bias: bool  # else bias_ptr is unused
    has_mask: bool  # else mask_ptr is unused
    rows: int  # tokens at a time, power of two
    padded_experts: int  # power of two
    padded_top_k: int  # power of two


@triton.jit
def ordered(values):
    """Return float32 values as int32 in the order of `lax.top_k`: NaN is the highest, and both zeros are equal."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(values == values, bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN)


@triton.jit
def score_of(logits, best, total, ROUTER: tl.constexpr):
    """Return scores; `best` and `total` are a token's highest logit and the sum of its exponentials."""
    if ROUTER.score == "softmax":
        score = tl.exp2((logits - best) * LOG2_E) / total
    else:
        score = 1 / (1 + tl.exp2(-logits * LOG2_E))
    return score


@triton.jit
def choose_experts(router, topk_idx_ptr, weights_ptr, S: tl.constexpr):
    """Store the ids and weights `[num_tokens, top_k]` of the experts of all tokens.

    `router` has `logits_ptr [num_tokens, num_experts]`, `bias_ptr [num_experts]` and `mask_ptr [num_tokens]`.
    """
    ROUTER: tl.constexpr = S.router
    TOP_K: tl.constexpr = S.top_k
    LAST: tl.constexpr = ROUTER.padded_experts - 1
    experts = indices_in_row(ROUTER.padded_experts)
    choices = indices_in_row(ROUTER.padded_top_k)
    for first in range(0, S.num_tokens, ROUTER.rows):
        tokens = first + as_column(indices(ROUTER.rows))
        exist = (tokens < S.num_tokens) & (experts < S.num_experts)
        source = router.logits_ptr + tokens * S.num_experts
        logits = tl.load(source + experts, mask=exist, other=-float("inf")).to(tl.float32)
        best = as_column(tl.max(logits, axis=1))
        total = as_column(tl.sum(tl.where(exist, tl.exp2((logits - best) * LOG2_E), 0.0), axis=1))
        # Without a bias, logits have the order of their scores.
        if ROUTER.has_bias:
            bias = tl.load(router.bias_ptr + experts, mask=experts < S.num_experts, other=0.0).to(tl.float32)
            order = ordered(score_of(logits, best, total, ROUTER) + bias)
        else:
            order = ordered(logits)
        # Keys are distinct: of equal experts the first has the highest.
        keys = tl.where(exist, (order.to(tl.int64) << 32) | (LAST - experts).to(tl.int64), LOWEST)
        chosen = tokens * 0 + choices * 0
        for k in tl.static_range(TOP_K):
            highest = as_column(tl.max(keys, axis=1))
            expert = LAST - (highest & LAST).to(tl.int32)
            if ROUTER.has_bias:
                expert = tl.where(highest >> 32 == HIDDEN, -1, expert)
            chosen = tl.where(choices == k, expert, chosen)
            keys = tl.where(keys == highest, LOWEST, keys)
        inside = (tokens < S.num_tokens) & (choices < TOP_K)
        if ROUTER.has_mask:
            mask = tl.load(router.mask_ptr + tokens, mask=tokens < S.num_tokens, other=0) != 0
            chosen = tl.where(mask, chosen, -1)
        has_expert = inside & (chosen >= 0)
        picked = tl.load(source + tl.maximum(chosen, 0), mask=has_expert, other=0.0).to(tl.float32)
        weights = tl.where(has_expert, score_of(picked, best, total, ROUTER), 0.0)
        if ROUTER.renormalize:
            weights /= tl.maximum(as_column(tl.sum(weights, axis=1)), ROUTER.smallest_sum)
        target = tokens * TOP_K + choices
        tl.store(topk_idx_ptr + target, chosen, mask=inside)
        tl.store(weights_ptr + target, weights * ROUTER.scale, mask=inside)
