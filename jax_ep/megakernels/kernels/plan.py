"""The plan of an exchange in one launch: every rank learns the ids of all, and gives its experts' slots their rows.

Slots are numbered (source rank, token, k); BLOCK of one source are a block. Tasks, in order: (0) announce; (1) push own
ids to every peer, by blocks; (2) set the rows to -1, while the ids travel; (3) count: copy the ids of a block to the
result, give each slot its place among those of its expert in the block, and store how many each expert has; (4) place,
when all that is done: the row of a slot is where its expert starts, plus what earlier blocks have of the expert, plus
its place. Each of these tasks adds the counts of all blocks up by itself: they are few, so that this costs less than
another step that all wait for. Nothing is placed by atomics: the same ids give the same rows.

A place, among LANES slots at a time, is a comparison of all pairs: no sort, and no work per expert.
"""

import triton
import triton.language as tl

from .failures import poison
from .protocol import (
    DONE,
    announce,
    await_block,
    await_flag,
    await_ready,
    end_launch,
    heap_rows,
    next_task,
    open_launch,
    publish,
)

# A slot with an expert here, between count and place: the local expert from this bit on, below it its place.
EXPERT_BIT = tl.constexpr(20)
PLACE_MASK = tl.constexpr((1 << 20) - 1)


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
    ids_ptr,
    places_ptr,
    counts_ptr,
    count,
    first_expert,
    L: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    BINS: tl.constexpr,
):
    """`places` of the first `count` ids of a block, and `counts [BINS]` of it by local expert."""
    lanes = tl.arange(0, LANES)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, tl.minimum(count, BLOCK), LANES):
        inside = start + lanes < count
        ids = tl.load(ids_ptr + start + lanes, mask=inside, other=-1)
        here = (ids >= first_expert) & (ids < first_expert + L)
        expert = tl.where(here, ids - first_expert, BINS)
        place = tl.gather(counts, expert & (BINS - 1), 0) + count_alike_before(expert, LANES)
        tl.store(places_ptr + start + lanes, tl.where(here, (expert << EXPERT_BIT) | place, -1), mask=inside)
        counts += tl.histogram(expert, BINS, mask=here)
    tl.store(counts_ptr + tl.arange(0, BINS), counts)


@triton.jit
def sum_counts(counts_ptr, block, BLOCKS: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr):
    """`[BINS]` int32 slots of each local expert: in all blocks, and in those before `block`."""
    bins = tl.arange(0, BINS)[None, :]
    total = tl.zeros((ROWS, BINS), tl.int32)
    before = tl.zeros((ROWS, BINS), tl.int32)
    for start in range(0, BLOCKS, ROWS):
        blocks = start + tl.arange(0, ROWS)[:, None]
        counts = tl.load(counts_ptr + blocks * BINS + bins, mask=blocks < BLOCKS, other=0)
        total += counts
        before += tl.where(blocks < block, counts, 0)
    return tl.sum(total, axis=0), tl.sum(before, axis=0)


@triton.jit
def place_block(
    places_ptr,
    slot_row_ptr,
    row_slot_ptr,
    first,
    count,
    bases,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """The rows of `count` slots from `first` on; `bases [BINS]` is the row of each local expert's first slot here."""
    lanes: tl.constexpr = min(1024, BLOCK)
    for start in range(0, tl.minimum(count, BLOCK), lanes):
        index = start + tl.arange(0, lanes)
        inside = index < count
        places = tl.load(places_ptr + first + index, mask=inside, other=-1)
        row = tl.gather(bases, (places >> EXPERT_BIT) & (BINS - 1), 0) + (places & PLACE_MASK)
        kept = (places >= 0) & (row >= 0) & (row < R)
        tl.store(slot_row_ptr + first + index, tl.where(kept, row, -1), mask=inside)
        tl.store(row_slot_ptr + row, first + index, mask=kept)


@triton.jit
def store_sizes(
    total,
    starts,
    ends,
    invalid_ptr,
    sizes_ptr,
    num_invalid_ptr,
    num_dropped_ptr,
    L: tl.constexpr,
    R: tl.constexpr,
    BINS: tl.constexpr,
    SOURCE_BLOCKS: tl.constexpr,
    INVALID: tl.constexpr,
):
    """What is known of the plan as a whole: the rows of each group with padding, and two numbers."""
    bins = tl.arange(0, BINS)
    tl.store(sizes_ptr + bins, tl.minimum(ends, R) - tl.minimum(starts, R), mask=bins < L)
    kept = tl.minimum(total, tl.maximum(R - starts, 0))
    tl.store(num_dropped_ptr, tl.sum(total - kept, axis=0))
    blocks = tl.arange(0, INVALID)
    tl.store(num_invalid_ptr, tl.sum(tl.load(invalid_ptr + blocks, mask=blocks < SOURCE_BLOCKS, other=0), axis=0))


@triton.jit
def finish(control):
    """Counts a task that tasks of step (4) wait for."""
    # A release by one thread covers the others' stores only after a barrier of the program.
    tl.debug_barrier()
    tl.atomic_add(control + DONE, 1, sem="release", scope="gpu")


@triton.jit
def plan(
    x_ptr,
    group_ptr,
    table_ptr,
    after_ptr,
    row_slot_ptr,
    slot_row_ptr,
    sizes_ptr,
    ids_ptr,
    num_invalid_ptr,
    num_dropped_ptr,
    places_ptr,
    counts_ptr,
    invalid_ptr,
    W: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    DATA: tl.constexpr,
    FLAGS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    INVALID: tl.constexpr,
    FILL: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """`x [N]`, the ids of this rank, to the arrays of the handle (jax_ep.types.Handle); N = T * K.

    `places [W, N]`, `counts [W * blocks per source, BINS]` and `invalid [blocks per source]` are scratch. BINS and
    INVALID are powers of two, at least L and blocks per source.
    """
    rank, me, control, alive = open_launch(table_ptr, group_ptr, LAUNCH, W, D)
    source_blocks: tl.constexpr = (N + BLOCK - 1) // BLOCK
    num_blocks: tl.constexpr = W * source_blocks
    num_fills: tl.constexpr = (R + FILL - 1) // FILL
    stride: tl.constexpr = (N + 31) // 32 * 32  # of a source in the heap: whole 16-byte words
    peers: tl.constexpr = W - 1 if W > 1 else 1
    push_end: tl.constexpr = 1 + (W - 1) * source_blocks
    fill_end: tl.constexpr = push_end + num_fills
    count_end: tl.constexpr = fill_end + num_blocks
    task = next_task(control)
    while task < count_end + num_blocks:
        if task == 0:
            announce(table_ptr, group_ptr, control, me, rank, LAUNCH, W, D)
        elif task < push_end:
            block = (task - 1) // peers
            peer_rank = (rank + 1 + (task - 1) % peers) % W
            peer = tl.load(group_ptr + peer_rank)
            alive = await_ready(table_ptr, control, rank, peer_rank, peer, alive, task, LAUNCH, D)
            if alive != 0:
                target = heap_rows(table_ptr, peer, tl.int32, DATA) + rank.to(tl.int64) * stride + block * BLOCK
                copy_ids(x_ptr + block * BLOCK, target, N - block * BLOCK, BLOCK, W * L)
                publish(table_ptr, control, me, peer, block, FLAGS, D, MAX_BLOCKS)
        elif task < fill_end:
            lanes: tl.constexpr = min(1024, FILL)
            for start in range((task - push_end) * FILL, tl.minimum((task - push_end + 1) * FILL, R), lanes):
                rows = start + tl.arange(0, lanes)
                tl.store(row_slot_ptr + rows, tl.full((lanes,), -1, tl.int32), mask=rows < R)
            finish(control)
        else:
            # Own blocks first: they are here. Then in the order in which peers push.
            index = (task - fill_end) % num_blocks
            step = 0
            block = index
            if index >= source_blocks:
                step = 1 + (index - source_blocks) % peers
                block = (index - source_blocks) // peers
            source_rank = (rank + W - step) % W
            first = source_rank * N + block * BLOCK
            count = N - block * BLOCK
            counts_row = source_rank * source_blocks + block
            if task < count_end:
                if source_rank == rank:
                    invalid = copy_ids(x_ptr + block * BLOCK, ids_ptr + first, count, BLOCK, W * L)
                    tl.store(invalid_ptr + block, invalid)
                else:
                    source = tl.load(group_ptr + source_rank)
                    alive = await_block(
                        table_ptr,
                        control,
                        rank,
                        source_rank,
                        source,
                        block,
                        alive,
                        task,
                        LAUNCH,
                        FLAGS,
                        D,
                        MAX_BLOCKS,
                    )
                    received = heap_rows(table_ptr, me, tl.int32, DATA) + source_rank.to(tl.int64) * stride
                    copy_ids(received + block * BLOCK, ids_ptr + first, count, BLOCK, W * L)
                # What follows reads the copy: the heap may change after a failure, and both steps need the same ids.
                tl.debug_barrier()
                counts = counts_ptr + counts_row * BINS
                count_block(ids_ptr + first, places_ptr + first, counts, count, rank * L, L, BLOCK, LANES, BINS)
                finish(control)
            else:
                # Also after a failure: own tasks always end, and without what they store rows would be random.
                done = control + DONE
                expected: tl.constexpr = num_fills + num_blocks
                ended = await_flag(table_ptr, done, expected, control, rank, -1, alive | 1, task, LAUNCH, D)
                alive = alive & ended
                total, before = sum_counts(counts_ptr, counts_row, num_blocks, BINS, ROWS)
                padded = (total // ALIGNMENT + (total % ALIGNMENT > 0).to(tl.int32)) * ALIGNMENT
                ends = tl.cumsum(padded, axis=0)
                starts = ends - padded
                if index == 0:
                    store_sizes(
                        total,
                        starts,
                        ends,
                        invalid_ptr,
                        sizes_ptr,
                        num_invalid_ptr,
                        num_dropped_ptr,
                        L,
                        R,
                        BINS,
                        source_blocks,
                        INVALID,
                    )
                place_block(places_ptr, slot_row_ptr, row_slot_ptr, first, count, starts + before, R, BLOCK, BINS)
        task = next_task(control)
    if end_launch(control, group_ptr, W):
        poison(row_slot_ptr, R)
        poison(slot_row_ptr, W * N)
        poison(ids_ptr, W * N)
        poison(num_invalid_ptr, 1)
        poison(num_dropped_ptr, 1)
        # Sizes that can be used, and a poisoned row for each expert: the gradient of its matrix is then no zero.
        experts = tl.arange(0, BINS)
        tl.store(sizes_ptr + experts, ((experts + 1) * ALIGNMENT <= R).to(tl.int32) * ALIGNMENT, mask=experts < L)
