"""Functions that raise an error when differentiated, instead of returning a wrong gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def without_gradient[Tree](remedy: str, tree: Tree) -> Tree:
    """Return `tree` unchanged; differentiating it raises a `TypeError` with the message `remedy`."""
    return tree


def _without_gradient_forward(remedy: str, tree: Any) -> tuple[Any, None]:
    return tree, None


def _without_gradient_backward(remedy: str, _: None, cotangent: Any) -> Any:
    raise TypeError(remedy)


without_gradient.defvjp(_without_gradient_forward, _without_gradient_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def call_without_gradient(remedy: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)`; differentiating it raises a `TypeError`. `function` may lack a derivative."""
    return function(*arguments)


def _call_forward(remedy: str, function: Callable[..., Any], *arguments: Any) -> tuple[Any, None]:
    return function(*arguments), None


def _call_backward(remedy: str, function: Callable[..., Any], _: None, cotangent: Any) -> Any:
    raise TypeError(remedy)


call_without_gradient.defvjp(_call_forward, _call_backward)
