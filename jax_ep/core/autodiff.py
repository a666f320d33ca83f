"""Custom derivatives: pairs of linear functions, and functions that raise when differentiated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jax_ep.types import Array, Options


def transposes(function: Any, transpose: Any) -> None:
    """Define `transpose` as the backward pass of the custom VJP `function(options, rows, handle)`."""

    def forward(options: Options, rows: Array, handle: Any) -> tuple[Array, Any]:
        return function(options, rows, handle), (rows[:0], handle)

    def backward(options: Options, residuals: Any, cotangent: Array) -> tuple[Array, None]:
        like, handle = residuals
        return transpose(options.transposed, cotangent.astype(like.dtype), handle), None

    function.defvjp(forward, backward)


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
