"""The kernel of `out[g] = lhs[rows of g].T @ rhs[rows of g]`.

The first and the last step of a group may reach into its neighbours, or past all groups, where anything may lie: those
rows of both operands are set to zero in shared memory, since zero times NaN is not zero. These steps come behind the
others, so that the tensor cores are busy meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep.pallas import ring as rings
from jax_ep.pallas import storing
from jax_ep.pallas.memory import WARPGROUP, Ref, Scalar, int32, line
from jax_ep.pallas.ring import Copy, Ring
from jax_ep.pallas.tiling import ALIGNMENT, CHUNK, CONSUMERS, STEP, TILE, WeightTiles
from jax_ep.types import Array

# How a warpgroup holds blocks of rows: 8 bytes per thread and 64 columns, half a warp per row.
_BLOCKS = plgpu.Layout.TILED(
    plgpu.Tiling(((ALIGNMENT, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


class Place(NamedTuple):
    """A tile of the result: its group, first row and column there, and first row and end of the operands."""

    group: Array
    row: Array
    column: Array
    start: Array
    end: Array


class Steps(NamedTuple):
    """Of a tile: whole ones come first, then that at the begin of the group, then that at its end.

    Attributes:
      total: all of them.
      whole: those that have rows of the group alone.
      begin: how many, none or one, have rows of others before the group.
      first: the row at which blocks of `STEP` rows begin.
    """

    total: Array
    whole: Array
    begin: Array
    first: Array

    def row(self, k: Array) -> Array:
        """First row of step `k`."""
        behind = jnp.where(k < self.whole + self.begin, int32(0), k)
        return self.first + jnp.where(k < self.whole, k + self.begin, behind) * int32(STEP)


def steps_of(place: Place) -> Steps:
    """The steps of a tile."""
    first = place.start & int32(-ALIGNMENT)
    total = lax.div(place.end - first + int32(STEP - 1), int32(STEP))
    total = jnp.where(place.end > place.start, total, int32(0))
    begin = jnp.where(place.start > first, jnp.minimum(total, int32(1)), int32(0))
    whole = jnp.clip(lax.div(place.end - first, int32(STEP)) - begin, int32(0), total - begin)
    return Steps(total, whole, begin, first)


def grouped_gemm_weights(
    start: Ref,
    end: Ref,
    lhs: Ref,
    rhs: Ref,
    out: Ref,
    ring: Ring,
    cleared: Ref,
    *,
    tiles: WeightTiles,
    programs: int,
) -> None:
    """`[M, K]` and `[M, N]` to `[G, K, N]`; groups have rows `[start, end)`, both `[G]`.

    `cleared` is the barrier at which consumers meet after each has cleared its half of the rows of others.
    """
    num_groups, num_tall, num_wide = out.shape[0], -(-out.shape[1] // TILE), -(-out.shape[2] // tiles.columns)
    consumer = lax.axis_index(WARPGROUP)

    def locate(task: Array) -> Place:
        group = lax.div(task, int32(num_tall * num_wide))
        within = lax.rem(task, int32(num_tall * num_wide))
        row, column = rings.row_and_column(within, int32(num_tall), num_wide, tiles.band)
        return Place(group, row * int32(TILE), column * int32(tiles.columns), start[group], end[group])

    def load(place: Place, step: Array) -> Array:
        steps = steps_of(place)
        row, column = pl.multiple_of(place.row, TILE), pl.multiple_of(place.column, tiles.columns)

        def copies(k: Array, slot: Array) -> tuple[Copy, Copy]:
            rows = pl.ds(pl.multiple_of(steps.row(k), ALIGNMENT), STEP)
            left, right = lhs.at[rows, pl.ds(row, TILE)], rhs.at[rows, pl.ds(column, tiles.columns)]
            return Copy(left, ring.lhs.at[slot]), Copy(right, ring.rhs.at[slot])

        return rings.load_steps(ring, tiles.stages, step, steps.total, copies)

    def multiply(place: Place, step: Array) -> Array:
        steps = steps_of(place)
        row = pl.multiple_of(place.row + consumer * int32(CHUNK), CHUNK)
        column = pl.multiple_of(place.column, tiles.columns)
        own = pl.ds(pl.multiple_of(consumer * int32(CHUNK), CHUNK), CHUNK)

        def operands(slot: Array) -> tuple[Ref, Ref]:
            return ring.lhs.at[slot, :, own].transpose((1, 0)), ring.rhs.at[slot]

        def clear(k: Array, slot: Array) -> None:
            here = steps.row(k)
            for buffer in (ring.lhs, ring.rhs):
                _clear_rows(buffer.at[slot], (place.start - here, place.end - here), consumer)
            plgpu.commit_smem()
            plgpu.barrier_arrive(cleared)
            plgpu.barrier_wait(cleared)

        def product(accumulator: Ref) -> Array:
            now = rings.multiply_steps(ring, tiles.stages, step, (int32(0), steps.whole), accumulator, operands)
            rings.multiply_steps(ring, tiles.stages, now, (steps.whole, steps.total), accumulator, operands, clear)
            return accumulator[...]

        result = pl.run_scoped(product, plgpu.ACC((CHUNK, tiles.columns)))
        after = step + steps.total
        pl.when(steps.total > int32(0))(lambda: rings.release(ring, tiles.stages, after))

        def target(offset: int) -> Ref:
            return out.at[place.group, pl.ds(row, CHUNK), pl.ds(column + int32(offset), line(out.dtype))]

        limit = int32(out.shape[2]) - column if out.shape[2] % tiles.columns else None
        # Sizes are multiples of a consumer's rows: it stores all of them, or none.
        pl.when(row < int32(out.shape[1]))(lambda: storing.store_rows(ring.store, result, target, limit))
        return after

    rings.run_tasks(ring, tiles.stages, int32(num_groups * num_tall * num_wide), programs, locate, load, multiply)


def _clear_rows(buffer: Ref, bounds: tuple[Array, Array], consumer: Array) -> None:
    """Sets the rows of `buffer [STEP, columns]` outside of `bounds` to zero, in one consumer's half of the columns."""
    width = buffer.shape[1] // CONSUMERS
    columns = pl.ds(pl.multiple_of(consumer * int32(width), width), width)
    shape = (ALIGNMENT, width)
    start, end = jnp.clip(bounds[0], 0, STEP), jnp.clip(bounds[1], 0, STEP)

    def clear_some(first: Scalar) -> None:
        block = buffer.at[pl.ds(first, ALIGNMENT), columns]
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_BLOCKS) + first
        values = plgpu.load(block, layout=_BLOCKS)
        block[...] = jnp.where((row >= start) & (row < end), values, jnp.zeros((), buffer.dtype))

    def clear_all(i: Array, _: None) -> None:
        rows = pl.ds(pl.multiple_of(i * int32(ALIGNMENT), ALIGNMENT), ALIGNMENT)
        buffer[rows, columns] = plgpu.layout_cast(jnp.zeros(shape, buffer.dtype), _BLOCKS)

    pl.when(start > int32(0))(lambda: clear_some(0))  # groups begin less than a block behind their first step
    last = pl.multiple_of(end & int32(-ALIGNMENT), ALIGNMENT)
    pl.when(end > last)(lambda: clear_some(last))
    behind = lax.div(end + int32(ALIGNMENT - 1), int32(ALIGNMENT))
    lax.fori_loop(behind, int32(STEP // ALIGNMENT), clear_all, None)
