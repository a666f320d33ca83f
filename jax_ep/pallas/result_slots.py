"""Stores of weight gradient tiles: from slots of the ring by TMA, without waiting for them.

A consumer's half of a tile is as large as the right operand of a step. Consumer 0 puts its result into the ring's slot
of the tile's last step, and releases that slot during the next tile. Consumer 1 uses a slot that never holds operands.
So a tile is stored while the next one is multiplied, with as many steps in flight as if nothing were stored. Results of
another dtype have their own memory, and keep to the same order.

Waits. Consumer 0 overwrites the last step's operands only after consumer 1 has read them (`multiplied`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jax_ep.pallas import ring as rings
from jax_ep.pallas.launch import WARPGROUP, Ref, Scalar, Scratch, int32, swizzled
from jax_ep.pallas.ring import Ring
from jax_ep.pallas.tiling import CONSUMERS
from jax_ep.types import Array

_RING_CONSUMER = 0  # whose results lie in the ring


class ResultSlots(NamedTuple):
    """Memory of results until they have left."""

    own: Ref | None  # None, or `[CONSUMERS, ...]` for results of another dtype than the operands'
    multiplied: Ref  # barriers of the ring's slots, which the other consumer opens when it has read a tile's last step


def scratch(dtype: DTypeLike, out_dtype: DTypeLike, shape: tuple[int, int], stages: int) -> tuple[Scratch, ResultSlots]:
    """Declare the right operands of a ring, and the memory for results of the same shape per consumer."""
    shares_ring = jnp.dtype(dtype) == jnp.dtype(out_dtype)
    own = None if shares_ring else swizzled((CONSUMERS, *shape), out_dtype)
    operands = swizzled((stages + 1 if shares_ring else stages, *shape), dtype)
    return operands, ResultSlots(own, plgpu.Barrier(num_arrivals=1, num_barriers=stages))


def slot_of(results: ResultSlots, ring: Ring, after: Array, has_steps: Array) -> Ref:
    """Return where this consumer may put the results of the task that ended before step `after`."""
    consumer, last = lax.axis_index(WARPGROUP), rings.before(ring, after)
    shares_ring = consumer == _RING_CONSUMER

    # The other consumer has read the last step: it signals and releases the slot.
    @pl.when(has_steps & ~shares_ring)
    def _tell() -> None:
        plgpu.barrier_arrive(results.multiplied.at[last])
        rings.release(ring, after)

    pl.when(has_steps & shares_ring)(lambda: plgpu.barrier_wait(results.multiplied.at[last]))
    # Wait until the previous task's results have left.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if results.own is not None:
        return results.own.at[consumer]
    return ring.rhs.at[jnp.where(shares_ring, last, int32(ring.stages))]


def await_stores(ring: Ring, step: Array) -> None:
    """Wait for the stores of the task before `step`, and release the slot of the ring that they came from.

    Both consumers wait, in the second step of a task, when the wait is short. If one fell behind the other it would
    stay behind, and the slots between them would be missing for operands.
    """
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    release(ring, step)


def release(ring: Ring, step: Array) -> None:
    """Release the ring's slot with results of the task before `step`, if there was one; its stores must have ended."""
    held = (lax.axis_index(WARPGROUP) == _RING_CONSUMER) & (step > int32(0))
    pl.when(held)(lambda: rings.release(ring, step))


def store(slot: Ref, result: Array, has_steps: Array, send: Callable[[Scalar], None]) -> None:
    """Store results in their slot, and call `send(half)` for the halves of the tile that this consumer sends.

    A consumer sends its own half. A tile without steps has no slot in the ring: there the other consumer sends zeros
    for both halves.
    """
    consumer = lax.axis_index(WARPGROUP)

    @pl.when(has_steps | (consumer != _RING_CONSUMER))
    def _put() -> None:
        slot[...] = result.astype(slot.dtype)

    plgpu.commit_smem()
    pl.when(has_steps)(lambda: send(consumer))

    @pl.when(~has_steps & (consumer != _RING_CONSUMER))
    def _both() -> None:
        for half in range(CONSUMERS):
            send(int32(half))
