"""The weighted activation between the products of the layer, its gradient, and operands in FP8, of the rows in use.

The kernels of the activation take bfloat16 and float16; other dtypes, and widths that are no whole 16-byte words, take
the portable formulas. What lies past the groups is neither read nor written.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.typing import DTypeLike

from jax_ep.core import activations
from jax_ep.core.dtypes import FP8
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.kernel import Config, Kernel
from jax_ep.core.layout import power_of_two
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.megakernels.grid import num_programs
from jax_ep.megakernels.launch import launch, make_ready
from jax_ep.megakernels.rows import BLOCK_ELEMENTS, pass_config, row_sizes
from jax_ep.types import Array, Quantized
from jax_ep.xla import activation as xla

_ACTIVATE = Kernel("activation", "weighted_activation")
_GRADIENT = Kernel("activation", "weighted_activation_gradient")
_QUANTIZE_ROWS = Kernel("fp8_operands", "quantize_rows")
_DEQUANTIZE_ROWS = Kernel("fp8_operands", "dequantize_rows")
_ACTIVATE_QUANTIZED = Kernel("fp8_operands", "activate_rows")
_QUANTIZE_MATRICES = Kernel("fp8_operands", "quantize_matrices")
_COLUMNS = {_ACTIVATE: 512, _GRADIENT: 1024}
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
    constants = _sizes(num_rows, columns, group_sizes, _ACTIVATE)
    num_tasks = -(-num_rows // constants["BR"]) * -(-columns // constants["BC"])
    result = jax.ShapeDtypeStruct((num_rows, columns), hidden.dtype)
    kind = {"GATED": gated, "ACTIVATION": activation}
    return launch(_ACTIVATE, operands, (result,), pass_config(num_tasks), {**constants, **kind})[0]


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


def quantize_rows(x: Array, group_sizes: Array) -> Quantized:
    """`[R, H]` rows to FP8 values and their scales `[R, H / 128]`; past the groups they hold anything."""
    if x.dtype == jnp.float64 or 0 in (*x.shape, *group_sizes.shape):
        return xla.quantize_rows(x, group_sizes)
    make_ready("moe")
    return _quantize_rows(x, group_sizes)


@jax.jit  # one compilation for eager callers, as all below
def _quantize_rows(x: Array, group_sizes: Array) -> Quantized:
    def run(x: Array, group_sizes: Array) -> Quantized:
        constants = tile_of(x.shape[0], x.shape[1], group_sizes)
        operands, results = (x, group_sizes), _quantized(x.shape[0], x.shape[1])
        values, scales = launch(_QUANTIZE_ROWS, operands, results, pass_config(_tasks(constants)), constants)
        return values, scales

    return sequential_vmap(run)(*vary_alike((x, group_sizes)))


def dequantize_rows(values: Array, scales: Array, group_sizes: Array, *, dtype: DTypeLike) -> Array:
    """The inverse of `quantize_rows`, rounded to `dtype`."""
    if jnp.dtype(dtype) == jnp.float64 or 0 in (*values.shape, *group_sizes.shape):
        return xla.dequantize_rows(values, scales, group_sizes, dtype=dtype)
    make_ready("moe")
    return _dequantize_rows(values, scales, group_sizes, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=3)
def _dequantize_rows(values: Array, scales: Array, group_sizes: Array, dtype: jnp.dtype) -> Array:
    def run(values: Array, scales: Array, group_sizes: Array) -> Array:
        constants = tile_of(values.shape[0], values.shape[1], group_sizes)
        result = jax.ShapeDtypeStruct(values.shape, dtype)
        operands = (values, scales, group_sizes)
        return launch(_DEQUANTIZE_ROWS, operands, (result,), pass_config(_tasks(constants)), constants)[0]

    return sequential_vmap(run)(*vary_alike((values, scales, group_sizes)))


def activate_quantized(
    hidden: Array, weights: Array, group_sizes: Array, *, activation: str, gated: bool, keep: bool
) -> tuple[Array, Array, Array | None]:
    """Activated and weighted rows in FP8, `[R, I]` and `[R, I / 128]`, and, with `keep`, as `activate` makes them."""
    if hidden.dtype == jnp.float64 or weights.dtype != jnp.float32 or 0 in (*hidden.shape, *group_sizes.shape):
        portable = functools.partial(xla.activate_quantized, activation=activation, keep=keep)
        return portable(hidden, weights, group_sizes, gated=gated)
    make_ready("moe")
    values, scales, rows = _activate_quantized(hidden, weights, group_sizes, activation, gated, keep)
    return values, scales, rows if keep else None


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _activate_quantized(
    hidden: Array, weights: Array, group_sizes: Array, activation: str, gated: bool, keep: bool
) -> tuple[Array, Array, Array]:
    def run(hidden: Array, weights: Array, group_sizes: Array) -> tuple[Array, Array, Array]:
        shape = (hidden.shape[0], hidden.shape[1] // (2 if gated else 1))
        constants = tile_of(*shape, group_sizes)
        config = pass_config(_tasks(constants))
        constants["INNER"] = constants.pop("H")
        kind = {"GATED": gated, "ACTIVATION": activation, "KEEP": keep}
        results = (*_quantized(*shape), jax.ShapeDtypeStruct(shape if keep else (1,), hidden.dtype))
        operands = (hidden, weights, group_sizes)
        values, scales, rows = launch(_ACTIVATE_QUANTIZED, operands, results, config, {**constants, **kind})
        return values, scales, rows

    return sequential_vmap(run)(*vary_alike((hidden, weights, group_sizes)))


def quantize_matrices(w: Array) -> Quantized:
    """`[G, K, N]` to FP8 `[G, N, K]`, one scale per block of 128 by 128: the bits of `quantize_fp8_weights`."""
    if w.dtype == jnp.float64 or 0 in w.shape:
        return xla.quantize_matrices(w)
    make_ready("moe")
    return _quantize_matrices(w)


@jax.jit
def _quantize_matrices(w: Array) -> Quantized:
    def run(w: Array) -> Quantized:
        groups, depth, columns = w.shape
        blocks = (groups, -(-columns // GROUP_SIZE), depth // GROUP_SIZE)
        results = (jax.ShapeDtypeStruct((groups, columns, depth), FP8), jax.ShapeDtypeStruct(blocks, jnp.float32))
        constants = {"K": depth, "N": columns, "G": groups}
        values, scales = launch(_QUANTIZE_MATRICES, (w,), results, matrices_config(math.prod(blocks)), constants)
        return values, scales

    return sequential_vmap(run)(w)


def tile_of(num_rows: int, columns: int, group_sizes: Array) -> dict[str, int]:
    """Sizes of a pass over rows of `columns` elements, and of its blocks."""
    block = min(512, power_of_two(columns))
    return row_sizes(num_rows, group_sizes) | {"H": columns, "BR": BLOCK_ELEMENTS // block, "BC": block}


def matrices_config(num_tasks: int) -> Config:
    """Blocks of 128 by 128, two of which have the registers of a multiprocessor."""
    return Config(num_programs(num_tasks, 2), num_warps=8, max_registers=128)


def _tasks(constants: dict[str, int]) -> int:
    return -(-constants["R"] // constants["BR"]) * -(-constants["H"] // constants["BC"])


def _quantized(num_rows: int, columns: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    scales = jax.ShapeDtypeStruct((num_rows, columns // GROUP_SIZE), jnp.float32)
    return jax.ShapeDtypeStruct((num_rows, columns), FP8), scales


def _sizes(num_rows: int, columns: int, group_sizes: Array, kernel: Kernel) -> dict[str, int]:
    block = min(_COLUMNS[kernel], power_of_two(columns))
    return row_sizes(num_rows, group_sizes) | {"INNER": columns, "BR": BLOCK_ELEMENTS // block, "BC": block}
