"""Dispatch and grouped GEMM in one launch: the first experts are multiplied while the other tokens travel.

Two queues. The first is communication: announce, then push each block of the send order to every peer, then, where the
caller keeps the tokens, copy what has arrived. The first COMM programs to start empty it and then help with the second:
the tiles of the product, in expert order, and the rows that are zero. Tokens are read where they are, in the heap or in
the caller's own array; a tile waits for the prefix of each peer's sends that its expert needs, once per program.

A program leaves the first queue only when all its tasks are taken by programs that run; and pushes wait only for the
peers' announcements, at least once for each peer. So one resident program suffices.
"""

import triton
import triton.language as tl

from .dispatch import copy_tokens
from .failures import poison
from .gemm_tile import store_tile, zero_rows
from .masks import send_mask
from .product import GROUP_M, count_row_tiles, find_group, multiply, row_tiles
from .protocol import (
    announce,
    await_blocks,
    await_ready,
    data_of,
    end_launch,
    next_task,
    open_launch,
    peer_of,
    publish,
)
from .table import QUEUE, STARTED
from .tiles import tile_in_grid


@triton.jit
def product_tile(
    x_ptr,
    received_ptr,
    row_slot_ptr,
    b_desc,
    out_ptr,
    rank,
    group,
    column,
    first_row,
    num_rows,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Multiplies up to BM rows, gathered from this rank's tokens and from the heap, and stores the product."""
    lines = tl.arange(0, BM)
    inside = lines < num_rows
    slot = tl.load(row_slot_ptr + first_row + lines, mask=inside, other=-1)
    # Rows without a slot are padding: any token may stand for them, since the product is not used.
    token = tl.where(slot < 0, 0, slot // K)
    columns = tl.arange(0, BK)[None, :]
    own = ((slot < 0) | (token // T == rank))[:, None]
    own_ptrs = x_ptr + (token % T).to(tl.int64)[:, None] * H + columns
    received_ptrs = received_ptr + token.to(tl.int64)[:, None] * H + columns
    a_ptrs = tl.multiple_of(tl.where(own, own_ptrs, received_ptrs), (16, 16))
    total = multiply(a_ptrs, b_desc, group, column * BN, H, BM, BN, BK, TRANSPOSED)
    total = tl.where((slot >= 0)[:, None], total, 0.0)
    store_tile(out_ptr, total, first_row, first_row + num_rows, column * BN, N, BM, BN, 0)


@triton.jit
def dispatch_gemm(
    x_ptr,
    b_desc,
    ids_ptr,
    row_slot_ptr,
    sizes_ptr,
    order_ptr,
    num_sends_ptr,
    num_needed_ptr,
    peers,
    out_ptr,
    kept_ptr,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    COMM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    KEEP: tl.constexpr,
    HEAP: tl.constexpr,
):
    """`x [T, H]` and matrices `[L, H, N]` (`[L, N, H]` if TRANSPOSED) to `out [R, N]`.

    `ids [W, T, K]`, `row_slot [R]` and `sizes [L]` are those of the handle, `order [W, T]`, `num_sends [W]` and
    `num_needed [W, L]` those of the schedule. With KEEP, tokens with an expert here are copied to `kept [W * T, H]`.
    """
    launch, alive = open_launch(peers, HEAP)
    W: tl.constexpr = HEAP.W
    num_blocks: tl.constexpr = (T + BLOCK_T - 1) // BLOCK_T
    num_peers: tl.constexpr = W - 1 if W > 1 else 1
    push_end: tl.constexpr = 1 + num_blocks * (W - 1)
    received_ptr = data_of(launch, launch.device, x_ptr.dtype.element_ty, HEAP)
    if tl.atomic_add(launch.control + STARTED, 1, sem="relaxed", scope="gpu") < COMM:
        task = next_task(launch)
        while task < push_end + (num_blocks * W if KEEP else 0):
            if task == 0:
                announce(launch, HEAP)
            elif task < push_end:
                block = (task - 1) // num_peers
                peer_rank = (launch.rank + 1 + (task - 1) % num_peers) % W
                num_sends = tl.load(num_sends_ptr + peer_rank)
                peer = peer_of(launch, peer_rank)
                # Once even where nothing goes: no rank may run two launches ahead of another.
                if (block == 0) | (block * BLOCK_T < num_sends):
                    alive = await_ready(launch, peer, alive, task, HEAP)
                    if (alive != 0) & (block * BLOCK_T < num_sends):
                        index = block * BLOCK_T + tl.arange(0, BLOCK_T)
                        mask = index < num_sends
                        tokens = tl.load(order_ptr + peer_rank * T + index, mask=mask, other=0)
                        values_ptr = data_of(launch, peer.device, x_ptr.dtype.element_ty, HEAP)
                        copy_tokens(x_ptr, tokens, launch.rank * T + tokens, mask, values_ptr, H, BLOCK_H)
                        publish(launch, peer, block, HEAP)
            else:
                # Own tokens first: they are here.
                source = peer_of(launch, (launch.rank + (task - push_end) // num_blocks) % W)
                local = (task - push_end) % num_blocks * BLOCK_T + tl.arange(0, BLOCK_T)
                slots = source.rank * T + local
                mask = send_mask(ids_ptr, slots * K, local < T, launch.rank, K, L)
                if source.rank == launch.rank:
                    copy_tokens(x_ptr, local, slots, mask, kept_ptr, H, BLOCK_H)
                else:
                    needed = tl.load(num_needed_ptr + source.rank * L + L - 1)
                    end = (needed + BLOCK_T - 1) // BLOCK_T
                    alive = await_blocks(launch, source, 0, end, alive, task, HEAP)
                    copy_tokens(received_ptr, slots, slots, mask, kept_ptr, H, BLOCK_H)
            task = next_task(launch)
    column_tiles: tl.constexpr = (N + BN - 1) // BN
    num_tiles = count_row_tiles(sizes_ptr, L, BLOCK_L, BM) * column_tiles
    lanes = tl.arange(0, BLOCK_L)
    num_rows = tl.sum(tl.load(sizes_ptr + lanes, mask=lanes < L, other=0), axis=0)
    num_clears = (R - num_rows + BM - 1) // BM
    expert, first_tile, first_row, ready = 0, 0, 0, -1
    tile = tl.atomic_add(launch.control + QUEUE, 1, sem="relaxed", scope="gpu")
    while tile < num_tiles + num_clears:
        if tile < num_tiles:
            expert, first_tile, first_row, size = find_group(
                tile, expert, first_tile, first_row, sizes_ptr, column_tiles, BM
            )
            if expert > ready:
                for step in range(1, W):
                    source = peer_of(launch, (launch.rank + W - step) % W)
                    needed_ptr = num_needed_ptr + source.rank * L
                    begin = tl.load(needed_ptr + ready, mask=ready >= 0, other=0) // BLOCK_T
                    end = (tl.load(needed_ptr + expert) + BLOCK_T - 1) // BLOCK_T
                    alive = await_blocks(launch, source, begin, end, alive, tile, HEAP)
                ready = expert
            row_tile, column = tile_in_grid(tile - first_tile, row_tiles(size, BM), column_tiles, GROUP_M)
            rows_left = size - row_tile * BM
            if rows_left > BM // 2:
                product_tile(
                    x_ptr,
                    received_ptr,
                    row_slot_ptr,
                    b_desc,
                    out_ptr,
                    launch.rank,
                    expert,
                    column,
                    first_row + row_tile * BM,
                    rows_left,
                    T,
                    K,
                    H,
                    N,
                    BM,
                    BN,
                    BK,
                    TRANSPOSED,
                )
            else:
                product_tile(
                    x_ptr,
                    received_ptr,
                    row_slot_ptr,
                    b_desc,
                    out_ptr,
                    launch.rank,
                    expert,
                    column,
                    first_row + row_tile * BM,
                    rows_left,
                    T,
                    K,
                    H,
                    N,
                    BM // 2,
                    BN,
                    BK,
                    TRANSPOSED,
                )
        else:
            zero_rows(out_ptr, num_rows + (tile - num_tiles) * BM, R, N, BM, BN)
        tile = tl.atomic_add(launch.control + QUEUE, 1, sem="relaxed", scope="gpu")
    if end_launch(launch, HEAP):
        poison(out_ptr, R * N)
        if KEEP:
            poison(kept_ptr, W * T * H)
