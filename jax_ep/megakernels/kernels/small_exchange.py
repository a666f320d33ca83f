"""All-gather of 32-bit values: what every rank needs to know about the others before tokens move.

Roles. All programs take tasks from one queue, in order:

    task 0       signal the peers that this rank is ready
    then         store blocks of values at every rank, this one included, and set their flags
    then         wait for a block of a rank and copy it to the result

Waits. A store waits for the peer's ready handshake, a copy for the block's flag. It cannot deadlock: a rank stores in
tasks with smaller numbers than those that copy. Floor: the latency of the handshake and of one store.
"""

import triton
import triton.language as tl

from . import protocol
from .failures import poison
from .trace import COPY_EVENT, PUSH_EVENT, stamp, trace_exchange


@triton.jit
def all_gather_i32(x_ptr, peers, out_ptr, S: tl.constexpr, HEAP: tl.constexpr):
    """Gather `x [num_values]` of all ranks to `out [num_ranks, num_values]`."""
    launch, not_failed = protocol.open_launch(peers, HEAP)
    NUM_RANKS: tl.constexpr = HEAP.num_ranks
    NUM_VALUES: tl.constexpr = S.num_values
    num_blocks: tl.constexpr = (NUM_VALUES + S.block - 1) // S.block
    push_end: tl.constexpr = 1 + NUM_RANKS * num_blocks
    task = protocol.next_task(launch)
    while task < push_end + NUM_RANKS * num_blocks:
        if task == 0:
            protocol.signal_ready(launch, HEAP)
        elif task < push_end:
            # Store a block at one rank, starting with the next one.
            block = (task - 1) // NUM_RANKS
            peer = protocol.peer_of(launch, (launch.rank + 1 + (task - 1) % NUM_RANKS) % NUM_RANKS)
            if peer.rank != launch.rank:
                not_failed = protocol.await_ready(launch, peer, not_failed, task, HEAP)
            if not_failed != 0:
                began = stamp(HEAP)
                index = block * S.block + tl.arange(0, S.block)
                values = tl.load(x_ptr + index, mask=index < NUM_VALUES)
                target = protocol.data_of(launch, peer.device, x_ptr.dtype.element_ty, HEAP)
                tl.store(target + launch.rank.to(tl.int64) * NUM_VALUES + index, values, mask=index < NUM_VALUES)
                trace_exchange(launch, PUSH_EVENT, began, task, peer.device, block, HEAP)
                protocol.publish(launch, peer, block, task, HEAP)
        else:
            # Copy a block of one rank to the result.
            block = (task - push_end) // NUM_RANKS
            source = protocol.peer_of(launch, (launch.rank + NUM_RANKS - 1 - (task - push_end) % NUM_RANKS) % NUM_RANKS)
            not_failed = protocol.await_block(launch, source, block, not_failed, task, HEAP)
            began = stamp(HEAP)
            index = source.rank.to(tl.int64) * NUM_VALUES + block * S.block + tl.arange(0, S.block)
            inside = block * S.block + tl.arange(0, S.block) < NUM_VALUES
            received = protocol.data_of(launch, launch.device, x_ptr.dtype.element_ty, HEAP)
            tl.store(out_ptr + index, tl.load(received + index, mask=inside), mask=inside)
            trace_exchange(launch, COPY_EVENT, began, task, source.device, block, HEAP)
        task = protocol.next_task(launch)
    # After a failure no result may look valid.
    if protocol.end_launch(launch, HEAP):
        poison(out_ptr, NUM_RANKS * NUM_VALUES)
