"""GEMM of prepacked 4-bit weights and few rows per group in Gluon, grouped or masked: `out = rows @ weights[g].T`.

Roles: a producer warp copies rows, packed weights and scales by TMA; a consumer warpgroup decodes and multiplies. A
tile is 128 columns of `S.tile_m` rows. Columns of the weights are the rows of the product, whose first operand tensor
cores take from registers (swap_ab). A step is 128 of K in four pieces, each decoded and then multiplied: up to 16 rows
by mma.sync, more by wgmma. Rows past the end of a group are computed, but not stored. The rows past all groups are one
more group, of zeros.

Waits: the consumer waits for `full[slot]` (the producer's copies have arrived), the producer for `empty[slot]` (the
step has been multiplied). Every wait is for an earlier step of the same program, so one resident program is enough.

Floor: reading the packed weights once at memory bandwidth. A step of 8 rows takes 320 instructions per warp in MXFP4,
210 of them to decode, and 250 in INT4. A tile reads its rows again from L2, so they have as few rows as the groups.
mma.sync multiplies 64 columns and 16 of K by 8 rows in 6 cycles of a multiprocessor, where wgmma takes 13 for up to 16
rows and 16 for 32 (one H200). It also needs no fences and waits, which keep a warp from issuing what follows.

Source: weights as the first operand in registers, and the order of their bits, as in Marlin and Machete.
"""

from __future__ import annotations

from typing import NamedTuple

import triton  # noqa: F401 - first and whole: other threads may be importing it
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from jax_ep.formats.kernels.int4 import unpack_prepacked as decode_int4
from jax_ep.formats.kernels.mxfp4 import TO_FACTORS, UNDO_E2M1_SHIFT
from jax_ep.formats.kernels.mxfp4 import unpack_prepacked as decode_mxfp4

from .gemm_structs import Pointer, Value
from .gluon_gemm import allocate_tiles, arrive, next_tile, send_tile, wait

COLUMNS = gl.constexpr(128)  # of a tile
STEP = gl.constexpr(128)  # K of one pipeline stage
PIECE = gl.constexpr(32)  # K of one product
ROWS_K = gl.constexpr(64)  # K of one copy of rows
WORDS = gl.constexpr(16)  # packed uint32 of a column and step
MMA_SYNC_ROWS = gl.constexpr(16)  # of a tile, up to which mma.sync multiplies
# Word 4 b + t of a column has what thread t of four multiplies in the b-th 32 of K.
PACKED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0], [0, 4], [0, 8], [64, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[128, 16],
    )
)


PACKED_PIECE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0], [64, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[128, 4],
    )
)


@gluon.constexpr_function
def sums_layout(tile_m):
    """Return the layout of products with `tile_m` rows."""
    if tile_m <= MMA_SYNC_ROWS.value:
        return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, tile_m, 16])


class Pipeline(NamedTuple):
    """Operands of `S.stages` steps in shared memory, and their barriers."""

    rows: Value  # [2 * S.stages, S.tile_m, ROWS_K]
    words: Value  # [S.stages, COLUMNS, WORDS]
    scales: Value  # [S.stages, 1, COLUMNS]
    full: Value  # [S.stages] the producer's copies have arrived
    empty: Value  # [S.stages] the consumer has multiplied the step


class Operands(NamedTuple):
    """Descriptors of what the producer copies."""

    rows: Pointer
    words: Pointer
    scales: Pointer


class Groups(NamedTuple):
    """Rows and tiles of each group, `[S.lanes]` int32."""

    index: Value
    starts: Value  # first row
    rows: Value
    tile_ends: Value  # one past the last tile


@gluon.jit
def split_pieces(words):
    """Split the packed words of a step into those of its pieces."""
    first, second = gl.split(gl.permute(gl.reshape(words, (COLUMNS, 2, 8)), (0, 2, 1)))
    a, b = gl.split(gl.permute(gl.reshape(first, (COLUMNS, 2, 4)), (0, 2, 1)))
    c, d = gl.split(gl.permute(gl.reshape(second, (COLUMNS, 2, 4)), (0, 2, 1)))
    return (
        gl.convert_layout(a, PACKED_PIECE),
        gl.convert_layout(b, PACKED_PIECE),
        gl.convert_layout(c, PACKED_PIECE),
        gl.convert_layout(d, PACKED_PIECE),
    )


@gluon.jit
def load_factors(scales):
    """Load the bf16x2 factors of each column in the pieces of a step, `[COLUMNS, 1]` each."""
    exponents = scales.load(gl.SliceLayout(1, PACKED_PIECE))
    a, b, c, d = gl.inline_asm_elementwise(
        TO_FACTORS, "=r,=r,=r,=r,r", [exponents], (gl.int32, gl.int32, gl.int32, gl.int32), True, 1
    )
    return gl.expand_dims(a, 1), gl.expand_dims(b, 1), gl.expand_dims(c, 1), gl.expand_dims(d, 1)


@gluon.jit
def store_tile(total, out_ptr, row, column, end, S: gl.constexpr):
    """Store the rows before `end` of a tile `[COLUMNS, S.tile_m]`, which is transposed first."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    values = gl.convert_layout(gl.permute(total, (1, 0)).to(out_ptr.dtype.element_ty), LAYOUT)
    rows = gl.expand_dims(row + gl.arange(0, S.tile_m, gl.SliceLayout(1, LAYOUT)), 1)
    column = column // COLUMNS * COLUMNS  # tells the compiler that stores of 16 bytes are aligned
    columns = gl.expand_dims(column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT)), 0)
    gl.store(out_ptr + (rows.to(gl.int64) * S.N + columns), values, mask=(rows < end) & (columns < S.N))


@gluon.jit
def decode(words, factors, piece: gl.constexpr, LAYOUT: gl.constexpr, S: gl.constexpr):
    """Decode a piece of the weights, `[COLUMNS, PIECE]`."""
    if S.decoder == "mxfp4":
        values = decode_mxfp4(words[piece], factors[piece], gl.bfloat16)
    else:
        values = decode_int4(words[piece])
    return gl.convert_layout(values, LAYOUT)  # moves nothing


@gluon.jit
def rows_of(pipeline, slot, piece: gl.constexpr):
    """Return a piece of the rows in shared memory, `[PIECE, S.tile_m]`."""
    rows = pipeline.rows.index(2 * slot + piece * PIECE // ROWS_K)
    return rows.slice(piece * PIECE % ROWS_K, PIECE, dim=1).permute((1, 0))


@gluon.jit
def await_step(pipeline, count, S: gl.constexpr):
    """Wait for a step; return its slot, packed pieces, factors (MXFP4 only), and scales in shared memory."""
    slot = count % S.stages
    wait(pipeline.full.index(slot), (count // S.stages) & 1)
    words = split_pieces(pipeline.words.index(slot).load(PACKED))
    scales = pipeline.scales.index(slot).reshape((COLUMNS,))
    factors = ()
    if S.decoder == "mxfp4":
        factors = load_factors(scales)
    return slot, words, factors, scales


@gluon.jit
def multiply_by_mma_sync(pipeline, count, steps, S: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """Multiply few rows by mma.sync, see `multiply`."""
    SUMS: gl.constexpr = sums_layout(S.tile_m)
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=SUMS, k_width=2)
    MXFP4: gl.constexpr = S.decoder == "mxfp4"
    total = gl.zeros((COLUMNS, S.tile_m), gl.float32, SUMS)
    for i in range((GROUP + count) % GROUPS, steps, GROUPS):
        slot, words, factors, stored_scales = await_step(pipeline, count + i, S)
        if MXFP4:
            part = total
        else:
            scales = stored_scales.load(gl.SliceLayout(1, SUMS))
            part = gl.zeros((COLUMNS, S.tile_m), gl.float32, SUMS)
        for piece in gl.static_range(4):
            rows = rows_of(pipeline, slot, piece).load(RIGHT)
            part = mma_v2(decode(words, factors, piece, LEFT, S), rows, part)
        arrive(pipeline.empty.index(slot))
        if MXFP4:
            total = part
        else:
            total += part * gl.expand_dims(scales, 1)  # one scale per column and step
    if MXFP4:
        total *= UNDO_E2M1_SHIFT
    return total, count + steps


@gluon.jit
def multiply_by_wgmma(pipeline, count, steps, S: gl.constexpr):
    """Multiply more rows by wgmma, see `multiply`; a piece is decoded while the one before is multiplied."""
    SUMS: gl.constexpr = sums_layout(S.tile_m)
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    MXFP4: gl.constexpr = S.decoder == "mxfp4"
    total = gl.zeros((COLUMNS, S.tile_m), gl.float32, SUMS)
    scales = gl.zeros((COLUMNS,), gl.float32, gl.SliceLayout(1, SUMS))
    part = warpgroup_mma_init(gl.zeros((COLUMNS, S.tile_m), gl.float32, SUMS))
    for i in range(steps):
        slot, words, factors, stored_scales = await_step(pipeline, count, S)
        for piece in gl.static_range(4):
            left = decode(words, factors, piece, LEFT, S)
            part = warpgroup_mma_wait(0, deps=(part,))
            if piece == 0:
                if i > 0:
                    arrive(pipeline.empty.index((count + S.stages - 1) % S.stages))
                if not MXFP4:
                    # One scale per column and step: scale the sum of the step before.
                    total += part * gl.expand_dims(scales, 1)
                    scales = stored_scales.load(gl.SliceLayout(1, SUMS))
            rows = rows_of(pipeline, slot, piece)
            part = warpgroup_mma(left, rows, part, use_acc=MXFP4 or piece > 0, is_async=True)
        count += 1
    part = warpgroup_mma_wait(0, deps=(part,))
    if steps > 0:
        arrive(pipeline.empty.index((count + S.stages - 1) % S.stages))
    if MXFP4:
        total = part * UNDO_E2M1_SHIFT
    else:
        total += part * gl.expand_dims(scales, 1)
    return total, count


@gluon.jit
def multiply(pipeline, count, steps, S: gl.constexpr, GROUP: gl.constexpr = 0, GROUPS: gl.constexpr = 1):
    """Sum `steps` steps, from step `count` of the pipeline on: `[COLUMNS, S.tile_m]` float32; return the next, too.

    Two warpgroups (GROUPS) share the steps of few rows by their parity: GROUP has steps in slots of the same parity.
    """
    if S.tile_m <= MMA_SYNC_ROWS:
        total, count = multiply_by_mma_sync(pipeline, count, steps, S, GROUP, GROUPS)
    else:
        gl.static_assert(GROUPS == 1)
        total, count = multiply_by_wgmma(pipeline, count, steps, S)
    return total, count


@gluon.jit
def consume(pipeline, tiles, out_ptr, S: gl.constexpr):
    """Multiply and store the tiles that the producer hands over."""
    count = 0
    number = 0
    row, column, end, group = next_tile(number, tiles)
    while group >= 0:
        steps = S.steps
        if group == S.num_groups:
            steps = 0
        total, count = multiply(pipeline, count, steps, S)
        store_tile(total, out_ptr, row, column, end, S)
        arrive(tiles.empty.index(number % 2))
        number += 1
        row, column, end, group = next_tile(number, tiles)


@gluon.jit
def locate_groups(sizes_ptr, S: gl.constexpr):
    """Return the `Groups` of sizes `[S.num_groups]`, and the number of tiles; none reaches past row M."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([S.lanes // 32], [32], [1], [0])
    index = gl.arange(0, S.lanes, LAYOUT)
    sizes = gl.maximum(gl.load(sizes_ptr + index, mask=index < S.num_groups, other=0), 0)
    if S.masked:
        starts = index * S.M
        rows = gl.minimum(sizes, S.M)
    else:
        # Sizes may be any int32: sums of large ones need 64 bits.
        ends = gl.cumsum(sizes.to(gl.int64), axis=0)
        starts = gl.minimum(ends - sizes, S.M).to(gl.int32)
        rows = gl.minimum(ends, S.M).to(gl.int32) - starts
        rows = gl.where(index == S.num_groups, S.M - starts, rows)
    tile_ends = gl.cumsum((rows + S.tile_m - 1) // S.tile_m * S.tiles_n, axis=0)
    return Groups(index, starts, rows, tile_ends), gl.max(tile_ends, axis=0)


@gluon.jit
def produce(operands, sizes_ptr, num_taken, pipeline, tiles, S: gl.constexpr):
    """Hand tiles to the consumer, and copy their operands.

    The first tile is that of the program's number, the others are the next that no program has taken. Tiles run down
    the rows of a group first, so that programs which share weights run at the same time.
    """
    groups, num_tiles = locate_groups(sizes_ptr, S)
    count = 0
    number = 0
    tile = gl.program_id(0)
    programs = gl.num_programs(0)
    while tile < num_tiles:
        next_tile = programs + gl.atomic_add(num_taken, 1, sem="relaxed")
        before = groups.tile_ends <= tile
        group = gl.sum(before.to(gl.int32), axis=0)
        inside = tile - gl.max(gl.where(before, groups.tile_ends, 0), axis=0)
        start = gl.sum(gl.where(groups.index == group, groups.starts, 0), axis=0)
        size = gl.sum(gl.where(groups.index == group, groups.rows, 0), axis=0)
        tiles_m = (size + S.tile_m - 1) // S.tile_m
        row = start + inside % tiles_m * S.tile_m
        column = inside // tiles_m * COLUMNS
        send_tile(row, column, start + size, group, number, tiles)
        if group < S.num_groups:
            for k in range(S.steps):
                slot = count % S.stages
                full = pipeline.full.index(slot)
                wait(pipeline.empty.index(slot), ((count // S.stages) & 1) ^ 1)
                mbarrier.expect(full, 4 * COLUMNS * (WORDS + 1) + 2 * S.tile_m * STEP)
                tma.async_load(operands.words, [group * S.N + column, k * WORDS], full, pipeline.words.index(slot))
                tma.async_load(operands.scales, [group * S.steps + k, column], full, pipeline.scales.index(slot))
                tma.async_load(operands.rows, [row, k * STEP], full, pipeline.rows.index(2 * slot))
                tma.async_load(operands.rows, [row, k * STEP + ROWS_K], full, pipeline.rows.index(2 * slot + 1))
                count += 1
        number += 1
        tile = next_tile
    send_tile(0, 0, 0, -1, number, tiles)


@gluon.jit
def prepacked_gemm(
    rows,  # [M, K] bfloat16, of masked groups [num_groups * M, K], blocks of S.tile_m x ROWS_K
    words,  # [num_groups * N, K / 8] uint32, blocks of COLUMNS x WORDS
    scales,  # [num_groups * S.steps, N], blocks of 1 x COLUMNS
    sizes_ptr,  # [num_groups] int32
    num_taken,  # [1] int32, zero: the number of tiles that programs have taken, which is written in place
    out_ptr,  # [M, N], of masked groups [num_groups * M, N]
    num_taken_after,  # `num_taken`
    S: gl.constexpr,
):
    """Compute `out[rows of g] = rows[rows of g] @ weights[g].T`; zero in rows past the groups, unless masked."""
    pipeline = Pipeline(
        gl.allocate_shared_memory(rows.dtype, [2 * S.stages, S.tile_m, ROWS_K], rows.layout),
        gl.allocate_shared_memory(words.dtype, [S.stages, COLUMNS, WORDS], words.layout),
        gl.allocate_shared_memory(scales.dtype, [S.stages, 1, COLUMNS], scales.layout),
        mbarrier.allocate_mbarrier(batch=S.stages),
        mbarrier.allocate_mbarrier(batch=S.stages),
    )
    STAGES: gl.constexpr = S.stages
    for s in gl.static_range(STAGES):
        mbarrier.init(pipeline.full.index(s), count=1)
        mbarrier.init(pipeline.empty.index(s), count=4)  # warps of the consumer
    tiles = allocate_tiles(4)
    operands = Operands(rows, words, scales)
    gl.warp_specialize(
        [
            (consume, (pipeline, tiles, out_ptr, S)),
            (produce, (operands, sizes_ptr, num_taken, pipeline, tiles, S)),
        ],
        [1],
        [24],
    )
