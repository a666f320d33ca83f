"""The `triton` implementation of the exchange: dispatch and combine as one kernel each, over a symmetric heap."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_ep import context, ffi, tiled_gemm
from jax_ep import layout as rows
from jax_ep.collectives import Axis, all_gather, rank_on, sum_in_order
from jax_ep.heap import MAX_BLOCKS, SymmetricHeap
from jax_ep.kernel import Config, Kernel
from jax_ep.megakernels import peer_access, tuning
from jax_ep.megakernels.launch import launch
from jax_ep.mesh_axes import varying_axes
from jax_ep.quantization import GROUP_SIZE
from jax_ep.types import Array, Handle, Layout

grouped_gemm = tiled_gemm.grouped_gemm
grouped_gemm_weights = tiled_gemm.grouped_gemm_weights

_MOST_RANKS = 63  # kernels keep a set of ranks in an int64
_DISPATCH = Kernel("dispatch", "dispatch")
_COMBINE = Kernel("combine", "combine")
_WORDS = Kernel("words", "exchange_words")


def refusal(request: Any) -> str | None:
    """Why this implementation cannot serve a request, or None; see `backends.Request`."""
    if request.platform not in ("gpu", "cpu"):
        return f"the platform is {request.platform}, it needs NVIDIA GPUs"
    if request.platform == "cpu" and context.transport() != "shared_memory":
        return "it runs on GPUs; on CPU devices only for tests, after init(transport='shared_memory')"
    if context.transport() == "xla":
        return "the context was initialised with transport='xla'"
    if request.platform == "gpu" and (reason := _missing_on_gpu()) is not None:
        return reason
    if request.operation not in ("exchange", "gemm"):
        return f"it has no {request.operation} kernels"
    if request.operation == "gemm":
        return None
    if request.layout.num_tokens > MAX_BLOCKS * tuning.BLOCK_T:
        return f"T={request.layout.num_tokens} exceeds {MAX_BLOCKS * tuning.BLOCK_T} tokens per rank"
    if request.layout.num_ranks > _MOST_RANKS:
        return f"W={request.layout.num_ranks} exceeds {_MOST_RANKS} ranks"
    if request.foreign_handle:
        return "the handle was made by another implementation"
    return None


def _missing_on_gpu() -> str | None:
    if jax.process_count() > 1:
        return "it needs one process that drives every device"
    missing = [name for name in ("triton", "jax_triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (pip install 'jax-ep[cuda13]')"
    return peer_access.missing()


def plan(topk_idx: Array, layout: Layout, axis: Axis) -> Handle:
    """`[T, K]` ids of this rank to the handle, whose `group` tells kernels the devices of the ranks."""
    group = _group(axis, varying_axes(topk_idx))
    ids = _exchange_words(topk_idx.reshape(-1), group, layout.num_ranks, different=False, after=None)
    num_invalid = rows.count_invalid(topk_idx, layout.num_experts)
    return rows.make_handle(ids.reshape(-1, *topk_idx.shape), group[-1], num_invalid, layout, group)


def _group(axis: Axis, varying: frozenset[str]) -> Array:
    """`[W + 1]` int32: numbers of the devices on the axis, and this rank.

    The same in all calls of a program, so that XLA makes one exchange of it. Ranks that differ only in axes over which
    nothing of the call varies have different devices and the same results: it is typed by the results.
    """
    heap = context.heap("dispatch")
    # The table's last entry is this device's number; its low half comes first.
    number = lax.bitcast_convert_type(_table(heap, tuple(sorted(varying))), jnp.int32)[-1, 0]
    return jnp.concatenate([all_gather(number, axis), jnp.asarray(rank_on(axis), jnp.int32)[None]])


def _exchange_words(x: Array, group: Array, num_ranks: int, *, different: bool, after: Array | None) -> Array:
    """`[N]` 32-bit words to all ranks, or `[W, N]` one row to each; `[W, N]` by source rank."""
    num_words = x.shape[-1]
    config, block = tuning.words(num_ranks, num_words)
    context.reserve("dispatch", num_ranks * num_words * 4)
    constants = {"N": num_words, "DIFFERENT": different, "BLOCK": block, "OPERATION": int(ffi.Operation.DISPATCH)}
    result = jax.ShapeDtypeStruct((num_ranks, num_words), x.dtype)
    return _launch(_WORDS, (x,), group, result, config, {"W": num_ranks, **constants}, after)


def send_weights(weights: Array, handle: Handle, axis: Axis, after: Array | None = None) -> Array:
    """`[T, K]` router weights to `[R]`, one per row; zero in padding rows."""
    words = _as_words(weights.reshape(-1))
    num_ranks = handle.layout.num_ranks
    sent = _exchange_words(words.reshape(-1), _group_of(handle), num_ranks, different=False, after=after)
    return rows.gather_rows(_from_words(sent.reshape(-1, *words.shape[1:]), weights.dtype), handle.row_slot)


def return_weights(row_weights: Array, handle: Handle, axis: Axis, after: Array | None = None) -> Array:
    """`[R]` values to the `[T, K]` slots they belong to; zero for slots that had no row."""
    slots = rows.gather_rows(row_weights, handle.slot_row)
    words = _as_words(slots)
    num_ranks = handle.layout.num_ranks
    flat = words.reshape(num_ranks, -1)
    parts = _exchange_words(flat, _group_of(handle), num_ranks, different=True, after=after)
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


def send_tokens(x: Array, handle: Handle, axis: Axis, wire_dtype: DTypeLike | None) -> Array:
    """`[T, H]` tokens to `[R, H]` rows, through FP8 where `wire_dtype` says so."""
    layout, hidden = handle.layout, x.shape[1]
    x = _pad_columns(x)
    config, blocks = tuning.dispatch(layout, x.shape[1], x.dtype)
    constants = {"R": layout.capacity, "TO_ROWS": True, "OPERATION": int(ffi.Operation.DISPATCH), **blocks}
    operands = (x, handle.ids, handle.slot_row, handle.row_slot)
    result = jax.ShapeDtypeStruct((layout.capacity, x.shape[1]), x.dtype)
    return _exchange_rows(_DISPATCH, operands, result, handle, config, constants, x.shape[1], wire_dtype)[:, :hidden]


def deliver(x: Array, handle: Handle, axis: Axis) -> Array:
    """`[T, H]` tokens to slot `[source rank, token]` of the heaps of their experts' ranks, for kernels that gather.

    Returns:
      `[1]` of unspecified value, to depend on: the tokens that this rank needs are in its heap.
    """
    layout, hidden = handle.layout, x.shape[1]
    config, blocks = tuning.dispatch(layout, hidden, x.dtype)
    constants = {"R": layout.capacity, "TO_ROWS": False, "OPERATION": int(ffi.Operation.DISPATCH), **blocks}
    operands = (x, handle.ids, handle.slot_row, handle.row_slot)
    result = jax.ShapeDtypeStruct((1,), x.dtype)
    return _exchange_rows(_DISPATCH, operands, result, handle, config, constants, hidden, None)


def return_tokens(y: Array, handle: Handle, axis: Axis, wire_dtype: DTypeLike | None) -> Array:
    """`[R, H]` rows to their unweighted sums `[T, H]`."""
    layout, hidden = handle.layout, y.shape[1]
    y = _pad_columns(y)
    config, blocks = tuning.combine(layout, y.shape[1], y.dtype)
    constants = {"OPERATION": int(ffi.Operation.COMBINE), **blocks}
    result = jax.ShapeDtypeStruct((layout.num_tokens, y.shape[1]), y.dtype)
    operands = (y, handle.ids, handle.slot_row)
    return _exchange_rows(_COMBINE, operands, result, handle, config, constants, y.shape[1], wire_dtype)[:, :hidden]


def _pad_columns(x: Array) -> Array:
    """`x` with rows of whole 16-byte words, which kernels move; a copy only where they are not."""
    columns = rows.round_up(x.shape[1] * x.dtype.itemsize, 16) // x.dtype.itemsize
    return jnp.pad(x, ((0, 0), (0, columns - x.shape[1]))) if columns > x.shape[1] else x


def _table(heap: SymmetricHeap, varying: tuple[str, ...]) -> Array:
    return ffi.pointer_table(heap.id, heap.num_table_entries, varying=varying)


def _group_of(handle: Handle) -> Array:
    if handle.group is None:
        raise ValueError("the handle was made by another implementation; use the one that made it.")
    return handle.group


def _exchange_rows(
    kernel: Kernel,
    operands: tuple[Array, ...],
    result: jax.ShapeDtypeStruct,
    handle: Handle,
    config: Config,
    constants: dict[str, int],
    hidden: int,
    wire_dtype: DTypeLike | None,
) -> Array:
    """Launches a kernel that exchanges rows of `hidden` columns."""
    layout = handle.layout
    num_slots = layout.num_ranks * layout.num_tokens
    value_bytes = rows.round_up(num_slots * hidden * jnp.dtype(wire_dtype or operands[0].dtype).itemsize, 16)
    scale_bytes = num_slots * (hidden // GROUP_SIZE) * 4 if wire_dtype else 0
    context.reserve(kernel.function, value_bytes + scale_bytes)
    sizes = {
        "W": layout.num_ranks,
        "T": layout.num_tokens,
        "K": layout.top_k,
        "H": hidden,
        "L": layout.num_local_experts,
        "SCALES": context.heap(kernel.function).layout.data + value_bytes,
        "FP8": wire_dtype is not None,
    }
    return _launch(kernel, operands, _group_of(handle), result, config, {**sizes, **constants})


def _launch(
    kernel: Kernel,
    operands: tuple[Array, ...],
    group: Array,
    result: jax.ShapeDtypeStruct,
    config: Config,
    constants: dict[str, int],
    after: Array | None = None,
) -> Array:
    """Launches a kernel on the heap; its last operands are the group, the table and a check of the status record."""
    heap = context.heap(kernel.function)
    table = _table(heap, tuple(sorted(varying_axes(group))))
    # The check is an operand, so that it runs, and before the kernel; and it waits for what must come earlier.
    checked = ffi.check_status(group if after is None else after, heap.id)
    places = {
        "D": heap.layout.num_devices,
        "DATA": heap.layout.data,
        "FLAGS": heap.layout.flags,
        "MAX_BLOCKS": MAX_BLOCKS,
    }
    return launch(kernel, (*operands, group, table, checked), (result,), config, {**places, **constants})[0]
