"""Weight gradient of column-wise FP8 operands: `out[g] = lhs[:, places of g] @ rhs[:, places of g].T`.

Roles as in forward_fp8.py. A step is one block of 128 places. core/fp8.py gives each block to one group, so no
rows have to be cleared. Its sum is scaled by row and column and added in float32 registers. Results leave by TMA from
their own shared memory while the next tile is multiplied. Floor: the tensor cores' FP8 rate.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep.pallas import ring as rings
from jax_ep.pallas import wgmma
from jax_ep.pallas.gradient import Tile, tile_locator
from jax_ep.pallas.launch import WARPGROUP, Ref, int32
from jax_ep.pallas.ring import Ring
from jax_ep.pallas.tiling import CHUNK, FP8_STEP, TILE, Fp8WeightTiles
from jax_ep.pallas.wgmma import Sums
from jax_ep.types import Array

_BY_ROW, _BY_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
_PART = 64  # columns whose scales are in registers at a time


class Scales(NamedTuple):
    """Scales of the operands in the ring, `[stages, TILE]` and `[stages, columns]`."""

    lhs: Ref
    rhs: Ref


def weight_gradient_fp8(
    start: Ref,
    end: Ref,
    lhs: Ref,
    rhs: Ref,
    lhs_scales: Ref,
    rhs_scales: Ref,
    out: Ref,
    ring: Ring,
    scales: Scales,
    results: Ref,
    wgmma_ping_pong: Ref,
    *,
    tiles: Fp8WeightTiles,
    programs: int,
    interpret: bool,
) -> None:
    """Contract `[K, places]` and `[N, places]` to `[num_groups, K, N]`; group g has blocks `[start[g], end[g])`.

    Scales are `[places / 128, .]`. `results` are `[CONSUMERS, CHUNK, some columns]` in the dtype of the result;
    `wgmma_ping_pong` are `wgmma.ping_pong_barriers`.
    """
    consumer = lax.axis_index(WARPGROUP)
    locate, num_tasks = tile_locator(start, end, (out,), tiles)

    def load(tile: Tile, step: Array) -> Array:
        rows = pl.ds(rings.aligned(tile.row, TILE), TILE)
        columns = pl.ds(rings.aligned(tile.column, tiles.columns), tiles.columns)

        def one(block: Array, step: Array) -> Array:
            slot, places = lax.rem(step, int32(tiles.stages)), pl.ds(block * int32(FP8_STEP), FP8_STEP)
            full = ring.full.at[slot]
            # Wait until both consumers have read this stage, then fill it.
            plgpu.barrier_wait(ring.empty.at[slot])
            plgpu.copy_gmem_to_smem(lhs.at[rows, places], ring.lhs.at[slot], full)
            plgpu.copy_gmem_to_smem(rhs.at[columns, places], ring.rhs.at[slot], full)
            plgpu.copy_gmem_to_smem(lhs_scales.at[block, rows], scales.lhs.at[slot], full)
            plgpu.copy_gmem_to_smem(rhs_scales.at[block, columns], scales.rhs.at[slot], full)
            return step + int32(1)

        return lax.fori_loop(tile.start, tile.end, one, step)

    def multiply(tile: Tile, step: Array) -> Array:
        own = pl.ds(pl.multiple_of(consumer * int32(CHUNK), CHUNK), CHUNK)

        def one(k: Array, total: Sums) -> Sums:
            slot, sums = lax.rem(step + k, int32(tiles.stages)), list(total)
            # Wait until the producer has filled this stage.
            plgpu.barrier_wait(ring.full.at[slot])
            for half in range(0, tiles.columns, TILE):
                right = ring.rhs.at[slot, pl.ds(half, TILE)]
                product = wgmma.begin(wgmma_ping_pong, ring.lhs.at[slot, own], right, interpret=interpret)
                by_row = plgpu.load(scales.lhs.at[slot, own], layout=_BY_ROW)
                some = wgmma.finish(product, interpret=interpret)
                # Scale and add some columns at a time: scales of all would leave no registers for the product.
                for first in range(0, TILE, _PART):
                    by_column = plgpu.load(scales.rhs.at[slot, pl.ds(half + first, _PART)], layout=_BY_COLUMN)
                    scaled = some[:, first : first + _PART] * lax.broadcast_in_dim(by_column, (CHUNK, _PART), (1,))
                    scaled *= lax.broadcast_in_dim(by_row, (CHUNK, _PART), (0,))
                    sums[(half + first) // _PART] += scaled
            plgpu.barrier_arrive(ring.empty.at[slot])
            return tuple(sums)

        count = tile.end - tile.start
        nothing = tuple(wgmma.zeros(_PART) for _ in range(0, tiles.columns, _PART))
        total = lax.fori_loop(int32(0), count, one, nothing)
        row = pl.multiple_of(tile.row + consumer * int32(CHUNK), CHUNK)
        # K is a multiple of a consumer's rows: it stores all of them, or none.
        pl.when(row < int32(out.shape[1]))(lambda: send(tile, row, total))
        return step + count

    def send(tile: Tile, row: Array, total: Sums) -> None:
        own, width = results.at[consumer], results.shape[2]
        for first in range(0, tiles.columns, width):
            # Wait until the previous part, or tile, has been read from shared memory.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for below in range(0, width, _PART):
                own.at[:, pl.ds(below, _PART)][...] = total[(first + below) // _PART].astype(results.dtype)
            plgpu.commit_smem()
            columns = pl.ds(pl.multiple_of(tile.column, tiles.columns) + int32(first), width)
            plgpu.copy_smem_to_gmem(own, out.at[tile.group, pl.ds(row, CHUNK), columns])

    wgmma.open_ping_pong(wgmma_ping_pong)
    tasks, begin = int32(num_tasks), jnp.int32(0)
    rings.run_tasks(ring, tiles.stages, tasks, programs, locate, load, multiply, begin=begin, loads_as_warp=True)
