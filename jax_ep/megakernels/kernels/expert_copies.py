"""Move whole experts between ranks: weights to the ranks that hold copies of them, or gradients of copies back home.

Roles. All programs take tasks from one queue, in order:

    task 0       signal the peers that this rank is ready
    then         store a block of an expert that leaves this rank in the heap of its target, and set the block's flag
    then         wait for a block of an expert that comes to this rank, and copy it to the result, or zero it

Every rank has the list of all moves, and skips those of others. Waits. A store waits for the peer's ready handshake, a
copy for the block's flag. It cannot deadlock: a rank stores in tasks with smaller numbers than those that copy.

Floor: the link carries each moved expert once; local memory traffic is two reads and two writes.
"""

import triton
import triton.language as tl

from . import protocol
from .failures import poison
from .trace import COPY_EVENT, PUSH_EVENT, ZERO_EVENT, stamp, trace, trace_exchange


@triton.jit
def block_of(base_ptr, expert, block, S: tl.constexpr):
    """Return pointers to a block of an expert, and a mask of the elements that it has."""
    start = expert.to(tl.int64) * S.num_elements + block * S.block
    lanes = tl.arange(0, S.block)
    return tl.multiple_of(base_ptr + start, 16) + lanes, block * S.block + lanes < S.num_elements


@triton.jit
def move_experts(x_ptr, moves_ptr, peers, out_ptr, S: tl.constexpr, HEAP: tl.constexpr):
    """Move experts `x [., num_elements]` to `out [num_targets, num_elements]` of other ranks.

    `moves [num_moves, 4]` are int32: source rank, expert there, target rank and place there. Rank -1 is none. A place
    whose source is -1 becomes zero; one without a move is not written.
    """
    launch, not_failed = protocol.open_launch(peers, HEAP)
    NUM_BLOCKS: tl.constexpr = S.num_blocks
    num_tasks: tl.constexpr = S.num_moves * NUM_BLOCKS
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    task = protocol.next_task(launch)
    while task < 1 + 2 * num_tasks:
        if task == 0:
            protocol.signal_ready(launch, HEAP)
        else:
            # Ranks start with different moves, so that they do not all store at one rank.
            index = (task - 1) % num_tasks
            block = index % NUM_BLOCKS
            move = (index // NUM_BLOCKS + launch.rank * (S.num_moves // HEAP.num_ranks)) % S.num_moves
            source = tl.load(moves_ptr + move * 4)
            expert = tl.load(moves_ptr + move * 4 + 1)
            target = tl.load(moves_ptr + move * 4 + 2)
            place = tl.load(moves_ptr + move * 4 + 3)
            if task <= num_tasks:
                if (source == launch.rank) & (target >= 0):
                    # Store a block at its target.
                    peer = protocol.peer_of(launch, target)
                    not_failed = protocol.await_ready(launch, peer, not_failed, task, HEAP)
                    if not_failed != 0:
                        began = stamp(HEAP)
                        from_ptrs, inside = block_of(x_ptr, expert, block, S)
                        values = tl.load(from_ptrs, mask=inside)
                        to_ptrs, _ = block_of(protocol.data_of(launch, peer.device, dtype, HEAP), place, block, S)
                        tl.store(to_ptrs, values, mask=inside)
                        trace_exchange(launch, PUSH_EVENT, began, task, peer.device, block, HEAP)
                        protocol.publish(launch, peer, place * NUM_BLOCKS + block, task, HEAP)
            elif target == launch.rank:
                to_ptrs, inside = block_of(out_ptr, place, block, S)
                if source >= 0:
                    # Copy a block that has come.
                    peer = protocol.peer_of(launch, source)
                    flag = place * NUM_BLOCKS + block
                    not_failed = protocol.await_block(launch, peer, flag, not_failed, task, HEAP)
                    began = stamp(HEAP)
                    received_ptr = protocol.data_of(launch, launch.device, dtype, HEAP)
                    from_ptrs, _ = block_of(received_ptr, place, block, S)
                    tl.store(to_ptrs, tl.load(from_ptrs, mask=inside), mask=inside)
                    trace_exchange(launch, COPY_EVENT, began, task, peer.device, block, HEAP)
                else:
                    began = stamp(HEAP)
                    tl.store(to_ptrs, tl.zeros((S.block,), dtype), mask=inside)
                    trace(launch, ZERO_EVENT, began, task, HEAP)
        task = protocol.next_task(launch)
    # After a failure no result may look valid.
    if protocol.end_launch(launch, HEAP):
        poison(out_ptr, S.num_targets * S.num_elements)
