"""Exchange and grouped GEMM, in one launch or in two: dispatch + GEMM, and GEMM + combine."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep import context, ffi
from jax_ep.kernel import Config, Descriptor, Kernel
from jax_ep.layout import dropless_capacity, power_of_two, row_tokens
from jax_ep.megakernels import gemm_tuning, mode_times, tuning
from jax_ep.megakernels.exchange import return_tokens, send_tokens
from jax_ep.megakernels.heap_launch import group_of, launch_on_heap
from jax_ep.megakernels.products import gathered_gemm_weights, grouped_gemm, grouped_gemm_weights
from jax_ep.megakernels.rows import gather_rows
from jax_ep.megakernels.schedule import send_schedule
from jax_ep.types import Array, Handle, Layout

_DISPATCH_GEMM = Kernel("dispatch_gemm", "dispatch_gemm")
GEMM_COMBINE = Kernel("gemm_combine", "gemm_combine")
_GEMM_REDUCE = Kernel("gemm_reduce", "gemm_reduce")

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
    few_groups = layout.num_local_experts <= gemm_tuning.MAX_GROUPS
    return dtype in (jnp.bfloat16, jnp.float16) and whole_words and few_groups and gemm_tuning.has_tma()


def dispatch_gemm(
    x: Array,
    w: Array,
    handle: Handle,
    *,
    transpose_rhs: bool,
    keep: str | None,
    num_communicating: int | None = None,
    mode: str | None = None,
) -> tuple[Array, Array | None]:
    """Tokens to the ranks of their experts, and there times the experts' matrices.

    Args:
      x: `[T, H]`.
      w: `[L, H, N]`, or `[L, N, H]` with `transpose_rhs`.
      handle: of this implementation.
      transpose_rhs: contract with the last axis of w.
      keep: also return the tokens that arrived, as "tokens" or as "rows"; or None.
      num_communicating: programs that send tokens before they multiply; None: what was fastest.
      mode: one of `DISPATCH_MODES`; None: what should be faster.

    Returns:
      `[R, N]`, zero in padding rows; and the tokens that have an expert here, "tokens": `[W * T, H]` by source rank and
      token; "rows": `[R, H]`; both of unspecified value elsewhere. Else None.
    """
    columns = w.shape[1 if transpose_rhs else 2]
    mode = mode or mode_times.dispatch_mode(handle.layout, x.shape[1], columns, keep)
    if mode == "serial":
        return _dispatch_then_gemm(x, w, handle, transpose_rhs, keep)
    rows, kept = _fused_dispatch_gemm(x, w, handle, columns, transpose_rhs, keep is not None, num_communicating)
    if keep == "rows":
        kept = gather_rows(kept, row_tokens(handle), handle.group_sizes)
    return rows, None if keep is None else kept


def _dispatch_then_gemm(
    x: Array, w: Array, handle: Handle, transpose_rhs: bool, keep: str | None
) -> tuple[Array, Array | None]:
    """Two launches, and one that copies a row of each token where tokens are to be kept."""
    layout = handle.layout
    # Only rows between groups must be zero: a product reads none past them.
    rows = send_tokens(x, handle, (), None, clear=layout.alignment > 1)
    hidden = grouped_gemm(rows, w, handle.group_sizes, transpose_rhs=transpose_rhs, out_dtype=x.dtype)
    if keep != "tokens":
        return hidden, rows if keep == "rows" else None
    a_row = jnp.max(handle.slot_row.reshape(-1, layout.top_k), axis=1)
    return hidden, gather_rows(rows, a_row, jnp.full((1,), a_row.size, a_row.dtype))


def _fused_dispatch_gemm(
    x: Array,
    w: Array,
    handle: Handle,
    columns: int,
    transpose_rhs: bool,
    keep: bool,
    num_communicating: int | None,
) -> tuple[Array, Array]:
    """One launch; with `keep` also the tokens by source rank and token."""
    layout, hidden = handle.layout, x.shape[1]
    schedule = send_schedule(handle)
    config, blocks = tuning.dispatch_gemm(hidden, columns, num_communicating)
    context.reserve("dispatch_gemm", layout.num_ranks * layout.num_tokens * hidden * x.dtype.itemsize)
    kept_shape = (layout.num_ranks * layout.num_tokens if keep else 1, hidden)
    results = (
        jax.ShapeDtypeStruct((layout.capacity, columns), x.dtype),
        jax.ShapeDtypeStruct(kept_shape, x.dtype),
    )
    constants = {"H": hidden, "N": columns, "R": layout.capacity, "TRANSPOSED": transpose_rhs, "KEEP": keep}
    operands = (x, _matrices(w, blocks, transpose_rhs), handle.ids, handle.row_slot, handle.group_sizes, *schedule)
    constants |= sizes_of(handle) | {"OPERATION": int(ffi.Operation.DISPATCH_GROUPED_GEMM), **blocks}
    hidden_rows, kept = launch_on_heap(_DISPATCH_GEMM, operands, group_of(handle), results, config, constants)
    return hidden_rows, kept


def gemm_combine(h: Array, w: Array, handle: Handle, *, transpose_rhs: bool, mode: str | None) -> Array:
    """Rows times the matrices of their experts, and the unweighted sums of each token's products.

    Args:
      h: `[R, F]`.
      w: `[L, F, H]`, or `[L, H, F]` with `transpose_rhs`.
      handle: of this implementation.
      transpose_rhs: contract with the last axis of w.
      mode: one of `COMBINE_MODES`; None: what should be fastest.

    Returns:
      `[T, H]`.
    """
    hidden = w.shape[1 if transpose_rhs else 2]
    mode = mode or mode_times.combine_mode(handle.layout, h.shape[1], hidden)
    if mode == "serial":
        y = grouped_gemm(h, w, handle.group_sizes, transpose_rhs=transpose_rhs, out_dtype=h.dtype)
        return return_tokens(y, handle, (), None)
    run = _gemm_reduce if mode == "reduce" else _gemm_scatter
    return run(h, w, handle, hidden, transpose_rhs)


def _gemm_scatter(h: Array, w: Array, handle: Handle, hidden: int, transpose_rhs: bool) -> Array:
    """One launch: each row travels to its source, which adds those of a token."""
    config, blocks = tuning.gemm_combine(handle.layout, hidden)
    operands, results, constants = scatter_arguments(h, w, handle, config, blocks, transpose_rhs)
    constants |= _NO_GRADIENT
    return launch_on_heap(GEMM_COMBINE, operands, group_of(handle), results, config, constants)[0]


def scatter_arguments(
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


def _gemm_reduce(h: Array, w: Array, handle: Handle, hidden: int, transpose_rhs: bool) -> Array:
    """One launch: the rows of a token are added on each expert rank, and their sums at the source."""
    layout, features = handle.layout, h.shape[1]
    config, blocks = tuning.gemm_reduce(layout, features, hidden)
    context.reserve("gemm_reduce", layout.num_ranks * layout.num_tokens * hidden * h.dtype.itemsize)
    shapes = (layout.num_tokens, hidden), (layout.capacity, hidden)
    results = tuple(jax.ShapeDtypeStruct(shape, h.dtype) for shape in shapes)
    constants = {"F": features, "H": hidden, "R": layout.capacity, "TRANSPOSED": transpose_rhs}
    matrices, lines = _matrices(w, blocks, transpose_rhs), Descriptor(h, (blocks["BM"], blocks["BK"]))
    operands = (lines, matrices, handle.ids, handle.slot_row, handle.group_sizes)
    constants |= sizes_of(handle) | {"OPERATION": int(ffi.Operation.GROUPED_GEMM_COMBINE), **blocks}
    return launch_on_heap(_GEMM_REDUCE, operands, group_of(handle), results, config, constants)[0]


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


def token_products(kept: Array, rows: Array, handle: Handle, *, transpose: bool, kept_as: str) -> Array:
    """Weight gradients: per local expert, dispatched tokens times rows.

    Args:
      kept: from `dispatch_gemm`.
      rows: `[R, N]`.
      handle: of this implementation.
      transpose: rows first.
      kept_as: "tokens" or "rows".

    Returns:
      `[L, H, N]`, or `[L, N, H]` with `transpose`; zero for experts without rows.
    """
    if kept_as == "rows":
        lhs, rhs = (rows, kept) if transpose else (kept, rows)
        return grouped_gemm_weights(lhs, rhs, handle.group_sizes, out_dtype=kept.dtype)
    return gathered_gemm_weights(
        kept, row_tokens(handle), rows, handle.group_sizes, transpose=transpose, out_dtype=kept.dtype
    )
