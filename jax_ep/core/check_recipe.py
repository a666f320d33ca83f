"""Argument checks of recipes and of their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.types import type_name


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
                f"{function}: {name}={size} of QuantizedWeights over the {ranks[axis]} ranks of {axis!r}, expected a"
                f" multiple of {GROUP_SIZE} per rank, as blocks of {GROUP_SIZE} by {GROUP_SIZE} share a scale; pass"
                " plain arrays, or shard over fewer ranks."
            )
