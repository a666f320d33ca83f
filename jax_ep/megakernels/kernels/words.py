"""Small exchanges of 32-bit words: what every rank needs to know of the others before, or beside, the tokens.

Tasks, in order: (0) announce; (1) push blocks of words to every rank, this one included; (2) copy what each rank has
sent to its place in the result.
"""

import triton
import triton.language as tl

from .failures import poison
from .protocol import (
    announce,
    await_block,
    await_ready,
    end_launch,
    heap_rows,
    next_task,
    open_launch,
    publish,
)


@triton.jit
def exchange_words(
    x_ptr,
    group_ptr,
    table_ptr,
    after_ptr,
    out_ptr,
    W: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    DIFFERENT: tl.constexpr,
    DATA: tl.constexpr,
    FLAGS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """`x [N]` to all ranks, or `DIFFERENT` `x [W, N]` one row to each; `out [W, N]` by source rank."""
    rank, me, control, alive = open_launch(table_ptr, group_ptr, LAUNCH, W, D)
    num_blocks: tl.constexpr = (N + BLOCK - 1) // BLOCK
    push_end: tl.constexpr = 1 + W * num_blocks
    task = next_task(control)
    while task < push_end + W * num_blocks:
        if task == 0:
            announce(table_ptr, group_ptr, control, me, rank, LAUNCH, W, D)
        elif task < push_end:
            block = (task - 1) // W
            peer_rank = (rank + 1 + (task - 1) % W) % W
            peer = tl.load(group_ptr + peer_rank)
            if peer_rank != rank:
                alive = await_ready(table_ptr, control, rank, peer_rank, peer, alive, task, LAUNCH, D)
            if alive != 0:
                words = block * BLOCK + tl.arange(0, BLOCK)
                first = peer_rank.to(tl.int64) * N if DIFFERENT else 0
                values = tl.load(x_ptr + first + words, mask=words < N)
                target = heap_rows(table_ptr, peer, x_ptr.dtype.element_ty, DATA)
                tl.store(target + rank.to(tl.int64) * N + words, values, mask=words < N)
                publish(table_ptr, control, me, peer, block, FLAGS, D, MAX_BLOCKS)
        else:
            block = (task - push_end) // W
            source_rank = (rank + W - 1 - (task - push_end) % W) % W
            source = tl.load(group_ptr + source_rank)
            alive = await_block(
                table_ptr, control, rank, source_rank, source, block, alive, task, LAUNCH, FLAGS, D, MAX_BLOCKS
            )
            words = source_rank.to(tl.int64) * N + block * BLOCK + tl.arange(0, BLOCK)
            inside = block * BLOCK + tl.arange(0, BLOCK) < N
            received = heap_rows(table_ptr, me, x_ptr.dtype.element_ty, DATA)
            tl.store(out_ptr + words, tl.load(received + words, mask=inside), mask=inside)
        task = next_task(control)
    if end_launch(control, group_ptr, W):
        poison(out_ptr, W * N)
