"""Low-latency dispatch and combine as one kernel each, over the low-latency buffers of the symmetric heap.

The second GEMM of the experts and combine are one kernel, too. A token is a task: with few tokens, what counts is how
many programs send at once. `lag` blocks, about one per program, are sent before the first received one is processed.
Tiles are measured by benchmarks/low_latency.py.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep import context, ffi
from jax_ep.core import fp8
from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_matrices import QuantizedWeights
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.kernel import Argument, Config, Kernel
from jax_ep.core.layout import power_of_two, round_up
from jax_ep.core.mesh_axes import varying_axes
from jax_ep.formats import needs_decoder
from jax_ep.heap.memory import Generation
from jax_ep.megakernels import quantized_gemm, tuned
from jax_ep.megakernels.kernels import low_latency_combine as low_latency_combine_kernels
from jax_ep.megakernels.kernels import low_latency_dispatch as low_latency_dispatch_kernels
from jax_ep.megakernels.kernels import low_latency_gemm_combine as low_latency_gemm_combine_kernels
from jax_ep.megakernels.kernels import low_latency_structs as structs
from jax_ep.megakernels.kernels.exchange_structs import Rows
from jax_ep.megakernels.kernels.gemm_structs import MaskedGemm, QuantizedGemm
from jax_ep.megakernels.launch import group_of, group_on, launch, num_programs, tile_config
from jax_ep.megakernels.masked import MaskedTiles, masked_gemm, num_tiles
from jax_ep.megakernels.requirements import MOST_LOW_LATENCY_TOKENS
from jax_ep.types import Array, Layout, LowLatencyHandle, Options, Schedule, Tokens

_DISPATCH = Kernel(low_latency_dispatch_kernels.low_latency_dispatch, ffi.Operation.LOW_LATENCY_DISPATCH)
_COMBINE = Kernel(low_latency_combine_kernels.low_latency_combine, ffi.Operation.LOW_LATENCY_COMBINE)
_FLAG_BYTES = round_up(8 + 4 * MOST_LOW_LATENCY_TOKENS, 256)  # a ready handshake, and a flag per token
_GEMM_COMBINE = Kernel(
    low_latency_gemm_combine_kernels.low_latency_gemm_combine, ffi.Operation.LOW_LATENCY_GEMM_COMBINE
)
_BLOCK_H = 1024
_MOST_COMPARISONS = 4096  # up to this number, a copy of the dispatch finds its rows itself
_MOST_ROWS = 128  # up to this number, combine sends each row: fewer messages would cost a second wait
_SUM_BYTES = {False: 16 << 10, True: 8 << 10}  # of a tile of combine; sums of several rows take more registers


def low_latency_dispatch(
    options: Options, x: Tokens, topk_idx: Array, num_tokens: Array | None, layout: Layout, group_size: int | None
) -> tuple[Array, Array | None, Array, LowLatencyHandle]:
    """Dispatch `[T, H]` tokens to packed rows, their scales, and the number of each expert; see xla/low_latency.py."""
    if topk_idx.shape[0] == 0:  # kernels have at least one token
        x, topk_idx = jax.tree.map(_add_row, x), _add_row(topk_idx) - 1
    if group_size is not None and not isinstance(x, tuple) and power_of_two(group_size) != group_size:
        x = fp8.quantize_rows(x, group_size)  # tiles have whole groups only if both are powers of two
    values, scales = fp8.split_rows(x)
    actual, hidden = values.shape
    made = group_size if scales is None and group_size is not None else 0  # columns per scale that the kernel computes
    num_scales = hidden // made if made else 0 if scales is None else scales.shape[1]
    wire_dtype = jnp.dtype(FP8 if made else values.dtype)
    facts = tuned.exchange_facts(layout, hidden, values.dtype)
    schedule = tuned.schedule(options.schedule, "low_latency_dispatch", **facts, wire_dtype=wire_dtype)
    config, tile = dispatch_tile(schedule, layout, actual, hidden, values.dtype, wire_dtype, num_scales)
    offsets, buffers = _reserve(
        _DISPATCH,
        ids_offset=actual * layout.top_k * 4,
        values_offset=actual * hidden * wire_dtype.itemsize,
        scales_offset=actual * num_scales * 4,
    )
    sizes = structs.LowLatencyDispatch(
        **layout_sizes(layout, actual, hidden),
        **offsets,
        num_scales=num_scales,
        scale_block=made,
        has_num_tokens=num_tokens is not None,
        tile=dataclasses.replace(tile, send_hidden=max(tile.send_hidden, made)),
    )
    tokens = Rows(values, values if scales is None else scales)
    operands = (tokens, topk_idx, topk_idx if num_tokens is None else num_tokens)
    group = group_on(options.axis, varying_axes(topk_idx))
    results = dispatch_results(layout, hidden, wire_dtype, num_scales)
    rows, plan = launch(_DISPATCH, operands, results, config, {"S": sizes}, group=group, buffers=buffers)
    arrays = plan.token_ptr, plan.start_ptr, plan.count_ptr, plan.assignment_to_row_ptr, plan.num_invalid_ptr
    handle = LowLatencyHandle(*arrays, layout, plan.own_topk_idx_ptr, group)
    return rows.values_ptr, rows.scales_ptr if num_scales else None, plan.sizes_ptr, handle


def dispatch_results(
    layout: Layout, hidden: int, wire_dtype: jnp.dtype, num_scales: int
) -> tuple[Rows, structs.LowLatencyPlan]:
    """Return rows, and the arrays of the handle, as the kernel writes them."""
    experts, ranks = layout.num_local_experts, layout.num_ranks
    rows, slots = ranks * layout.num_tokens, (layout.num_tokens, layout.top_k)
    shapes = ((experts,), (experts, rows), (experts, ranks), (experts, ranks), (ranks, *slots), slots, ())
    scales = (experts, rows, num_scales) if num_scales else (1,)
    tokens = jax.ShapeDtypeStruct((experts, rows, hidden), wire_dtype)
    arrays = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
    return Rows(tokens, jax.ShapeDtypeStruct(scales, jnp.float32)), structs.LowLatencyPlan(*arrays)


def low_latency_combine(options: Options, y: Array, topk_weights: Array, handle: LowLatencyHandle) -> Array:
    """Combine `[L, W * M, H]` rows and `[T, K]` weights to weighted sums `[T, H]`."""
    layout, (actual, hidden), wire_dtype = handle.layout, (topk_weights.shape[0], y.shape[-1]), options.wire_dtype
    result = jax.ShapeDtypeStruct((actual, hidden), options.sum_dtype or y.dtype)
    if actual == 0:
        return jnp.zeros_like(y, shape=result.shape, dtype=result.dtype)
    facts = tuned.exchange_facts(layout, hidden, y.dtype)
    schedule = tuned.schedule(options.schedule, "low_latency_combine", **facts)
    config, tile = combine_tile(schedule, layout, actual, hidden, y.dtype)
    num_rows = actual * (1 if tile.sends_sums else layout.top_k)
    group = group_of(handle)
    offsets, buffers = _reserve(
        _COMBINE,
        weights_offset=topk_weights.nbytes,
        values_offset=num_rows * hidden * jnp.dtype(wire_dtype or y.dtype).itemsize,
        scales_offset=num_rows * (hidden // GROUP_SIZE) * 4 if wire_dtype else 0,
    )
    common = {**layout_sizes(layout, actual, hidden), **offsets}
    sizes = structs.LowLatencyCombine(**common, fp8=wire_dtype is not None, tile=tile)
    operands = (y, handle.assignment_to_row, handle.own_topk_idx, topk_weights)
    return launch(_COMBINE, operands, (result,), config, {"S": sizes}, group=group, buffers=buffers)[0]


def _add_row(x: Array) -> Array:
    return jnp.zeros_like(x, shape=(1, *x.shape[1:])) if x.shape[0] == 0 else x


def layout_sizes(layout: Layout, num_tokens: int, hidden: int) -> dict[str, int]:
    """Return the fields of `LowLatency`, for `num_tokens` tokens of this rank."""
    names = "num_ranks", "top_k", "num_local_experts"
    sizes = {"num_tokens": num_tokens, "max_tokens": layout.num_tokens, "hidden": hidden}
    return {**sizes, **{name: getattr(layout, name) for name in names}}


def buffer_offsets(**num_bytes: int) -> tuple[dict[str, int], int]:
    """Return the offsets of parts of a low-latency buffer, after its flags and in this order, and the buffer's size."""
    offsets, end = {}, _FLAG_BYTES
    for name, size in num_bytes.items():
        offsets[name] = end
        end = round_up(end + size, 128)
    return offsets, end


def _reserve(kernel: Kernel, **num_bytes: int) -> tuple[dict[str, int], Generation]:
    """Reserve low-latency buffers; return the offsets of `buffer_offsets`, and the buffers."""
    offsets, end = buffer_offsets(**num_bytes)
    return offsets, context.reserve(kernel.name, 0, end).buffers


def low_latency_gemm_combine(
    options: Options,
    rows: Tokens,
    rhs: QuantizedWeights,
    group_sizes: Array,
    topk_weights: Array,
    handle: LowLatencyHandle,
    bias: Array | None,
    *,
    out_dtype: DTypeLike,
    expected_rows: int | None,
) -> Array:
    """Multiply `[L, W * M, I]` rows by `[L, I, H]` weights, and combine with `[T, K]` weights to sums `[T, H]`.

    A bias `[L, H]` of the GEMM may be None. Rows are as `rhs` takes them.
    """
    lhs, lhs_scales = fp8.split_rows(rows)
    layout, (experts, num_rows, _), hidden = handle.layout, lhs.shape, rhs.shape[2]
    actual, dtype, group = topk_weights.shape[0], jnp.dtype(out_dtype), group_of(handle)
    result = jax.ShapeDtypeStruct((actual, hidden), dtype)
    if actual == 0:
        return jnp.zeros_like(lhs, dtype=dtype, shape=result.shape)
    tiles: MaskedTiles | quantized_gemm.QuantizedTiles
    product: MaskedGemm | QuantizedGemm
    gemm_operands: tuple[Argument | None, ...]
    if needs_decoder(rhs):
        tiles = quantized_gemm.tiles_of_masked(lhs, rhs, expected_rows)
        product = quantized_gemm.sizes_of(num_rows, rhs, tiles)
        scales = group_sizes if lhs_scales is None else lhs_scales
        gemm_operands = (*quantized_gemm.blocks_of(lhs, rhs, tiles), scales, rhs.scales, group_sizes)
    else:
        arrays = rows, rhs, group_sizes
        tiles, product, gemm_operands = masked_gemm("low_latency_gemm_combine", *arrays, dtype, expected_rows)
    offsets, buffers = _reserve(_GEMM_COMBINE, values_offset=actual * layout.top_k * hidden * dtype.itemsize)
    sizes = gemm_combine_sizes(layout, actual, hidden, product, offsets["values_offset"])
    own_topk_idx = cast(Array, handle.own_topk_idx)
    sources = structs.RowSources(handle.source_token, handle.source_start, handle.assignment_to_row, own_topk_idx)
    operands = (*gemm_operands, sources, topk_weights, bias)
    config = tile_config(tiles, num_tiles((experts, num_rows, hidden), tiles))
    return launch(_GEMM_COMBINE, operands, (result,), config, {"S": sizes}, group=group, buffers=buffers)[0]


def gemm_combine_sizes(
    layout: Layout, num_tokens: int, hidden: int, product: MaskedGemm | QuantizedGemm, values: int
) -> structs.LowLatencyGemmCombine:
    """Return the sizes of the kernel; `values` is the offset of rows in a low-latency buffer."""
    return structs.LowLatencyGemmCombine(
        **layout_sizes(layout, num_tokens, hidden),
        values_offset=values,
        block_hidden=min(power_of_two(hidden), _BLOCK_H),
        padded_top_k=power_of_two(layout.top_k),
        padded_ranks=power_of_two(layout.num_ranks),
        quantized=isinstance(product, QuantizedGemm),
        gemm=product,
    )


def program_config(programs: int, limit: int | None) -> Config:
    """Return a config of 8 warps: two programs per multiprocessor have 128 registers per thread, one may use more.

    Both cases set a limit: without one the assembler leaves room for programs that never start, and spills.
    """
    programs = min(programs, limit or programs)
    fit_alone = jax.default_backend() != "cpu" and programs <= jax.local_devices()[0].core_count
    return Config(programs, num_warps=8, max_registers=255 if fit_alone else 128)


def _columns(hidden: int, most_bytes: int, itemsize: int) -> int:
    """Return the columns of a tile: all if they fit into `most_bytes`."""
    return min(power_of_two(hidden), most_bytes // itemsize)


def dispatch_tile(
    schedule: Schedule,
    layout: Layout,
    num_tokens: int,
    hidden: int,
    dtype: jnp.dtype,
    wire_dtype: jnp.dtype,
    scales: int,
) -> tuple[Config, structs.LowLatencyDispatchTile]:
    """Return config and blocks of dispatch, for `num_tokens` tokens of `dtype` that travel as `wire_dtype`."""
    num_ranks, top_k = layout.num_ranks, power_of_two(layout.top_k)
    tokens = power_of_two(num_ranks * num_tokens)
    direct = tokens * top_k * top_k <= _MOST_COMPARISONS
    block = 1 if direct else 4 if wire_dtype.itemsize == 1 else 2
    num_tasks = num_ranks + layout.num_local_experts + num_tokens + num_ranks * -(-num_tokens // block)
    programs = num_programs(num_tasks, 2)
    tile = structs.LowLatencyDispatchTile(
        send_hidden=_columns(hidden, 16 << 10, max(2, dtype.itemsize)),
        block_tokens=block,
        # More columns would take the registers of a multiprocessor's second program.
        block_hidden=_columns(hidden, (16 if direct else 8) << 10, wire_dtype.itemsize),
        padded_scales=power_of_two(scales),
        padded_top_k=top_k,
        padded_ranks=power_of_two(num_ranks),
        chunk=tokens if direct else min(tokens, 4096 // top_k),
        lag=num_tokens if direct else -(-programs // block),
        direct=direct,
    )
    return program_config(programs, schedule.num_communicating_programs), tile


def combine_tile(
    schedule: Schedule, layout: Layout, num_tokens: int, hidden: int, dtype: jnp.dtype
) -> tuple[Config, structs.LowLatencyCombineTile]:
    """Return config and blocks of combine, for `num_tokens` tokens and rows of `dtype`."""
    num_ranks = layout.num_ranks
    sums = num_tokens * layout.top_k > _MOST_ROWS
    sends = num_ranks * (1 if sums else layout.top_k)  # of a token
    programs = num_programs(num_ranks + (sends + 1) * num_tokens + 1, 2)
    tile = structs.LowLatencyCombineTile(
        block_hidden=_columns(hidden, _SUM_BYTES[sums] >> (layout.top_k > 8), max(2, dtype.itemsize)),
        padded_top_k=power_of_two(layout.top_k),
        padded_ranks=power_of_two(num_ranks),
        lag=-(-programs // sends),
        sends_sums=sums,
    )
    return program_config(programs, schedule.num_combining_programs), tile
