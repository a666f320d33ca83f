"""The kernel of `out[g] = lhs[:, places of g] @ rhs[:, places of g].T` for FP8 columns with scales per block of places.

A step is one block of 128 places, of which core/fp8.py lets each belong to one group alone: nothing has to be
cleared. Its sum is scaled by row and column and added in float32 registers, as in forward_fp8.py. Results leave by TMA
from memory of their own, while the next tile is multiplied.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep.pallas import ring as rings
from jax_ep.pallas import wgmma
from jax_ep.pallas.memory import WARPGROUP, Ref, int32
from jax_ep.pallas.ring import Ring
from jax_ep.pallas.tiling import CHUNK, FP8_STEP, TILE, Fp8WeightTiles
from jax_ep.pallas.wgmma import Sums
from jax_ep.types import Array

_BY_ROW, _BY_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
_PART = 64  # columns of a tile whose scales are in registers at a time


class Place(NamedTuple):
    """A tile of the result: its group, first row and column there, and first block and end of the operands."""

    group: Array
    row: Array
    column: Array
    start: Array
    end: Array


class Scales(NamedTuple):
    """Those of the operands in the ring, `[stages, TILE]` and `[stages, columns]`."""

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
    turns: Ref,
    *,
    tiles: Fp8WeightTiles,
    programs: int,
    interpret: bool,
) -> None:
    """`[K, P]`, `[N, P]` and scales `[P / 128, .]` to `[G, K, N]`; groups have blocks `[start, end)`, both `[G]`.

    `results` are `[CONSUMERS, CHUNK, some columns]` in the dtype of the result, and `turns` are `wgmma.turns`.
    """
    num_groups, num_tall, num_wide = out.shape[0], -(-out.shape[1] // TILE), -(-out.shape[2] // tiles.columns)
    consumer = lax.axis_index(WARPGROUP)

    def locate(task: Array) -> Place:
        group = lax.div(task, int32(num_tall * num_wide))
        within = lax.rem(task, int32(num_tall * num_wide))
        row, column = rings.row_and_column(within, int32(num_tall), num_wide, tiles.band)
        return Place(group, row * int32(TILE), column * int32(tiles.columns), start[group], end[group])

    def load(place: Place, step: Array) -> Array:
        rows = pl.ds(rings.aligned(place.row, TILE), TILE)
        columns = pl.ds(rings.aligned(place.column, tiles.columns), tiles.columns)

        def one(block: Array, step: Array) -> Array:
            slot, places = lax.rem(step, int32(tiles.stages)), pl.ds(block * int32(FP8_STEP), FP8_STEP)
            full = ring.full.at[slot]
            plgpu.barrier_wait(ring.empty.at[slot])
            plgpu.copy_gmem_to_smem(lhs.at[rows, places], ring.lhs.at[slot], full)
            plgpu.copy_gmem_to_smem(rhs.at[columns, places], ring.rhs.at[slot], full)
            plgpu.copy_gmem_to_smem(lhs_scales.at[block, rows], scales.lhs.at[slot], full)
            plgpu.copy_gmem_to_smem(rhs_scales.at[block, columns], scales.rhs.at[slot], full)
            return step + int32(1)

        return lax.fori_loop(place.start, place.end, one, step)

    def multiply(place: Place, step: Array) -> Array:
        own = pl.ds(pl.multiple_of(consumer * int32(CHUNK), CHUNK), CHUNK)

        def one(k: Array, total: Sums) -> Sums:
            slot, sums = lax.rem(step + k, int32(tiles.stages)), list(total)
            plgpu.barrier_wait(ring.full.at[slot])
            for half in range(0, tiles.columns, TILE):
                right = ring.rhs.at[slot, pl.ds(half, TILE)]
                product = wgmma.begin(turns, ring.lhs.at[slot, own], right, interpret=interpret)
                by_row = plgpu.load(scales.lhs.at[slot, own], layout=_BY_ROW)
                some = wgmma.finish(product, interpret=interpret)
                # A part at a time: the scales of all columns would leave no registers for the product.
                for first in range(0, TILE, _PART):
                    by_column = plgpu.load(scales.rhs.at[slot, pl.ds(half + first, _PART)], layout=_BY_COLUMN)
                    scaled = some[:, first : first + _PART] * lax.broadcast_in_dim(by_column, (CHUNK, _PART), (1,))
                    scaled *= lax.broadcast_in_dim(by_row, (CHUNK, _PART), (0,))
                    sums[(half + first) // _PART] += scaled
            plgpu.barrier_arrive(ring.empty.at[slot])
            return tuple(sums)

        count = place.end - place.start
        nothing = tuple(wgmma.zeros(_PART) for _ in range(0, tiles.columns, _PART))
        total = lax.fori_loop(int32(0), count, one, nothing)
        row = pl.multiple_of(place.row + consumer * int32(CHUNK), CHUNK)
        # Sizes are multiples of a consumer's rows: all of them are stored, or none.
        pl.when(row < int32(out.shape[1]))(lambda: send(place, row, total))
        return step + count

    def send(place: Place, row: Array, total: Sums) -> None:
        own, width = results.at[consumer], results.shape[2]
        for first in range(0, tiles.columns, width):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the part before, or of the tile before
            for below in range(0, width, _PART):
                own.at[:, pl.ds(below, _PART)][...] = total[(first + below) // _PART].astype(results.dtype)
            plgpu.commit_smem()
            columns = pl.ds(pl.multiple_of(place.column, tiles.columns) + int32(first), width)
            plgpu.copy_smem_to_gmem(own, out.at[place.group, pl.ds(row, CHUNK), columns])

    wgmma.open_turns(turns)
    num_tasks, begin = int32(num_groups * num_tall * num_wide), jnp.int32(0)
    rings.run_tasks(ring, tiles.stages, num_tasks, programs, locate, load, multiply, begin=begin, loads_as_warp=True)
