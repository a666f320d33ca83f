"""The slots of one device sorted by expert, each expert padded to whole blocks, in one launch.

Every program counts all slots for itself, by expert, and those before its own block of slots: a few kilobytes that it
reads from the cache, for which no program has to wait for another. So the launch needs no memory but its results, and
no order of its programs. Then it gives the slots of its block their rows, and fills its share of the rows that no slot
has. The same ids give the same rows.
"""

import triton
import triton.language as tl

from .plan import count_alike_before


@triton.jit
def local_experts(ids_ptr, slots, num_slots, S: tl.constexpr):
    """Local experts of slots, and which have one."""
    ids = tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1)
    here = (ids >= S.FIRST) & (ids < S.FIRST + S.L)
    return tl.where(here, ids - S.FIRST, S.BINS), here


@triton.jit
def count_slots(ids_ptr, first, num_slots, S: tl.constexpr):
    """`[BINS]` slots of each expert, of all and of those before `first`."""
    total = tl.zeros((S.BINS,), tl.int32)
    before = tl.zeros((S.BINS,), tl.int32)
    for start in range(0, num_slots, S.LANES):
        expert, here = local_experts(ids_ptr, start + tl.arange(0, S.LANES), num_slots, S)
        counts = tl.histogram(expert, S.BINS, mask=here)
        total += counts
        before += tl.where(start < first, counts, 0)
    return total, before


@triton.jit
def owners(rows, ends):
    """The expert of each row, of which `ends [BINS]` are the ends: how many end at or before it."""
    return tl.sum((ends[None, :] <= rows[:, None]).to(tl.int32), axis=1)


@triton.jit
def moe_sort(
    ids_ptr,
    weights_ptr,
    num_tokens_ptr,
    slots_ptr,
    row_weights_ptr,
    block_expert_ptr,
    sizes_ptr,
    num_rows_ptr,
    S: tl.constexpr,
):
    """Ids and weights `[N]` to the arrays of `jax_ep.SortedTokens`; without weights, and without a number of tokens."""
    BINS: tl.constexpr = S.BINS
    LANES: tl.constexpr = S.LANES
    num_slots = S.N
    if num_tokens_ptr is not None:
        num_slots = tl.minimum(tl.maximum(tl.load(num_tokens_ptr), 0) * S.K, S.N)
    first = tl.program_id(0) * S.BLOCK
    total, before = count_slots(ids_ptr, first, num_slots, S)
    padded = (total + S.BLOCK_SIZE - 1) // S.BLOCK_SIZE * S.BLOCK_SIZE
    ends = tl.cumsum(padded, axis=0)
    starts = ends - padded
    num_rows = tl.max(ends, axis=0)
    if tl.program_id(0) == 0:
        bins = tl.arange(0, BINS)
        tl.store(sizes_ptr + bins, padded, mask=bins < S.L)
        tl.store(num_rows_ptr, num_rows)
    bases = starts + before
    for start in range(first, tl.minimum(first + S.BLOCK, num_slots), LANES):
        slots = start + tl.arange(0, LANES)
        expert, here = local_experts(ids_ptr, slots, num_slots, S)
        rows = tl.gather(bases, expert & (BINS - 1), 0) + count_alike_before(expert, LANES)
        tl.store(slots_ptr + rows, slots, mask=here)
        if weights_ptr is not None:
            tl.store(row_weights_ptr + rows, tl.load(weights_ptr + slots, mask=here, other=0.0), mask=here)
        bases += tl.histogram(expert, BINS, mask=here)
    for start in range(tl.program_id(0) * LANES, S.R, tl.num_programs(0) * LANES):
        rows = start + tl.arange(0, LANES)
        owner = owners(rows, ends) & (BINS - 1)  # past the last one: any, as such rows are all filled
        empty = (rows >= num_rows) | (rows - tl.gather(starts, owner, 0) >= tl.gather(total, owner, 0))
        empty = empty & (rows < S.R)
        tl.store(slots_ptr + rows, tl.full((LANES,), -1, tl.int32), mask=empty)
        if weights_ptr is not None:
            tl.store(row_weights_ptr + rows, tl.zeros((LANES,), tl.float32), mask=empty)
    num_blocks: tl.constexpr = S.R // S.BLOCK_SIZE
    for start in range(tl.program_id(0) * LANES, num_blocks, tl.num_programs(0) * LANES):
        blocks = start + tl.arange(0, LANES)
        owner = tl.where(blocks * S.BLOCK_SIZE < num_rows, owners(blocks * S.BLOCK_SIZE, ends), -1)
        tl.store(block_expert_ptr + blocks, owner, mask=blocks < num_blocks)
