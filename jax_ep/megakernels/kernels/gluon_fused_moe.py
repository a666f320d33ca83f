"""The layer of gated experts on one device in one launch, in Gluon: prepacked 4-bit weights and few bfloat16 tokens.

The tasks and their three phases are those of fused_moe.py; the GEMM is that of gluon_quantized.py, with a tile of 128
columns of the weights and `S.tile_m` assignments of one expert. Columns of the first GEMM are 64 gates and their 64 up
values. Roles in a program:

    producer (1 warp)        takes tasks, finds the assignments of a block, copies packed weights and scales by TMA
    gatherer (2 warps)       copies the rows of a block by cp.async: tokens, or hidden rows once these are complete
    consumer (1 warpgroup)   decodes, multiplies, activates and stores; sums rows over k, once these are complete
    helper (1 warpgroup)     with `S.consumers` of 2, multiplies every second step for the consumer

Waits. Within a program each wait is for an earlier step or tile of the same program; the consumer also waits for the
helper's sums of a tile, and the helper until those of the tile before have been taken. If the launch routes tokens, a
program polls their counter before its roles start. The gatherer polls a counter per block, the consumer one counter of
all row tasks. All of these wait for tasks of earlier phases, which have smaller numbers and have been taken. Each
program handles its tasks in order, so any order and number of resident programs finishes. The producer never waits for
other programs: weights of the second GEMM arrive while hidden rows are still computed. Polls have a timeout; values
whose wait expired are NaN.

Floor: reading the packed weights once at memory bandwidth. Every program counts the assignments of each expert itself,
and finds those of a block by a scan over all ids, so there is no sort before.

Source: the task queue as in Composable Kernel's fused MoE; the decoding GEMM as in Marlin and Machete.
"""

from __future__ import annotations

from typing import NamedTuple

import triton  # noqa: F401 - first and whole: other threads may be importing it
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .activation import activate, factor_of, limit_gate
from .fused_moe import TIMEOUT_NS
from .gemm_structs import Pointer, Value
from .gluon_gemm import Tiles, allocate_tiles, arrive, next_tile, send_tile, wait
from .gluon_quantized import COLUMNS, MMA_SYNC_ROWS, ROWS_K, STEP, WORDS, Pipeline, multiply, sums_layout
from .route import choose_experts

HALF = gl.constexpr(64)  # columns of gates of a tile, and of a copy of weights
GATHERERS = gl.constexpr(2)  # warps
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [GATHERERS.value, 1], [1, 0]))  # of rows by the gatherer
# Tasks, as the producer names them to the other roles. Task ROWS + p adds part p of K.
END = gl.constexpr(-1)
HIDDEN = gl.constexpr(0)
SUMS = gl.constexpr(1)
ROWS = gl.constexpr(2)


class Weights(NamedTuple):
    """Descriptors of the weights of one GEMM, in blocks of HALF columns."""

    words: Pointer  # [num_experts * N, K / 8] uint32, blocks of HALF x WORDS
    scales: Pointer  # [num_experts * steps, N], blocks of 1 x HALF


class Inputs(NamedTuple):
    """Inputs of the layer that are read by pointers."""

    x_ptr: Pointer  # [num_tokens, hidden] bfloat16
    topk_idx_ptr: Pointer  # [num_tokens, top_k] int32
    weights_ptr: Pointer  # [num_tokens, top_k] float32


class RoutedInputs(NamedTuple):
    """Inputs of the layer whose launch chooses the experts."""

    x_ptr: Pointer  # [num_tokens, hidden] bfloat16
    logits_ptr: Pointer  # [num_tokens, num_experts]
    bias_ptr: Pointer  # [num_experts] float32, or unused
    mask_ptr: Pointer  # [num_tokens] bool, or unused


class Outputs(NamedTuple):
    """Results, and intermediate rows in order of assignments."""

    hidden_ptr: Pointer  # [num_tokens * top_k, intermediate] bfloat16
    rows_ptr: Pointer  # [num_tokens * top_k, k_splits, hidden]
    out_ptr: Pointer  # [num_tokens, hidden]
    topk_idx_ptr: Pointer  # [num_tokens, top_k] expert ids that the launch chooses; else unused
    weights_ptr: Pointer  # [num_tokens, top_k] float32, their router weights


class Partial(NamedTuple):
    """Sums that the second warpgroup of consumers hands to the first, in shared memory, and their barriers."""

    sums: Value  # [COLUMNS, S.tile_m] float32
    full: Value  # [1]
    empty: Value  # [1]


class Blocks(NamedTuple):
    """A tile of the producer: task, expert, block and column in `tiles`, and the assignments of the block."""

    tiles: Tiles
    assignments: Value  # [2, 2 * S.tile_m] int32 in shared memory; -1: none; the second half is unused
    routed: Value  # whether all tokens have their experts: the wait for them has not expired


@gluon.jit
def count_task(counter_ptr):
    """Count a warp that has stored its share of a task, for those that wait for it."""
    gl.inline_asm(
        "{ .reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; bar.warp.sync -1; "
        "@p red.release.gpu.global.add.u32 [$0], 1; }",
        "l,~{memory}",
        [counter_ptr],
    )


@gluon.jit
def count_routed_task(counter_ptr, blocks, S: gl.constexpr):
    """Count a task of rows whose tokens have their experts; else those that wait for it give NaN."""
    if S.router is None:
        count_task(counter_ptr)
    else:
        if blocks.routed:
            count_task(counter_ptr)


@gluon.jit
def route_tokens(inputs, outputs, counters_ptr, S: gl.constexpr):
    """Choose the experts of tokens; return the next task, and whether all tokens have theirs."""
    task = gl.atomic_add(counters_ptr, 1, sem="relaxed", scope="gpu")
    while task < S.num_tokens:
        choose_experts(inputs, task, outputs.topk_idx_ptr, outputs.weights_ptr, S)
        count_task(counters_ptr + 2)
        task = gl.atomic_add(counters_ptr, 1, sem="relaxed", scope="gpu")
    expected = 4 * S.num_tokens  # warps
    routed = gl.atomic_poll(counters_ptr + 2, expected, sem="acquire", scope="gpu", timeout_ns=TIMEOUT_NS)
    gl.barrier()
    return task - S.num_tokens, routed


@gluon.jit
def count_assignments(topk_idx_ptr, S: gl.constexpr):
    """Return the number of assignments of each expert, `[S.bins]` int32 in shared memory."""
    BINS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    counts = gl.allocate_shared_memory(gl.int32, [S.bins], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    counts.store(gl.zeros((S.bins,), gl.int32, BINS))
    slots = gl.arange(0, S.slots, BINS)
    ids = gl.load(topk_idx_ptr + slots, mask=slots < S.num_tokens * S.top_k, other=-1)
    exist = (ids >= 0) & (ids < S.num_experts)
    counts.atomic_scatter_add(gl.full((S.slots,), 1, gl.int32, BINS), gl.where(exist, ids, 0), 0, mask=exist)
    return counts


@gluon.jit
def list_assignments(topk_idx_ptr, expert, first, target, S: gl.constexpr):
    """Store up to S.tile_m assignments of an expert, from its `first` on, in `target`; -1 where there are no more."""
    LIST: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    IDS: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    target.store(gl.full((2 * S.tile_m,), -1, gl.int32, LIST))
    # The place of an assignment is the number of those before it.
    first = -first
    for start in range(0, S.slots, 128):
        slots = start + gl.arange(0, 128, IDS)
        ids = gl.load(topk_idx_ptr + slots, mask=slots < S.num_tokens * S.top_k, other=-1)
        mine = (ids == expert).to(gl.int32)
        place = first + gl.cumsum(mine, axis=0) - mine
        listed = (mine != 0) & (place >= 0) & (place < S.tile_m)
        target.scatter(slots, gl.where(listed, place, S.tile_m), 0)  # the others go to the unused half
        first += gl.sum(mine, axis=0)
    gl.barrier()  # before one lane hands the tile over


@gluon.jit
def copy_weights(
    weights, row, second_row, scale_row, column, second_column, first, steps, pipeline, count, S: gl.constexpr
):
    """Copy packed weights and scales of `steps` steps of K from step `first` on; return the next step."""
    for k in range(first, first + steps):
        slot = count % S.stages
        full = pipeline.full.index(slot)
        wait(pipeline.empty.index(slot), ((count // S.stages) & 1) ^ 1)
        mbarrier.expect(full, 4 * COLUMNS * (WORDS + 1))
        tma.async_load(weights.words, [row, k * WORDS], full, pipeline.words.index(slot).slice(0, HALF))
        tma.async_load(weights.words, [second_row, k * WORDS], full, pipeline.words.index(slot).slice(HALF, HALF))
        tma.async_load(weights.scales, [scale_row + k, column], full, pipeline.scales.index(slot).slice(0, 1))
        tma.async_load(weights.scales, [scale_row + k, second_column], full, pipeline.scales.index(slot).slice(1, 1))
        count += 1
    return count


@gluon.jit
def produce(
    gate_up, down, topk_idx_ptr, counts, counters_ptr, task, pipeline, blocks, KIND: gl.constexpr, S: gl.constexpr
):
    """Take tasks, hand them to the other roles, and copy their weights. After routing, the first one is `task`."""
    ROUTE_TASKS: gl.constexpr = S.num_tokens if S.router is not None else 0
    BINS: gl.constexpr = gl.BlockedLayout([S.bins // 32], [32], [1], [0])
    INTERMEDIATE: gl.constexpr = S.intermediate_size
    ROW_TASKS: gl.constexpr = S.row_tiles * S.k_splits
    index = gl.arange(0, S.bins, BINS)
    blocks_of_expert = (counts.load(BINS) + S.tile_m - 1) // S.tile_m
    block_ends = gl.cumsum(blocks_of_expert, axis=0)
    num_blocks = gl.max(block_ends, axis=0)
    first_rows = num_blocks * S.hidden_tiles
    first_sums = first_rows + num_blocks * ROW_TASKS
    end = first_sums + S.sum_tasks
    count = 0
    number = 0
    if S.router is None:
        task = gl.atomic_add(counters_ptr, 1, sem="relaxed", scope="gpu")
    while task < end:
        # The other roles have read the tile before the last.
        wait(blocks.tiles.empty.index(number % 2), ((number // 2) & 1) ^ 1)
        if task < first_sums:
            # Blocks of an expert take turns, so that programs which share weights run at the same time.
            is_hidden = task < first_rows
            inside = task
            width = S.hidden_tiles
            if not is_hidden:
                inside = task - first_rows
                width = ROW_TASKS
            before = block_ends * width <= inside
            expert = gl.sum(before.to(gl.int32), axis=0)
            first_block = gl.max(gl.where(before, block_ends, 0), axis=0)
            num = gl.sum(gl.where(index == expert, blocks_of_expert, 0), axis=0)
            inside -= first_block * width
            block = inside % num
            tile = inside // num
            target = blocks.assignments.index(number % 2)
            list_assignments(topk_idx_ptr, expert, block * S.tile_m, target, S)
            block += first_block
            if is_hidden:
                column = tile * HALF
                send_tile(HIDDEN, expert, block, column, number, blocks.tiles)
                # Interleaved gates and up values are neighbours, others in two halves.
                second = INTERMEDIATE + column
                if KIND.interleaved:
                    column = 2 * column
                    second = column + HALF
                row = expert * 2 * INTERMEDIATE
                count = copy_weights(
                    gate_up, row + column, row + second, expert * S.hidden_steps, column, second,
                    0, S.hidden_steps, pipeline, count, S,
                )  # fmt: skip
            else:
                part = tile // S.row_tiles
                column = tile % S.row_tiles * COLUMNS
                send_tile(ROWS + part, expert, block, column, number, blocks.tiles)
                row = expert * S.hidden + column
                first = part * S.split_steps
                steps = gl.minimum(S.split_steps, S.row_steps - first)
                count = copy_weights(
                    down, row, row + HALF, expert * S.row_steps, column, column + HALF,
                    first, steps, pipeline, count, S,
                )  # fmt: skip
        else:
            send_tile(SUMS, 0, num_blocks, task - first_sums, number, blocks.tiles)
        number += 1
        task = gl.atomic_add(counters_ptr, 1, sem="relaxed", scope="gpu") - ROUTE_TASKS
    send_tile(END, 0, 0, 0, number, blocks.tiles)


@gluon.jit
def copy_rows(source_ptr, rows, exist, arrived, first, steps, pipeline, count, WIDTH: gl.constexpr, S: gl.constexpr):
    """Copy `steps` steps of K of rows of `[., WIDTH]`; zero outside, NaN unless they have arrived. Return the next."""
    columns = gl.expand_dims(gl.arange(0, ROWS_K, gl.SliceLayout(0, COPY)), 0)
    source = source_ptr + gl.expand_dims(rows * WIDTH, 1) + columns
    exist = gl.expand_dims(exist, 1)
    for k in range(first, first + steps):
        slot = count % S.stages
        wait(pipeline.empty.index(slot), ((count // S.stages) & 1) ^ 1)
        column = k * STEP
        if arrived:
            async_copy.async_load(pipeline.rows.index(2 * slot), source + column, exist & (columns + column < WIDTH))
            column += ROWS_K
            async_copy.async_load(
                pipeline.rows.index(2 * slot + 1), source + column, exist & (columns + column < WIDTH)
            )
        else:
            nothing = gl.full((S.tile_m, ROWS_K), float("nan"), gl.bfloat16, COPY)
            pipeline.rows.index(2 * slot).store(nothing)
            pipeline.rows.index(2 * slot + 1).store(nothing)
        async_copy.commit_group()
        # The step before has arrived, while this one is on its way.
        if k > first:
            async_copy.wait_group(1)
            hand_over(pipeline, count - 1, S)
        count += 1
    if steps > 0:  # the last part of K may be empty
        async_copy.wait_group(0)
        hand_over(pipeline, count - 1, S)
    return count


@gluon.jit
def hand_over(pipeline, count, S: gl.constexpr):
    """Hand the rows of a step to the consumer."""
    if S.tile_m > MMA_SYNC_ROWS:
        fence_async_shared()  # wgmma reads them
    gl.inline_asm("bar.warp.sync -1;", "~{memory}", [])
    arrive(pipeline.full.index(count % S.stages))


@gluon.jit
def gather(x_ptr, hidden_ptr, counters_ptr, pipeline, blocks, S: gl.constexpr):
    """Copy the rows of each tile that the producer hands over."""
    tiles = blocks.tiles
    count = 0
    number = 0
    task, _, block, _ = next_tile(number, tiles)
    while task != END:
        if task != SUMS:
            listed = blocks.assignments.index(number % 2).slice(0, S.tile_m)
            assignments = listed.load(gl.SliceLayout(1, COPY))
            exist = assignments >= 0
            assignments = gl.maximum(assignments, 0)
            if task == HIDDEN:
                rows = assignments // S.top_k
                count = copy_rows(x_ptr, rows, exist, True, 0, S.hidden_steps, pipeline, count, S.hidden, S)
            else:
                expected = 4 * S.hidden_tiles  # warps
                done_ptr = counters_ptr + 3 + block
                arrived = gl.atomic_poll(done_ptr, expected, sem="acquire", scope="gpu", timeout_ns=TIMEOUT_NS)
                gl.barrier()
                first = (task - ROWS) * S.split_steps
                steps = gl.minimum(S.split_steps, S.row_steps - first)
                count = copy_rows(
                    hidden_ptr, assignments, exist, arrived, first, steps, pipeline, count, S.intermediate_size, S
                )
        arrive(tiles.empty.index(number % 2))
        number += 1
        task, _, block, _ = next_tile(number, tiles)


@gluon.constexpr_function
def pairs_layout(tile_m):
    """Return the layout of sums `[COLUMNS, tile_m]` in which a thread has both of two neighbouring columns."""
    rows = [[0, 8 << i] for i in range((tile_m // 8).bit_length() - 1)]
    registers, lanes = [[1, 0], [8, 0], *rows, [64, 0]], [[0, 2], [0, 4], [0, 1], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [128, tile_m])


@gluon.jit
def split_pairs(total, KIND: gl.constexpr, S: gl.constexpr):
    """Return gates and up values `[HALF, S.tile_m]` of a tile of the first GEMM."""
    VALUES: gl.constexpr = sums_layout(S.tile_m)
    if KIND.interleaved:
        # Neighbours are in different lanes: exchange them for neighbouring assignments.
        PAIRS: gl.constexpr = pairs_layout(S.tile_m)
        pairs = gl.reshape(gl.convert_layout(total, PAIRS), (HALF, 2, S.tile_m))
        gate, up = gl.split(gl.permute(pairs, (0, 2, 1)))
    else:
        gate, up = gl.split(gl.permute(gl.reshape(total, (2, HALF, S.tile_m)), (1, 2, 0)))
    return gl.convert_layout(gate, VALUES), gl.convert_layout(up, VALUES)


@gluon.jit
def store_hidden(total, weights_ptr, bias_ptr, hidden_ptr, listed, expert, column, KIND: gl.constexpr, S: gl.constexpr):
    """Activate, weight and store a tile of hidden rows."""
    VALUES: gl.constexpr = sums_layout(S.tile_m)
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    gate, up = split_pairs(total, KIND, S)
    assignments = listed.load(gl.SliceLayout(0, VALUES))
    weights = gl.expand_dims(gl.load(weights_ptr + assignments, mask=assignments >= 0, other=0.0), 0)
    if KIND.weights_on_input:
        gate = gate * weights
        up = up * weights
    if bias_ptr is not None:
        columns = column + gl.arange(0, HALF, gl.SliceLayout(1, VALUES))
        inside = columns < S.intermediate_size
        source = bias_ptr + expert * 2 * S.intermediate_size
        if KIND.interleaved:
            gate_ptr = source + 2 * columns
            up_ptr = gate_ptr + 1
        else:
            gate_ptr = source + columns
            up_ptr = gate_ptr + S.intermediate_size
        gate += gl.expand_dims(gl.load(gate_ptr, mask=inside, other=0.0).to(gl.float32), 1)
        up += gl.expand_dims(gl.load(up_ptr, mask=inside, other=0.0).to(gl.float32), 1)
    values = activate(limit_gate(gate, KIND), KIND) * factor_of(up, KIND)
    if not KIND.weights_on_input:
        values *= weights
    # Transpose: rows are stored 16 bytes at a time.
    values = gl.convert_layout(gl.permute(values.to(hidden_ptr.dtype.element_ty), (1, 0)), STORED)
    rows = gl.expand_dims(listed.load(gl.SliceLayout(1, STORED)), 1)
    column = column // HALF * HALF  # tells the compiler that these stores are aligned
    columns = gl.expand_dims(column + gl.arange(0, HALF, gl.SliceLayout(0, STORED)), 0)
    mask = (rows >= 0) & (columns < S.intermediate_size)
    gl.store(hidden_ptr + rows * S.intermediate_size + columns, values, mask=mask)


@gluon.jit
def store_rows(
    total, weights_ptr, bias_ptr, rows_ptr, listed, expert, column, part, KIND: gl.constexpr, S: gl.constexpr
):
    """Store a tile of rows, or one part of its sum; the first part adds the bias."""
    VALUES: gl.constexpr = sums_layout(S.tile_m)
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(1, VALUES))
    rows = listed.load(gl.SliceLayout(0, VALUES))
    if bias_ptr is not None:
        source = bias_ptr + expert * S.hidden + columns
        bias = gl.load(source, mask=(columns < S.hidden) & (part == 0), other=0.0).to(gl.float32)
        # Weights on the input do not scale the bias of the output.
        if KIND.weights_on_input:
            total += gl.expand_dims(bias, 1)
        else:
            weights = gl.load(weights_ptr + rows, mask=rows >= 0, other=0.0)
            total += gl.expand_dims(weights, 0) * gl.expand_dims(bias, 1)
    rows = gl.expand_dims(rows, 0)
    columns = gl.expand_dims(columns, 1)
    target = rows_ptr + (rows * S.k_splits + part).to(gl.int64) * S.hidden + columns
    gl.store(target, total.to(rows_ptr.dtype.element_ty), mask=(rows >= 0) & (columns < S.hidden))


@gluon.jit
def sum_rows(inputs, outputs, task, arrived, S: gl.constexpr):
    """Sum S.sum_hidden columns of the rows of one token, in order of k and of the parts."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    TOP_K: gl.constexpr = S.top_k
    K_SPLITS: gl.constexpr = S.k_splits
    token = task // S.sum_tiles
    columns = task % S.sum_tiles * S.sum_hidden + gl.arange(0, S.sum_hidden, LAYOUT)
    inside = columns < S.hidden
    total = gl.zeros((S.sum_hidden,), gl.float32, LAYOUT)
    for k in gl.static_range(TOP_K):
        assignment = token * TOP_K + k
        expert = gl.load(inputs.topk_idx_ptr + assignment)
        exists = (expert >= 0) & (expert < S.num_experts)
        for part in gl.static_range(K_SPLITS):
            row = gl.full((S.sum_hidden,), assignment * K_SPLITS + part, gl.int64, LAYOUT)
            source = outputs.rows_ptr + row * S.hidden + columns
            total += gl.load(source, mask=inside & exists, other=0.0, cache_modifier=".cg").to(gl.float32)
    total = gl.where(arrived, total, float("nan"))
    target = outputs.out_ptr + token * S.hidden + columns
    gl.store(target, total.to(outputs.out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def steps_of(task, S: gl.constexpr):
    """Return the steps of K of a task of either GEMM; the last parts of K may be empty."""
    steps = S.hidden_steps
    if task != HIDDEN:
        steps = gl.maximum(gl.minimum(S.split_steps, S.row_steps - (task - ROWS) * S.split_steps), 0)
    return steps


@gluon.jit
def allocate_partial(S: gl.constexpr):
    """Allocate `Partial`."""
    partial = Partial(
        gl.allocate_shared_memory(gl.float32, [COLUMNS, S.tile_m], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
        mbarrier.allocate_mbarrier(batch=1).index(0),
        mbarrier.allocate_mbarrier(batch=1).index(0),
    )
    mbarrier.init(partial.full, count=4)  # warps of the second consumer
    mbarrier.init(partial.empty, count=4)  # warps of the first consumer
    return partial


@gluon.jit
def multiply_tile(pipeline, partial, count, tile, steps, S: gl.constexpr):
    """Multiply a tile together with the second warpgroup, if there is one; `tile` counts those of a GEMM."""
    total, count = multiply(pipeline, count, steps, S, 0, S.consumers)
    if S.consumers == 2:
        wait(partial.full, tile & 1)
        total += partial.sums.load(sums_layout(S.tile_m))
        gl.inline_asm("bar.warp.sync -1;", "~{memory}", [])
        arrive(partial.empty)
    return total, count


@gluon.jit
def help_consumer(pipeline, partial, blocks, S: gl.constexpr):
    """Sum every second step of each tile, for the first warpgroup."""
    tiles = blocks.tiles
    count = 0
    number = 0
    tile = 0
    task, _, _, _ = next_tile(number, tiles)
    while task != END:
        if task != SUMS:
            total, count = multiply(pipeline, count, steps_of(task, S), S, 1, S.consumers)
            wait(partial.empty, (tile & 1) ^ 1)
            partial.sums.store(total)
            gl.inline_asm("bar.warp.sync -1;", "~{memory}", [])
            arrive(partial.full)
            tile += 1
        arrive(tiles.empty.index(number % 2))
        number += 1
        task, _, _, _ = next_tile(number, tiles)


@gluon.jit
def consume(
    inputs, gate_up_bias_ptr, down_bias_ptr, outputs, counters_ptr, pipeline, partial, blocks,
    KIND: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Run the tasks that the producer hands over."""
    tiles = blocks.tiles
    count = 0
    number = 0
    tile = 0
    task, expert, block, column = next_tile(number, tiles)
    while task != END:
        if task == SUMS:
            # A block has a task for each of its tiles of rows.
            num_blocks = block
            expected = num_blocks * (4 * S.row_tiles * S.k_splits)
            arrived = gl.atomic_poll(counters_ptr + 1, expected, sem="acquire", scope="gpu", timeout_ns=TIMEOUT_NS)
            gl.barrier()
            if S.router is not None:
                arrived = arrived & blocks.routed
            sum_rows(inputs, outputs, column, arrived, S)
        else:
            listed = blocks.assignments.index(number % 2).slice(0, S.tile_m)
            part = task - ROWS
            total, count = multiply_tile(pipeline, partial, count, tile, steps_of(task, S), S)
            tile += 1
            if task == HIDDEN:
                store_hidden(
                    total, inputs.weights_ptr, gate_up_bias_ptr, outputs.hidden_ptr, listed, expert, column, KIND, S
                )
                count_routed_task(counters_ptr + 3 + block, blocks, S)
            else:
                store_rows(
                    total, inputs.weights_ptr, down_bias_ptr, outputs.rows_ptr, listed, expert, column, part, KIND, S
                )
                count_routed_task(counters_ptr + 1, blocks, S)
        arrive(tiles.empty.index(number % 2))
        number += 1
        task, expert, block, column = next_tile(number, tiles)


@gluon.jit
def fused_moe(
    gate_up,  # Weights of [num_experts, hidden, 2 * intermediate]
    down,  # Weights of [num_experts, intermediate, hidden]
    inputs,
    gate_up_bias_ptr,  # [num_experts, 2 * intermediate], or None
    down_bias_ptr,  # [num_experts, hidden], or None
    counters_ptr,  # [3 + max_blocks] int32, zero: next task, finished warps of row tasks, of tokens, of each block
    outputs,
    written_counters_ptr,  # the result that aliases the counters
    KIND: gl.constexpr,
    S: gl.constexpr,
):
    """Apply the expert layer to tokens `[num_tokens, hidden]`."""
    task = 0
    routed = True
    if S.router is not None:
        task, routed = route_tokens(inputs, outputs, counters_ptr, S)
        inputs = Inputs(inputs.x_ptr, outputs.topk_idx_ptr, outputs.weights_ptr)
    ROW_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([S.tile_m, ROWS_K], gl.bfloat16)
    pipeline = Pipeline(
        gl.allocate_shared_memory(gl.bfloat16, [2 * S.stages, S.tile_m, ROWS_K], ROW_LAYOUT),
        gl.allocate_shared_memory(gate_up.words.dtype, [S.stages, COLUMNS, WORDS], gate_up.words.layout),
        gl.allocate_shared_memory(gate_up.scales.dtype, [S.stages, 2, HALF], gate_up.scales.layout),
        mbarrier.allocate_mbarrier(batch=S.stages),
        mbarrier.allocate_mbarrier(batch=S.stages),
    )
    STAGES: gl.constexpr = S.stages
    for s in gl.static_range(STAGES):
        mbarrier.init(pipeline.full.index(s), count=1 + GATHERERS)  # the producer, warps of the gatherer
        mbarrier.init(pipeline.empty.index(s), count=4)  # warps of the consumer
    LIST: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    assignments = gl.allocate_shared_memory(gl.int32, [2, 2 * S.tile_m], LIST)
    blocks = Blocks(allocate_tiles(4 * S.consumers + GATHERERS), assignments, routed)
    counts = count_assignments(inputs.topk_idx_ptr, S)
    if S.consumers == 1:
        gl.warp_specialize(
            [
                (
                    consume,
                    (inputs, gate_up_bias_ptr, down_bias_ptr, outputs, counters_ptr, pipeline, None, blocks, KIND, S),
                ),
                (produce, (gate_up, down, inputs.topk_idx_ptr, counts, counters_ptr, task, pipeline, blocks, KIND, S)),
                (gather, (inputs.x_ptr, outputs.hidden_ptr, counters_ptr, pipeline, blocks, S)),
            ],
            [1, GATHERERS],
            [S.copy_registers, S.copy_registers],
        )
    else:
        partial = allocate_partial(S)
        gl.warp_specialize(
            [
                (
                    consume,
                    (
                        inputs,
                        gate_up_bias_ptr,
                        down_bias_ptr,
                        outputs,
                        counters_ptr,
                        pipeline,
                        partial,
                        blocks,
                        KIND,
                        S,
                    ),
                ),
                (help_consumer, (pipeline, partial, blocks, S)),
                (produce, (gate_up, down, inputs.topk_idx_ptr, counts, counters_ptr, task, pipeline, blocks, KIND, S)),
                (gather, (inputs.x_ptr, outputs.hidden_ptr, counters_ptr, pipeline, blocks, S)),
            ],
            [4, 1, GATHERERS],
            [S.help_registers, S.copy_registers, S.copy_registers],
        )
