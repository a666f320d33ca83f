"""The kernel of `out[rows of g] = lhs[rows of g] @ rhs[g].T` for FP8 operands with scales per block.

A step is one block of the contraction. Its sum is scaled and added in float32 registers (wgmma.py), so that a consumer
has the sum of its part of a tile there, and the product of a step for half of its columns. Rows are those of the tensor
cores: a thread then has two of them, and scales cost it next to nothing; where they lie along the columns, as in
forward.py, each costs a load and a multiplication.

Tiles have 128 rows. The last one of a group may have 64, of which each consumer takes all, and half of the columns.
Tiles may reach into their neighbours, whose rows they compute in vain and do not store. Rows past the groups are a
group without steps.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep.pallas import epilogue, wgmma
from jax_ep.pallas import ring as rings
from jax_ep.pallas.forward import Place, place_of
from jax_ep.pallas.memory import WARPGROUP, Ref, Scalar, int32
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
    turns: Ref,
    *,
    tiles: Fp8Tiles,
    programs: int,
    interpret: bool,
) -> None:
    """`[M, K]` and `[G, N, K]` to `[M, N]`; `lhs_scales [K / 128, M]`, `rhs_scales [G, N / 128, K / 128]`.

    `scales` are `[stages, TILE]`, those of the rows in the ring; `store` is `epilogue.rows_scratch`, and
    `turns` are `wgmma.turns`.
    """
    num_steps, columns = lhs.shape[1] // FP8_STEP, tiles.columns
    tiles_per_row = -(-out.shape[1] // columns)
    consumer = lax.axis_index(WARPGROUP)
    locate = partial(
        place_of, rows, columns=columns, tiles_per_row=tiles_per_row, num_steps=num_steps, num_groups=rhs.shape[0]
    )

    def load(place: Place, step: Array) -> Array:
        own_columns = pl.ds(rings.aligned(place.column, columns), columns)

        def load_rows(height: int) -> Array:
            own_rows = pl.ds(rings.aligned(place.row, ALIGNMENT), height)

            def one(k: Array, step: Array) -> Array:
                slot, depth = lax.rem(step, int32(tiles.stages)), pl.ds(k * int32(FP8_STEP), FP8_STEP)
                full, some = ring.full.at[slot], pl.ds(0, height)
                plgpu.barrier_wait(ring.empty.at[slot])
                plgpu.copy_gmem_to_smem(lhs.at[own_rows, depth], ring.lhs.at[slot, some], full)
                plgpu.copy_gmem_to_smem(rhs.at[place.group, own_columns, depth], ring.rhs.at[slot], full)
                plgpu.copy_gmem_to_smem(lhs_scales.at[k, own_rows], scales.at[slot, some], full)
                return step + int32(1)

            return lax.fori_loop(int32(0), place.steps, one, step)

        return rings.one_of(place.height, [partial(load_rows, height) for height in tiles.heights])

    def multiply(place: Place, step: Array) -> Array:
        group = jnp.minimum(place.group, int32(rhs.shape[0] - 1))
        own = pl.multiple_of(consumer * int32(CHUNK), CHUNK)

        def multiply_part(row: Scalar, column: Scalar, width: int) -> None:
            """The part of the tile from this row and column on that this consumer makes."""
            own_rows, part = pl.ds(row, CHUNK), min(width, TILE)
            parts = [column + first for first in range(0, width, part)]

            def one(k: Array, total: Sums) -> Sums:
                slot, sums = lax.rem(step + k, int32(tiles.stages)), []
                plgpu.barrier_wait(ring.full.at[slot])
                for first, before in zip(parts, total, strict=True):
                    right = ring.rhs.at[slot, pl.ds(first, part)]
                    product = wgmma.begin(turns, ring.lhs.at[slot, own_rows], right, interpret=interpret)
                    block = lax.div(place.column + first, int32(TILE))
                    of_matrix = rhs_scales[group, jnp.minimum(block, int32(rhs_scales.shape[1] - 1)), k]
                    factors = plgpu.load(scales.at[slot, own_rows], layout=_BY_ROW) * of_matrix
                    some = wgmma.finish(product, interpret=interpret)
                    sums.append(before + some * lax.broadcast_in_dim(factors, some.shape, (0,)))
                plgpu.barrier_arrive(ring.empty.at[slot])
                return tuple(sums)

            total = lax.fori_loop(int32(0), place.steps, one, tuple(wgmma.zeros(part) for _ in parts))
            first, origin = pl.multiple_of(place.row, ALIGNMENT) + row, pl.multiple_of(place.column, columns) + column

            def target(below: Scalar, height: int, beside: int, width: int) -> Ref:
                return out.at[pl.ds(first + below, height), pl.ds(origin + int32(beside), width)]

            bounds = place.start - first, place.end - first
            epilogue.store_rows(store, total, target, bounds, out.shape[1] - origin)

        half = columns // CONSUMERS
        tall = partial(multiply_part, own, 0, columns)
        low = partial(multiply_part, 0, pl.multiple_of(consumer * int32(half), half), half)
        lax.switch(place.height, [low if height == CHUNK else tall for height in tiles.heights])
        return step + place.steps

    wgmma.open_turns(turns)
    num_tasks, begin = rows.total[0] * int32(tiles_per_row), jnp.int32(0)
    rings.run_tasks(ring, tiles.stages, num_tasks, programs, locate, load, multiply, begin=begin, loads_as_warp=True)


_BY_ROW = plgpu.Layout.WGMMA.reduce(1)
