"""All-to-all and grouped GEMM, in one launch or in two: dispatch + GEMM, and GEMM + combine.

The caller passes the implementation of GEMMs in separate launches.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep import context, ffi
from jax_ep.core.expert_matrices import GemmWeights
from jax_ep.core.facts import GemmFacts
from jax_ep.core.kernel import Argument, Config, Descriptor, Kernel
from jax_ep.core.layout import Bias, dropless_capacity, power_of_two, row_tokens
from jax_ep.core.operations import GroupedGemm
from jax_ep.megakernels import grouped_gemm, tuned
from jax_ep.megakernels.activation import gather_rows
from jax_ep.megakernels.exchange import (
    MOST_POSITIONS,
    copied_columns,
    dispatch_tokens,
    num_bytes,
    sum_results,
    summed_columns,
)
from jax_ep.megakernels.grouped_gemm import weights_operand
from jax_ep.megakernels.kernels import exchange_gemm as exchange_gemm_kernels
from jax_ep.megakernels.kernels import exchange_gemm_structs as structs
from jax_ep.megakernels.kernels import gemm_structs, gluon_dispatch_gemm
from jax_ep.megakernels.kernels import send_order as send_order_kernels
from jax_ep.megakernels.kernels.exchange_structs import CountTile, SendOrder, SumTile
from jax_ep.megakernels.launch import all_programs, group_of, int32, launch, num_programs, optional
from jax_ep.types import Array, Experts, Handle, Layout, Options, Schedule

_DISPATCH_GEMM = Kernel(exchange_gemm_kernels.dispatch_gemm, ffi.Operation.DISPATCH_GROUPED_GEMM)
_DISPATCH_GEMM16 = Kernel(gluon_dispatch_gemm.dispatch_gemm16, ffi.Operation.DISPATCH_GROUPED_GEMM)
_GEMM_COMBINE = Kernel(exchange_gemm_kernels.gemm_combine, ffi.Operation.GROUPED_GEMM_COMBINE)
_COUNT = Kernel(send_order_kernels.send_order_count)
_PLACE = Kernel(send_order_kernels.send_order_place)

_ITEM_BYTES = 2
"""Bytes of an element that travels in a launch with a GEMM: see requirements.py."""


def dispatch_grouped_gemm(
    options: Options,
    x: Array,
    weights: Array | None,
    w: GemmWeights,
    handle: Handle,
    *,
    transpose: bool,
    save_as: str | None,
    mode: str,
    products: GroupedGemm,
    experts: Experts | None = None,
) -> tuple[Array, Array | None, Array | None]:
    """Dispatch tokens `x [T, H]` and `weights [T, K]`, and multiply rows by `w [L, H, N]` (transposed: `[L, N, H]`).

    `save_as` "tokens" or "rows" also returns the received tokens. In `mode` "serial", `products` has the GEMM. With
    `experts`, which takes `mode` "fused" in Gluon, the rows of the result are activated, and times their weights.

    Returns:
      `[R, N]`, zero in padding rows; the tokens that have an expert here, or None: "tokens" are `[W * T, H]` by source
      rank and token, "rows" are `[R, H]`, and all other elements are undefined; `[R]` weights, zero in padding rows, or
      None.
    """
    layout = handle.layout
    if mode == "serial":
        rows, row_weights = dispatch_apart(options, x, weights, handle)
        hidden = products.grouped_gemm(rows, w, handle.group_sizes, transpose=transpose, out_dtype=x.dtype)
        if save_as != "tokens":
            return hidden, rows if save_as == "rows" else None, row_weights
        a_row = jnp.max(handle.assignment_to_row.reshape(-1, layout.top_k), axis=1)
        return hidden, gather_rows(rows, a_row, jnp.full((1,), a_row.size, a_row.dtype)), row_weights
    depth, columns = (w.shape[2], w.shape[1]) if transpose else (w.shape[1], w.shape[2])
    facts = tuned.exchange_gemm_facts(layout, depth, columns, x.dtype)
    schedule = tuned.schedule(options.schedule, "dispatch_grouped_gemm", **facts)
    order, saves = order_sends(handle), save_as is not None
    product = _product(layout, w, (depth, columns), x.dtype, transpose=transpose, experts=experts)
    sizes = dispatch_gemm_sizes(schedule, layout, product.sizes, saves)
    context.reserve("dispatch_gemm", sizes.weights_offset + layout.num_ranks * num_bytes(weights))
    kept = jax.ShapeDtypeStruct((layout.num_ranks * layout.num_tokens if saves else 1, x.shape[1]), x.dtype)
    results = product.result, kept, optional((layout.capacity,), weights)
    operands = (x, weights, product.weights, _arrays_of(handle), order)
    kernel, config, constants = product.kernel, product.config, {"S": sizes}
    hidden, saved, found = launch(kernel, operands, results, config, constants, group=group_of(handle))
    if save_as == "rows":
        saved = gather_rows(saved, row_tokens(handle), handle.group_sizes)
    return hidden, saved if saves else None, found


class _Product(NamedTuple):
    """A kernel of dispatch + GEMM, and what is particular to its GEMM."""

    kernel: Kernel
    config: Config
    weights: Argument
    sizes: gemm_structs.GroupedGemm | gemm_structs.GluonGemm16
    result: Argument


def _product(
    layout: Layout,
    w: GemmWeights,
    widths: tuple[int, int],
    dtype: DTypeLike,
    *,
    transpose: bool,
    experts: Experts | None,
) -> _Product:
    """Choose Gluon where a separate GEMM does; `widths` are rows and columns of the weights as they are multiplied."""
    depth, columns = widths
    facts = GemmFacts(jnp.dtype(dtype), layout.capacity, depth, columns, w.shape[0], jnp.dtype(dtype))
    tiles = grouped_gemm.tiles_of(facts)
    if experts is None and not tiles.gluon:
        weights, sizes = weights_operand(w, _gemm_sizes(layout, depth, columns, transpose))
        result = jax.ShapeDtypeStruct((layout.capacity, columns), dtype)
        return _Product(_DISPATCH_GEMM, Config(all_programs(), num_warps=8, num_stages=4), weights, sizes, result)
    grouped_gemm.check_gluon("grouped_gemm", dtype, dtype)
    gathered = gathered_gemm16(layout, widths, tiles.group_m, transpose=transpose, experts=experts)
    weights, gathered = grouped_gemm.gluon_weights(w, gathered)
    config = Config(all_programs(), num_warps=4)
    return _Product(_DISPATCH_GEMM16, config, weights, gathered, grouped_gemm.gluon_result(gathered, dtype))


def dispatch_apart(options: Options, x: Array, weights: Array | None, handle: Handle) -> tuple[Array, Array | None]:
    """Dispatch rows `[R, H]` for a GEMM in a separate launch, and `[R]` weights; rows past the groups are undefined.

    Rows between groups are zero, since a GEMM reads them.
    """
    return dispatch_tokens(options, x, weights, handle, clear=handle.layout.alignment > 1)


def _arrays_of(handle: Handle) -> structs.HandleArrays:
    return structs.HandleArrays(handle.topk_idx, handle.assignment_to_row, handle.row_to_assignment, handle.group_sizes)


def order_sends(handle: Handle) -> structs.OrderedSends:
    """Order the sends of a handle, so that a peer's first experts can start while other tokens travel."""
    sizes = send_order_sizes(handle.layout)
    num_ranks, num_tokens, num_blocks = sizes.num_ranks, sizes.num_tokens, -(-sizes.num_tokens // sizes.tile.block)
    counted = ((num_ranks, num_tokens), (2 * num_ranks, num_blocks, sizes.tile.bins))
    config = Config(num_programs(2 * num_ranks * num_blocks, 4), num_warps=4)
    found = launch(_COUNT, (handle.topk_idx, group_of(handle)), int32(*counted), config, {"S": sizes})
    results = ((num_ranks, num_tokens), (num_ranks,), (num_ranks, sizes.num_local_experts))
    return structs.OrderedSends(*launch(_PLACE, found, int32(*results), config, {"S": sizes}))


def send_order_sizes(layout: Layout) -> SendOrder:
    """Return the sizes of the send order: few blocks, since each adds up the counts of all blocks of a list."""
    lanes, most_blocks = 128, 64
    block = lanes
    while -(-layout.num_tokens // block) > most_blocks and block < MOST_POSITIONS:
        block *= 2
    bins = max(32, power_of_two(layout.num_local_experts + 1))
    rows = max(1, min(4096 // bins, power_of_two(-(-layout.num_tokens // block))))
    tile = CountTile(block, lanes, bins, rows)
    return SendOrder(layout.num_ranks, layout.num_tokens, layout.top_k, layout.num_local_experts, tile)


def dispatch_gemm_sizes(
    schedule: Schedule, layout: Layout, gemm: gemm_structs.GroupedGemm | gemm_structs.GluonGemm16, saves: bool
) -> structs.DispatchGemm:
    """Return the sizes of dispatch + GEMM with the sizes of the GEMM."""
    in_gluon = isinstance(gemm, gemm_structs.GluonGemm16)
    return structs.DispatchGemm(
        num_tokens=layout.num_tokens,
        top_k=layout.top_k,
        comm_programs=schedule.num_communicating_programs or 16,
        block_tokens=32,
        block_hidden=min(copied_columns(gemm.K, 2), 512 if in_gluon else 1024),
        saves_tokens=saves,
        weights_offset=layout.num_ranks * layout.num_tokens * gemm.K * _ITEM_BYTES,
        gemm=gemm,
    )


def gathered_gemm16(
    layout: Layout, widths: tuple[int, int], group_m: int, *, transpose: bool, experts: Experts | None
) -> gemm_structs.GluonGemm16:
    """Return the sizes of a GEMM in Gluon of dispatched tokens with weights of (rows, columns) = `widths`."""
    depth, columns = widths
    shape = layout.capacity, columns if experts is None else columns // 2, depth, layout.num_local_experts
    sizes = grouped_gemm.gluon_gemm16_sizes(shape, group_m, _ITEM_BYTES, transpose=transpose, experts=experts)
    return dataclasses.replace(sizes, gathers=True)


def _gemm_sizes(layout: Layout, depth: int, columns: int, transpose: bool) -> gemm_structs.GroupedGemm:
    """Return the sizes of a GEMM fused with an all-to-all; its tile is narrow if the weights are."""
    tile = gemm_structs.GemmTile(block_m=128, block_n=256 if columns > 128 else 128, block_k=64, group_m=8)
    if jax.default_backend() == "cpu":
        tile = gemm_structs.GemmTile(block_m=32, block_n=16, block_k=16, group_m=8)
    shape = grouped_gemm.gemm_shape(layout.capacity, columns, depth, layout.num_local_experts)
    return gemm_structs.GroupedGemm(*shape, transposed=transpose, tma_parts=0, tile=tile)


def grouped_gemm_combine(
    options: Options,
    h: Array,
    row_weights: Array | None,
    w: GemmWeights,
    handle: Handle,
    *,
    transpose: bool,
    bias: Bias | None = None,
) -> tuple[Array, Array | None]:
    """Multiply rows by the weights of their experts, add the bias, and combine: mode "scatter".

    `h [R, F]` times `w [L, F, H]`, or `[L, H, F]` with `transpose`, gives `[T, H]`; `[R]` values go to the `[T, K]`
    assignments of their rows. In mode "serial" the GEMM and the combine are separate calls.
    """
    layout, widths = handle.layout, (h.shape[1], w.shape[1 if transpose else 2])
    config, sizes = gemm_combine_sizes(layout, *widths, transpose)
    slots, product = optional((layout.num_tokens, layout.top_k), row_weights), sizes.gemm
    context.reserve("gemm_combine", sizes.weights_offset + num_bytes(slots))
    rows = Descriptor(h, (product.tile.block_m, product.tile.block_k))
    sums = sum_results((layout.num_tokens, product.N), options.sum_dtype or h.dtype, config, sizes.sums.list_length)
    bias_arrays = grouped_gemm.bias_operand(bias, layout.capacity)
    matrices, product = weights_operand(w, product)
    operands = (rows, row_weights, matrices, _arrays_of(handle), bias_arrays)
    constants = {"S": dataclasses.replace(sizes, gemm=product)}
    sums, found = launch(_GEMM_COMBINE, operands, (sums, slots), config, constants, group=group_of(handle))
    return sums.out_ptr, found


def gemm_combine_sizes(
    layout: Layout, features: int, hidden: int, transpose: bool
) -> tuple[Config, structs.GemmCombine]:
    """Return config and sizes of GEMM + combine, `[., features]` times `[features, hidden]`."""
    # Add up all rows at the end: between tiles, sums run at a seventh of the rate (docs/design/rejected.md).
    tokens, choices = 4, power_of_two(layout.top_k)
    columns, in_flight = summed_columns(hidden, 2)
    sizes = structs.GemmCombine(
        num_tokens=layout.num_tokens,
        top_k=layout.top_k,
        may_drop=layout.capacity < dropless_capacity(layout.num_slots, layout.num_local_experts, layout.alignment),
        clear_tokens=16,
        clear_hidden=min(512, copied_columns(hidden, 2)),
        sum_tokens=tokens,
        weight_tokens=max(1, 1024 // choices),
        weights_offset=layout.num_tokens * layout.top_k * hidden * _ITEM_BYTES,
        padded_top_k=choices,
        sums=SumTile(columns, tokens * choices, in_flight, in_registers=False),
        gemm=_gemm_sizes(layout, features, hidden, transpose),
    )
    return Config(all_programs(), num_warps=8, num_stages=3), sizes


def expert_rows(saved: Array, handle: Handle, saved_as: str) -> Array:
    """Return saved tokens in expert order: a GEMM that gathers is slower than a copy (docs/design/grouped_gemm.md)."""
    return saved if saved_as == "rows" else gather_rows(saved, row_tokens(handle), handle.group_sizes)
