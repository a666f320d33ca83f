"""Which ranks want which tokens, from the experts of the tokens."""

import triton
import triton.language as tl


@triton.jit
def wanting_ranks(ids_ptr, slots, in_range, W: tl.constexpr, L: tl.constexpr, K: tl.constexpr):
    """Bit r of each token's int64: it has an expert on rank r; `slots` is the index of each token's first id."""
    ranks = slots.to(tl.int64) * 0
    for k in tl.static_range(K):
        expert = tl.load(ids_ptr + slots + k, mask=in_range, other=-1)
        valid = (expert >= 0) & (expert < W * L)
        ranks = ranks | tl.where(valid, 1, 0).to(tl.int64) << tl.where(valid, expert // L, 0).to(tl.int64)
    return ranks


@triton.jit
def wanted_by(ids_ptr, slots, in_range, first, L: tl.constexpr, K: tl.constexpr):
    """Which tokens have an expert in `[first, first + L)`; `slots` is the index of each token's first id."""
    wanted = in_range & False
    for k in tl.static_range(K):
        expert = tl.load(ids_ptr + slots + k, mask=in_range, other=-1)
        wanted = wanted | ((expert >= first) & (expert < first + L))
    return wanted
