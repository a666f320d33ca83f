"""Dispatch and combine as one kernel each, over a symmetric heap, after the plan.

The plan gathers the ids of all ranks, and every rank derives the rows of its experts from them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_ep import context, ffi
from jax_ep.core import layout as rows
from jax_ep.core.dtypes import FP8
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.kernel import Argument, Config, Kernel
from jax_ep.core.layout import power_of_two
from jax_ep.core.mesh_axes import varying_axes
from jax_ep.heap.symmetric import MAX_BLOCKS
from jax_ep.megakernels import tuned
from jax_ep.megakernels.kernels import combine as combine_kernels
from jax_ep.megakernels.kernels import dispatch as dispatch_kernels
from jax_ep.megakernels.kernels import exchange_structs as structs
from jax_ep.megakernels.kernels import plan as plan_kernels
from jax_ep.megakernels.kernels import small_exchange as small_exchange_kernels
from jax_ep.megakernels.launch import group_of, group_on, int32, launch, num_programs, optional
from jax_ep.types import Array, Handle, Layout, Options, Quantized, Schedule

_PLAN = Kernel(plan_kernels.plan, ffi.Operation.DISPATCH)
_ALL_GATHER_I32 = Kernel(small_exchange_kernels.all_gather_i32, ffi.Operation.DISPATCH)
_DISPATCH = Kernel(dispatch_kernels.dispatch, ffi.Operation.DISPATCH)
_COMBINE = Kernel(combine_kernels.combine, ffi.Operation.COMBINE)
# The plan packs an assignment's local expert and its position in its block into one word (kernels/plan.py).
MOST_EXPERTS, MOST_POSITIONS = 1 << 10, 1 << 20

BLOCK_T = 8
"""Most tokens per flag, and per task: few enough that the last tasks of a launch end together."""

FEW = 64
"""Up to this many programs, which do not fill the GPU, each has a multiprocessor to itself and larger blocks."""

ROW_BYTES, IN_FLIGHT_BYTES = 16 * 1024, 80 * 1024
"""Most bytes of a row that are added up at once, 64 sums for each thread of four warps; and of rows on their way there.

More rows on their way to shared memory bring nothing, nor do more warps.
"""

NARROW_BYTES = 4 * 1024
"""Most bytes of a row that goes to registers in all programs; wider ones go there in few programs alone."""

THREAD_BYTES, MOST_ROWS = 256, 16
"""Most bytes of rows in the registers of a thread, and most rows, on their way at once."""


def plan(options: Options, topk_idx: Array, layout: Layout) -> Handle:
    """Make the handle of this rank's ids `[T, K]`; its `group` contains the devices of the ranks."""
    group = group_on(options.axis, varying_axes(topk_idx))
    config, sizes = plan_config(layout)
    if layout.num_local_experts > MOST_EXPERTS or sizes.tile.block > MOST_POSITIONS:
        # Each block would count thousands of experts: sort instead.
        ids = all_gather_i32(topk_idx.reshape(-1), group).reshape(layout.num_ranks, *topk_idx.shape)
        return rows.make_handle(ids, group[-1], rows.count_invalid(topk_idx, layout.num_experts), layout, group)
    context.reserve("dispatch", layout.num_ranks * rows.round_up(sizes.num_assignments, 32) * 4)
    per_slot, source_blocks = (
        (layout.num_ranks, layout.num_tokens, layout.top_k),
        -(-sizes.num_assignments // sizes.tile.block),
    )
    scratch = structs.PlanScratch(
        *int32(per_slot, (layout.num_ranks * source_blocks, sizes.tile.bins), (source_blocks,))
    )
    results: tuple[Argument, ...] = (
        *int32((layout.capacity,), per_slot, (layout.num_local_experts,), per_slot, (), ()),
        scratch,
    )
    found = launch(_PLAN, (topk_idx.reshape(-1),), results, config, {"S": sizes}, group=group)
    row_to_assignment, assignment_to_row, group_sizes, ids, num_invalid, num_dropped, _ = found
    return Handle(row_to_assignment, assignment_to_row, group_sizes, ids, group, num_invalid, num_dropped, layout)


def all_gather_i32(x: Array, group: Array) -> Array:
    """`[N]` 32-bit values of each rank to all ranks: `[W, N]` by source rank."""
    num_ranks, (num_values,) = group.shape[0] - 1, x.shape
    config, block = small_exchange_config(num_ranks, num_values)
    context.reserve("dispatch", num_ranks * num_values * 4)
    constants = {"S": structs.SmallExchange(num_values, block)}
    results = (jax.ShapeDtypeStruct((num_ranks, num_values), x.dtype),)
    return launch(_ALL_GATHER_I32, (x,), results, config, constants, group=group)[0]


def dispatch_rows(options: Options, x: Array, handle: Handle) -> Array:
    """`[T, H]` to `[R, H]` of any dtype, bit for bit; zero in padding rows."""
    options = dataclasses.replace(options, wire_dtype=None)
    bits = {1: jnp.uint8, 8: jnp.int64}.get(x.dtype.itemsize)
    if bits is None:
        return dispatch_tokens(options, x, None, handle)[0]
    # Bytes and 64-bit words: the kernel only moves them.
    words = lax.bitcast_convert_type(x, jnp.uint8) if bits is jnp.uint8 else lax.bitcast_convert_type(x, jnp.int32)
    moved, _ = dispatch_tokens(options, words.reshape(x.shape[0], -1), None, handle)
    return lax.bitcast_convert_type(moved.reshape(-1, *words.shape[1:]), x.dtype)


def dispatch_tokens(
    options: Options, x: Array, weights: Array | None, handle: Handle, *, clear: bool = True
) -> tuple[Array, Array | None]:
    """Dispatch `[T, H]` tokens to `[R, H]` rows, through FP8 if they travel in it, and `[T, K]` weights to `[R]`.

    Rows without a token are zero, or undefined with `clear=False`; their weights are zero.
    """
    moved, _, row_weights = _dispatch(options, pad_columns(x), weights, handle, x.dtype, clear)
    return moved[:, : x.shape[1]], row_weights


def dispatch_quantized(
    options: Options, x: Array, weights: Array | None, handle: Handle
) -> tuple[Quantized, Array | None]:
    """Dispatch `[T, H]` tokens to FP8 rows `[R, H]` with scales `[R, H / 128]`, and `[T, K]` weights to `[R]`.

    Padding rows are undefined, and their weights are zero.
    """
    values, scales, row_weights = _dispatch(options, x, weights, handle, FP8, clear=False)
    return (values, scales), row_weights


def _dispatch(
    options: Options, x: Array, weights: Array | None, handle: Handle, dtype: DTypeLike, clear: bool
) -> tuple[Array, Array, Array | None]:
    """Launch dispatch, which quantizes what travels in FP8; rows of `dtype` FP8 stay quantized, and have scales."""
    layout, hidden, quantized = handle.layout, x.shape[1], dtype == FP8
    wire = jnp.dtype(options.wire_dtype or x.dtype)
    facts = tuned.exchange_facts(layout, hidden, x.dtype)
    schedule = tuned.schedule(options.schedule, "dispatch", **facts, wire_dtype=wire)
    config, tile = dispatch_config(schedule, layout, hidden, x.dtype, wire, clear=clear)
    common = _reserved_sizes(_DISPATCH, options, layout, x, layout.num_ranks * num_bytes(weights))
    sizes = structs.Dispatch(**common, num_rows=layout.capacity, quantized=quantized, clears_padding=clear, tile=tile)
    results = (
        jax.ShapeDtypeStruct((layout.capacity, hidden), dtype),
        jax.ShapeDtypeStruct((layout.capacity, hidden // GROUP_SIZE) if quantized else (1,), jnp.float32),
        optional((layout.capacity,), weights),
    )
    operands = (x, weights, handle.topk_idx, handle.assignment_to_row, handle.row_to_assignment)
    values, scales, row_weights = launch(_DISPATCH, operands, results, config, {"S": sizes}, group=group_of(handle))
    return values, scales, row_weights


def num_bytes(array: Array | jax.ShapeDtypeStruct | None) -> int:
    """Return the size of an optional array."""
    return 0 if array is None else array.size * array.dtype.itemsize


def sum_results(shape: tuple[int, ...], dtype: DTypeLike, config: Config, length: int) -> structs.Sums:
    """Return the results of a launch whose programs add up the rows of their lists, which have this length."""
    lists = jax.ShapeDtypeStruct((config.num_programs, 2, length), jnp.int32)
    return structs.Sums(jax.ShapeDtypeStruct(shape, dtype), lists)


def combine_tokens(options: Options, y: Array, row_weights: Array | None, handle: Handle) -> tuple[Array, Array | None]:
    """Combine `[R, H]` rows to unweighted sums `[T, H]`, and `[R]` values to the `[T, K]` assignments of their rows."""
    layout, hidden = handle.layout, y.shape[1]
    y = pad_columns(y)
    schedule = tuned.schedule(options.schedule, "combine", **tuned.exchange_facts(layout, y.shape[1], y.dtype))
    config, tile = combine_config(schedule, layout, y.shape[1], y.dtype)
    slots = optional((layout.num_tokens, layout.top_k), row_weights)
    sizes = structs.Combine(**_reserved_sizes(_COMBINE, options, layout, y, num_bytes(slots)), tile=tile)
    results = sum_results((layout.num_tokens, y.shape[1]), options.sum_dtype or y.dtype, config, tile.list_length)
    operands = (y, row_weights, handle.topk_idx, handle.assignment_to_row)
    sums, values = launch(_COMBINE, operands, (results, slots), config, {"S": sizes}, group=group_of(handle))
    return sums.out_ptr[:, :hidden], values


def pad_columns(x: Array) -> Array:
    """Pad `x` to rows of whole 16-byte words, which kernels move; a copy only if necessary."""
    columns = rows.round_up(x.shape[1] * x.dtype.itemsize, 16) // x.dtype.itemsize
    return jnp.pad(x, ((0, 0), (0, columns - x.shape[1]))) if columns > x.shape[1] else x


def _reserved_sizes(kernel: Kernel, options: Options, layout: Layout, x: Array, weight_bytes: int) -> dict[str, Any]:
    """Reserve room on the heap for rows like those of `x` and for weights; return the fields of `Exchange`."""
    num_slots, hidden, fp8 = layout.num_ranks * layout.num_tokens, x.shape[1], options.wire_dtype is not None
    value_bytes = rows.round_up(num_slots * hidden * jnp.dtype(options.wire_dtype or x.dtype).itemsize, 16)
    end = value_bytes + rows.round_up(num_slots * (hidden // GROUP_SIZE) * 4 if fp8 else 0, 16)
    context.reserve(kernel.name, end + weight_bytes)
    fields = {name: getattr(layout, name) for name in ("num_tokens", "top_k", "num_local_experts", "num_experts")}
    return fields | {"hidden": hidden, "fp8": fp8, "scales_offset": value_bytes, "weights_offset": end}


def copied_columns(hidden: int, itemsize: int) -> int:
    """Columns of a tile: a power of two that covers H or some kilobytes, whichever is less."""
    # Sums and FP8 scaling are float32 whatever travels: wider tiles of float32 rows would spill.
    most_bytes = 2048 if itemsize <= 2 else 1024
    columns = 128  # an FP8 group
    while columns < hidden and columns * itemsize < most_bytes:
        columns *= 2
    return columns


def summed_columns(hidden: int, itemsize: int) -> tuple[int, int]:
    """Columns that are added up at once, and rows on their way to shared memory; see `ROW_BYTES`."""
    columns = max(GROUP_SIZE, min(power_of_two(hidden), ROW_BYTES // itemsize))
    return columns, min(9, IN_FLIGHT_BYTES // (columns * itemsize))


def at_most(config: Config, limit: int | None) -> Config:
    """Limit the programs of a config, as for a launch next to other work; None sets no limit."""
    if limit is None:
        return config
    return dataclasses.replace(config, num_programs=min(config.num_programs, limit))


def small_exchange_config(num_ranks: int, num_values: int) -> tuple[Config, int]:
    """Config and values per block of an exchange of 32-bit values."""
    block = 1024
    while block * MAX_BLOCKS < num_values:
        block *= 2
    return Config(num_programs(num_ranks * -(-num_values // block)), num_warps=4), block


def plan_config(layout: Layout) -> tuple[Config, structs.Plan]:
    """Config and sizes of the plan kernel.

    About as many blocks as programs that run at a time: each is then counted and placed once, and every task can add
    the counts of all up. Small blocks where there are few slots: a block is worked on by LANES slots at a time.
    """
    lanes, most_blocks = 128, 256  # a slot per thread
    slots = layout.num_tokens * layout.top_k
    block = lanes
    while layout.num_ranks * -(-slots // block) > most_blocks:
        block *= 2
    fill = 1024
    while -(-layout.capacity // fill) > most_blocks:
        fill *= 2
    source_blocks = -(-slots // block)
    num_blocks = layout.num_ranks * source_blocks
    bins = max(32, power_of_two(layout.num_local_experts))
    sizes = structs.Plan(
        num_assignments=slots,
        num_local_experts=layout.num_local_experts,
        num_rows=layout.capacity,
        alignment=layout.alignment,
        fill_rows=fill,
        source_blocks=power_of_two(source_blocks),
        tile=structs.CountTile(block, lanes, bins, max(1, min(4096 // bins, power_of_two(num_blocks)))),
    )
    # Registers are enough for three at a time; one that had to wait would only make the end later.
    return Config(num_programs(3 * num_blocks + -(-layout.capacity // fill), 3), num_warps=4), sizes


def _tokens_per_task(num_tokens: int) -> int:
    """Fewer where there are few tokens, so that most programs of a GPU have a task."""
    least = 4 if jax.default_backend() == "cpu" else 2  # several at the sizes of tests
    block = BLOCK_T
    while block > least and block * 256 > num_tokens:
        block //= 2
    return block


def dispatch_config(
    schedule: Schedule, layout: Layout, hidden: int, dtype: jnp.dtype, wire_dtype: jnp.dtype, *, clear: bool = True
) -> tuple[Config, structs.DispatchTile]:
    """Config and tile of the dispatch kernel, for tokens of `dtype` that travel as `wire_dtype`.

    With `clear`, padding rows become zero; else their weights alone do, if there are any.
    """
    block, columns = _tokens_per_task(layout.num_tokens), copied_columns(hidden, dtype.itemsize)
    warps, per_processor = 8, 2
    limit = schedule.num_communicating_programs
    if limit is not None and limit <= FEW:
        block, columns, per_processor = 32, min(columns, 512), 1
    elif wire_dtype != dtype:
        # Converting what arrives needs more programs rather than wider tiles.
        columns, warps, per_processor = min(columns, 512), 4, 4
    block, warps = schedule.tokens_per_block or block, schedule.num_warps or warps
    num_tasks = layout.num_ranks * -(-layout.num_tokens // block)
    lag = min(max(1, 128 // block), -(-layout.num_tokens // block))
    tile = structs.DispatchTile(block, columns, block_rows=16 if clear else 1024, lag=lag)
    return at_most(Config(num_programs(num_tasks, per_processor), num_warps=warps), limit), tile


def combine_config(
    schedule: Schedule, layout: Layout, hidden: int, dtype: jnp.dtype
) -> tuple[Config, structs.CombineTile]:
    """Config and tile of the combine kernel, for sums of `dtype`."""
    limit = schedule.num_combining_programs
    few = limit is not None and limit <= FEW
    block = _tokens_per_task(layout.num_tokens)
    if few:
        block = min(32, power_of_two(layout.num_tokens))
    elif layout.num_tokens <= 4 * MAX_BLOCKS:
        block = min(4, block)
    block = schedule.tokens_per_block or block
    columns, in_flight = summed_columns(hidden, dtype.itemsize)
    row_bytes = columns * dtype.itemsize
    # Not in the interpreter, which would load many rows past the end of each list.
    in_registers = few or (row_bytes <= NARROW_BYTES and jax.default_backend() != "cpu")
    # As many warps as have 16 bytes for each thread.
    warps = schedule.num_warps or max(1, min(16 if few else 4, row_bytes // 512))
    in_flight = schedule.rows_in_flight or in_flight
    if in_registers:
        in_flight = min(schedule.rows_in_flight or MOST_ROWS, max(1, THREAD_BYTES * 32 * warps // row_bytes))
    choices, ranks = power_of_two(layout.top_k), power_of_two(layout.num_ranks)
    tile = structs.CombineTile(
        block_tokens=block,
        block_hidden=columns,
        padded_top_k=choices,
        padded_ranks=ranks,
        list_length=block * max(choices, ranks),
        rows_in_flight=in_flight,
        in_registers=in_registers,
        lag=min(max(1, 256 // block), -(-layout.num_tokens // block)),
    )
    num_tasks = (layout.num_ranks + 1) * -(-layout.num_tokens // block)
    per_processor = 1 if few else max(1, (16 if in_registers else 8) // warps)
    return at_most(Config(num_programs(num_tasks, per_processor), num_warps=warps), limit), tile
