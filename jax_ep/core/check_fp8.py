"""Argument checks of FP8 operands and of the masked operations."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep.core import check
from jax_ep.core.dtypes import FP8
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.layout import repeat
from jax_ep.core.mesh_axes import axis_tuple
from jax_ep.types import Array


def whole_blocks(function: str, what: str, size: int) -> None:
    """Check that K is a multiple of the scale block, as FP8 GEMMs need."""
    reason, remedy = "the elements that share an FP8 scale", "pad with zeros, or use bfloat16"
    check.multiple(function, what, size, GROUP_SIZE, reason, remedy)


def whole_groups_per_device(
    function: str, w: Array, axis: int, size: int, group: int, *, prepacks: bool = False
) -> None:
    """Check that explicit mesh axes split an axis of `size` elements into whole blocks of `group` elements.

    A single block may lie on several devices, unless K, the last axis of stored weights, will be prepacked.
    """
    sharding = jax.typeof(w).sharding
    names = axis_tuple(sharding.spec[axis] or ())
    devices = math.prod(sharding.mesh.shape[mesh_axis] for mesh_axis in names)
    groups = -(-size // group)
    if groups % devices and (prepacks or groups > 1):
        reason = "is prepacked together" if prepacks else "has one scale"
        raise ValueError(
            f"{function}: axis {-2 if prepacks else axis} of w is {size}, {groups} block{'s' * (groups > 1)} of"
            f" {group}, split over the {devices} devices of {names}; expected whole blocks on each, since a block"
            f" {reason}: move it with jax.sharding.reshard first."
        )


def result_dtype(function: str, preferred: DTypeLike | None, lhs: Array) -> jnp.dtype:
    """Return the dtype of a GEMM: `preferred`, else that of lhs, bfloat16 for FP8."""
    return check.result_dtype(function, preferred, jnp.bfloat16 if lhs.dtype == FP8 else lhs.dtype)


def row_scales(function: str, value: Any, lhs: Array) -> Array | None:
    """Check the float32 scales of an FP8 `lhs`, one per row and 128 columns, or None if lhs is not FP8.

    A scale of more columns is repeated.
    """
    if lhs.dtype != FP8:
        if value is not None:
            raise TypeError(f"{function}: lhs_scales are given but lhs has dtype {lhs.dtype}; pass None.")
        return None
    whole_blocks(function, f"axis {lhs.ndim - 1} of lhs, K,", lhs.shape[-1])
    expected = (*lhs.shape[:-1], lhs.shape[-1] // GROUP_SIZE)
    if value is None:
        raise TypeError(
            f"{function}: lhs_scales is None but lhs has dtype {lhs.dtype}; pass float32 scales of shape {expected}."
        )
    axes = ", ".join(map(str, lhs.shape[:-1]))
    remedy = f"pass one scale per row and {GROUP_SIZE} columns of lhs {lhs.shape}"
    value = check.array(function, "lhs_scales", value, f"[{axes}, K / {GROUP_SIZE}]", (jnp.float32,), remedy=remedy)
    blocks, wanted = value.shape[-1], expected[-1]
    fits = value.shape[:-1] == expected[:-1] and blocks > 0 < wanted
    if fits and blocks < wanted and wanted % blocks == 0:
        return repeat(value, wanted // blocks, axis=-1)
    if value.shape != expected:
        hint = ""
        if fits and blocks % wanted == 0:
            hint = f" These are for {lhs.shape[-1] // blocks} columns: quantize with group_size={GROUP_SIZE}."
        raise ValueError(
            f"{function}: lhs_scales has shape {value.shape} but lhs has {lhs.shape}, expected {expected}; pass one"
            f" scale per row and {GROUP_SIZE} columns.{hint}"
        )
    return value
