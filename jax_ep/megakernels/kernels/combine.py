"""Combine: the rows of a token are summed on each expert rank, and what each rank sends is summed at the source.

Tasks: first announce; then, for each block of tokens, sum its rows for each peer and store the sums in that heap,
slot `[this rank, token]`, own tokens last; and, for the block LAG steps earlier, add what arrived, in rank order.
Sums run in float32 (float64 for float64), are rounded once to what travels, and once at the end. Values of rows for
the slots of tokens, such as gradients of router weights, travel with the sums of the tokens, if there are any.
"""

import triton
import triton.language as tl

from .exchange_structs import Rows
from .failures import poison
from .listed_sums import sum_listed, write_list
from .masks import destinations, goes_to
from .protocol import (
    announce,
    await_block_of_all,
    await_peers,
    data_of,
    end_launch,
    next_task,
    open_launch,
    peer_of,
    publish,
)
from .router_weights import return_weights, take_weights
from .trace import PUSH_EVENT, SUM_EVENT, stamp, trace, trace_exchange


@triton.jit
def list_rows(list_ptr, slot_row_ptr, ids_ptr, block, peer_rank, rank, S: tl.constexpr):
    """Lists the rows on this rank of a block of a peer's tokens, in order of k; returns how many.

    A token whose rows were all dropped still has a sum: the peer adds it up.
    """
    tokens = block * S.tile.block_tokens + tl.arange(0, S.tile.block_tokens)
    k = tl.arange(0, S.tile.padded_top_k)[None, :]
    slots = (peer_rank * S.num_tokens + tokens)[:, None] * S.top_k + k
    inside = (tokens < S.num_tokens)[:, None] & (k < S.top_k)
    expert = tl.load(ids_ptr + slots, mask=inside, other=-1)
    has_rows = (
        tl.max(
            ((expert >= rank * S.num_local_experts) & (expert < rank * S.num_local_experts + S.num_local_experts)).to(
                tl.int32
            ),
            axis=1,
        )
        > 0
    )
    rows = tl.load(slot_row_ptr + slots, mask=inside & has_rows[:, None], other=-1)
    return write_list(list_ptr, rows, rows >= 0, rank * S.num_tokens + tokens, has_rows, S.tile.list_length)


@triton.jit
def list_arrivals(list_ptr, ids_ptr, block, rank, S: tl.constexpr):
    """Lists the slots in which sums for a block of this rank's tokens arrive, in rank order; returns how many."""
    tokens = block * S.tile.block_tokens + tl.arange(0, S.tile.block_tokens)
    senders = destinations(
        ids_ptr,
        (rank * S.num_tokens + tokens) * S.top_k,
        tokens < S.num_tokens,
        S.top_k,
        S.num_local_experts,
        S.num_experts,
    )[:, None]
    source_rank = tl.arange(0, S.tile.padded_ranks)[None, :]
    sends = goes_to(senders, source_rank)
    slots = source_rank * S.num_tokens + tokens[:, None]
    return write_list(list_ptr, slots, sends, tokens, tokens < S.num_tokens, S.tile.list_length)


@triton.jit
def combine_blocks(
    y_ptr,
    weights_ptr,
    ids_ptr,
    slot_row_ptr,
    sums,
    out_weights_ptr,
    launch,
    alive,
    S: tl.constexpr,
    HEAP: tl.constexpr,
):
    """Tasks of the open launch until none is left; arguments as for `combine`."""
    SUM: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    wire: tl.constexpr = tl.float8e4nv if S.fp8 else y_ptr.dtype.element_ty
    NUM_RANKS: tl.constexpr = HEAP.num_ranks
    LAG: tl.constexpr = S.tile.lag
    num_blocks: tl.constexpr = (S.num_tokens + S.tile.block_tokens - 1) // S.tile.block_tokens
    list_ptr = sums.lists_ptr + tl.program_id(0) * 2 * S.tile.list_length
    begun = 0
    task = next_task(launch)
    while task < 1 + (num_blocks + LAG) * (NUM_RANKS + 1):
        step = (task - 1) // (NUM_RANKS + 1)
        index = (task - 1) % (NUM_RANKS + 1)
        if task == 0:
            announce(launch, HEAP)
        elif index < NUM_RANKS and step < num_blocks:
            block = step
            peer = peer_of(launch, (launch.rank + 1 + index) % NUM_RANKS)
            count = list_rows(list_ptr, slot_row_ptr, ids_ptr, block, peer.rank, launch.rank, S)
            if begun == 0:
                alive = await_peers(launch, alive, task, HEAP)
                begun = 1
            if alive != 0:
                values_ptr = data_of(launch, peer.device, wire, HEAP)
                scales_ptr = data_of(launch, peer.device, tl.float32, HEAP, S.scales_offset)
                began = stamp(HEAP)
                sum_listed(
                    list_ptr, count, Rows(y_ptr, scales_ptr), Rows(values_ptr, scales_ptr), SUM, S.hidden, S.tile
                )
                if weights_ptr is not None:
                    tokens = block * S.tile.block_tokens + tl.arange(0, S.tile.block_tokens)
                    return_weights(
                        weights_ptr, ids_ptr, slot_row_ptr, tokens, launch, peer, S, S.num_local_experts, HEAP
                    )
                trace_exchange(launch, PUSH_EVENT, began, task, peer.device, block, HEAP)
                publish(launch, peer, block, task, HEAP)
        elif index == NUM_RANKS and step >= LAG:
            block = step - LAG
            count = list_arrivals(list_ptr, ids_ptr, block, launch.rank, S)
            alive = await_block_of_all(launch, block, alive, task, HEAP)
            began = stamp(HEAP)
            values_ptr = data_of(launch, launch.device, wire, HEAP)
            scales_ptr = data_of(launch, launch.device, tl.float32, HEAP, S.scales_offset)
            arrived = Rows(values_ptr, scales_ptr)
            sum_listed(list_ptr, count, arrived, Rows(sums.out_ptr, scales_ptr), SUM, S.hidden, S.tile)
            if weights_ptr is not None:
                tokens = block * S.tile.block_tokens + tl.arange(0, S.tile.block_tokens)
                take_weights(ids_ptr, tokens, out_weights_ptr, launch, S, S.num_local_experts, HEAP)
            trace(launch, SUM_EVENT, began, task, HEAP)
        task = next_task(launch)


@triton.jit
def combine(
    y_ptr,
    weights_ptr,
    ids_ptr,
    slot_row_ptr,
    peers,
    sums,
    out_weights_ptr,
    S: tl.constexpr,
    HEAP: tl.constexpr,
):
    """`y [R, H]` to `Sums`; `ids` and `slot_row [W, T, K]` are those of the handle.

    Unless both are None, `weights [R]` go to the slots `out_weights [T, K]` of their rows, zero where there is none.
    """
    launch, alive = open_launch(peers, HEAP)
    combine_blocks(y_ptr, weights_ptr, ids_ptr, slot_row_ptr, sums, out_weights_ptr, launch, alive, S, HEAP)
    if end_launch(launch, HEAP):
        poison(sums.out_ptr, S.num_tokens * S.hidden)
        if weights_ptr is not None:
            poison(out_weights_ptr, S.num_tokens * S.top_k)
