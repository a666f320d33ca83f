"""Masked grouped GEMM and low-latency combine in one launch: rows go to the ranks of their tokens as they are computed.

A tile's epilogue stores each row in the low-latency buffer of its source, at the slot of the (token, k) that asked for
it; of a token that names an expert twice, at the first. When all programs have stored their tiles, the last one greets
all ranks, which is also how they hear from each other. Then each rank adds the rows of its tokens, times their weights,
in float32 and in order of k.

Shares of tiles are fixed, so that the loads of a tile begin before the one before it is stored. Sums wait for other
ranks, so only programs that see all programs of this launch begun take any; the last to begin always does. Thus no
program that has yet to begin can be what another rank waits for, and one resident program suffices.
"""

import triton
import triton.language as tl

from .failures import poison
from .low_latency_buffers import (
    await_greeting_of_each,
    end_low_latency_launch,
    greet,
    open_buffers,
    part_of,
    pick,
    pick_each,
)
from .masked import find_masked_tile, multiply_masked, number_masked_tasks
from .programs import all_begun, count_stored
from .protocol import next_task, open_launch
from .quantized_gemm import multiply_quantized
from .table import STARTED
from .tiles import num_turns, task_of_turn
from .trace import SUM_EVENT, TILE_EVENT, stamp, trace


@triton.jit
def slot_addresses(expert, row, size, outgoing, sources, dtype: tl.constexpr, S: tl.constexpr):
    """Addresses `[BM]` of rows of an expert in the buffers of their sources, 0 from row `size` on."""
    NUM_RANKS: tl.constexpr = S.num_ranks
    TOP_K: tl.constexpr = S.top_k
    BLOCK_M: tl.constexpr = S.gemm.tile.block_m
    rows = row + tl.arange(0, BLOCK_M)
    index = expert.to(tl.int64) * (NUM_RANKS * S.max_tokens) + rows
    token = tl.load(sources.token_ptr + index, mask=rows < size, other=-1)
    # Starts never decrease: the source is the last rank that starts at or before the row.
    source = tl.zeros((BLOCK_M,), tl.int32)
    for rank in tl.static_range(1, NUM_RANKS):
        source += (tl.load(sources.start_ptr + expert * NUM_RANKS + rank) <= rows).to(tl.int32)
    choices = tl.arange(0, S.padded_top_k)[None, :]
    slots = ((source * S.max_tokens + tl.maximum(token, 0)) * TOP_K)[:, None] + choices
    named = tl.load(sources.slot_row_ptr + slots, mask=(token >= 0)[:, None] & (choices < TOP_K), other=-1)
    k = tl.min(tl.where(named == index[:, None], choices, TOP_K), axis=1)
    offset = (token * TOP_K + k).to(tl.int64) * (S.hidden * dtype.primitive_bitwidth // 8)
    return tl.where((token >= 0) & (k < TOP_K), pick_each(outgoing, source) + S.values_offset + offset, 0)


@triton.jit
def add_received(out_ptr, own_ids_ptr, weights_ptr, token, h, incoming, S: tl.constexpr):
    """Adds columns `[h, h + BLOCK_H)` of the rows of a token in float32, each times its weight, in order of k."""
    HIDDEN: tl.constexpr = S.hidden
    TOP_K: tl.constexpr = S.top_k
    columns, choices = h + tl.arange(0, S.block_hidden), tl.arange(0, S.padded_top_k)
    ids = tl.load(own_ids_ptr + token * TOP_K + choices, mask=choices < TOP_K, other=-1)
    total = tl.zeros((S.block_hidden,), tl.float32)
    for k in tl.static_range(TOP_K):
        expert = tl.load(own_ids_ptr + token * TOP_K + k)
        valid = (expert >= 0) & (expert < S.num_ranks * S.num_local_experts)
        first = tl.min(tl.where(ids == expert, choices, k), axis=0)
        buffer = pick(incoming, tl.where(valid, expert // S.num_local_experts, 0))
        source = (
            part_of(buffer, S.values_offset, out_ptr.dtype.element_ty)
            + (token * TOP_K + first).to(tl.int64) * HIDDEN
            + columns
        )
        row = tl.load(tl.multiple_of(source, 16), mask=valid & (columns < HIDDEN), other=0.0)
        # The weight of a slot without an expert may be anything.
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
    """`lhs [L, W * M, depth]` and matrices `[L, H, depth]` to `out [T, H]`; scales as for `masked_grouped_gemm`.

    With QUANTIZED, of matrices in 8 or 4 bits, as for `quantized_masked_grouped_gemm`.

    With biases `[L, H]` of the product, or None.
    """
    launch, alive = open_launch(peers, HEAP)
    NUM_RANKS: tl.constexpr = S.num_ranks
    HIDDEN: tl.constexpr = S.hidden
    GEMM: tl.constexpr = S.gemm
    BLOCK_N: tl.constexpr = GEMM.tile.block_n
    SWAP_AB: tl.constexpr = GEMM.tile.swap_ab
    tl.atomic_add(launch.control + STARTED, 1, sem="relaxed", scope="gpu")
    buffers = open_buffers(launch, HEAP)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    group_ends = number_masked_tasks(sizes_ptr, GEMM)
    # After a failure nobody may be there to receive: no more stores, whatever the sums then are.
    for turn in tl.range(0, num_turns(tl.max(group_ends, axis=0)) * alive, flatten=True):
        began = stamp(HEAP)
        expert, row, size, column_tile = find_masked_tile(task_of_turn(turn), group_ends, sizes_ptr, GEMM)
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
        addresses = slot_addresses(expert, row, size, buffers.outgoing, sources, dtype, S)
        columns = (column + tl.arange(0, BLOCK_N))[None, :]
        target = tl.multiple_of(addresses.to(tl.pointer_type(dtype))[:, None] + columns, (16, 16))
        tl.store(target, total.to(dtype), mask=(addresses != 0)[:, None] & (columns < HIDDEN))
        trace(launch, TILE_EVENT, began, task_of_turn(turn), HEAP)
    if alive != 0:  # who has failed is missing in the count, so that nobody is told of rows that were not stored
        if count_stored(launch, 0):
            greet(launch, buffers, (tl.full((), 1, tl.int64) << NUM_RANKS) - 1, 0, HEAP)
    if all_begun(launch):
        blocks: tl.constexpr = (HIDDEN + S.block_hidden - 1) // S.block_hidden
        lanes = tl.arange(0, S.padded_ranks)
        task = next_task(launch)
        if task < S.num_tokens * blocks:
            ranks = tl.where(lanes < NUM_RANKS, lanes, 0)
            alive = await_greeting_of_each(launch, buffers.incoming, buffers.epochs, ranks, alive, task, HEAP)
        while task < S.num_tokens * blocks:
            began = stamp(HEAP)
            token, h = task // blocks, task % blocks * S.block_hidden
            add_received(out_ptr, sources.own_ids_ptr, weights_ptr, token, h, buffers.incoming, S)
            trace(launch, SUM_EVENT, began, task, HEAP)
            task = next_task(launch)
    if end_low_latency_launch(launch, HEAP):
        poison(out_ptr, S.num_tokens * HIDDEN)
