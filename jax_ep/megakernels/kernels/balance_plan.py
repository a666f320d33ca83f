"""Plan of one balanced pass, and the slots of this rank's assignments in it; xla/balance_plan.py explains the moves.

`plan_pass` is one program: each move depends on the one before. Its vectors are over experts and over ranks. Floor: the
latency of num_ranks * spare moves, of a microsecond or two each.

Two launches place assignments, so no program waits for another: `count_shares` counts those of each program's share by
expert, and `place_assignments` begins with the counts of the shares before its own. Floor: the latency of two launches.
"""

import triton
import triton.language as tl

from .plan import count_alike_before, sum_counts


@triton.jit
def value_at(values, lanes, index):
    """Return the element of `values` at `index`."""
    return tl.sum(tl.where(lanes == index, values, 0), axis=0)


@triton.jit
def make_moves(home, loads, copies_ptr, moved_ptr, S: tl.constexpr):
    """Store copies and their rows; return the rows of each expert that stay at home, and the free slots of ranks."""
    experts = tl.arange(0, S.padded_experts)
    ranks = tl.arange(0, S.padded_ranks)
    owner = experts // S.num_local_experts
    chunk: tl.constexpr = S.rows // S.num_local_experts + 1
    free = tl.where(ranks < S.num_ranks, S.spare, 0)
    mean = tl.sum(loads, axis=0) // S.num_ranks
    num_moves, count = 0, 1
    while (count > 0) & (num_moves < S.num_ranks * S.spare):
        room = tl.where(ranks < S.num_ranks, tl.maximum(S.rows - loads, 0), 0)
        excess = tl.maximum(loads - S.rows, 0)
        usable = tl.where(free > 0, room, 0)
        # From the largest expert of the most loaded rank to the rank with the most room.
        giver = tl.argmax(loads, axis=0)
        receiver = tl.argmax(usable, axis=0)
        at_giver = tl.where(owner == giver, home, -1)
        expert = tl.argmax(at_giver, axis=0)
        fill = tl.minimum(value_at(usable, ranks, receiver), value_at(home, experts, expert))
        even = tl.minimum(fill, value_at(loads, ranks, giver) - mean)
        # The excess that the free slots are certain to hold then.
        is_receiver = (ranks == receiver).to(tl.int32)
        direction = is_receiver - (ranks == giver).to(tl.int32)
        room_after = tl.where(ranks < S.num_ranks, tl.maximum(S.rows - loads - even * direction, 0), 0)
        certain = tl.sum(tl.minimum(room_after, (free - is_receiver) * chunk), axis=0)
        total = tl.sum(excess, axis=0)
        left = total - tl.minimum(even, value_at(excess, ranks, giver))
        count = tl.where(certain >= left, even, fill)
        count = tl.where(total > 0, count, 0)
        if count > 0:
            slot = receiver * S.spare + S.spare - value_at(free, ranks, receiver)
            tl.store(copies_ptr + slot, expert)
            tl.store(moved_ptr + slot, count)
            free -= is_receiver
        home -= tl.where(experts == expert, count, 0)
        loads += count * direction
        num_moves += 1
    return home, free


@triton.jit
def plan_pass(counts_ptr, copies_ptr, moved_ptr, own_ptr, ends_ptr, starts_ptr, left_ptr, S: tl.constexpr):
    """Plan a pass of the assignments `counts [num_ranks, num_experts]`; the results are those of `PassPlan`.

    `moved [num_ranks, spare]` are the rows that each copy takes.
    """
    experts = tl.arange(0, S.padded_experts)
    ranks = tl.arange(0, S.padded_ranks)
    inside = experts < S.num_experts
    owner = experts // S.num_local_experts
    # Rows of each expert, and of each rank.
    home = tl.zeros((S.padded_experts,), tl.int32)
    for source in range(S.num_ranks):
        home += tl.load(counts_ptr + source * S.num_experts + experts, mask=inside, other=0)
    loads = tl.zeros((S.padded_ranks,), tl.int32)
    for rank in range(S.num_ranks):
        loads += tl.where(ranks == rank, tl.sum(tl.where(owner == rank, home, 0), axis=0), 0)
    slots = tl.arange(0, S.padded_slots)
    tl.store(copies_ptr + slots, tl.zeros((S.padded_slots,), tl.int32) - 1, mask=slots < S.num_ranks * S.spare)
    tl.store(moved_ptr + slots, tl.zeros((S.padded_slots,), tl.int32), mask=slots < S.num_ranks * S.spare)
    tl.debug_barrier()
    home, free = make_moves(home, loads, copies_ptr, moved_ptr, S)
    tl.debug_barrier()
    # Divide the rows of each expert among the ranks that hold it.
    starts = tl.zeros((S.padded_experts,), tl.int32)
    ends = tl.zeros((S.padded_experts,), tl.int32)
    for rank in range(S.num_ranks):
        share = tl.where(owner == rank, home, 0)
        for slot in range(S.spare - value_at(free, ranks, rank)):
            copied = tl.load(copies_ptr + rank * S.spare + slot)
            share += tl.where(experts == copied, tl.load(moved_ptr + rank * S.spare + slot), 0)
        # A rank that is still overloaded computes its first rows, by expert.
        kept = tl.minimum(tl.maximum(S.rows - (tl.cumsum(share, axis=0) - share), 0), share)
        row = rank * S.num_experts + experts
        counts = tl.load(counts_ptr + row, mask=inside, other=0)
        own = tl.minimum(counts, kept)
        tl.store(own_ptr + row, own, mask=inside)
        tl.store(starts_ptr + row, starts, mask=inside)
        starts += counts - own
        ends += kept - own
        tl.store(ends_ptr + row, ends, mask=inside)
    tl.debug_barrier()
    # What remains for later passes.
    for rank in range(S.num_ranks):
        row = rank * S.num_experts + experts
        travelling = tl.load(counts_ptr + row, mask=inside, other=0) - tl.load(own_ptr + row, mask=inside, other=0)
        start = tl.load(starts_ptr + row, mask=inside, other=0)
        taken = tl.minimum(tl.maximum(ends - start, 0), travelling)
        tl.store(left_ptr + row, travelling - taken, mask=inside)


@triton.jit
def count_shares(topk_idx_ptr, counts_ptr, S: tl.constexpr):
    """Count the assignments of each program's share by expert, `[programs, bins]`."""
    first = tl.program_id(0) * S.tile.block
    counts = tl.zeros((S.tile.bins,), tl.int32)
    for start in range(first, tl.minimum(first + S.tile.block, S.num_assignments), S.tile.lanes):
        index = start + tl.arange(0, S.tile.lanes)
        expert = tl.load(topk_idx_ptr + index, mask=index < S.num_assignments, other=-1)
        counts += tl.histogram(tl.where(expert < 0, 0, expert), S.tile.bins, mask=expert >= 0)
    tl.store(counts_ptr + tl.program_id(0) * S.tile.bins + tl.arange(0, S.tile.bins), counts)


@triton.jit
def place_assignments(
    topk_idx_ptr, rank_ptr, counts_ptr, copies_ptr, own_ptr, ends_ptr, starts_ptr, slots_ptr, left_ptr, S: tl.constexpr
):
    """Give this rank's assignments `[num_assignments]` their slots in this pass; the ids left are for later ones."""
    NUM_RANKS: tl.constexpr = S.num_ranks
    NUM_EXPERTS: tl.constexpr = S.num_experts
    LOCAL_EXPERTS: tl.constexpr = NUM_EXPERTS // NUM_RANKS
    rank = tl.load(rank_ptr)
    first = tl.program_id(0) * S.tile.block
    counts, _ = sum_counts(counts_ptr, 0, tl.program_id(0), S.tile)
    for start in range(first, tl.minimum(first + S.tile.block, S.num_assignments), S.tile.lanes):
        index = start + tl.arange(0, S.tile.lanes)
        inside = index < S.num_assignments
        ids = tl.load(topk_idx_ptr + index, mask=inside, other=-1)
        used = ids >= 0
        expert = tl.where(used, ids, 0)
        # Position among this rank's assignments to the expert.
        position = tl.gather(counts, expert, 0) + count_alike_before(tl.where(used, ids, S.tile.bins), S.tile.lanes)
        counts += tl.histogram(expert, S.tile.bins, mask=used)
        # The first ones stay; the others go to the rank whose part of the expert's rows holds their place.
        own = tl.load(own_ptr + rank * NUM_EXPERTS + expert)
        place = tl.load(starts_ptr + rank * NUM_EXPERTS + expert) + position - own
        holder = tl.zeros((S.tile.lanes,), tl.int32)
        for other in range(NUM_RANKS):
            holder += (place >= tl.load(ends_ptr + other * NUM_EXPERTS + expert)).to(tl.int32)
        holder = tl.where(position < own, rank, holder)
        now = used & (holder < NUM_RANKS)
        # Its place there: the expert at home, or the first slot with a copy of it.
        copy = tl.zeros((S.tile.lanes,), tl.int32)
        for slot in range(S.spare):
            back = S.spare - 1 - slot
            held = tl.load(copies_ptr + tl.minimum(holder, NUM_RANKS - 1) * S.spare + back)
            copy = tl.where(held == expert, back, copy)
        at_home = holder == expert // LOCAL_EXPERTS
        slot_of = tl.where(at_home, expert % LOCAL_EXPERTS, LOCAL_EXPERTS + copy)
        tl.store(slots_ptr + index, tl.where(now, holder * (LOCAL_EXPERTS + S.spare) + slot_of, -1), mask=inside)
        tl.store(left_ptr + index, tl.where(now, -1, ids), mask=inside)
