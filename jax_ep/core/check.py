"""Argument checks of the public functions, and their names in errors, profiles and lowered programs.

Messages give the actual value, the expected value and the remedy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep.core.dtypes import FP8, TOKEN_DTYPES
from jax_ep.core.expert_matrices import LoraWeights
from jax_ep.core.layout import round_up
from jax_ep.core.mesh_axes import axis_size, spread_axes
from jax_ep.types import (
    Array,
    AxisName,
    Biases,
    Experts,
    Handle,
    Layout,
    LowLatencyHandle,
    Quantized,
    Routing,
    Tokens,
)
from jax_ep.values import MOST_EXPERTS, cut, integer, shown, type_name, value_of
from jax_ep.values import choice as choice
from jax_ep.values import finite as finite
from jax_ep.values import flag as flag
from jax_ep.values import instance as instance
from jax_ep.values import not_deleted as not_deleted
from jax_ep.values import number as number
from jax_ep.values import path as path
from jax_ep.values import random_key as random_key

_called: ContextVar[str | None] = ContextVar("jax_ep_called", default=None)
_names: set[str] = set()


@jax.custom_vjp
def _identity(x: Array) -> Array:
    return x


_identity.defvjp(lambda x: (x.value, None), lambda _, cotangent: (cotangent,), symbolic_zeros=True)


def _has_symbolic_zeros() -> bool:
    """Return whether custom VJPs get symbolic zeros here: JAX 0.12 lacks them in a `shard_map` outside of `jit`."""
    try:
        _identity(np.float32(0))
    except NotImplementedError:
        return False
    return True


def operation[**Arguments, Result](function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a public function: trace it in the scope `jax_ep.<function>`, and start its errors with its name."""
    name = function.__name__
    _names.add(name)
    named = names_arrays_apart(function)

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return named(*args, **kwargs)
        except NotImplementedError:
            if _has_symbolic_zeros():
                raise
        return jax.jit(lambda: function(*args, **kwargs))()

    return errors_begin_with(name)(jax.named_scope(f"jax_ep.{name}")(run))


def names_arrays_apart[**Arguments, Result](function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function of arrays: name those that are on different devices or explicit meshes in its errors."""

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            _raise_if_apart(inspect.signature(function).bind(*args, **kwargs).arguments, error)
            raise

    return run


def _raise_if_apart(arguments: Mapping[str, Any], error: Exception) -> None:
    """Raise an error if arrays are on different devices or explicit meshes: those of JAX do not name them."""
    first: tuple[str, jax.sharding.Sharding] | None = None
    for argument, value in arguments.items():
        for place, part in jax.tree.leaves_with_path(value):
            if not isinstance(part, jax.Array) or isinstance(part, jax.core.Tracer) or not part.committed:
                continue
            owner = "the placement" if argument == "self" else argument
            name = f"{owner}{cut(jax.tree_util.keystr(place), 60)}"
            first = first or (name, part.sharding)
            if _are_apart(first[1], part.sharding):
                raise ValueError(
                    f"{first[0]} is on {cut(first[1], 200)}, {name} on {cut(part.sharding, 200)}, expected arrays on"
                    " the same devices and mesh; move one of them with jax.device_put."
                ) from error


def _are_apart(one: jax.sharding.Sharding, other: jax.sharding.Sharding) -> bool:
    """Return whether arrays are on different devices, or on different meshes, one with explicit axes."""
    if one.device_set != other.device_set:
        return True
    if not isinstance(one, jax.sharding.NamedSharding) or not isinstance(other, jax.sharding.NamedSharding):
        return False
    meshes = one.mesh.abstract_mesh, other.mesh.abstract_mesh
    return meshes[0] != meshes[1] and any(mesh.explicit_axes for mesh in meshes)


@contextlib.contextmanager
def errors_begin_with(name: str) -> Iterator[None]:
    """Start errors raised in this block, or in a decorated function, with `name`.

    Nested blocks keep the outermost name, which is the function that the user called.
    """
    _names.add(name)
    if _called.get() is not None:
        yield
        return
    token = _called.set(name)
    try:
        yield
    except (TypeError, ValueError, NotImplementedError, OverflowError) as error:
        if error.args and isinstance(error.args[0], str):
            error.args = (_begun_with(name, error.args[0]), *error.args[1:])
        raise
    except jax.errors.InconclusiveDimensionOperation as error:
        raise NotImplementedError(
            f"{name}: {str(error).partition('.')[0]}, expected sizes that decide it; pass constraints= to"
            " jax.export.symbolic_shape, or export one program per size."
        ) from error
    finally:
        _called.reset(token)


def _begun_with(name: str, message: str) -> str:
    """Prefix a message with the function's name, or replace the name of another function at its start."""
    used = re.match(rf"(?:{'|'.join(_names)})(?=:| has no gradient| with quantized weights)", message)
    return f"{name}: {message}" if used is None else name + message[used.end() :]


def called(function: str) -> str:
    """Return the public function that the user called, or `function` if unknown."""
    return _called.get() or function


def array(
    function: str,
    name: str,
    value: Any,
    shape: str,
    dtypes: Sequence[DTypeLike] | None = None,
    *,
    remedy: str = "reshape it",
    **sizes: int,
) -> Array:
    """Return `value` as a JAX array of this shape, such as "[T, H]", "[..., K, 128]" or "[T, H >= 1]".

    Axes that are numbers, or have one in `sizes`, must have that size. The dtype must be one of `dtypes`; None: any.
    """
    value = _jax_array(function, name, value, shape)
    axes = [] if shape == "[]" else shape.strip("[]").split(", ")
    names = (axis.removesuffix(" >= 1") for axis in axes)
    expected, has_rest = f"[{', '.join(str(sizes.get(name, name)) for name in names)}]", "..." in axes
    rank = len(axes) - has_rest
    if value.ndim < rank or (value.ndim > rank and not has_rest):
        kind = f"rank {rank} or more" if has_rest else f"rank {rank}" if rank else "a scalar"
        raise ValueError(f"{function}: {name} has shape {value.shape}, expected {kind}, {expected}; reshape it.")
    if dtypes is not None and value.dtype not in dtypes:
        found = ("one of " if len(dtypes) > 1 else "") + ", ".join(jnp.dtype(d).name for d in dtypes)
        raise TypeError(f"{function}: {name} has dtype {value.dtype}, expected {found}; cast it with astype.")
    if has_rest:
        rest = axes.index("...")
        axes[rest : rest + 1] = [""] * (value.ndim - rank)
    for axis, size in zip(axes, value.shape, strict=True):
        letter, _, least = axis.partition(" >= ")
        if least and isinstance(size, int) and size < 1:
            raise ValueError(f"{function}: {name} has shape {value.shape}, expected {axis}; {remedy}.")
        if size != sizes.get(letter, int(letter) if letter.isdigit() else size):
            raise ValueError(f"{function}: {name} has shape {value.shape}, expected {expected}; {remedy}.")
    return value


def _jax_array(function: str, name: str, value: Any, shape: str) -> Array:
    """Return `value` as a JAX array of any shape and dtype."""
    if isinstance(value, LoraWeights):
        raise TypeError(
            f"{function}: {name} is LoraWeights, expected weights without adapters here; pass jax_ep.lora.merge(...) of"
            " them, or call moe, fused_moe, sharded_moe or grouped_gemm."
        )
    if not isinstance(value, jax.Array | np.ndarray) or isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{function}: {name} is {type_name(value)}, not an array; pass a JAX or NumPy array {shape}.")
    not_deleted(function, name, value)
    found = None
    with contextlib.suppress(TypeError):
        found = jnp.asarray(value)
    # Extended dtypes are those of keys of jax.random, float0 that of gradients of integers.
    if found is None or found.dtype == jax.dtypes.float0 or jnp.issubdtype(found.dtype, jax.dtypes.extended):
        raise TypeError(f"{function}: {name} has dtype {value.dtype}, expected numbers; cast it with astype.")
    is_wide = isinstance(value, np.ndarray) and value.dtype.kind in "iu" and found.dtype != value.dtype
    if is_wide and (wrapped := value != value.astype(found.dtype)).any():
        raise ValueError(
            f"{function}: {name} contains {value[wrapped][0]}, expected numbers of {found.dtype}, to which JAX converts"
            f" {value.dtype}; pass such numbers, or set jax_enable_x64."
        )
    return found


def floating(function: str, name: str, value: Any, shape: str = "[...]", *, remedy: str = "", **sizes: int) -> Array:
    """Return `value` as a JAX array of this shape, see `array`, in one of the token dtypes."""
    return array(function, name, value, shape, TOKEN_DTYPES, remedy=remedy or "reshape it", **sizes)


def routing(function: str, name: str, value: Any, num_tokens: int, num_experts: int) -> Routing:
    """Check the return value of a custom router."""
    if not isinstance(value, Routing):
        raise TypeError(
            f"{function}: {name} returned {type_name(value)}, expected a jax_ep.types.Routing; return one with ids"
            f" [N, K], weights [N, K] and scores [N, {num_experts}]."
        )
    names = [f"{field} returned by {name}" for field in value._fields]
    ids, weights, scores = value
    ids = array(function, names[0], ids, "[N, K]", (jnp.int32,), remedy="return one row per token", N=num_tokens)
    remedy = "return one weight per id"
    floating(function, names[1], weights, "[N, K]", remedy=remedy, N=num_tokens, K=ids.shape[1])
    remedy = "return scores of all experts of the layer; the router gets tokens [N, H], not their logits"
    floating(function, names[2], scores, "[N, E]", remedy=remedy, N=num_tokens, E=num_experts)
    return value


def replayed_ids(function: str, topk_idx: Any, shape: tuple[int, ...], num_experts: int, has_callable: bool) -> Array:
    """Return the expert ids of an earlier pass, which a layer whose router is a callable does not take."""
    if has_callable:
        raise ValueError(
            f"{function}: topk_idx with a callable router, expected a jax_ep.Router; let the callable return these ids."
        )
    remedy = "pass the metrics.topk_idx of a pass over as many tokens"
    return expert_ids(function, topk_idx, None, num_experts, shape=str(list(shape)), remedy=remedy)


def recipe(function: str, value: Any) -> str | None:
    """Check that a recipe is "fp8" or None."""
    if value is not None and not (isinstance(value, str) and value == "fp8"):
        what = f" is {type_name(value)}" if not isinstance(value, str) else ""
        raise (ValueError if isinstance(value, str) else TypeError)(
            f"{function}: recipe={shown(value)}{what}, expected 'fp8' or None; pass recipe='fp8', or None to compute in"
            " the dtype of the tokens."
        )
    return value


def layer_experts(function: str, value: Any, tensor_axis: str | None) -> Experts:
    """Return what the experts compute; a tensor axis keeps gate and up columns apart, so nothing is interleaved."""
    experts = value_of(function, "experts", value, Experts, "jax_ep.Experts") or Experts()
    return experts if tensor_axis is None else dataclasses.replace(experts, interleaved=False)


def same_dtype(function: str, name: str, value: Array, other_name: str, other: DTypeLike) -> None:
    """Check that two operands of a matmul have the same dtype."""
    if value.dtype != other:
        raise TypeError(
            f"{function}: {name} has dtype {value.dtype}, expected {jnp.dtype(other)}, the dtype of {other_name}; cast"
            " one of them with astype."
        )


def dtype(function: str, name: str, value: Any, examples: str) -> jnp.dtype:
    """Convert a dtype or its name to a dtype."""
    try:
        if value is not None and not isinstance(value, jax.Array):  # NumPy converts None to float64.
            return jnp.dtype(value)
    except (TypeError, ValueError):  # The latter about numbers of many digits, and names that are not Unicode.
        pass
    raise TypeError(f"{function}: {name}={shown(value)} is not a dtype, expected {examples}; pass one of them.")


def size(function: str, what: str, actual: int, expected: int, remedy: str) -> None:
    """Check that two sizes agree."""
    if actual != expected:
        raise ValueError(f"{function}: {what} is {actual}, expected {expected}; {remedy}.")


def multiple(function: str, what: str, actual: int, of: int, reason: str, remedy: str) -> None:
    """Check that a size is a multiple of a number, which `reason` explains."""
    if actual % of:
        raise ValueError(f"{function}: {what} is {actual}, expected a multiple of {of}, {reason}; {remedy}.")


def int32_rows(function: str, what: str, number: int, remedy: str) -> None:
    """Check that row indices fit in int32; symbolic numbers are not checked."""
    if isinstance(number, int) and number >= 2**31:
        raise ValueError(f"{function}: {what} make {number} rows, expected fewer than 2**31; {remedy}.")


def known_rows(function: str, name: str, what: str, number: int) -> None:
    """Check that the number of rows of an argument is not symbolic, as `jax.export` makes it."""
    if not isinstance(number, int):
        raise NotImplementedError(
            f"{function}: {name} has {number} rows, a symbolic number, expected a known one {what}; export one program"
            " per batch size, or one for the largest and pad the batch."
        )


def quantized(function: str, values: Any, scales: Any, shape: str = "[T, H]") -> Quantized:
    """Check FP8 values of this shape with float32 scales `[..., H // group_size]`."""
    values = array(function, "values", values, shape)
    scales = array(function, "scales", scales, "[..., H // group_size]")
    if values.dtype != FP8 or scales.dtype != jnp.float32:
        raise TypeError(
            f"{function}: (values, scales) have dtypes ({values.dtype}, {scales.dtype}), expected (float8_e4m3fn,"
            " float32); convert with jax_ep.quantization.quantize_fp8."
        )
    if scales.shape[:-1] != values.shape[:-1] or scales.shape[-1] == 0 or values.shape[-1] % scales.shape[-1]:
        raise ValueError(
            f"{function}: values have shape {values.shape} and scales {scales.shape}, expected one row of scales per"
            " row of values and a whole number of columns per scale; quantize with jax_ep.quantization.quantize_fp8."
        )
    return values, scales


def tokens(function: str, x: Any) -> Tokens:
    """Check tokens `[T, H]`, or FP8 values `[T, H]` with scales `[T, H // group]`."""
    if not isinstance(x, tuple):
        return plain_tokens(function, x)
    if len(x) != 2:
        raise ValueError(f"{function}: x is a tuple of {len(x)}, expected 2; pass (values, scales).")
    return quantized(function, *x, "[T, H >= 1]")


def plain_tokens(function: str, x: Any) -> Array:
    """Check tokens `[T, H]` of at least one column."""
    return array(function, "x", x, "[T, H >= 1]", TOKEN_DTYPES, remedy="pass tokens with at least one column")


def expert_ids(
    function: str,
    topk_idx: Any,
    num_tokens: int | None,
    num_experts: int,
    *,
    all_count: bool = True,
    token_mask: Array | None = None,
    shape: str = "[T, K >= 1]",
    remedy: str = "pass one row of at least one expert id per token",
) -> Array:
    """Check ids `[T, K]` int32 and set those with a False `token_mask` to -1. Eager ids out of range are an error."""
    not_deleted(function, "topk_idx", topk_idx)
    # Read the values first: under a trace, the conversion below hides those of a NumPy array.
    known = known_values(topk_idx)
    if isinstance(topk_idx, np.ndarray) and topk_idx.dtype == np.int64:
        topk_idx = np.where((topk_idx < -1) | (topk_idx >= num_experts), -1, topk_idx)  # JAX would wrap these.
    sizes = {} if num_tokens is None else {"T": num_tokens}
    topk_idx = array(function, "topk_idx", topk_idx, shape, (jnp.int32,), remedy=remedy, **sizes)
    if not isinstance(topk_idx.shape[-1], int):
        raise NotImplementedError(
            f"{function}: topk_idx has shape {topk_idx.shape}, expected a known number of experts per token; export one"
            " program per number."
        )
    if token_mask is not None:
        topk_idx = jnp.where(token_mask[:, None], topk_idx, -1)
        known = known_values(topk_idx)
    if all_count and known is not None and known.size and (known.min() < -1 or known.max() >= num_experts):
        worst = int(known.min() if known.min() < -1 else known.max())
        raise ValueError(
            f"{function}: topk_idx contains {worst}, expected ids in [0, {num_experts}), or -1 for no expert; check the"
            " router and num_experts. Under jit such ids are counted and treated as -1."
        )
    return topk_idx


def known_values(x: Any) -> np.ndarray | None:
    """Return the values of an array that is not traced, or traced by an eager `shard_map`; otherwise None."""
    # The tracers of an eager shard_map hold the values of all shards in `val`.
    value = getattr(x, "val", None) if isinstance(x, jax.core.Tracer) else x
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer) or not value.is_fully_addressable:
        return None
    return None if jnp.issubdtype(value.dtype, jax.dtypes.extended) else np.asarray(value)


def router_weights(function: str, topk_weights: Any, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return weights `[T, K]` in float32, or float64 next to tokens of it as `dtype`; narrower dtypes are widened."""
    dtypes = (jnp.float32, jnp.bfloat16, jnp.float16, *((jnp.float64,) if dtype == jnp.float64 else ()))
    sizes, remedy = {"T": shape[0], "K": shape[1]}, "pass one weight per expert id"
    topk_weights = array(function, "topk_weights", topk_weights, "[T, K]", dtypes, remedy=remedy, **sizes)
    return topk_weights.astype(np.promote_types(topk_weights.dtype, np.float32))


def experts(function: str, num_experts: Any, axis_name: AxisName) -> tuple[int, int]:
    """Return the number of experts as an int, and the number of ranks on the axis, which must divide it."""
    num_experts = integer(function, "num_experts", num_experts, most=MOST_EXPERTS)
    num_ranks = axis_size(axis_name, function=function)
    divisible_experts(function, num_experts, num_ranks, axis_name)
    return num_experts, num_ranks


def divisible_experts(
    function: str, num_experts: int, num_ranks: int, axis_name: AxisName, remedy: str | None = None
) -> None:
    """Check that the experts divide evenly among the ranks."""
    added = -num_experts % num_ranks
    remedy = remedy or f"pad them to {num_experts + added} and never choose the last {added}, or change the axis"
    reason = f"the ranks of axis {axis_name!r}, which own equally many"
    multiple(function, "num_experts", num_experts, num_ranks, reason, remedy)


def wire(function: str, wire_dtype: DTypeLike | None, dtype: DTypeLike, hidden: int) -> DTypeLike | None:
    """Return the FP8 dtype if rows `[..., hidden]` of `dtype` must be quantized before they are sent, else None."""
    return None if wire_dtype is None or dtype == FP8 else fp8_columns(function, hidden, 128)


def fp8_columns(function: str, hidden: int, group_size: int) -> DTypeLike:
    """Check that H is a multiple of the FP8 scale block; return the FP8 dtype."""
    group_size = integer(function, "group_size", group_size)
    remedy = "pad H, or send tokens unquantized, with wire_dtype=None or quantize=False"
    multiple(function, "H", hidden, group_size, "group_size, the columns that share an FP8 scale", remedy)
    return FP8


def capacity(function: str, value: Any, alignment: int) -> int | None:
    """Check a static number of rows, a multiple of `alignment`."""
    if value is None:
        return None
    value = integer(function, "capacity", value, remedy="pass rows per rank, such as 1.25 * T * K rounded to an int")
    multiple(function, "capacity", value, alignment, "alignment", f"round it up to {round_up(value, alignment)}")
    return value


def handle(function: str, value: Any, expected: type[Handle] | type[LowLatencyHandle], axis_name: AxisName) -> Layout:
    """Check that a handle has the right kind and was made on the ranks of this axis; return its layout."""
    wanted = f"the {expected.__name__} of the matching dispatch"
    instance(function, "handle", value, expected, wanted, remedy="pass the field handle of its result")
    one_rank(function, value)
    num_ranks = axis_size(axis_name, function=function)
    remedy = f"use the axis_name of the dispatch that made the handle, not {axis_name!r}"
    size(function, "the number of ranks of the handle", value.layout.num_ranks, num_ranks, remedy)
    if value.layout.axis != spread_axes(axis_name):
        raise ValueError(
            f"{function}: the axis of the handle is {value.layout.axis}, expected {spread_axes(axis_name)}, the axes"
            f" of axis_name={axis_name!r} with more than one rank, in order; {remedy}."
        )
    return value.layout


def one_rank(function: str, value: Handle | LowLatencyHandle) -> None:
    """Check that the arrays of a handle are those of one rank."""
    for part in jax.tree.leaves(value):
        not_deleted(function, "part of the handle", part)
    if (rank := np.ndim(value.assignment_to_row)) != 3:
        raise ValueError(
            f"{function}: handle.assignment_to_row has {rank} axes, expected 3, [W, T, K] of one rank; call it inside"
            " jax.shard_map, remove the axis of the ranks, or use jax.vmap."
        )


def reused_layout(function: str, value: Any, wanted: Layout, capacity: int | None, axis_name: AxisName) -> Layout:
    """Return the layout of a reused handle; check that the other arguments agree with it."""
    layout = handle(function, value, Handle, axis_name)
    sizes = {"num_tokens": wanted.num_tokens, "num_experts": wanted.num_experts}
    if wanted.top_k:
        sizes["top_k"] = wanted.top_k
    if capacity is not None:
        sizes["capacity"] = capacity
    if wanted.alignment != 1:
        sizes["alignment"] = wanted.alignment
    # Spare slots are no experts of the caller.
    found = dataclasses.replace(layout, num_experts=layout.num_experts - getattr(value.copies, "size", 0))
    for name, expected in sizes.items():
        remedy = "pass the handle of a dispatch of the same sizes, or none"
        size(function, f"{name} of the handle", getattr(found, name), expected, remedy)
    return layout


def group_sizes(function: str, value: Any, groups: int | None = None) -> Array:
    """Check group sizes `[G]` int32."""
    sizes = {} if groups is None else {"G": groups}
    return array(function, "group_sizes", value, "[G]", (jnp.int32,), remedy="pass one count per group", **sizes)


def expert_function(function: str, experts: Any, columns: int, intermediate: int) -> Experts:
    """Return the `Experts` for the given columns of `w_gate_up` and rows of `w_down`; None is the default."""
    experts = value_of(function, "experts", experts, Experts, "jax_ep.Experts") or Experts()
    if callable(experts.activation):
        return experts  # `activation_rows` checks its result.
    if columns != (2 if experts.gated else 1) * intermediate:
        expected = f"2 * I = {2 * intermediate}" if experts.gated else f"I = {intermediate}"
        remedy = "for experts without gates pass experts=jax_ep.Experts(..., gated=False)"
        raise ValueError(
            f"{function}: w_gate_up has {columns} columns and w_down has I={intermediate} rows, expected {expected}"
            f" columns with {experts.gated=}; change one of them" + (f", or {remedy}." if experts.gated else ".")
        )
    return experts


def activation_rows(function: str, rows: Any, hidden: Array, intermediate: int | None) -> Array:
    """Check the result of a custom activation: one floating row per hidden row, as wide as `w_down` has rows."""
    shape = rows.shape if isinstance(rows, jax.Array | np.ndarray) else None
    if shape is None or len(shape) != 2 or shape[0] != hidden.shape[0] or intermediate not in (None, shape[1]):
        wanted = "I" if intermediate is None else intermediate
        raise ValueError(
            f"{function}: the activation maps hidden rows {list(hidden.shape)} to"
            f" {type(rows).__name__ if shape is None else list(shape)}, expected [{hidden.shape[0]}, {wanted}], one"
            " element per row of w_down; change the function or the weights."
        )
    return floating(function, "the result of the activation", rows, "[...]")


def biases(function: str, value: Any) -> Biases:
    """Return the pair `(b_gate_up, b_down)`; each, or the whole value, may be None."""
    if value is None:
        return None, None
    if not isinstance(value, tuple | list) or len(value) != 2:
        what = f"a {type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type_name(value)
        raise TypeError(
            f"{function}: biases is {what}, expected a pair (b_gate_up, b_down) in which each may be None; pass one."
        )
    return value[0], value[1]


def bias(function: str, name: str, value: Any, shape: tuple[int, ...]) -> Array | None:
    """Check a floating bias per expert, or None."""
    if value is None:
        return None
    return floating(function, name, value, str(list(shape)), remedy="pass one value per column of the weights")


def expert_weights(
    function: str,
    name: str,
    value: Any,
    leading: tuple[int, int],
    dtype: DTypeLike,
    counted_by: str = "this rank's experts",
) -> Array:
    """Check weights `[*leading, N]`, one matrix per group, in the dtype of the tokens."""
    remedy = f"pass one matrix for each of {counted_by}, with as many rows as the left operand has columns"
    value = array(function, name, value, f"[{leading[0]}, {leading[1]}, N]", remedy=remedy)
    same_dtype(function, name, value, "the tokens", dtype)
    return value


def result_dtype(
    function: str, preferred: DTypeLike | None, own: DTypeLike | None, name: str = "preferred_element_type"
) -> jnp.dtype:
    """Return the dtype of a floating result: `preferred`, or that of the tokens."""
    names = ", ".join(d.name for d in TOKEN_DTYPES)
    result = dtype(function, name, own if preferred is None else preferred, names)
    if result not in TOKEN_DTYPES:
        raise TypeError(f"{function}: {name}={result}, expected one of {names}; pass one of them, and cast the result.")
    return result


def token_mask(function: str, value: Any, shape: tuple[int, ...]) -> None:
    """Check a bool per token."""
    value = array(function, "token_mask", value, str(list(shape)), remedy="pass one bool per token")
    if value.dtype != jnp.bool_:
        raise TypeError(
            f"{function}: token_mask has dtype {value.dtype}, expected bool, True for valid tokens; pass"
            " attention_mask != 0."
        )


def token_count(function: str, num_tokens: Array | int, most: int) -> Array:
    """Return `num_tokens` as an int32 scalar, clipped to `[0, most]`."""
    value: Any = num_tokens
    if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iu":
        value = value[()]  # JAX would wrap values that do not fit in 32 bits.
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        value = np.asarray(min(max(int(value), 0), most), np.int32)
    value = array(function, "num_tokens", value, "[]")
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{function}: num_tokens has dtype {value.dtype}, expected int32; use .astype(jnp.int32).")
    if value.dtype.itemsize < 4:
        value = value.astype(jnp.int32)
    return jnp.clip(value, 0, most).astype(jnp.int32)  # int32 or wider, so that `most` fits.


def counted_ids(
    function: str, topk_idx: Any, shape: tuple[int, int], num_tokens: Array | int | None, handle: Any
) -> Array | None:
    """Check the ids of a dispatch of `(tokens, experts)`; those of tokens from `num_tokens` on become -1."""
    if num_tokens is None:
        return None if topk_idx is None else expert_ids(function, topk_idx, *shape)
    if handle is not None or topk_idx is None:
        raise ValueError(
            f"{function}: num_tokens is given without topk_idx or with a handle, which already determines the valid"
            " tokens; expected num_tokens with topk_idx only: leave one out."
        )
    counts = jnp.arange(shape[0], dtype=jnp.int32) < token_count(function, num_tokens, shape[0])
    return expert_ids(function, topk_idx, *shape, token_mask=counts)
