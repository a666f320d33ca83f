"""Argument checks of `QuantizedWeights`, and of layers and GEMMs that take them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep.core import check, check_fp8
from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_matrices import ExpertWeights, QuantizedWeights, has_kinds
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.formats import FORMATS, Format
from jax_ep.formats.base import PREPACKED_DTYPE
from jax_ep.types import Array, Experts, Options
from jax_ep.values import shown, type_name

_AXES = {"w_gate_up": "H, N", "w_down": "I, H", "rhs": "K, N"}
_REMEDY = "make it with jax_ep.quantization.quantize"


def format_named(function: str, name: Any) -> Format:
    """Return a format by its name."""
    check.choice(function, "format", name, tuple(FORMATS))
    return FORMATS[name]


def block_size(function: str, wanted: Format, size: Any) -> int:
    """Return how many elements of K share a scale: the caller's choice or the format's; 1 means all of K."""
    if size is None:
        return wanted.block_k or 1
    if not wanted.takes_block_size:
        takers = [name for name, found in FORMATS.items() if found.takes_block_size]
        raise ValueError(
            f"{function}: block_size={shown(size)} with format={wanted.name!r}, expected None; only {takers} take it."
        )
    if check.integer(function, "block_size", size) % 2:
        raise ValueError(f"{function}: block_size={shown(size)}, expected an even number: two elements share a byte.")
    return int(size)


def depth(function: str, name: str, wanted: Format, size: int, block: int | None = None) -> None:
    """Check that K is at least one, and a multiple of the scale block."""
    if size < 1:
        raise ValueError(f"{function}: {name} is {size}, expected at least 1; pass weights with elements.")
    reason = f"the elements that share a scale of {wanted.name!r}"
    remedy = "pad with zeros, or choose another format"
    check.multiple(function, name, size, block or wanted.block_k or 1, reason, remedy)


def activations(function: str, wanted: Format, kind: Any, smooth: Any, shape: tuple[int, ...]) -> Array | None:
    """Check how tokens are quantized, and return `smooth [..., E, K]`, whose shape is `shape`, or None."""
    if not isinstance(kind, str | None) or kind not in (None, *(found.activations for found in FORMATS.values())):
        raise ValueError(f"{function}: activations={shown(kind)}, expected 'int8', 'fp8' or None; pass one of them.")
    if kind not in (None, wanted.activations):
        raise ValueError(
            f"{function}: activations={kind!r} with format={wanted.name!r}, but tensor cores multiply int8 with int8"
            " only, and FP8 tokens go with all other formats; leave activations None."
        )
    if kind == "fp8":
        reason, remedy = "the elements of a token that share a scale", "pad with zeros, or leave activations None"
        check.multiple(function, "K with activations='fp8'", shape[-1], GROUP_SIZE, reason, remedy)
    if smooth is None:
        return None
    if kind != "int8":
        raise ValueError(f"{function}: smooth without activations='int8', which it is for; leave it None.")
    smooth = check.floating(function, "smooth", smooth, str(list(shape)), remedy="pass one value per row of w")
    return smooth.astype(jnp.float32)


def weights(
    function: str, name: str, value: QuantizedWeights, groups: int | None = None, *, rank: int | None = 3
) -> QuantizedWeights:
    """Check that the parts of `QuantizedWeights` fit together: one layer's of `rank` axes, or any if None."""
    value = _with_arrays(function, name, value)
    shape = value.values.shape if value.values.ndim < 2 else value.shape
    if min(value.values.ndim, len(shape)) < 2 or len(shape) != (rank or len(shape)):
        expected = f"[{'...' if rank is None else groups or 'E'}, K, {'2, N' if rank == 4 else 'N'}]"
        raise ValueError(
            f"{function}: {name} stands for weights {shape}, expected {expected}; {_REMEDY}, of one layer."
        )
    if groups is not None:
        check.size(function, f"axis 0 of {name}", shape[0], groups, "pass one matrix per local expert")
    if value.format is None:
        check.floating(function, f"{name}.values", value.values)
        others = value.scales, value.master, value.values_kn, value.smooth, value.activations
        if value.layout != "transposed" or any(part is not None for part in others):
            raise ValueError(
                f"{function}: {name} has format=None and other parts than values, expected values alone; {_REMEDY}."
            )
        return value
    wanted = format_named(function, value.format)
    _check_parts(function, name, wanted, value)
    if value.master is not None:
        return value
    smooth = activations(function, wanted, value.activations, value.smooth, shape[:-1])
    if value.layout == "prepacked" and value.activations is not None:
        raise ValueError(
            f"{function}: {name} is prepacked, with activations={value.activations!r}, expected None, because this"
            " layout is for 16-bit tokens; pass with_layout(w, 'transposed'), or leave activations None."
        )
    return dataclasses.replace(value, smooth=smooth)


def _with_arrays(function: str, name: str, value: QuantizedWeights) -> QuantizedWeights:
    """Return the weights with their parts as JAX arrays, after checks that these exist."""
    needed = {"values": True, "scales": value.format is not None, "master": value.master is not None}
    needed["values_kn"] = needed["master"] or value.values_kn is not None
    parts = {part: getattr(value, part) for part, is_needed in needed.items() if is_needed}
    for part, array in parts.items():
        if not isinstance(array, jax.Array | np.ndarray):
            raise TypeError(f"{function}: {name}.{part} is {type_name(array)}, not an array; {_REMEDY}.")
    arrays: dict[str, Any]
    arrays = {part: check.array(function, f"{name}.{part}", array, "[...]") for part, array in parts.items()}
    return dataclasses.replace(value, **arrays)


def _check_parts(function: str, name: str, wanted: Format, value: QuantizedWeights) -> None:
    """Check dtypes, then shapes."""
    layouts = ("transposed", "prepacked") if wanted.prepacked else ("transposed",)
    if not isinstance(value.layout, str) or value.layout not in layouts:
        raise ValueError(
            f"{function}: {name} in {value.format!r} has layout={shown(value.layout)}, expected one of {layouts};"
            f" {_REMEDY}."
        )
    scales = cast(Array, value.scales)
    dtypes = value.values.dtype, scales.dtype
    expected = wanted.dtype, wanted.scale_dtype
    if value.layout == "prepacked" and wanted.prepacked:
        expected = PREPACKED_DTYPE, wanted.prepacked.scale_dtype
    if dtypes != expected:
        raise TypeError(
            f"{function}: {name} in {value.format!r} has values of {dtypes[0]} and scales of {dtypes[1]}, expected"
            f" {expected[0]} and {expected[1]}; {_REMEDY}."
        )
    if value.master is not None:
        _check_master(function, name, value)
    elif scales.shape != (scale_shape := wanted.scale_shape(value)):
        wants = "K of whole scale blocks" if scale_shape is None else f"scales {scale_shape}"
        raise ValueError(
            f"{function}: {name} in {value.format!r} has values {value.values.shape} and scales {scales.shape},"
            f" expected {wants}; {_REMEDY}."
        )


def _check_master(function: str, name: str, value: QuantizedWeights) -> None:
    """Check the parts of weights for training: `[..., K, N]`, or `[..., K, 2, N]`, in whole scale blocks."""
    check.floating(function, f"{name}.master", cast(Array, value.master))
    *leading, depth, columns = value.shape
    kinds: tuple[int, ...] = ()
    if has_kinds(value.shape):
        *leading, depth, kinds = *leading, (depth,)
    expected = {
        "values": ((*leading, *kinds, columns, depth), FP8),
        "scales": ((*leading, *kinds, columns // GROUP_SIZE, depth // GROUP_SIZE), np.dtype("float32")),
        "values_kn": (value.shape, FP8),
    }
    for part, wanted in expected.items():
        array = getattr(value, part)
        if (array.shape, array.dtype) != wanted or columns % GROUP_SIZE or depth % GROUP_SIZE:
            raise ValueError(
                f"{function}: {name}.{part} is {array.dtype}{list(array.shape)}, expected {wanted[1]}{list(wanted[0])}"
                f" for a master {list(value.shape)} of whole blocks of {GROUP_SIZE}; {_REMEDY}(..., for_training=True)."
            )


def _weights_or_array(function: str, name: str, w: Any, groups: int, tokens: str, dtype: DTypeLike | None) -> Any:
    """Check weights `[L, K, N]`: an array of `dtype`, that of `tokens` (None: floating), or `QuantizedWeights`."""
    if not isinstance(w, QuantizedWeights):
        remedy = "pass one matrix per local expert" + ("" if name == "rhs" else "; num_experts is that of all ranks")
        w = check.array(function, name, w, f"[{groups}, {_AXES[name]}]", remedy=remedy)
        if dtype is None:
            check.floating(function, name, w)
        else:
            check.same_dtype(function, name, w, tokens, dtype)
        return w
    w = weights(function, name, w, groups)
    if w.format is None and dtype is not None:
        check.same_dtype(function, f"{name}.values", w.values, tokens, dtype)
    return w


def layer(
    function: str,
    experts: Any,
    parts: ExpertWeights,
    num_local: int,
    hidden: int,
    token_dtype: DTypeLike,
    *,
    recipe: str | None = None,
) -> tuple[Experts, ExpertWeights]:
    """Check experts, and their weights `[L, H, 2 * I]` and `[L, I, H]` and biases, for tokens of H columns."""
    w_gate_up, w_down, b_gate_up, b_down = parts
    two_of_a_kind(function, w_gate_up, w_down)
    if recipe is None and isinstance(w_gate_up, QuantizedWeights) and w_gate_up.master is not None:
        raise ValueError(
            f"{function}: w_gate_up and w_down are {_kind(w_gate_up)}, which need recipe='fp8'; pass recipe='fp8' to"
            " moe, or the result of quantize without for_training."
        )
    dtype = token_dtype if recipe is None else None
    w_gate_up, w_down = (
        _weights_or_array(function, name, w, num_local, "x", dtype)
        for name, w in (("w_gate_up", w_gate_up), ("w_down", w_down))
    )
    remedy = "weights are [L, K, N] here, also quantized ones"
    check.size(function, "axis 1 of w_gate_up", w_gate_up.shape[1], hidden, remedy)
    check.size(function, "axis 2 of w_down", w_down.shape[2], hidden, remedy)
    columns = w_gate_up.shape[2]
    experts = check.expert_function(function, experts, columns, w_down.shape[1])
    b_gate_up = check.bias(function, "b_gate_up", b_gate_up, (num_local, columns))
    b_down = check.bias(function, "b_down", b_down, (num_local, hidden))
    return experts, ExpertWeights(w_gate_up, w_down, b_gate_up, b_down)


def two_of_a_kind(function: str, w_gate_up: Any, w_down: Any) -> None:
    """Check that both weights of a layer are arrays, or both are `QuantizedWeights` of one kind."""
    kinds = [_kind(w) for w in (w_gate_up, w_down)]
    if kinds[0] != kinds[1]:
        raise TypeError(
            f"{function}: w_gate_up is {kinds[0]} and w_down is {kinds[1]}, expected two of a kind; quantize both in"
            " the same way, as with jax_ep.quantization.quantize, or neither."
        )


def _kind(w: Any) -> str:
    if not isinstance(w, QuantizedWeights):
        return "an array"
    if w.master is not None:
        return "QuantizedWeights with a master"
    return "QuantizedWeights without a format" if w.format is None else "quantized"  # perhaps as a qwix.QArray


def gemm_operands(
    function: str, lhs: Array, rhs: Any, group_sizes: Any, lhs_scales: Any
) -> tuple[Array, Any, Array, Array | None]:
    """Check `lhs [..., K]`, floating or FP8 with scales, `rhs [G, K, N]` and `group_sizes [G]`."""
    group_sizes = check.group_sizes(function, group_sizes)
    if lhs.dtype != FP8:
        check.floating(function, "lhs", lhs)
    if isinstance(rhs, QuantizedWeights) and rhs.master is not None:
        raise ValueError(
            f"{function}: rhs is {_kind(rhs)}, which only moe(recipe='fp8') takes; pass the result of quantize without"
            " for_training."
        )
    if lhs.dtype == FP8 and not (isinstance(rhs, QuantizedWeights) and rhs.activations == "fp8"):
        raise TypeError(
            f"{function}: lhs has dtype {lhs.dtype}, so rhs must be QuantizedWeights with activations='fp8'; pass"
            " jax_ep.quantization.quantize(w, 'fp8', activations='fp8'), or an lhs that is not quantized."
        )
    rhs = _weights_or_array(function, "rhs", rhs, group_sizes.shape[0], "lhs", lhs.dtype)
    check.size(function, "axis 1 of rhs, K,", rhs.shape[1], lhs.shape[-1], "rhs is [G, K, N], also quantized")
    check.int32_rows(function, f"lhs of shape {lhs.shape}", math.prod(lhs.shape[:-1]), "split it")
    return lhs, rhs, group_sizes, check_fp8.row_scales(function, lhs_scales, lhs)


def no_fused_gemms(options: Options, kind: str = "quantized weights") -> None:
    """Check that the schedule asks for no kernel that fuses communication with the GEMM of such weights."""
    schedule = options.schedule
    fused = [mode for mode in (schedule.dispatch_mode, schedule.combine_mode) if mode not in (None, "serial")]
    if fused:
        raise ValueError(
            f"{options.function}: mode={fused[0]!r} with {kind}, whose GEMMs are separate kernels; leave it"
            " None in the schedule, or pass weights in the dtype of x."
        )
