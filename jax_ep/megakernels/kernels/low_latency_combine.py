"""Low-latency combine: the rows of the experts go back to the ranks of their tokens, which sum them, in one launch.

Tasks, in order: (greet) tell a rank that this launch has begun, W tasks; (send) send what the experts here have for one
token of one rank, own tokens last; (sum) sum what has arrived for a token, LAG tokens later; (hear) hear from all
ranks, as regions.py asks of every launch.

What is sent depends on how many tokens there are. SUMS: the weighted sum of the token's rows here, rounded once; then
the weights must have come first, before the greeting. Otherwise each row is a task of its own, and has a flag of its
own: more words, but no word waits for another.
"""

import triton
import triton.language as tl

from .failures import poison
from .low_latency_rows import load_row, store_row
from .masks import destinations, goes_to
from .protocol import next_task, open_launch
from .regions import (
    await_flags,
    await_greeting_of_each,
    end_region_launch,
    greet,
    open_regions,
    part_of,
    pick,
    pick_each,
    publish_to,
)


@triton.jit
def send_weights(weights_ptr, region, N: tl.constexpr, WEIGHTS_AT: tl.constexpr, BLOCK: tl.constexpr):
    """Sends the N router weights of this rank."""
    target = part_of(region, WEIGHTS_AT, weights_ptr.dtype.element_ty)
    for start in range(0, N, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        tl.store(target + slots, tl.load(weights_ptr + slots, mask=slots < N), mask=slots < N)


@triton.jit
def send_sum(
    y_ptr,
    rows,
    weights,
    token,
    region,
    wire: tl.constexpr,
    SUM: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    VALUES_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FP8: tl.constexpr,
):
    """Sends the weighted sum of the rows that a token has here, `rows [BLOCK_K]`, in order of k."""
    for h in range(0, H, BLOCK_H):
        columns = h + tl.arange(0, BLOCK_H)
        total = tl.zeros((BLOCK_H,), SUM)
        for k in tl.static_range(K):
            row = pick(rows, k)
            source = tl.multiple_of(y_ptr + row.to(tl.int64) * H + columns, 16)
            values = tl.load(source, mask=(row >= 0) & (columns < H), other=0.0)
            # The weight of a slot without a row may be anything.
            total += values.to(SUM) * tl.where(row >= 0, pick(weights, k).to(SUM), 0.0)
        store_row(total, token, h, region, wire, H, VALUES_AT, SCALES_AT, BLOCK_H, FP8)


@triton.jit
def send_row(
    y_ptr,
    row,
    slot,
    region,
    wire: tl.constexpr,
    H: tl.constexpr,
    VALUES_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FP8: tl.constexpr,
):
    """Sends one row to a slot."""
    for h in range(0, H, BLOCK_H):
        columns = h + tl.arange(0, BLOCK_H)
        source = tl.multiple_of(y_ptr + row.to(tl.int64) * H + columns, 16)
        values = tl.load(source, mask=columns < H, other=0.0)
        store_row(values, slot, h, region, wire, H, VALUES_AT, SCALES_AT, BLOCK_H, FP8)


@triton.jit
def add_sums(
    out_ptr,
    token,
    ranks,
    incoming,
    wire: tl.constexpr,
    SUM: tl.constexpr,
    W: tl.constexpr,
    H: tl.constexpr,
    VALUES_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FP8: tl.constexpr,
):
    """Adds what each of `ranks` has sent for a token, in rank order."""
    for h in range(0, H, BLOCK_H):
        columns = h + tl.arange(0, BLOCK_H)
        total = tl.zeros((BLOCK_H,), SUM)
        for source_rank in tl.static_range(W):
            wanted = (ranks >> source_rank) & 1 > 0
            region = pick(incoming, source_rank)
            total += load_row(wanted, token, h, region, wire, SUM, H, VALUES_AT, SCALES_AT, BLOCK_H, FP8)
        target = tl.multiple_of(out_ptr + token.to(tl.int64) * H + columns, 16)
        tl.store(target, total.to(out_ptr.dtype.element_ty), mask=columns < H)


@triton.jit
def add_rows(
    out_ptr,
    token,
    experts,
    weights,
    incoming,
    wire: tl.constexpr,
    SUM: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    VALUES_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FP8: tl.constexpr,
):
    """Adds the rows that have arrived for a token, each times its weight, in order of k."""
    for h in range(0, H, BLOCK_H):
        columns = h + tl.arange(0, BLOCK_H)
        total = tl.zeros((BLOCK_H,), SUM)
        for k in tl.static_range(K):
            expert = pick(experts, k)
            wanted = (expert >= 0) & (expert < W * L)
            region = pick(incoming, tl.where(wanted, expert // L, 0))
            row = load_row(wanted, token * K + k, h, region, wire, SUM, H, VALUES_AT, SCALES_AT, BLOCK_H, FP8)
            # The weight of a slot without an expert may be anything.
            total += row * tl.where(wanted, pick(weights, k).to(SUM), 0.0)
        target = tl.multiple_of(out_ptr + token.to(tl.int64) * H + columns, 16)
        tl.store(target, total.to(out_ptr.dtype.element_ty), mask=columns < H)


@triton.jit
def low_latency_combine(
    y_ptr,
    slot_row_ptr,
    own_ids_ptr,
    weights_ptr,
    peers,
    out_ptr,
    T: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    WEIGHTS_AT: tl.constexpr,
    VALUES_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LAG: tl.constexpr,
    SUMS: tl.constexpr,
    FP8: tl.constexpr,
    HEAP: tl.constexpr,
):
    """`y [L, W * M, H]` and `weights [T, K]` to `out [T, H]`; the handle has `slot_row [W, M, K]`, `own_ids [M, K]`."""
    launch, alive = open_launch(peers, HEAP)
    W: tl.constexpr = HEAP.W
    regions = open_regions(launch, HEAP)
    SUM: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    wire: tl.constexpr = tl.float8e4nv if FP8 else y_ptr.dtype.element_ty
    lag: tl.constexpr = min(T, LAG)
    sends: tl.constexpr = W if SUMS else W * K  # of a token
    # Sends alone, then sends and sums by turns, then sums alone.
    lead: tl.constexpr = W + lag * sends
    mixed: tl.constexpr = (T - lag) * (sends + 1)
    hear: tl.constexpr = lead + mixed + lag
    lanes, choices = tl.arange(0, LANES), tl.arange(0, BLOCK_K)
    begun = tl.zeros((LANES,), tl.int32)
    heard = tl.full((), 0, tl.int64)
    task = next_task(launch)
    while task <= hear:
        sent, summed, step = -1, -1, task
        if (task >= W) & (task < lead):
            sent, step = (task - W) // sends, (task - W) % sends
        elif (task >= lead) & (task < lead + mixed):
            step = (task - lead) % (sends + 1)
            if step < sends:
                sent = lag + (task - lead) // (sends + 1)
            else:
                summed = (task - lead) // (sends + 1)
        elif (task >= lead + mixed) & (task < hear):
            summed = T - lag + (task - lead - mixed)
        peer_rank = (launch.rank + 1 + step) % W
        peer = tl.full((), 1, tl.int64) << peer_rank.to(tl.int64)
        region = pick(regions.outgoing, peer_rank)
        if task < W:
            if alive != 0:
                if SUMS:
                    send_weights(weights_ptr, region, T * K, WEIGHTS_AT, 1024)
                greet(launch, regions, peer, HEAP)
        elif task == hear:
            sources = tl.where(lanes < W, lanes, 0)
            alive = await_greeting_of_each(launch, regions.incoming, regions.epochs, sources, alive, task, HEAP)
        elif sent >= 0:
            slots = (peer_rank * M + sent) * K
            if SUMS:
                rows = tl.load(slot_row_ptr + slots + choices, mask=choices < K, other=-1)
                if tl.max(rows, axis=0) >= 0:
                    if heard & peer == 0:
                        # Lanes of other ranks look at the same flag.
                        places = tl.full((LANES,), 0, tl.int64) + pick(regions.incoming, peer_rank)
                        expected, senders = begun + pick(regions.epochs, peer_rank), begun + peer_rank
                        alive = await_greeting_of_each(launch, places, expected, senders, alive, task, HEAP)
                        heard = heard | peer
                    if alive != 0:
                        received_ptr = part_of(
                            pick(regions.incoming, peer_rank), WEIGHTS_AT, weights_ptr.dtype.element_ty
                        )
                        weights = tl.load(received_ptr + sent * K + choices, mask=choices < K, other=0.0)
                        send_sum(
                            y_ptr, rows, weights, sent, region, wire, SUM, K, H, VALUES_AT, SCALES_AT, BLOCK_H, FP8
                        )
                        publish_to(launch, regions, peer, 1 + sent, HEAP)
            else:
                choice = step // W
                row = tl.load(slot_row_ptr + slots + choice)
                if (row >= 0) & (alive != 0):
                    slot = sent * K + choice
                    send_row(y_ptr, row, slot, region, wire, H, VALUES_AT, SCALES_AT, BLOCK_H, FP8)
                    publish_to(launch, regions, peer, 1 + slot, HEAP)
        elif summed >= 0:
            slots = summed * K + choices
            experts = tl.load(own_ids_ptr + slots, mask=choices < K, other=-1)
            weights = tl.load(weights_ptr + slots, mask=choices < K, other=0.0)
            ranks = destinations(own_ids_ptr, summed * K, summed < T, K, L, W * L)
            if ranks != 0:
                if SUMS:
                    chosen = (lanes < W) & goes_to(ranks, lanes)
                    # Lanes of ranks that send nothing look at the flag of one that does.
                    sources = tl.where(chosen, lanes, tl.max(tl.where(chosen, lanes, 0), axis=0))
                    flags = begun + 1 + summed
                else:
                    chosen = (experts >= 0) & (experts < W * L)
                    # So do choices that are no expert: they look at the flag of the last one that is.
                    shown = tl.where(chosen, choices, tl.max(tl.where(chosen, choices, 0), axis=0))
                    sources = tl.load(own_ids_ptr + summed * K + shown) // L
                    flags = 1 + summed * K + shown
                places, expected = pick_each(regions.incoming, sources), pick_each(regions.epochs, sources)
                alive = await_flags(launch, places, flags, expected, sources, alive, task, HEAP)
            if SUMS:
                add_sums(out_ptr, summed, ranks, regions.incoming, wire, SUM, W, H, VALUES_AT, SCALES_AT, BLOCK_H, FP8)
            else:
                add_rows(
                    out_ptr,
                    summed,
                    experts,
                    weights,
                    regions.incoming,
                    wire,
                    SUM,
                    W,
                    K,
                    H,
                    L,
                    VALUES_AT,
                    SCALES_AT,
                    BLOCK_H,
                    FP8,
                )
        task = next_task(launch)
    if end_region_launch(launch, HEAP):
        poison(out_ptr, T * H)
