"""Low-latency dispatch in one launch: data crosses the link once, without a handshake before it.

low_latency_buffers.py explains why a rank may send at once. The rows of an expert are packed and ordered by source
rank, then token. A token that names an expert twice has one row there. All programs are equal and take tasks from one
queue:

    ids      send the ids of all tokens to a rank, then the ready handshake; num_ranks tasks
    assign   give the tokens of one local expert their rows and fill the handle; num_local_experts tasks
    send     quantize a token, store it at each rank that has one of its experts, and set its flag there
    copy     wait for the flags of a block's tokens and copy them to their rows; `lag` blocks behind the sends
    clear    fill the rest of the handle, for tokens past num_tokens; num_ranks tasks

Waits. Assign and copy tasks wait for the ids of all ranks, once per program; copies also for the flags of their tokens
and, unless direct, for all assign tasks of this launch. With few tokens (`tile.direct`) each copy computes its rows
itself, and assign tasks come last. It cannot deadlock: ids and sends have smaller numbers and wait for nothing.

Floor: one link latency, plus the larger of link time and writing the rows.
"""

import triton
import triton.language as tl

from . import low_latency_buffers as ll_buffers
from .failures import DONE, poison
from .protocol import await_flag, count_task, next_task, open_launch
from .quantization import quantize
from .token_rows import destinations, goes_to
from .trace import COPY_EVENT, COUNT_EVENT, OWN, PUSH_EVENT, WAIT_EVENT, ZERO_EVENT, stamp, trace, trace_exchange

# Assignments that a task processes at a time.
SPAN = tl.constexpr(1024)


@triton.jit
def send_ids(topk_idx_ptr, count, buffer, plan, own, not_failed, S: tl.constexpr):
    """Send the ids of the first `count` tokens, and -1 for the others.

    For its own buffer, a rank also stores them in the handle and counts invalid ones.
    """
    invalid = tl.zeros((SPAN,), tl.int32)
    for start in range(0, S.max_tokens * S.top_k, SPAN):
        assignments = start + tl.arange(0, SPAN)
        ids = tl.load(topk_idx_ptr + assignments, mask=assignments // S.top_k < count, other=-1)
        if not_failed != 0:
            exists = assignments < S.num_tokens * S.top_k
            tl.store(ll_buffers.part_of(buffer, S.ids_offset, tl.int32) + assignments, ids, mask=exists)
        if own:
            tl.store(plan.own_topk_idx_ptr + assignments, ids, mask=assignments < S.max_tokens * S.top_k)
        invalid += ((ids < -1) | (ids >= S.num_ranks * S.num_local_experts)).to(tl.int32)
    if own:
        tl.store(plan.num_invalid_ptr, tl.sum(invalid, axis=0))


@triton.jit
def send_token(x, topk_idx_ptr, token, count, not_failed, outgoing, rank, wire: tl.constexpr, S: tl.constexpr):
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
    ranks = (
        destinations(topk_idx_ptr, token * S.top_k, token < count, S.top_k, S.num_local_experts, experts) * not_failed
    )
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
                    buffer = ll_buffers.pick(outgoing, peer_rank)
                    target = ll_buffers.part_of(buffer, S.values_offset, wire) + row + columns
                    tl.store(tl.multiple_of(target, 16), sent, mask=columns < HIDDEN)
                    if SCALE_BLOCK > 0:
                        target = ll_buffers.part_of(buffer, S.scales_offset, tl.float32) + row_scales + blocks
                        tl.store(target, scales, mask=blocks < NUM_SCALES)
        # Scales of tokens that came quantized.
        if NUM_SCALES > 0 and SCALE_BLOCK == 0:
            blocks = tl.arange(0, S.tile.padded_scales)
            scales = tl.load(x.scales_ptr + row_scales + blocks, mask=blocks < NUM_SCALES)
            for step in range(S.num_ranks):
                peer_rank = (rank + 1 + step) % S.num_ranks
                if goes_to(ranks, peer_rank):
                    target = (
                        ll_buffers.part_of(ll_buffers.pick(outgoing, peer_rank), S.scales_offset, tl.float32)
                        + row_scales
                        + blocks
                    )
                    tl.store(target, scales, mask=blocks < NUM_SCALES)
    return ranks


@triton.jit
def ids_of(index, incoming, S: tl.constexpr):
    """Load the ids `[N, padded_top_k]` of tokens `index [N]` = source rank * num_tokens + token, and their mask."""
    buffers = ll_buffers.pick_each(incoming, tl.minimum(index // S.num_tokens, S.num_ranks - 1))
    k = tl.arange(0, S.tile.padded_top_k)[None, :]
    exist = (index < S.num_ranks * S.num_tokens)[:, None] & (k < S.top_k)
    topk_idx_ptr = (
        ll_buffers.part_of(buffers, S.ids_offset, tl.int32)[:, None] + (index % S.num_tokens * S.top_k)[:, None] + k
    )
    return tl.load(topk_idx_ptr, mask=exist, other=-1), exist


@triton.jit
def assign_rows(expert, incoming, launch, plan, S: tl.constexpr):
    """Give the tokens that name a local expert its rows, in order, and fill the expert's share of the handle.

    The share includes every num_local_experts-th token's assignments to other ranks, which get row -1. Unless direct,
    the task is counted when it is done.
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
        stored = named | (exist & is_away & (index % LOCAL_EXPERTS == expert)[:, None])
        tl.store(plan.assignment_to_row_ptr + assignments, tl.where(named, row.to(tl.int32)[:, None], -1), mask=stored)
        size += tl.sum(is_here, axis=0)
        counts += tl.sum(tl.where(source[:, None] == lanes[None, :], is_here[:, None], 0), axis=0)
    tl.store(plan.sizes_ptr + expert, size)
    if not S.tile.direct:
        count_task(launch.control + DONE)
    tl.store(plan.count_ptr + expert * NUM_RANKS + lanes, counts, mask=lanes < NUM_RANKS)
    tl.store(plan.start_ptr + expert * NUM_RANKS + lanes, tl.cumsum(counts, axis=0) - counts, mask=lanes < NUM_RANKS)
    # Rows past the size have no token.
    for start in range(0, NUM_RANKS * S.max_tokens, CHUNK):
        rows = start + tl.arange(0, CHUNK)
        past = (rows >= size) & (rows < NUM_RANKS * S.max_tokens)
        tl.store(plan.token_ptr + first_row + rows, tl.full((CHUNK,), -1, tl.int32), mask=past)


@triton.jit
def count_rows(index, incoming, rank, S: tl.constexpr):
    """Return the rows of one token, `[1, padded_top_k]`; -1 without an expert here.

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
def clear_assignments(source, assignment_to_row_ptr, S: tl.constexpr):
    """Mark assignments of a source rank's tokens past num_tokens as without a row.

    One range at a time: a division of the index becomes packed 16-bit additions, whose constants ptxas 12.9 and 13.0
    drop if one half of the sum is not used.
    """
    first: tl.constexpr = S.num_tokens * S.top_k
    end: tl.constexpr = S.max_tokens * S.top_k
    for start in range(first, end, SPAN):
        index = start + tl.arange(0, SPAN)
        tl.store(assignment_to_row_ptr + source * end + index, tl.full((SPAN,), -1, tl.int32), mask=index < end)


@triton.jit
def copy_tokens(rows, tokens, mask, buffer, out, S: tl.constexpr):
    """Copy tokens `[block_tokens]` from a buffer to `rows [block_tokens, padded_top_k]`."""
    HIDDEN: tl.constexpr = S.hidden
    TOP_K: tl.constexpr = S.top_k
    NUM_SCALES: tl.constexpr = S.num_scales
    choice = tl.arange(0, S.tile.padded_top_k)[None, :]
    values_ptr = ll_buffers.part_of(buffer, S.values_offset, out.values_ptr.dtype.element_ty)
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
        source = (
            ll_buffers.part_of(buffer, S.scales_offset, tl.float32) + tokens.to(tl.int64)[:, None] * NUM_SCALES + scale
        )
        scales = tl.load(source, mask=mask[:, None] & (scale < NUM_SCALES))
        for k in tl.static_range(TOP_K):
            row = tl.max(tl.where(choice == k, rows, -1), axis=1)
            target = out.scales_ptr + row.to(tl.int64)[:, None] * NUM_SCALES + scale
            tl.store(target, scales, mask=(row >= 0)[:, None] & (scale < NUM_SCALES))


@triton.jit
def send_or_copy(index, S: tl.constexpr):
    """Return what task `index` of sends and copies does: a token to send, or a block to copy and its source's step.

    Unused values are -1. First come `lag` blocks of sends, then periods of one block of sends and one block of copies
    from each rank, then the remaining copies.
    """
    BLOCK_TOKENS: tl.constexpr = S.tile.block_tokens
    LAG: tl.constexpr = S.tile.lag
    lead: tl.constexpr = min(S.num_tokens, LAG * BLOCK_TOKENS)
    periods: tl.constexpr = max((S.num_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS - LAG, 0)
    period: tl.constexpr = BLOCK_TOKENS + S.num_ranks
    token, block, step = -1, -1, 0
    if index < lead:  # only sends
        token = index
    elif index < lead + periods * period:  # sends and copies alternate
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
def low_latency_dispatch(x, topk_idx_ptr, num_tokens_ptr, peers, out, plan, S: tl.constexpr, HEAP: tl.constexpr):
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
    buffers = ll_buffers.open_buffers(launch, HEAP)
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
    ids_arrived, rows_assigned = 0, 0
    task = next_task(launch)
    while task < clear_start + (NUM_RANKS if MAX_TOKENS > NUM_TOKENS else 0):
        token, block, step = -1, -1, 0
        began = stamp(HEAP)
        if (task >= exchange_start) & (task < exchange_start + exchange):
            token, block, step = send_or_copy(task - exchange_start, S)
        if task < NUM_RANKS:
            # ids: send all ids to one rank, then the ready handshake.
            peer_rank = (launch.rank + 1 + task) % NUM_RANKS
            buffer, own = ll_buffers.pick(buffers.outgoing, peer_rank), peer_rank == launch.rank
            send_ids(topk_idx_ptr, count, buffer, plan, own, not_failed, S)
            trace(launch, PUSH_EVENT, began, task, HEAP)
            # After a failure the set of ranks is empty.
            peer = tl.full((), 1, tl.int64) * not_failed << peer_rank.to(tl.int64)
            ll_buffers.signal_ready_to(launch, buffers, peer, task, HEAP)
        elif task >= clear_start:
            # clear: the rest of the handle.
            clear_assignments(task - clear_start, plan.assignment_to_row_ptr, S)
            trace(launch, ZERO_EVENT, began, task, HEAP)
        elif token >= 0:
            # send: one token to its destinations, and its flag.
            ranks = send_token(x, topk_idx_ptr, token, count, not_failed, buffers.outgoing, launch.rank, wire, S)
            trace(launch, PUSH_EVENT, began, task, HEAP)
            if ranks != 0:
                ll_buffers.publish_to(launch, buffers, ranks, 1 + token, task, HEAP)
        else:
            # Rows depend on the ids of all ranks: wait for them once per program.
            if ids_arrived == 0:
                not_failed = ll_buffers.await_ready_of(
                    launch, buffers.incoming, buffers.epochs, sources, not_failed, task, HEAP
                )
                ids_arrived = 1
            began = stamp(HEAP)
            if block < 0:
                # assign: give one expert's tokens their rows.
                assign_rows(task - assign_start, buffers.incoming, launch, plan, S)
                trace(launch, COUNT_EVENT, began, task, HEAP)
            else:
                # copy: sources in the order in which they send to this rank; the previous rank sends here first.
                source_rank = (launch.rank + NUM_RANKS - 1 - step) % NUM_RANKS
                buffer = ll_buffers.pick(buffers.incoming, source_rank)
                tokens = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
                if S.tile.direct:
                    rows = count_rows(source_rank * NUM_TOKENS + block, buffers.incoming, launch.rank, S)
                else:
                    if rows_assigned == 0:
                        done = launch.control + DONE
                        # Wait for the assign tasks, after a failure too: they always end, and rows would be undefined
                        # without them.
                        ended = await_flag(launch, done, LOCAL_EXPERTS, launch.rank, not_failed | 1, task, HEAP)
                        not_failed = not_failed & ended
                        rows_assigned = 1
                        trace_exchange(launch, WAIT_EVENT, began, task, -1, OWN, HEAP)
                        began = stamp(HEAP)
                    k = tl.arange(0, S.tile.padded_top_k)[None, :]
                    assignments = ((source_rank * MAX_TOKENS + tokens) * TOP_K)[:, None] + k
                    exists = (tokens < NUM_TOKENS)[:, None] & (k < TOP_K)
                    rows = tl.load(plan.assignment_to_row_ptr + assignments, mask=exists, other=-1)
                    # After a failure rows may be anything: keep them inside of the result.
                    rows = tl.where(rows < LOCAL_EXPERTS * NUM_RANKS * MAX_TOKENS, rows, -1)
                mask = tl.max(rows, axis=1) >= 0
                arriving = tl.max(tl.where(mask, tokens, -1), axis=0)
                if arriving >= 0:
                    # Replace masked-off tokens with a valid one, so that the wait below terminates.
                    tokens = tl.where(mask, tokens, arriving)
                    incoming = tl.full((BLOCK_TOKENS,), 0, tl.int64) + buffer
                    senders = tl.zeros((BLOCK_TOKENS,), tl.int32) + source_rank
                    expected = tl.zeros((BLOCK_TOKENS,), tl.int32) + ll_buffers.pick(buffers.epochs, source_rank)
                    not_failed = ll_buffers.await_flags(
                        launch, incoming, 1 + tokens, expected, senders, not_failed, task, HEAP
                    )
                    if not_failed != 0:
                        began = stamp(HEAP)
                        copy_tokens(rows, tokens, mask, buffer, out, S)
                        trace(launch, COPY_EVENT, began, task, HEAP)
        task = next_task(launch)
    if ll_buffers.end_low_latency_launch(launch, HEAP):
        poison(out.values_ptr, LOCAL_EXPERTS * NUM_RANKS * MAX_TOKENS * S.hidden)
        if S.num_scales > 0:
            poison(out.scales_ptr, LOCAL_EXPERTS * NUM_RANKS * MAX_TOKENS * S.num_scales)
        poison(plan.token_ptr, LOCAL_EXPERTS * NUM_RANKS * MAX_TOKENS)
        poison(plan.assignment_to_row_ptr, NUM_RANKS * MAX_TOKENS * TOP_K)
        poison(plan.own_topk_idx_ptr, MAX_TOKENS * TOP_K)
        poison(plan.num_invalid_ptr, 1)
        # Give each expert one poisoned row: sizes stay usable.
        zeros = tl.zeros((S.tile.padded_ranks,), tl.int32)
        for expert in range(LOCAL_EXPERTS):
            tl.store(plan.sizes_ptr + expert, 1)
            tl.store(plan.start_ptr + expert * NUM_RANKS + lanes, zeros, mask=lanes < NUM_RANKS)
            tl.store(plan.count_ptr + expert * NUM_RANKS + lanes, zeros, mask=lanes < NUM_RANKS)
