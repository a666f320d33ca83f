"""Argument checks of quantized weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.core import check, check_fp8
from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_matrices import Fp8Weights, QuantizedExperts
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.formats import FORMATS, Format, format_of
from jax_ep.formats.base import PREPACKED_DTYPE
from jax_ep.types import Array, Options, type_name

_REMEDY = "make it with jax_ep.quantization.quantize_experts"


def format_named(function: str, name: Any) -> Format:
    """A format by its name."""
    if name not in FORMATS:
        raise ValueError(f"{function}: format={name!r}, expected one of {tuple(FORMATS)}; pass one of them.")
    return FORMATS[name]


def block_size(function: str, wanted: Format, size: Any) -> int:
    """Elements of K that share a scale: those of the format, or what the caller chose; 1: all of K."""
    if size is None:
        return wanted.block_k or 1
    if not wanted.takes_block_size:
        takers = [name for name, found in FORMATS.items() if found.takes_block_size]
        raise ValueError(
            f"{function}: block_size={size!r} with format={wanted.name!r}, expected None; only {takers} take it."
        )
    if check.positive(function, "block_size", size) % 2:
        raise ValueError(f"{function}: block_size={size}, expected an even number: two elements share a byte.")
    return int(size)


def depth(function: str, name: str, wanted: Format, size: int, block: int | None = None) -> None:
    """K is at least one, and a multiple of the elements that share a scale."""
    if size < 1:
        raise ValueError(f"{function}: {name} is {size}, expected at least 1; pass matrices with elements.")
    block = block or wanted.block_k or 1
    if size % block:
        raise ValueError(
            f"{function}: {name} is {size}, expected a multiple of {block}, the elements that share a scale of"
            f" {wanted.name!r}; pad with zeros, or choose another format."
        )


def activations(function: str, wanted: Format, kind: Any, smooth: Any, shape: tuple[int, ...]) -> Array | None:
    """Checks how tokens are quantized; what their columns are divided by, `[..., E, K]` as `shape`, or None."""
    if kind not in (None, *(found.activations for found in FORMATS.values())):
        raise ValueError(f"{function}: activations={kind!r}, expected 'int8', 'fp8' or None; pass one of them.")
    if kind not in (None, wanted.activations):
        raise ValueError(
            f"{function}: activations={kind!r} with format={wanted.name!r}, but tensor cores multiply int8 with int8"
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
    """Quantized weights whose parts fit together, of rank 3 with `leading` experts unless that is None."""
    wanted = format_named(function, value.format)
    for part in ("values", "scales"):
        for array in jax.tree.leaves(getattr(value, part), is_leaf=lambda x: x is None):
            if not isinstance(array, jax.Array | np.ndarray):
                raise TypeError(f"{function}: {name}.{part} is {type_name(array)}, not an array; {_REMEDY}.")
    dtypes = value.values.dtype, jax.tree.map(lambda x: x.dtype, value.scales)
    expected, layout = (wanted.dtype, wanted.scale_dtype), wanted.prepacked
    if dtypes != expected and (layout is None or dtypes != (PREPACKED_DTYPE, layout.scale_dtype)):
        raise TypeError(
            f"{function}: {name} in {value.format!r} has values of {dtypes[0]} and scales of {dtypes[1]}, expected"
            f" {expected[0]} and {expected[1]}; {_REMEDY}."
        )
    if value.values.ndim < 2 or (leading is not None and value.values.ndim != 3):
        raise ValueError(
            f"{function}: {name} stands for matrices {value.shape}, expected [{'...' if leading is None else leading},"
            f" N, K]; {_REMEDY}, of one layer."
        )
    shapes = jax.tree.map(lambda x: x.shape, value.scales)
    if shapes != wanted.scale_shape(value):
        raise ValueError(
            f"{function}: {name} in {value.format!r} has values {value.values.shape} and scales {shapes}, which do not"
            f" belong together; {_REMEDY}."
        )
    if leading is not None:
        check.size(function, f"axis 0 of {name}", value.shape[0], leading, "pass one matrix per local expert")
    smooth = activations(function, wanted, value.activations, value.smooth, (*value.shape[:-2], value.shape[-1]))
    if value.is_prepacked and value.activations is not None:
        raise ValueError(
            f"{function}: {name} is prepacked, with activations={value.activations!r}, expected None, as the order is"
            " for tokens in 16 bits; pass unprepack_experts(...) of it, or leave activations None."
        )
    values, scales = jax.tree.map(jnp.asarray, (value.values, value.scales))
    return dataclasses.replace(value, values=values, scales=scales, smooth=smooth)


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
    if not isinstance(w, QuantizedExperts) or w.activations != "fp8" or not format_of(w).is_fp8_operand:
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


def expert_matrices(function: str, x: Array, w_gate_up: Any, w_down: Any, num_local: int) -> tuple[int, int]:
    """The matrices of an expert layer, transposed, after `two_of_a_kind`: columns of hidden rows, and I."""
    hidden = x.shape[1]
    values: list[Array | QuantizedExperts] = []
    for name, w, layout in (("w_gate_up", w_gate_up, "[L, 2 * I, H]"), ("w_down", w_down, "[L, H, I]")):
        if isinstance(w, QuantizedExperts):
            values.append(experts(function, name, w, num_local))
            continue
        if isinstance(w, tuple) and len(w) != 2:
            raise ValueError(f"{function}: {name} is a tuple of {len(w)}, expected 2; pass (values, scales).")
        value = check.array(function, name, w[0] if isinstance(w, tuple) else w, 3, layout)
        is_pair = isinstance(w, tuple)
        check.same_dtype(function, name, value, "FP8 pairs" if is_pair else "x", FP8 if is_pair else x.dtype)
        check.size(function, f"axis 0 of {name}", value.shape[0], num_local, "pass one matrix per local expert")
        if isinstance(w, tuple):
            check_fp8.scales(function, f"{name}_scales", w[1], value, GROUP_SIZE)
        values.append(value)
    up, down = values
    remedy = "matrices are transposed here: swap their last two axes, or quantise them, which does"
    check.size(function, "axis 2 of w_gate_up", up.shape[2], hidden, remedy)
    check.size(function, "axis 1 of w_down", down.shape[1], hidden, remedy)
    return up.shape[1], down.shape[2]
