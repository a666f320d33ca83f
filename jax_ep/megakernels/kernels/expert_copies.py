"""Copies of experts on other ranks: fetch their weights, and return their gradients to the ranks at home.

Roles. All programs take tasks from one queue, in order:

    task 0       signal the peers that this rank is ready
    then         store a block of an expert that leaves this rank in the heap of its target, and set the block's flag
    then         wait for the blocks of an expert that come to this rank, and copy them to the result or add them

Every rank has the list of all copies, and counts the tasks that concern it. Waits. A store waits for the peer's ready
handshake, a copy or sum for the block's flag. It cannot deadlock: a rank stores in tasks with smaller numbers than
those that wait for blocks.

Floor: the link carries each copy once; local memory traffic is two reads and two writes per copy, and for gradients one
read and one write of each expert at home that has copies.
"""

import triton
import triton.language as tl

from . import protocol
from .failures import poison
from .trace import COPY_EVENT, PUSH_EVENT, ZERO_EVENT, stamp, trace, trace_exchange


@triton.jit
def block_of(base_ptr, expert, block, S: tl.constexpr):
    """Return pointers to a block of an expert, and a mask of the elements that it has."""
    start = tl.cast(expert, tl.int64) * S.num_elements + block * S.block
    lanes = tl.arange(0, S.block)
    return tl.multiple_of(base_ptr + start, 16) + lanes, block * S.block + lanes < S.num_elements


@triton.jit
def load_copies(copies_ptr, first, S: tl.constexpr, HEAP: tl.constexpr):
    """Load the expert in each spare slot of all ranks from slot `first` on, around the end; -1 if it is free.

    Returns:
      Slots, experts, and the ranks at home, `[padded_slots]` each; -1 where there is none.
    """
    lanes = tl.arange(0, S.padded_slots)
    num_slots: tl.constexpr = HEAP.num_ranks * S.spare
    slots = tl.where(lanes < num_slots, (first + lanes) % num_slots, -1)
    experts = tl.load(copies_ptr + slots, mask=lanes < num_slots, other=-1)
    return slots, experts, tl.where(experts >= 0, experts // S.num_local_experts, -1)


@triton.jit
def entry(values, is_listed, index):
    """Return the element of `values` at the listed lane number `index`."""
    number = tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
    return tl.sum(tl.where(is_listed & (number == index), values, 0), axis=0)


@triton.jit
def send(launch, x_ptr, leaves, experts, targets, places, not_failed, task, S: tl.constexpr, HEAP: tl.constexpr):
    """Run a task of the sending half: signal the peers, or store a block of an expert that leaves this rank.

    Each listed lane of `leaves` has `num_blocks` tasks, which store `x[experts]` at `places` in the heap of the rank
    `targets`. Returns `not_failed`.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if task == 0:
        protocol.signal_ready(launch, HEAP)
    else:
        block = (task - 1) % S.num_blocks
        index = (task - 1) // S.num_blocks
        expert = entry(experts, leaves, index)
        place = entry(places, leaves, index)
        peer = protocol.peer_of(launch, entry(targets, leaves, index))
        not_failed = protocol.await_ready(launch, peer, not_failed, task, HEAP)
        if not_failed != 0:
            began = stamp(HEAP)
            from_ptrs, inside = block_of(x_ptr, expert, block, S)
            values = tl.load(from_ptrs, mask=inside)
            to_ptrs, _ = block_of(protocol.data_of(launch, peer.device, dtype, HEAP), place, block, S)
            tl.store(to_ptrs, values, mask=inside)
            trace_exchange(launch, PUSH_EVENT, began, task, peer.device, block, HEAP)
            protocol.publish(launch, peer, place * S.num_blocks + block, task, HEAP)
    return not_failed


@triton.jit
def fetch_copies(w_ptr, copies_ptr, peers, out_ptr, S: tl.constexpr, HEAP: tl.constexpr):
    """Fetch the experts that `copies [num_ranks, spare]` lists for this rank: `out [spare, num_elements]`.

    `w [num_local_experts, num_elements]` are those of this rank. Free slots become zero if `S.zeroed`.
    """
    launch, not_failed = protocol.open_launch(peers, HEAP)
    NUM_BLOCKS: tl.constexpr = S.num_blocks
    dtype: tl.constexpr = w_ptr.dtype.element_ty
    # Ranks start with the slots of the next rank, so that they do not all store at one rank.
    slots, experts, homes = load_copies(copies_ptr, (launch.rank + 1) * S.spare, S, HEAP)
    leaves = homes == launch.rank
    num_stores = tl.sum(leaves.to(tl.int32), axis=0) * NUM_BLOCKS
    # Used slots come first.
    comes = (slots // S.spare == launch.rank) & (experts >= 0)
    num_places = S.spare if S.zeroed else tl.sum(comes.to(tl.int32), axis=0)
    task = protocol.next_task(launch)
    held, targets, places = experts % S.num_local_experts, slots // S.spare, slots % S.spare
    while task < 1 + num_stores + num_places * NUM_BLOCKS:
        if task <= num_stores:
            not_failed = send(launch, w_ptr, leaves, held, targets, places, not_failed, task, S, HEAP)
        else:
            block = (task - 1) % NUM_BLOCKS
            place = (task - 1 - num_stores) // NUM_BLOCKS
            source = tl.sum(tl.where(slots == launch.rank * S.spare + place, homes, 0), axis=0)
            to_ptrs, inside = block_of(out_ptr, place, block, S)
            if source >= 0:
                # Copy a block that has come.
                peer = protocol.peer_of(launch, source)
                not_failed = protocol.await_block(launch, peer, place * NUM_BLOCKS + block, not_failed, task, HEAP)
                began = stamp(HEAP)
                from_ptrs, _ = block_of(protocol.data_of(launch, launch.device, dtype, HEAP), place, block, S)
                tl.store(to_ptrs, tl.load(from_ptrs, mask=inside), mask=inside)
                trace_exchange(launch, COPY_EVENT, began, task, peer.device, block, HEAP)
            else:
                began = stamp(HEAP)
                tl.store(to_ptrs, tl.zeros((S.block,), dtype), mask=inside)
                trace(launch, ZERO_EVENT, began, task, HEAP)
        task = protocol.next_task(launch)
    # After a failure no result may look valid.
    if protocol.end_launch(launch, HEAP):
        poison(out_ptr, S.spare * S.num_elements)


@triton.jit
def add_gradients(
    spare_ptr, copies_ptr, order_ptr, home_ptr, peers, ordered_ptr, out_ptr, S: tl.constexpr, HEAP: tl.constexpr
):
    """Add the gradients `spare [spare, num_elements]` of copies to `home [num_local_experts, num_elements]`, in place.

    `out` is `home` afterwards. Copies of an expert are added in float32 or wider in the order of `copies [num_ranks,
    spare]`, and rounded once. `order`, which becomes `ordered`, is only passed through: launches before and after this
    one depend on it.
    """
    launch, not_failed = protocol.open_launch(peers, HEAP)
    NUM_BLOCKS: tl.constexpr = S.num_blocks
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    wide: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    slots, experts, homes = load_copies(copies_ptr, 0, S, HEAP)
    leaves = (slots // S.spare == launch.rank) & (experts >= 0)
    num_stores = tl.sum(leaves.to(tl.int32), axis=0) * NUM_BLOCKS
    # Experts at home that have copies.
    local = tl.arange(0, S.padded_experts)
    copied = tl.histogram(experts % S.num_local_experts, S.padded_experts, mask=homes == launch.rank) > 0
    num_sums = tl.sum(copied.to(tl.int32), axis=0) * NUM_BLOCKS
    task = protocol.next_task(launch)
    while task < 1 + num_stores + num_sums:
        if task <= num_stores:
            not_failed = send(launch, spare_ptr, leaves, slots % S.spare, homes, slots, not_failed, task, S, HEAP)
        else:
            block = (task - 1) % NUM_BLOCKS
            expert = entry(local, copied, (task - 1 - num_stores) // NUM_BLOCKS)
            out_ptrs, inside = block_of(out_ptr, expert, block, S)
            total = tl.load(out_ptrs, mask=inside).to(wide)
            for slot in range(HEAP.num_ranks * S.spare):
                if tl.load(copies_ptr + slot) == launch.rank * S.num_local_experts + expert:
                    peer = protocol.peer_of(launch, slot // S.spare)
                    not_failed = protocol.await_block(launch, peer, slot * NUM_BLOCKS + block, not_failed, task, HEAP)
                    began = stamp(HEAP)
                    from_ptrs, _ = block_of(protocol.data_of(launch, launch.device, dtype, HEAP), slot, block, S)
                    total += tl.load(from_ptrs, mask=inside).to(wide)
                    trace_exchange(launch, COPY_EVENT, began, task, peer.device, block, HEAP)
            tl.store(out_ptrs, total.to(dtype), mask=inside)
        task = protocol.next_task(launch)
    # After a failure no result may look valid.
    if protocol.end_launch(launch, HEAP):
        poison(out_ptr, S.num_local_experts * S.num_elements)
