"""The kernel of `out[rows of g] = lhs[rows of g] @ rhs[g]`.

Tensor cores multiply 64 rows at a time, but any multiple of 8 columns. So the result is computed transposed: its
columns, which come in whole tiles, take the place of rows, and its rows, whose number the routing decides, that of
columns. Tiles have as many rows as their group needs, in steps of 16; the kernel has a loop for each such height.

Tiles may reach into their neighbours, whose rows they compute in vain and do not store: other programs write them at
the same time. Rows past the groups are a group without steps, so that zeros are stored there and what they hold is
never read.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep.pallas import epilogue
from jax_ep.pallas import ring as rings
from jax_ep.pallas.memory import WARPGROUP, Ref, int32
from jax_ep.pallas.ring import Ring
from jax_ep.pallas.schedule import RowTiles
from jax_ep.pallas.tiling import ALIGNMENT, CHUNK, STEP, TILE, ForwardTiles
from jax_ep.types import Array


class Place(NamedTuple):
    """A tile of the result: fields of `RowTiles`, its first column, and number of steps."""

    group: Array
    row: Array
    height: Array
    start: Array
    end: Array
    column: Array
    steps: Array


def place_of(
    rows: RowTiles, task: Array, *, columns: int = TILE, tiles_per_row: int, num_steps: int, num_groups: int
) -> Place:
    """The tile of a task: in bands of tiles of rows, in each of them column by column."""
    any_of_band = lax.div(task, int32(tiles_per_row))
    first, count = rows.band[any_of_band], rows.band_size[any_of_band]
    within = task - first * int32(tiles_per_row)
    tile, number = first + lax.rem(within, count), lax.div(within, count)
    group = rows.group[tile]
    steps = jnp.where(group < int32(num_groups), int32(num_steps), int32(0))
    place = rows.row[tile], rows.height[tile], rows.start[tile], rows.end[tile]
    return Place(group, *place, number * int32(columns), steps)


def store_tile(views: Ref, result: Array, out: Ref, place: Place) -> None:
    """Stores the transposed `[64, rows]` of a consumer, but for rows of other tiles; `views` are `columns_scratch`."""
    origin, first = pl.multiple_of(place.row, ALIGNMENT), lax.axis_index(WARPGROUP) * int32(CHUNK)
    column = pl.multiple_of(place.column, TILE) + first
    bounds = place.start - origin, place.end - origin

    def target(below: Array, height: int) -> Ref:
        return out.at[pl.ds(origin + below, height), pl.ds(column, CHUNK)]

    # Sizes are multiples of a consumer's columns: it stores all of them, or none.
    pl.when(column < int32(out.shape[1]))(lambda: epilogue.store_columns(views, result, target, bounds))


def grouped_gemm(
    rows: RowTiles,
    lhs: Ref,
    rhs: Ref,
    out: Ref,
    ring: Ring,
    store: Ref,
    *,
    tiles: ForwardTiles,
    transpose: bool,
    programs: int,
) -> None:
    """`[M, K]` and `[G, K, N]` (`[G, N, K]` with `transpose`) to `[M, N]`; `store` is `epilogue.columns_scratch`."""
    tiles_per_row = -(-out.shape[1] // TILE)
    consumer = lax.axis_index(WARPGROUP)
    num_steps = -(-lhs.shape[1] // STEP)
    locate = partial(place_of, rows, tiles_per_row=tiles_per_row, num_steps=num_steps, num_groups=rhs.shape[0])

    def load(place: Place, step: Array) -> Array:
        columns = pl.ds(pl.multiple_of(place.column, TILE), TILE)

        def load_rows(height: int) -> Array:
            own_rows = pl.ds(pl.multiple_of(place.row, ALIGNMENT), height)

            def one(k: Array, step: Array) -> Array:
                slot, depth = lax.rem(step, int32(tiles.stages)), pl.ds(k * int32(STEP), STEP)
                left, right = ring.lhs.at[slot, pl.ds(0, height)], ring.rhs.at[slot]
                block = rhs.at[(place.group, columns, depth) if transpose else (place.group, depth, columns)]
                plgpu.barrier_wait(ring.empty.at[slot])
                plgpu.copy_gmem_to_smem(lhs.at[own_rows, depth], left, ring.full.at[slot])
                plgpu.copy_gmem_to_smem(block, right, ring.full.at[slot])
                return step + int32(1)

            return lax.fori_loop(int32(0), place.steps, one, step)

        return lax.switch(place.height, [partial(load_rows, height) for height in tiles.heights])

    def multiply(place: Place, step: Array) -> Array:
        first = consumer * int32(CHUNK)
        columns = pl.ds(pl.multiple_of(first, CHUNK), CHUNK)
        after = step + place.steps

        def multiply_rows(height: int) -> None:
            def operands(slot: Array) -> list[tuple[Ref, Ref]]:
                matrix = ring.rhs.at[slot, columns] if transpose else ring.rhs.at[slot, :, columns].transpose((1, 0))
                return [(matrix, ring.lhs.at[slot, pl.ds(0, height)].transpose((1, 0)))]

            def product(accumulator: Ref) -> Array:
                rings.multiply_steps(ring, tiles.stages, step, place.steps, [accumulator], operands)
                return accumulator[...]

            result = pl.run_scoped(product, plgpu.ACC((CHUNK, height)))
            pl.when(place.steps > int32(0))(lambda: rings.release(ring, tiles.stages, after))
            store_tile(store, result, out, place)

        lax.switch(place.height, [partial(multiply_rows, height) for height in tiles.heights])
        return after

    num_tasks = rows.total[0] * int32(tiles_per_row)
    begin = jnp.int32(0)
    rings.run_tasks(ring, tiles.stages, num_tasks, programs, locate, load, multiply, begin=begin, turning=True)
