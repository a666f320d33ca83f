"""Argument checks of recipes and of their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep.core import check
from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_matrices import Fp8Weights
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.types import Array, type_name

_REMEDY = "make it with jax_ep.quantization.quantize_master_weights"


def recipe(function: str, value: Any) -> str | None:
    """Check that a recipe is "fp8" or None."""
    if value is not None and not isinstance(value, str):
        raise TypeError(
            f"{function}: recipe={value!r} is {type_name(value)}, expected 'fp8' or None; pass recipe='fp8', or None"
            " to compute in the dtype of the tokens."
        )
    if value not in (None, "fp8"):
        raise ValueError(
            f"{function}: recipe={value!r}, expected 'fp8' or None; pass recipe='fp8', or None to compute in the dtype"
            " of the tokens."
        )
    return value


def whole_blocks(function: str, hidden: int, intermediate: int) -> None:
    """Check that H and I are multiples of 128, which FP8 matmuls need."""
    if hidden % GROUP_SIZE or intermediate % GROUP_SIZE:
        raise ValueError(
            f"{function}: H={hidden} and I={intermediate}, but recipe='fp8' needs multiples of {GROUP_SIZE}, the FP8"
            " scale block; pad both with zeros, or leave recipe=None."
        )


def matrices(
    function: str, recipe: str | None, name: str, value: Any, leading: tuple[int, int | None], tokens: DTypeLike
) -> Any:
    """Check weights `[*leading, N]` in the tokens' dtype, in any floating dtype with a recipe, or as `Fp8Weights`.

    The second size of `leading` is None if it is not known yet.
    """
    if isinstance(value, Fp8Weights):
        return _fp8_weights(function, recipe, name, value, leading)
    shape = f"[{leading[0]}, I, H]" if leading[1] is None else f"[{leading[0]}, {leading[1]}, N]"
    value = check.array(function, name, value, 3, shape)
    dtype = tokens if recipe is None else check.floating(function, name, value).dtype
    return check.expert_weights(function, name, value, (leading[0], leading[1] or value.shape[1]), dtype)


def _fp8_weights(
    function: str, recipe: str | None, name: str, value: Fp8Weights, leading: tuple[int, int | None]
) -> Fp8Weights:
    if recipe is None:
        raise ValueError(
            f"{function}: {name} is Fp8Weights with recipe=None, expected recipe='fp8'; pass that, or the master:"
            f" {name}.master."
        )
    parts = fp8_weights(function, name, value)
    check.expert_weights(
        function, f"{name}.master", parts.master, (leading[0], leading[1] or parts.shape[1]), parts.dtype
    )
    return parts


def fp8_weights(function: str, name: str, value: Fp8Weights, rank: int = 3) -> Fp8Weights:
    """Check that the parts of one layer's weights agree: `[L, K, N]`, or with rank 4 `[L, K, 2, N]`."""
    parts = {part: getattr(value, part) for part in ("master", "values", "transposed", "scales")}
    for part, array in parts.items():
        if not isinstance(array, jax.Array | np.ndarray):
            raise TypeError(f"{function}: {name}.{part} is {type_name(array)}, not an array; {_REMEDY}.")
        parts[part] = jnp.asarray(array)
    shape = parts["master"].shape
    if len(shape) != rank or shape[1] % GROUP_SIZE or shape[-1] % GROUP_SIZE:
        expected_shape = "[L, K, N]" if rank == 3 else "[L, K, 2, N]"
        raise ValueError(
            f"{function}: {name} stands for weights {shape}, expected {expected_shape} with multiples of {GROUP_SIZE};"
            f" {_REMEDY}, and pass those of one layer."
        )
    check.floating(function, f"{name}.master", parts["master"])
    groups, depth, *kinds, columns = shape
    blocks = (groups, *kinds, columns // GROUP_SIZE, depth // GROUP_SIZE)
    expected: dict[str, tuple[tuple[int, ...], Any]] = {
        "values": ((groups, *kinds, columns, depth), FP8),
        "transposed": (shape, FP8),
        "scales": (blocks, jnp.dtype(jnp.float32)),
    }
    for part, (part_shape, dtype) in expected.items():
        array = parts[part]
        if (array.shape, array.dtype) != (part_shape, dtype):
            raise ValueError(
                f"{function}: {name}.{part} is {array.dtype}{list(array.shape)}, expected {dtype}{list(part_shape)} for"
                f" a master {list(shape)}; {_REMEDY}."
            )
    return Fp8Weights(**parts)


def whole_blocks_per_rank(
    function: str,
    ranks: Mapping[str, int],
    w_down: tuple[int, ...],
    tensor_axis: str | None,
    fsdp_axis: str | None,
) -> None:
    """Check that a tensor axis splits I, and an fsdp axis H, of `[..., I, H]` at scale block boundaries."""
    for name, size, axis in (("H", w_down[-1], fsdp_axis), ("I", w_down[-2], tensor_axis)):
        if axis is not None and size % (GROUP_SIZE * ranks[axis]):
            raise ValueError(
                f"{function}: {name}={size} of Fp8Weights over the {ranks[axis]} ranks of {axis!r}, expected a"
                f" multiple of {GROUP_SIZE} per rank, as blocks of {GROUP_SIZE} by {GROUP_SIZE} share a scale; pass"
                " plain arrays, or shard over fewer ranks."
            )


def whole_matrices(function: str, name: str, w: Array) -> None:
    """Check that `[..., K, N]` consists of whole scale blocks."""
    for axis, size in ((-2, w.shape[-2]), (-1, w.shape[-1])):
        if size % GROUP_SIZE:
            raise ValueError(
                f"{function}: axis {axis} of {name} is {size}, expected a multiple of {GROUP_SIZE}, as blocks of"
                f" {GROUP_SIZE} by {GROUP_SIZE} share an FP8 scale; pad with zeros."
            )
