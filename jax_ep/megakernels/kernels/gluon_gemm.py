"""FP8 grouped GEMM in Gluon: `out[rows of g] = lhs[rows of g] @ rhs[g].T`, a scale per 1x128 and per 128x128 block.

Roles: one producer warp copies operands by TMA, two consumer warpgroups multiply. A tile of `out` is 128 rows by 256
columns; consumer c computes columns 128 c to 128 c + 127 of all rows, in one or two waves of 64 rows. The last tile of
a group may have 64 rows. Tiles may overlap the next group; the extra rows are computed but not stored: TMA drops rows
past the end of a bounded descriptor (tiles.py). The rows past all groups are one more group, of zeros.

Waits: consumers wait for `full[slot]` (the producer's copies have arrived), the producer for `empty[slot]` (both
consumers have read the slot), and a consumer for `turn[c]` (the other consumer has issued its wgmma). Every wait is for
an earlier step of the same program, so one resident program is enough.

Floor, H100 at 700 W: 1979 TFLOP/s of dense FP8 at 1.83 GHz; DeepGEMM reaches 1167 with the same scales.
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

from .gemm_structs import Pointer, Value
from .tiles import BOUND

WAVE = gl.constexpr(64)  # rows of one wgmma
HALF_N = gl.constexpr(128)  # columns of one consumer
STEP = gl.constexpr(128)  # K of one pipeline stage, and of one scale block
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # a lane each of the producer warp
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]))


class Pipeline(NamedTuple):
    """Operands of `S.stages` steps in shared memory, and their barriers."""

    a: Value  # [S.stages, S.tile_m, STEP]
    b: Value  # [S.stages, S.tile_n, STEP]
    full: Value  # [S.stages] the producer's copies have arrived
    empty: Value  # [S.stages] both consumers have read the step
    turn: Value  # [2] the other consumer has issued its wgmma


class Tiles(NamedTuple):
    """Up to two tiles that the producer hands to the consumers, in shared memory, and their barriers."""

    slots: Value  # [2, 4] row, column, end of the group's rows, group
    full: Value  # [2]
    empty: Value  # [2]


class Output(NamedTuple):
    """The result, and the wave of one consumer on its way there."""

    out: Pointer
    staging: Value  # [1, 1, WAVE, HALF_N] in shared memory


@gluon.jit
def arrive(barrier):
    """Arrive once per warp, without a barrier among the warps: `barrier` counts warps."""
    gl.inline_asm(
        "{ .reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; "
        "@p mbarrier.arrive.release.cta.shared::cta.b64 _, [$0]; }",
        "r,~{memory}",
        [barrier],
    )


@gluon.jit
def wait(barrier, phase):
    """Wait until `barrier` has completed the phase of this parity.

    As assembly, like `arrive`: around Triton's own waits and arrivals the compiler puts barriers among the warps.
    """
    gl.inline_asm(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; @!done bra again; }",
        "r,r,~{memory}",
        [barrier, phase],
    )


@gluon.jit
def send_tile(row, column, end, group, number, tiles):
    """Hand a tile from the producer to both consumers; group -1 ends their work."""
    slot = number % 2
    wait(tiles.empty.index(slot), ((number // 2) & 1) ^ 1)
    gl.inline_asm(
        "{ .reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; "
        "@p st.shared.v4.b32 [$0], {$2, $3, $4, $5}; "
        "@p mbarrier.arrive.release.cta.shared::cta.b64 _, [$1]; }",
        "r,r,r,r,r,r,~{memory}",
        [tiles.slots.index(slot), tiles.full.index(slot), row, column, end, group],
    )


@gluon.jit
def read_tile(number, tiles):
    """Read (row, column, end, group) of a tile; the shuffles tell the assembler that all lanes have the same."""
    return gl.inline_asm(
        "{ .reg .b32 a, b, c, d; ld.shared.v4.b32 {a, b, c, d}, [$4]; shfl.sync.idx.b32 $0, a, 0, 31, -1; "
        "shfl.sync.idx.b32 $1, b, 0, 31, -1; shfl.sync.idx.b32 $2, c, 0, 31, -1; shfl.sync.idx.b32 $3, d, 0, 31, -1; }",
        "=r,=r,=r,=r,r,~{memory}",
        [tiles.slots.index(number % 2)],
        [gl.int32, gl.int32, gl.int32, gl.int32],
    )


@gluon.jit
def next_tile(number, tiles):
    """Wait for a tile, and read it."""
    wait(tiles.full.index(number % 2), (number // 2) & 1)
    return read_tile(number, tiles)


@gluon.jit
def rows_of(group, start, sizes, S: gl.constexpr):
    """Return the rows of a group from `start` on, none past M, whatever its size; rows past the groups are a group."""
    size = gl.load(sizes + group, mask=group < S.num_groups, other=S.M)
    return min(max(size, 0), S.M - start)


@gluon.jit
def next_group(group, sizes, ALWAYS: gl.constexpr, S: gl.constexpr):
    """Return the group after `group` that has tiles, or S.num_groups. Empty groups have tiles only below `ALWAYS`.

    It looks at 32 groups at a time, since there may be many free spare slots.
    """
    group += 1
    if group >= ALWAYS:
        end = group
        while group == end:
            ids = end + gl.arange(0, 32, LANES)
            end += 32
            rows = gl.load(sizes + ids, mask=ids < S.num_groups, other=1)
            group = gl.min(gl.where(rows > 0, ids, end), axis=0)
    return group


@gluon.jit
def find_group(tile, group, first_tile, start, size, sizes, S: gl.constexpr):
    """Advance (group, first_tile, start, size) to the group of `tile`, which is above S.num_groups if there is none."""
    tiles = (size + S.tile_m - 1) // S.tile_m * S.tiles_n
    while (group <= S.num_groups) & (tile >= first_tile + tiles):
        first_tile += tiles
        start += size
        group = next_group(group, sizes, 0, S)
        size = rows_of(group, start, sizes, S)
        tiles = (size + S.tile_m - 1) // S.tile_m * S.tiles_n
    return group, first_tile, start, size


@gluon.jit
def place_in_bands(inside, row_tiles, S: gl.constexpr):
    """Return number of the row tile, of `row_tiles` in the group, and first column of tile `inside` of the group.

    Bands of up to S.group_m tiles of rows are visited column by column, so that programs which run at the same time
    share both operands in L2.
    """
    band = inside // (S.group_m * S.tiles_n)
    in_band = inside - band * S.group_m * S.tiles_n
    height = min(row_tiles - band * S.group_m, S.group_m)
    column = in_band // height
    return band * S.group_m + in_band - column * height, column * S.tile_n


@gluon.jit
def place(inside, size, S: gl.constexpr):
    """Return first row and column of a tile in its group of `size` rows."""
    row, column = place_in_bands(inside, (size + S.tile_m - 1) // S.tile_m, S)
    return row * S.tile_m, column


@gluon.jit
def issue(pipeline, slot, issued, row: gl.constexpr, column: gl.constexpr, consumer: gl.constexpr, zero):
    """Issue the wgmma of a wave after the ping-pong barrier, and open it for the other consumer."""
    wait(pipeline.turn.index(consumer), issued & 1)
    right = pipeline.b.index(slot).slice(column, HALF_N)
    part = warpgroup_mma(
        pipeline.a.index(slot).slice(row, WAVE), right.permute((1, 0)), zero, use_acc=False, is_async=True
    )
    arrive(pipeline.turn.index(1 - consumer))
    return part


@gluon.jit
def store_wave(values, output, row, end, column):
    """Store the rows of a wave before `end` by TMA, which leaves while the program goes on."""
    tma.store_wait(0)  # the store before has read `staging`
    output.staging.reshape((WAVE, HALF_N)).store(values.to(output.out.dtype))
    fence_async_shared()
    tma.async_store(output.out, [BOUND, end, row - end + BOUND, column], output.staging)


@gluon.jit
def make_tile(
    pipeline, tiles, output, a_scale, b_scale, number, count, issued,
    consumer: gl.constexpr, WAVES: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Compute and store WAVES x 64 rows by 128 columns; return the numbers of pipeline steps and of products so far.

    `a_scale` points to the scales of the first wave's rows, `b_scale` to that of the columns.
    """
    zero = gl.zeros((WAVE, HALF_N), gl.float32, LAYOUT)
    total0 = gl.zeros((WAVE, HALF_N), gl.float32, LAYOUT)
    total1 = gl.zeros((WAVE, HALF_N), gl.float32, LAYOUT)
    # First wave of the first step.
    scale_b = gl.load(b_scale)
    factor0 = gl.load(a_scale) * scale_b
    factor1 = factor0
    if WAVES == 2:
        factor1 = gl.load(a_scale + WAVE) * scale_b
    slot = count % S.stages
    wait(pipeline.full.index(slot), (count // S.stages) & 1)
    part = issue(pipeline, slot, issued, 0, consumer * HALF_N, consumer, zero)
    part = warpgroup_mma_wait(0, deps=(part,))
    total0 += part * gl.expand_dims(factor0, 1)
    issued += 1
    for _ in range(S.steps - 1):
        # Second wave of a step; the scales of the next step arrive while the tensor cores work.
        if WAVES == 2:
            part = issue(pipeline, slot, issued, WAVE, consumer * HALF_N, consumer, zero)
            issued += 1
        b_scale += 1
        a_scale += S.M
        scale_b = gl.load(b_scale)
        scale0 = gl.load(a_scale)
        scale1 = scale0
        if WAVES == 2:
            scale1 = gl.load(a_scale + WAVE)
            part = warpgroup_mma_wait(0, deps=(part,))
        arrive(pipeline.empty.index(slot))
        if WAVES == 2:
            total1 += part * gl.expand_dims(factor1, 1)  # promote to float32
        # First wave of the next step.
        count += 1
        slot = count % S.stages
        wait(pipeline.full.index(slot), (count // S.stages) & 1)
        part = issue(pipeline, slot, issued, 0, consumer * HALF_N, consumer, zero)
        issued += 1
        factor0 = scale0 * scale_b
        factor1 = scale1 * scale_b
        part = warpgroup_mma_wait(0, deps=(part,))
        total0 += part * gl.expand_dims(factor0, 1)
    # Second wave of the last step, while the first one is stored.
    if WAVES == 2:
        part = issue(pipeline, slot, issued, WAVE, consumer * HALF_N, consumer, zero)
        issued += 1
        row, column, end, _ = read_tile(number, tiles)  # only now, so that no register holds them in the loop
        column += consumer * HALF_N
        store_wave(total0, output, row, end, column)
        part = warpgroup_mma_wait(0, deps=(part,))
        arrive(pipeline.empty.index(slot))
        total1 += part * gl.expand_dims(factor1, 1)
        store_wave(total1, output, row + WAVE, end, column)
    else:
        arrive(pipeline.empty.index(slot))
        row, column, end, _ = read_tile(number, tiles)
        column += consumer * HALF_N
        store_wave(total0, output, row, end, column)
    return count + 1, issued


@gluon.jit
def consume(pipeline, tiles, staging, out, a_scales, b_scales, consumer: gl.constexpr, S: gl.constexpr):
    """Multiply and store one half of the columns of the tiles that the producer hands over."""
    blocks_n: gl.constexpr = (S.N + HALF_N - 1) // HALF_N
    output = Output(out, staging.index(consumer))
    if consumer == 1:
        arrive(pipeline.turn.index(0))  # consumer 0 goes first
    count = 0
    issued = 0
    number = 0
    row, column, end, group = next_tile(number, tiles)
    while group >= 0:
        rows = row + gl.arange(0, WAVE, gl.SliceLayout(1, LAYOUT))
        a_scale = a_scales + rows.to(gl.int64)
        # Columns past N are computed with the scale of the last ones.
        b_scale = b_scales + (group * blocks_n + min(column // HALF_N + consumer, blocks_n - 1)) * S.steps
        if group == S.num_groups:
            zero = gl.zeros((WAVE, HALF_N), gl.float32, LAYOUT)
            store_wave(zero, output, row, end, column + consumer * HALF_N)
            store_wave(zero, output, row + WAVE, end, column + consumer * HALF_N)
        elif end - row > WAVE:
            count, issued = make_tile(pipeline, tiles, output, a_scale, b_scale, number, count, issued, consumer, 2, S)
        else:
            count, issued = make_tile(pipeline, tiles, output, a_scale, b_scale, number, count, issued, consumer, 1, S)
        arrive(tiles.empty.index(number % 2))
        number += 1
        row, column, end, group = next_tile(number, tiles)
    tma.store_wait(0)


@gluon.jit
def produce(lhs, rhs, pipeline, tiles, sizes, num_taken, S: gl.constexpr):
    """Hand tiles to the consumers, and copy their operands.

    The first tile is that of the program's number, the others are the next that no program has taken.
    """
    count = 0
    number = 0
    group = 0
    first_tile = 0
    start = 0
    size = rows_of(group, start, sizes, S)
    tile = gl.program_id(0)
    programs = gl.num_programs(0)
    group, first_tile, start, size = find_group(tile, group, first_tile, start, size, sizes, S)
    while group <= S.num_groups:
        next_tile = programs + gl.atomic_add(num_taken, 1, sem="relaxed")
        row, column = place(tile - first_tile, size, S)
        row += start
        send_tile(row, column, start + size, group, number, tiles)
        if group < S.num_groups:
            for k in range(S.steps):
                slot = count % S.stages
                wait(pipeline.empty.index(slot), ((count // S.stages) & 1) ^ 1)
                mbarrier.expect(pipeline.full.index(slot), (S.tile_m + S.tile_n) * STEP)
                tma.async_load(lhs, [row, k * STEP], pipeline.full.index(slot), pipeline.a.index(slot))
                tma.async_load(rhs, [group * S.N + column, k * STEP], pipeline.full.index(slot), pipeline.b.index(slot))
                count += 1
        number += 1
        tile = next_tile
        group, first_tile, start, size = find_group(tile, group, first_tile, start, size, sizes, S)
    send_tile(0, 0, 0, -1, number, tiles)


@gluon.jit
def allocate_tiles(WARPS: gl.constexpr):
    """Allocate `Tiles` for consumers with this many warps in all."""
    tiles = Tiles(
        gl.allocate_shared_memory(gl.int32, [2, 4], gl.SwizzledSharedLayout(4, 1, 1, [0])),
        mbarrier.allocate_mbarrier(batch=2),
        mbarrier.allocate_mbarrier(batch=2),
    )
    for s in gl.static_range(2):
        mbarrier.init(tiles.full.index(s), count=1)
        mbarrier.init(tiles.empty.index(s), count=WARPS)
    return tiles


@gluon.jit
def allocate(lhs, rhs, S: gl.constexpr):
    """Allocate `Pipeline` and `Tiles`, with the operands in the layouts of two descriptors."""
    pipeline = Pipeline(
        gl.allocate_shared_memory(lhs.dtype, [S.stages, S.tile_m, STEP], lhs.layout),
        gl.allocate_shared_memory(rhs.dtype, [S.stages, S.tile_n, STEP], rhs.layout),
        mbarrier.allocate_mbarrier(batch=S.stages),
        mbarrier.allocate_mbarrier(batch=S.stages),
        mbarrier.allocate_mbarrier(batch=2),
    )
    STAGES: gl.constexpr = S.stages
    for s in gl.static_range(STAGES):
        mbarrier.init(pipeline.full.index(s), count=1)
        mbarrier.init(pipeline.empty.index(s), count=8)  # warps of the consumers
    for s in gl.static_range(2):
        mbarrier.init(pipeline.turn.index(s), count=4)
    return pipeline, allocate_tiles(8)


@gluon.jit
def grouped_gemm_fp8(
    lhs,  # [S.M, K] float8, blocks of 128 x 128
    rhs,  # [S.num_groups * S.N, K] float8, blocks of 256 x 128
    lhs_scales,  # [S.steps, S.M] float32, and 128 more elements of any value
    rhs_scales,  # [S.num_groups, N / 128, S.steps] float32
    sizes,  # [S.num_groups] int32, rows of each group
    num_taken,  # [1] int32, zero: the number of tiles that programs have taken, which is written in place
    out,  # [S.M, S.N] bounded, blocks of 64 x 128; rows of whole 16-byte words
    num_taken_after,  # `num_taken`
    S: gl.constexpr,
):
    """Compute `out[rows of g] = lhs[rows of g] @ rhs[g].T`, zero in rows past the groups."""
    pipeline, tiles = allocate(lhs, rhs, S)
    staging = gl.allocate_shared_memory(out.dtype, [2, 1, 1, WAVE, HALF_N], out.layout)
    gl.warp_specialize(
        [
            (consume, (pipeline, tiles, staging, out, lhs_scales, rhs_scales, 0, S)),
            (consume, (pipeline, tiles, staging, out, lhs_scales, rhs_scales, 1, S)),
            (produce, (lhs, rhs, pipeline, tiles, sizes, num_taken, S)),
        ],
        [4, 1],
        [240, 24],
    )
