"""The sums of gemm_reduce.py: a queue of tasks, each a block of tokens within a chunk of columns.

For each chunk, one task per block and rank sums the rows that the block's tokens have here, in order of k, and stores
the sums in that rank's heap, slot `[this rank, token]`; then one task per block adds what has arrived for the chunk
before it, in rank order. They round as the combine kernel does.
"""

import triton
import triton.language as tl

from .masks import send_mask
from .protocol import (
    await_block_of_all,
    await_flag,
    await_peers,
    control_words,
    data_of,
    next_task,
    peer_of,
    publish,
)
from .structs import Launch
from .table import DEVICE, DONE
from .token_sums import add_received, send_sums


@triton.jit
def send_block(
    y_ptr,
    ids_ptr,
    slot_row_ptr,
    launch,
    peer_rank,
    block,
    chunk,
    end_column,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILE_T: tl.constexpr,
    SUM_H: tl.constexpr,
    HEAP: tl.constexpr,
):
    """Sums the rows of a peer's block of tokens within a chunk of columns, stores the sums there and says so."""
    peer = peer_of(launch, peer_rank)
    values_ptr = data_of(launch, peer.device, y_ptr.dtype.element_ty, HEAP)
    for t in range(0, BLOCK_T, TILE_T):
        local = block * BLOCK_T + t + tl.arange(0, TILE_T)
        tokens = peer_rank * T + local
        wanted = send_mask(ids_ptr, tokens * K, local < T, launch.rank, K, L)
        slots = launch.rank * T + local
        send_sums(
            y_ptr,
            slot_row_ptr,
            tokens,
            wanted,
            slots,
            values_ptr,
            chunk * WIDTH,
            end_column,
            H,
            K,
            TILE_T,
            SUM_H,
        )
    publish(launch, peer, chunk * tl.cdiv(T, BLOCK_T) + block, HEAP)


@triton.jit
def add_block(
    ids_ptr,
    launch,
    out_ptr,
    block,
    chunk,
    end_column,
    alive,
    task,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILE_T: tl.constexpr,
    SUM_H: tl.constexpr,
    HEAP: tl.constexpr,
):
    """Adds what all ranks have sent for a block of tokens within a chunk; returns whether the launch is still alive."""
    flag = chunk * tl.cdiv(T, BLOCK_T) + block
    alive = await_block_of_all(launch, flag, alive, task, HEAP)
    values_ptr = data_of(launch, launch.device, out_ptr.dtype.element_ty, HEAP)
    for t in range(0, BLOCK_T, TILE_T):
        tokens = block * BLOCK_T + t + tl.arange(0, TILE_T)
        add_received(
            values_ptr,
            ids_ptr,
            out_ptr,
            tokens,
            launch.rank,
            chunk * WIDTH,
            end_column,
            T,
            HEAP.W,
            H,
            K,
            L,
            TILE_T,
            SUM_H,
        )
    return alive


@triton.jit
def move_sums(
    y_ptr,
    ids_ptr,
    slot_row_ptr,
    peers,
    out_ptr,
    task,
    alive,
    left,
    limit,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILE_T: tl.constexpr,
    SUM_H: tl.constexpr,
    HEAP: tl.constexpr,
):
    """Does up to `left` tasks with numbers below `limit`, first `task`, if that is none of -1.

    Returns:
      The task that this program has taken and not done, or -1; and whether the launch is still alive.
    """
    # Looked up again, rather than kept in registers beside the sums of a tile.
    W: tl.constexpr = HEAP.W
    rank = tl.load(peers.group_ptr + W)
    device = tl.load(peers.table_ptr + HEAP.D + DEVICE).to(tl.int32)
    control = control_words(peers.table_ptr, device)
    launch = Launch(peers.group_ptr, peers.table_ptr, control, rank, device)
    num_sends: tl.constexpr = (T + BLOCK_T - 1) // BLOCK_T * W
    per_chunk: tl.constexpr = (T + BLOCK_T - 1) // BLOCK_T * (W + 1)
    computed = -1  # the last chunk of which all tiles are known to be stored
    if (left > 0) & (task < 0):
        task = next_task(launch)
    while (left > 0) & (task < limit):
        index = task % per_chunk
        part = task // per_chunk
        if (index < num_sends) & (part < CHUNKS):
            if part > computed:
                if computed < 0:
                    alive = await_peers(launch, alive, task, HEAP)
                done = launch.control + DONE + part
                alive = await_flag(launch, done, tl.num_programs(0), -1, alive, task, HEAP)
                computed = part
            if alive != 0:
                send_block(
                    y_ptr,
                    ids_ptr,
                    slot_row_ptr,
                    launch,
                    (launch.rank + 1 + index % W) % W,
                    index // W,
                    part,
                    tl.minimum((part + 1) * WIDTH, H),
                    T,
                    K,
                    H,
                    L,
                    WIDTH,
                    BLOCK_T,
                    TILE_T,
                    SUM_H,
                    HEAP,
                )
        elif (index >= num_sends) & (part > 0):
            alive = add_block(
                ids_ptr,
                launch,
                out_ptr,
                index - num_sends,
                part - 1,
                tl.minimum(part * WIDTH, H),
                alive,
                task,
                T,
                K,
                H,
                L,
                WIDTH,
                BLOCK_T,
                TILE_T,
                SUM_H,
                HEAP,
            )
        left -= 1
        task = -1
        if left > 0:
            task = next_task(launch)
    return task, alive
