"""A small exchange of 32-bit values: what every rank needs to know of the others before the tokens.

Tasks, in order: (0) announce; (1) push blocks of values to every rank, this one included; (2) copy what each rank has
sent to its place in the result.
"""

import triton
import triton.language as tl

from .failures import poison
from .protocol import announce, await_block, await_ready, data_of, end_launch, next_task, open_launch, peer_of, publish
from .trace import COPY_EVENT, PUSH_EVENT, stamp, trace_exchange


@triton.jit
def all_gather_i32(x_ptr, peers, out_ptr, S: tl.constexpr, HEAP: tl.constexpr):
    """`x [N]` to all ranks; `out [W, N]` by source rank."""
    launch, alive = open_launch(peers, HEAP)
    NUM_RANKS: tl.constexpr = HEAP.num_ranks
    NUM_VALUES: tl.constexpr = S.num_values
    num_blocks: tl.constexpr = (NUM_VALUES + S.block - 1) // S.block
    push_end: tl.constexpr = 1 + NUM_RANKS * num_blocks
    task = next_task(launch)
    while task < push_end + NUM_RANKS * num_blocks:
        if task == 0:
            announce(launch, HEAP)
        elif task < push_end:
            block = (task - 1) // NUM_RANKS
            peer = peer_of(launch, (launch.rank + 1 + (task - 1) % NUM_RANKS) % NUM_RANKS)
            if peer.rank != launch.rank:
                alive = await_ready(launch, peer, alive, task, HEAP)
            if alive != 0:
                began = stamp(HEAP)
                index = block * S.block + tl.arange(0, S.block)
                values = tl.load(x_ptr + index, mask=index < NUM_VALUES)
                target = data_of(launch, peer.device, x_ptr.dtype.element_ty, HEAP)
                tl.store(target + launch.rank.to(tl.int64) * NUM_VALUES + index, values, mask=index < NUM_VALUES)
                trace_exchange(launch, PUSH_EVENT, began, task, peer.device, block, HEAP)
                publish(launch, peer, block, task, HEAP)
        else:
            block = (task - push_end) // NUM_RANKS
            source = peer_of(launch, (launch.rank + NUM_RANKS - 1 - (task - push_end) % NUM_RANKS) % NUM_RANKS)
            alive = await_block(launch, source, block, alive, task, HEAP)
            began = stamp(HEAP)
            index = source.rank.to(tl.int64) * NUM_VALUES + block * S.block + tl.arange(0, S.block)
            inside = block * S.block + tl.arange(0, S.block) < NUM_VALUES
            received = data_of(launch, launch.device, x_ptr.dtype.element_ty, HEAP)
            tl.store(out_ptr + index, tl.load(received + index, mask=inside), mask=inside)
            trace_exchange(launch, COPY_EVENT, began, task, source.device, block, HEAP)
        task = next_task(launch)
    if end_launch(launch, HEAP):
        poison(out_ptr, NUM_RANKS * NUM_VALUES)
