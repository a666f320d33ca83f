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
def first_expert(ids_ptr, tokens, inside, first, K: tl.constexpr, L: tl.constexpr):
    """The lowest of each token's experts in `[first, first + L)`, from there; L where it has none."""
    lowest = tl.full(tokens.shape, L, tl.int32)
    for k in tl.static_range(K):
        local = tl.load(ids_ptr + tokens * K + k, mask=inside, other=-1) - first
        lowest = tl.where((local >= 0) & (local < L), tl.minimum(lowest, local), lowest)
    return lowest


@triton.jit
def send_order_count(ids_ptr, group_ptr, positions_ptr, counts_ptr, S: tl.constexpr):
    """`ids [W, T, K]` to `positions [W, T]` of own sends, and `counts [2 * W, blocks, BINS]` of all lists."""
    W: tl.constexpr = S.W
    T: tl.constexpr = S.T
    BLOCK: tl.constexpr = S.tile.BLOCK
    LANES: tl.constexpr = S.tile.LANES
    BINS: tl.constexpr = S.tile.BINS
    rank = tl.load(group_ptr + W)
    lanes = tl.arange(0, LANES)
    blocks: tl.constexpr = (T + BLOCK - 1) // BLOCK
    for task in range(tl.program_id(0), 2 * W * blocks, tl.num_programs(0)):
        number = task // blocks
        sends = number < W
        source = tl.where(sends, rank, number - W)
        first = tl.where(sends, number, rank) * S.L
        begin = task % blocks * BLOCK
        counts = tl.zeros((BINS,), tl.int32)
        for start in range(begin, tl.minimum(begin + BLOCK, T), LANES):
            tokens = start + lanes
            inside = tokens < T
            expert = first_expert(ids_ptr, source * T + tokens, inside, first, S.K, S.L)
            position = tl.gather(counts, expert, 0) + count_alike_before(expert, LANES)
            tl.store(positions_ptr + number * T + tokens, (expert << EXPERT_BIT) | position, mask=inside & sends)
            counts += tl.histogram(expert, BINS, mask=inside)
        tl.store(counts_ptr + task * BINS + tl.arange(0, BINS), counts)


@triton.jit
def send_order_place(positions_ptr, counts_ptr, order_ptr, num_sends_ptr, num_needed_ptr, S: tl.constexpr):
    """What `send_order_count` has found to `order [W, T]`, `num_sends [W]` and `num_needed [W, L]`."""
    W: tl.constexpr = S.W
    T: tl.constexpr = S.T
    BLOCK: tl.constexpr = S.tile.BLOCK
    lanes, bins = tl.arange(0, S.tile.LANES), tl.arange(0, S.tile.BINS)
    blocks: tl.constexpr = (T + BLOCK - 1) // BLOCK
    for task in range(tl.program_id(0), W * blocks + W, tl.num_programs(0)):
        is_send = task < W * blocks
        number = tl.where(is_send, task // blocks, task - W * blocks + W)
        block = tl.where(is_send, task % blocks, 0)
        total, before = sum_counts(counts_ptr + number * (blocks * S.tile.BINS), block, blocks, S.tile)
        ends = tl.cumsum(total, axis=0)
        if is_send:
            bases = ends - total + before
            for start in range(block * BLOCK, tl.minimum((block + 1) * BLOCK, T), S.tile.LANES):
                tokens = start + lanes
                packed = tl.load(positions_ptr + number * T + tokens, mask=tokens < T, other=0)
                index = tl.gather(bases, packed >> EXPERT_BIT, 0) + (packed & POSITION_MASK)
                tl.store(order_ptr + number * T + index, tokens, mask=tokens < T)
            if block == 0:
                tl.store(num_sends_ptr + number, tl.sum(tl.where(bins < S.L, total, 0), axis=0))
        else:
            tl.store(num_needed_ptr + (number - W) * S.L + bins, ends, mask=bins < S.L)
