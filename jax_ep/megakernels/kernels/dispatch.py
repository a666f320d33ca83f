"""Dispatch: send tokens to their experts' ranks and copy them to expert-major rows, in one launch.

Roles. All programs are equal and take tasks from one queue:

    task 0           signal the peers that this rank is ready
    step s, index 0  send block s of this rank's tokens to all peers and set its flags; copy own tokens to their rows
    step s, index i  wait for block s - lag of the i-th rank before this one, and copy it to its rows
    last             zero the padding rows

A token is read once, quantized if it travels as FP8, and stored in slot `[source rank, token]` of each destination's
heap, so no counts and no atomics are needed to place it. Router weights travel with their tokens, under the same flags.
On two ranks with lag 1:

    rank A                                                 rank B
    task 0: signal_ready         ------ handshake ------>  step 0, index 0: await_all_ready
    step 1, index 1: await_block <---- block 0, flag 0 --  dispatch_block(0), publish_to_all
    copy block 0 to its rows     <---- block 1, flag 1 --  step 1, index 0: dispatch_block(1), publish_to_all

Waits. A sending task waits for all peers' ready handshakes, once per program. A copying task waits for the flag of its
block. It cannot deadlock: the peer sends that block in a task with a smaller number, `lag` steps before the copy, and
sending waits only for handshakes, which are task 0. The lag gives a block time to arrive before it is awaited.

Floor: the link must carry each token once per destination rank; local memory traffic is one read per token received
and one write per row.
"""

import triton
import triton.language as tl

from . import protocol
from .exchange_structs import Rows
from .failures import poison
from .quantization import GROUP, dequantize, quantize, scale_offsets
from .router_weights import clear_weights, push_weights, weights_to_rows
from .token_rows import clear_padding, copy_to_rows, destinations, goes_to, send_mask, store_rows, store_scales
from .trace import COPY_EVENT, PUSH_EVENT, ZERO_EVENT, stamp, trace, trace_exchange


@triton.jit
def dispatch_block(
    x_ptr,
    weights_ptr,
    topk_idx_ptr,
    assignment_to_row_ptr,
    out,
    out_weights_ptr,
    launch,
    block,
    S: tl.constexpr,
    HEAP: tl.constexpr,
):
    """Store a block of this rank's tokens in the heaps of its destinations, and own tokens in their rows."""
    wire: tl.constexpr = tl.float8e4nv if S.fp8 else x_ptr.dtype.element_ty
    HIDDEN: tl.constexpr = S.hidden
    BLOCK_TOKENS: tl.constexpr = S.tile.block_tokens
    BLOCK_HIDDEN: tl.constexpr = S.tile.block_hidden
    NUM_RANKS: tl.constexpr = HEAP.num_ranks
    tokens = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    slots = launch.rank * S.num_tokens + tokens
    # The set of each token's destination ranks, as bits.
    ranks = destinations(
        topk_idx_ptr, slots * S.top_k, tokens < S.num_tokens, S.top_k, S.num_local_experts, S.num_experts
    )
    for h in range(0, HIDDEN, BLOCK_HIDDEN):
        # Read the columns once for all destinations.
        columns = h + tl.arange(0, BLOCK_HIDDEN)[None, :]
        inside = columns < HIDDEN
        source = tl.multiple_of(x_ptr + tokens.to(tl.int64)[:, None] * HIDDEN + columns, (16, 16))
        values = tl.load(source, mask=(ranks != 0)[:, None] & inside, other=0.0)
        if S.fp8:
            values, scales = quantize(values, BLOCK_TOKENS, BLOCK_HIDDEN)
            offsets, exists = scale_offsets(slots, h, HIDDEN, BLOCK_HIDDEN)
        # Store them at each peer that has an expert of the token.
        for step in tl.static_range(1, NUM_RANKS):
            peer = protocol.peer_of(launch, (launch.rank + step) % NUM_RANKS)
            mask = goes_to(ranks, peer.rank)[:, None]
            row_ptr = protocol.data_of(launch, peer.device, wire, HEAP) + slots.to(tl.int64)[:, None] * HIDDEN
            tl.store(tl.multiple_of(row_ptr + columns, (16, 16)), values, mask=mask & inside)
            if S.fp8:
                scales_ptr = protocol.data_of(launch, peer.device, tl.float32, HEAP, S.scales_offset)
                tl.store(scales_ptr + offsets, scales, mask=mask & exists)
        # Own tokens skip the heap, and are rounded like the others.
        own = goes_to(ranks, launch.rank)
        if S.quantized:
            store_scales(scales, assignment_to_row_ptr + slots * S.top_k, own, out.scales_ptr, h, S)
        elif S.fp8:
            values = dequantize(values, scales, BLOCK_TOKENS, BLOCK_HIDDEN).to(x_ptr.dtype.element_ty)
        store_rows(values, assignment_to_row_ptr + slots * S.top_k, own, out.values_ptr, columns, inside, S)
    if weights_ptr is not None:
        # Send the router weights along the same routes.
        for step in tl.static_range(1, NUM_RANKS):
            peer = protocol.peer_of(launch, (launch.rank + step) % NUM_RANKS)
            push_weights(weights_ptr, tokens, goes_to(ranks, peer.rank), launch, peer, S, HEAP)
        own_rows_ptr = assignment_to_row_ptr + launch.rank * (S.num_tokens * S.top_k)
        weights_to_rows(weights_ptr, own_rows_ptr, tokens, tokens < S.num_tokens, out_weights_ptr, S.top_k)


@triton.jit
def dispatch(
    x_ptr,
    weights_ptr,
    topk_idx_ptr,
    assignment_to_row_ptr,
    row_to_assignment_ptr,
    peers,
    out_ptr,
    out_scales_ptr,
    out_weights_ptr,
    S: tl.constexpr,
    HEAP: tl.constexpr,
):
    """Dispatch `x [num_tokens, hidden]` to `out [num_rows, hidden]`; the int32 arrays are those of the handle.

    If `S.quantized`, rows stay FP8 with scales in `out_scales [num_rows, hidden / 128]`. If `S.clears_padding`, rows
    without a token become zero. Unless both are None, `weights [num_tokens, top_k]` go to `out_weights [num_rows]`,
    zero where there is no token.
    """
    launch, not_failed = protocol.open_launch(peers, HEAP)
    out = Rows(out_ptr, out_scales_ptr)
    NUM_RANKS: tl.constexpr = HEAP.num_ranks
    BLOCK_TOKENS: tl.constexpr = S.tile.block_tokens
    BLOCK_ROWS: tl.constexpr = S.tile.block_rows
    LAG: tl.constexpr = S.tile.lag
    wire: tl.constexpr = tl.float8e4nv if S.fp8 else x_ptr.dtype.element_ty
    num_blocks: tl.constexpr = (S.num_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    # A step sends one block and copies one block of each peer.
    steps_end: tl.constexpr = 1 + (num_blocks + LAG) * NUM_RANKS
    clears: tl.constexpr = S.clears_padding or weights_ptr is not None
    num_tasks: tl.constexpr = steps_end + ((S.num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS if clears else 0)
    peers_ready = 0
    task = protocol.next_task(launch)
    while task < num_tasks:
        step = (task - 1) // NUM_RANKS
        index = (task - 1) % NUM_RANKS
        if task == 0:
            protocol.signal_ready(launch, HEAP)
        elif task >= steps_end:
            # Zero a block of padding rows. These tasks come last, so that they do not delay the link.
            began = stamp(HEAP)
            if S.clears_padding:
                clear_padding(out_ptr, row_to_assignment_ptr, (task - steps_end) * BLOCK_ROWS, S)
            if weights_ptr is not None:
                clear_weights(
                    out_weights_ptr, row_to_assignment_ptr, (task - steps_end) * BLOCK_ROWS, BLOCK_ROWS, S.num_rows
                )
            trace(launch, ZERO_EVENT, began, task, HEAP)
        elif index == 0:
            # Send a block to all peers.
            if step < num_blocks:
                # Once per program: wait until the peers' heaps are free of earlier launches.
                if peers_ready == 0:
                    not_failed = protocol.await_all_ready(launch, not_failed, task, HEAP)
                    peers_ready = 1
                if not_failed != 0:
                    began = stamp(HEAP)
                    dispatch_block(
                        x_ptr,
                        weights_ptr,
                        topk_idx_ptr,
                        assignment_to_row_ptr,
                        out,
                        out_weights_ptr,
                        launch,
                        step,
                        S,
                        HEAP,
                    )
                    trace_exchange(launch, PUSH_EVENT, began, task, -1, step, HEAP)
                    protocol.publish_to_all(launch, step, task, HEAP)
        elif step >= LAG:
            # Copy a received block, in the order in which peers send to this rank.
            block = step - LAG
            source = protocol.peer_of(launch, (launch.rank + NUM_RANKS - index) % NUM_RANKS)
            not_failed = protocol.await_block(launch, source, block, not_failed, task, HEAP)
            began = stamp(HEAP)
            slots = source.rank * S.num_tokens + block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
            first_ids, inside = slots * S.top_k, slots < (source.rank + 1) * S.num_tokens
            # Only tokens with an expert here have been sent.
            mask = send_mask(topk_idx_ptr, first_ids, inside, launch.rank, S.top_k, S.num_local_experts)
            scales_ptr = protocol.data_of(launch, launch.device, tl.float32, HEAP, S.scales_offset)
            received = Rows(protocol.data_of(launch, launch.device, wire, HEAP), scales_ptr)
            copy_to_rows(received, slots, mask, assignment_to_row_ptr, out, S)
            if weights_ptr is not None:
                arrived_ptr = protocol.data_of(
                    launch, launch.device, weights_ptr.dtype.element_ty, HEAP, S.weights_offset
                )
                weights_to_rows(arrived_ptr, assignment_to_row_ptr, slots, mask, out_weights_ptr, S.top_k)
            trace_exchange(launch, COPY_EVENT, began, task, source.device, block, HEAP)
        task = protocol.next_task(launch)
    # After a failure no result may look valid.
    if protocol.end_launch(launch, HEAP):
        poison(out_ptr, S.num_rows * S.hidden)
        if S.quantized:
            poison(out_scales_ptr, S.num_rows * (S.hidden // GROUP))
        if weights_ptr is not None:
            poison(out_weights_ptr, S.num_rows)
