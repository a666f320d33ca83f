"""Argument checks of `QuantizedExperts`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.core import check
from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_formats import MX_GROUP
from jax_ep.core.expert_matrices import EXPERT_FORMATS, Fp8Weights, QuantizedExperts
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.shuffled_experts import GROUP, STEP
from jax_ep.types import Array, Options

_REMEDY = "make it with jax_ep.quantization.quantize_experts"
# Of values and scales, as quantised and as shuffled.
_DTYPES = {
    "fp8": (jnp.dtype(FP8), jnp.dtype(jnp.float32)),
    "fp8_channel": (jnp.dtype(FP8), jnp.dtype(jnp.float32)),
    "int8": (jnp.dtype(jnp.int8), jnp.dtype(jnp.float32)),
    "int4": (jnp.dtype(jnp.uint8), jnp.dtype(jnp.float32)),
    "mxfp4": (jnp.dtype(jnp.uint8), jnp.dtype(jnp.uint8)),
}
_SHUFFLED = {
    "int4": (jnp.dtype(jnp.uint32), jnp.dtype(jnp.float32)),
    "mxfp4": (jnp.dtype(jnp.uint32), jnp.dtype(jnp.uint32)),
}


def expert_format(function: str, name: Any) -> str:
    """A format by its name."""
    if name not in EXPERT_FORMATS:
        raise ValueError(f"{function}: format={name!r}, expected one of {EXPERT_FORMATS}; pass one of them.")
    return name


def group_of(expert_format: str, group_size: int = GROUP_SIZE) -> int:
    """Elements along K that share a scale; 1 where all do."""
    return {"fp8": GROUP_SIZE, "mxfp4": MX_GROUP, "int4": group_size}.get(expert_format, 1)


def depth(function: str, name: str, expert_format: str, size: int, group_size: int = GROUP_SIZE) -> None:
    """Whether K elements of a row make whole groups, one at least."""
    if size < 1:
        raise ValueError(f"{function}: {name} is {size}, expected at least 1; pass matrices with elements.")
    group = group_of(expert_format, group_size)
    if size % group:
        raise ValueError(
            f"{function}: {name} is {size}, expected a multiple of {group}, the elements that share a scale of"
            f" {expert_format!r}; pad with zeros, or choose another format."
        )


def activations(function: str, expert_format: str, kind: Any, smooth: Any, shape: tuple[int, ...]) -> Array | None:
    """Checks how tokens are quantised; what their columns are divided by, `[..., E, K]` as `shape`, or None."""
    if kind not in (None, "int8", "fp8"):
        raise ValueError(f"{function}: activations={kind!r}, expected 'int8', 'fp8' or None; pass one of them.")
    if (kind == "int8") != (expert_format == "int8") and kind is not None:
        raise ValueError(
            f"{function}: activations={kind!r} with format={expert_format!r}, but tensor cores multiply int8 with int8"
            " alone, and tokens in FP8 go with all other formats; leave activations None."
        )
    if kind == "fp8" and shape[-1] % GROUP_SIZE:
        raise ValueError(
            f"{function}: activations='fp8' with K={shape[-1]}, expected a multiple of {GROUP_SIZE}, the elements of a"
            " token that share a scale; pad with zeros, or leave activations None."
        )
    if smooth is None:
        return None
    if kind != "int8":
        raise ValueError(f"{function}: smooth without activations='int8', which it is for; leave it None.")
    smooth = check.floating(function, "smooth", check.array(function, "smooth", smooth, len(shape), str(list(shape))))
    if smooth.shape != shape:
        raise ValueError(f"{function}: smooth has shape {smooth.shape}, expected {shape}; pass one value per row of w.")
    return smooth.astype(jnp.float32)


def experts(function: str, name: str, value: QuantizedExperts, leading: int | None = None) -> QuantizedExperts:
    """Quantised matrices whose parts fit together, of rank 3 with `leading` experts unless that is None."""
    expert_format(function, value.format)
    for part, array in (("values", value.values), ("scales", value.scales)):
        if not isinstance(array, jax.Array | np.ndarray):
            raise TypeError(f"{function}: {name}.{part} is a {type(array).__name__}, not an array; {_REMEDY}.")
    dtypes, expected = (value.values.dtype, value.scales.dtype), _DTYPES[value.format]
    if dtypes not in (expected, _SHUFFLED.get(value.format)):
        raise TypeError(
            f"{function}: {name} in {value.format!r} has values of {dtypes[0]} and scales of {dtypes[1]}, expected"
            f" {expected[0]} and {expected[1]}; {_REMEDY}."
        )
    if value.values.ndim < 2 or (leading is not None and value.values.ndim != 3):
        raise ValueError(
            f"{function}: {name} stands for matrices {value.shape}, expected [{'...' if leading is None else leading},"
            f" N, K]; {_REMEDY}, of one layer."
        )
    if not _scales_fit(value):
        raise ValueError(
            f"{function}: {name} in {value.format!r} has values {value.values.shape} and scales {value.scales.shape},"
            f" which do not belong together; {_REMEDY}."
        )
    if leading is not None:
        check.size(function, f"axis 0 of {name}", value.shape[0], leading, "pass one matrix per local expert")
    smooth = activations(function, value.format, value.activations, value.smooth, _rows_of(value.shape))
    if value.is_shuffled and value.activations is not None:
        raise ValueError(
            f"{function}: {name} is shuffled, with activations={value.activations!r}, expected None, as the order is"
            " for tokens in 16 bits; pass unshuffle_experts(...) of it, or leave activations None."
        )
    return dataclasses.replace(value, values=jnp.asarray(value.values), scales=jnp.asarray(value.scales), smooth=smooth)


def _rows_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """`[..., E, N, K]` without N."""
    return (*shape[:-2], shape[-1])


def _scales_fit(value: QuantizedExperts) -> bool:
    *leading, columns, size = value.shape
    shape = value.scales.shape
    if value.is_shuffled and value.format == "mxfp4":
        return size % GROUP == 0 and shape == (*leading, -(-size // STEP), columns)
    if value.is_shuffled:
        groups = math.prod(shape[-2:-1])
        return size % GROUP == 0 and shape == (*leading, groups, columns) and groups > 0 and size % groups == 0
    if value.format == "fp8":
        return size % GROUP_SIZE == 0 and shape == (*leading, -(-columns // GROUP_SIZE), size // GROUP_SIZE)
    if value.format in ("fp8_channel", "int8"):
        return shape == (*leading, columns)
    if value.format == "mxfp4":
        return size % MX_GROUP == 0 and shape == (*leading, columns, size // MX_GROUP)
    return shape[:-1] == (*leading, columns) and shape[-1] > 0 and size % shape[-1] == 0


def operands(function: str, lhs: Any, rhs: QuantizedExperts, group_sizes: Any) -> tuple[Any, QuantizedExperts, Any]:
    """Floating `lhs [..., K]`, or FP8 where rhs takes it, `rhs [G, N, K]` and `group_sizes [G]`, which fit together."""
    group_sizes = check.group_sizes(function, group_sizes)
    rhs = experts(function, "rhs", rhs, group_sizes.shape[0])
    if lhs.dtype != FP8:
        check.floating(function, "lhs", lhs)
    elif not takes_fp8(rhs):
        raise TypeError(
            f"{function}: lhs has dtype {lhs.dtype} and rhs is QuantizedExperts with activations={rhs.activations!r},"
            " expected 'fp8'; pass dataclasses.replace(rhs, activations='fp8'), or an lhs that is not quantised."
        )
    remedy = "matrices are quantised along K, the axis that is summed over"
    check.size(function, "the last axis of rhs, K,", rhs.shape[2], lhs.shape[-1], remedy)
    return lhs, rhs, group_sizes


def no_scales(function: str, lhs_scales: Any, rhs_scales: Any) -> None:
    """`QuantizedExperts` bring their own."""
    for name, value in (("lhs_scales", lhs_scales), ("rhs_scales", rhs_scales)):
        if value is not None:
            raise TypeError(f"{function}: {name} beside QuantizedExperts, which have their own; pass None.")


def two_of_a_kind(function: str, w_gate_up: Any, w_down: Any) -> None:
    """Both matrices of an expert are arrays, pairs in FP8, or `QuantizedExperts`."""
    kinds = [_kind(w) for w in (w_gate_up, w_down)]
    if kinds[0] != kinds[1]:
        raise TypeError(
            f"{function}: w_gate_up is {kinds[0]} and w_down is {kinds[1]}, expected two of a kind; quantise both with"
            " quantize_fp8_weights of jax_ep.quantization, both with quantize_experts, or none."
        )


def _kind(w: Any) -> str:
    if isinstance(w, QuantizedExperts):
        return "QuantizedExperts"
    if isinstance(w, Fp8Weights):
        return "Fp8Weights"
    return "a pair (values, scales)" if isinstance(w, tuple) else "an array"


def takes_fp8(w: Any) -> bool:
    """Whether rows are in FP8 where they meet these matrices."""
    return isinstance(w, tuple) or (isinstance(w, QuantizedExperts) and w.activations == "fp8")


def as_pair(function: str, name: str, w: Any) -> Any:
    """Matrices in FP8 that tokens in FP8 multiply by blocks, as values and scales; others as they are."""
    if not isinstance(w, QuantizedExperts) or w.activations != "fp8" or w.format != "fp8":
        return w
    w = experts(function, name, w)
    return w.values, w.scales


def nothing_fused(options: Options) -> None:
    """No launch of an exchange multiplies by quantised matrices."""
    schedule = options.schedule
    fused = [mode for mode in (schedule.dispatch_mode, schedule.combine_mode) if mode not in (None, "serial")]
    if fused or schedule.fuse_weight_gradients:
        what = f"mode={fused[0]!r}" if fused else "fuse_weight_gradients=True"
        raise ValueError(
            f"{options.function}: {what} with QuantizedExperts, whose products have launches of their own; leave it"
            " None in the schedule, or pass matrices in the dtype of x."
        )
