"""Masked grouped GEMM and low-latency combine in one launch: rows go to the ranks of their tokens as they are computed.

Roles. Programs are equal and go through three steps:

1. Compute a fixed share of the GEMM's tiles. The epilogue stores each row in the low-latency buffer of its source, at
   the assignment that asked for it; if a token names an expert twice, at the first one. Shares are fixed, so the loads
   of a tile begin before the previous tile is stored.
2. Count itself. The last program to count signals all ranks, which also serves as the ready handshake.
3. Take tokens from a queue and add their rows, times the router weights, in float32 and in order of k.

Waits. Only sums wait, for the handshakes of all ranks. It cannot deadlock: only programs that see all programs of this
launch started take sums, and the last one to start always does. So no program that has yet to start is one that
another rank waits for, and one resident program suffices.

Floor: reading all weights once, as in masked.py, then one link latency.
"""

import triton
import triton.language as tl

from . import low_latency_buffers as ll_buffers
from . import protocol
from .failures import STARTED, poison
from .masked import find_masked_tile, multiply_masked, number_masked_tasks
from .quantized_gemm import multiply_quantized
from .tiles import num_own_tasks, own_task
from .trace import SUM_EVENT, TILE_EVENT, stamp, trace


@triton.jit
def source_addresses(expert, row, size, outgoing, sources, dtype: tl.constexpr, S: tl.constexpr):
    """Return the addresses `[block_m]` of an expert's rows in the buffers of their sources; 0 from row `size` on."""
    NUM_RANKS: tl.constexpr = S.num_ranks
    TOP_K: tl.constexpr = S.top_k
    BLOCK_M: tl.constexpr = S.gemm.tile.block_m
    rows = row + tl.arange(0, BLOCK_M)
    index = expert.to(tl.int64) * (NUM_RANKS * S.max_tokens) + rows
    token = tl.load(sources.token_ptr + index, mask=rows < size, other=-1)
    # Rows are ordered by source: the source is the last rank that starts at or before the row.
    source = tl.zeros((BLOCK_M,), tl.int32)
    for rank in tl.static_range(1, NUM_RANKS):
        source += (tl.load(sources.start_ptr + expert * NUM_RANKS + rank) <= rows).to(tl.int32)
    choices = tl.arange(0, S.padded_top_k)[None, :]
    assignments = ((source * S.max_tokens + tl.maximum(token, 0)) * TOP_K)[:, None] + choices
    # The first of the token's assignments that has this row.
    named = tl.load(
        sources.assignment_to_row_ptr + assignments, mask=(token >= 0)[:, None] & (choices < TOP_K), other=-1
    )
    k = tl.min(tl.where(named == index[:, None], choices, TOP_K), axis=1)
    offset = (token * TOP_K + k).to(tl.int64) * (S.hidden * dtype.primitive_bitwidth // 8)
    return tl.where((token >= 0) & (k < TOP_K), ll_buffers.pick_each(outgoing, source) + S.values_offset + offset, 0)


@triton.jit
def add_received(out_ptr, own_topk_idx_ptr, weights_ptr, token, h, incoming, S: tl.constexpr):
    """Add columns `[h, h + block_hidden)` of a token's rows in float32, times their weights, in order of k."""
    HIDDEN: tl.constexpr = S.hidden
    TOP_K: tl.constexpr = S.top_k
    columns, choices = h + tl.arange(0, S.block_hidden), tl.arange(0, S.padded_top_k)
    ids = tl.load(own_topk_idx_ptr + token * TOP_K + choices, mask=choices < TOP_K, other=-1)
    total = tl.zeros((S.block_hidden,), tl.float32)
    for k in tl.static_range(TOP_K):
        expert = tl.load(own_topk_idx_ptr + token * TOP_K + k)
        valid = (expert >= 0) & (expert < S.num_ranks * S.num_local_experts)
        # If the token names an expert twice, the row is at the first assignment.
        first = tl.min(tl.where(ids == expert, choices, k), axis=0)
        buffer = ll_buffers.pick(incoming, tl.where(valid, expert // S.num_local_experts, 0))
        source = (
            ll_buffers.part_of(buffer, S.values_offset, out_ptr.dtype.element_ty)
            + (token * TOP_K + first).to(tl.int64) * HIDDEN
            + columns
        )
        row = tl.load(tl.multiple_of(source, 16), mask=valid & (columns < HIDDEN), other=0.0)
        # The weight of an assignment without an expert may be anything, even NaN.
        total += row.to(tl.float32) * tl.where(valid, tl.load(weights_ptr + token * TOP_K + k).to(tl.float32), 0.0)
    target = tl.multiple_of(out_ptr + token.to(tl.int64) * HIDDEN + columns, 16)
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=columns < HIDDEN)


@triton.jit
def low_latency_gemm_combine(
    lhs,
    rhs,
    lhs_scales_ptr,
    rhs_scales_ptr,
    sizes_ptr,
    sources,
    weights_ptr,
    bias_ptr,
    peers,
    out_ptr,
    S: tl.constexpr,
    HEAP: tl.constexpr,
):
    """Multiply `lhs [num_local_experts, num_ranks * max_tokens, K]` with weights and combine the rows.

    The result is `out [num_tokens, hidden]`. Weights are `[num_local_experts, hidden, K]`; scales as for
    `masked_grouped_gemm`, or if `S.quantized` as for `quantized_masked_grouped_gemm`. `bias_ptr` points to biases
    `[num_local_experts, hidden]`, or is None.
    """
    launch, not_failed = protocol.open_launch(peers, HEAP)
    NUM_RANKS: tl.constexpr = S.num_ranks
    HIDDEN: tl.constexpr = S.hidden
    GEMM: tl.constexpr = S.gemm
    BLOCK_N: tl.constexpr = GEMM.tile.block_n
    SWAP_AB: tl.constexpr = GEMM.tile.swap_ab
    tl.atomic_add(launch.control + STARTED, 1, sem="relaxed", scope="gpu")
    buffers = ll_buffers.open_buffers(launch, HEAP)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    group_ends = number_masked_tasks(sizes_ptr, GEMM)
    # After a failure compute no tiles: a peer may no longer be there to receive.
    for i in tl.range(0, num_own_tasks(tl.max(group_ends, axis=0)) * not_failed, flatten=True):
        began = stamp(HEAP)
        expert, row, size, column_tile = find_masked_tile(own_task(i), group_ends, sizes_ptr, GEMM)
        column = column_tile * BLOCK_N
        if S.quantized:
            total = multiply_quantized(lhs, rhs, rhs_scales_ptr, lhs_scales_ptr, expert, expert, row, column, GEMM)
        else:
            total = multiply_masked(lhs, rhs, lhs_scales_ptr, rhs_scales_ptr, expert, row, column, GEMM)
            if SWAP_AB:
                total = tl.trans(total)
        if bias_ptr is not None:
            lanes = column + tl.arange(0, BLOCK_N)
            bias = tl.load(bias_ptr + expert.to(tl.int64) * HIDDEN + lanes, mask=lanes < HIDDEN, other=0.0)
            total += bias.to(tl.float32)[None, :]
        # Store the tile's rows at their sources.
        addresses = source_addresses(expert, row, size, buffers.outgoing, sources, dtype, S)
        columns = (column + tl.arange(0, BLOCK_N))[None, :]
        target = tl.multiple_of(addresses.to(tl.pointer_type(dtype))[:, None] + columns, (16, 16))
        tl.store(target, total.to(dtype), mask=(addresses != 0)[:, None] & (columns < HIDDEN))
        trace(launch, TILE_EVENT, began, own_task(i), HEAP)
    # The last program signals all ranks. A failed program does not count, so that no rank takes missing rows for stored
    # ones.
    if not_failed != 0:
        if protocol.count_stored(launch):
            ll_buffers.signal_ready_to(launch, buffers, (tl.full((), 1, tl.int64) << NUM_RANKS) - 1, 0, HEAP)
    # Sum rows of this rank's tokens; the first task waits for all ranks.
    if protocol.all_programs_started(launch):
        blocks: tl.constexpr = (HIDDEN + S.block_hidden - 1) // S.block_hidden
        lanes = tl.arange(0, S.padded_ranks)
        task = protocol.next_task(launch)
        if task < S.num_tokens * blocks:
            ranks = tl.where(lanes < NUM_RANKS, lanes, 0)
            not_failed = ll_buffers.await_ready_of(
                launch, buffers.incoming, buffers.epochs, ranks, not_failed, task, HEAP
            )
        while task < S.num_tokens * blocks:
            began = stamp(HEAP)
            token, h = task // blocks, task % blocks * S.block_hidden
            add_received(out_ptr, sources.own_topk_idx_ptr, weights_ptr, token, h, buffers.incoming, S)
            trace(launch, SUM_EVENT, began, task, HEAP)
            task = protocol.next_task(launch)
    if ll_buffers.end_low_latency_launch(launch, HEAP):
        poison(out_ptr, S.num_tokens * HIDDEN)
