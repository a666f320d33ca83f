"""Passes over the rows in use of expert-major arrays: with a dropless capacity most rows are not in use.

They gather rows, activate them between the GEMMs of the layer, compute the gradient, and quantize operands to FP8. Rows
past the groups are neither read nor written. requirements.py states which operands the kernels support.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep.core import fp8
from jax_ep.core.activations import HiddenRows
from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_matrices import GemmWeights, SplitWeights, num_home
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.kernel import Argument, Config, Constants, Kernel
from jax_ep.core.layout import power_of_two, row_groups
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.megakernels.kernels import activation as activation_kernels
from jax_ep.megakernels.kernels import fp8_columns as fp8_columns_kernels
from jax_ep.megakernels.kernels import fp8_matrices as fp8_matrices_kernels
from jax_ep.megakernels.kernels import gemm_structs
from jax_ep.megakernels.kernels import rows as rows_kernels
from jax_ep.megakernels.kernels.exchange_structs import Rows
from jax_ep.megakernels.kernels.gemm_structs import Activation, ColumnPass, RowBias, RowPass
from jax_ep.megakernels.launch import launch, num_programs, thread_registers
from jax_ep.types import Array, Experts, Quantized, Tokens

_ACTIVATE = Kernel(activation_kernels.weighted_activation)
_GRADIENT = Kernel(activation_kernels.weighted_activation_gradient)
_GATHER = Kernel(rows_kernels.gather_rows)
_QUANTIZE_ROWS = Kernel(rows_kernels.quantize_rows)
_DEQUANTIZE_ROWS = Kernel(rows_kernels.dequantize_rows)
_ACTIVATE_QUANTIZED = Kernel(activation_kernels.activate_quantized)
_QUANTIZE_MATRICES = Kernel(fp8_matrices_kernels.quantize_matrices)
_QUANTIZE_COLUMNS = Kernel(fp8_columns_kernels.quantize_columns)
_ACTIVATE_COLUMNS = Kernel(fp8_columns_kernels.activate_columns)
_PROGRAMS = 8
"""Programs of four warps on a multiprocessor: it takes many bytes in flight to keep the memory busy."""
_BLOCK_ELEMENTS, _BLOCK_BYTES = 2048, 8192
"""Sizes of a block: two 16-byte words of 16-bit elements per thread to compute with, or four words to copy."""
_MOST_COLUMNS, _MOST_GRADIENT_COLUMNS, _MOST_COPIED_COLUMNS = 512, 1024, 1024
"""Columns of a block."""
_ACTIVATED_COLUMNS = 64  # registers do not hold gates and up values of twice as many


@jax.jit  # one compilation for eager callers, as for all functions below
def gather_rows(x: Array, index: Array, group_sizes: Array) -> Array:
    """Return `x[index]` for the rows of the groups, zeros for index -1; rows past the groups are undefined.

    Rows of `x [S, H]` are whole 16-byte words; `index [R]` and `group_sizes [L]` are int32.
    """
    shape = index.shape[0], x.shape[1]
    sizes = row_pass(shape, group_sizes, _MOST_COPIED_COLUMNS, _BLOCK_BYTES // x.dtype.itemsize)
    operands = vary_alike((x, index, group_sizes))
    return _launch(_GATHER, operands, sizes, jax.ShapeDtypeStruct(shape, x.dtype))


@functools.partial(jax.jit, static_argnums=0)
def activate(experts: Experts, rows: HiddenRows) -> Array:
    """Activate and weight rows; rows past the groups are undefined."""
    sizes = sizes_of(_activated_shape(experts, rows), rows.group_sizes)
    result = jax.ShapeDtypeStruct((sizes.num_rows, sizes.width), rows.hidden.dtype)
    return _launch(_ACTIVATE, _hidden_operands(rows), sizes, result, KIND=kind_of(experts))


@functools.partial(jax.jit, static_argnums=0, static_argnames="keep")
def activate_gradient(
    experts: Experts, rows: HiddenRows, d_rows: Array, *, keep: bool
) -> tuple[Array, Array, Array | None]:
    """Return cotangents of `hidden`, undefined past the groups, and of `weights`, and activated rows or None.

    `d_rows` is the cotangent of the result of `activate`; with `keep`, the same pass computes that result again.
    """
    rows, d_rows = vary_alike((rows, d_rows))
    sizes = gradient_sizes_of(experts, d_rows.shape, rows.group_sizes)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (rows.hidden, rows.weights)]
    results.append(jax.ShapeDtypeStruct(d_rows.shape if keep else (1,), d_rows.dtype))
    hidden, weights, group_sizes, bias = _hidden_operands(rows)
    constants: Constants = {"S": sizes, "KIND": kind_of(experts), "KEEP": keep}
    config, operands = gradient_config(experts, sizes, keep), (hidden, weights, d_rows, group_sizes, bias)
    d_hidden, d_weights, activated = launch(_GRADIENT, operands, results, config, constants)
    return d_hidden, d_weights, activated if keep else None


def kind_of(experts: Experts) -> Activation:
    """Return what kernels know about experts."""
    return Activation(
        name=str(experts.activation),
        gated=experts.gated,
        interleaved=experts.interleaved,
        alpha=float(experts.alpha),
        clamp=None if experts.clamp is None else float(experts.clamp),
        up_offset=float(experts.up_offset),
        weights_on_input=experts.weight_on == "input",
    )


def _activated_shape(experts: Experts, rows: HiddenRows) -> tuple[int, int]:
    return rows.hidden.shape[0], rows.hidden.shape[1] // (2 if experts.gated else 1)


def _hidden_operands(rows: HiddenRows) -> tuple[Array, Array, Array, RowBias | None]:
    """Return hidden rows, their weights, the group sizes, and the bias of each row."""
    hidden, weights, bias, group_sizes = vary_alike(rows)
    row_bias = None if bias is None else RowBias(bias, row_groups(group_sizes, hidden.shape[0]))
    return hidden, weights, group_sizes, row_bias


def _launch(
    kernel: Kernel, operands: tuple[Argument | None, ...], sizes: RowPass, result: Argument, **constants: object
) -> Any:
    """Run a pass with one result."""
    return launch(kernel, operands, (result,), pass_config(num_blocks(sizes)), {"S": sizes, **constants})[0]


@jax.jit
def quantize_rows(x: Array, group_sizes: Array) -> Quantized:
    """Quantize `[R, H]` rows to FP8 values and scales `[R, H / 128]`; both are undefined past the groups."""
    rows = _launch(_QUANTIZE_ROWS, vary_alike((x, group_sizes)), sizes_of(x.shape, group_sizes), _quantized(x.shape))
    return rows.values_ptr, rows.scales_ptr


@functools.partial(jax.jit, static_argnames="dtype")
def dequantize_rows(values: Array, scales: Array, group_sizes: Array, *, dtype: DTypeLike) -> Array:
    """Invert `quantize_rows`, rounding to `dtype`."""
    values, scales, group_sizes = vary_alike((values, scales, group_sizes))
    sizes, result = sizes_of(values.shape, group_sizes), jax.ShapeDtypeStruct(values.shape, dtype)
    return _launch(_DEQUANTIZE_ROWS, (Rows(values, scales), group_sizes), sizes, result)


@functools.partial(jax.jit, static_argnums=0)
def activate_quantized(experts: Experts, rows: HiddenRows) -> Quantized:
    """Activate and weight rows, and quantize them to FP8 `[R, I]` and scales `[R, I / 128]`."""
    shape, operands = _activated_shape(experts, rows), _hidden_operands(rows)
    sizes = sizes_of(shape, rows.group_sizes)
    found = _launch(_ACTIVATE_QUANTIZED, operands, sizes, _quantized(shape), KIND=kind_of(experts))
    return found.values_ptr, found.scales_ptr


@functools.partial(jax.jit, static_argnames="transpose")
def quantize_matrices(w: GemmWeights, group_sizes: Array | None = None, *, transpose: bool = True) -> Quantized:
    """Quantize `[G, K, N]` to FP8 `[G, N, K]`, one scale per block of 128 by 128: the bits of format "fp8".

    The weights are in one array or two; then, with `group_sizes`, spare slots after the last one in use are left out.
    Without `transpose`, to `[G, K, N]` with scales `[G, ceil(K / 128), N / 128]`.
    """
    sizes = group_sizes if isinstance(w, SplitWeights) else None
    found = _quantize_matrices(w, sizes, transposed=transpose, untransposed=not transpose)
    rows = found[0] if transpose else found[1]
    return rows.values_ptr, rows.scales_ptr


@jax.jit
def quantize_masters(w: Array) -> tuple[Array, Array, Array]:
    """Read `[G, K, N]` once, and quantize it to FP8 `[G, N, K]`, `[G, K, N]`, and the scales of the first."""
    transposed, untransposed = _quantize_matrices(w, None, transposed=True, untransposed=True)
    return transposed.values_ptr, untransposed.values_ptr, transposed.scales_ptr


def _quantize_matrices(
    w: GemmWeights, group_sizes: Array | None, *, transposed: bool, untransposed: bool
) -> tuple[Any, ...]:
    """Quantize `[G, K, N]` to `[G, N, K]`, to `[G, K, N]` or to both, with scales of blocks."""
    groups, depth, columns = w.shape
    blocks = -(-columns // GROUP_SIZE), -(-depth // GROUP_SIZE)
    results = (
        _rows((groups, columns, depth), (groups, *blocks)) if transposed else None,
        _rows(w.shape, (groups, *blocks[::-1])) if untransposed else None,
    )
    config = matrices_config(groups * math.prod(blocks), w.dtype)
    counts = {"NUM_GROUPS": groups, "HOME_GROUPS": num_home(w), "PADDED_GROUPS": max(16, power_of_two(groups))}
    constants = {"K": depth, "N": columns, **counts}
    operand = gemm_structs.SplitWeights(*w) if isinstance(w, SplitWeights) else w
    return launch(_QUANTIZE_MATRICES, (operand, group_sizes), results, config, constants)


@jax.jit
def quantize_columns(x: Tokens, group_sizes: Array) -> Quantized:
    """Quantize the columns of `[R, H]` rows, which may be in FP8: values `[H, P]` and scales `[P / 128, H]`.

    Places past the blocks in use are undefined.
    """
    columns, _ = _quantize_columns(x, group_sizes, both=False)
    return columns.values_ptr, columns.scales_ptr


@jax.jit
def quantize_both_ways(x: Array, group_sizes: Array) -> tuple[Quantized, Quantized]:
    """Read rows once for `quantize_rows` and `quantize_columns`."""
    columns, rows = _quantize_columns(x, group_sizes, both=True)
    return (rows.values_ptr, rows.scales_ptr), (columns.values_ptr, columns.scales_ptr)


def _quantize_columns(x: Tokens, group_sizes: Array, *, both: bool) -> tuple[Any, ...]:
    """Quantize columns and, with `both`, rows."""
    values, scales = fp8.split_rows(x)
    operands = vary_alike((values, scales, group_sizes))
    sizes = column_sizes_of(values.shape, group_sizes, GROUP_SIZE)
    results = _quantized_columns(sizes), _quantized(values.shape) if both else None
    config = columns_config(sizes, in_fp8=scales is not None)
    return launch(_QUANTIZE_COLUMNS, operands, results, config, {"S": sizes})


@functools.partial(jax.jit, static_argnums=0)
def activate_columns(experts: Experts, rows: HiddenRows) -> Quantized:
    """Activate and weight rows, and quantize their columns as `quantize_columns` does, rounding once."""
    sizes = column_sizes_of(_activated_shape(experts, rows), rows.group_sizes, _ACTIVATED_COLUMNS)
    config, constants = activated_columns_config(experts, sizes), {"S": sizes, "KIND": kind_of(experts)}
    columns = launch(_ACTIVATE_COLUMNS, _hidden_operands(rows), (_quantized_columns(sizes),), config, constants)[0]
    return columns.values_ptr, columns.scales_ptr


def row_pass(shape: tuple[int, ...], group_sizes: Array, most_columns: int, elements: int) -> RowPass:
    """Return the sizes of a pass over rows of this shape, in blocks of at most these elements and columns."""
    num_rows, columns = shape
    block, groups = min(most_columns, power_of_two(columns)), group_sizes.shape[0]
    return RowPass(num_rows, columns, groups, max(16, power_of_two(groups)), max(1, elements // block), block)


def num_blocks(sizes: RowPass) -> int:
    """Return the number of blocks if all rows are in use."""
    return -(-sizes.num_rows // sizes.block_rows) * -(-sizes.width // sizes.block_columns)


def pass_config(num_tasks: int, programs: int = _PROGRAMS) -> Config:
    """Return the config of a kernel that reads and writes each element once."""
    return Config(num_programs(num_tasks, programs), num_warps=4, max_registers=thread_registers(programs, 4))


def sizes_of(shape: tuple[int, ...], group_sizes: Array) -> RowPass:
    """Return the sizes of a pass that computes with rows of this shape."""
    return row_pass(shape, group_sizes, _MOST_COLUMNS, _BLOCK_ELEMENTS)


def gradient_sizes_of(experts: Experts, shape: tuple[int, ...], group_sizes: Array) -> RowPass:
    """Return the sizes of the gradient, which adds up whole rows `[R, H]`."""
    elements = _BLOCK_ELEMENTS // 2 if _is_wide(experts) else _BLOCK_ELEMENTS
    return row_pass(shape, group_sizes, _MOST_GRADIENT_COLUMNS, elements)


def gradient_config(experts: Experts, sizes: RowPass, keep: bool) -> Config:
    """Return the config of the gradient: with rows to keep, a program needs more registers than eight leave it."""
    return pass_config(-(-sizes.num_rows // sizes.block_rows), 4 if _is_wide(experts) else 5 if keep else _PROGRAMS)


def _is_wide(experts: Experts) -> bool:
    """Return whether the gradient needs many registers per element."""
    return experts.activation == "gelu_exact" or experts.interleaved or experts.clamp is not None


def column_sizes_of(shape: tuple[int, ...], group_sizes: Array, block: int) -> ColumnPass:
    """Return the sizes of a pass that transposes an array of this shape, `block` columns at a time."""
    (num_rows, columns), groups = shape, group_sizes.shape[0]
    places = fp8.num_blocks(num_rows, groups) * GROUP_SIZE
    return ColumnPass(num_rows, columns, groups, max(16, power_of_two(groups)), GROUP_SIZE, block, places)


def _column_tasks(sizes: ColumnPass) -> int:
    return sizes.num_places // GROUP_SIZE * -(-sizes.width // sizes.block_columns)


def columns_config(sizes: ColumnPass, *, in_fp8: bool) -> Config:
    """Return the config for columns in FP8 of rows in FP8 or 16 bits, which take the registers of two programs."""
    return _block_config(_column_tasks(sizes), 2 if in_fp8 else 1)


def activated_columns_config(experts: Experts, sizes: ColumnPass) -> Config:
    """Return the config for activated columns: the error function leaves registers for fewer programs."""
    programs = 2 if experts.activation == "gelu_exact" else 3
    registers = thread_registers(programs, 8, multiple=8)
    return Config(num_programs(_column_tasks(sizes), programs), num_warps=8, max_registers=registers)


def matrices_config(num_tasks: int, dtype: DTypeLike) -> Config:
    """Return the config for blocks of 128 by 128 elements."""
    return _block_config(num_tasks, 1 if jnp.dtype(dtype).itemsize > 2 else 2)


def _block_config(num_tasks: int, programs: int) -> Config:
    """Return a config of 16 warps per multiprocessor, whose programs hold one block and load the next one."""
    return Config(num_programs(num_tasks, programs), num_warps=16 // programs, max_registers=128)


def _rows(shape: tuple[int, ...], scales: tuple[int, ...]) -> Rows:
    return Rows(jax.ShapeDtypeStruct(shape, FP8), jax.ShapeDtypeStruct(scales, jnp.float32))


def _quantized(shape: tuple[int, ...]) -> Rows:
    return _rows(shape, (shape[0], shape[1] // GROUP_SIZE))


def _quantized_columns(sizes: ColumnPass) -> Rows:
    return _rows((sizes.width, sizes.num_places), (sizes.num_places // GROUP_SIZE, sizes.width))
