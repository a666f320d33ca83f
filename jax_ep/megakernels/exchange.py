"""The `triton` implementation of the exchange: dispatch and combine as one kernel each, over a symmetric heap."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_ep import collectives, context, ffi, tiled_gemm
from jax_ep import layout as rows
from jax_ep.collectives import Axis, all_gather, rank_on
from jax_ep.heap import MAX_BLOCKS, SymmetricHeap
from jax_ep.kernel import Config, Kernel
from jax_ep.megakernels import tuning
from jax_ep.megakernels.launch import launch
from jax_ep.types import Array, Handle, Layout

send_weights = collectives.send_weights
return_weights = collectives.return_weights
grouped_gemm = tiled_gemm.grouped_gemm
grouped_gemm_weights = tiled_gemm.grouped_gemm_weights

_DISPATCH = Kernel("dispatch", "dispatch")
_COMBINE = Kernel("combine", "combine")
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


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
    if request.dtype not in _DTYPES:
        return f"it moves bfloat16, float16 and float32, not {request.dtype}"
    if request.wire_dtype is not None:
        return "it has no FP8 wire"
    if request.hidden * request.dtype.itemsize % 16:
        return f"rows of H={request.hidden} {request.dtype} are not a multiple of 16 bytes"
    if request.layout.num_tokens > MAX_BLOCKS * tuning.BLOCK_T:
        return f"T={request.layout.num_tokens} exceeds {MAX_BLOCKS * tuning.BLOCK_T} tokens per rank"
    if request.foreign_handle:
        return "the handle was made by another implementation"
    return None


def _missing_on_gpu() -> str | None:
    if jax.process_count() > 1:
        return "it needs one process that drives every device"
    missing = [name for name in ("triton", "jax_triton") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)} (pip install 'jax-ep[cuda13]')" if missing else None


def plan(topk_idx: Array, layout: Layout, axis: Axis) -> Handle:
    """`[T, K]` ids of this rank to the handle, whose `group` tells kernels the devices of the ranks."""
    heap = context.heap("dispatch")
    # The table's last entry is this device's number; its low half comes first.
    number = lax.bitcast_convert_type(_table(heap), jnp.int32)[-1, :1]
    gathered = all_gather(jnp.concatenate([topk_idx.reshape(-1), number]), axis)
    ids, numbers = gathered[:, :-1].reshape(-1, *topk_idx.shape), gathered[:, -1]
    rank = jnp.asarray(rank_on(axis), jnp.int32)
    group = jnp.concatenate([numbers, rank[None]])
    return rows.make_handle(ids, rank, rows.count_invalid(topk_idx, layout.num_experts), layout, group)


def send_rows(x: Array, handle: Handle, axis: Axis) -> Array:
    """`[T, H]` to `[R, H]`, bit for bit; zero in padding rows."""
    return send_tokens(x, handle, axis, None)


def send_tokens(x: Array, handle: Handle, axis: Axis, wire_dtype: DTypeLike | None) -> Array:
    """`[T, H]` tokens to `[R, H]` rows."""
    layout, hidden = handle.layout, x.shape[1]
    config, blocks = tuning.dispatch(layout, hidden, x.dtype)
    constants = {"R": layout.capacity, "TO_ROWS": True, "OPERATION": int(ffi.Operation.DISPATCH), **blocks}
    operands = (x, handle.ids, handle.slot_row, handle.row_slot)
    result = jax.ShapeDtypeStruct((layout.capacity, hidden), x.dtype)
    return _launch(_DISPATCH, operands, result, handle, config, constants, hidden)


def deliver(x: Array, handle: Handle, axis: Axis) -> Array:
    """`[T, H]` tokens to slot `[source rank, token]` of the heaps of their experts' ranks, for kernels that gather.

    Returns:
      `[1]` of unspecified value, to depend on: the tokens that this rank needs are in its heap.
    """
    layout, hidden = handle.layout, x.shape[1]
    config, blocks = tuning.dispatch(layout, hidden, x.dtype)
    constants = {"R": layout.capacity, "TO_ROWS": False, "OPERATION": int(ffi.Operation.DISPATCH), **blocks}
    operands = (x, handle.ids, handle.slot_row, handle.row_slot)
    return _launch(_DISPATCH, operands, jax.ShapeDtypeStruct((1,), x.dtype), handle, config, constants, hidden)


def return_tokens(y: Array, handle: Handle, axis: Axis, wire_dtype: DTypeLike | None) -> Array:
    """`[R, H]` rows to their unweighted sums `[T, H]`."""
    layout, hidden = handle.layout, y.shape[1]
    config, blocks = tuning.combine(layout, hidden, y.dtype)
    constants = {"OPERATION": int(ffi.Operation.COMBINE), **blocks}
    result = jax.ShapeDtypeStruct((layout.num_tokens, hidden), y.dtype)
    return _launch(_COMBINE, (y, handle.ids, handle.slot_row), result, handle, config, constants, hidden)


def _table(heap: SymmetricHeap) -> Array:
    return ffi.pointer_table(heap.id, heap.num_table_entries)


def _launch(
    kernel: Kernel,
    operands: tuple[Array, ...],
    result: jax.ShapeDtypeStruct,
    handle: Handle,
    config: Config,
    constants: dict[str, int],
    hidden: int,
) -> Array:
    """Launches a kernel that exchanges rows of `hidden` columns over the heap."""
    layout = handle.layout
    heap = context.heap(kernel.function)
    context.reserve(kernel.function, layout.num_ranks * layout.num_tokens * hidden * result.dtype.itemsize)
    group = handle.group
    if group is None:
        raise ValueError(f"{kernel.function}: the handle was made by another implementation; use the one that made it.")
    # The check is an operand, so that it runs, and before the kernel.
    checked = ffi.check_status(group, heap.id)
    sizes = {
        "W": layout.num_ranks,
        "D": heap.layout.num_devices,
        "T": layout.num_tokens,
        "K": layout.top_k,
        "H": hidden,
        "L": layout.num_local_experts,
        "DATA": heap.layout.data,
        "FLAGS": heap.layout.flags,
        "MAX_BLOCKS": MAX_BLOCKS,
    }
    operands = (*operands, group, _table(heap), checked)
    return launch(kernel, operands, (result,), config, {**sizes, **constants})[0]
