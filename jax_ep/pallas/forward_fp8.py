"""The kernel of `out[rows of g] = lhs[rows of g] @ rhs[g].T` for FP8 operands with scales per block.

Tiles, and how they are transposed, are those of forward.py. A step is one block of the contraction: tensor cores add
FP8 products in few bits, so that each block's sum is scaled and added in float32 registers, by which a tile is less
high than in 16 bits. While one consumer does so, the other one's product runs.

The scales of a step's rows travel with them; the one of its matrix block is read a step ahead.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep.pallas import epilogue
from jax_ep.pallas import ring as rings
from jax_ep.pallas.forward import Place, place_of
from jax_ep.pallas.memory import WARPGROUP, Ref, int32
from jax_ep.pallas.ring import Ring
from jax_ep.pallas.schedule import RowTiles
from jax_ep.pallas.tiling import ALIGNMENT, CHUNK, FP8_STEP, TILE, ForwardTiles
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
    *,
    tiles: ForwardTiles,
    programs: int,
) -> None:
    """`[M, K]` and `[G, N, K]` to `[M, N]`; `lhs_scales [K / 128, M]`, `rhs_scales [G, N / 128, K / 128]`.

    `scales` are `[stages, heights[-1]]`, those of the rows in the ring.
    """
    num_steps = lhs.shape[1] // FP8_STEP
    tiles_per_row = -(-out.shape[1] // TILE)
    consumer = lax.axis_index(WARPGROUP)
    locate = partial(place_of, rows, tiles_per_row=tiles_per_row, num_steps=num_steps, num_groups=rhs.shape[0])

    def load(place: Place, step: Array) -> Array:
        columns = pl.ds(pl.multiple_of(place.column, TILE), TILE)

        def load_rows(height: int) -> Array:
            own_rows = pl.ds(pl.multiple_of(place.row, ALIGNMENT), height)

            def one(k: Array, step: Array) -> Array:
                slot, depth = lax.rem(step, int32(tiles.stages)), pl.ds(k * int32(FP8_STEP), FP8_STEP)
                full, some = ring.full.at[slot], pl.ds(0, height)
                plgpu.barrier_wait(ring.empty.at[slot])
                plgpu.copy_gmem_to_smem(lhs.at[own_rows, depth], ring.lhs.at[slot, some], full)
                plgpu.copy_gmem_to_smem(rhs.at[place.group, columns, depth], ring.rhs.at[slot], full)
                plgpu.copy_gmem_to_smem(lhs_scales.at[k, own_rows], scales.at[slot, some], full)
                return step + int32(1)

            return lax.fori_loop(int32(0), place.steps, one, step)

        return lax.switch(place.height, [partial(load_rows, height) for height in tiles.heights])

    def multiply(place: Place, step: Array) -> Array:
        first = consumer * int32(CHUNK)
        columns = pl.ds(pl.multiple_of(first, CHUNK), CHUNK)
        group, block = jnp.minimum(place.group, int32(rhs.shape[0] - 1)), lax.div(place.column, int32(TILE))

        def multiply_rows(height: int) -> None:
            def one(k: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                total, matrix_scale, step = carry
                following = rhs_scales[group, block, jnp.minimum(k + int32(1), int32(num_steps - 1))]
                slot = lax.rem(step, int32(tiles.stages))
                plgpu.barrier_wait(ring.full.at[slot])

                def product(accumulator: Ref) -> Array:
                    right = ring.lhs.at[slot, pl.ds(0, height)].transpose((1, 0))
                    plgpu.wgmma(accumulator, ring.rhs.at[slot, columns], right)
                    return accumulator[...]

                own = plgpu.load(scales.at[slot, pl.ds(0, height)], layout=_BY_ROW)
                partial_sum = pl.run_scoped(product, plgpu.ACC((CHUNK, height)))
                plgpu.barrier_arrive(ring.empty.at[slot])
                factors = lax.broadcast_in_dim(own * matrix_scale, (CHUNK, height), (1,))
                return total + partial_sum * factors, following, step + int32(1)

            zeros = plgpu.layout_cast(jnp.zeros((CHUNK, height), jnp.float32), plgpu.Layout.WGMMA)
            begin = zeros, rhs_scales[group, block, 0], step
            total, _, _ = lax.fori_loop(int32(0), place.steps, one, begin)
            origin, column = pl.multiple_of(place.row, ALIGNMENT), pl.multiple_of(place.column, TILE)
            bounds = place.start - origin, place.end - origin

            def target(below: Array, height: int) -> Ref:
                return out.at[pl.ds(origin + below, height), pl.ds(column + first, CHUNK)]

            has_columns = column + first < int32(out.shape[1])
            pl.when(has_columns)(lambda: epilogue.store_columns(store, total, target, bounds))

        lax.switch(place.height, [partial(multiply_rows, height) for height in tiles.heights])
        return step + place.steps

    num_tasks, begin = rows.total[0] * int32(tiles_per_row), jnp.int32(0)
    rings.run_tasks(ring, tiles.stages, num_tasks, programs, locate, load, multiply, begin=begin, turning=True)


_BY_ROW = plgpu.Layout.WGMMA.reduce(0)
