"""The weighted activation between the products of the layer, and its gradient, of the rows in use.

For bfloat16 and float16; other dtypes, and widths that are no whole 16-byte words, take the portable formulas.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_ep.core import activations
from jax_ep.core.kernel import Kernel
from jax_ep.core.layout import power_of_two
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.megakernels.launch import launch, make_ready
from jax_ep.megakernels.rows import BLOCK_ELEMENTS, pass_config, row_sizes
from jax_ep.types import Array

_FORWARD = Kernel("activation", "weighted_activation")
_GRADIENT = Kernel("activation", "weighted_activation_gradient")
_COLUMNS = {_FORWARD: 512, _GRADIENT: 1024}
"""Most columns of a block; the gradient of weights adds up whole rows."""


def _has_kernel(hidden: Array, weights: Array, group_sizes: Array, gated: bool) -> bool:
    return (
        hidden.dtype in (jnp.bfloat16, jnp.float16)
        and weights.dtype == jnp.float32
        and hidden.shape[1] % (16 if gated else 8) == 0
        and 0 not in (*hidden.shape, *group_sizes.shape)
    )


def activate(hidden: Array, weights: Array, group_sizes: Array, *, activation: str, gated: bool) -> Array:
    """Activated and weighted rows; what lies past the groups holds anything.

    Args:
      hidden: `[R, 2 * I]`, or `[R, I]` where not gated.
      weights: `[R]` float32.
      group_sizes: `[L]` int32; their sum says which rows are in use.
      activation: its name.
      gated: whether the last I columns are factors of the activated first.

    Returns:
      `[R, I]`.
    """
    if not _has_kernel(hidden, weights, group_sizes, gated):
        return activations.weighted(hidden, weights, activation, gated)
    make_ready("moe")
    return _activate(hidden, weights, group_sizes, activation, gated)


def activate_gradient(
    hidden: Array, weights: Array, d_rows: Array, group_sizes: Array, *, activation: str, gated: bool
) -> tuple[Array, Array]:
    """Cotangents of `hidden`, which hold anything past the groups, and of `weights`.

    Args:
      hidden: as for `activate`, as are all others but
      d_rows: `[R, I]`, the cotangent of its result.
    """
    if not _has_kernel(hidden, weights, group_sizes, gated):
        return activations.weighted_gradient(hidden, weights, d_rows, activation, gated)
    make_ready("moe")
    return _activate_gradient(hidden, weights, d_rows, group_sizes, activation, gated)


@functools.partial(jax.jit, static_argnums=(3, 4))  # one compilation for eager callers
def _activate(hidden: Array, weights: Array, group_sizes: Array, activation: str, gated: bool) -> Array:
    operands = vary_alike((hidden, weights, group_sizes))
    num_rows, columns = hidden.shape[0], hidden.shape[1] // (2 if gated else 1)
    constants = _sizes(num_rows, columns, group_sizes, _FORWARD)
    num_tasks = -(-num_rows // constants["BR"]) * -(-columns // constants["BC"])
    result = jax.ShapeDtypeStruct((num_rows, columns), hidden.dtype)
    kind = {"GATED": gated, "ACTIVATION": activation}
    return launch(_FORWARD, operands, (result,), pass_config(num_tasks), {**constants, **kind})[0]


@functools.partial(jax.jit, static_argnums=(4, 5))
def _activate_gradient(
    hidden: Array, weights: Array, d_rows: Array, group_sizes: Array, activation: str, gated: bool
) -> tuple[Array, Array]:
    operands = vary_alike((hidden, weights, d_rows, group_sizes))
    constants = _sizes(d_rows.shape[0], d_rows.shape[1], group_sizes, _GRADIENT)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (hidden, weights)]
    config = pass_config(-(-d_rows.shape[0] // constants["BR"]))
    kind = {"GATED": gated, "ACTIVATION": activation}
    d_hidden, d_weights = launch(_GRADIENT, operands, results, config, {**constants, **kind})
    return d_hidden, d_weights


def _sizes(num_rows: int, columns: int, group_sizes: Array, kernel: Kernel) -> dict[str, int]:
    block = min(_COLUMNS[kernel], power_of_two(columns))
    return row_sizes(num_rows, group_sizes) | {"INNER": columns, "BR": BLOCK_ELEMENTS // block, "BC": block}
