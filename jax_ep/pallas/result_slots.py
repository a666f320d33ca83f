"""How tiles of weight gradients leave: from slots of the ring by TMA, which nobody waits for.

They are as large as the right operand of a step. Those of one consumer wait in the ring's slot of the tile's last step,
which it releases with the next tile; those of the other in a slot that never has operands. So a program has the
room to store one tile while it multiplies the next, with as many steps in flight as if it stored nothing. Results of
another dtype have memory of their own, and keep to the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jax_ep.pallas import ring as rings
from jax_ep.pallas.memory import WARPGROUP, Ref, Scalar, int32, swizzled
from jax_ep.pallas.ring import Ring
from jax_ep.pallas.tiling import CONSUMERS
from jax_ep.types import Array

_RING_CONSUMER = 0


class ResultSlots(NamedTuple):
    """Where results lie until they have left.

    Attributes:
      own: None, or `[CONSUMERS, ...]` for results of another dtype than the operands'.
      multiplied: barriers of the ring's slots, at which the other consumer tells that it has read a tile's last one.
    """

    own: Ref | None
    multiplied: Ref


def scratch(dtype: DTypeLike, out_dtype: DTypeLike, shape: tuple[int, int], stages: int) -> tuple[Any, ResultSlots]:
    """Declares the right operands of a ring, and what results of the same shape per consumer need besides."""
    shares_ring = jnp.dtype(dtype) == jnp.dtype(out_dtype)
    own = None if shares_ring else swizzled((CONSUMERS, *shape), out_dtype)
    operands = swizzled((stages + 1 if shares_ring else stages, *shape), dtype)
    return operands, ResultSlots(own, plgpu.Barrier(num_arrivals=1, num_barriers=stages))


def slot_of(results: ResultSlots, ring: Ring, stages: int, after: Array, has_steps: Array) -> Ref:
    """Where this consumer may put the results of a task before `after`, of which it has multiplied all steps."""
    consumer, last = lax.axis_index(WARPGROUP), rings.before(after, stages)
    shares_ring = consumer == _RING_CONSUMER

    @pl.when(has_steps & ~shares_ring)
    def _tell() -> None:
        plgpu.barrier_arrive(results.multiplied.at[last])
        rings.release(ring, stages, after)

    pl.when(has_steps & shares_ring)(lambda: plgpu.barrier_wait(results.multiplied.at[last]))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the task before
    if results.own is not None:
        return results.own.at[consumer]
    return ring.rhs.at[jnp.where(shares_ring, last, int32(stages))]


def await_stores(ring: Ring, stages: int, step: Array) -> None:
    """Waits for the stores of the task before `step`, and releases the slot of the ring that they came from.

    Both consumers wait, in the second step of a task, when they need not wait for long: one that fell behind the other
    would stay there, and the slots between them would be missing for the operands to come.
    """
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    release(ring, stages, step)


def release(ring: Ring, stages: int, step: Array) -> None:
    """Releases the ring's slot with results of the task before `step`, if there was one, whose stores have ended."""
    held = (lax.axis_index(WARPGROUP) == _RING_CONSUMER) & (step > int32(0))
    pl.when(held)(lambda: rings.release(ring, stages, step))


def store(place: Ref, result: Array, has_steps: Array, send: Callable[[Scalar], None]) -> None:
    """Puts results in their place, and calls `send(half)` for the halves of the tile that this consumer sends.

    That is its own, but for tiles without steps: the ring has no slot for them, and the other one sends zeros for both.
    """
    consumer = lax.axis_index(WARPGROUP)

    @pl.when(has_steps | (consumer != _RING_CONSUMER))
    def _put() -> None:
        place[...] = result.astype(place.dtype)

    plgpu.commit_smem()
    pl.when(has_steps)(lambda: send(consumer))

    @pl.when(~has_steps & (consumer != _RING_CONSUMER))
    def _both() -> None:
        for half in range(CONSUMERS):
            send(int32(half))
