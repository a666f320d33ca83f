"""The weighted activation between the products of the layer, its gradient, and operands in FP8, of the rows in use.

requirements.py says which operands the kernels take. What lies past the groups is neither read nor written.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep.core import fp8
from jax_ep.core.dtypes import FP8
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.kernel import Argument, Config, Constants, Kernel, flat_arrays
from jax_ep.core.layout import power_of_two, row_groups
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.megakernels.grid import num_programs, whole_registers
from jax_ep.megakernels.kernels import activation as activation_kernels
from jax_ep.megakernels.kernels import fp8_columns as fp8_columns_kernels
from jax_ep.megakernels.kernels import fp8_matrices as fp8_matrices_kernels
from jax_ep.megakernels.kernels import rows as rows_kernels
from jax_ep.megakernels.kernels.exchange_structs import Rows
from jax_ep.megakernels.kernels.gemm_structs import Activation, ColumnPass, RowBias, RowPass
from jax_ep.megakernels.launch import launch
from jax_ep.megakernels.rows import BLOCK_ELEMENTS, num_blocks, pass_config, row_pass
from jax_ep.types import Array, Experts, Quantized, Tokens

_ACTIVATE = Kernel(activation_kernels.weighted_activation)
_GRADIENT = Kernel(activation_kernels.weighted_activation_gradient)
_QUANTIZE_ROWS = Kernel(rows_kernels.quantize_rows)
_DEQUANTIZE_ROWS = Kernel(rows_kernels.dequantize_rows)
_ACTIVATE_QUANTIZED = Kernel(activation_kernels.activate_quantized)
_QUANTIZE_MATRICES = Kernel(fp8_matrices_kernels.quantize_matrices)
_QUANTIZE_COLUMNS = Kernel(fp8_columns_kernels.quantize_columns)
_ACTIVATE_COLUMNS = Kernel(fp8_columns_kernels.activate_columns)
# Of a block.
_MOST_COLUMNS, _MOST_GRADIENT_COLUMNS = 512, 1024
_ACTIVATED_COLUMNS = 64  # gates, and what they multiply, of twice as many would not fit in registers


@functools.partial(jax.jit, static_argnums=0)  # one compilation for eager callers, as all below
def activate(experts: Experts, hidden: Array, weights: Array, bias: Array | None, group_sizes: Array) -> Array:
    """Activated and weighted rows; what lies past the groups holds anything.

    Args:
      experts: what they compute.
      hidden: `[R, 2 * I]`, or `[R, I]` where not gated.
      weights: `[R]` float32.
      bias: one per column of `hidden` for each expert, or None.
      group_sizes: `[L]` int32; their sum says which rows are in use.

    Returns:
      `[R, I]`.
    """
    hidden, weights, bias, group_sizes = vary_alike((hidden, weights, bias, group_sizes))
    sizes = sizes_of((hidden.shape[0], _columns(experts, hidden)), group_sizes)
    result = jax.ShapeDtypeStruct((sizes.num_rows, sizes.width), hidden.dtype)
    operands, constants = _with_bias((hidden, weights, group_sizes), bias)
    constants |= {"S": sizes, "KIND": kind_of(experts)}
    return launch(_ACTIVATE, operands, (result,), pass_config(num_blocks(sizes)), constants)[0]


@functools.partial(jax.jit, static_argnums=0, static_argnames="keep")
def activate_gradient(
    experts: Experts,
    hidden: Array,
    weights: Array,
    bias: Array | None,
    d_rows: Array,
    group_sizes: Array,
    *,
    keep: bool,
) -> tuple[Array, Array, Array | None]:
    """Cotangents of `hidden`, which hold anything past the groups, and of `weights`; and activated rows.

    Args:
      experts: as for `activate`, as are all others but
      hidden, weights, bias, group_sizes: likewise.
      d_rows: `[R, I]`, the cotangent of its result.
      keep: also return that result, made again in the same pass; else None.
    """
    hidden, weights, bias, d_rows, group_sizes = vary_alike((hidden, weights, bias, d_rows, group_sizes))
    sizes = gradient_sizes_of(experts, d_rows.shape, group_sizes)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (hidden, weights)]
    results.append(jax.ShapeDtypeStruct(d_rows.shape if keep else (1,), d_rows.dtype))
    operands, constants = _with_bias((hidden, weights, d_rows, group_sizes), bias)
    constants |= {"S": sizes, "KIND": kind_of(experts), "KEEP": keep}
    config = gradient_config(experts, sizes, keep)
    d_hidden, d_weights, rows = launch(_GRADIENT, operands, results, config, constants)
    return d_hidden, d_weights, rows if keep else None


def kind_of(experts: Experts) -> Activation:
    """What kernels are told of experts."""
    return Activation(
        name=str(experts.activation),
        gated=experts.gated,
        interleaved=experts.interleaved,
        alpha=float(experts.alpha),
        clamp=None if experts.clamp is None else float(experts.clamp),
        up_offset=float(experts.up_offset),
        weights_on_input=experts.weight_on == "input",
    )


def _columns(experts: Experts, hidden: Array) -> int:
    return hidden.shape[1] // (2 if experts.gated else 1)


def _with_bias(operands: tuple[Argument, ...], bias: Array | None) -> tuple[tuple[Argument, ...], Constants]:
    """Operands, of which the first are the rows and the last the group sizes, with those of a bias; and constants."""
    if bias is None:
        return operands, {"bias": None}
    rows, *_, group_sizes = flat_arrays(operands)
    return (*operands, RowBias(bias, row_groups(group_sizes, rows.shape[0]))), {}


@jax.jit
def quantize_rows(x: Array, group_sizes: Array) -> Quantized:
    """`[R, H]` rows to FP8 values and their scales `[R, H / 128]`; past the groups they hold anything."""
    sizes, operands = sizes_of(x.shape, group_sizes), vary_alike((x, group_sizes))
    results = (_quantized(x.shape),)
    rows = launch(_QUANTIZE_ROWS, operands, results, pass_config(num_blocks(sizes)), {"S": sizes})[0]
    return rows.values_ptr, rows.scales_ptr


@functools.partial(jax.jit, static_argnames="dtype")
def dequantize_rows(values: Array, scales: Array, group_sizes: Array, *, dtype: DTypeLike) -> Array:
    """The inverse of `quantize_rows`, rounded to `dtype`."""
    values, scales, group_sizes = vary_alike((values, scales, group_sizes))
    sizes, result = sizes_of(values.shape, group_sizes), jax.ShapeDtypeStruct(values.shape, dtype)
    operands = (Rows(values, scales), group_sizes)
    return launch(_DEQUANTIZE_ROWS, operands, (result,), pass_config(num_blocks(sizes)), {"S": sizes})[0]


@functools.partial(jax.jit, static_argnums=0)
def activate_quantized(
    experts: Experts, hidden: Array, weights: Array, bias: Array | None, group_sizes: Array
) -> Quantized:
    """Activated and weighted rows in FP8, `[R, I]` and `[R, I / 128]`."""
    shape = (hidden.shape[0], _columns(experts, hidden))
    hidden, weights, bias, group_sizes = vary_alike((hidden, weights, bias, group_sizes))
    sizes = sizes_of(shape, group_sizes)
    operands, constants = _with_bias((hidden, weights, group_sizes), bias)
    constants |= {"S": sizes, "KIND": kind_of(experts)}
    results, config = (_quantized(shape),), pass_config(num_blocks(sizes))
    (rows,) = launch(_ACTIVATE_QUANTIZED, operands, results, config, constants)
    return rows.values_ptr, rows.scales_ptr


@functools.partial(jax.jit, static_argnames="transpose")
def quantize_matrices(w: Array, *, transpose: bool = True) -> Quantized:
    """`[G, K, N]` to FP8 `[G, N, K]`, one scale per block of 128 by 128: the bits of format "fp8".

    Without `transpose` to `[G, K, N]`, with scales `[G, ceil(K / 128), N / 128]`.
    """
    (rows,) = launch(_QUANTIZE_MATRICES, (w,), *_results_of_matrices(w, turned=transpose, as_is=not transpose))
    return rows.values_ptr, rows.scales_ptr


@jax.jit
def quantize_masters(w: Array) -> tuple[Array, Array, Array]:
    """`[G, K, N]`, read once, to FP8 `[G, N, K]`, `[G, K, N]`, and the scales of the first."""
    turned, as_is = launch(_QUANTIZE_MATRICES, (w,), *_results_of_matrices(w, turned=True, as_is=True))
    return turned.values_ptr, as_is.values_ptr, turned.scales_ptr


def _results_of_matrices(w: Array, *, turned: bool, as_is: bool) -> tuple[list[Rows], Config, Constants]:
    """What is asked for of `[G, N, K]` and `[G, K, N]`, with scales of blocks, in this order; and how it is made."""
    groups, depth, columns = w.shape
    blocks = (-(-columns // GROUP_SIZE), -(-depth // GROUP_SIZE))
    results = []
    if turned:
        results.append(_blocks((groups, columns, depth), (groups, *blocks)))
    if as_is:
        results.append(_blocks(w.shape, (groups, *blocks[::-1])))
    constants: Constants = {"K": depth, "N": columns, "NUM_GROUPS": groups}
    constants |= ({} if turned else {"transposed": None}) | ({} if as_is else {"untransposed": None})
    return results, matrices_config(groups * math.prod(blocks), w.dtype), constants


def _blocks(shape: tuple[int, ...], scales: tuple[int, ...]) -> Rows:
    return Rows(jax.ShapeDtypeStruct(shape, FP8), jax.ShapeDtypeStruct(scales, jnp.float32))


@jax.jit
def quantize_columns(x: Tokens, group_sizes: Array) -> Quantized:
    """`[R, H]` rows, which may be in FP8, to columns in FP8: values `[H, P]` and scales `[P / 128, H]`.

    Places past the blocks in use hold anything.
    """
    columns = launch(_QUANTIZE_COLUMNS, *_columns_launch(x, group_sizes, both=False))[0]
    return columns.values_ptr, columns.scales_ptr


@jax.jit
def quantize_both_ways(x: Array, group_sizes: Array) -> tuple[Quantized, Quantized]:
    """`quantize_rows` and `quantize_columns` of the same rows, read once."""
    columns, rows = launch(_QUANTIZE_COLUMNS, *_columns_launch(x, group_sizes, both=True))
    return (rows.values_ptr, rows.scales_ptr), (columns.values_ptr, columns.scales_ptr)


def _columns_launch(
    x: Tokens, group_sizes: Array, *, both: bool
) -> tuple[tuple[Array, ...], list[Argument], Config, Constants]:
    """Operands, results, which are columns and, with `both`, rows, config and constants."""
    operands = vary_alike((*(x if isinstance(x, tuple) else (x,)), group_sizes))
    sizes = column_sizes_of(operands[0].shape, group_sizes, GROUP_SIZE)
    constants: Constants = {"S": sizes} | ({} if isinstance(x, tuple) else {"scales_ptr": None})
    results: list[Argument] = [_quantized_columns(sizes)]
    if both:
        results.append(_quantized(operands[0].shape))
    else:
        constants["rows"] = None
    return operands, results, columns_config(sizes, in_fp8=isinstance(x, tuple)), constants


@functools.partial(jax.jit, static_argnums=0)
def activate_columns(
    experts: Experts, hidden: Array, weights: Array, bias: Array | None, group_sizes: Array
) -> Quantized:
    """Activated and weighted rows, rounded once, as `quantize_columns` has them."""
    shape = (hidden.shape[0], _columns(experts, hidden))
    hidden, weights, bias, group_sizes = vary_alike((hidden, weights, bias, group_sizes))
    sizes = column_sizes_of(shape, group_sizes, _ACTIVATED_COLUMNS)
    operands, constants = _with_bias((hidden, weights, group_sizes), bias)
    constants |= {"S": sizes, "KIND": kind_of(experts)}
    config = activated_columns_config(experts, sizes)
    columns = launch(_ACTIVATE_COLUMNS, operands, (_quantized_columns(sizes),), config, constants)[0]
    return columns.values_ptr, columns.scales_ptr


def column_sizes_of(shape: tuple[int, ...], group_sizes: Array, block: int) -> ColumnPass:
    """Of a pass that turns an array of this shape, so many columns at a time."""
    (num_rows, columns), groups = shape, group_sizes.shape[0]
    places = fp8.num_blocks(num_rows, groups) * GROUP_SIZE
    return ColumnPass(num_rows, columns, groups, max(16, power_of_two(groups)), GROUP_SIZE, block, places)


def column_tasks(sizes: ColumnPass) -> int:
    """As many as there may be."""
    return sizes.num_places // GROUP_SIZE * -(-sizes.width // sizes.block_columns)


def columns_config(sizes: ColumnPass, *, in_fp8: bool) -> Config:
    """A program has a block in registers and the next one on its way; rows in 16 bits take the room of two."""
    num_tasks = column_tasks(sizes)
    if in_fp8:
        return Config(num_programs(num_tasks, 2), num_warps=8, max_registers=128)
    return Config(num_programs(num_tasks), num_warps=16, max_registers=128)


def activated_columns_config(experts: Experts, sizes: ColumnPass) -> Config:
    """What one program waits for, others do not; the error function leaves registers for fewer."""
    programs = 2 if experts.activation == "gelu_exact" else 3
    num_tasks = column_tasks(sizes)
    return Config(num_programs(num_tasks, programs), num_warps=8, max_registers=whole_registers(programs, 8))


def _quantized_columns(sizes: ColumnPass) -> Rows:
    scales = jax.ShapeDtypeStruct((sizes.num_places // GROUP_SIZE, sizes.width), jnp.float32)
    return Rows(jax.ShapeDtypeStruct((sizes.width, sizes.num_places), FP8), scales)


def sizes_of(shape: tuple[int, ...], group_sizes: Array) -> RowPass:
    """Of a pass over rows, an array of this shape."""
    return row_pass(shape, group_sizes, _MOST_COLUMNS, BLOCK_ELEMENTS)


def gradient_sizes_of(experts: Experts, shape: tuple[int, ...], group_sizes: Array) -> RowPass:
    """Of the gradient, which adds up whole rows `[R, H]`."""
    elements = BLOCK_ELEMENTS // 2 if _is_wide(experts) else BLOCK_ELEMENTS
    return row_pass(shape, group_sizes, _MOST_GRADIENT_COLUMNS, elements)


def gradient_config(experts: Experts, sizes: RowPass, keep: bool) -> Config:
    """Fewer programs where one needs more registers than eight leave it, as where rows are kept."""
    num_tasks = -(-sizes.num_rows // sizes.block_rows)
    if _is_wide(experts):
        return pass_config(num_tasks, 4)
    return pass_config(num_tasks, 5) if keep else pass_config(num_tasks)


def _is_wide(experts: Experts) -> bool:
    """Whether the gradient needs many registers for an element."""
    return experts.activation == "gelu_exact" or experts.interleaved or experts.clamp is not None


def matrices_config(num_tasks: int, dtype: DTypeLike) -> Config:
    """Of blocks of 128 by 128, of which a program has one in registers and the next one on its way there."""
    if jnp.dtype(dtype).itemsize > 2:
        return Config(num_programs(num_tasks), num_warps=16, max_registers=128)
    return Config(num_programs(num_tasks, 2), num_warps=8, max_registers=128)


def _quantized(shape: tuple[int, ...]) -> Rows:
    scales = jax.ShapeDtypeStruct((shape[0], shape[1] // GROUP_SIZE), jnp.float32)
    return Rows(jax.ShapeDtypeStruct(shape, FP8), scales)
