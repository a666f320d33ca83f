"""Low-latency dispatch and combine, one launch each: data crosses the link once, without a handshake before it.

All programs take tasks from one queue. low_latency_buffers.py explains why a rank may send at once.

**Dispatch** stores tokens in packed rows per expert, ordered by source rank, then token. A token that names an expert
twice has one row there. Tasks, in order:

    ids      send the ids of all tokens to a rank, and the ready handshake; num_ranks tasks
    assign   give the tokens of one local expert their rows and fill the handle; num_local_experts tasks
    send     quantize a token, store it at each rank that has one of its experts, and set its flag
    copy     wait for tokens' flags and copy them to their rows; interleaved with sends, `lag` blocks behind
    clear    fill the rest of the handle

With few tokens (`tile.direct`) each copy computes its rows itself, and the assign tasks come last. Otherwise a copy
waits for all assign tasks of this launch.

**Combine** brings expert rows back to the ranks of their tokens, which sum them. Tasks, in order:

    ready    signal a rank that this launch has begun; num_ranks tasks
    send     send what the experts here have for one token of one rank; own tokens last
    sum      wait for a token's values and sum them; interleaved with sends, `lag` tokens behind
    hear     wait for the handshakes of all ranks

If `tile.sends_sums`, the weighted sum of a token's rows here travels, rounded once; router weights then travel first,
before the handshake. Otherwise each row travels alone with its own flag: more bytes, but a row need not wait for
others.

No deadlock: copies and sums wait for sends and ids of peers, which have smaller numbers there and wait for nothing
(sums of rows also wait for weights, sent in the first tasks). Floor: one link latency plus the larger of link and
memory time.
"""

import triton
import triton.language as tl

from .failures import poison
from .low_latency_buffers import (
    await_flags,
    await_ready_of,
    end_low_latency_launch,
    open_buffers,
    part_of,
    pick,
    pick_each,
    publish_to,
    signal_ready_to,
)
from .protocol import await_flag, next_task, open_launch
from .quantization import GROUP, dequantize, quantize
from .table import DONE
from .token_rows import destinations, goes_to
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

# Assignments that a task processes at a time.
SPAN = tl.constexpr(1024)


@triton.jit
def send_ids(ids_ptr, count, buffer, plan, own, not_failed, S: tl.constexpr):
    """Send the ids of the first `count` tokens, and -1 for the others.

    For its own buffer, a rank also stores them in the handle and counts invalid ones.
    """
    invalid = tl.zeros((SPAN,), tl.int32)
    for start in range(0, S.max_tokens * S.top_k, SPAN):
        assignments = start + tl.arange(0, SPAN)
        ids = tl.load(ids_ptr + assignments, mask=assignments // S.top_k < count, other=-1)
        if not_failed != 0:
            target = part_of(buffer, S.ids_offset, tl.int32) + assignments
            tl.store(target, ids, mask=assignments < S.num_tokens * S.top_k)
        if own:
            tl.store(plan.own_ids_ptr + assignments, ids, mask=assignments < S.max_tokens * S.top_k)
        invalid += ((ids < -1) | (ids >= S.num_ranks * S.num_local_experts)).to(tl.int32)
    if own:
        tl.store(plan.num_invalid_ptr, tl.sum(invalid, axis=0))


@triton.jit
def send_token(x, ids_ptr, token, count, not_failed, outgoing, rank, wire: tl.constexpr, S: tl.constexpr):
    """Send a token to each rank that has one of its experts, quantized if `S.scale_block` is not 0.

    Returns:
      The set of these ranks, as bits.
    """
    HIDDEN: tl.constexpr = S.hidden
    NUM_SCALES: tl.constexpr = S.num_scales
    SCALE_BLOCK: tl.constexpr = S.scale_block
    SEND_HIDDEN: tl.constexpr = S.tile.send_hidden
    row, row_scales = token.to(tl.int64) * HIDDEN, token.to(tl.int64) * NUM_SCALES
    lanes = tl.arange(0, SEND_HIDDEN)
    # Load the first columns while the destinations are computed.
    values = tl.load(tl.multiple_of(x.values_ptr + row + lanes, 16), mask=(lanes < HIDDEN) & (token < count), other=0.0)
    experts: tl.constexpr = S.num_ranks * S.num_local_experts
    ranks = destinations(ids_ptr, token * S.top_k, token < count, S.top_k, S.num_local_experts, experts) * not_failed
    if ranks != 0:
        for h in tl.static_range(0, HIDDEN, SEND_HIDDEN):
            columns = h + lanes
            if h > 0:
                values = tl.load(tl.multiple_of(x.values_ptr + row + columns, 16), mask=columns < HIDDEN, other=0.0)
            if SCALE_BLOCK > 0:
                blocks = h // SCALE_BLOCK + tl.arange(0, SEND_HIDDEN // SCALE_BLOCK)
                sent, scales = quantize(tl.reshape(values, (1, SEND_HIDDEN)), 1, SEND_HIDDEN, SCALE_BLOCK)
                sent, scales = tl.reshape(sent, (SEND_HIDDEN,)), tl.reshape(scales, (SEND_HIDDEN // SCALE_BLOCK,))
            else:
                sent = values
            # Store at each destination, starting with the next rank.
            for step in range(S.num_ranks):
                peer_rank = (rank + 1 + step) % S.num_ranks
                if goes_to(ranks, peer_rank):
                    buffer = pick(outgoing, peer_rank)
                    target = part_of(buffer, S.values_offset, wire) + row + columns
                    tl.store(tl.multiple_of(target, 16), sent, mask=columns < HIDDEN)
                    if SCALE_BLOCK > 0:
                        target = part_of(buffer, S.scales_offset, tl.float32) + row_scales + blocks
                        tl.store(target, scales, mask=blocks < NUM_SCALES)
        # Scales of tokens that came quantized.
        if NUM_SCALES > 0 and SCALE_BLOCK == 0:
            blocks = tl.arange(0, S.tile.padded_scales)
            scales = tl.load(x.scales_ptr + row_scales + blocks, mask=blocks < NUM_SCALES)
            for step in range(S.num_ranks):
                peer_rank = (rank + 1 + step) % S.num_ranks
                if goes_to(ranks, peer_rank):
                    target = part_of(pick(outgoing, peer_rank), S.scales_offset, tl.float32) + row_scales + blocks
                    tl.store(target, scales, mask=blocks < NUM_SCALES)
    return ranks


@triton.jit
def ids_of(index, incoming, S: tl.constexpr):
    """Load the ids `[N, padded_top_k]` of tokens `index [N]` = source rank * num_tokens + token, and their mask."""
    buffers = pick_each(incoming, tl.minimum(index // S.num_tokens, S.num_ranks - 1))
    k = tl.arange(0, S.tile.padded_top_k)[None, :]
    exist = (index < S.num_ranks * S.num_tokens)[:, None] & (k < S.top_k)
    ids_ptr = part_of(buffers, S.ids_offset, tl.int32)[:, None] + (index % S.num_tokens * S.top_k)[:, None] + k
    return tl.load(ids_ptr, mask=exist, other=-1), exist


@triton.jit
def assign_rows(expert, incoming, launch, plan, S: tl.constexpr):
    """Give the tokens that name a local expert its rows, in order, and fill the expert's share of the handle.

    The share includes marking every num_local_experts-th token's assignments to other ranks as without a row. Unless
    direct, the task is counted when it is done.
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
        # Row: tokens before this one that name the expert.
        position = size + tl.cumsum(is_here, axis=0) - is_here
        row = first_row + position
        tl.store(plan.token_ptr + row, token, mask=is_here > 0)
        assignments = ((source * S.max_tokens + token) * S.top_k)[:, None] + tl.arange(0, S.tile.padded_top_k)[None, :]
        # Assignments to other ranks have no row here; tokens are shared among the experts.
        is_away = (ids < first) | (ids >= first + LOCAL_EXPERTS)
        has_no_row = exist & is_away & (index % LOCAL_EXPERTS == expert)[:, None]
        rows = tl.where(named, row.to(tl.int32)[:, None], -1)
        tl.store(plan.slot_row_ptr + assignments, rows, mask=named | has_no_row)
        size += tl.sum(is_here, axis=0)
        counts += tl.sum(tl.where(source[:, None] == lanes[None, :], is_here[:, None], 0), axis=0)
    tl.store(plan.sizes_ptr + expert, size)
    if not S.tile.direct:
        # Stores of all threads come before the count.
        tl.debug_barrier()
        tl.atomic_add(launch.control + DONE, 1, sem="release", scope="gpu")
    tl.store(plan.count_ptr + expert * NUM_RANKS + lanes, counts, mask=lanes < NUM_RANKS)
    tl.store(plan.start_ptr + expert * NUM_RANKS + lanes, tl.cumsum(counts, axis=0) - counts, mask=lanes < NUM_RANKS)
    # Rows past the size have no token.
    for start in range(0, NUM_RANKS * S.max_tokens, CHUNK):
        rows = start + tl.arange(0, CHUNK)
        past = (rows >= size) & (rows < NUM_RANKS * S.max_tokens)
        tl.store(plan.token_ptr + first_row + rows, tl.full((CHUNK,), -1, tl.int32), mask=past)


@triton.jit
def count_rows(index, incoming, rank, S: tl.constexpr):
    """Return the rows of one token, `[1, padded_top_k]`; -1 if it has none.

    A row is the number of earlier tokens that name the same expert.
    """
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
def clear_assignments(first, slot_row_ptr, S: tl.constexpr):
    """Mark assignments of tokens past num_tokens as without a row."""
    if S.max_tokens > S.num_tokens:
        index = first + tl.arange(0, SPAN)
        width: tl.constexpr = (S.max_tokens - S.num_tokens) * S.top_k
        assignments = index // width * (S.max_tokens * S.top_k) + S.num_tokens * S.top_k + index % width
        tl.store(slot_row_ptr + assignments, tl.full((SPAN,), -1, tl.int32), mask=index < S.num_ranks * width)


@triton.jit
def copy_tokens(rows, tokens, mask, buffer, out, S: tl.constexpr):
    """Copy tokens `[block_tokens]` from a buffer to `rows [block_tokens, padded_top_k]`."""
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
        scale = tl.arange(0, S.tile.padded_scales)[None, :]
        source = part_of(buffer, S.scales_offset, tl.float32) + tokens.to(tl.int64)[:, None] * NUM_SCALES + scale
        scales = tl.load(source, mask=mask[:, None] & (scale < NUM_SCALES))
        for k in tl.static_range(TOP_K):
            row = tl.max(tl.where(choice == k, rows, -1), axis=1)
            target = out.scales_ptr + row.to(tl.int64)[:, None] * NUM_SCALES + scale
            tl.store(target, scales, mask=(row >= 0)[:, None] & (scale < NUM_SCALES))


@triton.jit
def send_or_copy(index, S: tl.constexpr):
    """Return what task `index` of sends and copies does: a token to send, or a block to copy and its source's step.

    Unused values are -1. `lag` blocks of sends come first, then periods of one block of sends and its copies, then
    copies.
    """
    BLOCK_TOKENS: tl.constexpr = S.tile.block_tokens
    LAG: tl.constexpr = S.tile.lag
    lead: tl.constexpr = min(S.num_tokens, LAG * BLOCK_TOKENS)
    periods: tl.constexpr = max((S.num_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS - LAG, 0)
    period: tl.constexpr = BLOCK_TOKENS + S.num_ranks
    token, block, step = -1, -1, 0
    if index < lead:  # only sends
        token = index
    elif index < lead + periods * period:  # sends and copies in turn
        step = (index - lead) % period
        if step < BLOCK_TOKENS:
            token = lead + (index - lead) // period * BLOCK_TOKENS + step
        else:
            block, step = (index - lead) // period, step - BLOCK_TOKENS
    else:  # only copies
        step = (index - lead - periods * period) % S.num_ranks
        block = periods + (index - lead - periods * period) // S.num_ranks
    return token, block, step


@triton.jit
def low_latency_dispatch(x, ids_ptr, num_tokens_ptr, peers, out, plan, S: tl.constexpr, HEAP: tl.constexpr):
    """Dispatch `x [num_tokens, hidden]` to `out [num_local_experts, num_ranks * max_tokens, hidden]`; fill the plan.

    Rows past an expert's size are not written. FP8 tokens travel with `num_scales` scales each: those of `x`, or if
    `S.scale_block` is not 0 scales computed here per `scale_block` columns. If `S.has_num_tokens`, only the first
    `num_tokens []` tokens count.
    """
    launch, not_failed = open_launch(peers, HEAP)
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
    # Numbers of tasks: sends and copies together, then the first task of each kind.
    periods: tl.constexpr = max(blocks - LAG, 0)
    exchange: tl.constexpr = min(NUM_TOKENS, LAG * BLOCK_TOKENS) + periods * BLOCK_TOKENS + blocks * NUM_RANKS
    exchange_start: tl.constexpr = NUM_RANKS if S.tile.direct else NUM_RANKS + LOCAL_EXPERTS
    assign_start: tl.constexpr = NUM_RANKS + exchange if S.tile.direct else NUM_RANKS
    clear_start: tl.constexpr = NUM_RANKS + exchange + LOCAL_EXPERTS
    lanes = tl.arange(0, S.tile.padded_ranks)
    sources = tl.where(lanes < NUM_RANKS, lanes, 0)
    heard, assigned = 0, 0
    task = next_task(launch)
    while task < clear_start + (NUM_RANKS * (MAX_TOKENS - NUM_TOKENS) * TOP_K + SPAN - 1) // SPAN:
        token, block, step = -1, -1, 0
        began = stamp(HEAP)
        if (task >= exchange_start) & (task < exchange_start + exchange):
            token, block, step = send_or_copy(task - exchange_start, S)
        if task < NUM_RANKS:
            # ids: send all ids to one rank, then the ready handshake.
            peer_rank = (launch.rank + 1 + task) % NUM_RANKS
            buffer, own = pick(buffers.outgoing, peer_rank), peer_rank == launch.rank
            send_ids(ids_ptr, count, buffer, plan, own, not_failed, S)
            trace(launch, PUSH_EVENT, began, task, HEAP)
            # After a failure the set of ranks is empty.
            peer = tl.full((), 1, tl.int64) * not_failed << peer_rank.to(tl.int64)
            signal_ready_to(launch, buffers, peer, task, HEAP)
        elif task >= clear_start:
            # clear: the rest of the handle.
            clear_assignments((task - clear_start) * SPAN, plan.slot_row_ptr, S)
            trace(launch, ZERO_EVENT, began, task, HEAP)
        elif token >= 0:
            # send: one token to its destinations, and its flag.
            ranks = send_token(x, ids_ptr, token, count, not_failed, buffers.outgoing, launch.rank, wire, S)
            trace(launch, PUSH_EVENT, began, task, HEAP)
            if ranks != 0:
                publish_to(launch, buffers, ranks, 1 + token, task, HEAP)
        else:
            # Rows depend on the ids of all ranks: wait for them once per program.
            if heard == 0:
                not_failed = await_ready_of(launch, buffers.incoming, buffers.epochs, sources, not_failed, task, HEAP)
                heard = 1
            began = stamp(HEAP)
            if block < 0:
                # assign: give one expert's tokens their rows.
                assign_rows(task - assign_start, buffers.incoming, launch, plan, S)
                trace(launch, COUNT_EVENT, began, task, HEAP)
            else:
                # copy: sources in the order in which they send to this rank; the previous rank sends here first.
                source_rank = (launch.rank + NUM_RANKS - 1 - step) % NUM_RANKS
                buffer = pick(buffers.incoming, source_rank)
                tokens = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
                if S.tile.direct:
                    rows = count_rows(source_rank * NUM_TOKENS + block, buffers.incoming, launch.rank, S)
                else:
                    if assigned == 0:
                        done = launch.control + DONE
                        # Wait for the assign tasks, after a failure too: they always end, and rows would be undefined
                        # without them.
                        ended = await_flag(launch, done, LOCAL_EXPERTS, launch.rank, not_failed | 1, task, HEAP)
                        not_failed = not_failed & ended
                        assigned = 1
                        trace_exchange(launch, WAIT_EVENT, began, task, -1, OWN, HEAP)
                        began = stamp(HEAP)
                    k = tl.arange(0, S.tile.padded_top_k)[None, :]
                    assignments = ((source_rank * MAX_TOKENS + tokens) * TOP_K)[:, None] + k
                    inside = (tokens < NUM_TOKENS)[:, None] & (k < TOP_K)
                    rows = tl.load(plan.slot_row_ptr + assignments, mask=inside, other=-1)
                    # After a failure rows may be anything: keep them inside of the result.
                    rows = tl.where(rows < LOCAL_EXPERTS * NUM_RANKS * MAX_TOKENS, rows, -1)
                mask = tl.max(rows, axis=1) >= 0
                arriving = tl.max(tl.where(mask, tokens, -1), axis=0)
                if arriving >= 0:
                    # Replace masked-off tokens with a valid one, so that the wait below terminates.
                    tokens = tl.where(mask, tokens, arriving)
                    incoming = tl.full((BLOCK_TOKENS,), 0, tl.int64) + buffer
                    senders = tl.zeros((BLOCK_TOKENS,), tl.int32) + source_rank
                    expected = tl.zeros((BLOCK_TOKENS,), tl.int32) + pick(buffers.epochs, source_rank)
                    not_failed = await_flags(launch, incoming, 1 + tokens, expected, senders, not_failed, task, HEAP)
                    if not_failed != 0:
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
        # Give each expert one poisoned row: sizes stay usable.
        zeros = tl.zeros((S.tile.padded_ranks,), tl.int32)
        for expert in range(LOCAL_EXPERTS):
            tl.store(plan.sizes_ptr + expert, 1)
            tl.store(plan.start_ptr + expert * NUM_RANKS + lanes, zeros, mask=lanes < NUM_RANKS)
            tl.store(plan.count_ptr + expert * NUM_RANKS + lanes, zeros, mask=lanes < NUM_RANKS)


@triton.jit
def store_row(values, index, h, buffer, wire: tl.constexpr, S: tl.constexpr):
    """Store columns `[h, h + block_hidden)` of a row in a buffer, as row `index` of the sent data."""
    HIDDEN: tl.constexpr = S.hidden
    BLOCK_HIDDEN: tl.constexpr = S.tile.block_hidden
    columns = h + tl.arange(0, BLOCK_HIDDEN)
    if S.fp8:
        blocks = h // GROUP + tl.arange(0, BLOCK_HIDDEN // GROUP)
        values, scales = quantize(tl.reshape(values, (1, BLOCK_HIDDEN)), 1, BLOCK_HIDDEN)
        values = tl.reshape(values, (BLOCK_HIDDEN,))
        target = part_of(buffer, S.scales_offset, tl.float32) + index.to(tl.int64) * (HIDDEN // GROUP) + blocks
        tl.store(target, tl.reshape(scales, (BLOCK_HIDDEN // GROUP,)), mask=blocks < HIDDEN // GROUP)
    target = part_of(buffer, S.values_offset, wire) + index.to(tl.int64) * HIDDEN + columns
    tl.store(tl.multiple_of(target, 16), values.to(wire), mask=columns < HIDDEN)


@triton.jit
def load_row(exists, index, h, buffer, wire: tl.constexpr, SUM: tl.constexpr, S: tl.constexpr):
    """Load what `store_row` stored, as SUM; zero if there is none."""
    HIDDEN: tl.constexpr = S.hidden
    BLOCK_HIDDEN: tl.constexpr = S.tile.block_hidden
    columns = h + tl.arange(0, BLOCK_HIDDEN)
    source = part_of(buffer, S.values_offset, wire) + index.to(tl.int64) * HIDDEN + columns
    values = tl.load(tl.multiple_of(source, 16), mask=exists & (columns < HIDDEN), other=0.0)
    if S.fp8:
        blocks = h // GROUP + tl.arange(0, BLOCK_HIDDEN // GROUP)
        source = part_of(buffer, S.scales_offset, tl.float32) + index.to(tl.int64) * (HIDDEN // GROUP) + blocks
        scales = tl.load(source, mask=exists & (blocks < HIDDEN // GROUP), other=0.0)
        scales = tl.reshape(scales, (1, BLOCK_HIDDEN // GROUP))
        values = tl.reshape(dequantize(tl.reshape(values, (1, BLOCK_HIDDEN)), scales, 1, BLOCK_HIDDEN), (BLOCK_HIDDEN,))
    return values.to(SUM)


@triton.jit
def send_weights(weights_ptr, buffer, S: tl.constexpr):
    """Send this rank's router weights."""
    num_assignments: tl.constexpr = S.num_tokens * S.top_k
    target = part_of(buffer, S.weights_offset, weights_ptr.dtype.element_ty)
    for start in range(0, num_assignments, SPAN):
        assignments = start + tl.arange(0, SPAN)
        tl.store(
            target + assignments,
            tl.load(weights_ptr + assignments, mask=assignments < num_assignments),
            mask=assignments < num_assignments,
        )


@triton.jit
def send_sum(y_ptr, rows, weights, token, buffer, wire: tl.constexpr, SUM: tl.constexpr, S: tl.constexpr):
    """Send the weighted sum of the rows that a token has here, `rows [padded_top_k]`, in order of k."""
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
            # The weight of an assignment without a row may be anything, even NaN.
            total += values.to(SUM) * tl.where(row >= 0, pick(weights, k).to(SUM), 0.0)
        store_row(total, token, h, buffer, wire, S)


@triton.jit
def send_row(y_ptr, row, assignment, buffer, wire: tl.constexpr, S: tl.constexpr):
    """Send one row to its assignment."""
    for h in range(0, S.hidden, S.tile.block_hidden):
        columns = h + tl.arange(0, S.tile.block_hidden)
        source = tl.multiple_of(y_ptr + row.to(tl.int64) * S.hidden + columns, 16)
        values = tl.load(source, mask=columns < S.hidden, other=0.0)
        store_row(values, assignment, h, buffer, wire, S)


@triton.jit
def add_sums(out_ptr, token, ranks, incoming, wire: tl.constexpr, SUM: tl.constexpr, S: tl.constexpr):
    """Add the sums that each of `ranks` sent for a token, in rank order."""
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
    """Add the rows received for a token, times their weights, in order of k."""
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
            # The weight of an assignment without an expert may be anything, even NaN.
            total += row * tl.where(valid, pick(weights, k).to(SUM), 0.0)
        target = tl.multiple_of(out_ptr + token.to(tl.int64) * HIDDEN + columns, 16)
        tl.store(target, total.to(out_ptr.dtype.element_ty), mask=columns < HIDDEN)


@triton.jit
def low_latency_combine(
    y_ptr, slot_row_ptr, own_ids_ptr, weights_ptr, peers, out_ptr, S: tl.constexpr, HEAP: tl.constexpr
):
    """Combine `y [num_local_experts, num_ranks * max_tokens, hidden]` to `out [num_tokens, hidden]`.

    `weights` are `[num_tokens, top_k]`. The int32 arrays are those of the handle.
    """
    launch, not_failed = open_launch(peers, HEAP)
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
    # Only sends, then sends and sums in turn, then only sums.
    lead: tl.constexpr = NUM_RANKS + lag * sends
    mixed: tl.constexpr = (NUM_TOKENS - lag) * (sends + 1)
    hear: tl.constexpr = lead + mixed + lag
    lanes, choices = tl.arange(0, PADDED_RANKS), tl.arange(0, S.tile.padded_top_k)
    zeros = tl.zeros((PADDED_RANKS,), tl.int32)
    heard = tl.full((), 0, tl.int64)
    task = next_task(launch)
    while task <= hear:
        # What the task does: a token of a peer to send, or an own token to sum.
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
            if not_failed != 0:
                # ready: router weights go first, if peers need them for their sums.
                if SENDS_SUMS:
                    send_weights(weights_ptr, buffer, S)
                    trace(launch, PUSH_EVENT, began, task, HEAP)
                signal_ready_to(launch, buffers, peer, task, HEAP)
        elif task == hear:
            # hear: the launch may end only when all ranks have begun it.
            sources = tl.where(lanes < NUM_RANKS, lanes, 0)
            not_failed = await_ready_of(launch, buffers.incoming, buffers.epochs, sources, not_failed, task, HEAP)
        elif sent >= 0:
            assignments = (peer_rank * S.max_tokens + sent) * TOP_K
            if SENDS_SUMS:
                # send: the weighted sum of the token's rows here.
                rows = tl.load(slot_row_ptr + assignments + choices, mask=choices < TOP_K, other=-1)
                if tl.max(rows, axis=0) >= 0:
                    if heard & peer == 0:
                        # The sum needs the peer's weights: wait for its handshake once. All lanes poll the same word.
                        incoming = tl.full((PADDED_RANKS,), 0, tl.int64) + pick(buffers.incoming, peer_rank)
                        expected, senders = zeros + pick(buffers.epochs, peer_rank), zeros + peer_rank
                        not_failed = await_ready_of(launch, incoming, expected, senders, not_failed, task, HEAP)
                        heard = heard | peer
                    if not_failed != 0:
                        began = stamp(HEAP)
                        received = pick(buffers.incoming, peer_rank)
                        received_ptr = part_of(received, S.weights_offset, weights_ptr.dtype.element_ty)
                        weights = tl.load(received_ptr + sent * TOP_K + choices, mask=choices < TOP_K, other=0.0)
                        send_sum(y_ptr, rows, weights, sent, buffer, wire, SUM, S)
                        trace(launch, PUSH_EVENT, began, task, HEAP)
                        publish_to(launch, buffers, peer, 1 + sent, task, HEAP)
            else:
                # send: one row of the token.
                choice = step // NUM_RANKS
                row = tl.load(slot_row_ptr + assignments + choice)
                if (row >= 0) & (not_failed != 0):
                    assignment = sent * TOP_K + choice
                    send_row(y_ptr, row, assignment, buffer, wire, S)
                    trace(launch, PUSH_EVENT, began, task, HEAP)
                    publish_to(launch, buffers, peer, 1 + assignment, task, HEAP)
        elif summed >= 0:
            assignments = summed * TOP_K + choices
            # sum: wait for what the token's ranks send, then add it.
            experts = tl.load(own_ids_ptr + assignments, mask=choices < TOP_K, other=-1)
            weights = tl.load(weights_ptr + assignments, mask=choices < TOP_K, other=0.0)
            local_experts: tl.constexpr = S.num_local_experts
            num_experts: tl.constexpr = NUM_RANKS * local_experts
            ranks = destinations(own_ids_ptr, summed * TOP_K, summed < NUM_TOKENS, TOP_K, local_experts, num_experts)
            if ranks != 0:
                if SENDS_SUMS:
                    chosen = (lanes < NUM_RANKS) & goes_to(ranks, lanes)
                    # Lanes of ranks that send nothing poll the flag of one that does.
                    sources = tl.where(chosen, lanes, tl.max(tl.where(chosen, lanes, 0), axis=0))
                    flags = zeros + 1 + summed
                else:
                    chosen = (experts >= 0) & (experts < num_experts)
                    # Choices without an expert poll the flag of the last choice that has one.
                    existing = tl.where(chosen, choices, tl.max(tl.where(chosen, choices, 0), axis=0))
                    sources = tl.load(own_ids_ptr + summed * TOP_K + existing) // local_experts
                    flags = 1 + summed * TOP_K + existing
                incoming, expected = pick_each(buffers.incoming, sources), pick_each(buffers.epochs, sources)
                not_failed = await_flags(launch, incoming, flags, expected, sources, not_failed, task, HEAP)
            began = stamp(HEAP)
            if SENDS_SUMS:
                add_sums(out_ptr, summed, ranks, buffers.incoming, wire, SUM, S)
            else:
                add_rows(out_ptr, summed, experts, weights, buffers.incoming, wire, SUM, S)
            trace(launch, SUM_EVENT, began, task, HEAP)
        task = next_task(launch)
    if end_low_latency_launch(launch, HEAP):
        poison(out_ptr, NUM_TOKENS * S.hidden)
