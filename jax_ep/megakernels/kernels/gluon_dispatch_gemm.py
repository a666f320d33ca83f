"""Dispatch + grouped GEMM in Gluon: the kernel of exchange_gemm.py with the GEMM of gluon_gemm16.py.

The first programs to start run the communication queue, with all of their threads of the first consumer, before they
start the roles that the others start at once:

    producer (1 warp)         takes tiles, hands them over, and copies weights by TMA
    gatherer (2 warps)        waits for the tokens of a tile's expert, and copies its rows by cp.async
    consumers (2 warpgroups)  multiply and store, as in gluon_gemm16.py

The gatherer keeps the addresses of the rows of a tile in shared memory, since its threads have 56 registers. Its copies
arrive at the barrier of a step by themselves, and the consumers put a fence before they multiply them. Waits for other
ranks are those of exchange_gemm.py, which argues that they end. Floor: the larger of link time and GEMM time.
"""

from __future__ import annotations

from typing import NamedTuple

import triton  # noqa: F401 - first and whole: other threads may be importing it
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from . import protocol
from .exchange_gemm import await_tokens, communicate
from .failures import QUEUE, STARTED, poison
from .gemm_structs import Pointer, Value
from .gluon_gemm import WAVE, allocate_tiles, arrive, next_tile, wait
from .gluon_gemm16 import (
    MOST_WAVES,
    Output,
    TokenWeights,
    allocate_pipeline,
    consume,
    part_layout,
    produce,
    weights_shape,
)
from .router_weights import clear_weights, store_row_weights
from .tiles import BOUND
from .trace import TILE_EVENT, stamp, trace

GATHERERS = gl.constexpr(2)  # warps
LISTED = gl.constexpr(256)  # rows: a power of two that a tile does not exceed
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [GATHERERS.value, 1], [1, 0]))  # of rows by the gatherer
REGISTERS = gl.constexpr((224, 56))  # of a thread of the second consumer, and of producer and gatherer


class Tokens(NamedTuple):
    """Where tokens and their weights are, and the rows that they have here."""

    own_ptr: Pointer  # [num_tokens, K] tokens of this rank
    received_ptr: Pointer  # [num_ranks * num_tokens, K] tokens of other ranks, in the heap
    weights_ptr: Pointer  # [num_tokens, top_k] weights of this rank's tokens, or None
    out_weights_ptr: Pointer  # [M] weights of rows, or None
    row_to_assignment_ptr: Pointer  # [M] assignment of each row; -1: padding
    order: Value  # `OrderedSends`


@gluon.jit
def list_rows(tokens, row, end, addresses, launch, S: gl.constexpr):
    """Store the addresses of the tokens of a tile's rows; 0 for no token.

    Tokens of this rank are in the caller's array, the others in the heap.
    """
    LIST: gl.constexpr = gl.BlockedLayout([1], [32], [GATHERERS], [0])
    ROW_BYTES: gl.constexpr = 2 * S.gemm.K
    rows = gl.arange(0, LISTED, LIST)
    assignment = gl.load(tokens.row_to_assignment_ptr + (row + rows), mask=row + rows < end, other=-1)
    token = gl.where(assignment < 0, 0, assignment // S.top_k)
    own = token // S.num_tokens == launch.rank
    first = gl.where(own, tokens.own_ptr.to(gl.int64), tokens.received_ptr.to(gl.int64))
    address = first + gl.where(own, token % S.num_tokens, token).to(gl.int64) * ROW_BYTES
    gl.barrier()  # the rows of the tile before have been copied
    addresses.store(gl.where(assignment >= 0, address, 0))
    gl.barrier()


@gluon.jit
def hand_over(barrier):
    """Let each thread arrive once its copies so far are complete; `await_step` puts the fence that wgmma needs."""
    gl.inline_asm("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", "r,~{memory}", [barrier])


@gluon.jit
def copy_rows(addresses, pipeline, count, dtype: gl.constexpr, WAVES: gl.constexpr, S: gl.constexpr):
    """Copy the rows of the steps of a tile; return the number of steps so far."""
    columns = gl.expand_dims(gl.arange(0, S.depth, gl.SliceLayout(0, COPY)), 0)
    for k in range(0, S.K, S.depth):
        slot = count % S.stages
        wait(pipeline.empty.index(slot), ((count // S.stages) & 1) ^ 1)
        for wave in gl.static_range(WAVES):
            # Read again in each step: registers would not suffice.
            rows = gl.expand_dims(addresses.slice(wave * WAVE, WAVE).load(gl.SliceLayout(1, COPY)), 1)
            exist = rows != 0
            if S.K % S.depth != 0:
                exist = exist & (columns < S.K - k)
            source = (rows + (k + columns) * 2).to(gl.pointer_type(dtype))
            source = gl.max_contiguous(gl.multiple_of(source, (1, 16)), (1, 8))  # 16 bytes of a row
            async_copy.async_load(pipeline.a.index(slot * MOST_WAVES + wave), source, exist)
        hand_over(pipeline.full.index(slot))
        count += 1
    return count


@gluon.jit
def gather(tokens, launch, not_failed, addresses, pipeline, tiles, S: gl.constexpr, HEAP: gl.constexpr):
    """Copy the rows of the tiles that the producer hands over, and store the weights of rows."""
    GEMM: gl.constexpr = S.gemm
    DTYPE: gl.constexpr = tokens.own_ptr.dtype.element_ty
    count = 0
    number = 0
    ready = -1
    row, column, end, code = next_tile(number, tiles)
    while code >= 0:
        group = code // 4
        if group < GEMM.num_groups:
            # First tile of an expert in this program: wait for the tokens that it needs.
            if group > ready:
                not_failed = await_tokens(launch, tokens.order, ready, group, not_failed, number, S, HEAP)
                ready = group
            began = stamp(HEAP)
            list_rows(tokens, row, end, addresses, launch, S)
            if code % 4 == 3:
                count = copy_rows(addresses, pipeline, count, DTYPE, 3, GEMM)
            elif code % 4 == 2:
                count = copy_rows(addresses, pipeline, count, DTYPE, 2, GEMM)
            else:
                count = copy_rows(addresses, pipeline, count, DTYPE, 1, GEMM)
            # The first column tile stores the router weights of its rows.
            if tokens.out_weights_ptr is not None:
                if column == 0:
                    store_row_weights(
                        tokens.weights_ptr, tokens.row_to_assignment_ptr, tokens.out_weights_ptr,
                        row, min(end - row, code % 4 * WAVE), launch, S, LISTED, HEAP,
                    )  # fmt: skip
            trace(launch, TILE_EVENT, began, number, HEAP)
        elif tokens.out_weights_ptr is not None:
            if column == 0:
                clear_weights(tokens.out_weights_ptr, tokens.row_to_assignment_ptr, row, LISTED, GEMM.M)
        arrive(tiles.empty.index(number % 2))
        number += 1
        row, column, end, code = next_tile(number, tiles)


@gluon.jit
def poison_result(output, S: gl.constexpr):
    """Fill the result with NaN."""
    block = output.staging.index(0)
    block.reshape((WAVE, S.part_n)).store(gl.full((WAVE, S.part_n), float("nan"), block.dtype, part_layout(S.part_n)))
    fence_async_shared()
    for row in range(0, S.M, WAVE):
        for column in range(0, S.N, S.part_n):
            tma.async_store(output.out, [BOUND, S.M, row - S.M + BOUND, column], block)
    tma.store_wait(0)


@gluon.jit
def dispatch_gemm16(
    x_ptr,  # [num_tokens, K]
    weights_ptr,  # [num_tokens, top_k], or None
    rhs,  # as for grouped_gemm16
    handle,
    order,
    peers,
    out,  # [M, N] bounded, blocks of 64 x part_n
    saved_ptr,  # [num_ranks * num_tokens, K] tokens with an expert here, if S.saves_tokens
    out_weights_ptr,  # [M], zero in padding rows, or None
    S: gl.constexpr,
    HEAP: gl.constexpr,
):
    """Multiply dispatched tokens with their experts' weights, as `dispatch_gemm` does.

    With activation, rhs and `out` are those of grouped_gemm16.
    """
    GEMM: gl.constexpr = S.gemm
    launch, not_failed = protocol.open_launch(peers, HEAP)
    received_ptr = protocol.data_of(launch, launch.device, x_ptr.dtype.element_ty, HEAP)
    # The first programs to start communicate until that queue is empty.
    if gl.atomic_add(launch.control + STARTED, 1, sem="relaxed", scope="gpu") < S.comm_programs:
        not_failed = communicate(
            x_ptr, weights_ptr, received_ptr, handle.topk_idx_ptr, order, saved_ptr, launch, not_failed, S, HEAP
        )
    b = rhs if GEMM.home_groups == 0 else rhs.home
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    ROWS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WAVE, GEMM.depth], DTYPE)
    A: gl.constexpr = [MOST_WAVES * GEMM.stages, WAVE, GEMM.depth]
    ARRIVALS: gl.constexpr = 1 + 32 * GATHERERS  # of the producer, and of the threads of the gatherer
    pipeline = allocate_pipeline(DTYPE, ROWS, b, A, weights_shape(GEMM), ARRIVALS, GEMM)
    tiles = allocate_tiles(8 + GATHERERS)
    addresses = gl.allocate_shared_memory(gl.int64, [LISTED], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    first_own = launch.rank * (S.num_tokens * S.top_k)
    epilogue = None
    if GEMM.activation is not None:
        arrived_ptr = protocol.data_of(launch, launch.device, weights_ptr.dtype.element_ty, HEAP, S.weights_offset)
        epilogue = TokenWeights(
            weights_ptr, arrived_ptr, handle.row_to_assignment_ptr, first_own, first_own + S.num_tokens * S.top_k
        )
    STAGING: gl.constexpr = [2, 1, 1, WAVE, GEMM.part_n]
    first = Output(out, epilogue, gl.allocate_shared_memory(out.dtype, STAGING, out.layout))
    second = Output(out, epilogue, gl.allocate_shared_memory(out.dtype, STAGING, out.layout))
    tokens = Tokens(x_ptr, received_ptr, weights_ptr, out_weights_ptr, handle.row_to_assignment_ptr, order)
    gl.warp_specialize(
        [
            (consume, (pipeline, tiles, first, 0, GEMM)),
            (consume, (pipeline, tiles, second, 1, GEMM)),
            (produce, (None, rhs, pipeline, tiles, handle.sizes_ptr, launch.control + QUEUE, GEMM)),
            (gather, (tokens, launch, not_failed, addresses, pipeline, tiles, S, HEAP)),
        ],
        [4, 1, GATHERERS],
        [REGISTERS[0], REGISTERS[1], REGISTERS[1]],
    )
    # After a failure no result may look valid.
    if protocol.end_launch(launch, HEAP):
        poison_result(first, GEMM)
        if S.saves_tokens:
            poison(saved_ptr, HEAP.num_ranks * S.num_tokens * GEMM.K)
        if out_weights_ptr is not None:
            poison(out_weights_ptr, GEMM.M)
