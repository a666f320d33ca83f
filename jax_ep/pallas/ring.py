"""What both kernels do: operands travel through a ring of slots in shared memory.

One warpgroup loads, two multiply. The loading one runs ahead of them by as many steps as there are slots, over the
borders of tiles, so that the next tile's operands arrive while results are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jax_ep.pallas import storing
from jax_ep.pallas.memory import CHUNK_ROWS, WARPGROUP, Ref, Scalar, int32, swizzled
from jax_ep.pallas.tiling import CONSUMERS, Tiles
from jax_ep.types import Array

PROGRAM = "program"
_LOADING_REGISTERS, _MULTIPLYING_REGISTERS = 40, 232  # per thread: the accumulators of a wide tile alone are 128


class Ring(NamedTuple):
    """Scratch memory of a program.

    Attributes:
      lhs, rhs: `[stages, ...]` operands of one step.
      full: barriers of the slots, which open when both operands are there.
      empty: barriers of the slots, which open when both consumers have read them.
      store: parts of the result on their way out, see `storing.scratch`.
    """

    lhs: Ref
    rhs: Ref
    full: Ref
    empty: Ref
    store: Ref


def scratch(lhs: tuple[int, int], rhs: tuple[int, int], dtype: DTypeLike, out_dtype: DTypeLike, stages: int) -> Ring:
    """Declares a ring for operands of these shapes per step."""
    return Ring(
        swizzled((stages, *lhs), dtype),
        swizzled((stages, *rhs), dtype),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        storing.scratch(out_dtype),
    )


# --- roles ----------------------------------------------------------------------------------------------------------


def run_tasks(
    ring: Ring,
    tiles: Tiles,
    num_tasks: Scalar,
    programs: int,
    load: Callable[..., Array],
    multiply: Callable[..., Array],
) -> None:
    """Shares tasks out among programs, and in a program the work on each of them among its warpgroups.

    Args:
      ring: scratch memory.
      tiles: sizes.
      num_tasks: of all programs.
      programs: how many there are.
      load: `(task, step)` to the step after the task; called by one warpgroup.
      multiply: likewise; called by the others.
    """
    program, warpgroup = lax.axis_index(PROGRAM), lax.axis_index(WARPGROUP)
    count = lax.div(num_tasks - program + int32(programs - 1), int32(programs))

    def for_each_task(role: Callable[..., Array]) -> None:
        def one(i: Array, step: Array) -> Array:
            return role(program + i * int32(programs), step)

        lax.fori_loop(int32(0), count, one, int32(0))

    @pl.when(warpgroup == CONSUMERS)
    def _loading() -> None:
        plgpu.set_max_registers(_LOADING_REGISTERS, action="decrease")
        for_each_task(load)
        for slot in range(tiles.stages):  # nobody may leave while others still signal
            plgpu.barrier_wait(ring.empty.at[slot])

    @pl.when(warpgroup < CONSUMERS)
    def _multiplying() -> None:
        plgpu.set_max_registers(_MULTIPLYING_REGISTERS, action="increase")
        for slot in range(tiles.stages):
            plgpu.barrier_arrive(ring.empty.at[slot])
        for_each_task(multiply)
        plgpu.wait_smem_to_gmem(0)


def load_steps(
    ring: Ring, tiles: Tiles, step: Array, count: Array, sources: Callable[[Array], tuple[Ref, Ref]]
) -> Array:
    """Fills slots with `count` steps, of which `sources(k)` are the operands; returns the step after them."""

    def one(k: Array, step: Array) -> Array:
        slot = lax.rem(step, int32(tiles.stages))
        plgpu.barrier_wait(ring.empty.at[slot])
        for source, buffer in zip(sources(k), (ring.lhs, ring.rhs), strict=True):
            plgpu.copy_gmem_to_smem(source, buffer.at[slot], ring.full.at[slot])
        return step + int32(1)

    return lax.fori_loop(int32(0), count, one, step)


def multiply_steps(
    ring: Ring,
    tiles: Tiles,
    step: Array,
    bounds: tuple[Scalar, Scalar],
    accumulator: Ref,
    operands: Callable[[Array], tuple[Ref, Ref]],
    prepare: Callable[[Array, Array], None] | None = None,
) -> Array:
    """Adds the products of steps `bounds` of a task, of which the first is `step`; returns the step after them.

    One product stays in flight; the slot of the one before is free again. `operands(slot)` is what to multiply, and
    `prepare(k, slot)` is called before.
    """

    def one(k: Array, step: Array) -> Array:
        slot = lax.rem(step, int32(tiles.stages))
        plgpu.barrier_wait(ring.full.at[slot])
        if prepare is not None:
            prepare(k, slot)
        plgpu.wgmma(accumulator, *operands(slot))
        plgpu.wgmma_wait(1)
        pl.when(k > int32(0))(lambda: release(ring, tiles, step))
        return step + int32(1)

    return lax.fori_loop(*bounds, one, step)


def release(ring: Ring, tiles: Tiles, step: Array) -> None:
    """This consumer has read the slot of the step before `step`."""
    plgpu.barrier_arrive(ring.empty.at[lax.rem(step + int32(tiles.stages - 1), int32(tiles.stages))])


def consumer_part(tiles: Tiles, consumer: Array) -> tuple[Any, Any]:
    """Rows and columns of a tile of the result that a consumer computes, as slices."""
    every = slice(None)
    if tiles.splits_columns:
        return every, _part(consumer, tiles.consumer_columns)
    return _part(consumer, CHUNK_ROWS), every


def _part(consumer: Array, size: int) -> Any:
    return pl.ds(pl.multiple_of(consumer * int32(size), size), size)


def consumer_origin(tiles: Tiles, consumer: Array) -> tuple[Scalar, Scalar]:
    """First row and column of `consumer_part`."""
    if tiles.splits_columns:
        return int32(0), consumer * int32(tiles.consumer_columns)
    return consumer * int32(CHUNK_ROWS), int32(0)


# --- order of tasks -------------------------------------------------------------------------------------------------


def row_and_column(index: Array, num_rows: Scalar, num_columns: int, band: int) -> tuple[Array, Array]:
    """Tile of rows and tile of columns of a task: bands of rows, in each of them column by column."""
    tasks_per_band = int32(band * num_columns)
    first = lax.div(index, tasks_per_band) * int32(band)
    within = lax.rem(index, tasks_per_band)
    height = jnp.minimum(int32(band), num_rows - first)
    return first + lax.rem(within, height), lax.div(within, height)
