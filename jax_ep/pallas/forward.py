"""The kernel of `out[rows of g] = lhs[rows of g] @ rhs[g]`.

The first and the last tile of a group reach into its neighbours, whose rows they compute in vain and do not store:
other programs write them at the same time. Rows past the groups are a group without steps, so that zeros are stored
there and what they hold is never read.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep.pallas import ring as rings
from jax_ep.pallas import storing
from jax_ep.pallas.memory import WARPGROUP, Ref, Scalar, chunk_columns, int32
from jax_ep.pallas.ring import Ring
from jax_ep.pallas.tiling import ALIGNMENT, STEP, Tiles
from jax_ep.types import Array


def grouped_gemm(
    group: Ref,
    row: Ref,
    start: Ref,
    end: Ref,
    total: Ref,
    lhs: Ref,
    rhs: Ref,
    out: Ref,
    ring: Ring,
    *,
    tiles: Tiles,
    transpose: bool,
    programs: int,
) -> None:
    """`[M, K]` and `[G, K, N]` (`[G, N, K]` with `transpose`) to `[M, N]`; the first five are a `RowTiles`."""
    num_groups, num_columns = rhs.shape[0], -(-out.shape[1] // tiles.columns)
    steps_of_rows = -(-lhs.shape[1] // STEP)
    num_tiles, consumer = total[0], lax.axis_index(WARPGROUP)

    def locate(task: Array) -> tuple[Array, Array, Array]:
        """Index of the tile of rows, first column, and number of steps."""
        tile, column = rings.row_and_column(task, num_tiles, num_columns, tiles.band)
        steps = jnp.where(group[tile] < int32(num_groups), int32(steps_of_rows), int32(0))
        return tile, column * int32(tiles.columns), steps

    def load(task: Array, step: Array) -> Array:
        tile, column, steps = locate(task)
        rows, columns = pl.ds(pl.multiple_of(row[tile], ALIGNMENT), tiles.rows), pl.ds(column, tiles.columns)
        matrix = group[tile]

        def sources(k: Array) -> tuple[Ref, Ref]:
            depth = pl.ds(k * int32(STEP), STEP)
            return lhs.at[rows, depth], rhs.at[(matrix, columns, depth) if transpose else (matrix, depth, columns)]

        return rings.load_steps(ring, tiles, step, steps, sources)

    def multiply(task: Array, step: Array) -> Array:
        tile, column, steps = locate(task)
        rows, columns = rings.consumer_part(tiles, consumer)

        def operands(slot: Array) -> tuple[Ref, Ref]:
            right = ring.rhs.at[slot, columns].transpose((1, 0)) if transpose else ring.rhs.at[slot, :, columns]
            return ring.lhs.at[slot, rows], right

        def product(accumulator: Ref) -> Array:
            rings.multiply_steps(ring, tiles, step, (int32(0), steps), accumulator, operands)
            return accumulator[...]

        result = pl.run_scoped(product, plgpu.ACC((64, tiles.consumer_columns)))
        after = step + steps
        pl.when(steps > int32(0))(lambda: rings.release(ring, tiles, after))
        more_rows, more_columns = rings.consumer_origin(tiles, consumer)
        origin, column = pl.multiple_of(row[tile], ALIGNMENT) + more_rows, column + more_columns

        def target(first: Scalar, height: int, offset: int) -> Ref:
            width = chunk_columns(out.dtype)
            return out.at[pl.ds(origin + first, height), pl.ds(column + int32(offset), width)]

        limit = int32(out.shape[1]) - column if out.shape[1] % tiles.columns else None
        storing.store(ring.store, result, target, (start[tile] - origin, end[tile] - origin), limit)
        return after

    rings.run_tasks(ring, tiles, num_tiles * int32(num_columns), programs, load, multiply)
