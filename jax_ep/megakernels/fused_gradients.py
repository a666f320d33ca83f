"""The backward pass of dispatch + GEMM in one launch: GEMM + combine, and the gradient of the matrices."""

from __future__ import annotations

import jax
from jax.typing import DTypeLike

from jax_ep.kernel import BOUND, Descriptor
from jax_ep.layout import row_tokens
from jax_ep.megakernels import fused, mode_times, tuning
from jax_ep.megakernels.heap_launch import group_of, launch_on_heap
from jax_ep.megakernels.rows import gather_rows
from jax_ep.types import Array, Handle, Layout


def fuses_products(
    layout: Layout, dtype: DTypeLike, features: int, hidden: int, *, mode: str | None, wanted: bool | None
) -> bool:
    """Whether `gemm_combine_products` is to serve a call, instead of `gemm_combine` and `token_products`.

    Args:
      layout: static sizes.
      dtype: of the tokens.
      features: F, the depth of the product.
      hidden: H, its columns.
      mode: of GEMM + combine; the launch scatters, and serves no other by name.
      wanted: True: wherever the launch can; False: nowhere; None: where it should be faster, too.
    """
    can = mode in (None, "scatter") and fused.fuses(layout, dtype, features, hidden) and layout.capacity <= BOUND
    if not can or wanted is not None:
        return can and bool(wanted)
    return _is_faster(layout, features, hidden, mode)


def _is_faster(layout: Layout, features: int, hidden: int, mode: str | None) -> bool:
    if jax.default_backend() == "cpu":
        return False  # nothing runs beside anything in the interpreter
    times = mode_times.backward_times(layout, features, hidden, mode)
    return 1.01 * times["one launch"] < times["parts"]  # simpler is better, up to a hundredth


def gemm_combine_products(
    h: Array, w: Array, kept: Array, handle: Handle, *, transpose_rhs: bool
) -> tuple[Array, Array]:
    """`gemm_combine` in mode "scatter" and `token_products` of the same rows.

    The kept tokens of the rows in use are copied into expert order first, by a launch of its own.

    Args:
      h: `[R, F]`.
      w: `[L, F, H]`, or `[L, H, F]` with `transpose_rhs`.
      kept: `[W * T, H]` from `dispatch_gemm`.
      handle: of this implementation.
      transpose_rhs: contract with the last axis of w.

    Returns:
      `[T, H]` sums, and the products in the shape of w: per local expert, rows of h times tokens, or tokens times rows
      with `transpose_rhs`; zero for experts without rows.
    """
    tokens = gather_rows(kept, row_tokens(handle), handle.group_sizes)
    config, blocks = tuning.gemm_combine_products(handle.layout, *w.shape[1:], transpose_rhs=transpose_rhs)
    operands, results, constants = fused.scatter_arguments(h, w, handle, config, blocks, transpose_rhs)
    left, right = (tokens, h) if transpose_rhs else (h, tokens)
    factors = (
        Descriptor(left, (blocks["WEIGHT_R"], blocks["WEIGHT_M"]), bounded=True),
        Descriptor(right, (blocks["WEIGHT_R"], blocks["WEIGHT_N"]), bounded=True),
    )
    stored = (1, blocks["WEIGHT_M"], blocks["WEIGHT_N"] // blocks["WEIGHT_PARTS"])
    products = Descriptor(jax.ShapeDtypeStruct(w.shape, h.dtype), stored)
    operands = (*operands, *factors)
    group = group_of(handle)
    found = launch_on_heap(fused.GEMM_COMBINE, operands, group, (*results, products), config, constants)
    return found[0], found[2]
