"""Grouped GEMM of FP8 operands with scales per block: `out[rows of g] = lhs[rows of g] @ rhs[g].T`.

Roles as in forward.py; consumers issue wgmma in alternation (wgmma.py). A step is one block of K, 128. Its sum is
scaled and added in float32 registers, so a consumer holds the sum of its part of a tile, and the result of a step for
half of its columns. Rows are the M dimension of wgmma: a thread then has two of them, and scales cost next to nothing.
As columns, as in forward.py, each scale would cost a load and a multiplication.

Tiles have 128 rows. The last one of a group may have 64; each consumer then takes all of them and half of the columns.
Tiles may overlap the next group; the extra rows are computed but not stored. Rows past the groups form a group without
steps. Floor: the tensor cores' FP8 rate.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep.pallas import epilogue, wgmma
from jax_ep.pallas import ring as rings
from jax_ep.pallas.forward import Tile, tile_locator
from jax_ep.pallas.launch import WARPGROUP, Ref, Scalar, int32
from jax_ep.pallas.ring import Ring
from jax_ep.pallas.schedule import RowTiles
from jax_ep.pallas.tiling import ALIGNMENT, CHUNK, CONSUMERS, FP8_STEP, TILE, Fp8Tiles
from jax_ep.pallas.wgmma import Sums
from jax_ep.types import Array


def grouped_gemm_fp8(
    rows: RowTiles,
    lhs: Ref,
    rhs: Ref,
    lhs_scales: Ref,
    rhs_scales: Ref,
    out: Ref,
    ring: Ring,
    scales: Ref,
    store: Ref,
    wgmma_ping_pong: Ref,
    *,
    tiles: Fp8Tiles,
    programs: int,
    interpret: bool,
) -> None:
    """Multiply `[M, K]` and `[num_groups, N, K]` to `[M, N]`.

    Scales are `lhs_scales [K / 128, M]` and `rhs_scales [num_groups, N / 128, K / 128]`. `scales` are `[stages, TILE]`,
    those of the rows in the ring; `store` is `epilogue.rows_scratch`; `wgmma_ping_pong` are `wgmma.ping_pong_barriers`.
    """
    consumer, columns = lax.axis_index(WARPGROUP), tiles.columns
    locate, tiles_per_row = tile_locator(rows, lhs, (rhs,), out, block_n=columns, block_k=FP8_STEP)

    def load(tile: Tile, step: Array) -> Array:
        own_columns = pl.ds(rings.aligned(tile.column, columns), columns)

        def load_rows(block_m: int) -> Array:
            own_rows = pl.ds(rings.aligned(tile.row, ALIGNMENT), block_m)

            def one(k: Array, step: Array) -> Array:
                slot, k_block = lax.rem(step, int32(tiles.stages)), pl.ds(k * int32(FP8_STEP), FP8_STEP)
                full, some = ring.full.at[slot], pl.ds(0, block_m)
                # Wait until both consumers have read this stage, then fill it.
                plgpu.barrier_wait(ring.empty.at[slot])
                plgpu.copy_gmem_to_smem(lhs.at[own_rows, k_block], ring.lhs.at[slot, some], full)
                plgpu.copy_gmem_to_smem(rhs.at[tile.group, own_columns, k_block], ring.rhs.at[slot], full)
                plgpu.copy_gmem_to_smem(lhs_scales.at[k, own_rows], scales.at[slot, some], full)
                return step + int32(1)

            return lax.fori_loop(int32(0), tile.steps, one, step)

        return rings.one_of(tile.block_m_index, [partial(load_rows, block_m) for block_m in tiles.heights])

    def multiply(tile: Tile, step: Array) -> Array:
        group = jnp.minimum(tile.group, int32(rhs.shape[0] - 1))
        own = pl.multiple_of(consumer * int32(CHUNK), CHUNK)

        def multiply_part(row: Scalar, column: Scalar, width: int) -> None:
            """Compute and store the part of the tile from this row and column on."""
            own_rows, part = pl.ds(row, CHUNK), min(width, TILE)
            parts = [column + first for first in range(0, width, part)]

            def one(k: Array, total: Sums) -> Sums:
                slot, sums = lax.rem(step + k, int32(tiles.stages)), []
                # Wait until the producer has filled this stage.
                plgpu.barrier_wait(ring.full.at[slot])
                for first, before in zip(parts, total, strict=True):
                    right = ring.rhs.at[slot, pl.ds(first, part)]
                    product = wgmma.begin(wgmma_ping_pong, ring.lhs.at[slot, own_rows], right, interpret=interpret)
                    block = lax.div(tile.column + first, int32(TILE))
                    block_scale = rhs_scales[group, jnp.minimum(block, int32(rhs_scales.shape[1] - 1)), k]
                    factors = plgpu.load(scales.at[slot, own_rows], layout=_BY_ROW) * block_scale
                    some = wgmma.finish(product, interpret=interpret)
                    # Promote to float32 every 128 of K: scale the step's sum, then add.
                    sums.append(before + some * lax.broadcast_in_dim(factors, some.shape, (0,)))
                plgpu.barrier_arrive(ring.empty.at[slot])
                return tuple(sums)

            total = lax.fori_loop(int32(0), tile.steps, one, tuple(wgmma.zeros(part) for _ in parts))
            first, origin = pl.multiple_of(tile.row, ALIGNMENT) + row, pl.multiple_of(tile.column, columns) + column

            def target(below: Scalar, block_m: int, offset: int, width: int) -> Ref:
                return out.at[pl.ds(first + below, block_m), pl.ds(origin + int32(offset), width)]

            bounds = tile.start - first, tile.end - first
            epilogue.store_rows(store, total, target, bounds, out.shape[1] - origin)

        # Large tiles: each consumer has half of the rows. Small ones: all rows and half of the columns.
        half = columns // CONSUMERS
        split_rows = partial(multiply_part, own, 0, columns)
        split_columns = partial(multiply_part, 0, pl.multiple_of(consumer * int32(half), half), half)
        lax.switch(tile.block_m_index, [split_columns if block_m == CHUNK else split_rows for block_m in tiles.heights])
        return step + tile.steps

    wgmma.open_ping_pong(wgmma_ping_pong)
    num_tasks, begin = rows.total[0] * int32(tiles_per_row), jnp.int32(0)
    rings.run_tasks(ring, tiles.stages, num_tasks, programs, locate, load, multiply, begin=begin, loads_as_warp=True)


_BY_ROW = plgpu.Layout.WGMMA.reduce(1)
