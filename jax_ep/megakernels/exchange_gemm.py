"""Exchange and grouped GEMM, in one launch or in two: dispatch + GEMM, and GEMM + combine.

The caller passes the implementation of GEMMs in launches of their own. In the backward
pass of dispatch + GEMM the gradient of the matrices may be in the launch of its exchange. Two launches have it: GEMM +
combine, whose programs multiply for the gradient where they have no more rows to send; and combine alone, behind a
product, most of whose programs multiply for the gradient.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from jax_ep import context, ffi
from jax_ep.core.bias import Bias
from jax_ep.core.kernel import Argument, Config, Constants, Descriptor, Kernel
from jax_ep.core.layout import dropless_capacity, power_of_two, row_tokens
from jax_ep.core.operations import GroupedGemm
from jax_ep.megakernels import grid, grouped_gemm, tuned
from jax_ep.megakernels.exchange import (
    combine_config,
    copied_columns,
    dispatch_tokens,
    num_bytes,
    sum_results,
    summed_columns,
    weight_arguments,
)
from jax_ep.megakernels.kernels import exchange_gemm as exchange_gemm_kernels
from jax_ep.megakernels.kernels import exchange_gemm_structs as structs
from jax_ep.megakernels.kernels import gemm_structs
from jax_ep.megakernels.kernels.exchange_structs import Combine, Sums, SumTile
from jax_ep.megakernels.launch import group_of, launch, stores_by_descriptor
from jax_ep.megakernels.modes import backward_schedule, fused_modes
from jax_ep.megakernels.rows import gather_rows
from jax_ep.megakernels.send_order import order_sends
from jax_ep.types import Array, Handle, Layout, Options, Schedule

__all__ = [
    "dispatch_apart",
    "dispatch_grouped_gemm",
    "fused_modes",
    "grouped_gemm_combine",
    "grouped_gemm_combine_with_weight_gradient",
    "weight_gradient",
]

_DISPATCH_GEMM = Kernel(exchange_gemm_kernels.dispatch_gemm)
_GEMM_COMBINE = Kernel(exchange_gemm_kernels.gemm_combine)
_COMBINE_WITH_WEIGHT_GRADIENT = Kernel(exchange_gemm_kernels.combine_with_weight_gradient)

_ITEM_BYTES = 2
"""Of what travels in a launch with a product: see requirements.py."""

BESIDE = 24
"""Programs of combine beside the weight gradient: few leave more of the GPU to that, and have its time."""


def dispatch_grouped_gemm(
    options: Options,
    x: Array,
    weights: Array | None,
    w: Array,
    handle: Handle,
    *,
    transpose_rhs: bool,
    save_as: str | None,
    mode: str,
    products: GroupedGemm,
) -> tuple[Array, Array | None, Array | None]:
    """Tokens to the ranks of their experts, and there times the experts' matrices; router weights to the rows.

    Args:
      options: of the call.
      x: `[T, H]`.
      weights: `[T, K]`, or None.
      w: `[L, H, N]`, or `[L, N, H]` with `transpose_rhs`.
      handle: of this implementation.
      transpose_rhs: contract with the last axis of w.
      save_as: also return the tokens that arrived, as "tokens" or as "rows"; or None.
      mode: "fused", or "serial" for a GEMM in a launch of its own.
      products: the implementation of that GEMM.

    Returns:
      `[R, N]`, zero in padding rows; and the tokens that have an expert here, "tokens": `[W * T, H]` by source rank and
      token; "rows": `[R, H]`; both of unspecified value elsewhere. Else None. Last `[R]` weights, zero in padding rows,
      or None.
    """
    layout = handle.layout
    if mode == "serial":
        # Only rows between groups must be zero: a product reads none past them.
        rows, row_weights = dispatch_tokens(options, x, weights, handle, clear=layout.alignment > 1)
        hidden = products.grouped_gemm(rows, w, handle.group_sizes, transpose_rhs=transpose_rhs, out_dtype=x.dtype)
        if save_as != "tokens":
            return hidden, rows if save_as == "rows" else None, row_weights
        a_row = jnp.max(handle.assignment_to_row.reshape(-1, layout.top_k), axis=1)
        return hidden, gather_rows(rows, a_row, jnp.full((1,), a_row.size, a_row.dtype)), row_weights
    facts = tuned.exchange_gemm_facts(layout, x.shape[1], w.shape[1 if transpose_rhs else 2], x.dtype)
    schedule = tuned.schedule(options.schedule, "dispatch_grouped_gemm", **facts)
    order = order_sends(handle)
    arguments = _dispatch_arguments(schedule, x, weights, w, handle, order, transpose_rhs, save_as)
    hidden, saved, *weights_found = launch(_DISPATCH_GEMM, *arguments, group=group_of(handle))
    if save_as == "rows":
        saved = gather_rows(saved, row_tokens(handle), handle.group_sizes)
    return hidden, None if save_as is None else saved, next(iter(weights_found), None)


def dispatch_apart(options: Options, x: Array, weights: Array | None, handle: Handle) -> tuple[Array, Array | None]:
    """Rows `[R, H]` for a product in a launch of its own, and `[R]` weights; anything past the groups."""
    # Only rows between groups must be zero: a product reads none past them.
    return dispatch_tokens(options, x, weights, handle, clear=handle.layout.alignment > 1)


def _dispatch_arguments(
    schedule: Schedule,
    x: Array,
    weights: Array | None,
    w: Array,
    handle: Handle,
    order: structs.OrderedSends,
    transpose_rhs: bool,
    save_as: str | None,
) -> tuple[tuple[Argument, ...], tuple[Argument, ...], Config, Constants]:
    """Of one launch for both, whose second result are the tokens by source rank and token, where they are saved."""
    layout, saves = handle.layout, save_as is not None
    config, sizes = dispatch_gemm_sizes(schedule, layout, _product_of(w, transpose_rhs), transpose_rhs, saves)
    context.reserve("dispatch_gemm", sizes.weights_offset + layout.num_ranks * num_bytes(weights))
    saved_shape = (layout.num_ranks * layout.num_tokens if saves else 1, x.shape[1])
    shapes = ((layout.capacity, sizes.gemm.N), saved_shape)
    results = tuple(jax.ShapeDtypeStruct(shape, x.dtype) for shape in shapes)
    taken, given, constants = weight_arguments(weights, (layout.capacity,))
    operands: tuple[Argument, ...] = (x, *taken, _matrices(w, sizes.gemm), _arrays_of(handle), order)
    constants |= {"S": sizes, "OPERATION": int(ffi.Operation.DISPATCH_GROUPED_GEMM)}
    return operands, (*results, *given), config, constants


def _arrays_of(handle: Handle) -> structs.HandleArrays:
    return structs.HandleArrays(handle.topk_idx, handle.assignment_to_row, handle.row_to_assignment, handle.group_sizes)


def dispatch_gemm_sizes(
    schedule: Schedule, layout: Layout, product: tuple[int, int], transpose_rhs: bool, saves: bool
) -> tuple[Config, structs.DispatchGemm]:
    """Config and sizes of dispatch + GEMM, `[., hidden]` times `[hidden, columns]` with (hidden, columns) `product`."""
    sizes = structs.DispatchGemm(
        num_tokens=layout.num_tokens,
        top_k=layout.top_k,
        comm_programs=schedule.num_communicating_programs or 16,
        block_tokens=32,
        block_hidden=copied_columns(product[0], 2),
        saves_tokens=saves,
        weights_offset=layout.num_ranks * layout.num_tokens * product[0] * _ITEM_BYTES,
        gemm=_product_sizes(layout, *product, transpose_rhs),
    )
    return Config(grid.all_programs(), num_warps=8, num_stages=4), sizes


def _product_of(w: Array, transpose_rhs: bool) -> tuple[int, int]:
    """Depth and columns of a product with matrices."""
    return (w.shape[2], w.shape[1]) if transpose_rhs else (w.shape[1], w.shape[2])


def _product_sizes(layout: Layout, depth: int, columns: int, transpose_rhs: bool) -> gemm_structs.GroupedGemm:
    """Sizes of a product in the launch of an exchange; its tile is narrow where the matrices are."""
    tile = gemm_structs.GemmTile(block_m=128, block_n=256 if columns > 128 else 128, block_k=64, group_m=8)
    if jax.default_backend() == "cpu":
        tile = gemm_structs.GemmTile(block_m=32, block_n=16, block_k=16, group_m=8)
    common = grouped_gemm.common_sizes(layout.capacity, columns, depth, layout.num_local_experts)
    return gemm_structs.GroupedGemm(**common, transposed=transpose_rhs, tma_parts=0, tile=tile)


def grouped_gemm_combine(
    options: Options,
    h: Array,
    row_weights: Array | None,
    w: Array,
    handle: Handle,
    *,
    transpose_rhs: bool,
    bias: Bias | None = None,
) -> tuple[Array, Array | None]:
    """Rows times the matrices of their experts, with a bias if there is one, and the sums of each token's rows.

    `h [R, F]` times `w [L, F, H]`, or `[L, H, F]` with `transpose_rhs`, to `[T, H]`; and `[R]` values to the `[T, K]`
    slots of their rows: mode "scatter". In mode "serial" the GEMM and the combine are calls of their own.
    """
    hidden = w.shape[1 if transpose_rhs else 2]
    config, sizes = gemm_combine_sizes(handle.layout, h.shape[1], hidden, transpose_rhs)
    operands, results, constants = _scatter_arguments(options, h, row_weights, w, handle, bias, config, sizes)
    constants |= {"factors": None, "gradient": None}
    sums, *slot_weights = launch(_GEMM_COMBINE, operands, results, config, constants, group=group_of(handle))
    return sums.out_ptr, next(iter(slot_weights), None)


def _scatter_arguments(
    options: Options,
    h: Array,
    row_weights: Array | None,
    w: Array,
    handle: Handle,
    bias: Bias | None,
    config: Config,
    sizes: structs.GemmCombine,
) -> tuple[tuple[Argument, ...], tuple[Argument, ...], Constants]:
    """Operands, results and constants of launches that store each row at its source, where the heap gets room for it.

    The results are `Sums`, and slots of weights where there are any.
    """
    layout, product = handle.layout, sizes.gemm
    taken, given, constants = weight_arguments(row_weights, (layout.num_tokens, layout.top_k))
    context.reserve("gemm_combine", sizes.weights_offset + sum(map(num_bytes, given)))
    rows = Descriptor(h, (product.tile.block_m, product.tile.block_k))
    sums = sum_results((layout.num_tokens, product.N), options.sum_dtype or h.dtype, config, sizes.sums.list_length)
    added, without_bias = grouped_gemm.bias_arguments(bias, layout.capacity)
    constants |= without_bias | {"S": sizes, "OPERATION": int(ffi.Operation.GROUPED_GEMM_COMBINE)}
    return (rows, *taken, _matrices(w, product), _arrays_of(handle), *added), (sums, *given), constants


def gemm_combine_sizes(
    layout: Layout,
    features: int,
    hidden: int,
    transpose_rhs: bool,
    gradient: gemm_structs.WeightGradient | None = None,
) -> tuple[Config, structs.GemmCombine]:
    """Config and sizes of GEMM + combine, `[., features]` times `[features, hidden]`, and of the gradient with it."""
    # Sums all at the end: between products they come at a seventh of the rate (docs/design/rejected.md).
    tokens, choices = 4, power_of_two(layout.top_k)
    columns, stages = summed_columns(hidden, 2)
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
        sums=SumTile(columns, tokens * choices, stages),
        gemm=_product_sizes(layout, features, hidden, transpose_rhs),
        gradient=gradient,
    )
    return Config(grid.all_programs(), num_warps=8, num_stages=3), sizes


def scattered_gradient_sizes(
    layout: Layout, features: int, hidden: int, transpose_rhs: bool
) -> gemm_structs.WeightGradient:
    """Sizes of the weight gradient in the launch of GEMM + combine."""
    # As many blocks in flight as there is memory beside that through which a tile is stored.
    width = features if transpose_rhs else hidden
    tile = gemm_structs.WeightGradientTile(
        block_m=128, block_n=256 if width > 128 else 128, block_rows=64, group_m=8, num_stages=3
    )
    if jax.default_backend() == "cpu":
        tile = gemm_structs.WeightGradientTile(block_m=32, block_n=32, block_rows=16, group_m=8, num_stages=2)
    return _gradient_sizes(layout, features, hidden, transpose_rhs, tile, parts=1)


def _gradient_sizes(
    layout: Layout, features: int, hidden: int, transpose_rhs: bool, tile: gemm_structs.WeightGradientTile, parts: int
) -> gemm_structs.WeightGradient:
    """Sizes of the gradient of `[features, hidden]` matrices, or `[hidden, features]` with `transpose_rhs`."""
    rows, columns = (hidden, features) if transpose_rhs else (features, hidden)
    common = grouped_gemm.common_sizes(layout.capacity, columns, rows, layout.num_local_experts)
    return gemm_structs.WeightGradient(**common, store_parts=parts, tma_store=stores_by_descriptor(), tile=tile)


def _matrices(w: Array, product: gemm_structs.GroupedGemm) -> Descriptor:
    """The experts' matrices in the blocks of a tile."""
    tile = product.tile
    return Descriptor(w, (1, *((tile.block_n, tile.block_k) if product.transposed else (tile.block_k, tile.block_n))))


def grouped_gemm_combine_with_weight_gradient(
    options: Options,
    h: Array,
    row_weights: Array | None,
    w: Array,
    saved: Array,
    handle: Handle,
    *,
    transpose_rhs: bool,
    saved_as: str,
    mode: str,
    products: GroupedGemm,
) -> tuple[Array, Array | None, Array]:
    """`grouped_gemm_combine` and `weight_gradient` of the same rows.

    Saved tokens of the rows in use are copied into expert order first, by a launch of its own.

    Args:
      options: of the call.
      h: `[R, F]`.
      row_weights: `[R]`, or None.
      w: `[L, F, H]`, or `[L, H, F]` with `transpose_rhs`.
      saved: from `dispatch_grouped_gemm`.
      handle: of this implementation.
      transpose_rhs: contract with the last axis of w.
      saved_as: "tokens" or "rows".
      mode: "scatter": one launch for all; "serial": a GEMM, then one launch for its combine and the gradient.
      products: the implementation of that GEMM.

    Returns:
      `[T, H]` sums, the `[T, K]` slots of row_weights or None, and the gradient in the shape of w: per local expert,
      rows of h times tokens, or tokens times rows with `transpose_rhs`; zero for experts without rows.
    """
    tokens = saved if saved_as == "rows" else gather_rows(saved, row_tokens(handle), handle.group_sizes)
    if mode == "scatter":
        run = _scatter_beside_gradient
    else:
        run = partial(_combine_beside_gradient, products=products)
    sums, slot_weights, gradient = run(options, h, row_weights, w, tokens, handle, transpose_rhs)
    return sums.out_ptr, slot_weights, gradient


def _scatter_beside_gradient(
    options: Options,
    h: Array,
    row_weights: Array | None,
    w: Array,
    tokens: Array,
    handle: Handle,
    transpose_rhs: bool,
) -> tuple[Sums, Array | None, Array]:
    widths = h.shape[1], tokens.shape[1]
    gradient_sizes = scattered_gradient_sizes(handle.layout, *widths, transpose_rhs)
    config, sizes = gemm_combine_sizes(handle.layout, *widths, transpose_rhs, gradient_sizes)
    operands, results, constants = _scatter_arguments(options, h, row_weights, w, handle, None, config, sizes)
    factors, gradient = _gradient_arguments(h, w, tokens, gradient_sizes, transpose_rhs)
    operands, results = (*operands, factors), (*results, gradient)
    sums, *slot_weights, found = launch(_GEMM_COMBINE, operands, results, config, constants, group=group_of(handle))
    return sums, next(iter(slot_weights), None), found


def _combine_beside_gradient(
    options: Options,
    h: Array,
    row_weights: Array | None,
    w: Array,
    tokens: Array,
    handle: Handle,
    transpose_rhs: bool,
    *,
    products: GroupedGemm,
) -> tuple[Sums, Array | None, Array]:
    layout, hidden = handle.layout, tokens.shape[1]
    schedule = backward_schedule(options.schedule, layout, h.shape[1], hidden, h.dtype)
    y = products.grouped_gemm(h, w, handle.group_sizes, transpose_rhs=transpose_rhs, out_dtype=h.dtype)
    config, sizes = combine_with_weight_gradient_sizes(schedule, layout, h.shape[1], hidden, h.dtype, transpose_rhs)
    factors, gradient = _gradient_arguments(h, w, tokens, sizes.gradient, transpose_rhs)
    taken, given, constants = weight_arguments(row_weights, (layout.num_tokens, layout.top_k))
    context.reserve("combine", sizes.combine.weights_offset + sum(map(num_bytes, given)))
    sums = sum_results((layout.num_tokens, hidden), h.dtype, config, sizes.combine.tile.list_length)
    constants |= {"S": sizes, "OPERATION": int(ffi.Operation.GROUPED_GEMM_COMBINE)}
    operands: tuple[Argument, ...] = (y, *taken, _arrays_of(handle), factors)
    results: tuple[Argument, ...] = (sums, *given, gradient)
    launched = launch(_COMBINE_WITH_WEIGHT_GRADIENT, operands, results, config, constants, group=group_of(handle))
    sums, *slot_weights, found = launched
    return sums, next(iter(slot_weights), None), found


def combine_with_weight_gradient_sizes(
    schedule: Schedule, layout: Layout, features: int, hidden: int, dtype: jnp.dtype, transpose_rhs: bool
) -> tuple[Config, structs.CombineWithWeightGradient]:
    """Config and sizes of combine beside the gradient of `[features, hidden]` matrices, for sums of `dtype`."""
    programs = schedule.num_summing_programs or (BESIDE if jax.default_backend() != "cpu" else 1)
    _, combine_tile = combine_config(
        dataclasses.replace(schedule, num_combining_programs=programs), layout, hidden, dtype
    )
    value_bytes = layout.num_ranks * layout.num_tokens * hidden * _ITEM_BYTES
    combine = Combine(
        num_tokens=layout.num_tokens,
        top_k=layout.top_k,
        hidden=hidden,
        num_local_experts=layout.num_local_experts,
        num_experts=layout.num_experts,
        scales_offset=value_bytes,
        weights_offset=value_bytes,
        fp8=False,
        tile=combine_tile,
    )
    tiles = grouped_gemm.weight_tiles(dtype.itemsize)
    tile = gemm_structs.WeightGradientTile(tiles.block_m, tiles.block_n, tiles.block_r, tiles.group_m, tiles.num_stages)
    gradient = _gradient_sizes(layout, features, hidden, transpose_rhs, tile, tiles.store_parts)
    config = Config(grid.all_programs(tiles.programs), num_warps=tiles.num_warps)
    return config, structs.CombineWithWeightGradient(programs, tiles_per_task=4, combine=combine, gradient=gradient)


def _gradient_arguments(
    h: Array, w: Array, tokens: Array, sizes: gemm_structs.WeightGradient, transpose_rhs: bool
) -> tuple[gemm_structs.WeightGradientOperands, Descriptor | jax.ShapeDtypeStruct]:
    """Both factors of the gradient of w, and the gradient itself."""
    left, right = (tokens, h) if transpose_rhs else (h, tokens)
    tile = sizes.tile
    factors = gemm_structs.WeightGradientOperands(
        Descriptor(left, (tile.block_rows, tile.block_m), bounded=True),
        Descriptor(right, (tile.block_rows, tile.block_n), bounded=True),
    )
    gradient = jax.ShapeDtypeStruct(w.shape, h.dtype)
    return factors, Descriptor(
        gradient, (1, tile.block_m, tile.block_n // sizes.store_parts)
    ) if sizes.tma_store else gradient


def weight_gradient(
    saved: Array, rows: Array, handle: Handle, *, transpose: bool, saved_as: str, products: GroupedGemm
) -> Array:
    """Per local expert, dispatched tokens times rows, in a launch of its own.

    Tokens that were saved as "tokens" are copied into expert order first, in one pass: products that read them where
    they lie were slower by more than that (docs/design/grouped_gemm.md).

    Args:
      saved: from `dispatch_grouped_gemm`.
      rows: `[R, N]`.
      handle: of this implementation.
      transpose: rows first.
      saved_as: "tokens" or "rows".
      products: the implementation of the grouped GEMM.

    Returns:
      `[L, H, N]`, or `[L, N, H]` with `transpose`; zero for experts without rows.
    """
    tokens = saved if saved_as == "rows" else gather_rows(saved, row_tokens(handle), handle.group_sizes)
    lhs, rhs = (rows, tokens) if transpose else (tokens, rows)
    return products.weight_gradient(lhs, rhs, handle.group_sizes, out_dtype=saved.dtype)
