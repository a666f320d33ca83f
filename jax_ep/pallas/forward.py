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
    rows: RowTiles, task: Array, *, tiles_per_row: int, num_steps: int, num_groups: int, width: int = TILE
) -> Place:
    """The tile of a task: in bands of tiles of rows, in each of them column by column."""
    any_of_band = lax.div(task, int32(tiles_per_row))
    first, count = rows.band[any_of_band], rows.band_size[any_of_band]
    within = task - first * int32(tiles_per_row)
    tile, column = first + lax.rem(within, count), lax.div(within, count)
    group = rows.group[tile]
    steps = jnp.where(group < int32(num_groups), int32(num_steps), int32(0))
    place = rows.row[tile], rows.height[tile], rows.start[tile], rows.end[tile]
    return Place(group, *place, column * int32(width), steps)


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
    width, parts = tiles.parts * TILE, range(tiles.parts)
    tiles_per_row = -(-out.shape[1] // width)
    consumer = lax.axis_index(WARPGROUP)
    num_steps = -(-lhs.shape[1] // STEP)
    facts = {"tiles_per_row": tiles_per_row, "num_steps": num_steps, "num_groups": rhs.shape[0], "width": width}
    locate = partial(place_of, rows, **facts)

    def load(place: Place, step: Array) -> Array:
        def load_rows(height: int) -> Array:
            own_rows = pl.ds(pl.multiple_of(place.row, ALIGNMENT), height)

            def one(k: Array, step: Array) -> Array:
                slot, depth = lax.rem(step, int32(tiles.stages)), pl.ds(k * int32(STEP), STEP)
                full = ring.full.at[slot]
                plgpu.barrier_wait(ring.empty.at[slot])
                plgpu.copy_gmem_to_smem(lhs.at[own_rows, depth], ring.lhs.at[slot, pl.ds(0, height)], full)
                for part in parts:
                    columns = pl.ds(pl.multiple_of(place.column + int32(part * TILE), TILE), TILE)
                    block = rhs.at[(place.group, columns, depth) if transpose else (place.group, depth, columns)]
                    plgpu.copy_gmem_to_smem(block, ring.rhs.at[slot, part], full)
                return step + int32(1)

            return lax.fori_loop(int32(0), place.steps, one, step)

        return lax.switch(place.height, [partial(load_rows, height) for height in tiles.heights])

    def multiply(place: Place, step: Array) -> Array:
        first = consumer * int32(CHUNK)
        columns = pl.ds(pl.multiple_of(first, CHUNK), CHUNK)
        after = step + place.steps

        def multiply_rows(height: int) -> None:
            def operands(slot: Array) -> list[tuple[Ref, Ref]]:
                left = ring.lhs.at[slot, pl.ds(0, height)].transpose((1, 0))
                matrices = [ring.rhs.at[slot, part] for part in parts]
                return [
                    (matrix.at[columns] if transpose else matrix.at[:, columns].transpose((1, 0)), left)
                    for matrix in matrices
                ]

            def products(*accumulators: Ref) -> list[Array]:
                rings.multiply_steps(ring, tiles.stages, step, place.steps, accumulators, operands)
                return [accumulator[...] for accumulator in accumulators]

            results = pl.run_scoped(products, *[plgpu.ACC((CHUNK, height)) for _ in parts])
            pl.when(place.steps > int32(0))(lambda: rings.release(ring, tiles.stages, after))
            origin = pl.multiple_of(place.row, ALIGNMENT)
            bounds = place.start - origin, place.end - origin
            for part, result in zip(parts, results, strict=True):
                column = pl.multiple_of(place.column + int32(part * TILE), TILE) + first

                def target(below: Array, height: int, column: Array = column) -> Ref:
                    return out.at[pl.ds(origin + below, height), pl.ds(column, CHUNK)]

                # Sizes are multiples of a consumer's columns: it stores all of them, or none.
                has_columns = column < int32(out.shape[1])
                pl.when(has_columns)(partial(epilogue.store_columns, store, result, target, bounds))

        lax.switch(place.height, [partial(multiply_rows, height) for height in tiles.heights])
        return after

    num_tasks = rows.total[0] * int32(tiles_per_row)
    begin = jnp.int32(0)
    rings.run_tasks(ring, tiles.stages, num_tasks, programs, locate, load, multiply, begin=begin, turning=True)
