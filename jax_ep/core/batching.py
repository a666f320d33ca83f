"""`jax.vmap` of calls whose elements must not meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from jax_ep.types import Array


def in_order(call: Primitive) -> Callable[..., Any]:
    """The rule of a primitive with several results that is called once per element of the batch, in order."""

    def rule(operands: Sequence[Array], axes: Sequence[int | None], **params: Any) -> tuple[Any, tuple[int, ...]]:
        batched = [jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True) if axis is not None]

        def element(elements: list[Array]) -> Any:
            rest = iter(elements)
            own = (x if axis is None else next(rest) for x, axis in zip(operands, axes, strict=True))
            return call.bind(*own, **params)

        outputs = lax.map(element, batched)
        return outputs, (0,) * len(outputs)

    return rule
