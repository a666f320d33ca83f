"""Grouped GEMM of 16-bit operands in Gluon, also with gated activation, and its weight gradient.

Roles and waits are those of gluon_gemm.py, without the barrier `turn`: products add up in the accumulators, so both
consumers issue when they can. A tile has up to three waves of 64 rows and 256 columns; consumer c computes columns
128 c to 128 c + 127. A consumer releases a step when the next one is issued and this one has been added. Consumer 1
starts one step later than consumer 0, so that one multiplies while the other stores.

Tiles of a group have the same number of waves if possible. They read the same weights, and a lower tile would be ahead
of the others, whose weights have left the L2 cache when they get there: 10 % of the time for groups of 512 rows.

With activation, a consumer multiplies 64 columns of gates and the same 64 of up values, which meet in a thread.

A weight gradient contracts the rows of a group. TMA reads rows past its end as zeros, through bounded descriptors
(tiles.py).

Floor: the tensor cores' rate for many rows per group, reading all weights once for few.
"""

from __future__ import annotations

from typing import NamedTuple

import triton  # noqa: F401 - first and whole: other threads may be importing it
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .activation import activate_halves
from .gemm_structs import Pointer, Value
from .gluon_gemm import (
    HALF_N,
    WAVE,
    allocate_tiles,
    arrive,
    next_group,
    place_in_bands,
    read_tile,
    rows_of,
    send_tile,
    wait,
)
from .router_weights import weights_of
from .tiles import BOUND

MOST_WAVES = gl.constexpr(3)  # of a tile: three take 192 registers of a thread
FEW_WAVES = gl.constexpr(32)  # of a group, whose tiles have the same height
ACCUMULATOR = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))


class Pipeline(NamedTuple):
    """Operands of `S.stages` steps in shared memory, and their barriers."""

    a: Value  # [MOST_WAVES * S.stages, WAVE, S.depth]; of a gradient [MOST_WAVES * S.stages, 1, 1, S.depth, WAVE]
    # [S.stages, 1, S.depth, S.tile_n]; [S.stages, 1, S.tile_n, S.depth] of transposed weights; with activation
    # [4 * S.stages, 1, S.depth, S.box_n], of each consumer the gates and then the up values
    b: Value
    full: Value  # [S.stages] the producer's copies have arrived
    empty: Value  # [S.stages] both consumers have read the step


class Output(NamedTuple):
    """The result, what is added to it, and parts of one consumer's wave on their way there."""

    out: Value  # descriptor; `SplitWeights` of two
    epilogue: Value  # `Bias` or None; with activation the weights of rows, [S.M] float32 or `TokenWeights`
    staging: Value  # [2, 1, 1, WAVE, S.part_n] in shared memory; of a gradient [2, 1, WAVE, S.part_n]


class TokenWeights(NamedTuple):
    """Weights of the assignments of rows: those of this rank's tokens, and those that arrived."""

    own_ptr: Pointer  # of the assignments from `first` to `end` - 1
    received_ptr: Pointer  # of all assignments, but none of these
    row_to_assignment_ptr: Pointer  # [S.M] assignment of each row; -1: padding
    first: Value
    end: Value


class Place(NamedTuple):
    """Position in the result of a wave, or of a part of its columns."""

    row: Value
    end: Value  # of the group's rows
    column: Value
    group: Value


# --- consumers --------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def part_layout(part_n):
    """Return the layout of a part of a wave."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, part_n, 16])


@gluon.jit
def add_bias(values, bias, place, S: gl.constexpr):
    """Add the group's row of a `Bias` to a part; rows past the groups get no bias."""
    LAYOUT: gl.constexpr = part_layout(S.part_n)
    rows = place.row + gl.arange(0, WAVE, gl.SliceLayout(1, LAYOUT))
    columns = place.column + gl.arange(0, S.part_n, gl.SliceLayout(0, LAYOUT))
    inside = (columns < S.N) & (place.group < S.num_groups)
    added = gl.load(bias.values_ptr + (place.group * S.N + columns), mask=inside, other=0.0).to(gl.float32)
    scales = gl.load(bias.scales_ptr + rows, mask=rows < place.end, other=0.0)
    return values + gl.expand_dims(scales, 1) * gl.expand_dims(added, 0)


@gluon.jit
def store_part(values, output, place, number: gl.constexpr, S: gl.constexpr):
    """Store a part of a wave by TMA, which leaves while the program goes on; a wave has an even number of parts."""
    if S.activation is None and output.epilogue is not None:
        values = add_bias(values, output.epilogue, place, S)
    tma.store_wait(1)  # the last store but one has read its half of `staging`
    staging = output.staging.index(number % 2)
    staging.reshape((WAVE, S.part_n)).store(values.to(staging.dtype))
    fence_async_shared()
    if not S.is_gradient:
        tma.async_store(output.out, [BOUND, place.end, place.row - place.end + BOUND, place.column], staging)
    elif S.home_groups == 0:
        tma.async_store(output.out, [place.group, place.row, place.column], staging)
    elif place.group < S.home_groups:
        tma.async_store(output.out.home, [place.group, place.row, place.column], staging)
    else:
        tma.async_store(output.out.spare, [place.group - S.home_groups, place.row, place.column], staging)


@gluon.jit
def store_columns(values, output, place, first: gl.constexpr, COLUMNS: gl.constexpr, S: gl.constexpr):
    """Store columns `first` to `first + COLUMNS - 1` of a wave, part by part."""
    if S.part_n == COLUMNS:
        LAYOUT: gl.constexpr = part_layout(S.part_n)
        at = Place(place.row, place.end, place.column + first, place.group)
        store_part(gl.convert_layout(values, LAYOUT), output, at, first // COLUMNS, S)
    else:
        left, right = gl.split(gl.permute(gl.reshape(values, (WAVE, 2, COLUMNS // 2)), (0, 2, 1)))
        store_columns(left, output, place, first, COLUMNS // 2, S)
        store_columns(right, output, place, first + COLUMNS // 2, COLUMNS // 2, S)


@gluon.jit
def weights_of_rows(weights, rows, used, S: gl.constexpr):
    """Load the weights of rows, which `TokenWeights` find by the rows' assignments."""
    if S.gathers:
        assignments = gl.load(weights.row_to_assignment_ptr + rows, mask=used, other=-1)
        found = weights_of(assignments, weights.own_ptr, weights.received_ptr, weights.first, weights.end)
    else:
        found = gl.load(weights + rows, mask=used, other=0.0)
    return found.to(gl.float32)


@gluon.jit
def activate_wave(values, weights, place, S: gl.constexpr):
    """Return the activated columns of a wave whose left half are gates, times the weights of its rows."""
    LAYOUT: gl.constexpr = part_layout(HALF_N // 2)
    gate, up = gl.split(gl.permute(gl.reshape(values, (WAVE, 2, HALF_N // 2)), (0, 2, 1)))
    gate, up = gl.convert_layout(gate, LAYOUT), gl.convert_layout(up, LAYOUT)
    rows = place.row + gl.arange(0, WAVE, gl.SliceLayout(1, LAYOUT))
    used = (rows < place.end) & (place.group < S.num_groups)
    weights = weights_of_rows(weights, rows, used, S)
    return activate_halves(gate, up, S.activation) * gl.expand_dims(weights, 1)


@gluon.jit
def store_wave(values, output, place, wave, S: gl.constexpr):
    """Store a wave of a consumer, only rows before `place.end` unless it is one of a gradient."""
    at = Place(place.row + wave * WAVE, place.end, place.column, place.group)
    if S.activation is None:
        store_columns(values, output, at, 0, HALF_N, S)
    else:
        store_columns(activate_wave(values, output.epilogue, at, S), output, at, 0, HALF_N // 2, S)


@gluon.jit
def rows_operand(pipeline, slot, wave: gl.constexpr, S: gl.constexpr):
    """Return the first operand of a wave, `[WAVE, S.depth]`."""
    a = pipeline.a.index(slot * MOST_WAVES + wave)
    if S.is_gradient:
        a = a.reshape((S.depth, WAVE)).permute((1, 0))
    return a


@gluon.jit
def columns_operand(pipeline, slot, consumer: gl.constexpr, S: gl.constexpr):
    """Return the second operand of a consumer, `[S.depth, HALF_N]`."""
    if S.activation is not None:
        # Swizzled columns are stored 64 at a time: the up values follow the gates.
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        b = pipeline.b.reinterpret(shape=(2 * S.stages, S.depth, HALF_N), layout=LAYOUT).index(2 * slot + consumer)
    else:
        if S.transposed:
            b = pipeline.b.index(slot).reshape((S.tile_n, S.depth)).permute((1, 0))
        else:
            b = pipeline.b.index(slot).reshape((S.depth, S.tile_n))
        b = b.slice(consumer * HALF_N, HALF_N, 1)
    return b


@gluon.jit
def await_step(pipeline, slot, count, S: gl.constexpr):
    """Wait for the operands of a step."""
    wait(pipeline.full.index(slot), (count // S.stages) & 1)
    if S.gathers:
        fence_async_shared()  # rows came by cp.async


@gluon.jit
def issue(pipeline, slot, totals, IS_FIRST: gl.constexpr, consumer: gl.constexpr, WAVES: gl.constexpr, S: gl.constexpr):
    """Issue the wgmmas of one step; those of the steps before have been added to `totals` afterwards."""
    b = columns_operand(pipeline, slot, consumer, S)
    total0, total1, total2 = totals
    total0 = warpgroup_mma(rows_operand(pipeline, slot, 0, S), b, total0, use_acc=not IS_FIRST, is_async=True)
    if WAVES > 1:
        total1 = warpgroup_mma(rows_operand(pipeline, slot, 1, S), b, total1, use_acc=not IS_FIRST, is_async=True)
    if WAVES > 2:
        total2 = warpgroup_mma(rows_operand(pipeline, slot, 2, S), b, total2, use_acc=not IS_FIRST, is_async=True)
    if WAVES == 1:
        total0 = warpgroup_mma_wait(1, deps=(total0,))
    elif WAVES == 2:
        total0, total1 = warpgroup_mma_wait(2, deps=(total0, total1))
    else:
        total0, total1, total2 = warpgroup_mma_wait(3, deps=(total0, total1, total2))
    return total0, total1, total2


@gluon.jit
def make_tile(
    pipeline, tiles, output, number, count, steps, consumer: gl.constexpr, WAVES: gl.constexpr, S: gl.constexpr
):
    """Compute and store WAVES x 64 rows by 128 columns; return the number of pipeline steps so far."""
    zero = gl.zeros((WAVE, HALF_N), gl.float32, ACCUMULATOR)
    slot = count % S.stages
    await_step(pipeline, slot, count, S)
    totals = issue(pipeline, slot, (zero, zero, zero), True, consumer, WAVES, S)
    for _ in range(steps - 1):
        last = slot
        count += 1
        slot = count % S.stages
        await_step(pipeline, slot, count, S)
        totals = issue(pipeline, slot, totals, False, consumer, WAVES, S)
        arrive(pipeline.empty.index(last))
    total0, total1, total2 = totals
    place, _ = read_place(number, tiles, consumer, S)  # only now, so that no register holds it in the loop
    # Waves are stored while the next ones are multiplied.
    total0 = warpgroup_mma_wait(WAVES - 1, deps=(total0,))
    if WAVES == 1:
        arrive(pipeline.empty.index(slot))
    store_wave(total0, output, place, 0, S)
    if WAVES > 1:
        total1 = warpgroup_mma_wait(WAVES - 2, deps=(total1,))
        if WAVES == 2:
            arrive(pipeline.empty.index(slot))
        store_wave(total1, output, place, 1, S)
    if WAVES > 2:
        total2 = warpgroup_mma_wait(0, deps=(total2,))
        arrive(pipeline.empty.index(slot))
        store_wave(total2, output, place, 2, S)
    return count + 1


@gluon.jit
def read_place(number, tiles, consumer: gl.constexpr, S: gl.constexpr):
    """Return the `Place` of a consumer's half of a tile, and its number of waves; a negative one ends the work.

    In a gradient `end` is the number of steps.
    """
    row, column, end, code = read_tile(number, tiles)
    return Place(row, end, column + consumer * (S.tile_n // 2), code // 4), code % 4 if code >= 0 else -1


@gluon.jit
def consume(pipeline, tiles, output, consumer: gl.constexpr, S: gl.constexpr):
    """Multiply and store one half of the columns of the tiles that the producer hands over."""
    count = 0
    number = 0
    wait(tiles.full.index(0), 0)
    place, waves = read_place(number, tiles, consumer, S)
    while waves >= 0:
        steps = place.end if S.is_gradient else (S.K + S.depth - 1) // S.depth
        if (steps == 0) | (place.group == S.num_groups):
            zero = gl.zeros((WAVE, HALF_N), gl.float32, ACCUMULATOR)
            for wave in range(waves):
                store_wave(zero, output, place, wave, S)
        else:
            if (consumer == 1) and (count == 0):
                wait(pipeline.full.index(min(steps - 1, 1)), 0)
            if waves == 3:
                count = make_tile(pipeline, tiles, output, number, count, steps, consumer, 3, S)
            elif waves == 2:
                count = make_tile(pipeline, tiles, output, number, count, steps, consumer, 2, S)
            else:
                count = make_tile(pipeline, tiles, output, number, count, steps, consumer, 1, S)
        arrive(tiles.empty.index(number % 2))
        number += 1
        wait(tiles.full.index(number % 2), (number // 2) & 1)
        place, waves = read_place(number, tiles, consumer, S)
    tma.store_wait(0, read_only=False)  # so that no store comes after the poison of a failed launch


# --- producer ---------------------------------------------------------------------------------------------------------


@gluon.jit
def row_tiles(rows, low):
    """Return the number of tiles that `rows` rows take: of three waves, but of two if `low`, or if all can have two."""
    waves = (rows + WAVE - 1) // WAVE
    by_two = low | ((waves < FEW_WAVES) & (waves % 2 == 0) & (waves % 3 != 0))
    return (waves + 1) // 2 if by_two else (waves + 2) // 3


@gluon.jit
def locate(inside, rows, low, S: gl.constexpr):
    """Return first row, waves and first column of tile `inside` of a group whose tiles cover `rows` rows."""
    tiles = row_tiles(rows, low)
    tile, column = place_in_bands(inside, tiles, S)
    # The first tiles have one wave more than the others.
    waves = (rows + WAVE - 1) // WAVE
    fewest = waves // tiles
    more = waves - fewest * tiles
    own = fewest + 1 if tile < more else fewest
    return (tile * fewest + min(tile, more)) * WAVE, own, column


@gluon.jit
def load_weights(w, group, column, k, barrier, target, S: gl.constexpr):
    """Copy a block of weights."""
    if S.transposed:
        tma.async_load(w, [group, column, k], barrier, target)
    else:
        tma.async_load(w, [group, k, column], barrier, target)


@gluon.jit
def load_columns(rhs, place, k, barrier, target, S: gl.constexpr):
    """Copy the second operand of a step."""
    if S.is_gradient:
        tma.async_load(rhs, [BOUND, place.end, k - place.end + BOUND, place.column], barrier, target)
    elif S.home_groups == 0:
        load_weights(rhs, place.group, place.column, k, barrier, target, S)
    elif place.group < S.home_groups:
        load_weights(rhs.home, place.group, place.column, k, barrier, target, S)
    else:
        load_weights(rhs.spare, place.group - S.home_groups, place.column, k, barrier, target, S)


@gluon.jit
def load_halves(rhs, pipeline, place, k, barrier, slot, S: gl.constexpr):
    """Copy the gates and the up values of both consumers."""
    for panel in gl.static_range(4):
        column = place.column + panel // 2 * (HALF_N // 2) + panel % 2 * S.N
        at = Place(place.row, place.end, column, place.group)
        load_columns(rhs, at, k, barrier, pipeline.b.index(4 * slot + panel), S)


@gluon.jit
def load_waves(lhs, rhs, pipeline, place, start, end, count, WAVES: gl.constexpr, S: gl.constexpr):
    """Copy the steps of a tile of `WAVES` waves, from `start` to `end` of the sum; return their number so far."""
    for k in range(start, end, S.depth):
        slot = count % S.stages
        full = pipeline.full.index(slot)
        wait(pipeline.empty.index(slot), ((count // S.stages) & 1) ^ 1)
        ROWS: gl.constexpr = 0 if S.gathers else WAVES * WAVE
        mbarrier.expect(full, (ROWS + S.weights_n) * S.depth * 2)
        for wave in gl.static_range(ROWS // WAVE):
            target = pipeline.a.index(slot * MOST_WAVES + wave)
            row = place.row + wave * WAVE
            if S.is_gradient:
                tma.async_load(lhs, [BOUND, end, k - end + BOUND, row], full, target)
            else:
                tma.async_load(lhs, [row, k], full, target)
        if S.activation is None:
            load_columns(rhs, place, k, full, pipeline.b.index(slot), S)
        else:
            load_halves(rhs, pipeline, place, k, full, slot, S)
        count += 1
    return count


@gluon.jit
def load_tile(lhs, rhs, pipeline, place, waves, start, end, count, S: gl.constexpr):
    """Copy the steps of a tile; return their number so far."""
    if waves == 3:
        count = load_waves(lhs, rhs, pipeline, place, start, end, count, 3, S)
    elif waves == 2:
        count = load_waves(lhs, rhs, pipeline, place, start, end, count, 2, S)
    else:
        count = load_waves(lhs, rhs, pipeline, place, start, end, count, 1, S)
    return count


@gluon.jit
def produce(lhs, rhs, pipeline, tiles, sizes, num_taken, S: gl.constexpr):
    """Hand tiles to the consumers, and copy their operands; tiles are numbered by group.

    The first tile is that of the program's number, the others are the next that no program has taken. Where others
    gather the rows, programs start at different times, and the first tile is taken, too.
    """
    LAST: gl.constexpr = S.num_groups - 1 if S.is_gradient else S.num_groups
    count = 0
    number = 0
    group = 0
    first_tile = 0
    start = 0
    size = rows_of(group, start, sizes, S)
    tile = gl.program_id(0)
    first_taken = gl.num_programs(0)
    if S.gathers:
        tile = gl.atomic_add(num_taken, 1, sem="relaxed")
        first_taken = 0
    while group <= LAST:
        rows = S.K if S.is_gradient else size
        # A gradient takes as long as its group has rows: that of a large group is divided into more tiles.
        low = S.low_tiles & (size > 2 * (S.M // S.groups_at_home))
        inside = tile - first_tile
        own_tiles = row_tiles(rows, low) * S.tiles_n
        if inside >= own_tiles:
            first_tile += own_tiles
            start += size
            group = next_group(group, sizes, S.groups_at_home if S.is_gradient else 0, S)
            size = rows_of(group, start, sizes, S)
        else:
            next_tile = first_taken + gl.atomic_add(num_taken, 1, sem="relaxed")
            row, waves, column = locate(inside, rows, low, S)
            end = start + size
            if S.is_gradient:
                steps = (size + S.depth - 1) // S.depth
                send_tile(row, column, steps, 4 * group + waves, number, tiles)
                count = load_tile(lhs, rhs, pipeline, Place(row, end, column, group), waves, start, end, count, S)
            else:
                row += start
                send_tile(row, column, end, 4 * group + waves, number, tiles)
                if group < S.num_groups:
                    count = load_tile(lhs, rhs, pipeline, Place(row, end, column, group), waves, 0, S.K, count, S)
            number += 1
            tile = next_tile
    send_tile(0, 0, 0, -1, number, tiles)


@gluon.constexpr_function
def weights_shape(S):
    """Return the shape of the weights of all stages in shared memory."""
    box = [S.box_n, S.depth] if S.transposed else [S.depth, S.box_n]
    return [S.weights_n // S.box_n * S.stages, 1, *box]


@gluon.jit
def allocate_pipeline(
    dtype: gl.constexpr, LAYOUT: gl.constexpr, b, A: gl.constexpr, B: gl.constexpr, ARRIVALS: gl.constexpr,
    S: gl.constexpr,
):  # fmt: skip
    """Allocate `Pipeline` in shapes `A`, of this dtype and layout, and `B`; a step has ARRIVALS when it is full."""
    pipeline = Pipeline(
        gl.allocate_shared_memory(dtype, A, LAYOUT),
        gl.allocate_shared_memory(b.dtype, B, b.layout),
        mbarrier.allocate_mbarrier(batch=S.stages),
        mbarrier.allocate_mbarrier(batch=S.stages),
    )
    STAGES: gl.constexpr = S.stages
    for s in gl.static_range(STAGES):
        mbarrier.init(pipeline.full.index(s), count=ARRIVALS)
        mbarrier.init(pipeline.empty.index(s), count=8)  # warps of the consumers
    return pipeline


@gluon.jit
def run_roles(
    lhs, rhs, sizes, epilogue, num_taken, out, b, result,
    A: gl.constexpr, B: gl.constexpr, RESULT: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Allocate shared memory in shapes `A`, `B` and `RESULT`, and start the roles."""
    pipeline = allocate_pipeline(lhs.dtype, lhs.layout, b, A, B, 1, S)
    tiles = allocate_tiles(8)
    first = Output(out, epilogue, gl.allocate_shared_memory(result.dtype, RESULT, result.layout))
    second = Output(out, epilogue, gl.allocate_shared_memory(result.dtype, RESULT, result.layout))
    gl.warp_specialize(
        [
            (consume, (pipeline, tiles, first, 0, S)),
            (consume, (pipeline, tiles, second, 1, S)),
            (produce, (lhs, rhs, pipeline, tiles, sizes, num_taken, S)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def grouped_gemm16(
    lhs,  # [S.M, S.K] in blocks of 64 x S.depth
    rhs,  # [S.num_groups, S.K, S.N], blocks of 1 x S.depth x S.box_n; the other way round if S.transposed
    sizes,  # [S.num_groups] int32, rows of each group
    epilogue,  # `Bias` or None; with activation [S.M] float32, the weights of rows
    num_taken,  # [1] int32, zero: the number of tiles that programs have taken, which is written in place
    out,  # [S.M, S.N] bounded, blocks of 64 x S.part_n
    num_taken_after,  # `num_taken`
    S: gl.constexpr,
):
    """Compute `out[rows of g] = lhs[rows of g] @ rhs[g]` plus the bias, zero in rows past the groups.

    With activation, rhs is [S.num_groups, S.K, 2 * S.N], gates before up values, and activated rows are stored.
    """
    b = rhs if S.home_groups == 0 else rhs.home
    A: gl.constexpr = [MOST_WAVES * S.stages, WAVE, S.depth]
    B: gl.constexpr = weights_shape(S)
    run_roles(lhs, rhs, sizes, epilogue, num_taken, out, b, out, A, B, [2, 1, 1, WAVE, S.part_n], S)


@gluon.jit
def weight_gradient16(
    lhs,  # [S.M, S.K] bounded, blocks of S.depth x 64
    rhs,  # [S.M, S.N] bounded, blocks of S.depth x S.tile_n
    sizes,  # [S.num_groups] int32, rows of each group
    num_taken,  # [1] int32, zero: the number of tiles that programs have taken, which is written in place
    out,  # [S.num_groups, S.K, S.N], blocks of 1 x 64 x S.part_n; `SplitWeights` of two if S.home_groups is not 0
    num_taken_after,  # `num_taken`
    S: gl.constexpr,
):
    """Compute `out[g] = lhs[rows of g].T @ rhs[rows of g]`, zero for empty groups that are at home."""
    result = out if S.home_groups == 0 else out.home
    A: gl.constexpr = [MOST_WAVES * S.stages, 1, 1, S.depth, WAVE]
    B: gl.constexpr = [S.stages, 1, 1, S.depth, S.tile_n]
    run_roles(lhs, rhs, sizes, None, num_taken, out, rhs, result, A, B, [2, 1, WAVE, S.part_n], S)
