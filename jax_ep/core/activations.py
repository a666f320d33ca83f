"""Activations between the two expert matmuls, in plain JAX."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.core import check
from jax_ep.types import Array, Experts


@jax.custom_jvp
def _erf(x: Array) -> Array:
    return lax.erf(x)


# JAX's own derivative of erf fails inside `shard_map` (JAX 0.12.0).
_erf.defjvps(lambda tangent, _, x: tangent * (2 / math.sqrt(math.pi)) * jnp.exp(-x * x))


def _relu(x: Array) -> Array:
    """Return `max(x, 0)`. Pallas kernels do not support the derivative of `jax.nn.relu` (JAX 0.11.2); NaN stays NaN."""
    return jnp.where(x <= 0, 0, x)


_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": jax.nn.gelu,
    "gelu_exact": lambda x: 0.5 * x * (1 + _erf(x * math.sqrt(0.5))),
    "relu": _relu,
    "relu_squared": lambda x: jnp.square(_relu(x)),
}


class HiddenRows(NamedTuple):
    """Results of the first GEMM, and what activates and weights them to rows `[R, I]`."""

    hidden: Array  # `[R, 2 * I]`, or `[R, I]` without gates
    weights: Array  # `[R]` router weights
    bias: Array | None  # one value per column of `hidden` for each local expert, or None
    group_sizes: Array  # `[L]` int32; their sum is the number of rows in use


def activate(experts: Experts, hidden: Array) -> Array:
    """Apply the activation to `[..., 2 * I]` (`[..., I]` without gates); return `[..., I]` in the dtype of `hidden`."""
    if callable(experts.activation):
        return experts.activation(hidden)
    if not experts.gated:
        return _of_gate(experts, hidden)
    gate, up = (hidden[..., 0::2], hidden[..., 1::2]) if experts.interleaved else jnp.split(hidden, 2, axis=-1)
    if experts.clamp is not None:
        up = jnp.where(up < -experts.clamp, -experts.clamp, _at_most(up, experts.clamp))
    factor = up + experts.up_offset if experts.up_offset else up
    return _of_gate(experts, gate) * factor


def activate_tokens(experts: Experts, hidden: Array, intermediate: int) -> Array:
    """Apply `activate` to `[..., N]`; a custom activation function sees rows `[R, N]` and returns `[R, I]`."""
    if not callable(experts.activation):
        return activate(experts, hidden)
    if hidden.ndim == 1:
        return activate_tokens(experts, hidden[None], intermediate)[0]
    if hidden.ndim == 2:
        rows = experts.activation(hidden)
        return check.activation_rows("MoE", rows, hidden, intermediate)
    # Merging the axes would move data that a mesh shards.
    return jax.vmap(lambda rows: activate_tokens(experts, rows, intermediate))(hidden)


def _of_gate(experts: Experts, gate: Array) -> Array:
    if experts.clamp is not None:
        gate = _at_most(gate, experts.clamp)
    if experts.activation == "silu":
        return gate * jax.nn.sigmoid(gate if experts.alpha == 1 else experts.alpha * gate)
    return _FUNCTIONS[cast(str, experts.activation)](gate)


def _at_most(x: Array, limit: float) -> Array:
    """Return `min(x, limit)`. NaN stays NaN, and the derivative at the limit is 1."""
    return jnp.where(x > limit, limit, x)
