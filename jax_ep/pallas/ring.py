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

from jax_ep.pallas.memory import WARPGROUP, Ref, Scalar, int32, swizzled
from jax_ep.pallas.tiling import CONSUMERS
from jax_ep.types import Array

PROGRAM = "program"
_LOADING_REGISTERS, _MULTIPLYING_REGISTERS = 40, 232  # per thread: the accumulators of a wide tile alone are 128


class Copy(NamedTuple):
    """What the loading warpgroup copies in one step.

    Attributes:
      source: in global memory.
      target: in a slot.
    """

    source: Ref
    target: Ref


class Ring(NamedTuple):
    """Scratch memory of a program.

    Attributes:
      lhs, rhs: `[stages, ...]` operands of one step.
      full: barriers of the slots, which open when both operands are there.
      empty: barriers of the slots, which open when both consumers have read them.
      store: parts of the result on their way out, see `storing.rows_scratch` and `columns_scratch`.
    """

    lhs: Ref
    rhs: Ref
    full: Ref
    empty: Ref
    store: Ref


def scratch(lhs: tuple[int, int], rhs: tuple[int, int], dtype: DTypeLike, store: Any, stages: int) -> Ring:
    """Declares a ring for operands of these shapes per step."""
    full = plgpu.Barrier(num_arrivals=2, num_barriers=stages)
    empty = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages)
    return Ring(swizzled((stages, *lhs), dtype), swizzled((stages, *rhs), dtype), full, empty, store)


# --- roles ----------------------------------------------------------------------------------------------------------


def run_tasks[Place](
    ring: Ring,
    stages: int,
    num_tasks: Scalar,
    programs: int,
    locate: Callable[[Array], Place],
    load: Callable[[Place, Array], Array],
    multiply: Callable[[Place, Array], Array],
) -> None:
    """Shares tasks out among programs, and in a program the work on each of them among its warpgroups.

    Args:
      ring: scratch memory.
      stages: of the ring.
      num_tasks: of all programs, at least one.
      programs: how many there are.
      locate: all that the others read of tables about a task. It is asked one task ahead: a microsecond of waiting for
        memory is a tenth of a short task.
      load: `(place, step)` to the step after the task; called by one warpgroup.
      multiply: likewise; called by the others.
    """
    program, warpgroup = lax.axis_index(PROGRAM), lax.axis_index(WARPGROUP)
    rounds = lax.div(num_tasks, int32(programs))

    def task_of(turn: Array) -> Array:
        """Every other round runs backwards: where tasks become shorter and shorter, all programs get as much."""
        forwards = lax.rem(turn, int32(2)) == int32(0)
        return turn * int32(programs) + jnp.where(forwards, program, int32(programs - 1) - program)

    count = rounds + (task_of(rounds) < num_tasks).astype(jnp.int32)

    def for_each_task(role: Callable[[Place, Array], Array]) -> None:
        def place_of(turn: Array) -> Place:
            return locate(jnp.minimum(task_of(turn), num_tasks - int32(1)))

        def one(turn: Array, state: tuple[Array, Place]) -> tuple[Array, Place]:
            step, place = state
            following = place_of(turn + int32(1))
            return role(place, step), following

        lax.fori_loop(int32(0), count, one, (int32(0), place_of(jnp.int32(0))))

    @pl.when(warpgroup == CONSUMERS)
    def _loading() -> None:
        plgpu.set_max_registers(_LOADING_REGISTERS, action="decrease")
        for_each_task(load)
        for slot in range(stages):  # nobody may leave while others still signal
            plgpu.barrier_wait(ring.empty.at[slot])

    @pl.when(warpgroup < CONSUMERS)
    def _multiplying() -> None:
        plgpu.set_max_registers(_MULTIPLYING_REGISTERS, action="increase")
        for slot in range(stages):
            plgpu.barrier_arrive(ring.empty.at[slot])
        for_each_task(multiply)
        plgpu.wait_smem_to_gmem(0)


def load_steps(
    ring: Ring, stages: int, step: Array, count: Array, copies: Callable[[Array, Array], tuple[Copy, Copy]]
) -> Array:
    """Fills slots with `count` steps, by `copies(k, slot)`; returns the step after them."""

    def one(k: Array, step: Array) -> Array:
        slot = lax.rem(step, int32(stages))
        plgpu.barrier_wait(ring.empty.at[slot])
        for copy in copies(k, slot):
            plgpu.copy_gmem_to_smem(copy.source, copy.target, ring.full.at[slot])
        return step + int32(1)

    return lax.fori_loop(int32(0), count, one, step)


def multiply_steps(
    ring: Ring,
    stages: int,
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
        slot = lax.rem(step, int32(stages))
        plgpu.barrier_wait(ring.full.at[slot])
        if prepare is not None:
            prepare(k, slot)
        plgpu.wgmma(accumulator, *operands(slot))
        plgpu.wgmma_wait(1)
        pl.when(k > int32(0))(lambda: release(ring, stages, step))
        return step + int32(1)

    return lax.fori_loop(*bounds, one, step)


def release(ring: Ring, stages: int, step: Array) -> None:
    """This consumer has read the slot of the step before `step`."""
    plgpu.barrier_arrive(ring.empty.at[lax.rem(step + int32(stages - 1), int32(stages))])


# --- order of tasks -------------------------------------------------------------------------------------------------


def row_and_column(index: Array, num_rows: Scalar, num_columns: int, band: int) -> tuple[Array, Array]:
    """Tile of rows and tile of columns of a task: bands of rows, in each of them column by column."""
    tasks_per_band = int32(band * num_columns)
    first = lax.div(index, tasks_per_band) * int32(band)
    within = lax.rem(index, tasks_per_band)
    height = jnp.minimum(int32(band), num_rows - first)
    return first + lax.rem(within, height), lax.div(within, height)
