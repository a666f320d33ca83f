"""Argument checks of recipes, and of the matrices that they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep.core import check
from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_matrices import RECIPES, Fp8Weights
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.types import Array, type_name

_BOTH_WAYS = ("fp8", "fp8-input-gradient")
IN_FP8 = (*_BOTH_WAYS, "fp8-forward")
_REMEDY = "make it with jax_ep.quantization.quantize_master_weights"


def recipe(function: str, value: Any, tokens: DTypeLike) -> str | None:
    """A recipe by name that takes tokens of a dtype, or None."""
    if value is not None and not isinstance(value, str):
        raise TypeError(
            f"{function}: recipe={value!r} is {type_name(value)}, expected one of {RECIPES} or None; pass a name."
        )
    if value is not None and value not in RECIPES:
        raise ValueError(
            f"{function}: recipe={value!r}, expected one of {RECIPES}; pass one of them, or None to compute in the"
            " dtype of the tokens."
        )
    if value == "bf16" and jnp.dtype(tokens) != jnp.bfloat16:
        raise TypeError(
            f"{function}: recipe='bf16' with tokens of {jnp.dtype(tokens)}, expected bfloat16; cast them with astype,"
            " or pass recipe=None to compute in their dtype."
        )
    return value


def wire(function: str, recipe: str | None, wire_dtype: DTypeLike | None) -> DTypeLike | None:
    """The wire dtype of a recipe: one with gradients in FP8 has its own, beside which no other can be asked for."""
    if not differentiates_in_fp8(recipe) or wire_dtype is None:
        return FP8 if differentiates_in_fp8(recipe) else wire_dtype
    wanted = check.dtype(function, "wire_dtype", wire_dtype, "float8_e4m3fn or None")
    if wanted != FP8:
        raise ValueError(
            f"{function}: wire_dtype={wanted} beside recipe={recipe!r}, expected float8_e4m3fn, in which tokens and"
            " cotangents travel there; leave it None, or pass recipe='fp8-forward'."
        )
    return FP8


def is_fp8(recipe: str | None) -> bool:
    """Whether products run in FP8."""
    return recipe in IN_FP8


def differentiates_in_fp8(recipe: str | None) -> bool:
    """Whether products of the backward pass run in FP8, too."""
    return recipe in _BOTH_WAYS


def whole_blocks(function: str, recipe: str, hidden: int, intermediate: int) -> None:
    """The products of an expert layer in FP8 need whole blocks of 128 elements."""
    if hidden % GROUP_SIZE or intermediate % GROUP_SIZE:
        raise ValueError(
            f"{function}: H={hidden} and I={intermediate}, but recipe={recipe!r} needs multiples of {GROUP_SIZE}, the"
            " elements that share an FP8 scale; pad both with zeros, or leave recipe=None."
        )


def matrices(
    function: str, recipe: str | None, name: str, value: Any, leading: tuple[int, int | None], tokens: DTypeLike
) -> Any:
    """`[*leading, N]`, in the dtype of the tokens, or of any where a recipe rounds it; or `Fp8Weights` of it.

    The second of `leading` is None where it is not known before.
    """
    if isinstance(value, Fp8Weights):
        return _fp8_weights(function, recipe, name, value, leading)
    shape = f"[{leading[0]}, I, H]" if leading[1] is None else f"[{leading[0]}, {leading[1]}, N]"
    value = check.array(function, name, value, 3, shape)
    dtype = check.floating(function, name, value).dtype if is_fp8(recipe) else tokens
    return check.expert_weights(function, name, value, (leading[0], leading[1] or value.shape[1]), dtype)


def _fp8_weights(
    function: str, recipe: str | None, name: str, value: Fp8Weights, leading: tuple[int, int | None]
) -> Fp8Weights:
    if not is_fp8(recipe):
        raise ValueError(
            f"{function}: {name} is Fp8Weights with recipe={recipe!r}, expected one of {IN_FP8}; pass recipe='fp8', or"
            f" the master: {name}.master."
        )
    parts = fp8_weights(function, name, value)
    if differentiates_in_fp8(recipe) and parts.transposed is None:
        raise ValueError(
            f"{function}: {name} is Fp8Weights of recipe 'fp8-forward', expected those of {recipe!r}, with the matrices"
            f" that the backward pass multiplies; {_REMEDY}(w, recipe={recipe!r})."
        )
    check.expert_weights(
        function, f"{name}.master", parts.master, (leading[0], leading[1] or parts.shape[1]), parts.dtype
    )
    return parts


def fp8_weights(function: str, name: str, value: Fp8Weights, rank: int = 3) -> Fp8Weights:
    """Parts that belong together, of one layer: `[L, K, N]`, or of rank 4 `[L, K, 2, N]`."""
    parts = {part: getattr(value, part) for part in ("master", "values", "transposed", "scales")}
    for part, array in parts.items():
        if array is None and part == "transposed":
            continue
        if not isinstance(array, jax.Array | np.ndarray):
            raise TypeError(f"{function}: {name}.{part} is {type_name(array)}, not an array; {_REMEDY}.")
        parts[part] = jnp.asarray(array)
    shape = parts["master"].shape
    if len(shape) != rank or shape[1] % GROUP_SIZE or shape[-1] % GROUP_SIZE:
        expected_shape = "[L, K, N]" if rank == 3 else "[L, K, 2, N]"
        raise ValueError(
            f"{function}: {name} stands for matrices {shape}, expected {expected_shape} with multiples of {GROUP_SIZE};"
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
        if array is not None and (array.shape, array.dtype) != (part_shape, dtype):
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
    """A tensor axis splits I, and an fsdp axis H, of `[..., I, H]` between blocks."""
    for name, size, axis in (("H", w_down[-1], fsdp_axis), ("I", w_down[-2], tensor_axis)):
        if axis is not None and size % (GROUP_SIZE * ranks[axis]):
            raise ValueError(
                f"{function}: {name}={size} of Fp8Weights over the {ranks[axis]} ranks of {axis!r}, expected a multiple"
                f" of {GROUP_SIZE} on each, as blocks of {GROUP_SIZE} by {GROUP_SIZE} share a scale; pass the matrices"
                " themselves, or spread them over fewer ranks."
            )


def in_fp8(function: str, value: Any) -> str:
    """A recipe by name that has products in FP8."""
    if value not in IN_FP8:
        raise ValueError(f"{function}: recipe={value!r}, expected one of {IN_FP8}; pass one of them.")
    return value


def whole_matrices(function: str, name: str, w: Array) -> None:
    """`[..., K, N]` of whole blocks."""
    for axis, size in ((-2, w.shape[-2]), (-1, w.shape[-1])):
        if size % GROUP_SIZE:
            raise ValueError(
                f"{function}: axis {axis} of {name} is {size}, expected a multiple of {GROUP_SIZE}, as blocks of"
                f" {GROUP_SIZE} by {GROUP_SIZE} share an FP8 scale; pad with zeros."
            )
