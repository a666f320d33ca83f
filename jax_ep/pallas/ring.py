"""What both kernels do: operands travel through a ring of slots in shared memory.

One warpgroup loads, two multiply. The loading one runs ahead of them by as many steps as there are slots, over the
borders of tiles, so that the next tile's operands arrive while results are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep.pallas.launch import PROGRAM
from jax_ep.pallas.memory import WARPGROUP, Ref, Scalar, int32
from jax_ep.pallas.tiling import CONSUMERS
from jax_ep.types import Array

_LOADING_REGISTERS, _MULTIPLYING_REGISTERS = 40, 232  # per thread: the accumulators of a wide tile alone are 128


class Ring(NamedTuple):
    """Scratch memory of a program.

    Attributes:
      lhs, rhs: `[stages, ...]` operands of one step; there may be more slots behind.
      full: barriers of the slots, which open when both operands are there.
      empty: barriers of the slots, which open when both consumers have read them.
    """

    lhs: Ref
    rhs: Ref
    full: Ref
    empty: Ref


def scratch(lhs: Any, rhs: Any, stages: int, copies: int = 2) -> Ring:
    """Declares a ring of these operands, with so many copies per step."""
    full = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
    return Ring(lhs, rhs, full, plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages))


# --- roles ----------------------------------------------------------------------------------------------------------


def run_tasks[Place, Loaded](
    ring: Ring,
    stages: int,
    num_tasks: Scalar,
    programs: int,
    locate: Callable[[Array], Place],
    load: Callable[[Place, Loaded], Loaded],
    multiply: Callable[[Place, Array], Array],
    *,
    begin: Loaded,
    finish: Callable[[Loaded], None] = lambda _: None,
    leave: Callable[[Array], None] = lambda _: None,
    turning: bool = False,
    loads_as_warp: bool = False,
) -> None:
    """Shares tasks out among programs, and in a program the work on each of them among its warpgroups.

    Args:
      ring: scratch memory.
      stages: of the ring.
      num_tasks: of all programs, at least one.
      programs: how many there are.
      locate: all that the others read of tables about a task. It is asked one task ahead: a microsecond of waiting for
        memory is a tenth of a short task.
      load: `(place, state)` to the state after the task; called by one warpgroup.
      multiply: `(place, step)` to the step after the task; called by the others.
      begin: state before the first `load`.
      finish: what follows the last `load`, of its state.
      leave: what follows the last `multiply`, and all stores, of the step after.
      turning: every other round runs backwards: where tasks become shorter and shorter, all programs get as much. Where
        they do not, programs next to each other keep to tiles next to each other.
      loads_as_warp: one warp calls `load` and `finish`, which then know scalars and copies alone, `one_of` in place of
        `lax.switch`, and `aligned` in place of `pl.multiple_of`. Else all four do, and wait for each other.
    """
    program, warpgroup = lax.axis_index(PROGRAM), lax.axis_index(WARPGROUP)
    rounds = lax.div(num_tasks, int32(programs))

    def task_of(turn: Array) -> Array:
        forwards = (lax.rem(turn, int32(2)) == int32(0)) | (not turning)
        return turn * int32(programs) + jnp.where(forwards, program, int32(programs - 1) - program)

    count = rounds + (task_of(rounds) < num_tasks).astype(jnp.int32)

    def for_each_task[State](role: Callable[[Place, State], State], first: State) -> State:
        def place_of(turn: Array) -> Place:
            return locate(jnp.minimum(task_of(turn), num_tasks - int32(1)))

        def one(turn: Array, carry: tuple[State, Place]) -> tuple[State, Place]:
            state, place = carry
            following = place_of(turn + int32(1))
            return role(place, state), following

        return lax.fori_loop(int32(0), count, one, (first, place_of(jnp.int32(0))))[0]

    @pl.when(warpgroup == CONSUMERS)
    def _loading() -> None:
        plgpu.set_max_registers(_LOADING_REGISTERS, action="decrease")

        def load_all() -> None:
            finish(for_each_task(load, begin))
            for slot in range(stages):  # nobody may leave while others still signal
                plgpu.barrier_wait(ring.empty.at[slot])

        if loads_as_warp:
            plgpu.warp_map(lambda warp: pl.when(warp == int32(0))(load_all))
        else:
            load_all()

    @pl.when(warpgroup < CONSUMERS)
    def _multiplying() -> None:
        plgpu.set_max_registers(_MULTIPLYING_REGISTERS, action="increase")
        for slot in range(stages):
            plgpu.barrier_arrive(ring.empty.at[slot])
        after = for_each_task(multiply, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
        leave(after)


def multiply_steps(
    ring: Ring,
    stages: int,
    step: Array,
    count: Array,
    accumulators: Sequence[Ref],
    operands: Callable[[Array], Sequence[tuple[Ref, Ref]]],
    second: Callable[[], None] | None = None,
) -> None:
    """Adds the products of the `count` steps of a task, of which the first is `step`.

    The products of one step stay in flight; the slot of the one before is free again, all but that of the last step.
    `operands(slot)` are what to multiply for each accumulator, and `second` is called in the second step.
    """

    def one(k: Array, step: Array) -> Array:
        slot = lax.rem(step, int32(stages))
        plgpu.barrier_wait(ring.full.at[slot])
        for accumulator, pair in zip(accumulators, operands(slot), strict=True):
            plgpu.wgmma(accumulator, *pair)
        plgpu.wgmma_wait(len(accumulators))

        @pl.when(k > int32(0))
        def _the_one_before() -> None:
            release(ring, stages, step)
            if second is not None:
                pl.when(k == int32(1))(second)

        return step + int32(1)

    lax.fori_loop(int32(0), count, one, step)


def release(ring: Ring, stages: int, step: Array) -> None:
    """This consumer needs the slot of the step before `step` no longer."""
    plgpu.barrier_arrive(ring.empty.at[before(step, stages)])


def before(step: Array, stages: int) -> Array:
    """The slot of the step before."""
    return lax.rem(step + int32(stages - 1), int32(stages))


def one_of[Result](index: Scalar, branches: Sequence[Callable[[], Result]]) -> Result:
    """`lax.switch` for single warps too: of indices that are in range."""
    if len(branches) == 1:
        return branches[0]()
    half = len(branches) // 2
    low, high = branches[:half], branches[half:]
    return lax.cond(index < int32(half), lambda: one_of(index, low), lambda: one_of(index - int32(half), high))


def aligned(x: Scalar, multiple: int) -> Scalar:
    """`pl.multiple_of` for single warps too: of numbers that are none it is the multiple below."""
    return lax.div(x, int32(multiple)) * int32(multiple)


# --- order of tasks -------------------------------------------------------------------------------------------------


def row_and_column(index: Array, num_rows: Scalar, num_columns: int, band: int) -> tuple[Array, Array]:
    """Tile of rows and tile of columns of a task: bands of rows, in each of them column by column."""
    tasks_per_band = int32(band * num_columns)
    first = lax.div(index, tasks_per_band) * int32(band)
    within = lax.rem(index, tasks_per_band)
    height = jnp.minimum(int32(band), num_rows - first)
    return first + lax.rem(within, height), lax.div(within, height)
