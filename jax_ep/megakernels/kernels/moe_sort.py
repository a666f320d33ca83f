"""The slots of one device sorted by expert, each expert padded to whole blocks, in one launch.

Every program counts all slots for itself, by expert, and those before its own block of slots: a few kilobytes that it
reads from the cache, for which no program has to wait for another. So the launch needs no memory but its results, and
no order of its programs. Then it gives the slots of its block their rows, and fills the rows that no slot has, of some
experts and of what is behind them all. The same ids give the same rows.
"""

import triton
import triton.language as tl

from .plan import count_alike_before


@triton.jit
def local_experts(ids_ptr, slots, num_slots, S: tl.constexpr):
    """Local experts of slots, and which have one."""
    ids = tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1)
    here = (ids >= S.first_expert) & (ids < S.first_expert + S.num_local_experts)
    return tl.where(here, ids - S.first_expert, S.bins), here


@triton.jit
def count_slots(ids_ptr, first, num_slots, S: tl.constexpr):
    """`[BINS]` slots of each expert, of all and of those before `first`."""
    total = tl.zeros((S.bins,), tl.int32)
    before = tl.zeros((S.bins,), tl.int32)
    for start in range(0, num_slots, S.count_block):
        slots = start + tl.arange(0, S.count_block)
        expert, here = local_experts(ids_ptr, slots, num_slots, S)
        counts = tl.histogram(expert, S.bins, mask=here)
        total += counts
        if start + S.count_block <= first:
            before += counts
        elif start < first:
            before += tl.histogram(expert, S.bins, mask=here & (slots < first))
    return total, before


@triton.jit
def fill(target_ptr, first, end, value, LANES: tl.constexpr):
    """Stores a number at places `[first, end)`."""
    for start in range(first, end, LANES):
        places = start + tl.arange(0, LANES)
        tl.store(target_ptr + places, tl.zeros((LANES,), target_ptr.dtype.element_ty) + value, mask=places < end)


@triton.jit
def fill_rows(slots_ptr, row_weights_ptr, weights_ptr, first, end, LANES: tl.constexpr):
    """Rows that no slot has."""
    fill(slots_ptr, first, end, -1, LANES)
    if weights_ptr is not None:
        fill(row_weights_ptr, first, end, 0.0, LANES)


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
    """Ids and weights `[N]` to the arrays of `SortedTokens`; without weights, and without a number of tokens."""
    BINS: tl.constexpr = S.bins
    LANES: tl.constexpr = S.lanes
    num_slots = S.num_assignments
    if num_tokens_ptr is not None:
        num_slots = tl.minimum(tl.maximum(tl.load(num_tokens_ptr), 0) * S.top_k, S.num_assignments)
    first = tl.program_id(0) * S.per_program
    total, before = count_slots(ids_ptr, first, num_slots, S)
    padded = (total + S.block_size - 1) // S.block_size * S.block_size
    ends = tl.cumsum(padded, axis=0)
    starts = ends - padded
    num_rows = tl.max(ends, axis=0)
    if tl.program_id(0) == 0:
        bins = tl.arange(0, BINS)
        tl.store(sizes_ptr + bins, padded, mask=bins < S.num_local_experts)
        tl.store(num_rows_ptr, num_rows)
    bases = starts + before
    for start in range(first, tl.minimum(first + S.per_program, num_slots), LANES):
        slots = start + tl.arange(0, LANES)
        expert, here = local_experts(ids_ptr, slots, num_slots, S)
        rows = tl.gather(bases, expert & (BINS - 1), 0) + count_alike_before(expert, LANES)
        tl.store(slots_ptr + rows, slots, mask=here)
        if weights_ptr is not None:
            tl.store(row_weights_ptr + rows, tl.load(weights_ptr + slots, mask=here, other=0.0), mask=here)
        bases += tl.histogram(expert, BINS, mask=here)
    for expert in range(tl.program_id(0), S.num_local_experts, tl.num_programs(0)):
        mine = tl.arange(0, BINS) == expert
        start = tl.sum(tl.where(mine, starts, 0), axis=0)
        end = tl.sum(tl.where(mine, ends, 0), axis=0)
        used = start + tl.sum(tl.where(mine, total, 0), axis=0)
        fill_rows(slots_ptr, row_weights_ptr, weights_ptr, used, end, LANES)
        fill(block_expert_ptr, start // S.block_size, end // S.block_size, expert, LANES)
    num_blocks: tl.constexpr = S.num_rows // S.block_size
    rows = tl.cdiv(S.num_rows - num_rows, tl.num_programs(0))
    first = tl.minimum(num_rows + tl.program_id(0) * rows, S.num_rows)
    fill_rows(slots_ptr, row_weights_ptr, weights_ptr, first, tl.minimum(first + rows, S.num_rows), LANES)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        fill(block_expert_ptr, num_rows // S.block_size, num_blocks, -1, LANES)
