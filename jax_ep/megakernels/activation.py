"""The weighted activation between the products of the layer, its gradient, and operands in FP8, of the rows in use.

The kernels of the activation take bfloat16 and float16; other dtypes, and widths that are no whole 16-byte words, take
the portable formulas. What lies past the groups is neither read nor written.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep.core import activations
from jax_ep.core.dtypes import FP8
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.kernel import Config, Kernel
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.megakernels.grid import num_programs
from jax_ep.megakernels.kernels.structs import Rows
from jax_ep.megakernels.kernels.structs_serving import Activation, RowPass
from jax_ep.megakernels.launch import launch
from jax_ep.megakernels.rows import BLOCK_ELEMENTS, num_blocks, pass_config, row_pass
from jax_ep.types import Array, Quantized
from jax_ep.xla import activation as xla

_ACTIVATE = Kernel("activation", "weighted_activation")
_GRADIENT = Kernel("activation", "weighted_activation_gradient")
_QUANTIZE_ROWS = Kernel("activation", "quantize_rows")
_DEQUANTIZE_ROWS = Kernel("activation", "dequantize_rows")
_ACTIVATE_QUANTIZED = Kernel("activation", "activate_quantized")
_QUANTIZE_MATRICES = Kernel("activation", "quantize_matrices")
# Of a block.
_MOST_COLUMNS, _MOST_GRADIENT_COLUMNS = 512, 1024


def _has_kernel(hidden: Array, weights: Array, group_sizes: Array, gated: bool) -> bool:
    return (
        hidden.dtype in (jnp.bfloat16, jnp.float16)
        and weights.dtype == jnp.float32
        and hidden.shape[1] % (16 if gated else 8) == 0
        and 0 not in (*hidden.shape, *group_sizes.shape)
    )


@functools.partial(jax.jit, static_argnames=("activation", "gated"))  # one compilation for eager callers, as all below
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
    operands = vary_alike((hidden, weights, group_sizes))
    sizes = sizes_of((hidden.shape[0], hidden.shape[1] // (2 if gated else 1)), group_sizes)
    result = jax.ShapeDtypeStruct((sizes.R, sizes.H), hidden.dtype)
    constants = {"S": sizes, "KIND": Activation(activation, gated)}
    return launch(_ACTIVATE, operands, (result,), pass_config(num_blocks(sizes)), constants)[0]


@functools.partial(jax.jit, static_argnames=("activation", "gated"))
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
    operands = vary_alike((hidden, weights, d_rows, group_sizes))
    sizes = gradient_sizes_of(d_rows.shape, group_sizes)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (hidden, weights)]
    constants = {"S": sizes, "KIND": Activation(activation, gated)}
    config = pass_config(-(-sizes.R // sizes.BR))
    d_hidden, d_weights = launch(_GRADIENT, operands, results, config, constants)
    return d_hidden, d_weights


@jax.jit
def quantize_rows(x: Array, group_sizes: Array) -> Quantized:
    """`[R, H]` rows to FP8 values and their scales `[R, H / 128]`; past the groups they hold anything."""
    if x.dtype == jnp.float64 or 0 in (*x.shape, *group_sizes.shape):
        return xla.quantize_rows(x, group_sizes)
    sizes, operands = sizes_of(x.shape, group_sizes), vary_alike((x, group_sizes))
    results = (_quantized(x.shape),)
    rows = launch(_QUANTIZE_ROWS, operands, results, pass_config(num_blocks(sizes)), {"S": sizes})[0]
    return rows.values_ptr, rows.scales_ptr


@functools.partial(jax.jit, static_argnames="dtype")
def dequantize_rows(values: Array, scales: Array, group_sizes: Array, *, dtype: DTypeLike) -> Array:
    """The inverse of `quantize_rows`, rounded to `dtype`."""
    if jnp.dtype(dtype) == jnp.float64 or 0 in (*values.shape, *group_sizes.shape):
        return xla.dequantize_rows(values, scales, group_sizes, dtype=dtype)
    values, scales, group_sizes = vary_alike((values, scales, group_sizes))
    sizes, result = sizes_of(values.shape, group_sizes), jax.ShapeDtypeStruct(values.shape, dtype)
    operands = (Rows(values, scales), group_sizes)
    return launch(_DEQUANTIZE_ROWS, operands, (result,), pass_config(num_blocks(sizes)), {"S": sizes})[0]


@functools.partial(jax.jit, static_argnames=("activation", "gated", "keep"))
def activate_quantized(
    hidden: Array, weights: Array, group_sizes: Array, *, activation: str, gated: bool, keep: bool
) -> tuple[Array, Array, Array | None]:
    """Activated and weighted rows in FP8, `[R, I]` and `[R, I / 128]`, and, with `keep`, as `activate` makes them."""
    if hidden.dtype == jnp.float64 or weights.dtype != jnp.float32 or 0 in (*hidden.shape, *group_sizes.shape):
        portable = functools.partial(xla.activate_quantized, activation=activation, keep=keep)
        return portable(hidden, weights, group_sizes, gated=gated)
    shape = (hidden.shape[0], hidden.shape[1] // (2 if gated else 1))
    sizes, operands = sizes_of(shape, group_sizes), vary_alike((hidden, weights, group_sizes))
    constants = {"S": sizes, "KIND": Activation(activation, gated), "KEEP": keep}
    results = (_quantized(shape), jax.ShapeDtypeStruct(shape if keep else (1,), hidden.dtype))
    quantized, rows = launch(_ACTIVATE_QUANTIZED, operands, results, pass_config(num_blocks(sizes)), constants)
    return quantized.values_ptr, quantized.scales_ptr, rows if keep else None


@jax.jit
def quantize_matrices(w: Array) -> Quantized:
    """`[G, K, N]` to FP8 `[G, N, K]`, one scale per block of 128 by 128: the bits of `quantize_fp8_weights`."""
    if w.dtype == jnp.float64 or 0 in w.shape:
        return xla.quantize_matrices(w)
    groups, depth, columns = w.shape
    blocks = (groups, -(-columns // GROUP_SIZE), depth // GROUP_SIZE)
    results = (jax.ShapeDtypeStruct((groups, columns, depth), FP8), jax.ShapeDtypeStruct(blocks, jnp.float32))
    constants = {"K": depth, "N": columns, "G": groups}
    values, scales = launch(_QUANTIZE_MATRICES, (w,), results, matrices_config(math.prod(blocks)), constants)
    return values, scales


def sizes_of(shape: tuple[int, ...], group_sizes: Array) -> RowPass:
    """Of a pass over rows, an array of this shape."""
    return row_pass(shape, group_sizes, _MOST_COLUMNS, BLOCK_ELEMENTS)


def gradient_sizes_of(shape: tuple[int, ...], group_sizes: Array) -> RowPass:
    """Of the gradient, which adds up whole rows `[R, H]`."""
    return row_pass(shape, group_sizes, _MOST_GRADIENT_COLUMNS, BLOCK_ELEMENTS)


def matrices_config(num_tasks: int) -> Config:
    """Blocks of 128 by 128, two of which have the registers of a multiprocessor."""
    return Config(num_programs(num_tasks, 2), num_warps=8, max_registers=128)


def _quantized(shape: tuple[int, ...]) -> Rows:
    scales = jax.ShapeDtypeStruct((shape[0], shape[1] // GROUP_SIZE), jnp.float32)
    return Rows(jax.ShapeDtypeStruct(shape, FP8), scales)
