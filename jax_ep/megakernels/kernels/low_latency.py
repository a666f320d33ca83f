"""Low-latency dispatch and combine, one launch each, of which each word crosses the link once.

Dispatch brings tokens to packed rows per expert: the rows of an expert are in the order of source rank, then token, and
a token that names an expert twice has one row there. Its tasks, in order: (ids) send the ids of all tokens to a rank, W
tasks; (assign) give the tokens of a local expert their rows, and write what the handle says of them, L tasks; (send)
quantise a token and send it to each rank that has one of its experts; (copy) bring tokens that have arrived to their
rows, in the order in which they are sent and LAG blocks later; (clear) the rest of the handle. Each rank waits for the
ids of all, as low_latency_buffers.py asks of every launch. Where tokens are few (DIRECT), a copy computes the rows
itself, and the assign tasks come last. Else it waits once for all assign tasks of this launch.

Combine brings the rows of the experts back to the ranks of their tokens, which sum them. Its tasks, in order: (greet)
tell a rank that this launch has begun, W tasks; (send) send what the experts here have for one token of one rank, own
tokens last; (sum) sum what has arrived for a token, LAG tokens later; (hear) hear from all ranks, as dispatch does.
What is sent depends on how many tokens there are. SUMS: the weighted sum of the token's rows here, rounded once; then
the weights must have come first, before the greeting. Otherwise each row is a task of its own, and has a flag of its
own: more words, but no word waits for another.
"""

import triton
import triton.language as tl

from .failures import poison
from .low_latency_buffers import (
    await_flags,
    await_greeting_of_each,
    end_low_latency_launch,
    greet,
    open_buffers,
    part_of,
    pick,
    pick_each,
    publish_to,
)
from .masks import destinations, goes_to
from .protocol import await_flag, next_task, open_launch
from .quantization import GROUP, dequantize, quantize
from .table import DONE
from .trace import (
    COPY_EVENT,
    COUNT_EVENT,
    OWN,
    PUSH_EVENT,
    SUM_EVENT,
    WAIT_EVENT,
    ZERO_EVENT,
    stamp,
    trace,
    trace_exchange,
)

# Slots at a time, where a task goes through many.
SLOTS = tl.constexpr(1024)


@triton.jit
def send_ids(ids_ptr, count, buffer, plan, own, alive, S: tl.constexpr):
    """Sends the ids of the first `count` tokens, -1 for the others; this rank keeps them, and counts invalid ones."""
    invalid = tl.zeros((SLOTS,), tl.int32)
    for start in range(0, S.M * S.K, SLOTS):
        slots = start + tl.arange(0, SLOTS)
        ids = tl.load(ids_ptr + slots, mask=slots // S.K < count, other=-1)
        if alive != 0:
            tl.store(part_of(buffer, S.IDS, tl.int32) + slots, ids, mask=slots < S.T * S.K)
        if own:
            tl.store(plan.own_ids_ptr + slots, ids, mask=slots < S.M * S.K)
        invalid += ((ids < -1) | (ids >= S.W * S.L)).to(tl.int32)
    if own:
        tl.store(plan.num_invalid_ptr, tl.sum(invalid, axis=0))


@triton.jit
def send_token(x, ids_ptr, token, count, alive, outgoing, rank, wire: tl.constexpr, S: tl.constexpr):
    """Sends a token to each rank that has one of its experts; with GROUP, quantised for groups of so many columns.

    Returns:
      The set of these ranks.
    """
    H: tl.constexpr = S.H
    G: tl.constexpr = S.G
    SIZE: tl.constexpr = S.GROUP
    SEND_H: tl.constexpr = S.tile.SEND_H
    row, row_scales = token.to(tl.int64) * H, token.to(tl.int64) * G
    lanes = tl.arange(0, SEND_H)
    # Under way while the ids are looked at.
    values = tl.load(tl.multiple_of(x.values_ptr + row + lanes, 16), mask=(lanes < H) & (token < count), other=0.0)
    ranks = destinations(ids_ptr, token * S.K, token < count, S.K, S.L, S.W * S.L) * alive
    if ranks != 0:
        for h in tl.static_range(0, H, SEND_H):
            columns = h + lanes
            if h > 0:
                values = tl.load(tl.multiple_of(x.values_ptr + row + columns, 16), mask=columns < H, other=0.0)
            if SIZE > 0:
                groups = h // SIZE + tl.arange(0, SEND_H // SIZE)
                sent, scales = quantize(tl.reshape(values, (1, SEND_H)), 1, SEND_H, SIZE)
                sent, scales = tl.reshape(sent, (SEND_H,)), tl.reshape(scales, (SEND_H // SIZE,))
            else:
                sent = values
            for step in range(S.W):
                peer_rank = (rank + 1 + step) % S.W
                if goes_to(ranks, peer_rank):
                    buffer = pick(outgoing, peer_rank)
                    target = part_of(buffer, S.VALUES, wire) + row + columns
                    tl.store(tl.multiple_of(target, 16), sent, mask=columns < H)
                    if SIZE > 0:
                        target = part_of(buffer, S.SCALES, tl.float32) + row_scales + groups
                        tl.store(target, scales, mask=groups < G)
        if G > 0 and SIZE == 0:
            groups = tl.arange(0, S.tile.BLOCK_G)
            scales = tl.load(x.scales_ptr + row_scales + groups, mask=groups < G)
            for step in range(S.W):
                peer_rank = (rank + 1 + step) % S.W
                if goes_to(ranks, peer_rank):
                    target = part_of(pick(outgoing, peer_rank), S.SCALES, tl.float32) + row_scales + groups
                    tl.store(target, scales, mask=groups < G)
    return ranks


@triton.jit
def ids_of(index, incoming, S: tl.constexpr):
    """`[N, CHOICES]` ids of tokens `index [N]`, source rank * T + token, -1 past the last one; and which exist."""
    buffers = pick_each(incoming, tl.minimum(index // S.T, S.W - 1))
    k = tl.arange(0, S.tile.CHOICES)[None, :]
    exist = (index < S.W * S.T)[:, None] & (k < S.K)
    ids_ptr = part_of(buffers, S.IDS, tl.int32)[:, None] + (index % S.T * S.K)[:, None] + k
    return tl.load(ids_ptr, mask=exist, other=-1), exist


@triton.jit
def assign_rows(expert, incoming, launch, plan, S: tl.constexpr):
    """Gives the tokens that name a local expert its rows, in order; also marks a share of the slots without a row.

    Unless DIRECT, this rank is told that it is done.
    """
    T: tl.constexpr = S.T
    L: tl.constexpr = S.L
    W: tl.constexpr = S.W
    CHUNK: tl.constexpr = S.tile.CHUNK
    RANKS: tl.constexpr = S.tile.RANKS
    first = launch.rank * L
    first_row = expert.to(tl.int64) * (W * S.M)
    lanes = tl.arange(0, RANKS)
    counts = tl.zeros((RANKS,), tl.int32)  # by source rank
    size = 0
    for start in range(0, W * T, CHUNK):
        index = start + tl.arange(0, CHUNK)
        source, token = index // T, index % T
        ids, exist = ids_of(index, incoming, S)
        named = exist & (ids == first + expert)
        is_here = tl.max(named.to(tl.int32), axis=1)
        position = size + tl.cumsum(is_here, axis=0) - is_here
        row = first_row + position
        tl.store(plan.token_ptr + row, token, mask=is_here > 0)
        slots = ((source * S.M + token) * S.K)[:, None] + tl.arange(0, S.tile.CHOICES)[None, :]
        nowhere = exist & ((ids < first) | (ids >= first + L)) & (index % L == expert)[:, None]
        tl.store(plan.slot_row_ptr + slots, tl.where(named, row.to(tl.int32)[:, None], -1), mask=named | nowhere)
        size += tl.sum(is_here, axis=0)
        counts += tl.sum(tl.where(source[:, None] == lanes[None, :], is_here[:, None], 0), axis=0)
    tl.store(plan.sizes_ptr + expert, size)
    if not S.tile.DIRECT:
        # All threads' stores come before the count.
        tl.debug_barrier()
        tl.atomic_add(launch.control + DONE, 1, sem="release", scope="gpu")
    tl.store(plan.count_ptr + expert * W + lanes, counts, mask=lanes < W)
    tl.store(plan.start_ptr + expert * W + lanes, tl.cumsum(counts, axis=0) - counts, mask=lanes < W)
    for start in range(0, W * S.M, CHUNK):
        rows = start + tl.arange(0, CHUNK)
        past = (rows >= size) & (rows < W * S.M)
        tl.store(plan.token_ptr + first_row + rows, tl.full((CHUNK,), -1, tl.int32), mask=past)


@triton.jit
def count_rows(index, incoming, rank, S: tl.constexpr):
    """`[1, CHOICES]` rows of one token, -1 where it has none: how many tokens before it name the same expert."""
    own, _ = ids_of(index + tl.arange(0, 1), incoming, S)
    others = tl.arange(0, S.tile.CHUNK)
    ids, _ = ids_of(others, incoming, S)
    same = ids[:, :, None] == tl.reshape(own, (1, 1, S.tile.CHOICES))
    named = tl.max(same.to(tl.int32), axis=1)
    before = tl.sum(tl.where((others < index)[:, None], named, 0), axis=0)[None, :]
    local = own - rank * S.L
    return tl.where((own >= rank * S.L) & (own < rank * S.L + S.L), local * (S.W * S.M) + before, -1)


@triton.jit
def clear_slots(first, slot_row_ptr, S: tl.constexpr):
    """Marks slots of tokens that no rank has, T and up, as without a row."""
    if S.M > S.T:
        index = first + tl.arange(0, SLOTS)
        width: tl.constexpr = (S.M - S.T) * S.K
        slots = index // width * (S.M * S.K) + S.T * S.K + index % width
        tl.store(slot_row_ptr + slots, tl.full((SLOTS,), -1, tl.int32), mask=index < S.W * width)


@triton.jit
def copy_tokens(rows, tokens, mask, buffer, out, S: tl.constexpr):
    """Copies tokens `[BLOCK_T]` that lie in a buffer to `rows [BLOCK_T, CHOICES]`."""
    H: tl.constexpr = S.H
    K: tl.constexpr = S.K
    G: tl.constexpr = S.G
    choice = tl.arange(0, S.tile.CHOICES)[None, :]
    values_ptr = part_of(buffer, S.VALUES, out.values_ptr.dtype.element_ty)
    for h in range(0, H, S.tile.BLOCK_H):
        columns = h + tl.arange(0, S.tile.BLOCK_H)[None, :]
        inside = columns < H
        source = tl.multiple_of(values_ptr + tokens.to(tl.int64)[:, None] * H + columns, (16, 16))
        values = tl.load(source, mask=mask[:, None] & inside)
        for k in tl.static_range(K):
            row = tl.max(tl.where(choice == k, rows, -1), axis=1)
            target = tl.multiple_of(out.values_ptr + row.to(tl.int64)[:, None] * H + columns, (16, 16))
            tl.store(target, values, mask=(row >= 0)[:, None] & inside)
    if G > 0:
        groups = tl.arange(0, S.tile.BLOCK_G)[None, :]
        source = part_of(buffer, S.SCALES, tl.float32) + tokens.to(tl.int64)[:, None] * G + groups
        scales = tl.load(source, mask=mask[:, None] & (groups < G))
        for k in tl.static_range(K):
            row = tl.max(tl.where(choice == k, rows, -1), axis=1)
            target = out.scales_ptr + row.to(tl.int64)[:, None] * G + groups
            tl.store(target, scales, mask=(row >= 0)[:, None] & (groups < G))


@triton.jit
def turn_of(index, S: tl.constexpr):
    """What task `index` of sends and copies does: a token to send, or a block and whose it is to copy; -1 is none."""
    BLOCK_T: tl.constexpr = S.tile.BLOCK_T
    LAG: tl.constexpr = S.tile.LAG
    lead: tl.constexpr = min(S.T, LAG * BLOCK_T)
    turns: tl.constexpr = max((S.T + BLOCK_T - 1) // BLOCK_T - LAG, 0)
    turn: tl.constexpr = BLOCK_T + S.W
    token, block, step = -1, -1, 0
    if index < lead:  # sends alone
        token = index
    elif index < lead + turns * turn:  # sends and copies by turns
        step = (index - lead) % turn
        if step < BLOCK_T:
            token = lead + (index - lead) // turn * BLOCK_T + step
        else:
            block, step = (index - lead) // turn, step - BLOCK_T
    else:  # copies alone
        step = (index - lead - turns * turn) % S.W
        block = turns + (index - lead - turns * turn) // S.W
    return token, block, step


@triton.jit
def low_latency_dispatch(x, ids_ptr, num_tokens_ptr, peers, out, plan, S: tl.constexpr, HEAP: tl.constexpr):
    """`x [T, H]` and `ids [T, K]` to `out [L, W * M, H]` and the plan; rows past its sizes are not written.

    `G` scales per token travel beside FP8 tokens: those of `x`, `[T, G]`, or, with GROUP > 0, made here for groups of
    that many columns. With COUNTED only the first `num_tokens []` tokens count.
    """
    launch, alive = open_launch(peers, HEAP)
    W: tl.constexpr = S.W
    T: tl.constexpr = S.T
    M: tl.constexpr = S.M
    K: tl.constexpr = S.K
    L: tl.constexpr = S.L
    BLOCK_T: tl.constexpr = S.tile.BLOCK_T
    LAG: tl.constexpr = S.tile.LAG
    wire: tl.constexpr = out.values_ptr.dtype.element_ty
    buffers = open_buffers(launch, HEAP)
    count = tl.minimum(tl.load(num_tokens_ptr), T) if S.COUNTED else T
    blocks: tl.constexpr = (T + BLOCK_T - 1) // BLOCK_T
    turns: tl.constexpr = max(blocks - LAG, 0)
    exchange: tl.constexpr = min(T, LAG * BLOCK_T) + turns * BLOCK_T + blocks * W
    exchange_start: tl.constexpr = W if S.tile.DIRECT else W + L
    assign_start: tl.constexpr = W + exchange if S.tile.DIRECT else W
    clear_start: tl.constexpr = W + exchange + L
    lanes = tl.arange(0, S.tile.RANKS)
    sources = tl.where(lanes < W, lanes, 0)
    heard, assigned = 0, 0
    task = next_task(launch)
    while task < clear_start + (W * (M - T) * K + SLOTS - 1) // SLOTS:
        token, block, step = -1, -1, 0
        began = stamp(HEAP)
        if (task >= exchange_start) & (task < exchange_start + exchange):
            token, block, step = turn_of(task - exchange_start, S)
        if task < W:
            peer_rank = (launch.rank + 1 + task) % W
            buffer, own = pick(buffers.outgoing, peer_rank), peer_rank == launch.rank
            send_ids(ids_ptr, count, buffer, plan, own, alive, S)
            trace(launch, PUSH_EVENT, began, task, HEAP)
            greet(launch, buffers, tl.full((), 1, tl.int64) * alive << peer_rank.to(tl.int64), task, HEAP)
        elif task >= clear_start:
            clear_slots((task - clear_start) * SLOTS, plan.slot_row_ptr, S)
            trace(launch, ZERO_EVENT, began, task, HEAP)
        elif token >= 0:
            ranks = send_token(x, ids_ptr, token, count, alive, buffers.outgoing, launch.rank, wire, S)
            trace(launch, PUSH_EVENT, began, task, HEAP)
            if ranks != 0:
                publish_to(launch, buffers, ranks, 1 + token, task, HEAP)
        else:
            if heard == 0:
                alive = await_greeting_of_each(launch, buffers.incoming, buffers.epochs, sources, alive, task, HEAP)
                heard = 1
            began = stamp(HEAP)
            if block < 0:
                assign_rows(task - assign_start, buffers.incoming, launch, plan, S)
                trace(launch, COUNT_EVENT, began, task, HEAP)
            else:
                # In the order in which peers send: this rank is the last of the peer after it, and so on.
                source_rank = (launch.rank + W - 1 - step) % W
                buffer = pick(buffers.incoming, source_rank)
                tokens = block * BLOCK_T + tl.arange(0, BLOCK_T)
                if S.tile.DIRECT:
                    rows = count_rows(source_rank * T + block, buffers.incoming, launch.rank, S)
                else:
                    if assigned == 0:
                        done = launch.control + DONE
                        # Also after a failure: own tasks always end, and without what they store rows would be random.
                        ended = await_flag(launch, done, L, launch.rank, alive | 1, task, HEAP)
                        alive = alive & ended
                        assigned = 1
                        trace_exchange(launch, WAIT_EVENT, began, task, -1, OWN, HEAP)
                        began = stamp(HEAP)
                    k = tl.arange(0, S.tile.CHOICES)[None, :]
                    slots = ((source_rank * M + tokens) * K)[:, None] + k
                    rows = tl.load(plan.slot_row_ptr + slots, mask=(tokens < T)[:, None] & (k < K), other=-1)
                    rows = tl.where(rows < L * W * M, rows, -1)
                mask = tl.max(rows, axis=1) >= 0
                arriving = tl.max(tl.where(mask, tokens, -1), axis=0)
                if arriving >= 0:
                    # In place of tokens that do not come here, one that does.
                    tokens = tl.where(mask, tokens, arriving)
                    incoming = tl.full((BLOCK_T,), 0, tl.int64) + buffer
                    senders = tl.zeros((BLOCK_T,), tl.int32) + source_rank
                    expected = tl.zeros((BLOCK_T,), tl.int32) + pick(buffers.epochs, source_rank)
                    alive = await_flags(launch, incoming, 1 + tokens, expected, senders, alive, task, HEAP)
                    if alive != 0:
                        began = stamp(HEAP)
                        copy_tokens(rows, tokens, mask, buffer, out, S)
                        trace(launch, COPY_EVENT, began, task, HEAP)
        task = next_task(launch)
    if end_low_latency_launch(launch, HEAP):
        poison(out.values_ptr, L * W * M * S.H)
        if S.G > 0:
            poison(out.scales_ptr, L * W * M * S.G)
        poison(plan.token_ptr, L * W * M)
        poison(plan.slot_row_ptr, W * M * K)
        poison(plan.own_ids_ptr, M * K)
        poison(plan.num_invalid_ptr, 1)
        # Numbers that can be used, and a poisoned row for each expert.
        zeros = tl.zeros((S.tile.RANKS,), tl.int32)
        for expert in range(L):
            tl.store(plan.sizes_ptr + expert, 1)
            tl.store(plan.start_ptr + expert * W + lanes, zeros, mask=lanes < W)
            tl.store(plan.count_ptr + expert * W + lanes, zeros, mask=lanes < W)


@triton.jit
def store_row(values, index, h, buffer, wire: tl.constexpr, S: tl.constexpr):
    """Stores columns `[h, h + BLOCK_H)` of a row in a buffer, as row `index` of what is sent."""
    H: tl.constexpr = S.H
    BLOCK_H: tl.constexpr = S.tile.BLOCK_H
    columns = h + tl.arange(0, BLOCK_H)
    if S.FP8:
        groups = h // GROUP + tl.arange(0, BLOCK_H // GROUP)
        values, scales = quantize(tl.reshape(values, (1, BLOCK_H)), 1, BLOCK_H)
        values = tl.reshape(values, (BLOCK_H,))
        target = part_of(buffer, S.SCALES, tl.float32) + index.to(tl.int64) * (H // GROUP) + groups
        tl.store(target, tl.reshape(scales, (BLOCK_H // GROUP,)), mask=groups < H // GROUP)
    target = part_of(buffer, S.VALUES, wire) + index.to(tl.int64) * H + columns
    tl.store(tl.multiple_of(target, 16), values.to(wire), mask=columns < H)


@triton.jit
def load_row(exists, index, h, buffer, wire: tl.constexpr, SUM: tl.constexpr, S: tl.constexpr):
    """What `store_row` has stored, as SUM; zero if there is none."""
    H: tl.constexpr = S.H
    BLOCK_H: tl.constexpr = S.tile.BLOCK_H
    columns = h + tl.arange(0, BLOCK_H)
    source = part_of(buffer, S.VALUES, wire) + index.to(tl.int64) * H + columns
    values = tl.load(tl.multiple_of(source, 16), mask=exists & (columns < H), other=0.0)
    if S.FP8:
        groups = h // GROUP + tl.arange(0, BLOCK_H // GROUP)
        source = part_of(buffer, S.SCALES, tl.float32) + index.to(tl.int64) * (H // GROUP) + groups
        scales = tl.load(source, mask=exists & (groups < H // GROUP), other=0.0)
        scales = tl.reshape(scales, (1, BLOCK_H // GROUP))
        values = tl.reshape(dequantize(tl.reshape(values, (1, BLOCK_H)), scales, 1, BLOCK_H), (BLOCK_H,))
    return values.to(SUM)


@triton.jit
def send_weights(weights_ptr, buffer, S: tl.constexpr):
    """Sends the router weights of this rank."""
    num_slots: tl.constexpr = S.T * S.K
    target = part_of(buffer, S.WEIGHTS, weights_ptr.dtype.element_ty)
    for start in range(0, num_slots, SLOTS):
        slots = start + tl.arange(0, SLOTS)
        tl.store(target + slots, tl.load(weights_ptr + slots, mask=slots < num_slots), mask=slots < num_slots)


@triton.jit
def send_sum(y_ptr, rows, weights, token, buffer, wire: tl.constexpr, SUM: tl.constexpr, S: tl.constexpr):
    """Sends the weighted sum of the rows that a token has here, `rows [CHOICES]`, in order of k."""
    H: tl.constexpr = S.H
    K: tl.constexpr = S.K
    BLOCK_H: tl.constexpr = S.tile.BLOCK_H
    for h in range(0, H, BLOCK_H):
        columns = h + tl.arange(0, BLOCK_H)
        total = tl.zeros((BLOCK_H,), SUM)
        for k in tl.static_range(K):
            row = pick(rows, k)
            source = tl.multiple_of(y_ptr + row.to(tl.int64) * H + columns, 16)
            values = tl.load(source, mask=(row >= 0) & (columns < H), other=0.0)
            # The weight of a slot without a row may be anything.
            total += values.to(SUM) * tl.where(row >= 0, pick(weights, k).to(SUM), 0.0)
        store_row(total, token, h, buffer, wire, S)


@triton.jit
def send_row(y_ptr, row, slot, buffer, wire: tl.constexpr, S: tl.constexpr):
    """Sends one row to a slot."""
    for h in range(0, S.H, S.tile.BLOCK_H):
        columns = h + tl.arange(0, S.tile.BLOCK_H)
        source = tl.multiple_of(y_ptr + row.to(tl.int64) * S.H + columns, 16)
        values = tl.load(source, mask=columns < S.H, other=0.0)
        store_row(values, slot, h, buffer, wire, S)


@triton.jit
def add_sums(out_ptr, token, ranks, incoming, wire: tl.constexpr, SUM: tl.constexpr, S: tl.constexpr):
    """Adds what each of `ranks` has sent for a token, in rank order."""
    H: tl.constexpr = S.H
    W: tl.constexpr = S.W
    BLOCK_H: tl.constexpr = S.tile.BLOCK_H
    for h in range(0, H, BLOCK_H):
        columns = h + tl.arange(0, BLOCK_H)
        total = tl.zeros((BLOCK_H,), SUM)
        for source_rank in tl.static_range(W):
            sends = (ranks >> source_rank) & 1 > 0
            buffer = pick(incoming, source_rank)
            total += load_row(sends, token, h, buffer, wire, SUM, S)
        target = tl.multiple_of(out_ptr + token.to(tl.int64) * H + columns, 16)
        tl.store(target, total.to(out_ptr.dtype.element_ty), mask=columns < H)


@triton.jit
def add_rows(out_ptr, token, experts, weights, incoming, wire: tl.constexpr, SUM: tl.constexpr, S: tl.constexpr):
    """Adds the rows that have arrived for a token, each times its weight, in order of k."""
    H: tl.constexpr = S.H
    K: tl.constexpr = S.K
    BLOCK_H: tl.constexpr = S.tile.BLOCK_H
    for h in range(0, H, BLOCK_H):
        columns = h + tl.arange(0, BLOCK_H)
        total = tl.zeros((BLOCK_H,), SUM)
        for k in tl.static_range(K):
            expert = pick(experts, k)
            valid = (expert >= 0) & (expert < S.W * S.L)
            buffer = pick(incoming, tl.where(valid, expert // S.L, 0))
            row = load_row(valid, token * K + k, h, buffer, wire, SUM, S)
            # The weight of a slot without an expert may be anything.
            total += row * tl.where(valid, pick(weights, k).to(SUM), 0.0)
        target = tl.multiple_of(out_ptr + token.to(tl.int64) * H + columns, 16)
        tl.store(target, total.to(out_ptr.dtype.element_ty), mask=columns < H)


@triton.jit
def low_latency_combine(
    y_ptr, slot_row_ptr, own_ids_ptr, weights_ptr, peers, out_ptr, S: tl.constexpr, HEAP: tl.constexpr
):
    """`y [L, W * M, H]` and `weights [T, K]` to `out [T, H]`; the handle has `slot_row [W, M, K]`, `own_ids [M, K]`."""
    launch, alive = open_launch(peers, HEAP)
    W: tl.constexpr = S.W
    T: tl.constexpr = S.T
    K: tl.constexpr = S.K
    SUMS: tl.constexpr = S.tile.SUMS
    RANKS: tl.constexpr = S.tile.RANKS
    buffers = open_buffers(launch, HEAP)
    SUM: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    wire: tl.constexpr = tl.float8e4nv if S.FP8 else y_ptr.dtype.element_ty
    lag: tl.constexpr = min(T, S.tile.LAG)
    sends: tl.constexpr = W if SUMS else W * K  # of a token
    # Sends alone, then sends and sums by turns, then sums alone.
    lead: tl.constexpr = W + lag * sends
    mixed: tl.constexpr = (T - lag) * (sends + 1)
    hear: tl.constexpr = lead + mixed + lag
    lanes, choices = tl.arange(0, RANKS), tl.arange(0, S.tile.CHOICES)
    begun = tl.zeros((RANKS,), tl.int32)
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
        buffer = pick(buffers.outgoing, peer_rank)
        began = stamp(HEAP)
        if task < W:
            if alive != 0:
                if SUMS:
                    send_weights(weights_ptr, buffer, S)
                    trace(launch, PUSH_EVENT, began, task, HEAP)
                greet(launch, buffers, peer, task, HEAP)
        elif task == hear:
            sources = tl.where(lanes < W, lanes, 0)
            alive = await_greeting_of_each(launch, buffers.incoming, buffers.epochs, sources, alive, task, HEAP)
        elif sent >= 0:
            slots = (peer_rank * S.M + sent) * K
            if SUMS:
                rows = tl.load(slot_row_ptr + slots + choices, mask=choices < K, other=-1)
                if tl.max(rows, axis=0) >= 0:
                    if heard & peer == 0:
                        # Lanes of other ranks look at the same flag.
                        incoming = tl.full((RANKS,), 0, tl.int64) + pick(buffers.incoming, peer_rank)
                        expected, senders = begun + pick(buffers.epochs, peer_rank), begun + peer_rank
                        alive = await_greeting_of_each(launch, incoming, expected, senders, alive, task, HEAP)
                        heard = heard | peer
                    if alive != 0:
                        began = stamp(HEAP)
                        received = pick(buffers.incoming, peer_rank)
                        received_ptr = part_of(received, S.WEIGHTS, weights_ptr.dtype.element_ty)
                        weights = tl.load(received_ptr + sent * K + choices, mask=choices < K, other=0.0)
                        send_sum(y_ptr, rows, weights, sent, buffer, wire, SUM, S)
                        trace(launch, PUSH_EVENT, began, task, HEAP)
                        publish_to(launch, buffers, peer, 1 + sent, task, HEAP)
            else:
                choice = step // W
                row = tl.load(slot_row_ptr + slots + choice)
                if (row >= 0) & (alive != 0):
                    slot = sent * K + choice
                    send_row(y_ptr, row, slot, buffer, wire, S)
                    trace(launch, PUSH_EVENT, began, task, HEAP)
                    publish_to(launch, buffers, peer, 1 + slot, task, HEAP)
        elif summed >= 0:
            slots = summed * K + choices
            experts = tl.load(own_ids_ptr + slots, mask=choices < K, other=-1)
            weights = tl.load(weights_ptr + slots, mask=choices < K, other=0.0)
            ranks = destinations(own_ids_ptr, summed * K, summed < T, K, S.L, W * S.L)
            if ranks != 0:
                if SUMS:
                    chosen = (lanes < W) & goes_to(ranks, lanes)
                    # Lanes of ranks that send nothing look at the flag of one that does.
                    sources = tl.where(chosen, lanes, tl.max(tl.where(chosen, lanes, 0), axis=0))
                    flags = begun + 1 + summed
                else:
                    chosen = (experts >= 0) & (experts < W * S.L)
                    # So do choices that are no expert: they look at the flag of the last one that is.
                    existing = tl.where(chosen, choices, tl.max(tl.where(chosen, choices, 0), axis=0))
                    sources = tl.load(own_ids_ptr + summed * K + existing) // S.L
                    flags = 1 + summed * K + existing
                incoming, expected = pick_each(buffers.incoming, sources), pick_each(buffers.epochs, sources)
                alive = await_flags(launch, incoming, flags, expected, sources, alive, task, HEAP)
            began = stamp(HEAP)
            if SUMS:
                add_sums(out_ptr, summed, ranks, buffers.incoming, wire, SUM, S)
            else:
                add_rows(out_ptr, summed, experts, weights, buffers.incoming, wire, SUM, S)
            trace(launch, SUM_EVENT, began, task, HEAP)
        task = next_task(launch)
    if end_low_latency_launch(launch, HEAP):
        poison(out_ptr, T * S.H)
