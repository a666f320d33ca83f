"""The plan of an exchange in one launch: every rank learns the ids of all, and gives its experts' slots their rows.

Slots are numbered (source rank, token, k); BLOCK of one source are a block. Tasks, in order: (0) announce; (1) push own
ids to every peer, by blocks; (2) set the rows to -1, while the ids travel; (3) count: copy the ids of a block to the
result, give each slot its position among those of its expert in the block, and store how many each expert has; (4)
give rows, when all that is done: the row of a slot is where its expert starts, plus what earlier blocks have of the
expert, plus its position. Each of these tasks adds the counts of all blocks up by itself: they are few, so that this
costs less than another step that all wait for. No row comes from atomics: the same ids give the same rows.

A position, among LANES slots at a time, is a comparison of all pairs: no sort, and no work per expert.
"""

import triton
import triton.language as tl

from .failures import poison
from .protocol import (
    announce,
    await_block,
    await_flag,
    await_ready,
    data_of,
    end_launch,
    next_task,
    open_launch,
    peer_of,
    publish,
)
from .table import DONE
from .trace import COUNT_EVENT, OWN, PLACE_EVENT, PUSH_EVENT, WAIT_EVENT, ZERO_EVENT, stamp, trace, trace_exchange

# A slot with an expert here, between steps (3) and (4): the local expert from this bit on, below it its position.
EXPERT_BIT = tl.constexpr(20)
POSITION_MASK = tl.constexpr((1 << 20) - 1)


@triton.jit
def copy_ids(from_ptr, to_ptr, count, BLOCK: tl.constexpr, NUM_EXPERTS: tl.constexpr):
    """Copies up to BLOCK ids; returns how many of them are outside [0, NUM_EXPERTS) and not -1."""
    lanes: tl.constexpr = min(1024, BLOCK)
    invalid = tl.zeros((lanes,), tl.int32)
    for start in range(0, tl.minimum(count, BLOCK), lanes):
        index = start + tl.arange(0, lanes)
        ids = tl.load(from_ptr + index, mask=index < count, other=-1)
        tl.store(to_ptr + index, ids, mask=index < count)
        invalid += ((ids < -1) | (ids >= NUM_EXPERTS)).to(tl.int32)
    return tl.sum(invalid, axis=0)


@triton.jit
def count_alike_before(expert, LANES: tl.constexpr):
    """How many of the lanes before each of `expert [LANES]` have the same."""
    lanes = tl.arange(0, LANES)
    # Keys in the order (expert, lane): the lanes before one with its expert are those up to `lane` keys below it.
    keys = expert * LANES + lanes
    below = (keys[None, :] - 1 - keys[:, None]).to(tl.uint32, bitcast=True)
    alike = below < lanes.to(tl.uint32, bitcast=True)[None, :]
    return tl.sum(alike.to(tl.int32), axis=0)


@triton.jit
def count_block(
    ids_ptr, positions_ptr, counts_ptr, count, first_expert, LOCAL_EXPERTS: tl.constexpr, TILE: tl.constexpr
):
    """`positions` of the first `count` ids of a block, and `counts [BINS]` of it by local expert."""
    BINS: tl.constexpr = TILE.bins
    lanes = tl.arange(0, TILE.lanes)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, tl.minimum(count, TILE.block), TILE.lanes):
        inside = start + lanes < count
        ids = tl.load(ids_ptr + start + lanes, mask=inside, other=-1)
        here = (ids >= first_expert) & (ids < first_expert + LOCAL_EXPERTS)
        expert = tl.where(here, ids - first_expert, BINS)
        position = tl.gather(counts, expert & (BINS - 1), 0) + count_alike_before(expert, TILE.lanes)
        tl.store(positions_ptr + start + lanes, tl.where(here, (expert << EXPERT_BIT) | position, -1), mask=inside)
        counts += tl.histogram(expert, BINS, mask=here)
    tl.store(counts_ptr + tl.arange(0, BINS), counts)


@triton.jit
def sum_counts(counts_ptr, block, NUM_BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """`[BINS]` int32 slots of each local expert: in all blocks, and in those before `block`."""
    bins = tl.arange(0, TILE.bins)[None, :]
    total = tl.zeros((TILE.blocks_at_once, TILE.bins), tl.int32)
    before = tl.zeros((TILE.blocks_at_once, TILE.bins), tl.int32)
    for start in range(0, NUM_BLOCKS, TILE.blocks_at_once):
        blocks = start + tl.arange(0, TILE.blocks_at_once)[:, None]
        counts = tl.load(counts_ptr + blocks * TILE.bins + bins, mask=blocks < NUM_BLOCKS, other=0)
        total += counts
        before += tl.where(blocks < block, counts, 0)
    return tl.sum(total, axis=0), tl.sum(before, axis=0)


@triton.jit
def store_rows(positions_ptr, slot_row_ptr, row_slot_ptr, first, count, bases, S: tl.constexpr):
    """The rows of `count` slots from `first` on; `bases [BINS]` is the row of each local expert's first slot here."""
    lanes: tl.constexpr = min(1024, S.tile.block)
    for start in range(0, tl.minimum(count, S.tile.block), lanes):
        index = start + tl.arange(0, lanes)
        inside = index < count
        packed = tl.load(positions_ptr + first + index, mask=inside, other=-1)
        row = tl.gather(bases, (packed >> EXPERT_BIT) & (S.tile.bins - 1), 0) + (packed & POSITION_MASK)
        has_row = (packed >= 0) & (row >= 0) & (row < S.num_rows)
        tl.store(slot_row_ptr + first + index, tl.where(has_row, row, -1), mask=inside)
        tl.store(row_slot_ptr + row, first + index, mask=has_row)


@triton.jit
def store_sizes(total, starts, ends, invalid_ptr, sizes_ptr, num_invalid_ptr, num_dropped_ptr, S: tl.constexpr):
    """What is known of the plan as a whole: the rows of each group with padding, and two numbers."""
    bins = tl.arange(0, S.tile.bins)
    tl.store(
        sizes_ptr + bins, tl.minimum(ends, S.num_rows) - tl.minimum(starts, S.num_rows), mask=bins < S.num_local_experts
    )
    placed = tl.minimum(total, tl.maximum(S.num_rows - starts, 0))
    tl.store(num_dropped_ptr, tl.sum(total - placed, axis=0))
    blocks = tl.arange(0, S.source_blocks)
    num_blocks: tl.constexpr = (S.num_assignments + S.tile.block - 1) // S.tile.block
    tl.store(num_invalid_ptr, tl.sum(tl.load(invalid_ptr + blocks, mask=blocks < num_blocks, other=0), axis=0))


@triton.jit
def count_task(launch):
    """Counts a task that tasks of step (4) wait for."""
    # A release by one thread covers the others' stores only after a barrier of the program.
    tl.debug_barrier()
    tl.atomic_add(launch.control + DONE, 1, sem="release", scope="gpu")


@triton.jit
def plan(
    x_ptr,
    peers,
    row_slot_ptr,
    slot_row_ptr,
    sizes_ptr,
    ids_ptr,
    num_invalid_ptr,
    num_dropped_ptr,
    scratch,
    S: tl.constexpr,
    HEAP: tl.constexpr,
):
    """`x [N]`, the ids of this rank, to the arrays of the handle (jax_ep.types.Handle)."""
    launch, alive = open_launch(peers, HEAP)
    NUM_RANKS: tl.constexpr = HEAP.num_ranks
    NUM_ASSIGNMENTS: tl.constexpr = S.num_assignments
    BLOCK: tl.constexpr = S.tile.block
    BINS: tl.constexpr = S.tile.bins
    NUM_EXPERTS: tl.constexpr = NUM_RANKS * S.num_local_experts
    source_blocks: tl.constexpr = (NUM_ASSIGNMENTS + BLOCK - 1) // BLOCK
    num_blocks: tl.constexpr = NUM_RANKS * source_blocks
    num_fills: tl.constexpr = (S.num_rows + S.fill_rows - 1) // S.fill_rows
    stride: tl.constexpr = (NUM_ASSIGNMENTS + 31) // 32 * 32  # of a source in the heap: whole 16-byte words
    num_peers: tl.constexpr = NUM_RANKS - 1 if NUM_RANKS > 1 else 1
    push_end: tl.constexpr = 1 + (NUM_RANKS - 1) * source_blocks
    fill_end: tl.constexpr = push_end + num_fills
    count_end: tl.constexpr = fill_end + num_blocks
    task = next_task(launch)
    while task < count_end + num_blocks:
        if task == 0:
            announce(launch, HEAP)
        elif task < push_end:
            block = (task - 1) // num_peers
            peer = peer_of(launch, (launch.rank + 1 + (task - 1) % num_peers) % NUM_RANKS)
            alive = await_ready(launch, peer, alive, task, HEAP)
            if alive != 0:
                began = stamp(HEAP)
                target = (
                    data_of(launch, peer.device, tl.int32, HEAP) + launch.rank.to(tl.int64) * stride + block * BLOCK
                )
                copy_ids(x_ptr + block * BLOCK, target, NUM_ASSIGNMENTS - block * BLOCK, BLOCK, NUM_EXPERTS)
                trace_exchange(launch, PUSH_EVENT, began, task, peer.device, block, HEAP)
                publish(launch, peer, block, task, HEAP)
        elif task < fill_end:
            began = stamp(HEAP)
            lanes: tl.constexpr = min(1024, S.fill_rows)
            for start in range(
                (task - push_end) * S.fill_rows, tl.minimum((task - push_end + 1) * S.fill_rows, S.num_rows), lanes
            ):
                rows = start + tl.arange(0, lanes)
                tl.store(row_slot_ptr + rows, tl.full((lanes,), -1, tl.int32), mask=rows < S.num_rows)
            count_task(launch)
            trace(launch, ZERO_EVENT, began, task, HEAP)
        else:
            # Own blocks first: they are here. Then in the order in which peers push.
            index = (task - fill_end) % num_blocks
            step = 0
            block = index
            if index >= source_blocks:
                step = 1 + (index - source_blocks) % num_peers
                block = (index - source_blocks) // num_peers
            source_rank = (launch.rank + NUM_RANKS - step) % NUM_RANKS
            first = source_rank * NUM_ASSIGNMENTS + block * BLOCK
            count = NUM_ASSIGNMENTS - block * BLOCK
            counts_row = source_rank * source_blocks + block
            if task < count_end:
                began = stamp(HEAP)
                if source_rank == launch.rank:
                    invalid = copy_ids(x_ptr + block * BLOCK, ids_ptr + first, count, BLOCK, NUM_EXPERTS)
                    tl.store(scratch.invalid_ptr + block, invalid)
                else:
                    alive = await_block(launch, peer_of(launch, source_rank), block, alive, task, HEAP)
                    began = stamp(HEAP)
                    received = data_of(launch, launch.device, tl.int32, HEAP) + source_rank.to(tl.int64) * stride
                    copy_ids(received + block * BLOCK, ids_ptr + first, count, BLOCK, NUM_EXPERTS)
                # What follows reads the copy: the heap may change after a failure, and both steps need the same ids.
                tl.debug_barrier()
                counts, ids, positions = (
                    scratch.counts_ptr + counts_row * BINS,
                    ids_ptr + first,
                    scratch.positions_ptr + first,
                )
                count_block(
                    ids, positions, counts, count, launch.rank * S.num_local_experts, S.num_local_experts, S.tile
                )
                count_task(launch)
                trace(launch, COUNT_EVENT, began, task, HEAP)
            else:
                began = stamp(HEAP)
                # Also after a failure: own tasks always end, and without what they store rows would be random.
                expected: tl.constexpr = num_fills + num_blocks
                ended = await_flag(launch, launch.control + DONE, expected, -1, alive | 1, task, HEAP)
                alive = alive & ended
                trace_exchange(launch, WAIT_EVENT, began, task, -1, OWN, HEAP)
                began = stamp(HEAP)
                total, before = sum_counts(scratch.counts_ptr, counts_row, num_blocks, S.tile)
                padded = (total // S.alignment + (total % S.alignment > 0).to(tl.int32)) * S.alignment
                ends = tl.cumsum(padded, axis=0)
                starts = ends - padded
                if index == 0:
                    invalid_ptr = scratch.invalid_ptr
                    store_sizes(total, starts, ends, invalid_ptr, sizes_ptr, num_invalid_ptr, num_dropped_ptr, S)
                store_rows(scratch.positions_ptr, slot_row_ptr, row_slot_ptr, first, count, starts + before, S)
                trace(launch, PLACE_EVENT, began, task, HEAP)
        task = next_task(launch)
    if end_launch(launch, HEAP):
        poison(row_slot_ptr, S.num_rows)
        poison(slot_row_ptr, NUM_RANKS * NUM_ASSIGNMENTS)
        poison(ids_ptr, NUM_RANKS * NUM_ASSIGNMENTS)
        poison(num_invalid_ptr, 1)
        poison(num_dropped_ptr, 1)
        # Sizes that can be used, and a poisoned row for each expert: the gradient of its matrix is then no zero.
        experts = tl.arange(0, BINS)
        fits = (experts + 1) * S.alignment <= S.num_rows
        tl.store(sizes_ptr + experts, fits.to(tl.int32) * S.alignment, mask=experts < S.num_local_experts)
