"""The kernel of `out[g] = lhs[rows of g].T @ rhs[rows of g]`.

The first and the last step of a group may reach into its neighbours, or past all groups, where anything may lie: those
rows of both operands are set to zero in shared memory, since zero times NaN is not zero.
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
from jax_ep.pallas.tiling import ALIGNMENT, CONSUMERS, STEP, Tiles
from jax_ep.types import Array

_PART = 64  # columns that a consumer clears at once


def grouped_gemm_weights(
    start: Ref,
    end: Ref,
    lhs: Ref,
    rhs: Ref,
    out: Ref,
    ring: Ring,
    cleared: Ref,
    *,
    tiles: Tiles,
    programs: int,
) -> None:
    """`[M, K]` and `[M, N]` to `[G, K, N]`; groups have rows `[start, end)`, both `[G]`.

    `cleared` is the barrier at which consumers meet after each has cleared its half of the rows of others.
    """
    num_groups, num_tall, num_wide = out.shape[0], -(-out.shape[1] // tiles.rows), -(-out.shape[2] // tiles.columns)
    consumer = lax.axis_index(WARPGROUP)

    def locate(task: Array) -> tuple[Array, Array, Array]:
        """Group, and first row and column in its matrix."""
        group = lax.div(task, int32(num_tall * num_wide))
        within = lax.rem(task, int32(num_tall * num_wide))
        row, column = rings.row_and_column(within, int32(num_tall), num_wide, tiles.band)
        return group, row * int32(tiles.rows), column * int32(tiles.columns)

    def contracted(group: Array) -> tuple[Array, Array]:
        """First row of the first step, and number of steps."""
        first = start[group] & int32(-ALIGNMENT)
        steps = lax.div(end[group] - first + int32(STEP - 1), int32(STEP))
        return pl.multiple_of(first, ALIGNMENT), jnp.where(end[group] > start[group], steps, int32(0))

    def load(task: Array, step: Array) -> Array:
        group, row, column = locate(task)
        first, steps = contracted(group)

        def sources(k: Array) -> tuple[Ref, Ref]:
            rows = pl.ds(first + k * int32(STEP), STEP)
            return lhs.at[rows, pl.ds(row, tiles.rows)], rhs.at[rows, pl.ds(column, tiles.columns)]

        return rings.load_steps(ring, tiles, step, steps, sources)

    def multiply(task: Array, step: Array) -> Array:
        group, row, column = locate(task)
        rows, columns = rings.consumer_part(tiles, consumer)
        first, steps = contracted(group)
        # Steps [0, begin) and [whole, steps) have rows of others; there is at most one of each.
        begin = jnp.where(start[group] > first, jnp.minimum(steps, int32(1)), int32(0))
        whole = jnp.maximum(begin, lax.div(end[group] - first, int32(STEP)))
        whole = jnp.minimum(whole, steps)

        def operands(slot: Array) -> tuple[Ref, Ref]:
            return ring.lhs.at[slot, :, rows].transpose((1, 0)), ring.rhs.at[slot, :, columns]

        def clear(k: Array, slot: Array) -> None:
            here = first + k * int32(STEP)
            for buffer in (ring.lhs, ring.rhs):
                _clear_rows(buffer.at[slot], (start[group] - here, end[group] - here), consumer)
            plgpu.commit_smem()
            plgpu.barrier_arrive(cleared)
            plgpu.barrier_wait(cleared)

        def product(accumulator: Ref) -> Array:
            now = rings.multiply_steps(ring, tiles, step, (int32(0), begin), accumulator, operands, clear)
            now = rings.multiply_steps(ring, tiles, now, (begin, whole), accumulator, operands)
            rings.multiply_steps(ring, tiles, now, (whole, steps), accumulator, operands, clear)
            return accumulator[...]

        result = pl.run_scoped(product, plgpu.ACC((64, tiles.consumer_columns)))
        after = step + steps
        pl.when(steps > int32(0))(lambda: rings.release(ring, tiles, after))
        more_rows, more_columns = rings.consumer_origin(tiles, consumer)

        def target(below: Scalar, height: int, offset: int) -> Ref:
            width = chunk_columns(out.dtype)
            to_rows, to_columns = row + more_rows + below, column + more_columns + int32(offset)
            return out.at[group, pl.ds(to_rows, height), pl.ds(to_columns, width)]

        limit = int32(out.shape[2]) - column - more_columns if out.shape[2] % tiles.columns else None
        # Sizes are multiples of a consumer's rows: it stores all of them, or none.
        has_rows = row + more_rows < int32(out.shape[1])
        pl.when(has_rows)(lambda: storing.store_whole(ring.store, result, target, limit))
        return after

    rings.run_tasks(ring, tiles, int32(num_groups * num_tall * num_wide), programs, load, multiply)


def _clear_rows(buffer: Ref, bounds: tuple[Array, Array], consumer: Array) -> None:
    """Sets the rows of `buffer [STEP, columns]` outside of `bounds` to zero, in one consumer's half of the columns."""
    half = buffer.shape[1] // CONSUMERS
    shape = (STEP, _PART)
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    kept = (row >= bounds[0]) & (row < bounds[1])
    for column in range(0, half, _PART):
        columns = pl.ds(pl.multiple_of(consumer * int32(half) + int32(column), _PART), _PART)
        values = plgpu.load(buffer.at[:, columns], layout=plgpu.Layout.WGMMA)
        buffer[:, columns] = jnp.where(kept, values, jnp.zeros((), buffer.dtype))
