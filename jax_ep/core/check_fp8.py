"""Argument checks of FP8 operands and of the masked operations."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep.core import check
from jax_ep.core.dtypes import FP8
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.mesh_axes import axis_tuple
from jax_ep.types import Array, Quantized, type_name


def matrices(function: str, name: str, value: Any, *, whole: bool = True) -> Array:
    """Floating `[..., K, N]`, with whole blocks along K if `whole`."""
    if not isinstance(value, jax.Array | np.ndarray):
        raise TypeError(f"{function}: {name} is {type_name(value)}, not an array; pass a JAX or NumPy array.")
    if value.ndim < 2:
        raise ValueError(f"{function}: {name} has shape {value.shape}, expected [..., K, N]; reshape it.")
    value = check.floating(function, name, jnp.asarray(value))
    if whole:
        whole_blocks(function, f"axis -2 of {name}, K,", value.shape[-2])
    return value


def whole_blocks(function: str, what: str, size: int) -> None:
    """FP8 products need whole blocks of K."""
    if size % GROUP_SIZE:
        raise ValueError(
            f"{function}: {what} is {size}, expected a multiple of {GROUP_SIZE}, the elements that share an FP8 scale;"
            " pad with zeros, or use bfloat16."
        )


def whole_blocks_per_device(function: str, name: str, value: Array) -> None:
    """Where types name shardings, on explicit mesh axes, `[..., K, N]` is split between blocks only."""
    for axis in (-2, -1):
        whole_groups_per_device(function, name, value, axis, value.shape[axis], GROUP_SIZE)


def whole_groups_per_device(function: str, name: str, value: Array, axis: int, size: int, group: int) -> None:
    """Where types name shardings, an axis, which stands for `size` elements, is split between groups of them only."""
    sharding = jax.typeof(value).sharding
    names = axis_tuple(sharding.spec[axis] or ())
    devices = math.prod(sharding.mesh.shape[mesh_axis] for mesh_axis in names)
    groups = -(-size // group)
    if groups > 1 and groups % devices:
        raise ValueError(
            f"{function}: axis {axis} of {name} is {size}, {groups} blocks of {group}, split over"
            f" the {devices} devices of {names}; expected whole blocks on each, since a block has one scale: move"
            " it with jax.sharding.reshard first."
        )


def quantized_matrices(function: str, values: Any, scales: Any) -> Quantized:
    """FP8 values `[..., N, K]` with float32 scales of blocks."""
    for name, value in (("values", values), ("scales", scales)):
        if not isinstance(value, jax.Array | np.ndarray):
            raise TypeError(f"{function}: {name} is {type_name(value)}, not an array; pass a JAX or NumPy array.")
    if values.dtype != FP8 or scales.dtype != jnp.float32:
        raise TypeError(
            f"{function}: (values, scales) have dtypes ({values.dtype}, {scales.dtype}), expected (float8_e4m3fn,"
            " float32); convert with jax_ep.quantization.quantize_fp8_weights."
        )
    if values.ndim < 2 or values.shape[-1] % GROUP_SIZE or scales.shape != scale_shape(values.shape, GROUP_SIZE):
        expected = scale_shape(values.shape, GROUP_SIZE) if values.ndim >= 2 else "[..., ceil(N / 128), K / 128]"
        raise ValueError(
            f"{function}: values have shape {values.shape} and scales {scales.shape}, expected [..., N, K] with K a"
            f" multiple of {GROUP_SIZE} and scales {expected}; quantise with jax_ep.quantization.quantize_fp8_weights."
        )
    return jnp.asarray(values), jnp.asarray(scales)


def scale_shape(shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Shape of the scales of `[..., N, K]`, each for `rows` rows and a block of columns."""
    return (*shape[:-2], -(-shape[-2] // rows), shape[-1] // GROUP_SIZE)


def operands(function: str, lhs: Any, rhs: Any, group_sizes: Any) -> tuple[Array, Array, Array]:
    """`lhs [L, M, K]`, `rhs [L, N, K]` of one dtype, which may be FP8, and `group_sizes [L]`."""
    lhs = check.array(function, "lhs", lhs, 3, "[L, M, K]")
    rhs = check.array(function, "rhs", rhs, 3, "[L, N, K]")
    if lhs.dtype != FP8:
        check.floating(function, "lhs", lhs)
    check.same_dtype(function, "rhs", rhs, "lhs", lhs.dtype)
    group_sizes = check.group_sizes(function, group_sizes)
    check.int32_rows(function, f"lhs of shape {lhs.shape}", lhs.shape[0] * lhs.shape[1], "split it")
    for name, size in (("rhs", rhs.shape[0]), ("group_sizes", group_sizes.shape[0])):
        check.size(function, f"axis 0 of {name}", size, lhs.shape[0], "pass one of each per local expert, as lhs has")
    remedy = "matrices are [L, N, K]: swap their last two axes, or quantise with quantize_fp8_weights, which does"
    check.size(function, "axis 2 of rhs", rhs.shape[2], lhs.shape[2], remedy)
    return lhs, rhs, group_sizes


def ragged_operands(function: str, lhs: Any, rhs: Any, group_sizes: Any) -> tuple[Array, Array, Array]:
    """FP8 `lhs [M, K]` and `rhs [G, N, K]`, and `group_sizes [G]`."""
    lhs = check.array(function, "lhs", lhs, 2, "[M, K]")
    rhs = check.array(function, "rhs", rhs, 3, "[G, N, K] in FP8")
    if FP8 not in (lhs.dtype, rhs.dtype):
        raise TypeError(
            f"{function}: scales are given but lhs has dtype {lhs.dtype}, expected float8_e4m3fn; pass lhs_scales=None"
            " and rhs_scales=None, or quantise both operands."
        )
    check.same_dtype(function, "rhs", rhs, "lhs", lhs.dtype)
    check.int32_rows(function, f"lhs of shape {lhs.shape}", lhs.shape[0], "split it")
    group_sizes = check.group_sizes(function, group_sizes)
    check.size(function, "axis 0 of rhs", rhs.shape[0], group_sizes.shape[0], "pass one matrix for each of group_sizes")
    remedy = "FP8 matrices are [G, N, K]: swap their last two axes, or quantise with quantize_fp8_weights, which does"
    check.size(function, "axis 2 of rhs", rhs.shape[2], lhs.shape[1], remedy)
    return lhs, rhs, group_sizes


def result_dtype(function: str, preferred: DTypeLike | None, lhs: Array) -> jnp.dtype:
    """The dtype of a product: `preferred`, else that of lhs, bfloat16 for FP8."""
    return check.result_dtype(function, preferred, jnp.bfloat16 if lhs.dtype == FP8 else lhs.dtype)


def scales(function: str, name: str, value: Any, operand: Array, rows: int) -> Array | None:
    """The float32 scales of an FP8 operand, one for `rows` rows and 128 columns; None where the operand is not FP8.

    Of single rows also those of larger groups, each of which is then that of several.
    """
    of = name.removesuffix("_scales")
    if operand.dtype != FP8:
        if value is not None:
            raise TypeError(f"{function}: {name} are given but {of} has dtype {operand.dtype}; pass None.")
        return None
    whole_blocks(function, f"axis {operand.ndim - 1} of {of}, K,", operand.shape[-1])
    expected = scale_shape(operand.shape, rows)
    if value is None:
        raise TypeError(
            f"{function}: {name} is None but {of} has dtype {operand.dtype}; pass float32 scales of shape {expected}."
        )
    value = check.array(function, name, value, operand.ndim, str(expected))
    if value.dtype != jnp.float32:
        raise TypeError(f"{function}: {name} has dtype {value.dtype}, expected float32; cast it with astype.")
    groups, wanted = value.shape[-1], expected[-1]
    is_per_row = rows == 1 and value.shape[:-1] == expected[:-1] and groups > 0 < wanted
    if is_per_row and groups < wanted and wanted % groups == 0:
        return jnp.repeat(value, wanted // groups, axis=-1)
    if value.shape != expected:
        hint = ""
        if is_per_row and groups % wanted == 0:
            hint = f" These are of groups of {operand.shape[-1] // groups}: quantise with group_size={GROUP_SIZE}."
        raise ValueError(
            f"{function}: {name} has shape {value.shape} but {of} has {operand.shape}, expected {expected}; pass one"
            f" scale per {GROUP_SIZE} columns and {'row' if rows == 1 else f'{rows} rows'}.{hint}"
        )
    return value
