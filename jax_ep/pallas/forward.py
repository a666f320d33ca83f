"""Grouped GEMM: `out[rows of g] = lhs[rows of g] @ rhs[g]`.

Roles. One warpgroup loads steps of K into a ring in shared memory, two multiply (ring.py). Persistent programs take
tiles round-robin; no program waits for another.

Tensor cores multiply 64 rows at a time, but any multiple of 8 columns. So the kernel computes transposed tiles: the
result's columns, which come in whole tiles, take the place of rows, and its rows, whose number the routing decides,
that of columns. Tiles have as many rows as their group needs, in steps of 16; the kernel has one loop per such block_m.

Tiles may overlap the next group; the extra rows are computed but not stored, since other programs write them at the
same time. Rows past the groups form a group without steps: zeros are stored there, and what they hold is never read.
Floor: the tensor cores' rate for many rows per group, reading all weights once for few.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep.pallas import epilogue
from jax_ep.pallas import ring as rings
from jax_ep.pallas.launch import WARPGROUP, Ref, in_array_of, int32
from jax_ep.pallas.ring import Ring
from jax_ep.pallas.schedule import RowTiles
from jax_ep.pallas.tiling import ALIGNMENT, CHUNK, STEP, TILE, ForwardTiles
from jax_ep.types import Array


class Tile(NamedTuple):
    """One tile of the result: fields of `RowTiles`, its first column, and its number of steps."""

    group: Array
    row: Array
    block_m_index: Array
    start: Array
    end: Array
    column: Array
    steps: Array


def tile_locator(rows: RowTiles, lhs: Ref, weights: tuple[Ref, ...], out: Ref) -> tuple[Callable[[Array], Tile], int]:
    """Return a function of tasks to tiles of `out`, and the number of tiles in a row of them."""
    tiles_per_row, num_steps = -(-out.shape[1] // TILE), -(-lhs.shape[1] // STEP)
    num_groups = sum(w.shape[0] for w in weights)

    def locate(task: Array) -> Tile:
        """Return the tile of a task: bands of row tiles, column by column in each band."""
        first_of_row = lax.div(task, int32(tiles_per_row))
        first, count = rows.band[first_of_row], rows.band_size[first_of_row]
        within = task - first * int32(tiles_per_row)
        row_tile, column_tile = first + lax.rem(within, count), lax.div(within, count)
        # Rows past the groups have no steps.
        group = rows.group[row_tile]
        steps = jnp.where(group < int32(num_groups), int32(num_steps), int32(0))
        fields = rows.row[row_tile], rows.block_m_index[row_tile], rows.start[row_tile], rows.end[row_tile]
        return Tile(group, *fields, column_tile * int32(TILE), steps)

    return locate, tiles_per_row


def load_tile(
    lhs: Ref,
    ring: Ring,
    tiles: ForwardTiles,
    load_weights: Callable[[Tile, Array, pl.Slice], None],
    tile: Tile,
    step: Array,
) -> Array:
    """Load the steps of a tile, return the step after; `load_weights(tile, slot, block of K)` is part of each."""

    def load_rows(block_m: int) -> Array:
        own_rows = pl.ds(pl.multiple_of(tile.row, ALIGNMENT), block_m)

        def one(k: Array, step: Array) -> Array:
            slot, k_block = lax.rem(step, int32(ring.stages)), pl.ds(k * int32(STEP), STEP)
            # Wait until both consumers have read this stage, then fill it.
            plgpu.barrier_wait(ring.empty.at[slot])
            plgpu.copy_gmem_to_smem(lhs.at[own_rows, k_block], ring.lhs.at[slot, pl.ds(0, block_m)], ring.full.at[slot])
            load_weights(tile, slot, k_block)
            return step + int32(1)

        return lax.fori_loop(int32(0), tile.steps, one, step)

    return lax.switch(tile.block_m_index, [partial(load_rows, block_m) for block_m in tiles.heights])


def store_tile(views: Ref, result: Array, out: Ref, tile: Tile) -> None:
    """Store the transposed `[64, rows]` of a consumer, except rows of other tiles; `views` are `epilogue.scratch`."""
    origin, first = pl.multiple_of(tile.row, ALIGNMENT), lax.axis_index(WARPGROUP) * int32(CHUNK)
    column = pl.multiple_of(tile.column, TILE) + first
    bounds = tile.start - origin, tile.end - origin

    def target(below: Array, height: int) -> Ref:
        return out.at[pl.ds(origin + below, height), pl.ds(column, CHUNK)]

    # N is a multiple of a consumer's columns: it stores all of them, or none.
    pl.when(column < int32(out.shape[1]))(lambda: epilogue.store(views, result, target, bounds))


def grouped_gemm(
    rows: RowTiles,
    lhs: Ref,
    rhs: tuple[Ref, ...],
    out: Ref,
    ring: Ring,
    store: Ref,
    *,
    tiles: ForwardTiles,
    transpose: bool,
    programs: int,
) -> None:
    """Multiply `[M, K]` and `[num_groups, K, N]` (`[num_groups, N, K]` if `transpose`) to `[M, N]`.

    Weights are in one array or in two, of the first groups and of the others. `store` is `epilogue.scratch`.
    """
    consumer = lax.axis_index(WARPGROUP)
    locate, tiles_per_row = tile_locator(rows, lhs, rhs, out)

    def load_weights(tile: Tile, slot: Array, k_block: pl.Slice) -> None:
        columns = pl.ds(pl.multiple_of(tile.column, TILE), TILE)
        block = (columns, k_block) if transpose else (k_block, columns)

        def copy(w: Ref, group: Array) -> None:
            plgpu.copy_gmem_to_smem(w.at[(group, *block)], ring.rhs.at[slot], ring.full.at[slot])

        in_array_of(rhs, tile.group, copy)

    def multiply(tile: Tile, step: Array) -> Array:
        first = consumer * int32(CHUNK)
        columns = pl.ds(pl.multiple_of(first, CHUNK), CHUNK)
        after = step + tile.steps

        def multiply_rows(block_m: int) -> None:
            def operands(slot: Array) -> tuple[Ref, Ref]:
                # Both operands transposed: weights are the rows of the product.
                weights = ring.rhs.at[slot, columns] if transpose else ring.rhs.at[slot, :, columns].transpose((1, 0))
                return weights, ring.lhs.at[slot, pl.ds(0, block_m)].transpose((1, 0))

            def product(accumulator: Ref) -> Array:
                rings.multiply_steps(ring, step, tile.steps, accumulator, operands)
                return accumulator[...]

            result = pl.run_scoped(product, plgpu.ACC((CHUNK, block_m)))
            # Release the last stage; a tile without steps used none.
            pl.when(tile.steps > int32(0))(lambda: rings.release(ring, after))
            store_tile(store, result, out, tile)

        lax.switch(tile.block_m_index, [partial(multiply_rows, block_m) for block_m in tiles.heights])
        return after

    load = partial(load_tile, lhs, ring, tiles, load_weights)
    num_tasks, begin = rows.total[0] * int32(tiles_per_row), jnp.int32(0)
    rings.run_tasks(ring, num_tasks, programs, locate, load, multiply, begin=begin, reverses=True)
