"""The sums of gemm_reduce.py: a queue of tasks, each a block of tokens within a chunk of columns.

For each chunk, one task per block and rank sums the rows that the block's tokens have here, in order of k, and stores
the sums in that rank's heap, slot `[this rank, token]`; then one task per block adds what has arrived for the chunk
before it, in rank order. They round as the combine kernel does.
"""

import triton
import triton.language as tl

from .protocol import DONE, await_block_of_all, await_flag, await_peers, control_words, heap_rows, next_task, publish
from .token_sums import add_received, send_sums
from .wanted import wanted_by


@triton.jit
def send_block(
    y_ptr,
    ids_ptr,
    slot_row_ptr,
    group_ptr,
    table_ptr,
    control,
    me,
    rank,
    peer_rank,
    block,
    chunk,
    end_column,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    DATA: tl.constexpr,
    FLAGS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILE_T: tl.constexpr,
    SUM_H: tl.constexpr,
):
    """Sums the rows of a peer's block of tokens within a chunk of columns, stores the sums there and says so."""
    peer = tl.load(group_ptr + peer_rank)
    values_ptr = heap_rows(table_ptr, peer, y_ptr.dtype.element_ty, DATA)
    for t in range(0, BLOCK_T, TILE_T):
        local = block * BLOCK_T + t + tl.arange(0, TILE_T)
        tokens = peer_rank * T + local
        wanted = wanted_by(ids_ptr, tokens * K, local < T, rank * L, L, K)
        slots = rank * T + local
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
    publish(table_ptr, control, me, peer, chunk * tl.cdiv(T, BLOCK_T) + block, FLAGS, D, MAX_BLOCKS)


@triton.jit
def add_block(
    ids_ptr,
    group_ptr,
    table_ptr,
    out_ptr,
    control,
    me,
    rank,
    block,
    chunk,
    end_column,
    alive,
    task,
    W: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    WIDTH: tl.constexpr,
    DATA: tl.constexpr,
    FLAGS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILE_T: tl.constexpr,
    SUM_H: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Adds what all ranks have sent for a block of tokens within a chunk; returns whether the launch is still alive."""
    flag = chunk * tl.cdiv(T, BLOCK_T) + block
    alive = await_block_of_all(table_ptr, group_ptr, control, rank, flag, alive, task, LAUNCH, FLAGS, W, D, MAX_BLOCKS)
    values_ptr = heap_rows(table_ptr, me, out_ptr.dtype.element_ty, DATA)
    for t in range(0, BLOCK_T, TILE_T):
        tokens = block * BLOCK_T + t + tl.arange(0, TILE_T)
        add_received(
            values_ptr,
            ids_ptr,
            out_ptr,
            tokens,
            rank,
            chunk * WIDTH,
            end_column,
            T,
            W,
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
    group_ptr,
    table_ptr,
    out_ptr,
    task,
    alive,
    left,
    limit,
    W: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    WIDTH: tl.constexpr,
    DATA: tl.constexpr,
    FLAGS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILE_T: tl.constexpr,
    SUM_H: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Does up to `left` tasks with numbers below `limit`, first `task`, if that is none of -1.

    Returns:
      The task that this program has taken and not done, or -1; and whether the launch is still alive.
    """
    # Looked up again, rather than kept in registers beside the sums of a tile.
    rank = tl.load(group_ptr + W)
    me = tl.load(table_ptr + D + 2).to(tl.int32)
    control = control_words(table_ptr, me)
    num_sends: tl.constexpr = (T + BLOCK_T - 1) // BLOCK_T * W
    per_chunk: tl.constexpr = (T + BLOCK_T - 1) // BLOCK_T * (W + 1)
    computed = -1  # the last chunk of which all tiles are known to be stored
    if (left > 0) & (task < 0):
        task = next_task(control)
    while (left > 0) & (task < limit):
        index = task % per_chunk
        part = task // per_chunk
        if (index < num_sends) & (part < CHUNKS):
            if part > computed:
                if computed < 0:
                    alive = await_peers(table_ptr, group_ptr, control, rank, alive, task, LAUNCH, W, D)
                done = control + DONE + part
                alive = await_flag(table_ptr, done, tl.num_programs(0), control, rank, -1, alive, task, LAUNCH, D)
                computed = part
            if alive != 0:
                send_block(
                    y_ptr,
                    ids_ptr,
                    slot_row_ptr,
                    group_ptr,
                    table_ptr,
                    control,
                    me,
                    rank,
                    (rank + 1 + index % W) % W,
                    index // W,
                    part,
                    tl.minimum((part + 1) * WIDTH, H),
                    T,
                    K,
                    H,
                    L,
                    D,
                    WIDTH,
                    DATA,
                    FLAGS,
                    MAX_BLOCKS,
                    BLOCK_T,
                    TILE_T,
                    SUM_H,
                )
        elif (index >= num_sends) & (part > 0):
            alive = add_block(
                ids_ptr,
                group_ptr,
                table_ptr,
                out_ptr,
                control,
                me,
                rank,
                index - num_sends,
                part - 1,
                tl.minimum(part * WIDTH, H),
                alive,
                task,
                W,
                D,
                T,
                K,
                H,
                L,
                WIDTH,
                DATA,
                FLAGS,
                MAX_BLOCKS,
                BLOCK_T,
                TILE_T,
                SUM_H,
                LAUNCH,
            )
        left -= 1
        task = -1
        if left > 0:
            task = next_task(control)
    return task, alive
