"""Which tokens go to which ranks, from the experts of the tokens."""

import triton
import triton.language as tl


@triton.jit
def destinations(
    ids_ptr, first_slots, in_range, TOP_K: tl.constexpr, LOCAL_EXPERTS: tl.constexpr, NUM_EXPERTS: tl.constexpr
):
    """Bit r of each token's int64: it has an expert on rank r; `first_slots` is the index of each token's first id."""
    ranks = first_slots.to(tl.int64) * 0
    for k in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + first_slots + k, mask=in_range, other=-1)
        valid = (expert >= 0) & (expert < NUM_EXPERTS)
        ranks = ranks | tl.where(valid, 1, 0).to(tl.int64) << tl.where(valid, expert // LOCAL_EXPERTS, 0).to(tl.int64)
    return ranks


@triton.jit
def send_mask(ids_ptr, first_slots, in_range, rank, TOP_K: tl.constexpr, LOCAL_EXPERTS: tl.constexpr):
    """Which tokens have an expert on `rank`."""
    first = rank * LOCAL_EXPERTS
    mask = in_range & False
    for k in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + first_slots + k, mask=in_range, other=-1)
        mask = mask | ((expert >= first) & (expert < first + LOCAL_EXPERTS))
    return mask


@triton.jit
def goes_to(ranks, rank):
    """Whether a set of ranks, as bits, has this one."""
    return (ranks >> rank.to(tl.int64)) & 1 > 0
