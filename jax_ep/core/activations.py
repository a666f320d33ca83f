"""The activations of experts, and what happens between the two products of the layer."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_ep.core.dtypes import accumulation_dtype
from jax_ep.types import Array

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,  # the tanh approximation
    "relu": jax.nn.relu,
}


def weighted(hidden: Array, weights: Array, activation: str, gated: bool) -> Array:
    """`[R, 2 * I]` (`[R, I]` where not gated) to `[R, I]`, times `weights [R]`, in float32 with one final rounding."""
    return weighted_wide(hidden, weights, activation, gated).astype(hidden.dtype)


def weighted_wide(hidden: Array, weights: Array, activation: str, gated: bool) -> Array:
    """`weighted` without the rounding."""
    wide = hidden.astype(accumulation_dtype(hidden.dtype))
    gate, up = jnp.split(wide, 2, axis=-1) if gated else (wide, None)
    rows = ACTIVATIONS[activation](gate)
    if up is not None:
        rows = rows * up
    return rows * weights.astype(rows.dtype)[:, None]


def weighted_gradient(
    hidden: Array, weights: Array, d_rows: Array, activation: str, gated: bool
) -> tuple[Array, Array]:
    """The cotangents of `hidden` and `weights` for that of `weighted`; all that is float32 is computed again."""
    _, pull = jax.vjp(lambda hidden, weights: weighted(hidden, weights, activation, gated), hidden, weights)
    d_hidden, d_weights = pull(d_rows)
    return d_hidden, d_weights
