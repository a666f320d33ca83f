"""Low-latency dispatch and combine in two launches each: one starts an exchange and does not wait, one finishes it.

Between the two the device computes something else (kernels/low_latency_slots.py). Each launch takes an array of the one
before it, which orders them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep import context, ffi
from jax_ep.core.dtypes import FP8
from jax_ep.core.kernel import Config, Kernel
from jax_ep.core.layout import power_of_two
from jax_ep.core.mesh_axes import varying_axes
from jax_ep.heap.memory import Generation
from jax_ep.megakernels import low_latency, tuned
from jax_ep.megakernels.grid import num_programs
from jax_ep.megakernels.kernels import structs, structs_serving
from jax_ep.megakernels.kernels.structs_trace import FINISH
from jax_ep.megakernels.launch import group_of, group_on, heap_of, launch, launch_identity
from jax_ep.types import Array, Layout, LowLatencyHandle, Options

_DISPATCH_START = Kernel("low_latency_parts", "low_latency_dispatch_start")
_DISPATCH_FINISH = Kernel("low_latency_parts", "low_latency_dispatch_finish")
_COMBINE_START = Kernel("low_latency_parts", "low_latency_combine_start")
_COMBINE_FINISH = Kernel("low_latency_parts", "low_latency_combine_finish")
_DISPATCH, _COMBINE = int(ffi.Operation.LOW_LATENCY_DISPATCH), int(ffi.Operation.LOW_LATENCY_COMBINE)
_SLOTS = 8
_GREETING_BYTES = 256
_BLOCK_H = 2048


class Dispatching(NamedTuple):
    """A dispatch that has been started: what its finish needs.

    Attributes:
      arrays: what the launch has left, first of all the number of the exchange.
      group: see `group_on`.
      sizes: of the launch.
      config: likewise.
      result_dtype: of the rows.
      layout: of the dispatch.
      identity: of the launch.
      buffers: in which it lies. Its finish is to find it there, though larger ones may be traced in between.
    """

    arrays: structs_serving.LowLatencyStarted
    group: Array
    sizes: structs_serving.LowLatencyDispatchPart
    config: Config
    result_dtype: jnp.dtype
    layout: Layout
    identity: int
    buffers: Generation


class Combining(NamedTuple):
    """A combine that has been started.

    Attributes:
      sent: what the launch has left, and the ids of the dispatch.
      identity: of the launch.
      buffers: in which it lies.
    """

    sent: structs_serving.SentRows
    identity: int
    buffers: Generation


def start_dispatch(
    options: Options,
    x: Array,
    topk_idx: Array,
    num_tokens: Array | None,
    layout: Layout,
    group_size: int | None,
    part: slice,
    after: Dispatching | None,
) -> Dispatching:
    """Sends the tokens `part` of `x [T, H]`, quantised for groups of so many columns or None, `after` another start."""
    hidden, actual = x.shape[1], part.stop - part.start
    made = group_size or 0
    num_scales = hidden // made if made else 0
    wire_dtype = jnp.dtype(FP8 if made else x.dtype)
    facts = tuned.exchange_facts(layout, hidden, x.dtype)
    schedule = tuned.schedule(options.schedule, "low_latency_dispatch", **facts, wire_dtype=wire_dtype)
    config, tile = low_latency.dispatch_tile(schedule, layout, actual, hidden, x.dtype, wire_dtype, num_scales)
    offsets, buffer_bytes = low_latency.buffer_offsets(
        _GREETING_BYTES,
        IDS=actual * layout.top_k * 4,
        VALUES=actual * hidden * wire_dtype.itemsize,
        SCALES=actual * num_scales * 4,
    )
    sizes = structs_serving.LowLatencyDispatchPart(
        **low_latency.layout_sizes(layout, actual, hidden),
        **offsets,
        G=num_scales,
        GROUP=made,
        COUNTED=num_tokens is not None,
        tile=dataclasses.replace(tile, SEND_H=max(tile.SEND_H, made)),
        FIRST=part.start,
        STARTED=None,
    )
    constants: dict[str, Any] = {"S": sizes, "OPERATION": _DISPATCH}
    operands: tuple[Any, ...] = (structs.Rows(x, x), topk_idx, topk_idx if num_tokens is None else num_tokens)
    if after is None:
        constants["after_ptr"] = None
    else:
        operands += (after.arrays.exchange_ptr,)
    group = group_on(options.axis, varying_axes(topk_idx))
    results = structs_serving.LowLatencyStarted(
        jax.ShapeDtypeStruct((2, tile.RANKS), jnp.int32),
        jax.ShapeDtypeStruct((layout.num_tokens, layout.top_k), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    identity = launch_identity(_DISPATCH_START, (*operands, group, results), constants)
    buffers = context.reserve(_DISPATCH_START.function, 0, buffer_bytes, _SLOTS).buffers_of(_SLOTS)
    (arrays,) = launch(
        _DISPATCH_START, operands, (results,), config, constants, group=group, buffers=buffers, identity=identity
    )
    return Dispatching(arrays, group, sizes, config, wire_dtype, layout, identity, buffers)


def finish_dispatch(
    started: Dispatching, after: Dispatching | Combining
) -> tuple[Array, Array | None, Array, LowLatencyHandle]:
    """Rows, their scales, how many each expert has, and the handle: as `low_latency_dispatch` of these tokens."""
    layout, sizes = started.layout, started.sizes
    token_results, plan = low_latency.dispatch_results(layout, sizes.H, started.result_dtype, sizes.G)
    places = structs_serving.LowLatencyPlaces(*plan[:5])
    constants = {
        "S": dataclasses.replace(sizes, FIRST=0, STARTED=_heap(started.group, started.identity)),
        "OPERATION": _DISPATCH,
    }
    last = after.arrays.exchange_ptr if isinstance(after, Dispatching) else after.sent.exchange_ptr
    results = token_results, places
    rows, plan = launch(
        _DISPATCH_FINISH,
        (started.arrays, last),
        results,
        started.config,
        constants,
        group=started.group,
        buffers=started.buffers,
        identity=started.identity ^ FINISH,
    )
    made_at_start = started.arrays
    arrays = plan.token_ptr, plan.start_ptr, plan.count_ptr, plan.slot_row_ptr, made_at_start.num_invalid_ptr
    handle = LowLatencyHandle(*arrays, layout, made_at_start.own_ids_ptr, started.group)
    return rows.values_ptr, rows.scales_ptr if sizes.G else None, plan.sizes_ptr, handle


def start_combine(
    options: Options, y: Array, num_tokens: int, handle: LowLatencyHandle, other: Combining | None
) -> Combining:
    """Sends the rows `y [L, W * M, H]` of a dispatch of so many tokens per rank; beside the `other` half, if sent."""
    layout, hidden = handle.layout, y.shape[-1]
    sizes = structs_serving.LowLatencyCombineStart(
        **low_latency.layout_sizes(layout, num_tokens, hidden),
        VALUES=_GREETING_BYTES,
        BLOCK_H=_columns(hidden),
        CHOICES=power_of_two(layout.top_k),
    )
    _, buffer_bytes = low_latency.buffer_offsets(
        _GREETING_BYTES, VALUES=num_tokens * layout.top_k * hidden * y.dtype.itemsize
    )
    constants = {"S": sizes, "OPERATION": _COMBINE}
    if handle.own_ids is None:
        raise ValueError("the handle was made by another implementation; use the one that made it.")
    group, own_ids = group_of(handle), handle.own_ids
    operands = (y, handle.slot_row)
    results = (jax.ShapeDtypeStruct((2, power_of_two(layout.num_ranks)), jnp.int32),)
    num_tasks = num_tokens * layout.num_ranks * -(-hidden // sizes.BLOCK_H)
    config = low_latency.program_config(num_programs(num_tasks, 2), options.schedule.num_combining_programs)
    identity = launch_identity(_COMBINE_START, (*operands, group, *results), constants)
    # Both halves in the same buffers: one launch finishes them.
    buffers = None if other is None else other.buffers
    if buffers is None:
        buffers = context.reserve(_COMBINE_START.function, 0, buffer_bytes, _SLOTS).buffers_of(_SLOTS)
    (exchange,) = launch(
        _COMBINE_START, operands, results, config, constants, group=group, buffers=buffers, identity=identity
    )
    return Combining(structs_serving.SentRows(exchange, own_ids), identity, buffers)


def finish_combine(
    options: Options,
    first: Combining,
    second: Combining,
    num_first: int,
    topk_weights: Array,
    handle: LowLatencyHandle,
    y: Array,
) -> Array:
    """`[T, H]` weighted sums of what two exchanges bring back, in the dtype of y; the first has `num_first` tokens."""
    layout, num_tokens, hidden = handle.layout, topk_weights.shape[0], y.shape[-1]
    group = group_of(handle)
    sizes = structs_serving.LowLatencyCombineFinish(
        **low_latency.layout_sizes(layout, num_tokens, hidden),
        SECOND=num_first,
        VALUES=_GREETING_BYTES,
        BLOCK_H=_columns(hidden),
        CHOICES=power_of_two(layout.top_k),
        FIRST_STARTED=_heap(group, first.identity),
        SECOND_STARTED=_heap(group, second.identity),
    )
    constants = {"S": sizes, "OPERATION": _COMBINE}
    operands, results = (first.sent, second.sent, topk_weights), (jax.ShapeDtypeStruct((num_tokens, hidden), y.dtype),)
    programs = num_programs(num_tokens * -(-hidden // sizes.BLOCK_H), 2)
    config = low_latency.program_config(programs, options.schedule.num_combining_programs)
    out: Array = launch(
        _COMBINE_FINISH,
        operands,
        results,
        config,
        constants,
        group=group,
        buffers=first.buffers,
        identity=first.identity ^ FINISH,
    )[0]
    return out


def _columns(hidden: int) -> int:
    return min(power_of_two(hidden), _BLOCK_H)


def _heap(group: Array, identity: int) -> structs.Heap:
    """The heap as the launch of this identity is told of it, for those that wait for it."""
    return heap_of(context.heap("low_latency_moe").layout, group.shape[0] - 1, identity, context.is_recording())
