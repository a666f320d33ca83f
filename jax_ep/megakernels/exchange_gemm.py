"""Exchange and grouped GEMM, in one launch or in two: dispatch + GEMM, and GEMM + combine.

Launches of their own for products are by the fastest kernel there is, which may be that of `pallas`. In the backward
pass of dispatch + GEMM the gradient of the matrices may be in the launch of its exchange. Two launches have it: GEMM +
combine, whose programs multiply for the gradient where they have no more rows to send; and combine alone, behind a
product, most of whose programs multiply for the gradient.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep import context, ffi
from jax_ep.core import layout as rows_of
from jax_ep.core.kernel import BOUND, Config, Descriptor, Kernel
from jax_ep.core.layout import dropless_capacity, power_of_two, row_tokens
from jax_ep.megakernels import cost_model, grouped_gemm, tuning
from jax_ep.megakernels.capability import has_tma
from jax_ep.megakernels.exchange import combine_tokens, dispatch_tokens
from jax_ep.megakernels.kernels.structs import Combine, CombineTile
from jax_ep.megakernels.launch import group_of, launch
from jax_ep.megakernels.rows import gather_rows
from jax_ep.megakernels.send_order import order_sends
from jax_ep.types import COMBINE_MODES, Array, Handle, Layout, Options, Schedule

_DISPATCH_GEMM = Kernel("dispatch_gemm", "dispatch_gemm")
_GEMM_COMBINE = Kernel("gemm_combine", "gemm_combine")
_COMBINE_PRODUCTS = Kernel("combine_products", "combine_products")

_NO_GRADIENT = dict.fromkeys(
    ("lhs", "rhs", "products", *(f"WEIGHT_{name}" for name in ("M", "N", "R", "STAGES", "PARTS")))
)
"""The parameters of GEMM_COMBINE that are for weight gradients, of a launch that makes none."""


def fuses(layout: Layout, dtype: DTypeLike, depth: int, columns: int) -> bool:
    """Whether an exchange and products with `[depth, columns]` matrices go through one launch.

    The tensor cores take 16-bit tokens, descriptors rows of whole 16 bytes, and tiles the shared memory of a Hopper;
    all else runs as two launches.
    """
    whole_words = depth % 8 == 0 and columns % 8 == 0 and min(depth, columns, layout.num_tokens) > 0
    few_groups = layout.num_local_experts <= grouped_gemm.MAX_GROUPS
    return dtype in (jnp.bfloat16, jnp.float16) and whole_words and few_groups and has_tma()


def dispatch_grouped_gemm(
    options: Options, x: Array, w: Array, handle: Handle, *, transpose_rhs: bool, save_as: str | None
) -> tuple[Array, Array | None]:
    """Tokens to the ranks of their experts, and there times the experts' matrices.

    Args:
      options: of the call; the mode is that of its schedule, or what should be faster.
      x: `[T, H]`.
      w: `[L, H, N]`, or `[L, N, H]` with `transpose_rhs`.
      handle: of this implementation.
      transpose_rhs: contract with the last axis of w.
      save_as: also return the tokens that arrived, as "tokens" or as "rows"; or None.

    Returns:
      `[R, N]`, zero in padding rows; and the tokens that have an expert here, "tokens": `[W * T, H]` by source rank and
      token; "rows": `[R, H]`; both of unspecified value elsewhere. Else None.
    """
    columns = w.shape[1 if transpose_rhs else 2]
    mode = options.schedule.dispatch_mode
    if (mode or cost_model.dispatch_mode(handle.layout, x.shape[1], columns, save_as)) == "serial":
        return _dispatch_then_gemm(options, x, w, handle, transpose_rhs, save_as)
    operands, results, config, constants = _dispatch_arguments(options.schedule, x, w, handle, transpose_rhs, save_as)
    hidden, saved = launch(_DISPATCH_GEMM, operands, results, config, constants, group=group_of(handle))
    if save_as == "rows":
        saved = gather_rows(saved, row_tokens(handle), handle.group_sizes)
    return hidden, None if save_as is None else saved


def _dispatch_then_gemm(
    options: Options, x: Array, w: Array, handle: Handle, transpose_rhs: bool, save_as: str | None
) -> tuple[Array, Array | None]:
    """Two launches, and one that copies a row of each token where tokens are to be saved."""
    layout = handle.layout
    # Only rows between groups must be zero: a product reads none past them.
    rows = dispatch_tokens(options, x, handle, clear=layout.alignment > 1)
    hidden = multiply(rows, w, handle.group_sizes, transpose_rhs=transpose_rhs, out_dtype=x.dtype)
    if save_as != "tokens":
        return hidden, rows if save_as == "rows" else None
    a_row = jnp.max(handle.slot_row.reshape(-1, layout.top_k), axis=1)
    return hidden, gather_rows(rows, a_row, jnp.full((1,), a_row.size, a_row.dtype))


def _dispatch_arguments(
    schedule: Schedule, x: Array, w: Array, handle: Handle, transpose_rhs: bool, save_as: str | None
) -> tuple[tuple[Any, ...], tuple[Any, ...], Config, dict[str, Any]]:
    """Of one launch for both, whose second result are the tokens by source rank and token, where they are saved."""
    layout, hidden, columns = handle.layout, x.shape[1], w.shape[1 if transpose_rhs else 2]
    order = order_sends(handle)
    config, blocks = tuning.dispatch_gemm(hidden, columns, schedule.num_communicating_programs)
    context.reserve("dispatch_gemm", layout.num_ranks * layout.num_tokens * hidden * x.dtype.itemsize)
    saved_shape = (1 if save_as is None else layout.num_ranks * layout.num_tokens, hidden)
    results = tuple(jax.ShapeDtypeStruct(shape, x.dtype) for shape in ((layout.capacity, columns), saved_shape))
    constants = {"H": hidden, "N": columns, "R": layout.capacity, "TRANSPOSED": transpose_rhs}
    constants |= {"KEEP": save_as is not None, "OPERATION": int(ffi.Operation.DISPATCH_GROUPED_GEMM)}
    operands = (x, _matrices(w, blocks, transpose_rhs), handle.ids, handle.row_slot, handle.group_sizes, *order)
    return operands, results, config, constants | sizes_of(handle) | blocks


def grouped_gemm_combine(options: Options, h: Array, w: Array, handle: Handle, *, transpose_rhs: bool) -> Array:
    """Rows times the matrices of their experts, and the unweighted sums of each token's products.

    Args:
      options: of the call; the mode is that of its schedule, or what should be fastest.
      h: `[R, F]`.
      w: `[L, F, H]`, or `[L, H, F]` with `transpose_rhs`.
      handle: of this implementation.
      transpose_rhs: contract with the last axis of w.

    Returns:
      `[T, H]`.
    """
    hidden = w.shape[1 if transpose_rhs else 2]
    mode = options.schedule.combine_mode or cost_model.combine_mode(handle.layout, h.shape[1], hidden)
    if mode == "serial":
        y = multiply(h, w, handle.group_sizes, transpose_rhs=transpose_rhs, out_dtype=h.dtype)
        return combine_tokens(options, y, handle)
    config, blocks = tuning.gemm_combine(handle.layout, hidden)
    operands, results, constants = _scatter_arguments(h, w, handle, config, blocks, transpose_rhs)
    constants |= _NO_GRADIENT
    return launch(_GEMM_COMBINE, operands, results, config, constants, group=group_of(handle))[0]


def _scatter_arguments(
    h: Array, w: Array, handle: Handle, config: Config, blocks: dict[str, Any], transpose_rhs: bool
) -> tuple[tuple[Array | Descriptor, ...], tuple[jax.ShapeDtypeStruct, ...], dict[str, Any]]:
    """Operands, results and constants of launches that store each row at its source, where the heap gets room for it.

    The results are the sums and scratch memory.
    """
    layout, features, hidden = handle.layout, h.shape[1], w.shape[1 if transpose_rhs else 2]
    context.reserve("gemm_combine", layout.num_tokens * layout.top_k * hidden * h.dtype.itemsize)
    drops = layout.capacity < dropless_capacity(layout.num_slots, layout.num_local_experts, layout.alignment)
    constants = {"F": features, "H": hidden, "R": layout.capacity, "TRANSPOSED": transpose_rhs, "DROPS": drops}
    matrices, lines = _matrices(w, blocks, transpose_rhs), Descriptor(h, (blocks["BM"], blocks["BK"]))
    operands = (lines, matrices, handle.ids, handle.slot_row, handle.row_slot, handle.group_sizes)
    constants |= sizes_of(handle) | {"OPERATION": int(ffi.Operation.GROUPED_GEMM_COMBINE), **blocks}
    sums = jax.ShapeDtypeStruct((layout.num_tokens, hidden), h.dtype)
    lists = jax.ShapeDtypeStruct((config.num_programs, 2, blocks["SUMS"].LENGTH), jnp.int32)
    return operands, (sums, lists), constants


def _matrices(w: Array, blocks: dict[str, int], transpose_rhs: bool) -> Descriptor:
    """The experts' matrices in the blocks of a tile."""
    block = (blocks["BN"], blocks["BK"]) if transpose_rhs else (blocks["BK"], blocks["BN"])
    return Descriptor(w, (1, *block))


def sizes_of(handle: Handle) -> dict[str, int]:
    """Constants of kernels that exchange rows and know the groups."""
    layout = handle.layout
    return {
        "T": layout.num_tokens,
        "K": layout.top_k,
        "L": layout.num_local_experts,
        "BLOCK_L": max(16, power_of_two(layout.num_local_experts)),
    }


def unquantized_sums(layout: Layout, hidden: int, tile: CombineTile) -> Combine:
    """The sizes of combine where sums travel as they are."""
    local, experts = layout.num_local_experts, layout.num_experts
    return Combine(layout.num_tokens, layout.top_k, hidden, local, experts, SCALES=0, FP8=False, tile=tile)


def fuses_weight_gradient(schedule: Schedule, layout: Layout, dtype: DTypeLike, features: int, hidden: int) -> bool:
    """Whether products and the gradient of their matrices share a launch.

    Args:
      schedule: its `fuse_weight_gradients`: True: wherever the launch can; False: nowhere; None: where it should be
        faster, too.
      layout: static sizes.
      dtype: of the tokens.
      features: F, the depth of the product.
      hidden: H, its columns.
    """
    can, wanted = fuses(layout, dtype, features, hidden) and layout.capacity <= BOUND, schedule.fuse_weight_gradients
    if not can or wanted is not None:
        return can and bool(wanted)
    if jax.default_backend() == "cpu":
        return False  # nothing runs beside anything in the interpreter
    times = cost_model.backward_times(layout, features, hidden)
    modes = COMBINE_MODES if schedule.combine_mode is None else (schedule.combine_mode,)
    apart, fastest = (min(found[name] for name in modes) for found in times)
    return 1.01 * fastest < apart  # simpler is better, up to a hundredth


def grouped_gemm_combine_with_weight_gradient(
    options: Options, h: Array, w: Array, saved: Array, handle: Handle, *, transpose_rhs: bool, saved_as: str
) -> tuple[Array, Array]:
    """`grouped_gemm_combine` and `weight_gradient` of the same rows.

    Saved tokens of the rows in use are copied into expert order first, by a launch of its own.

    Args:
      options: of the call. Its `combine_mode` "scatter": one launch for all, as `grouped_gemm_combine` of this mode has
        it; "serial": a product, then one launch for its combine and the gradient; None: what should be faster.
      h: `[R, F]`.
      w: `[L, F, H]`, or `[L, H, F]` with `transpose_rhs`.
      saved: from `dispatch_grouped_gemm`.
      handle: of this implementation.
      transpose_rhs: contract with the last axis of w.
      saved_as: "tokens" or "rows".

    Returns:
      `[T, H]` sums, and the gradient in the shape of w: per local expert, rows of h times tokens, or tokens times rows
      with `transpose_rhs`; zero for experts without rows.
    """
    tokens = saved if saved_as == "rows" else gather_rows(saved, row_tokens(handle), handle.group_sizes)
    mode = options.schedule.combine_mode
    if mode is None:
        times = cost_model.backward_times(handle.layout, h.shape[1], tokens.shape[1]).beside
        mode = min(COMBINE_MODES, key=lambda name: times[name])
    run = _scatter_beside_gradient if mode == "scatter" else _combine_beside_gradient
    return run(options, h, w, tokens, handle, transpose_rhs)


def _scatter_beside_gradient(
    options: Options, h: Array, w: Array, tokens: Array, handle: Handle, transpose_rhs: bool
) -> tuple[Array, Array]:
    config, blocks = tuning.gemm_combine_products(handle.layout, *w.shape[1:], transpose_rhs=transpose_rhs)
    operands, results, constants = _scatter_arguments(h, w, handle, config, blocks, transpose_rhs)
    factors, products = _gradient_arguments(h, w, tokens, blocks, transpose_rhs)
    operands, results = (*operands, *factors), (*results, products)
    sums, _, gradient = launch(_GEMM_COMBINE, operands, results, config, constants, group=group_of(handle))
    return sums, gradient


def _combine_beside_gradient(
    options: Options, h: Array, w: Array, tokens: Array, handle: Handle, transpose_rhs: bool
) -> tuple[Array, Array]:
    layout, hidden = handle.layout, tokens.shape[1]
    y = multiply(h, w, handle.group_sizes, transpose_rhs=transpose_rhs, out_dtype=h.dtype)
    config, tile, blocks = tuning.combine_products(options.schedule, layout, hidden, h.dtype)
    factors, products = _gradient_arguments(h, w, tokens, blocks, transpose_rhs)
    context.reserve("combine", layout.num_ranks * layout.num_tokens * hidden * h.dtype.itemsize)
    sums = jax.ShapeDtypeStruct((layout.num_tokens, hidden), h.dtype)
    lists = jax.ShapeDtypeStruct((config.num_programs, 2, tile.LENGTH), handle.ids.dtype)
    sizes = {
        "R": layout.capacity,
        "BLOCK_L": sizes_of(handle)["BLOCK_L"],
        "ROWS": w.shape[1],
        "COLUMNS": w.shape[2],
    }
    constants = sizes | {"COMBINE": unquantized_sums(layout, hidden, tile), **blocks}
    constants["OPERATION"] = int(ffi.Operation.GROUPED_GEMM_COMBINE)
    operands = (y, handle.ids, handle.slot_row, handle.group_sizes, *factors)
    results = (sums, lists, products)
    found = launch(_COMBINE_PRODUCTS, operands, results, config, constants, group=group_of(handle))
    return found[0], found[2]


def _gradient_arguments(
    h: Array, w: Array, tokens: Array, blocks: dict[str, int], transpose_rhs: bool
) -> tuple[tuple[Descriptor, Descriptor], Descriptor]:
    """Both factors of the gradient of w, and the gradient itself."""
    left, right = (tokens, h) if transpose_rhs else (h, tokens)
    factors = (
        Descriptor(left, (blocks["WEIGHT_R"], blocks["WEIGHT_M"]), bounded=True),
        Descriptor(right, (blocks["WEIGHT_R"], blocks["WEIGHT_N"]), bounded=True),
    )
    stored = (1, blocks["WEIGHT_M"], blocks["WEIGHT_N"] // blocks["WEIGHT_PARTS"])
    return factors, Descriptor(jax.ShapeDtypeStruct(w.shape, h.dtype), stored)


def weight_gradient(saved: Array, rows: Array, handle: Handle, *, transpose: bool, saved_as: str) -> Array:
    """Per local expert, dispatched tokens times rows, in a launch of its own.

    Args:
      saved: from `dispatch_grouped_gemm`.
      rows: `[R, N]`.
      handle: of this implementation.
      transpose: rows first.
      saved_as: "tokens" or "rows".

    Returns:
      `[L, H, N]`, or `[L, N, H]` with `transpose`; zero for experts without rows.
    """
    options: dict[str, Any] = {"out_dtype": saved.dtype}
    if saved_as == "tokens":
        return gathered_weight_gradient(
            saved, row_tokens(handle), rows, handle.group_sizes, transpose=transpose, **options
        )
    lhs, rhs = (rows, saved) if transpose else (saved, rows)
    return multiply_for_gradient(lhs, rhs, handle.group_sizes, **options)


def multiply(lhs: Array, rhs: Array, group_sizes: Array, *, transpose_rhs: bool, out_dtype: DTypeLike) -> Array:
    """Rows times matrices, see `grouped_gemm.grouped_gemm`, by the fastest kernel there is."""
    num_rows, depth = lhs.shape
    groups, columns = rhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    if cost_model.is_from_pallas(num_rows, depth, columns, groups):
        from jax_ep.pallas.grouped_gemm import grouped_gemm as run

        return run(lhs, rhs, group_sizes, transpose_rhs=transpose_rhs, out_dtype=out_dtype)
    return grouped_gemm.grouped_gemm(lhs, rhs, group_sizes, transpose_rhs=transpose_rhs, out_dtype=out_dtype)


def multiply_for_gradient(lhs: Array, rhs: Array, group_sizes: Array, *, out_dtype: DTypeLike) -> Array:
    """The gradient of the matrices, see `grouped_gemm.weight_gradient`, by the fastest kernel there is."""
    num_rows, depth = lhs.shape
    if cost_model.is_from_pallas(num_rows, depth, rhs.shape[1], group_sizes.shape[0]):
        from jax_ep.pallas.grouped_gemm import weight_gradient as run

        return run(lhs, rhs, group_sizes, out_dtype=out_dtype)
    return grouped_gemm.weight_gradient(lhs, rhs, group_sizes, out_dtype=out_dtype)


def gathered_weight_gradient(
    tokens: Array,
    index: Array,
    rows: Array,
    group_sizes: Array,
    *,
    transpose: bool,
    out_dtype: DTypeLike,
) -> Array:
    """`out[g] = tokens[index of g's rows].T @ rows[rows of g]`, or its transpose.

    The tokens of the rows in use are copied into expert order first, in one pass: products that read them where they
    lie were slower by more than that (docs/design/grouped_gemm.md).

    Args:
      tokens: `[S, H]`, in any order; what no row names may hold anything.
      index: `[M]` int32, the token of each row; -1: zero.
      rows: `[M, N]`.
      group_sizes: `[G]` int32.
      transpose: rows first.
      out_dtype: dtype of the result; sums run in float32 (float64 for float64).

    Returns:
      `[G, H, N]`, or `[G, N, H]` with `transpose`; zero for empty groups.
    """
    if grouped_gemm.has_kernel(rows, tokens, group_sizes, out_dtype):
        gathered = gather_rows(grouped_gemm.pad(tokens, 1), index, group_sizes)[:, : tokens.shape[1]]
    else:
        gathered = rows_of.gather_rows(tokens, index)
    lhs, rhs = (rows, gathered) if transpose else (gathered, rows)
    return multiply_for_gradient(lhs, rhs, group_sizes, out_dtype=out_dtype)
