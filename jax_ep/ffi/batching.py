"""Batching rule for custom calls whose result does not depend on the values of their operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def batch_invariant(call: Callable[[jax.Array], jax.Array], token: jax.Array) -> jax.Array:
    """Run `call(token)`; under `jax.vmap`, run it once with the batched token and return one unbatched result.

    For calls that use an array of any shape only as a data dependence. Their handlers know the result's shape, which
    must
    not get a batch axis.
    """

    @jax.custom_batching.custom_vmap
    def of_token(token: jax.Array) -> jax.Array:
        return call(token)

    @of_token.def_vmap
    def _of_all(axis_size: int, batched: list[bool], tokens: jax.Array) -> tuple[Any, bool]:
        return of_token(tokens), False

    return of_token(token)
