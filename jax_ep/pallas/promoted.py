"""Sums of FP8 products in float32: tensor cores add them in few bits, so each step's sum is scaled and added apart.

While that happens in registers, the product of the next step runs: two sums of a tile are on their way at a time. A
turn takes several steps, and only its last one is waited for with nothing behind it: straight code, since products
on their way cannot go from one turn to the next (wgmma.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep.pallas.memory import Scalar, int32
from jax_ep.types import Array

_AHEAD = 2


def zeros(shape: tuple[int, int]) -> Array:
    """A sum of nothing, as products lie in registers."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def add_steps[Total](
    steps: tuple[Scalar, Scalar],
    together: int,
    begin: Callable[[Array], Array],
    add: Callable[[Total, Array, Array, Any, int], Total],
    total: Total,
    ahead: Callable[[Array], Any] = lambda _: None,
) -> Total:
    """`total` and the sums of steps, of which there may be none.

    Args:
      steps: the first, and the end; what is left over where `together` does not divide their number is not added.
      together: how many of them are a turn.
      begin: of step k to its product, as of `wgmma.begin`.
      add: `(total, product, k, scalars, in_flight)` waits until only so many products that began later are left,
        and returns the total with the scaled sum of step k.
      total: what sums are added to.
      ahead: scalars of step k, which may be behind the last one, that are read from memory two steps before.
    """
    first, end = steps

    def turn(number: Array, carry: tuple[Total, list[Any]]) -> tuple[Total, list[Any]]:
        total, known = carry
        own = [first + number * int32(together) + int32(i) for i in range(together)]
        products = [begin(own[0])]
        for k, following in zip(own, [*own[1:], None], strict=True):
            known = [*known, ahead(k + int32(_AHEAD))]
            if following is not None:
                products.append(begin(following))
            total = add(total, products.pop(0), k, known.pop(0), len(products))
        return total, known

    known = [ahead(first + int32(i)) for i in range(_AHEAD)]
    return lax.fori_loop(int32(0), lax.div(end - first, int32(together)), turn, (total, known))[0]
