"""Sums of FP8 products in float32: tensor cores add them in few bits, so each step's sum is scaled and added apart.

While that happens in registers, the product of the next step runs: two sums of a tile are on their way at a time. A
turn takes several steps, and only its last one is waited for with nothing behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep.pallas.memory import Ref, Scalar, int32
from jax_ep.types import Array


def zeros(shape: tuple[int, int]) -> Array:
    """A sum of nothing, as accumulators lie in registers."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def add_steps[Total](
    shape: tuple[int, int],
    steps: tuple[Scalar, Scalar],
    together: int,
    begin: Callable[[Ref, Array], None],
    add: Callable[[Total, Ref, Array, Any, int], Total],
    total: Total,
    ahead: Callable[[Array], Any] = lambda _: None,
) -> Total:
    """`total` and the sums of steps, of which there may be none.

    Args:
      shape: of the accumulators of a warpgroup.
      steps: the first, and the end; what is left over where `together` does not divide their number is not added.
      together: how many of them are unrolled.
      begin: `(accumulator, k)` starts the product of step k.
      add: `(total, accumulator, k, scalars, in_flight)` waits until only so many products that began later are left,
        and returns the total with the scaled sum of step k.
      total: what sums are added to.
      ahead: scalars of step k that are read from memory a turn before.
    """

    begins, end = steps

    def scalars(first: Scalar) -> list[Any]:
        return [ahead(first + int32(i)) for i in range(together)]

    def turn(number: Array, carry: tuple[Total, list[Any]]) -> tuple[Total, list[Any]]:
        total, known = carry
        first = begins + number * int32(together)
        following = scalars(first + int32(together))

        def run(*accumulators: Ref) -> Total:
            sums = total
            begin(accumulators[0], first)
            for i, accumulator in enumerate(accumulators):
                behind = accumulators[i + 1 : i + 2]
                for later in behind:
                    begin(later, first + int32(i + 1))
                sums = add(sums, accumulator, first + int32(i), known[i], len(behind))
            return sums

        return pl.run_scoped(run, *[plgpu.ACC(shape)] * together), following

    turns = lax.div(end - begins, int32(together))
    return lax.fori_loop(int32(0), turns, turn, (total, scalars(begins)))[0]
