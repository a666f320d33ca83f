"""The ring: operands travel through slots (stages) in shared memory from one loading warpgroup to two multiplying ones.

Roles. Warpgroups 0 and 1 are consumers, each with the accumulators of half of a tile; warpgroup 2 is the producer. The
producer runs up to `stages` steps ahead, across tiles, so the next tile's operands arrive while results are stored.

Waits. Per slot, `full` opens when all copies of a step have arrived, and `empty` when both consumers have read it. The
producer waits for `empty` before it fills a slot, a consumer for `full` before it multiplies. It cannot deadlock:
consumers open all slots at the start, and each waits only for a step that precedes what it holds.

Programs are persistent, take tasks round-robin and do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep.pallas.launch import PROGRAM, WARPGROUP, Ref, Scalar, Scratch, int32
from jax_ep.pallas.tiling import CONSUMERS
from jax_ep.types import Array

# Per thread. The accumulators of a wide tile alone take 128.
_LOADING_REGISTERS, _MULTIPLYING_REGISTERS = 40, 232


class Ring(NamedTuple):
    """Scratch memory of a program.

    Attributes:
      lhs, rhs: `[stages, ...]` operands of one step.
      full: barriers of the slots, which open when both operands have arrived.
      empty: barriers of the slots, which open when both consumers have read them.
    """

    lhs: Ref
    rhs: Ref
    full: Ref
    empty: Ref

    @property
    def stages(self) -> int:
        """Number of slots for operands."""
        num_slots: int = self.lhs.shape[0]
        return num_slots


def scratch(lhs: Scratch, rhs: Scratch, stages: int) -> Ring:
    """Declare a ring of these operands; a step arrives in two copies."""
    full = plgpu.Barrier(num_arrivals=2, num_barriers=stages)
    return Ring(lhs, rhs, full, plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages))


def run_tasks[Tile, Loaded](
    ring: Ring,
    num_tasks: Scalar,
    programs: int,
    locate: Callable[[Array], Tile],
    load: Callable[[Tile, Loaded], Loaded],
    multiply: Callable[[Tile, Array], Array],
    *,
    begin: Loaded,
    finish: Callable[[Loaded], None] = lambda _: None,
    reverses: bool = False,
) -> None:
    """Share tasks among programs, and the work on each task among the program's warpgroups.

    Args:
      ring: scratch memory.
      num_tasks: tasks of all programs, at least one.
      programs: number of programs.
      locate: looks up a task in tables. It runs one task ahead: a microsecond of waiting for memory is a tenth of a
        short task.
      load: `(tile, state)` to the state after the task; the producer calls it.
      multiply: `(tile, step)` to the step after the task; consumers call it.
      begin: state before the first `load`.
      finish: runs after the last `load`, with its state.
      reverses: run every other round backwards. If tasks get shorter and shorter, all programs get equal shares;
        otherwise neighboring programs keep neighboring tiles.
    """
    program, warpgroup = lax.axis_index(PROGRAM), lax.axis_index(WARPGROUP)
    rounds = lax.div(num_tasks, int32(programs))

    def task_of(round_index: Array) -> Array:
        forwards = (lax.rem(round_index, int32(2)) == int32(0)) | (not reverses)
        return round_index * int32(programs) + jnp.where(forwards, program, int32(programs - 1) - program)

    count = rounds + (task_of(rounds) < num_tasks).astype(jnp.int32)

    def for_each_task[State](role: Callable[[Tile, State], State], first: State) -> State:
        def tile_of(round_index: Array) -> Tile:
            return locate(jnp.minimum(task_of(round_index), num_tasks - int32(1)))

        def one(round_index: Array, carry: tuple[State, Tile]) -> tuple[State, Tile]:
            # Locate the next task while this one runs.
            state, tile = carry
            following = tile_of(round_index + int32(1))
            return role(tile, state), following

        return lax.fori_loop(int32(0), count, one, (first, tile_of(jnp.int32(0))))[0]

    @pl.when(warpgroup == CONSUMERS)
    def _loading() -> None:
        plgpu.set_max_registers(_LOADING_REGISTERS, action="decrease")
        finish(for_each_task(load, begin))
        # Stay until both consumers have signaled all slots.
        for slot in range(ring.stages):
            plgpu.barrier_wait(ring.empty.at[slot])

    @pl.when(warpgroup < CONSUMERS)
    def _multiplying() -> None:
        plgpu.set_max_registers(_MULTIPLYING_REGISTERS, action="increase")
        # All slots are free at the start.
        for slot in range(ring.stages):
            plgpu.barrier_arrive(ring.empty.at[slot])
        for_each_task(multiply, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def multiply_steps(
    ring: Ring,
    step: Array,
    count: Array,
    accumulator: Ref,
    operands: Callable[[Array], tuple[Ref, Ref]],
) -> None:
    """Accumulate the `count` steps of a task, from `step` on.

    The wgmma of one step stays in flight while the previous step's slot is released; the last step's slot stays
    taken.
    """

    def one(k: Array, step: Array) -> Array:
        slot = lax.rem(step, int32(ring.stages))
        # Wait until the producer has filled this stage.
        plgpu.barrier_wait(ring.full.at[slot])
        plgpu.wgmma(accumulator, *operands(slot))
        # Leave this step's wgmma in flight; that of the previous step has ended.
        plgpu.wgmma_wait(1)
        pl.when(k > int32(0))(lambda: release(ring, step))
        return step + int32(1)

    lax.fori_loop(int32(0), count, one, step)


def release(ring: Ring, step: Array) -> None:
    """Release the slot of the step before `step` for this consumer."""
    plgpu.barrier_arrive(ring.empty.at[before(ring, step)])


def before(ring: Ring, step: Array) -> Array:
    """Return the slot of the step before `step`."""
    return lax.rem(step + int32(ring.stages - 1), int32(ring.stages))
