"""The order in which tokens are sent: a stable counting sort by the first of their experts on each rank.

List r < W is what this rank sends to rank r, list W + s what source s sends here. The first launch counts, by blocks of
a list's tokens, how many have each local expert as their first there, and gives each token its position among those of
its block; tokens without an expert there count as one more. The second adds the counts up: where the tokens of an
expert begin in the list, and how many tokens the experts up to one need.
"""

import triton
import triton.language as tl

from .plan import EXPERT_BIT, POSITION_MASK, count_alike_before, sum_counts


@triton.jit
def first_expert(ids_ptr, tokens, inside, first, TOP_K: tl.constexpr, LOCAL_EXPERTS: tl.constexpr):
    """The lowest of each token's experts in `[first, first + L)`, from there; L where it has none."""
    lowest = tl.full(tokens.shape, LOCAL_EXPERTS, tl.int32)
    for k in tl.static_range(TOP_K):
        local = tl.load(ids_ptr + tokens * TOP_K + k, mask=inside, other=-1) - first
        lowest = tl.where((local >= 0) & (local < LOCAL_EXPERTS), tl.minimum(lowest, local), lowest)
    return lowest


@triton.jit
def send_order_count(ids_ptr, group_ptr, positions_ptr, counts_ptr, S: tl.constexpr):
    """`ids [W, T, K]` to `positions [W, T]` of own sends, and `counts [2 * W, blocks, BINS]` of all lists."""
    NUM_RANKS: tl.constexpr = S.num_ranks
    NUM_TOKENS: tl.constexpr = S.num_tokens
    BLOCK: tl.constexpr = S.tile.block
    LANES: tl.constexpr = S.tile.lanes
    BINS: tl.constexpr = S.tile.bins
    rank = tl.load(group_ptr + NUM_RANKS)
    lanes = tl.arange(0, LANES)
    blocks: tl.constexpr = (NUM_TOKENS + BLOCK - 1) // BLOCK
    for task in range(tl.program_id(0), 2 * NUM_RANKS * blocks, tl.num_programs(0)):
        number = task // blocks
        sends = number < NUM_RANKS
        source = tl.where(sends, rank, number - NUM_RANKS)
        first = tl.where(sends, number, rank) * S.num_local_experts
        begin = task % blocks * BLOCK
        counts = tl.zeros((BINS,), tl.int32)
        for start in range(begin, tl.minimum(begin + BLOCK, NUM_TOKENS), LANES):
            tokens = start + lanes
            inside = tokens < NUM_TOKENS
            expert = first_expert(ids_ptr, source * NUM_TOKENS + tokens, inside, first, S.top_k, S.num_local_experts)
            position = tl.gather(counts, expert, 0) + count_alike_before(expert, LANES)
            tl.store(
                positions_ptr + number * NUM_TOKENS + tokens, (expert << EXPERT_BIT) | position, mask=inside & sends
            )
            counts += tl.histogram(expert, BINS, mask=inside)
        tl.store(counts_ptr + task * BINS + tl.arange(0, BINS), counts)


@triton.jit
def send_order_place(positions_ptr, counts_ptr, order_ptr, num_sends_ptr, num_needed_ptr, S: tl.constexpr):
    """What `send_order_count` has found to `order [W, T]`, `num_sends [W]` and `num_needed [W, L]`."""
    NUM_RANKS: tl.constexpr = S.num_ranks
    NUM_TOKENS: tl.constexpr = S.num_tokens
    BLOCK: tl.constexpr = S.tile.block
    lanes, bins = tl.arange(0, S.tile.lanes), tl.arange(0, S.tile.bins)
    blocks: tl.constexpr = (NUM_TOKENS + BLOCK - 1) // BLOCK
    for task in range(tl.program_id(0), NUM_RANKS * blocks + NUM_RANKS, tl.num_programs(0)):
        is_send = task < NUM_RANKS * blocks
        number = tl.where(is_send, task // blocks, task - NUM_RANKS * blocks + NUM_RANKS)
        block = tl.where(is_send, task % blocks, 0)
        total, before = sum_counts(counts_ptr + number * (blocks * S.tile.bins), block, blocks, S.tile)
        ends = tl.cumsum(total, axis=0)
        if is_send:
            bases = ends - total + before
            for start in range(block * BLOCK, tl.minimum((block + 1) * BLOCK, NUM_TOKENS), S.tile.lanes):
                tokens = start + lanes
                packed = tl.load(positions_ptr + number * NUM_TOKENS + tokens, mask=tokens < NUM_TOKENS, other=0)
                index = tl.gather(bases, packed >> EXPERT_BIT, 0) + (packed & POSITION_MASK)
                tl.store(order_ptr + number * NUM_TOKENS + index, tokens, mask=tokens < NUM_TOKENS)
            if block == 0:
                tl.store(num_sends_ptr + number, tl.sum(tl.where(bins < S.num_local_experts, total, 0), axis=0))
        else:
            tl.store(
                num_needed_ptr + (number - NUM_RANKS) * S.num_local_experts + bins,
                ends,
                mask=bins < S.num_local_experts,
            )
