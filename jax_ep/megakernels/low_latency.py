"""Low-latency dispatch and combine as one kernel each, over the low-latency area of the symmetric heap."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep import context, ffi
from jax_ep.collectives import Axis
from jax_ep.dtypes import FP8
from jax_ep.kernel import Kernel
from jax_ep.layout import power_of_two, round_up
from jax_ep.megakernels import capability
from jax_ep.megakernels import low_latency_tuning as tuning
from jax_ep.megakernels.heap_launch import group_on, launch_on_heap
from jax_ep.mesh_axes import varying_axes
from jax_ep.quantization import GROUP_SIZE, quantize_fp8
from jax_ep.types import Array, Layout, LowLatencyHandle, Quantized

_DISPATCH = Kernel("low_latency_dispatch", "low_latency_dispatch")
_COMBINE = Kernel("low_latency_combine", "low_latency_combine")
MAX_TOKENS = 1024
MAX_TOP_K = 16
_FLAG_BYTES = round_up(8 + 4 * MAX_TOKENS, 256)  # a greeting, and a flag per token


def refusal(request: Any) -> str | None:
    """Why these kernels cannot serve a request, or None."""
    layout = request.layout
    if layout.num_tokens > MAX_TOKENS:
        return f"max_tokens_per_rank={layout.num_tokens} exceeds {MAX_TOKENS}, at which dispatch is the faster one"
    if layout.top_k > MAX_TOP_K:
        return f"K={layout.top_k} exceeds {MAX_TOP_K} experts per token"
    if request.hidden * request.dtype.itemsize % 16:
        return f"rows of {request.hidden} {request.dtype} are no whole 16-byte words"
    return capability.missing_fp8("FP8") if FP8 in (request.dtype, request.wire_dtype) else None


def low_latency_dispatch(
    x: Array | Quantized,
    topk_idx: Array,
    num_tokens: Array | None,
    layout: Layout,
    axis: Axis,
    group_size: int | None,
) -> tuple[Array, Array | None, Array, LowLatencyHandle]:
    """`[T, H]` tokens to packed rows, their scales, and how many each expert has; see reference.py."""
    if topk_idx.shape[0] == 0:  # kernels have at least one token
        x, topk_idx = jax.tree.map(_add_row, x), _add_row(topk_idx) - 1
    if group_size is not None and not isinstance(x, tuple) and power_of_two(group_size) != group_size:
        x = quantize_fp8(x, group_size=group_size)  # tiles have whole groups only if both are powers of two
    values, scales = x if isinstance(x, tuple) else (x, None)
    actual, hidden = values.shape
    made = group_size if scales is None and group_size is not None else 0  # columns per scale made by the kernel
    num_scales = hidden // made if made else 0 if scales is None else scales.shape[1]
    wire_dtype = jnp.dtype(FP8 if made else values.dtype)
    config, blocks = tuning.dispatch(layout, actual, hidden, values.dtype, wire_dtype, num_scales)
    blocks["SEND_H"] = max(blocks["SEND_H"], made)
    places, region_bytes = low_latency_places(
        IDS_AT=actual * layout.top_k * 4,
        VALUES_AT=actual * hidden * wire_dtype.itemsize,
        SCALES_AT=actual * num_scales * 4,
    )
    options = {"G": num_scales, "GROUP": made, "COUNTED": num_tokens is not None}
    constants = {**_sizes(layout, actual, hidden), **options, **places, **blocks}
    constants["OPERATION"] = int(ffi.Operation.LOW_LATENCY_DISPATCH)
    operands = (values, values if scales is None else scales, topk_idx, topk_idx if num_tokens is None else num_tokens)
    group, results = group_on(axis, varying_axes(topk_idx)), _results(layout, hidden, wire_dtype, num_scales)
    context.reserve(_DISPATCH.function, 0, region_bytes)
    tokens, sent_scales, sizes, token, start, count, slot_row, own_ids, num_invalid = launch_on_heap(
        _DISPATCH, operands, group, results, config, constants, uses_data=False
    )
    handle = LowLatencyHandle(token, start, count, slot_row, num_invalid, layout, own_ids, group)
    return tokens, sent_scales if num_scales else None, sizes, handle


def _results(layout: Layout, hidden: int, wire_dtype: jnp.dtype, num_scales: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Tokens, scales, group sizes and the arrays of the handle, as the kernel writes them."""
    experts, ranks = layout.num_local_experts, layout.num_ranks
    rows, slots = ranks * layout.num_tokens, (layout.num_tokens, layout.top_k)
    shapes = ((experts,), (experts, rows), (experts, ranks), (experts, ranks), (ranks, *slots), slots, ())
    return (
        jax.ShapeDtypeStruct((experts, rows, hidden), wire_dtype),
        jax.ShapeDtypeStruct((experts, rows, num_scales) if num_scales else (1,), jnp.float32),
        *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes),
    )


def low_latency_combine(
    y: Array, topk_weights: Array, handle: LowLatencyHandle, axis: Axis, wire_dtype: DTypeLike | None
) -> Array:
    """`[L, W * M, H]` rows and `[T, K]` weights to weighted sums `[T, H]`."""
    layout, (actual, hidden) = handle.layout, (topk_weights.shape[0], y.shape[-1])
    result = jax.ShapeDtypeStruct((actual, hidden), y.dtype)
    if actual == 0:
        return jnp.zeros_like(y, shape=result.shape)
    if handle.own_ids is None or handle.group is None:
        raise ValueError("the handle was made by another implementation; use the one that made it.")
    config, blocks = tuning.combine(layout, actual, hidden, y.dtype)
    num_rows = actual * (1 if blocks["SUMS"] else layout.top_k)
    places, region_bytes = low_latency_places(
        WEIGHTS_AT=topk_weights.nbytes,
        VALUES_AT=num_rows * hidden * jnp.dtype(wire_dtype or y.dtype).itemsize,
        SCALES_AT=num_rows * (hidden // GROUP_SIZE) * 4 if wire_dtype else 0,
    )
    sizes = _sizes(layout, actual, hidden)
    constants = {**sizes, "FP8": wire_dtype is not None, "OPERATION": int(ffi.Operation.LOW_LATENCY_COMBINE)}
    operands = (y, handle.slot_row, handle.own_ids, topk_weights)
    context.reserve(_COMBINE.function, 0, region_bytes)
    constants |= places | blocks
    return launch_on_heap(_COMBINE, operands, handle.group, (result,), config, constants, uses_data=False)[0]


def _add_row(x: Array) -> Array:
    return jnp.zeros_like(x, shape=(1, *x.shape[1:])) if x.shape[0] == 0 else x


def _sizes(layout: Layout, actual: int, hidden: int) -> dict[str, int]:
    sizes = {"T": actual, "M": layout.num_tokens, "K": layout.top_k}
    return {**sizes, "H": hidden, "L": layout.num_local_experts}


def low_latency_places(**num_bytes: int) -> tuple[dict[str, int], int]:
    """Offsets of the parts of a region, which follow its flags in this order, and the size of the region."""
    places, end = {}, _FLAG_BYTES
    for name, size in num_bytes.items():
        places[name] = end
        end = round_up(end + size, 128)
    return places, end
