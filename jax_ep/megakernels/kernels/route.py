"""The router inside the launch of a layer, in Triton and in Gluon; `topk_router` defines what it computes.

A token is a task of one program. All programs wait for all tokens, since they need every id to find their rows. Floor:
two round trips to the L2 cache, and two reductions for each chosen expert.
"""

import dataclasses

import triton
import triton.language as tl

from .indices import as_column, indices_in_row

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-(1 << 31))  # below the ordered bits of every expert
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
def choose_experts(router, token, topk_idx_ptr, weights_ptr, S: tl.constexpr):
    """Store the ids and weights `[num_tokens, top_k]` of the experts of a token.

    `router` has `logits_ptr [num_tokens, num_experts]`, `bias_ptr [num_experts]` and `mask_ptr [num_tokens]`.
    """
    ROUTER: tl.constexpr = S.router
    TOP_K: tl.constexpr = S.top_k
    experts = indices_in_row(ROUTER.padded_experts)
    choices = indices_in_row(ROUTER.padded_top_k)
    exist, inside = experts < S.num_experts, choices < TOP_K
    source = router.logits_ptr + token * S.num_experts
    logits = tl.load(source + experts, mask=exist, other=-float("inf")).to(tl.float32)
    best = as_column(tl.max(logits, axis=1))
    total = as_column(tl.sum(tl.where(exist, tl.exp2((logits - best) * LOG2_E), 0.0), axis=1))
    # Without a bias, logits have the order of their scores.
    if ROUTER.has_bias:
        bias = tl.load(router.bias_ptr + experts, mask=exist, other=0.0).to(tl.float32)
        order = ordered(score_of(logits, best, total, ROUTER) + bias)
    else:
        order = ordered(logits)
    # One after another: of equal experts the first.
    order = tl.where(exist, order, LOWEST)
    chosen = choices * 0
    for k in tl.static_range(TOP_K):
        highest = as_column(tl.max(order, axis=1))
        best_expert = as_column(tl.min(tl.where(order == highest, experts, ROUTER.padded_experts), axis=1))
        order = tl.where(experts == best_expert, LOWEST, order)
        expert = best_expert
        if ROUTER.has_bias:
            expert = tl.where(highest == HIDDEN, -1, best_expert)
        chosen = tl.where(choices == k, expert, chosen)
    if ROUTER.has_mask:
        chosen = tl.where(tl.load(router.mask_ptr + token) != 0, chosen, -1)
    has_expert = inside & (chosen >= 0)
    picked = tl.load(source + tl.maximum(chosen, 0), mask=has_expert, other=0.0).to(tl.float32)
    weights = tl.where(has_expert, score_of(picked, best, total, ROUTER), 0.0)
    if ROUTER.renormalize:
        weights /= tl.maximum(as_column(tl.sum(weights, axis=1)), ROUTER.smallest_sum)
    target = token * TOP_K + choices
    tl.store(topk_idx_ptr + target, chosen, mask=inside)
    tl.store(weights_ptr + target, weights * ROUTER.scale, mask=inside)
