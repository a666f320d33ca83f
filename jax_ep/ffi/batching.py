"""Custom calls under `jax.vmap` whose result does not depend on what their operands hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def same_for_all(call: Callable[[jax.Array], jax.Array], token: jax.Array) -> jax.Array:
    """`call(token)`, which under `jax.vmap` is made once, with the tokens of all elements, and has one result.

    For calls that order themselves after an array of any shape and do not read it. Their handlers know the shape of
    the result: a batch of it would be another one.
    """

    @jax.custom_batching.custom_vmap
    def of_token(token: jax.Array) -> jax.Array:
        return call(token)

    @of_token.def_vmap
    def _of_all(axis_size: int, batched: list[bool], tokens: jax.Array) -> tuple[Any, bool]:
        return of_token(tokens), False

    return of_token(token)
