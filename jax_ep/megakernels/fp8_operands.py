"""Launches that make FP8 operands of a grouped GEMM, and the rows of such operands again.

What lies past the groups is neither read nor written.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.typing import DTypeLike

from jax_ep.core.dtypes import FP8
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.kernel import Config, Kernel
from jax_ep.core.layout import power_of_two
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.megakernels.grid import num_programs
from jax_ep.megakernels.launch import launch, make_ready
from jax_ep.megakernels.rows import BLOCK_ELEMENTS, pass_config, row_sizes
from jax_ep.types import Array, Quantized
from jax_ep.xla import fp8

_QUANTIZE = Kernel("fp8_operands", "quantize_rows")
_DEQUANTIZE = Kernel("fp8_operands", "dequantize_rows")
_ACTIVATE = Kernel("fp8_operands", "activate_rows")
_MATRICES = Kernel("fp8_operands", "quantize_matrices")


def quantize_rows(x: Array, group_sizes: Array) -> Quantized:
    """`[R, H]` rows to FP8 values and their scales `[R, H / 128]`; past the groups they hold anything."""
    if x.dtype == jnp.float64 or 0 in (*x.shape, *group_sizes.shape):
        return fp8.quantize_rows(x, group_sizes)
    make_ready("moe")
    return _quantize_rows(x, group_sizes)


@jax.jit  # one compilation for eager callers, as all below
def _quantize_rows(x: Array, group_sizes: Array) -> Quantized:
    def run(x: Array, group_sizes: Array) -> Quantized:
        constants = tile_of(x.shape[0], x.shape[1], group_sizes)
        operands, results = (x, group_sizes), _quantized(x.shape[0], x.shape[1])
        values, scales = launch(_QUANTIZE, operands, results, pass_config(_tasks(constants)), constants)
        return values, scales

    return sequential_vmap(run)(*vary_alike((x, group_sizes)))


def dequantize_rows(values: Array, scales: Array, group_sizes: Array, *, dtype: DTypeLike) -> Array:
    """The inverse of `quantize_rows`, rounded to `dtype`."""
    if jnp.dtype(dtype) == jnp.float64 or 0 in (*values.shape, *group_sizes.shape):
        return fp8.dequantize_rows(values, scales, group_sizes, dtype=dtype)
    make_ready("moe")
    return _dequantize_rows(values, scales, group_sizes, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=3)
def _dequantize_rows(values: Array, scales: Array, group_sizes: Array, dtype: jnp.dtype) -> Array:
    def run(values: Array, scales: Array, group_sizes: Array) -> Array:
        constants = tile_of(values.shape[0], values.shape[1], group_sizes)
        result = jax.ShapeDtypeStruct(values.shape, dtype)
        operands = (values, scales, group_sizes)
        return launch(_DEQUANTIZE, operands, (result,), pass_config(_tasks(constants)), constants)[0]

    return sequential_vmap(run)(*vary_alike((values, scales, group_sizes)))


def activate_quantized(
    hidden: Array, weights: Array, group_sizes: Array, *, activation: str, gated: bool, keep: bool
) -> tuple[Array, Array, Array | None]:
    """Activated and weighted rows in FP8, `[R, I]` and `[R, I / 128]`, and, with `keep`, as `activate` makes them."""
    if hidden.dtype == jnp.float64 or weights.dtype != jnp.float32 or 0 in (*hidden.shape, *group_sizes.shape):
        portable = functools.partial(fp8.activate_quantized, activation=activation, keep=keep)
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
        values, scales, rows = launch(_ACTIVATE, operands, results, config, {**constants, **kind})
        return values, scales, rows

    return sequential_vmap(run)(*vary_alike((hidden, weights, group_sizes)))


def quantize_matrices(w: Array) -> Quantized:
    """`[G, K, N]` to FP8 `[G, N, K]`, one scale per block of 128 by 128: the bits of `quantize_fp8_weights`."""
    if w.dtype == jnp.float64 or 0 in w.shape:
        return fp8.quantize_matrices(w)
    make_ready("moe")
    return _quantize_matrices(w)


@jax.jit
def _quantize_matrices(w: Array) -> Quantized:
    def run(w: Array) -> Quantized:
        groups, depth, columns = w.shape
        blocks = (groups, -(-columns // GROUP_SIZE), depth // GROUP_SIZE)
        results = (jax.ShapeDtypeStruct((groups, columns, depth), FP8), jax.ShapeDtypeStruct(blocks, jnp.float32))
        constants = {"K": depth, "N": columns, "G": groups}
        values, scales = launch(_MATRICES, (w,), results, matrices_config(math.prod(blocks)), constants)
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
