"""Send order: a stable counting sort of tokens by the first of their experts on each destination rank.

List r < num_ranks holds what this rank sends to rank r. List num_ranks + s holds what source s sends here. Two launches
sort all lists, so neither waits within a launch:

1. `send_order_count`: for each block of a list, count the tokens whose first expert there is each local expert, and
   store each token's position among those of its block. Tokens without an expert there count in one more bin.
2. `send_order_place`: add up the counts. They tell where the tokens of an expert begin in a list, and how many tokens
   of a source experts 0..e need.
"""

import triton
import triton.language as tl

from .plan import EXPERT_BIT, POSITION_MASK, count_alike_before, sum_counts


@triton.jit
def first_expert(topk_idx_ptr, tokens, inside, first, TOP_K: tl.constexpr, LOCAL_EXPERTS: tl.constexpr):
    """Return the local index of the lowest of each token's experts from `first` on; LOCAL_EXPERTS if none."""
    lowest = tl.full(tokens.shape, LOCAL_EXPERTS, tl.int32)
    for k in tl.static_range(TOP_K):
        local = tl.load(topk_idx_ptr + tokens * TOP_K + k, mask=inside, other=-1) - first
        lowest = tl.where((local >= 0) & (local < LOCAL_EXPERTS), tl.minimum(lowest, local), lowest)
    return lowest


@triton.jit
def send_order_count(topk_idx_ptr, group_ptr, positions_ptr, counts_ptr, S: tl.constexpr):
    """Count expert ids `[num_ranks, num_tokens, top_k]`.

    Results: `positions [num_ranks, num_tokens]` of own sends, `counts [2 * num_ranks, blocks, bins]` of all lists.
    """
    NUM_RANKS: tl.constexpr = S.num_ranks
    NUM_TOKENS: tl.constexpr = S.num_tokens
    BLOCK: tl.constexpr = S.tile.block
    LANES: tl.constexpr = S.tile.lanes
    BINS: tl.constexpr = S.tile.bins
    rank = tl.load(group_ptr + NUM_RANKS)
    lanes = tl.arange(0, LANES)
    blocks: tl.constexpr = (NUM_TOKENS + BLOCK - 1) // BLOCK
    for task in range(tl.program_id(0), 2 * NUM_RANKS * blocks, tl.num_programs(0)):
        list_index = task // blocks
        sends = list_index < NUM_RANKS
        # A list of own sends has this rank's tokens and a peer's experts; others have a source's tokens and the experts
        # here.
        source = tl.where(sends, rank, list_index - NUM_RANKS)
        first = tl.where(sends, list_index, rank) * S.num_local_experts
        begin = task % blocks * BLOCK
        counts = tl.zeros((BINS,), tl.int32)
        for start in range(begin, tl.minimum(begin + BLOCK, NUM_TOKENS), LANES):
            tokens = start + lanes
            inside = tokens < NUM_TOKENS
            expert = first_expert(
                topk_idx_ptr, source * NUM_TOKENS + tokens, inside, first, S.top_k, S.num_local_experts
            )
            # Stable: earlier tokens of the block with the same expert come first.
            position = tl.gather(counts, expert, 0) + count_alike_before(expert, LANES)
            tl.store(
                positions_ptr + list_index * NUM_TOKENS + tokens, (expert << EXPERT_BIT) | position, mask=inside & sends
            )
            counts += tl.histogram(expert, BINS, mask=inside)
        tl.store(counts_ptr + task * BINS + tl.arange(0, BINS), counts)


@triton.jit
def send_order_place(positions_ptr, counts_ptr, order_ptr, num_sends_ptr, num_needed_ptr, S: tl.constexpr):
    """Turn positions and counts into `order`, `num_sends` and `num_needed` of `OrderedSends`."""
    NUM_RANKS: tl.constexpr = S.num_ranks
    NUM_TOKENS: tl.constexpr = S.num_tokens
    BLOCK: tl.constexpr = S.tile.block
    lanes, bins = tl.arange(0, S.tile.lanes), tl.arange(0, S.tile.bins)
    blocks: tl.constexpr = (NUM_TOKENS + BLOCK - 1) // BLOCK
    for task in range(tl.program_id(0), NUM_RANKS * blocks + NUM_RANKS, tl.num_programs(0)):
        # One task per block of own sends, then one per source.
        is_send = task < NUM_RANKS * blocks
        list_index = tl.where(is_send, task // blocks, task - NUM_RANKS * blocks + NUM_RANKS)
        block = tl.where(is_send, task % blocks, 0)
        total, before = sum_counts(counts_ptr + list_index * (blocks * S.tile.bins), block, blocks, S.tile)
        ends = tl.cumsum(total, axis=0)
        if is_send:
            # First index of each expert's tokens of this block.
            bases = ends - total + before
            for start in range(block * BLOCK, tl.minimum((block + 1) * BLOCK, NUM_TOKENS), S.tile.lanes):
                tokens = start + lanes
                packed = tl.load(positions_ptr + list_index * NUM_TOKENS + tokens, mask=tokens < NUM_TOKENS, other=0)
                index = tl.gather(bases, packed >> EXPERT_BIT, 0) + (packed & POSITION_MASK)
                tl.store(order_ptr + list_index * NUM_TOKENS + index, tokens, mask=tokens < NUM_TOKENS)
            # The last bin holds tokens that do not go to the rank.
            if block == 0:
                tl.store(num_sends_ptr + list_index, tl.sum(tl.where(bins < S.num_local_experts, total, 0), axis=0))
        else:
            tl.store(
                num_needed_ptr + (list_index - NUM_RANKS) * S.num_local_experts + bins,
                ends,
                mask=bins < S.num_local_experts,
            )
