"""The backward pass of dispatch + GEMM with the gradient of the matrices in the launch of its exchange.

Two launches have it: GEMM + combine, whose programs multiply for the gradient where they have no more rows to send; and
combine alone, behind a product by the fastest kernel there is, most of whose programs multiply for the gradient.
"""

from __future__ import annotations

import jax
from jax.typing import DTypeLike

from jax_ep import context, ffi
from jax_ep.kernel import BOUND, Descriptor, Kernel
from jax_ep.layout import row_tokens
from jax_ep.megakernels import fused, mode_times, tuning
from jax_ep.megakernels.heap_launch import group_of, launch_on_heap
from jax_ep.megakernels.kernels.structs import Combine, CombineTile
from jax_ep.megakernels.products import grouped_gemm
from jax_ep.megakernels.rows import gather_rows
from jax_ep.types import Array, Handle, Layout

COMBINE_PRODUCTS = Kernel("combine_products", "combine_products")
_MODES = ("scatter", "serial")
"""Of GEMM + combine, those that have such a launch."""


def fuses_products(
    layout: Layout, dtype: DTypeLike, features: int, hidden: int, *, mode: str | None, wanted: bool | None
) -> bool:
    """Whether `gemm_combine_products` is to serve a call, instead of `gemm_combine` and `token_products`.

    Args:
      layout: static sizes.
      dtype: of the tokens.
      features: F, the depth of the product.
      hidden: H, its columns.
      mode: of GEMM + combine; "reduce" has no such launch.
      wanted: True: wherever the launch can; False: nowhere; None: where it should be faster, too.
    """
    can = mode in (None, *_MODES) and fused.fuses(layout, dtype, features, hidden) and layout.capacity <= BOUND
    if not can or wanted is not None:
        return can and bool(wanted)
    return _is_faster(layout, features, hidden, mode)


def _is_faster(layout: Layout, features: int, hidden: int, mode: str | None) -> bool:
    if jax.default_backend() == "cpu":
        return False  # nothing runs beside anything in the interpreter
    times = mode_times.backward_times(layout, features, hidden)
    fastest = min(times.beside[name] for name in _MODES if mode in (None, name))
    apart = min(times.apart.values()) if mode is None else times.apart[mode]
    return 1.01 * fastest < apart  # simpler is better, up to a hundredth


def gemm_combine_products(
    h: Array, w: Array, kept: Array, handle: Handle, *, transpose_rhs: bool, mode: str | None, kept_as: str
) -> tuple[Array, Array]:
    """`gemm_combine` and `token_products` of the same rows.

    Kept tokens of the rows in use are copied into expert order first, by a launch of its own.

    Args:
      h: `[R, F]`.
      w: `[L, F, H]`, or `[L, H, F]` with `transpose_rhs`.
      kept: from `dispatch_gemm`.
      handle: of this implementation.
      transpose_rhs: contract with the last axis of w.
      mode: "scatter": one launch for all, as `gemm_combine` of this mode has it; "serial": a product, then one launch
        for its combine and the gradient; None: what should be faster.
      kept_as: "tokens" or "rows".

    Returns:
      `[T, H]` sums, and the products in the shape of w: per local expert, rows of h times tokens, or tokens times rows
      with `transpose_rhs`; zero for experts without rows.
    """
    tokens = kept if kept_as == "rows" else gather_rows(kept, row_tokens(handle), handle.group_sizes)
    if mode is None:
        times = mode_times.backward_times(handle.layout, h.shape[1], tokens.shape[1]).beside
        mode = min(_MODES, key=lambda name: times[name])
    run = _scatter_products if mode == "scatter" else _combine_products
    return run(h, w, tokens, handle, transpose_rhs)


def _scatter_products(h: Array, w: Array, tokens: Array, handle: Handle, transpose_rhs: bool) -> tuple[Array, Array]:
    config, blocks = tuning.gemm_combine_products(handle.layout, *w.shape[1:], transpose_rhs=transpose_rhs)
    operands, results, constants = fused.scatter_arguments(h, w, handle, config, blocks, transpose_rhs)
    factors, products = _gradient_arguments(h, w, tokens, blocks, transpose_rhs)
    operands, group = (*operands, *factors), group_of(handle)
    sums, _, gradient = launch_on_heap(fused.GEMM_COMBINE, operands, group, (*results, products), config, constants)
    return sums, gradient


def _combine_products(h: Array, w: Array, tokens: Array, handle: Handle, transpose_rhs: bool) -> tuple[Array, Array]:
    layout, hidden = handle.layout, tokens.shape[1]
    y = grouped_gemm(h, w, handle.group_sizes, transpose_rhs=transpose_rhs, out_dtype=h.dtype)
    config, tile, blocks = tuning.combine_products(layout, hidden, h.dtype)
    factors, products = _gradient_arguments(h, w, tokens, blocks, transpose_rhs)
    context.reserve("combine", layout.num_ranks * layout.num_tokens * hidden * h.dtype.itemsize)
    sums = jax.ShapeDtypeStruct((layout.num_tokens, hidden), h.dtype)
    lists = jax.ShapeDtypeStruct((config.num_programs, 2, tile.LENGTH), handle.ids.dtype)
    sizes = {
        "R": layout.capacity,
        "BLOCK_L": fused.sizes_of(handle)["BLOCK_L"],
        "ROWS": w.shape[1],
        "COLUMNS": w.shape[2],
    }
    constants = sizes | {"COMBINE": unquantized_sums(layout, hidden, tile), **blocks}
    constants["OPERATION"] = int(ffi.Operation.GROUPED_GEMM_COMBINE)
    operands = (y, handle.ids, handle.slot_row, handle.group_sizes, *factors)
    results = (sums, lists, products)
    found = launch_on_heap(COMBINE_PRODUCTS, operands, group_of(handle), results, config, constants)
    return found[0], found[2]


def unquantized_sums(layout: Layout, hidden: int, tile: CombineTile) -> Combine:
    """The sizes of combine where sums travel as they are."""
    local, experts = layout.num_local_experts, layout.num_experts
    return Combine(layout.num_tokens, layout.top_k, hidden, local, experts, SCALES=0, FP8=False, tile=tile)


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
