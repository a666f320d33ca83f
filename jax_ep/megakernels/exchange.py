"""Dispatch and combine as one kernel each, over a symmetric heap."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_ep import context, ffi
from jax_ep import layout as rows
from jax_ep.collectives import Axis, sum_in_order
from jax_ep.dtypes import FP8
from jax_ep.kernel import Kernel
from jax_ep.megakernels import tuning
from jax_ep.megakernels.heap_launch import group_of, launch_on_heap
from jax_ep.megakernels.kernels.structs import Combine, Dispatch
from jax_ep.megakernels.small_exchange import all_gather_i32, all_to_all_i32
from jax_ep.quantization import GROUP_SIZE
from jax_ep.types import Array, Handle, Layout, Quantized

_DISPATCH = Kernel("dispatch", "dispatch")
_COMBINE = Kernel("combine", "combine")


def send_weights(weights: Array, handle: Handle, axis: Axis, after: Array | None = None) -> Array:
    """`[T, K]` router weights to `[R]`, one per row; zero in padding rows."""
    words = _as_words(weights.reshape(-1))
    sent = all_gather_i32(words.reshape(-1), group_of(handle), after)
    row_weights = rows.gather_rows(_from_words(sent.reshape(-1, *words.shape[1:]), weights.dtype), handle.row_slot)
    # A plan that has failed has no rows: their weights are not zero, but unknown.
    return jnp.where(handle.num_invalid < 0, jnp.nan, row_weights)


def return_weights(row_weights: Array, handle: Handle, axis: Axis, after: Array | None = None) -> Array:
    """`[R]` values to the `[T, K]` slots they belong to; zero for slots that had no row."""
    slots = rows.gather_rows(row_weights, handle.slot_row)
    words = _as_words(slots)
    parts = all_to_all_i32(words.reshape(handle.layout.num_ranks, -1), group_of(handle), after)
    return sum_in_order(_from_words(parts.reshape(words.shape), slots.dtype))


def _as_words(x: Array) -> Array:
    """float64 as pairs of 32-bit words; what has 32 bits stays as it is."""
    return lax.bitcast_convert_type(x, jnp.int32) if x.dtype.itemsize == 8 else x


def _from_words(words: Array, dtype: jnp.dtype) -> Array:
    return words if words.dtype == dtype else lax.bitcast_convert_type(words, dtype)


def send_rows(x: Array, handle: Handle, axis: Axis) -> Array:
    """`[T, H]` to `[R, H]` of any dtype, bit for bit; zero in padding rows."""
    bits = {1: jnp.uint8, 8: jnp.int64}.get(x.dtype.itemsize)
    if bits is None:
        return send_tokens(x, handle, axis, None)
    # Bytes and 64-bit words: the kernel only moves them.
    words = lax.bitcast_convert_type(x, jnp.uint8) if bits is jnp.uint8 else lax.bitcast_convert_type(x, jnp.int32)
    sent = send_tokens(words.reshape(x.shape[0], -1), handle, axis, None)
    return lax.bitcast_convert_type(sent.reshape(-1, *words.shape[1:]), x.dtype)


def send_tokens(
    x: Array,
    handle: Handle,
    axis: Axis,
    wire_dtype: DTypeLike | None,
    *,
    num_programs: int | None = None,
    clear: bool = True,
) -> Array:
    """`[T, H]` tokens to `[R, H]` rows, through FP8 where `wire_dtype` says so, by at most `num_programs` programs.

    Rows without a token are zero, or with `clear=False` of unspecified value.
    """
    padded = _pad_columns(x)
    result = jax.ShapeDtypeStruct((handle.layout.capacity, padded.shape[1]), x.dtype)
    sent, _ = _dispatch(padded, handle, result, wire_dtype, num_programs, to_rows=True, clear=clear)
    return sent[:, : x.shape[1]]


def send_quantized(x: Array, handle: Handle, axis: Axis) -> Quantized:
    """`[T, H]` tokens to FP8 rows `[R, H]` and their scales `[R, H / 128]`; padding rows hold anything."""
    shape = (handle.layout.capacity, x.shape[1])
    return _dispatch(x, handle, jax.ShapeDtypeStruct(shape, FP8), FP8, None, to_rows=True)


def deliver(
    x: Array, handle: Handle, axis: Axis, wire_dtype: DTypeLike | None = None, *, num_programs: int | None = None
) -> Array:
    """`[T, H]` tokens to slot `[source rank, token]` of the heaps of their experts' ranks, for kernels that gather.

    At most `num_programs` programs work on it, or as many as fill the GPU.

    Returns:
      `[1]` of unspecified value, to depend on: the tokens that this rank needs are in its heap.
    """
    result = jax.ShapeDtypeStruct((1,), x.dtype)
    return _dispatch(x, handle, result, wire_dtype, num_programs, to_rows=False)[0]


def _dispatch(
    x: Array,
    handle: Handle,
    result: jax.ShapeDtypeStruct,
    wire_dtype: DTypeLike | None,
    num_programs: int | None,
    *,
    to_rows: bool,
    clear: bool = False,
) -> tuple[Array, Array]:
    """Launches the dispatch kernel, which quantises what travels in FP8; rows of FP8 stay so, and have scales."""
    layout, hidden = handle.layout, x.shape[1]
    wire = jnp.dtype(wire_dtype or x.dtype)
    config, tile = tuning.dispatch(layout, hidden, x.dtype, wire, to_rows=to_rows, limit=num_programs)
    quantized = result.dtype == FP8
    scales = jax.ShapeDtypeStruct((layout.capacity, hidden // GROUP_SIZE) if quantized else (1,), jnp.float32)
    sizes = Dispatch(
        **_reserved_sizes(_DISPATCH, layout, hidden, x.dtype, wire_dtype),
        R=layout.capacity,
        TO_ROWS=to_rows,
        QUANTIZED=quantized,
        CLEAR=clear,
        tile=tile,
    )
    operands = (x, handle.ids, handle.slot_row, handle.row_slot)
    constants = {"S": sizes, "OPERATION": int(ffi.Operation.DISPATCH)}
    rows, row_scales = launch_on_heap(_DISPATCH, operands, group_of(handle), (result, scales), config, constants)
    return rows, row_scales


def return_tokens(
    y: Array, handle: Handle, axis: Axis, wire_dtype: DTypeLike | None, *, num_programs: int | None = None
) -> Array:
    """`[R, H]` rows to their unweighted sums `[T, H]`, by at most `num_programs` programs."""
    layout, hidden = handle.layout, y.shape[1]
    y = _pad_columns(y)
    config, tile = tuning.combine(layout, y.shape[1], y.dtype, jnp.dtype(wire_dtype or y.dtype), num_programs)
    sizes = Combine(**_reserved_sizes(_COMBINE, layout, y.shape[1], y.dtype, wire_dtype), tile=tile)
    constants = {"S": sizes, "OPERATION": int(ffi.Operation.COMBINE)}
    result = jax.ShapeDtypeStruct((layout.num_tokens, y.shape[1]), y.dtype)
    lists = jax.ShapeDtypeStruct((config.num_programs, 2, tile.LENGTH), jnp.int32)
    operands = (y, handle.ids, handle.slot_row)
    sums, _ = launch_on_heap(_COMBINE, operands, group_of(handle), (result, lists), config, constants)
    return sums[:, :hidden]


def _pad_columns(x: Array) -> Array:
    """`x` with rows of whole 16-byte words, which kernels move; a copy only where they are not."""
    columns = rows.round_up(x.shape[1] * x.dtype.itemsize, 16) // x.dtype.itemsize
    return jnp.pad(x, ((0, 0), (0, columns - x.shape[1]))) if columns > x.shape[1] else x


def _reserved_sizes(
    kernel: Kernel, layout: Layout, hidden: int, dtype: jnp.dtype, wire_dtype: DTypeLike | None
) -> dict[str, Any]:
    """What dispatch and combine have in common, once the heap has room for rows of `hidden` columns."""
    num_slots = layout.num_ranks * layout.num_tokens
    value_bytes = rows.round_up(num_slots * hidden * jnp.dtype(wire_dtype or dtype).itemsize, 16)
    scale_bytes = num_slots * (hidden // GROUP_SIZE) * 4 if wire_dtype else 0
    context.reserve(kernel.function, value_bytes + scale_bytes)
    return {
        "T": layout.num_tokens,
        "K": layout.top_k,
        "H": hidden,
        "L": layout.num_local_experts,
        "E": layout.num_experts,
        "SCALES": context.heap(kernel.function).layout.data + value_bytes,
        "FP8": wire_dtype is not None,
    }
