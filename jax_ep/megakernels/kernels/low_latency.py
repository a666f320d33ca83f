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
    for start in range(0, S.max_tokens * S.top_k, SLOTS):
        slots = start + tl.arange(0, SLOTS)
        ids = tl.load(ids_ptr + slots, mask=slots // S.top_k < count, other=-1)
        if alive != 0:
            tl.store(part_of(buffer, S.ids_offset, tl.int32) + slots, ids, mask=slots < S.num_tokens * S.top_k)
        if own:
            tl.store(plan.own_ids_ptr + slots, ids, mask=slots < S.max_tokens * S.top_k)
        invalid += ((ids < -1) | (ids >= S.num_ranks * S.num_local_experts)).to(tl.int32)
    if own:
        tl.store(plan.num_invalid_ptr, tl.sum(invalid, axis=0))


@triton.jit
def send_token(x, ids_ptr, token, count, alive, outgoing, rank, wire: tl.constexpr, S: tl.constexpr):
    """Sends a token to each rank that has one of its experts; with GROUP, quantised for groups of so many columns.

    Returns:
      The set of these ranks.
    """
    HIDDEN: tl.constexpr = S.hidden
    NUM_SCALES: tl.constexpr = S.num_scales
    SCALE_BLOCK: tl.constexpr = S.scale_block
    SEND_HIDDEN: tl.constexpr = S.tile.send_hidden
    row, row_scales = token.to(tl.int64) * HIDDEN, token.to(tl.int64) * NUM_SCALES
    lanes = tl.arange(0, SEND_HIDDEN)
    # Under way while the ids are looked at.
    values = tl.load(tl.multiple_of(x.values_ptr + row + lanes, 16), mask=(lanes < HIDDEN) & (token < count), other=0.0)
    ranks = (
        destinations(
            ids_ptr, token * S.top_k, token < count, S.top_k, S.num_local_experts, S.num_ranks * S.num_local_experts
        )
        * alive
    )
    if ranks != 0:
        for h in tl.static_range(0, HIDDEN, SEND_HIDDEN):
            columns = h + lanes
            if h > 0:
                values = tl.load(tl.multiple_of(x.values_ptr + row + columns, 16), mask=columns < HIDDEN, other=0.0)
            if SCALE_BLOCK > 0:
                groups = h // SCALE_BLOCK + tl.arange(0, SEND_HIDDEN // SCALE_BLOCK)
                sent, scales = quantize(tl.reshape(values, (1, SEND_HIDDEN)), 1, SEND_HIDDEN, SCALE_BLOCK)
                sent, scales = tl.reshape(sent, (SEND_HIDDEN,)), tl.reshape(scales, (SEND_HIDDEN // SCALE_BLOCK,))
            else:
                sent = values
            for step in range(S.num_ranks):
                peer_rank = (rank + 1 + step) % S.num_ranks
                if goes_to(ranks, peer_rank):
                    buffer = pick(outgoing, peer_rank)
                    target = part_of(buffer, S.values_offset, wire) + row + columns
                    tl.store(tl.multiple_of(target, 16), sent, mask=columns < HIDDEN)
                    if SCALE_BLOCK > 0:
                        target = part_of(buffer, S.scales_offset, tl.float32) + row_scales + groups
                        tl.store(target, scales, mask=groups < NUM_SCALES)
        if NUM_SCALES > 0 and SCALE_BLOCK == 0:
            groups = tl.arange(0, S.tile.padded_scales)
            scales = tl.load(x.scales_ptr + row_scales + groups, mask=groups < NUM_SCALES)
            for step in range(S.num_ranks):
                peer_rank = (rank + 1 + step) % S.num_ranks
                if goes_to(ranks, peer_rank):
                    target = part_of(pick(outgoing, peer_rank), S.scales_offset, tl.float32) + row_scales + groups
                    tl.store(target, scales, mask=groups < NUM_SCALES)
    return ranks


@triton.jit
def ids_of(index, incoming, S: tl.constexpr):
    """`[N, CHOICES]` ids of tokens `index [N]`, source rank * T + token, -1 past the last one; and which exist."""
    buffers = pick_each(incoming, tl.minimum(index // S.num_tokens, S.num_ranks - 1))
    k = tl.arange(0, S.tile.padded_top_k)[None, :]
    exist = (index < S.num_ranks * S.num_tokens)[:, None] & (k < S.top_k)
    ids_ptr = part_of(buffers, S.ids_offset, tl.int32)[:, None] + (index % S.num_tokens * S.top_k)[:, None] + k
    return tl.load(ids_ptr, mask=exist, other=-1), exist


@triton.jit
def assign_rows(expert, incoming, launch, plan, S: tl.constexpr):
    """Gives the tokens that name a local expert its rows, in order; also marks a share of the slots without a row.

    Unless DIRECT, this rank is told that it is done.
    """
    NUM_TOKENS: tl.constexpr = S.num_tokens
    LOCAL_EXPERTS: tl.constexpr = S.num_local_experts
    NUM_RANKS: tl.constexpr = S.num_ranks
    CHUNK: tl.constexpr = S.tile.chunk
    PADDED_RANKS: tl.constexpr = S.tile.padded_ranks
    first = launch.rank * LOCAL_EXPERTS
    first_row = expert.to(tl.int64) * (NUM_RANKS * S.max_tokens)
    lanes = tl.arange(0, PADDED_RANKS)
    counts = tl.zeros((PADDED_RANKS,), tl.int32)  # by source rank
    size = 0
    for start in range(0, NUM_RANKS * NUM_TOKENS, CHUNK):
        index = start + tl.arange(0, CHUNK)
        source, token = index // NUM_TOKENS, index % NUM_TOKENS
        ids, exist = ids_of(index, incoming, S)
        named = exist & (ids == first + expert)
        is_here = tl.max(named.to(tl.int32), axis=1)
        position = size + tl.cumsum(is_here, axis=0) - is_here
        row = first_row + position
        tl.store(plan.token_ptr + row, token, mask=is_here > 0)
        slots = ((source * S.max_tokens + token) * S.top_k)[:, None] + tl.arange(0, S.tile.padded_top_k)[None, :]
        nowhere = exist & ((ids < first) | (ids >= first + LOCAL_EXPERTS)) & (index % LOCAL_EXPERTS == expert)[:, None]
        tl.store(plan.slot_row_ptr + slots, tl.where(named, row.to(tl.int32)[:, None], -1), mask=named | nowhere)
        size += tl.sum(is_here, axis=0)
        counts += tl.sum(tl.where(source[:, None] == lanes[None, :], is_here[:, None], 0), axis=0)
    tl.store(plan.sizes_ptr + expert, size)
    if not S.tile.direct:
        # All threads' stores come before the count.
        tl.debug_barrier()
        tl.atomic_add(launch.control + DONE, 1, sem="release", scope="gpu")
    tl.store(plan.count_ptr + expert * NUM_RANKS + lanes, counts, mask=lanes < NUM_RANKS)
    tl.store(plan.start_ptr + expert * NUM_RANKS + lanes, tl.cumsum(counts, axis=0) - counts, mask=lanes < NUM_RANKS)
    for start in range(0, NUM_RANKS * S.max_tokens, CHUNK):
        rows = start + tl.arange(0, CHUNK)
        past = (rows >= size) & (rows < NUM_RANKS * S.max_tokens)
        tl.store(plan.token_ptr + first_row + rows, tl.full((CHUNK,), -1, tl.int32), mask=past)


@triton.jit
def count_rows(index, incoming, rank, S: tl.constexpr):
    """`[1, CHOICES]` rows of one token, -1 where it has none: how many tokens before it name the same expert."""
    own, _ = ids_of(index + tl.arange(0, 1), incoming, S)
    others = tl.arange(0, S.tile.chunk)
    ids, _ = ids_of(others, incoming, S)
    same = ids[:, :, None] == tl.reshape(own, (1, 1, S.tile.padded_top_k))
    named = tl.max(same.to(tl.int32), axis=1)
    before = tl.sum(tl.where((others < index)[:, None], named, 0), axis=0)[None, :]
    local = own - rank * S.num_local_experts
    return tl.where(
        (own >= rank * S.num_local_experts) & (own < rank * S.num_local_experts + S.num_local_experts),
        local * (S.num_ranks * S.max_tokens) + before,
        -1,
    )


@triton.jit
def clear_slots(first, slot_row_ptr, S: tl.constexpr):
    """Marks slots of tokens that no rank has, T and up, as without a row."""
    if S.max_tokens > S.num_tokens:
        index = first + tl.arange(0, SLOTS)
        width: tl.constexpr = (S.max_tokens - S.num_tokens) * S.top_k
        slots = index // width * (S.max_tokens * S.top_k) + S.num_tokens * S.top_k + index % width
        tl.store(slot_row_ptr + slots, tl.full((SLOTS,), -1, tl.int32), mask=index < S.num_ranks * width)


@triton.jit
def copy_tokens(rows, tokens, mask, buffer, out, S: tl.constexpr):
    """Copies tokens `[BLOCK_T]` that lie in a buffer to `rows [BLOCK_T, CHOICES]`."""
    HIDDEN: tl.constexpr = S.hidden
    TOP_K: tl.constexpr = S.top_k
    NUM_SCALES: tl.constexpr = S.num_scales
    choice = tl.arange(0, S.tile.padded_top_k)[None, :]
    values_ptr = part_of(buffer, S.values_offset, out.values_ptr.dtype.element_ty)
    for h in range(0, HIDDEN, S.tile.block_hidden):
        columns = h + tl.arange(0, S.tile.block_hidden)[None, :]
        inside = columns < HIDDEN
        source = tl.multiple_of(values_ptr + tokens.to(tl.int64)[:, None] * HIDDEN + columns, (16, 16))
        values = tl.load(source, mask=mask[:, None] & inside)
        for k in tl.static_range(TOP_K):
            row = tl.max(tl.where(choice == k, rows, -1), axis=1)
            target = tl.multiple_of(out.values_ptr + row.to(tl.int64)[:, None] * HIDDEN + columns, (16, 16))
            tl.store(target, values, mask=(row >= 0)[:, None] & inside)
    if NUM_SCALES > 0:
        groups = tl.arange(0, S.tile.padded_scales)[None, :]
        source = part_of(buffer, S.scales_offset, tl.float32) + tokens.to(tl.int64)[:, None] * NUM_SCALES + groups
        scales = tl.load(source, mask=mask[:, None] & (groups < NUM_SCALES))
        for k in tl.static_range(TOP_K):
            row = tl.max(tl.where(choice == k, rows, -1), axis=1)
            target = out.scales_ptr + row.to(tl.int64)[:, None] * NUM_SCALES + groups
            tl.store(target, scales, mask=(row >= 0)[:, None] & (groups < NUM_SCALES))


@triton.jit
def turn_of(index, S: tl.constexpr):
    """What task `index` of sends and copies does: a token to send, or a block and whose it is to copy; -1 is none."""
    BLOCK_TOKENS: tl.constexpr = S.tile.block_tokens
    LAG: tl.constexpr = S.tile.lag
    lead: tl.constexpr = min(S.num_tokens, LAG * BLOCK_TOKENS)
    turns: tl.constexpr = max((S.num_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS - LAG, 0)
    turn: tl.constexpr = BLOCK_TOKENS + S.num_ranks
    token, block, step = -1, -1, 0
    if index < lead:  # sends alone
        token = index
    elif index < lead + turns * turn:  # sends and copies by turns
        step = (index - lead) % turn
        if step < BLOCK_TOKENS:
            token = lead + (index - lead) // turn * BLOCK_TOKENS + step
        else:
            block, step = (index - lead) // turn, step - BLOCK_TOKENS
    else:  # copies alone
        step = (index - lead - turns * turn) % S.num_ranks
        block = turns + (index - lead - turns * turn) // S.num_ranks
    return token, block, step


@triton.jit
def low_latency_dispatch(x, ids_ptr, num_tokens_ptr, peers, out, plan, S: tl.constexpr, HEAP: tl.constexpr):
    """`x [T, H]` and `ids [T, K]` to `out [L, W * M, H]` and the plan; rows past its sizes are not written.

    `G` scales per token travel beside FP8 tokens: those of `x`, `[T, G]`, or, with GROUP > 0, made here for groups of
    that many columns. With COUNTED only the first `num_tokens []` tokens count.
    """
    launch, alive = open_launch(peers, HEAP)
    NUM_RANKS: tl.constexpr = S.num_ranks
    NUM_TOKENS: tl.constexpr = S.num_tokens
    MAX_TOKENS: tl.constexpr = S.max_tokens
    TOP_K: tl.constexpr = S.top_k
    LOCAL_EXPERTS: tl.constexpr = S.num_local_experts
    BLOCK_TOKENS: tl.constexpr = S.tile.block_tokens
    LAG: tl.constexpr = S.tile.lag
    wire: tl.constexpr = out.values_ptr.dtype.element_ty
    buffers = open_buffers(launch, HEAP)
    count = tl.minimum(tl.load(num_tokens_ptr), NUM_TOKENS) if S.has_num_tokens else NUM_TOKENS
    blocks: tl.constexpr = (NUM_TOKENS + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    turns: tl.constexpr = max(blocks - LAG, 0)
    exchange: tl.constexpr = min(NUM_TOKENS, LAG * BLOCK_TOKENS) + turns * BLOCK_TOKENS + blocks * NUM_RANKS
    exchange_start: tl.constexpr = NUM_RANKS if S.tile.direct else NUM_RANKS + LOCAL_EXPERTS
    assign_start: tl.constexpr = NUM_RANKS + exchange if S.tile.direct else NUM_RANKS
    clear_start: tl.constexpr = NUM_RANKS + exchange + LOCAL_EXPERTS
    lanes = tl.arange(0, S.tile.padded_ranks)
    sources = tl.where(lanes < NUM_RANKS, lanes, 0)
    heard, assigned = 0, 0
    task = next_task(launch)
    while task < clear_start + (NUM_RANKS * (MAX_TOKENS - NUM_TOKENS) * TOP_K + SLOTS - 1) // SLOTS:
        token, block, step = -1, -1, 0
        began = stamp(HEAP)
        if (task >= exchange_start) & (task < exchange_start + exchange):
            token, block, step = turn_of(task - exchange_start, S)
        if task < NUM_RANKS:
            peer_rank = (launch.rank + 1 + task) % NUM_RANKS
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
                source_rank = (launch.rank + NUM_RANKS - 1 - step) % NUM_RANKS
                buffer = pick(buffers.incoming, source_rank)
                tokens = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
                if S.tile.direct:
                    rows = count_rows(source_rank * NUM_TOKENS + block, buffers.incoming, launch.rank, S)
                else:
                    if assigned == 0:
                        done = launch.control + DONE
                        # Also after a failure: own tasks always end, and without what they store rows would be random.
                        ended = await_flag(launch, done, LOCAL_EXPERTS, launch.rank, alive | 1, task, HEAP)
                        alive = alive & ended
                        assigned = 1
                        trace_exchange(launch, WAIT_EVENT, began, task, -1, OWN, HEAP)
                        began = stamp(HEAP)
                    k = tl.arange(0, S.tile.padded_top_k)[None, :]
                    slots = ((source_rank * MAX_TOKENS + tokens) * TOP_K)[:, None] + k
                    rows = tl.load(
                        plan.slot_row_ptr + slots, mask=(tokens < NUM_TOKENS)[:, None] & (k < TOP_K), other=-1
                    )
                    rows = tl.where(rows < LOCAL_EXPERTS * NUM_RANKS * MAX_TOKENS, rows, -1)
                mask = tl.max(rows, axis=1) >= 0
                arriving = tl.max(tl.where(mask, tokens, -1), axis=0)
                if arriving >= 0:
                    # In place of tokens that do not come here, one that does.
                    tokens = tl.where(mask, tokens, arriving)
                    incoming = tl.full((BLOCK_TOKENS,), 0, tl.int64) + buffer
                    senders = tl.zeros((BLOCK_TOKENS,), tl.int32) + source_rank
                    expected = tl.zeros((BLOCK_TOKENS,), tl.int32) + pick(buffers.epochs, source_rank)
                    alive = await_flags(launch, incoming, 1 + tokens, expected, senders, alive, task, HEAP)
                    if alive != 0:
                        began = stamp(HEAP)
                        copy_tokens(rows, tokens, mask, buffer, out, S)
                        trace(launch, COPY_EVENT, began, task, HEAP)
        task = next_task(launch)
    if end_low_latency_launch(launch, HEAP):
        poison(out.values_ptr, LOCAL_EXPERTS * NUM_RANKS * MAX_TOKENS * S.hidden)
        if S.num_scales > 0:
            poison(out.scales_ptr, LOCAL_EXPERTS * NUM_RANKS * MAX_TOKENS * S.num_scales)
        poison(plan.token_ptr, LOCAL_EXPERTS * NUM_RANKS * MAX_TOKENS)
        poison(plan.slot_row_ptr, NUM_RANKS * MAX_TOKENS * TOP_K)
        poison(plan.own_ids_ptr, MAX_TOKENS * TOP_K)
        poison(plan.num_invalid_ptr, 1)
        # Numbers that can be used, and a poisoned row for each expert.
        zeros = tl.zeros((S.tile.padded_ranks,), tl.int32)
        for expert in range(LOCAL_EXPERTS):
            tl.store(plan.sizes_ptr + expert, 1)
            tl.store(plan.start_ptr + expert * NUM_RANKS + lanes, zeros, mask=lanes < NUM_RANKS)
            tl.store(plan.count_ptr + expert * NUM_RANKS + lanes, zeros, mask=lanes < NUM_RANKS)


@triton.jit
def store_row(values, index, h, buffer, wire: tl.constexpr, S: tl.constexpr):
    """Stores columns `[h, h + BLOCK_H)` of a row in a buffer, as row `index` of what is sent."""
    HIDDEN: tl.constexpr = S.hidden
    BLOCK_HIDDEN: tl.constexpr = S.tile.block_hidden
    columns = h + tl.arange(0, BLOCK_HIDDEN)
    if S.fp8:
        groups = h // GROUP + tl.arange(0, BLOCK_HIDDEN // GROUP)
        values, scales = quantize(tl.reshape(values, (1, BLOCK_HIDDEN)), 1, BLOCK_HIDDEN)
        values = tl.reshape(values, (BLOCK_HIDDEN,))
        target = part_of(buffer, S.scales_offset, tl.float32) + index.to(tl.int64) * (HIDDEN // GROUP) + groups
        tl.store(target, tl.reshape(scales, (BLOCK_HIDDEN // GROUP,)), mask=groups < HIDDEN // GROUP)
    target = part_of(buffer, S.values_offset, wire) + index.to(tl.int64) * HIDDEN + columns
    tl.store(tl.multiple_of(target, 16), values.to(wire), mask=columns < HIDDEN)


@triton.jit
def load_row(exists, index, h, buffer, wire: tl.constexpr, SUM: tl.constexpr, S: tl.constexpr):
    """What `store_row` has stored, as SUM; zero if there is none."""
    HIDDEN: tl.constexpr = S.hidden
    BLOCK_HIDDEN: tl.constexpr = S.tile.block_hidden
    columns = h + tl.arange(0, BLOCK_HIDDEN)
    source = part_of(buffer, S.values_offset, wire) + index.to(tl.int64) * HIDDEN + columns
    values = tl.load(tl.multiple_of(source, 16), mask=exists & (columns < HIDDEN), other=0.0)
    if S.fp8:
        groups = h // GROUP + tl.arange(0, BLOCK_HIDDEN // GROUP)
        source = part_of(buffer, S.scales_offset, tl.float32) + index.to(tl.int64) * (HIDDEN // GROUP) + groups
        scales = tl.load(source, mask=exists & (groups < HIDDEN // GROUP), other=0.0)
        scales = tl.reshape(scales, (1, BLOCK_HIDDEN // GROUP))
        values = tl.reshape(dequantize(tl.reshape(values, (1, BLOCK_HIDDEN)), scales, 1, BLOCK_HIDDEN), (BLOCK_HIDDEN,))
    return values.to(SUM)


@triton.jit
def send_weights(weights_ptr, buffer, S: tl.constexpr):
    """Sends the router weights of this rank."""
    num_slots: tl.constexpr = S.num_tokens * S.top_k
    target = part_of(buffer, S.weights_offset, weights_ptr.dtype.element_ty)
    for start in range(0, num_slots, SLOTS):
        slots = start + tl.arange(0, SLOTS)
        tl.store(target + slots, tl.load(weights_ptr + slots, mask=slots < num_slots), mask=slots < num_slots)


@triton.jit
def send_sum(y_ptr, rows, weights, token, buffer, wire: tl.constexpr, SUM: tl.constexpr, S: tl.constexpr):
    """Sends the weighted sum of the rows that a token has here, `rows [CHOICES]`, in order of k."""
    HIDDEN: tl.constexpr = S.hidden
    TOP_K: tl.constexpr = S.top_k
    BLOCK_HIDDEN: tl.constexpr = S.tile.block_hidden
    for h in range(0, HIDDEN, BLOCK_HIDDEN):
        columns = h + tl.arange(0, BLOCK_HIDDEN)
        total = tl.zeros((BLOCK_HIDDEN,), SUM)
        for k in tl.static_range(TOP_K):
            row = pick(rows, k)
            source = tl.multiple_of(y_ptr + row.to(tl.int64) * HIDDEN + columns, 16)
            values = tl.load(source, mask=(row >= 0) & (columns < HIDDEN), other=0.0)
            # The weight of a slot without a row may be anything.
            total += values.to(SUM) * tl.where(row >= 0, pick(weights, k).to(SUM), 0.0)
        store_row(total, token, h, buffer, wire, S)


@triton.jit
def send_row(y_ptr, row, slot, buffer, wire: tl.constexpr, S: tl.constexpr):
    """Sends one row to a slot."""
    for h in range(0, S.hidden, S.tile.block_hidden):
        columns = h + tl.arange(0, S.tile.block_hidden)
        source = tl.multiple_of(y_ptr + row.to(tl.int64) * S.hidden + columns, 16)
        values = tl.load(source, mask=columns < S.hidden, other=0.0)
        store_row(values, slot, h, buffer, wire, S)


@triton.jit
def add_sums(out_ptr, token, ranks, incoming, wire: tl.constexpr, SUM: tl.constexpr, S: tl.constexpr):
    """Adds what each of `ranks` has sent for a token, in rank order."""
    HIDDEN: tl.constexpr = S.hidden
    NUM_RANKS: tl.constexpr = S.num_ranks
    BLOCK_HIDDEN: tl.constexpr = S.tile.block_hidden
    for h in range(0, HIDDEN, BLOCK_HIDDEN):
        columns = h + tl.arange(0, BLOCK_HIDDEN)
        total = tl.zeros((BLOCK_HIDDEN,), SUM)
        for source_rank in tl.static_range(NUM_RANKS):
            sends = (ranks >> source_rank) & 1 > 0
            buffer = pick(incoming, source_rank)
            total += load_row(sends, token, h, buffer, wire, SUM, S)
        target = tl.multiple_of(out_ptr + token.to(tl.int64) * HIDDEN + columns, 16)
        tl.store(target, total.to(out_ptr.dtype.element_ty), mask=columns < HIDDEN)


@triton.jit
def add_rows(out_ptr, token, experts, weights, incoming, wire: tl.constexpr, SUM: tl.constexpr, S: tl.constexpr):
    """Adds the rows that have arrived for a token, each times its weight, in order of k."""
    HIDDEN: tl.constexpr = S.hidden
    TOP_K: tl.constexpr = S.top_k
    BLOCK_HIDDEN: tl.constexpr = S.tile.block_hidden
    for h in range(0, HIDDEN, BLOCK_HIDDEN):
        columns = h + tl.arange(0, BLOCK_HIDDEN)
        total = tl.zeros((BLOCK_HIDDEN,), SUM)
        for k in tl.static_range(TOP_K):
            expert = pick(experts, k)
            valid = (expert >= 0) & (expert < S.num_ranks * S.num_local_experts)
            buffer = pick(incoming, tl.where(valid, expert // S.num_local_experts, 0))
            row = load_row(valid, token * TOP_K + k, h, buffer, wire, SUM, S)
            # The weight of a slot without an expert may be anything.
            total += row * tl.where(valid, pick(weights, k).to(SUM), 0.0)
        target = tl.multiple_of(out_ptr + token.to(tl.int64) * HIDDEN + columns, 16)
        tl.store(target, total.to(out_ptr.dtype.element_ty), mask=columns < HIDDEN)


@triton.jit
def low_latency_combine(
    y_ptr, slot_row_ptr, own_ids_ptr, weights_ptr, peers, out_ptr, S: tl.constexpr, HEAP: tl.constexpr
):
    """`y [L, W * M, H]` and `weights [T, K]` to `out [T, H]`; the handle has `slot_row [W, M, K]`, `own_ids [M, K]`."""
    launch, alive = open_launch(peers, HEAP)
    NUM_RANKS: tl.constexpr = S.num_ranks
    NUM_TOKENS: tl.constexpr = S.num_tokens
    TOP_K: tl.constexpr = S.top_k
    SENDS_SUMS: tl.constexpr = S.tile.sends_sums
    PADDED_RANKS: tl.constexpr = S.tile.padded_ranks
    buffers = open_buffers(launch, HEAP)
    SUM: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    wire: tl.constexpr = tl.float8e4nv if S.fp8 else y_ptr.dtype.element_ty
    lag: tl.constexpr = min(NUM_TOKENS, S.tile.lag)
    sends: tl.constexpr = NUM_RANKS if SENDS_SUMS else NUM_RANKS * TOP_K  # of a token
    # Sends alone, then sends and sums by turns, then sums alone.
    lead: tl.constexpr = NUM_RANKS + lag * sends
    mixed: tl.constexpr = (NUM_TOKENS - lag) * (sends + 1)
    hear: tl.constexpr = lead + mixed + lag
    lanes, choices = tl.arange(0, PADDED_RANKS), tl.arange(0, S.tile.padded_top_k)
    begun = tl.zeros((PADDED_RANKS,), tl.int32)
    heard = tl.full((), 0, tl.int64)
    task = next_task(launch)
    while task <= hear:
        sent, summed, step = -1, -1, task
        if (task >= NUM_RANKS) & (task < lead):
            sent, step = (task - NUM_RANKS) // sends, (task - NUM_RANKS) % sends
        elif (task >= lead) & (task < lead + mixed):
            step = (task - lead) % (sends + 1)
            if step < sends:
                sent = lag + (task - lead) // (sends + 1)
            else:
                summed = (task - lead) // (sends + 1)
        elif (task >= lead + mixed) & (task < hear):
            summed = NUM_TOKENS - lag + (task - lead - mixed)
        peer_rank = (launch.rank + 1 + step) % NUM_RANKS
        peer = tl.full((), 1, tl.int64) << peer_rank.to(tl.int64)
        buffer = pick(buffers.outgoing, peer_rank)
        began = stamp(HEAP)
        if task < NUM_RANKS:
            if alive != 0:
                if SENDS_SUMS:
                    send_weights(weights_ptr, buffer, S)
                    trace(launch, PUSH_EVENT, began, task, HEAP)
                greet(launch, buffers, peer, task, HEAP)
        elif task == hear:
            sources = tl.where(lanes < NUM_RANKS, lanes, 0)
            alive = await_greeting_of_each(launch, buffers.incoming, buffers.epochs, sources, alive, task, HEAP)
        elif sent >= 0:
            slots = (peer_rank * S.max_tokens + sent) * TOP_K
            if SENDS_SUMS:
                rows = tl.load(slot_row_ptr + slots + choices, mask=choices < TOP_K, other=-1)
                if tl.max(rows, axis=0) >= 0:
                    if heard & peer == 0:
                        # Lanes of other ranks look at the same flag.
                        incoming = tl.full((PADDED_RANKS,), 0, tl.int64) + pick(buffers.incoming, peer_rank)
                        expected, senders = begun + pick(buffers.epochs, peer_rank), begun + peer_rank
                        alive = await_greeting_of_each(launch, incoming, expected, senders, alive, task, HEAP)
                        heard = heard | peer
                    if alive != 0:
                        began = stamp(HEAP)
                        received = pick(buffers.incoming, peer_rank)
                        received_ptr = part_of(received, S.weights_offset, weights_ptr.dtype.element_ty)
                        weights = tl.load(received_ptr + sent * TOP_K + choices, mask=choices < TOP_K, other=0.0)
                        send_sum(y_ptr, rows, weights, sent, buffer, wire, SUM, S)
                        trace(launch, PUSH_EVENT, began, task, HEAP)
                        publish_to(launch, buffers, peer, 1 + sent, task, HEAP)
            else:
                choice = step // NUM_RANKS
                row = tl.load(slot_row_ptr + slots + choice)
                if (row >= 0) & (alive != 0):
                    slot = sent * TOP_K + choice
                    send_row(y_ptr, row, slot, buffer, wire, S)
                    trace(launch, PUSH_EVENT, began, task, HEAP)
                    publish_to(launch, buffers, peer, 1 + slot, task, HEAP)
        elif summed >= 0:
            slots = summed * TOP_K + choices
            experts = tl.load(own_ids_ptr + slots, mask=choices < TOP_K, other=-1)
            weights = tl.load(weights_ptr + slots, mask=choices < TOP_K, other=0.0)
            ranks = destinations(
                own_ids_ptr,
                summed * TOP_K,
                summed < NUM_TOKENS,
                TOP_K,
                S.num_local_experts,
                NUM_RANKS * S.num_local_experts,
            )
            if ranks != 0:
                if SENDS_SUMS:
                    chosen = (lanes < NUM_RANKS) & goes_to(ranks, lanes)
                    # Lanes of ranks that send nothing look at the flag of one that does.
                    sources = tl.where(chosen, lanes, tl.max(tl.where(chosen, lanes, 0), axis=0))
                    flags = begun + 1 + summed
                else:
                    chosen = (experts >= 0) & (experts < NUM_RANKS * S.num_local_experts)
                    # So do choices that are no expert: they look at the flag of the last one that is.
                    existing = tl.where(chosen, choices, tl.max(tl.where(chosen, choices, 0), axis=0))
                    sources = tl.load(own_ids_ptr + summed * TOP_K + existing) // S.num_local_experts
                    flags = 1 + summed * TOP_K + existing
                incoming, expected = pick_each(buffers.incoming, sources), pick_each(buffers.epochs, sources)
                alive = await_flags(launch, incoming, flags, expected, sources, alive, task, HEAP)
            began = stamp(HEAP)
            if SENDS_SUMS:
                add_sums(out_ptr, summed, ranks, buffers.incoming, wire, SUM, S)
            else:
                add_rows(out_ptr, summed, experts, weights, buffers.incoming, wire, SUM, S)
            trace(launch, SUM_EVENT, began, task, HEAP)
        task = next_task(launch)
    if end_low_latency_launch(launch, HEAP):
        poison(out_ptr, NUM_TOKENS * S.hidden)
