"""The kernel of `out[rows of g] = lhs[rows of g] @ rhs[g].T` for FP8 operands with scales per block.

A step is one block of the contraction. Its sum is scaled and added in float32 registers (promoted.py), which needs a
second sum of the tile there, and a third one while the next product runs. So a tile has 128 rows by 128 columns, and
rows are those of the tensor cores: a thread then has two of them, and scales cost it next to nothing; where they lie
along the columns, as in forward.py, each costs a load and a multiplication.

The last tile of a group may have 64 rows, of which each consumer takes all, and half of the columns. Tiles may reach
into their neighbours, whose rows they compute in vain and do not store. Rows past the groups are a group without steps.

The scales of a step's rows travel with them; the one of its matrix block is read a turn ahead.
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
from jax_ep.pallas.promoted import add_steps, zeros
from jax_ep.pallas.ring import Ring
from jax_ep.pallas.schedule import RowTiles
from jax_ep.pallas.tiling import ALIGNMENT, CHUNK, FP8_STEP, TILE, Fp8Tiles
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
    tiles: Fp8Tiles,
    programs: int,
    interpret: bool,
) -> None:
    """`[M, K]` and `[G, N, K]` to `[M, N]`; `lhs_scales [K / 128, M]`, `rhs_scales [G, N / 128, K / 128]`.

    `scales` are `[stages, TILE]`, those of the rows in the ring; `store` is `epilogue.rows_scratch`.
    """
    num_steps = lhs.shape[1] // FP8_STEP
    tiles_per_row = -(-out.shape[1] // TILE)
    consumer = lax.axis_index(WARPGROUP)
    together = next((number for number in _TOGETHER if num_steps % number == 0), _TOGETHER[0])
    locate = partial(place_of, rows, tiles_per_row=tiles_per_row, num_steps=num_steps, num_groups=rhs.shape[0])

    def load(place: Place, step: Array) -> Array:
        columns = pl.ds(rings.aligned(place.column, TILE), TILE)

        def load_rows(height: int) -> Array:
            own_rows = pl.ds(rings.aligned(place.row, ALIGNMENT), height)

            def one(k: Array, step: Array) -> Array:
                slot, depth = lax.rem(step, int32(tiles.stages)), pl.ds(k * int32(FP8_STEP), FP8_STEP)
                full, some = ring.full.at[slot], pl.ds(0, height)
                plgpu.barrier_wait(ring.empty.at[slot])
                plgpu.copy_gmem_to_smem(lhs.at[own_rows, depth], ring.lhs.at[slot, some], full)
                plgpu.copy_gmem_to_smem(rhs.at[place.group, columns, depth], ring.rhs.at[slot], full)
                plgpu.copy_gmem_to_smem(lhs_scales.at[k, own_rows], scales.at[slot, some], full)
                return step + int32(1)

            return lax.fori_loop(int32(0), place.steps, one, step)

        return rings.one_of(place.height, [partial(load_rows, height) for height in tiles.heights])

    def multiply(place: Place, step: Array) -> Array:
        group, block = jnp.minimum(place.group, int32(rhs.shape[0] - 1)), lax.div(place.column, int32(TILE))
        own = pl.multiple_of(consumer * int32(CHUNK), CHUNK)

        def matrix_scale(k: Array) -> Array:
            return rhs_scales[group, block, jnp.minimum(k, int32(num_steps - 1))]

        def slot_of(k: Array) -> Array:
            return lax.rem(step + k, int32(tiles.stages))

        def multiply_part(row: Scalar, column: Scalar, width: int) -> None:
            """The part of the tile from this row and column on that this consumer makes."""
            own_rows, columns, shape = pl.ds(row, CHUNK), pl.ds(column, width), (CHUNK, width)

            def begin(k: Array) -> Array:
                slot = slot_of(k)
                plgpu.barrier_wait(ring.full.at[slot])
                return wgmma.begin(ring.lhs.at[slot, own_rows], ring.rhs.at[slot, columns], interpret=interpret)

            def add(total: Array, product: Array, k: Array, of_matrix: Array, in_flight: int) -> Array:
                slot = slot_of(k)
                factors = plgpu.load(scales.at[slot, own_rows], layout=_BY_ROW) * of_matrix
                some = wgmma.finish(product, in_flight, interpret=interpret)
                plgpu.barrier_arrive(ring.empty.at[slot])
                return total + some * lax.broadcast_in_dim(factors, shape, (0,))

            total, num_left = zeros(shape), num_steps % together
            left = jnp.minimum(place.steps, int32(num_left))
            if num_left:
                total = add_steps((int32(0), left), num_left, begin, add, total, matrix_scale)
            if num_steps >= together:
                total = add_steps((left, place.steps), together, begin, add, total, matrix_scale)
            first, origin = pl.multiple_of(place.row, ALIGNMENT) + row, pl.multiple_of(place.column, TILE) + column

            def target(below: Scalar, height: int, beside: int, width: int) -> Ref:
                return out.at[pl.ds(first + below, height), pl.ds(origin + int32(beside), width)]

            bounds = place.start - first, place.end - first
            epilogue.store_rows(store, total, target, bounds, out.shape[1] - origin)

        both = partial(multiply_part, own, 0, TILE), partial(multiply_part, 0, own, CHUNK)
        lax.switch(place.height, [both[height == CHUNK] for height in tiles.heights])
        return step + place.steps

    num_tasks, begin = rows.total[0] * int32(tiles_per_row), jnp.int32(0)
    rings.run_tasks(ring, tiles.stages, num_tasks, programs, locate, load, multiply, begin=begin, loads_as_warp=True)


_TOGETHER = (4, 3)  # steps in a row, the first of which none are left over: sums of more do not fit in registers
_BY_ROW = plgpu.Layout.WGMMA.reduce(1)
