"""Low-latency dispatch: tokens to packed rows per expert in one launch, of which each word crosses the link once.

Tasks, in order: (ids) send the ids of all tokens to a rank, W tasks; (place) give the tokens of a local expert their
rows, and write what the handle says of them, L tasks; (send) quantise a token and send it to each rank that has one of
its experts; (copy) bring tokens that have arrived to their rows, in the order in which they are sent and LAG blocks
later; (clear) the rest of the handle. Each rank waits for the ids of all, as regions.py asks of every launch.

Where tokens are few (DIRECT), a copy computes the rows itself, as the number of tokens before it that name the same
expert, and the place tasks come last. Else it waits once for all place tasks of this launch.
"""

import triton
import triton.language as tl

from .failures import poison
from .low_latency_places import clear_slots, count_rows, place_expert
from .low_latency_rows import copy_tokens
from .masks import destinations, goes_to
from .protocol import await_flag, next_task, open_launch
from .quantization import quantize
from .regions import (
    await_flags,
    await_greeting_of_each,
    end_region_launch,
    greet,
    open_regions,
    part_of,
    pick,
    publish_to,
)
from .table import DONE


@triton.jit
def send_ids(
    ids_ptr,
    count,
    region,
    own_ids_ptr,
    invalid_ptr,
    own,
    alive,
    T: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    IDS_AT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sends the ids of the first `count` tokens, -1 for the others; this rank keeps them, and counts invalid ones."""
    invalid = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, M * K, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + slots, mask=slots // K < count, other=-1)
        if alive != 0:
            tl.store(part_of(region, IDS_AT, tl.int32) + slots, ids, mask=slots < T * K)
        if own:
            tl.store(own_ids_ptr + slots, ids, mask=slots < M * K)
        invalid += ((ids < -1) | (ids >= E)).to(tl.int32)
    if own:
        tl.store(invalid_ptr, tl.sum(invalid, axis=0))


@triton.jit
def send_token(
    x_ptr,
    x_scales_ptr,
    ids_ptr,
    token,
    count,
    alive,
    outgoing,
    rank,
    wire: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    VALUES_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    SEND_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Sends a token to each rank that has one of its experts; with GROUP, quantised for groups of so many columns.

    Returns:
      The set of these ranks.
    """
    row, row_scales = token.to(tl.int64) * H, token.to(tl.int64) * G
    lanes = tl.arange(0, SEND_H)
    # Under way while the ids are looked at.
    values = tl.load(tl.multiple_of(x_ptr + row + lanes, 16), mask=(lanes < H) & (token < count), other=0.0)
    ranks = destinations(ids_ptr, token * K, token < count, K, L, W * L) * alive
    if ranks != 0:
        for h in tl.static_range(0, H, SEND_H):
            columns = h + lanes
            if h > 0:
                values = tl.load(tl.multiple_of(x_ptr + row + columns, 16), mask=columns < H, other=0.0)
            if GROUP > 0:
                groups = h // GROUP + tl.arange(0, SEND_H // GROUP)
                sent, scales = quantize(tl.reshape(values, (1, SEND_H)), 1, SEND_H, GROUP)
                sent, scales = tl.reshape(sent, (SEND_H,)), tl.reshape(scales, (SEND_H // GROUP,))
            else:
                sent = values
            for step in range(W):
                peer_rank = (rank + 1 + step) % W
                if goes_to(ranks, peer_rank):
                    region = pick(outgoing, peer_rank)
                    target = part_of(region, VALUES_AT, wire) + row + columns
                    tl.store(tl.multiple_of(target, 16), sent, mask=columns < H)
                    if GROUP > 0:
                        target = part_of(region, SCALES_AT, tl.float32) + row_scales + groups
                        tl.store(target, scales, mask=groups < G)
        if G > 0 and GROUP == 0:
            groups = tl.arange(0, BLOCK_G)
            scales = tl.load(x_scales_ptr + row_scales + groups, mask=groups < G)
            for step in range(W):
                peer_rank = (rank + 1 + step) % W
                if goes_to(ranks, peer_rank):
                    target = part_of(pick(outgoing, peer_rank), SCALES_AT, tl.float32) + row_scales + groups
                    tl.store(target, scales, mask=groups < G)
    return ranks


@triton.jit
def turn_of(index, W: tl.constexpr, T: tl.constexpr, BLOCK_C: tl.constexpr, LAG: tl.constexpr):
    """What task `index` of sends and copies does: a token to send, or a block and whose it is to copy; -1 is none."""
    lead: tl.constexpr = min(T, LAG * BLOCK_C)
    turns: tl.constexpr = max((T + BLOCK_C - 1) // BLOCK_C - LAG, 0)
    turn: tl.constexpr = BLOCK_C + W
    token, block, step = -1, -1, 0
    if index < lead:  # sends alone
        token = index
    elif index < lead + turns * turn:  # sends and copies by turns
        step = (index - lead) % turn
        if step < BLOCK_C:
            token = lead + (index - lead) // turn * BLOCK_C + step
        else:
            block, step = (index - lead) // turn, step - BLOCK_C
    else:  # copies alone
        step = (index - lead - turns * turn) % W
        block = turns + (index - lead - turns * turn) // W
    return token, block, step


@triton.jit
def low_latency_dispatch(
    x_ptr,
    x_scales_ptr,
    ids_ptr,
    num_tokens_ptr,
    peers,
    out_ptr,
    out_scales_ptr,
    sizes_ptr,
    token_ptr,
    start_ptr,
    count_ptr,
    slot_row_ptr,
    own_ids_ptr,
    invalid_ptr,
    T: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    IDS_AT: tl.constexpr,
    VALUES_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    LANES: tl.constexpr,
    SEND_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    LAG: tl.constexpr,
    DIRECT: tl.constexpr,
    COUNTED: tl.constexpr,
    HEAP: tl.constexpr,
):
    """`x [T, H]` and `ids [T, K]` to `out [L, W * M, H]`; rows past the counts are not written.

    `G` scales per token travel beside FP8 tokens: those of `x_scales [T, G]`, or, with GROUP > 0, made here for groups
    of that many columns. With COUNTED only the first `num_tokens []` tokens count.
    """
    launch, alive = open_launch(peers, HEAP)
    W: tl.constexpr = HEAP.W
    regions = open_regions(launch, HEAP)
    count = tl.minimum(tl.load(num_tokens_ptr), T) if COUNTED else T
    blocks: tl.constexpr = (T + BLOCK_C - 1) // BLOCK_C
    turns: tl.constexpr = max(blocks - LAG, 0)
    exchange: tl.constexpr = min(T, LAG * BLOCK_C) + turns * BLOCK_C + blocks * W
    exchange_at: tl.constexpr = W if DIRECT else W + L
    place_at: tl.constexpr = W + exchange if DIRECT else W
    clear_at: tl.constexpr = W + exchange + L
    lanes = tl.arange(0, LANES)
    sources = tl.where(lanes < W, lanes, 0)
    heard, placed = 0, 0
    task = next_task(launch)
    while task < clear_at + (W * (M - T) * K + 1023) // 1024:
        token, block, step = -1, -1, 0
        if (task >= exchange_at) & (task < exchange_at + exchange):
            token, block, step = turn_of(task - exchange_at, W, T, BLOCK_C, LAG)
        if task < W:
            peer_rank = (launch.rank + 1 + task) % W
            region, own = pick(regions.outgoing, peer_rank), peer_rank == launch.rank
            send_ids(ids_ptr, count, region, own_ids_ptr, invalid_ptr, own, alive, T, M, K, W * L, IDS_AT, 1024)
            greet(launch, regions, tl.full((), 1, tl.int64) * alive << peer_rank.to(tl.int64), HEAP)
        elif task >= clear_at:
            clear_slots((task - clear_at) * 1024, slot_row_ptr, T, M, K, W, 1024)
        elif token >= 0:
            ranks = send_token(
                x_ptr,
                x_scales_ptr,
                ids_ptr,
                token,
                count,
                alive,
                regions.outgoing,
                launch.rank,
                out_ptr.dtype.element_ty,
                W,
                K,
                H,
                L,
                G,
                GROUP,
                VALUES_AT,
                SCALES_AT,
                SEND_H,
                BLOCK_G,
            )
            if ranks != 0:
                publish_to(launch, regions, ranks, 1 + token, HEAP)
        else:
            if heard == 0:
                alive = await_greeting_of_each(launch, regions.incoming, regions.epochs, sources, alive, task, HEAP)
                heard = 1
            if block < 0:
                place_expert(
                    task - place_at,
                    regions.incoming,
                    launch,
                    sizes_ptr,
                    token_ptr,
                    start_ptr,
                    count_ptr,
                    slot_row_ptr,
                    W,
                    T,
                    M,
                    K,
                    L,
                    BLOCK_K,
                    LANES,
                    CHUNK,
                    IDS_AT,
                    not DIRECT,
                )
            else:
                # In the order in which peers send: this rank is the last of the peer after it, and so on.
                source_rank = (launch.rank + W - 1 - step) % W
                region = pick(regions.incoming, source_rank)
                tokens = block * BLOCK_C + tl.arange(0, BLOCK_C)
                if DIRECT:
                    rows = count_rows(
                        source_rank * T + block, regions.incoming, launch.rank, W, T, M, K, L, BLOCK_K, CHUNK, IDS_AT
                    )
                else:
                    if placed == 0:
                        done = launch.control + DONE
                        # Also after a failure: own tasks always end, and without what they store rows would be random.
                        ended = await_flag(launch, done, L, launch.rank, alive | 1, task, HEAP)
                        alive = alive & ended
                        placed = 1
                    k = tl.arange(0, BLOCK_K)[None, :]
                    slots = ((source_rank * M + tokens) * K)[:, None] + k
                    rows = tl.load(slot_row_ptr + slots, mask=(tokens < T)[:, None] & (k < K), other=-1)
                    rows = tl.where(rows < L * W * M, rows, -1)
                wanted = tl.max(rows, axis=1) >= 0
                some = tl.max(tl.where(wanted, tokens, -1), axis=0)
                if some >= 0:
                    shown = tl.where(wanted, tokens, some)
                    incoming = tl.full((BLOCK_C,), 0, tl.int64) + region
                    senders = tl.zeros((BLOCK_C,), tl.int32) + source_rank
                    expected = tl.zeros((BLOCK_C,), tl.int32) + pick(regions.epochs, source_rank)
                    alive = await_flags(launch, incoming, 1 + shown, expected, senders, alive, task, HEAP)
                    if alive != 0:
                        copy_tokens(
                            rows,
                            shown,
                            wanted,
                            region,
                            out_ptr,
                            out_scales_ptr,
                            H,
                            K,
                            G,
                            VALUES_AT,
                            SCALES_AT,
                            BLOCK_K,
                            BLOCK_H,
                            BLOCK_G,
                        )
        task = next_task(launch)
    if end_region_launch(launch, HEAP):
        poison(out_ptr, L * W * M * H)
        if G > 0:
            poison(out_scales_ptr, L * W * M * G)
        poison(token_ptr, L * W * M)
        poison(slot_row_ptr, W * M * K)
        poison(own_ids_ptr, M * K)
        poison(invalid_ptr, 1)
        # Numbers that can be used, and a poisoned row for each expert.
        for expert in range(L):
            tl.store(sizes_ptr + expert, 1)
            tl.store(start_ptr + expert * W + lanes, tl.zeros((LANES,), tl.int32), mask=lanes < W)
            tl.store(count_ptr + expert * W + lanes, tl.zeros((LANES,), tl.int32), mask=lanes < W)
