"""For functions whose derivative would be silently wrong: one that raises instead."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def without_gradient[Tree](remedy: str, tree: Tree) -> Tree:
    """The identity, whose gradient is a `TypeError` that says `remedy`."""
    return tree


def _without_gradient_forward(remedy: str, tree: Any) -> tuple[Any, None]:
    return tree, None


def _without_gradient_backward(remedy: str, _: None, cotangent: Any) -> Any:
    raise TypeError(remedy)


without_gradient.defvjp(_without_gradient_forward, _without_gradient_backward)
