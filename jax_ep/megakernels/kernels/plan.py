"""Plan of a dispatch, in one launch: gather the expert ids of all ranks, and give assignments to local experts a row.

Assignments are numbered (source rank, token, k), in blocks of one source. All programs take tasks from one queue:

    (0) signal   signal the peers that this rank is ready
    (1) send     store this rank's ids at every peer, by blocks
    (2) fill     set `row_to_assignment` to -1 while the ids travel
    (3) count    copy a block's ids to the result; store each assignment's position among those of its expert in the
                 block, and the block's count of each expert
    (4) place    row = first row of the expert + count of the expert in earlier blocks + position

Waits. A send waits for the peer's handshake, a count for the block's flag, a place for all fills and counts of this
rank. All of these have smaller numbers, so it cannot deadlock. Each place task sums the counts of all blocks itself:
there are few, and a separate step would need another wait.

No row comes from an atomic, so equal ids give equal rows. Positions come from comparisons of all pairs among `lanes`
assignments: no sort, and no work per expert. Floor: the latency of one handshake and one transfer of the ids.
"""

import triton
import triton.language as tl

from . import protocol
from .failures import DONE, poison
from .trace import COUNT_EVENT, OWN, PLACE_EVENT, PUSH_EVENT, WAIT_EVENT, ZERO_EVENT, stamp, trace, trace_exchange

# An assignment between steps (3) and (4), as int32; -1 if its expert is not here:
#   31  30 ............. 20  19 ............. 0
#    0     local expert         position in the block, among the assignments of the expert
EXPERT_BIT = tl.constexpr(20)
POSITION_MASK = tl.constexpr((1 << 20) - 1)


@triton.jit
def copy_ids(from_ptr, to_ptr, count, BLOCK: tl.constexpr, NUM_EXPERTS: tl.constexpr):
    """Copy up to BLOCK ids; return how many of them are neither -1 nor in [0, NUM_EXPERTS)."""
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
    """Count, for each lane of `expert [LANES]`, the earlier lanes with the same expert."""
    lanes = tl.arange(0, LANES)
    # Keys order lanes by (expert, lane). Earlier lanes of the same expert are those with a key 1 to `lane` below; one
    # unsigned comparison tests both bounds.
    keys = expert * LANES + lanes
    below = (keys[None, :] - 1 - keys[:, None]).to(tl.uint32, bitcast=True)
    alike = below < lanes.to(tl.uint32, bitcast=True)[None, :]
    return tl.sum(alike.to(tl.int32), axis=0)


@triton.jit
def count_block(
    topk_idx_ptr, positions_ptr, counts_ptr, count, first_expert, LOCAL_EXPERTS: tl.constexpr, TILE: tl.constexpr
):
    """Store the `positions` of a block's first `count` ids, and its `counts [bins]` by local expert."""
    BINS: tl.constexpr = TILE.bins
    lanes = tl.arange(0, TILE.lanes)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, tl.minimum(count, TILE.block), TILE.lanes):
        inside = start + lanes < count
        ids = tl.load(topk_idx_ptr + start + lanes, mask=inside, other=-1)
        here = (ids >= first_expert) & (ids < first_expert + LOCAL_EXPERTS)
        expert = tl.where(here, ids - first_expert, BINS)
        # Position: assignments of the expert in earlier lanes of the block.
        position = tl.gather(counts, expert & (BINS - 1), 0) + count_alike_before(expert, TILE.lanes)
        tl.store(positions_ptr + start + lanes, tl.where(here, (expert << EXPERT_BIT) | position, -1), mask=inside)
        counts += tl.histogram(expert, BINS, mask=here)
    tl.store(counts_ptr + tl.arange(0, BINS), counts)


@triton.jit
def sum_counts(counts_ptr, block, num_blocks, TILE: tl.constexpr):
    """Sum the counts of `num_blocks` blocks, and of the blocks before `block`, as int32 `[bins]` each."""
    bins = tl.arange(0, TILE.bins)[None, :]
    total = tl.zeros((TILE.blocks_at_once, TILE.bins), tl.int32)
    before = tl.zeros((TILE.blocks_at_once, TILE.bins), tl.int32)
    for start in range(0, num_blocks, TILE.blocks_at_once):
        blocks = start + tl.arange(0, TILE.blocks_at_once)[:, None]
        counts = tl.load(counts_ptr + blocks * TILE.bins + bins, mask=blocks < num_blocks, other=0)
        total += counts
        before += tl.where(blocks < block, counts, 0)
    return tl.sum(total, axis=0), tl.sum(before, axis=0)


@triton.jit
def store_rows(positions_ptr, assignment_to_row_ptr, row_to_assignment_ptr, first, count, bases, S: tl.constexpr):
    """Store the rows of `count` assignments from `first` on; `bases [bins]` are the first rows of local experts."""
    lanes: tl.constexpr = min(1024, S.tile.block)
    for start in range(0, tl.minimum(count, S.tile.block), lanes):
        index = start + tl.arange(0, lanes)
        inside = index < count
        # Unpack expert and position.
        packed = tl.load(positions_ptr + first + index, mask=inside, other=-1)
        row = tl.gather(bases, (packed >> EXPERT_BIT) & (S.tile.bins - 1), 0) + (packed & POSITION_MASK)
        # Rows past the capacity are dropped.
        has_row = (packed >= 0) & (row >= 0) & (row < S.num_rows)
        tl.store(assignment_to_row_ptr + first + index, tl.where(has_row, row, -1), mask=inside)
        tl.store(row_to_assignment_ptr + row, first + index, mask=has_row)


@triton.jit
def store_sizes(total, starts, ends, invalid_ptr, sizes_ptr, num_invalid_ptr, num_dropped_ptr, S: tl.constexpr):
    """Store the rows of each expert with padding, and the numbers of dropped assignments and of invalid ids."""
    bins = tl.arange(0, S.tile.bins)
    tl.store(
        sizes_ptr + bins, tl.minimum(ends, S.num_rows) - tl.minimum(starts, S.num_rows), mask=bins < S.num_local_experts
    )
    # Assignments of an expert past the capacity are dropped.
    placed = tl.minimum(total, tl.maximum(S.num_rows - starts, 0))
    tl.store(num_dropped_ptr, tl.sum(total - placed, axis=0))
    blocks = tl.arange(0, S.source_blocks)
    num_blocks: tl.constexpr = (S.num_assignments + S.tile.block - 1) // S.tile.block
    tl.store(num_invalid_ptr, tl.sum(tl.load(invalid_ptr + blocks, mask=blocks < num_blocks, other=0), axis=0))


@triton.jit
def plan(
    x_ptr,
    peers,
    row_to_assignment_ptr,
    assignment_to_row_ptr,
    sizes_ptr,
    topk_idx_ptr,
    num_invalid_ptr,
    num_dropped_ptr,
    scratch,
    S: tl.constexpr,
    HEAP: tl.constexpr,
):
    """Turn this rank's ids, `x [num_assignments]`, into the arrays of the handle (jax_ep.types.Handle)."""
    launch, not_failed = protocol.open_launch(peers, HEAP)
    NUM_RANKS: tl.constexpr = HEAP.num_ranks
    NUM_ASSIGNMENTS: tl.constexpr = S.num_assignments
    BLOCK: tl.constexpr = S.tile.block
    BINS: tl.constexpr = S.tile.bins
    NUM_EXPERTS: tl.constexpr = NUM_RANKS * S.num_local_experts
    source_blocks: tl.constexpr = (NUM_ASSIGNMENTS + BLOCK - 1) // BLOCK
    num_blocks: tl.constexpr = NUM_RANKS * source_blocks
    num_fills: tl.constexpr = (S.num_rows + S.fill_rows - 1) // S.fill_rows
    # Ids of a source in the heap, padded so that copies are whole 16-byte words.
    stride: tl.constexpr = (NUM_ASSIGNMENTS + 31) // 32 * 32
    num_peers: tl.constexpr = NUM_RANKS - 1 if NUM_RANKS > 1 else 1
    # Numbers of the first task after each step.
    push_end: tl.constexpr = 1 + (NUM_RANKS - 1) * source_blocks
    fill_end: tl.constexpr = push_end + num_fills
    count_end: tl.constexpr = fill_end + num_blocks
    task = protocol.next_task(launch)
    while task < count_end + num_blocks:
        if task == 0:
            protocol.signal_ready(launch, HEAP)
        elif task < push_end:
            # (1) Send a block of ids to one peer, starting with the next rank.
            block = (task - 1) // num_peers
            peer = protocol.peer_of(launch, (launch.rank + 1 + (task - 1) % num_peers) % NUM_RANKS)
            not_failed = protocol.await_ready(launch, peer, not_failed, task, HEAP)
            if not_failed != 0:
                began = stamp(HEAP)
                heap_ptr = protocol.data_of(launch, peer.device, tl.int32, HEAP)
                target = heap_ptr + launch.rank.to(tl.int64) * stride + block * BLOCK
                copy_ids(x_ptr + block * BLOCK, target, NUM_ASSIGNMENTS - block * BLOCK, BLOCK, NUM_EXPERTS)
                trace_exchange(launch, PUSH_EVENT, began, task, peer.device, block, HEAP)
                protocol.publish(launch, peer, block, task, HEAP)
        elif task < fill_end:
            began = stamp(HEAP)
            # (2) Fill: no row has an assignment yet.
            lanes: tl.constexpr = min(1024, S.fill_rows)
            first = (task - push_end) * S.fill_rows
            for start in range(first, tl.minimum((task - push_end + 1) * S.fill_rows, S.num_rows), lanes):
                rows = start + tl.arange(0, lanes)
                tl.store(row_to_assignment_ptr + rows, tl.full((lanes,), -1, tl.int32), mask=rows < S.num_rows)
            protocol.count_task(launch.control + DONE)
            trace(launch, ZERO_EVENT, began, task, HEAP)
        else:
            # Own blocks come first, since they are here. The others follow in the order in which peers send them.
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
                # (3) Count: copy a block's ids to the result; own ids come from `x`, the others from the heap.
                if source_rank == launch.rank:
                    invalid = copy_ids(x_ptr + block * BLOCK, topk_idx_ptr + first, count, BLOCK, NUM_EXPERTS)
                    tl.store(scratch.invalid_ptr + block, invalid)
                else:
                    not_failed = protocol.await_block(
                        launch, protocol.peer_of(launch, source_rank), block, not_failed, task, HEAP
                    )
                    began = stamp(HEAP)
                    received = (
                        protocol.data_of(launch, launch.device, tl.int32, HEAP) + source_rank.to(tl.int64) * stride
                    )
                    copy_ids(received + block * BLOCK, topk_idx_ptr + first, count, BLOCK, NUM_EXPERTS)
                # Count from the copy, not from the heap: after a failure the heap may change, and steps (3) and (4)
                # need the same ids.
                tl.debug_barrier()
                counts, ids = scratch.counts_ptr + counts_row * BINS, topk_idx_ptr + first
                positions, first_expert = scratch.positions_ptr + first, launch.rank * S.num_local_experts
                count_block(ids, positions, counts, count, first_expert, S.num_local_experts, S.tile)
                protocol.count_task(launch.control + DONE)
                trace(launch, COUNT_EVENT, began, task, HEAP)
            else:
                began = stamp(HEAP)
                # (4) Place: wait for this rank's fills and counts. Wait after a failure too: these tasks always end,
                # and rows would be undefined without them.
                expected: tl.constexpr = num_fills + num_blocks
                ended = protocol.await_flag(launch, launch.control + DONE, expected, -1, not_failed | 1, task, HEAP)
                not_failed = not_failed & ended
                trace_exchange(launch, WAIT_EVENT, began, task, -1, OWN, HEAP)
                began = stamp(HEAP)
                total, before = sum_counts(scratch.counts_ptr, counts_row, num_blocks, S.tile)
                # Round the rows of each expert up to the alignment; experts are contiguous.
                padded = (total // S.alignment + (total % S.alignment > 0).to(tl.int32)) * S.alignment
                ends = tl.cumsum(padded, axis=0)
                starts = ends - padded
                if index == 0:
                    invalid_ptr = scratch.invalid_ptr
                    store_sizes(total, starts, ends, invalid_ptr, sizes_ptr, num_invalid_ptr, num_dropped_ptr, S)
                store_rows(
                    scratch.positions_ptr,
                    assignment_to_row_ptr,
                    row_to_assignment_ptr,
                    first,
                    count,
                    starts + before,
                    S,
                )
                trace(launch, PLACE_EVENT, began, task, HEAP)
        task = protocol.next_task(launch)
    # After a failure no result may look valid.
    if protocol.end_launch(launch, HEAP):
        poison(row_to_assignment_ptr, S.num_rows)
        poison(assignment_to_row_ptr, NUM_RANKS * NUM_ASSIGNMENTS)
        poison(topk_idx_ptr, NUM_RANKS * NUM_ASSIGNMENTS)
        poison(num_invalid_ptr, 1)
        poison(num_dropped_ptr, 1)
        # Give each expert one poisoned row if it fits: sizes stay usable, and weight gradients become NaN, not zero.
        experts = tl.arange(0, BINS)
        fits = (experts + 1) * S.alignment <= S.num_rows
        tl.store(sizes_ptr + experts, fits.to(tl.int32) * S.alignment, mask=experts < S.num_local_experts)
