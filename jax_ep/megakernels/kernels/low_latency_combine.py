"""Low-latency combine in one launch: expert rows return to the ranks of their tokens, which sum them.

low_latency_buffers.py explains why a rank may send at once. Programs are equal and take tasks from one queue:

    ready    signal a rank that this launch has begun; num_ranks tasks
    send     send what the experts here have for one token of one rank; own tokens last
    sum      wait for a token's values and sum them; `lag` tokens behind the sends
    hear     wait for the handshakes of all ranks

If `tile.sends_sums`, the weighted sum of a token's rows here travels, rounded once; router weights then travel first,
with the handshake. Otherwise each row travels alone with its own flag: more bytes, but no row waits for another.

Waits. A sum waits for its flags; a send of a weighted sum waits for the handshake of its rank. It cannot deadlock:
both wait for tasks with smaller numbers there, and ready tasks wait for nothing. Sums add in a fixed order, of ranks or
of k, in float32 (float64 for float64).

Floor: one link latency, plus the larger of link time and reading the rows.
"""

import triton
import triton.language as tl

from . import low_latency_buffers as ll_buffers
from .failures import poison
from .protocol import next_task, open_launch
from .quantization import GROUP, dequantize, quantize
from .token_rows import destinations, goes_to
from .trace import PUSH_EVENT, SUM_EVENT, stamp, trace

# Assignments that a task processes at a time.
SPAN = tl.constexpr(1024)


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
        target = (
            ll_buffers.part_of(buffer, S.scales_offset, tl.float32) + index.to(tl.int64) * (HIDDEN // GROUP) + blocks
        )
        tl.store(target, tl.reshape(scales, (BLOCK_HIDDEN // GROUP,)), mask=blocks < HIDDEN // GROUP)
    target = ll_buffers.part_of(buffer, S.values_offset, wire) + index.to(tl.int64) * HIDDEN + columns
    tl.store(tl.multiple_of(target, 16), values.to(wire), mask=columns < HIDDEN)


@triton.jit
def load_row(exists, index, h, buffer, wire: tl.constexpr, SUM: tl.constexpr, S: tl.constexpr):
    """Load what `store_row` stored, as SUM; zero if there is none."""
    HIDDEN: tl.constexpr = S.hidden
    BLOCK_HIDDEN: tl.constexpr = S.tile.block_hidden
    columns = h + tl.arange(0, BLOCK_HIDDEN)
    source = ll_buffers.part_of(buffer, S.values_offset, wire) + index.to(tl.int64) * HIDDEN + columns
    values = tl.load(tl.multiple_of(source, 16), mask=exists & (columns < HIDDEN), other=0.0)
    if S.fp8:
        blocks = h // GROUP + tl.arange(0, BLOCK_HIDDEN // GROUP)
        source = (
            ll_buffers.part_of(buffer, S.scales_offset, tl.float32) + index.to(tl.int64) * (HIDDEN // GROUP) + blocks
        )
        scales = tl.load(source, mask=exists & (blocks < HIDDEN // GROUP), other=0.0)
        scales = tl.reshape(scales, (1, BLOCK_HIDDEN // GROUP))
        values = tl.reshape(dequantize(tl.reshape(values, (1, BLOCK_HIDDEN)), scales, 1, BLOCK_HIDDEN), (BLOCK_HIDDEN,))
    return values.to(SUM)


@triton.jit
def send_weights(weights_ptr, buffer, S: tl.constexpr):
    """Send this rank's router weights."""
    num_assignments: tl.constexpr = S.num_tokens * S.top_k
    target = ll_buffers.part_of(buffer, S.weights_offset, weights_ptr.dtype.element_ty)
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
    TOP_K: tl.constexpr = S.top_k
    for h in range(0, S.hidden, S.tile.block_hidden):
        columns = h + tl.arange(0, S.tile.block_hidden)
        total = tl.zeros((S.tile.block_hidden,), SUM)
        for k in tl.static_range(TOP_K):
            row = ll_buffers.pick(rows, k)
            source = tl.multiple_of(y_ptr + row.to(tl.int64) * S.hidden + columns, 16)
            values = tl.load(source, mask=(row >= 0) & (columns < S.hidden), other=0.0)
            # The weight of an assignment without a row may be anything, even NaN.
            total += values.to(SUM) * tl.where(row >= 0, ll_buffers.pick(weights, k).to(SUM), 0.0)
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
def store_result(out_ptr, total, token, columns, S: tl.constexpr):
    """Store columns of the sum of a token."""
    target = tl.multiple_of(out_ptr + token.to(tl.int64) * S.hidden + columns, 16)
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=columns < S.hidden)


@triton.jit
def add_sums(out_ptr, token, ranks, incoming, wire: tl.constexpr, SUM: tl.constexpr, S: tl.constexpr):
    """Add the sums that each of `ranks` sent for a token, in rank order."""
    NUM_RANKS: tl.constexpr = S.num_ranks
    for h in range(0, S.hidden, S.tile.block_hidden):
        columns = h + tl.arange(0, S.tile.block_hidden)
        total = tl.zeros((S.tile.block_hidden,), SUM)
        for source_rank in tl.static_range(NUM_RANKS):
            sends = (ranks >> source_rank) & 1 > 0
            buffer = ll_buffers.pick(incoming, source_rank)
            total += load_row(sends, token, h, buffer, wire, SUM, S)
        store_result(out_ptr, total, token, columns, S)


@triton.jit
def add_rows(out_ptr, token, experts, weights, incoming, wire: tl.constexpr, SUM: tl.constexpr, S: tl.constexpr):
    """Add the rows received for a token, times their weights, in order of k."""
    TOP_K: tl.constexpr = S.top_k
    for h in range(0, S.hidden, S.tile.block_hidden):
        columns = h + tl.arange(0, S.tile.block_hidden)
        total = tl.zeros((S.tile.block_hidden,), SUM)
        for k in tl.static_range(TOP_K):
            expert = ll_buffers.pick(experts, k)
            valid = (expert >= 0) & (expert < S.num_ranks * S.num_local_experts)
            buffer = ll_buffers.pick(incoming, tl.where(valid, expert // S.num_local_experts, 0))
            row = load_row(valid, token * S.top_k + k, h, buffer, wire, SUM, S)
            # The weight of an assignment without an expert may be anything, even NaN.
            total += row * tl.where(valid, ll_buffers.pick(weights, k).to(SUM), 0.0)
        store_result(out_ptr, total, token, columns, S)


@triton.jit
def low_latency_combine(
    y_ptr, assignment_to_row_ptr, own_topk_idx_ptr, weights_ptr, peers, out_ptr, S: tl.constexpr, HEAP: tl.constexpr
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
    buffers = ll_buffers.open_buffers(launch, HEAP)
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
        buffer = ll_buffers.pick(buffers.outgoing, peer_rank)
        began = stamp(HEAP)
        if task < NUM_RANKS:
            if not_failed != 0:
                # ready: router weights go first, if peers need them for their sums.
                if SENDS_SUMS:
                    send_weights(weights_ptr, buffer, S)
                    trace(launch, PUSH_EVENT, began, task, HEAP)
                ll_buffers.signal_ready_to(launch, buffers, peer, task, HEAP)
        elif task == hear:
            # hear: the launch may end only when all ranks have begun it.
            sources = tl.where(lanes < NUM_RANKS, lanes, 0)
            not_failed = ll_buffers.await_ready_of(
                launch, buffers.incoming, buffers.epochs, sources, not_failed, task, HEAP
            )
        elif sent >= 0:
            assignments = (peer_rank * S.max_tokens + sent) * TOP_K
            if SENDS_SUMS:
                # send: the weighted sum of the token's rows here.
                rows = tl.load(assignment_to_row_ptr + assignments + choices, mask=choices < TOP_K, other=-1)
                if tl.max(rows, axis=0) >= 0:
                    if heard & peer == 0:
                        # The sum needs the peer's weights: wait for its handshake once. All lanes poll the same word.
                        incoming = tl.full((PADDED_RANKS,), 0, tl.int64) + ll_buffers.pick(buffers.incoming, peer_rank)
                        expected, senders = zeros + ll_buffers.pick(buffers.epochs, peer_rank), zeros + peer_rank
                        not_failed = ll_buffers.await_ready_of(
                            launch, incoming, expected, senders, not_failed, task, HEAP
                        )
                        heard = heard | peer
                    if not_failed != 0:
                        began = stamp(HEAP)
                        received = ll_buffers.pick(buffers.incoming, peer_rank)
                        received_ptr = ll_buffers.part_of(received, S.weights_offset, weights_ptr.dtype.element_ty)
                        weights = tl.load(received_ptr + sent * TOP_K + choices, mask=choices < TOP_K, other=0.0)
                        send_sum(y_ptr, rows, weights, sent, buffer, wire, SUM, S)
                        trace(launch, PUSH_EVENT, began, task, HEAP)
                        ll_buffers.publish_to(launch, buffers, peer, 1 + sent, task, HEAP)
            else:
                # send: one row of the token.
                choice = step // NUM_RANKS
                row = tl.load(assignment_to_row_ptr + assignments + choice)
                if (row >= 0) & (not_failed != 0):
                    assignment = sent * TOP_K + choice
                    send_row(y_ptr, row, assignment, buffer, wire, S)
                    trace(launch, PUSH_EVENT, began, task, HEAP)
                    ll_buffers.publish_to(launch, buffers, peer, 1 + assignment, task, HEAP)
        elif summed >= 0:
            assignments = summed * TOP_K + choices
            # sum: wait for what the token's ranks send, then add it.
            experts = tl.load(own_topk_idx_ptr + assignments, mask=choices < TOP_K, other=-1)
            weights = tl.load(weights_ptr + assignments, mask=choices < TOP_K, other=0.0)
            local_experts: tl.constexpr = S.num_local_experts
            num_experts: tl.constexpr = NUM_RANKS * local_experts
            ranks = destinations(
                own_topk_idx_ptr, summed * TOP_K, summed < NUM_TOKENS, TOP_K, local_experts, num_experts
            )
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
                    sources = tl.load(own_topk_idx_ptr + summed * TOP_K + existing) // local_experts
                    flags = 1 + summed * TOP_K + existing
                incoming, expected = (
                    ll_buffers.pick_each(buffers.incoming, sources),
                    ll_buffers.pick_each(buffers.epochs, sources),
                )
                not_failed = ll_buffers.await_flags(launch, incoming, flags, expected, sources, not_failed, task, HEAP)
            began = stamp(HEAP)
            if SENDS_SUMS:
                add_sums(out_ptr, summed, ranks, buffers.incoming, wire, SUM, S)
            else:
                add_rows(out_ptr, summed, experts, weights, buffers.incoming, wire, SUM, S)
            trace(launch, SUM_EVENT, began, task, HEAP)
        task = next_task(launch)
    if ll_buffers.end_low_latency_launch(launch, HEAP):
        poison(out_ptr, NUM_TOKENS * S.hidden)
