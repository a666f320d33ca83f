"""Combine: sum each token's expert rows at the expert's rank, send one sum per rank, and add the sums at the source.

Roles. All programs are equal and take tasks from one queue:

    task 0                  signal the peers that this rank is ready
    step s, index < ranks   sum the rows here of block s of a peer's tokens, store the sums in its heap, in slot
                            `[this rank, token]`, and set the block's flag; this rank's own tokens come last
    step s, last index      wait for block s - lag of all ranks, and add its sums in rank order

Waits. A sending task waits for all ready handshakes, once per program; an adding task waits for the flags of its block.
It cannot deadlock: each rank sends that block in tasks with smaller numbers, `lag` steps before.

Sums run in float32 (float64 for float64) in a fixed order, so results are deterministic. They are rounded once to the
wire dtype and once at the end. Row values, such as gradients of router weights, travel with the sums.

Floor: the link carries one row per token and destination rank; local memory is read once per expert row.
"""

import triton
import triton.language as tl

from . import protocol
from .exchange_structs import Rows
from .failures import poison
from .listed_sums import sum_listed, write_list
from .router_weights import return_weights, take_weights
from .token_rows import destinations, goes_to
from .trace import PUSH_EVENT, SUM_EVENT, stamp, trace, trace_exchange


@triton.jit
def list_rows(list_ptr, assignment_to_row_ptr, topk_idx_ptr, block, peer_rank, rank, S: tl.constexpr):
    """List the rows here of a block of a peer's tokens, in order of k; return how many.

    A token whose rows were all dropped still has a sum, zero, because the peer adds it up.
    """
    tokens = block * S.tile.block_tokens + tl.arange(0, S.tile.block_tokens)
    k = tl.arange(0, S.tile.padded_top_k)[None, :]
    assignments = (peer_rank * S.num_tokens + tokens)[:, None] * S.top_k + k
    inside = (tokens < S.num_tokens)[:, None] & (k < S.top_k)
    expert = tl.load(topk_idx_ptr + assignments, mask=inside, other=-1)
    # A token has a sum here if one of its experts is here.
    first_expert = rank * S.num_local_experts
    is_here = (expert >= first_expert) & (expert < first_expert + S.num_local_experts)
    has_rows = tl.max(is_here.to(tl.int32), axis=1) > 0
    rows = tl.load(assignment_to_row_ptr + assignments, mask=inside & has_rows[:, None], other=-1)
    return write_list(list_ptr, rows, rows >= 0, rank * S.num_tokens + tokens, has_rows, S.tile.list_length)


@triton.jit
def list_arrivals(list_ptr, topk_idx_ptr, block, rank, S: tl.constexpr):
    """List the slots in which sums for a block of this rank's tokens arrive, in rank order; return how many."""
    tokens = block * S.tile.block_tokens + tl.arange(0, S.tile.block_tokens)
    # The ranks that a token was dispatched to are those that send a sum back.
    first_ids = (rank * S.num_tokens + tokens) * S.top_k
    inside = tokens < S.num_tokens
    senders = destinations(topk_idx_ptr, first_ids, inside, S.top_k, S.num_local_experts, S.num_experts)[:, None]
    source_rank = tl.arange(0, S.tile.padded_ranks)[None, :]
    sends = goes_to(senders, source_rank)
    slots = source_rank * S.num_tokens + tokens[:, None]
    return write_list(list_ptr, slots, sends, tokens, inside, S.tile.list_length)


@triton.jit
def combine(
    y_ptr,
    weights_ptr,
    topk_idx_ptr,
    assignment_to_row_ptr,
    peers,
    sums,
    out_weights_ptr,
    S: tl.constexpr,
    HEAP: tl.constexpr,
):
    """Combine `y [num_rows, hidden]` to `sums`; the int32 arrays are those of the handle.

    Unless both are None, values `weights [num_rows]` of rows go to `out_weights [num_tokens, top_k]`, the assignments
    of their rows; assignments without a row get zero.
    """
    launch, not_failed = protocol.open_launch(peers, HEAP)
    # Accumulate in float32, or in float64 for float64.
    SUM: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    wire: tl.constexpr = tl.float8e4nv if S.fp8 else y_ptr.dtype.element_ty
    NUM_RANKS: tl.constexpr = HEAP.num_ranks
    LAG: tl.constexpr = S.tile.lag
    num_blocks: tl.constexpr = (S.num_tokens + S.tile.block_tokens - 1) // S.tile.block_tokens
    list_ptr = sums.lists_ptr + tl.program_id(0) * 2 * S.tile.list_length
    peers_ready = 0
    task = protocol.next_task(launch)
    while task < 1 + (num_blocks + LAG) * (NUM_RANKS + 1):
        step = (task - 1) // (NUM_RANKS + 1)
        index = (task - 1) % (NUM_RANKS + 1)
        if task == 0:
            protocol.signal_ready(launch, HEAP)
        elif index < NUM_RANKS and step < num_blocks:
            # Sum a block's rows for one peer and store the sums in its heap.
            block = step
            peer = protocol.peer_of(launch, (launch.rank + 1 + index) % NUM_RANKS)
            count = list_rows(list_ptr, assignment_to_row_ptr, topk_idx_ptr, block, peer.rank, launch.rank, S)
            # Once per program: peers no longer use their heaps for earlier launches.
            if peers_ready == 0:
                not_failed = protocol.await_all_ready(launch, not_failed, task, HEAP)
                peers_ready = 1
            if not_failed != 0:
                values_ptr = protocol.data_of(launch, peer.device, wire, HEAP)
                scales_ptr = protocol.data_of(launch, peer.device, tl.float32, HEAP, S.scales_offset)
                began = stamp(HEAP)
                target = Rows(values_ptr, scales_ptr)
                sum_listed(list_ptr, count, Rows(y_ptr, scales_ptr), target, SUM, S.hidden, S.tile)
                if weights_ptr is not None:
                    tokens = block * S.tile.block_tokens + tl.arange(0, S.tile.block_tokens)
                    local_experts: tl.constexpr = S.num_local_experts
                    return_weights(
                        weights_ptr, topk_idx_ptr, assignment_to_row_ptr, tokens, launch, peer, S, local_experts, HEAP
                    )
                trace_exchange(launch, PUSH_EVENT, began, task, peer.device, block, HEAP)
                protocol.publish(launch, peer, block, task, HEAP)
        elif index == NUM_RANKS and step >= LAG:
            # Add up what all ranks have sent for a block of own tokens.
            block = step - LAG
            count = list_arrivals(list_ptr, topk_idx_ptr, block, launch.rank, S)
            not_failed = protocol.await_block_of_all(launch, block, not_failed, task, HEAP)
            began = stamp(HEAP)
            values_ptr = protocol.data_of(launch, launch.device, wire, HEAP)
            scales_ptr = protocol.data_of(launch, launch.device, tl.float32, HEAP, S.scales_offset)
            arrived = Rows(values_ptr, scales_ptr)
            sum_listed(list_ptr, count, arrived, Rows(sums.out_ptr, scales_ptr), SUM, S.hidden, S.tile)
            if weights_ptr is not None:
                tokens = block * S.tile.block_tokens + tl.arange(0, S.tile.block_tokens)
                take_weights(topk_idx_ptr, tokens, out_weights_ptr, launch, S, S.num_local_experts, HEAP)
            trace(launch, SUM_EVENT, began, task, HEAP)
        task = protocol.next_task(launch)
    # After a failure no result may look valid.
    if protocol.end_launch(launch, HEAP):
        poison(sums.out_ptr, S.num_tokens * S.hidden)
        if weights_ptr is not None:
            poison(out_weights_ptr, S.num_tokens * S.top_k)
