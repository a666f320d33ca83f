"""FP8 weight gradient in Gluon: `out[g] = lhs[:, places of g] @ rhs[:, places of g].T`, a scale per 128 places.

Roles, waits and tiles are those of gluon_gemm.py: two consumers divide the 256 rows of a tile, which has 128 columns.
A step is one block of 128 places, which belongs to one group (core/fp8.py); the producer copies its scales, too. A
product is scaled by row and column while it is added to its float32 sum.

Floor: as in gluon_gemm.py, and the time to write the result, which is large where groups have few rows.
"""

from __future__ import annotations

from typing import NamedTuple

import triton  # noqa: F401 - first and whole: other threads may be importing it
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from .gemm_structs import Pointer, Value
from .gluon_gemm import (
    LAYOUT,
    STEP,
    WAVE,
    allocate,
    arrive,
    issue,
    next_group,
    next_tile,
    place,
    read_tile,
    send_tile,
    wait,
)


class Scales(NamedTuple):
    """Scales of the operands in the pipeline, in shared memory."""

    a: Value  # [S.stages, 1, S.tile_m]
    b: Value  # [S.stages, 1, S.tile_n]


class Output(NamedTuple):
    """The result, and waves of both consumers on their way there."""

    out: Pointer
    staging: Value  # [2 * S.staged, 1, WAVE, S.tile_n] in shared memory


@gluon.jit
def promote(total, part, scales, slot, wave: gl.constexpr, consumer: gl.constexpr, S: gl.constexpr):
    """Wait for the product of a wave, and return its scaled sum with `total`."""
    by_row = scales.a.index(slot).slice((2 * wave + consumer) * WAVE, WAVE, 1).permute((1, 0)).load(LAYOUT)
    part = warpgroup_mma_wait(0, deps=(part,))
    by_column = scales.b.index(slot).load(LAYOUT)
    return total + part * by_column * by_row


@gluon.jit
def store_wave(values, output, group, row, column, wave: gl.constexpr, consumer: gl.constexpr, S: gl.constexpr):
    """Store a wave by TMA, which leaves while the program goes on."""
    tma.store_wait(S.staged - 1)  # the last store from this part of `staging` has read it
    staging = output.staging.index(consumer * S.staged + wave % S.staged)
    staging.reshape((WAVE, S.tile_n)).store(values.to(output.staging.dtype))
    fence_async_shared()
    row += (2 * wave + consumer) * WAVE
    if S.home_groups == 0:
        tma.async_store(output.out, [group, row, column], staging)
    elif group < S.home_groups:
        tma.async_store(output.out.home, [group, row, column], staging)
    else:
        tma.async_store(output.out.spare, [group - S.home_groups, row, column], staging)


@gluon.jit
def make_tile(pipeline, scales, tiles, output, number, count, issued, blocks, consumer: gl.constexpr, S: gl.constexpr):
    """Compute and store the waves of a consumer; return the numbers of pipeline steps and of products so far."""
    zero = gl.zeros((WAVE, S.tile_n), gl.float32, LAYOUT)
    # First wave of the first step.
    slot = count % S.stages
    wait(pipeline.full.index(slot), (count // S.stages) & 1)
    part = issue(pipeline, slot, issued, consumer * WAVE, 0, consumer, zero)
    issued += 1
    total0 = promote(zero, part, scales, slot, 0, consumer, S)
    total1 = zero
    for _ in range(blocks - 1):
        # Second wave of a step.
        part = issue(pipeline, slot, issued, (2 + consumer) * WAVE, 0, consumer, zero)
        total1 = promote(total1, part, scales, slot, 1, consumer, S)
        arrive(pipeline.empty.index(slot))
        # First wave of the next step.
        count += 1
        slot = count % S.stages
        wait(pipeline.full.index(slot), (count // S.stages) & 1)
        part = issue(pipeline, slot, issued + 1, consumer * WAVE, 0, consumer, zero)
        issued += 2
        total0 = promote(total0, part, scales, slot, 0, consumer, S)
    # Second wave of the last step, while the first one is stored.
    part = issue(pipeline, slot, issued, (2 + consumer) * WAVE, 0, consumer, zero)
    row, column, _, group = read_tile(number, tiles)  # only now, so that no register holds them in the loop
    store_wave(total0, output, group, row, column, 0, consumer, S)
    total1 = promote(total1, part, scales, slot, 1, consumer, S)
    arrive(pipeline.empty.index(slot))
    store_wave(total1, output, group, row, column, 1, consumer, S)
    return count + 1, issued + 1


@gluon.jit
def consume(pipeline, scales, tiles, output, consumer: gl.constexpr, S: gl.constexpr):
    """Multiply and store one half of the rows of the tiles that the producer hands over."""
    if consumer == 1:
        arrive(pipeline.turn.index(0))  # consumer 0 goes first
    count = 0
    issued = 0
    number = 0
    row, column, blocks, group = next_tile(number, tiles)
    while group >= 0:
        if blocks == 0:
            zero = gl.zeros((WAVE, S.tile_n), gl.float32, LAYOUT)
            store_wave(zero, output, group, row, column, 0, consumer, S)
            store_wave(zero, output, group, row, column, 1, consumer, S)
        else:
            count, issued = make_tile(pipeline, scales, tiles, output, number, count, issued, blocks, consumer, S)
        arrive(tiles.empty.index(number % 2))
        number += 1
        row, column, blocks, group = next_tile(number, tiles)
    tma.store_wait(0)


@gluon.jit
def blocks_of(group, start, sizes, S: gl.constexpr):
    """Return the number of blocks of a group from block `start` on, none past the last block."""
    size = max(gl.load(sizes + group, mask=group < S.num_groups, other=0), 0)
    return min(size // STEP + min(size % STEP, 1), S.steps - start)


@gluon.jit
def produce(lhs, rhs, lhs_scales, rhs_scales, pipeline, scales, tiles, sizes, num_taken, S: gl.constexpr):
    """Hand tiles to the consumers, and copy their operands; tiles are numbered by group."""
    tiles_of_group: gl.constexpr = (S.M + S.tile_m - 1) // S.tile_m * S.tiles_n
    count = 0
    number = 0
    group = 0
    first_tile = 0
    start = 0
    blocks = blocks_of(group, start, sizes, S)
    tile = gl.program_id(0)
    while group < S.num_groups:
        if tile >= first_tile + tiles_of_group:
            first_tile += tiles_of_group
            start += blocks
            group = next_group(group, sizes, S.groups_at_home, S)
            blocks = blocks_of(group, start, sizes, S)
        else:
            next_tile = gl.num_programs(0) + gl.atomic_add(num_taken, 1, sem="relaxed")
            row, column = place(tile - first_tile, S.M, S)
            send_tile(row, column, blocks, group, number, tiles)
            for block in range(start, start + blocks):
                slot = count % S.stages
                full = pipeline.full.index(slot)
                wait(pipeline.empty.index(slot), ((count // S.stages) & 1) ^ 1)
                mbarrier.expect(full, (S.tile_m + S.tile_n) * (STEP + 4))
                tma.async_load(lhs, [row, block * STEP], full, pipeline.a.index(slot))
                tma.async_load(rhs, [column, block * STEP], full, pipeline.b.index(slot))
                tma.async_load(lhs_scales, [block, row], full, scales.a.index(slot))
                tma.async_load(rhs_scales, [block, column], full, scales.b.index(slot))
                count += 1
            number += 1
            tile = next_tile
    send_tile(0, 0, 0, -1, number, tiles)


@gluon.jit
def weight_gradient_fp8(
    lhs,  # [S.M, 128 * S.steps] float8, blocks of S.tile_m x 128
    rhs,  # [S.N, 128 * S.steps] float8, blocks of S.tile_n x 128
    lhs_scales,  # [S.steps, S.M] float32, blocks of 1 x S.tile_m
    rhs_scales,  # [S.steps, S.N] float32, blocks of 1 x S.tile_n
    sizes,  # [S.num_groups] int32, rows of each group
    num_taken,  # [1] int32, zero: the number of tiles that programs have taken, which is written in place
    out,  # [S.num_groups, S.M, S.N], blocks of 1 x 64 x S.tile_n; `SplitWeights` of two if S.home_groups is not 0
    num_taken_after,  # `num_taken`
    S: gl.constexpr,
):
    """Compute `out[g] = lhs[:, places of g] @ rhs[:, places of g].T`, zero for empty groups that are at home."""
    pipeline, tiles = allocate(lhs, rhs, S)
    scales = Scales(
        gl.allocate_shared_memory(gl.float32, [S.stages, 1, S.tile_m], lhs_scales.layout),
        gl.allocate_shared_memory(gl.float32, [S.stages, 1, S.tile_n], rhs_scales.layout),
    )
    block = out if S.home_groups == 0 else out.home
    output = Output(out, gl.allocate_shared_memory(block.dtype, [2 * S.staged, 1, WAVE, S.tile_n], block.layout))
    gl.warp_specialize(
        [
            (consume, (pipeline, scales, tiles, output, 0, S)),
            (consume, (pipeline, scales, tiles, output, 1, S)),
            (produce, (lhs, rhs, lhs_scales, rhs_scales, pipeline, scales, tiles, sizes, num_taken, S)),
        ],
        [4, 1],
        [240, 24],
    )
