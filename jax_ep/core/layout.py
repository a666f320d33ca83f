"""Layout arithmetic in pure JAX: from expert ids to expert-major rows.

One stable sort by expert decides every row, so the same ids always give the same rows. Time and memory depend on the
number of assignments (token, k), and not on the number of experts.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.core.dtypes import accumulation_dtype
from jax_ep.core.mesh_axes import platform
from jax_ep.types import Array, Handle, Layout


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least `least`."""
    return 1 << (max(1, least) - 1).bit_length()


def dropless_capacity(num_slots: int, num_groups: int, alignment: int) -> int:
    """Return the number of rows that hold any routing of `num_slots` assignments to `num_groups` aligned groups."""
    return round_up(num_slots + jax.core.min_dim(num_groups, num_slots) * (alignment - 1), alignment)


class SlotOrder(NamedTuple):
    """Assignments sorted by group: `slots[i]` belongs to `groups[i]`, and group g begins at `starts[g]` (`[G + 1]`)."""

    slots: Array
    groups: Array
    starts: Array

    @property
    def counts(self) -> Array:
        """Number of assignments in each group, `[G]` int32."""
        return jnp.diff(self.starts)

    @property
    def ranks_in_group(self) -> Array:
        """Position of each sorted assignment within its group, `[N]` int32."""
        return jnp.arange(self.slots.shape[0], dtype=jnp.int32) - self.starts[self.groups]


def _count_up(positions: Array, length: int) -> Array:
    """Count the `positions` that are at most i, for each i, `[length]` int32; positions past the end are ignored."""
    return jnp.cumsum(jnp.zeros((length,), jnp.int32).at[positions].add(1, mode="drop"), dtype=jnp.int32)


def sort_by_group(groups: Array, num_groups: int) -> SlotOrder:
    """Sort assignments by their groups `[N]` int32, stably; group `num_groups` means none and comes last."""
    slots = lax.iota(jnp.int32, groups.shape[0])
    sorted_groups, sorted_slots = lax.sort((groups, slots), num_keys=1, is_stable=True)
    return SlotOrder(sorted_slots, sorted_groups, _count_up(groups + 1, num_groups + 1))


def local_groups(topk_idx: Array, first_expert: Array | int, num_groups: int) -> Array:
    """Return ids relative to `first_expert`, flattened to `[N]`, with `num_groups` for other experts."""
    local = topk_idx.reshape(-1) - first_expert
    return jnp.where((local >= 0) & (local < num_groups), local, num_groups)


def count_invalid(topk_idx: Array, num_experts: int) -> Array:
    """Count the ids outside `[0, num_experts)` other than -1, `[]` int32."""
    return jnp.sum((topk_idx < -1) | (topk_idx >= num_experts), dtype=jnp.int32)


class RowMap(NamedTuple):
    """Maps between assignments and rows (-1: none), padded group sizes, and the number of dropped assignments."""

    row_to_assignment: Array
    assignment_to_row: Array
    group_sizes: Array
    dropped: Array


# Jitted for eager callers: one compilation.
@functools.partial(jax.jit, static_argnames=("num_groups", "capacity", "alignment"))
def map_rows(groups: Array, num_groups: int, capacity: int, alignment: int) -> RowMap:
    """Assign a row to every assignment: groups in order, each padded to `alignment`, within `capacity` rows.

    Args:
      groups: `[N]` int32 group of each assignment, `num_groups` for none.
      num_groups: G.
      capacity: R; assignments whose row would lie past it are dropped.
      alignment: each group starts at a multiple of it.

    Returns:
      `row_to_assignment [R]`, `assignment_to_row [N]`, `group_sizes [G]`, `dropped []`, all int32.
    """
    order = sort_by_group(groups, num_groups)
    ends = jnp.cumsum(-(-order.counts // alignment) * alignment, dtype=jnp.int32)
    offsets = jnp.concatenate([jnp.zeros_like(ends[:1]), ends])
    rows = offsets[order.groups] + order.ranks_in_group
    kept = (order.groups < num_groups) & (rows < capacity)
    rows = jnp.where(kept, rows, capacity)
    row_to_assignment = (
        jnp.full_like(rows, -1, shape=(capacity,)).at[rows].set(order.slots, mode="drop", unique_indices=False)
    )
    assignment_to_row = jnp.full_like(rows, -1).at[order.slots].set(jnp.where(kept, rows, -1), unique_indices=True)
    dropped = order.starts[num_groups] - jnp.sum(kept, dtype=jnp.int32)
    return RowMap(row_to_assignment, assignment_to_row, jnp.diff(jnp.minimum(offsets, capacity)), dropped)


class SortSizes(NamedTuple):
    """Static sizes of a sort by expert: the first local expert, the number of local experts, and rows of a block."""

    first_expert: int
    num_local_experts: int
    block_size: int


def make_handle(
    ids: Array, rank: Array | int, num_invalid: Array, layout: Layout, group: Array | None = None
) -> Handle:
    """Build the handle of one rank from the ids `[W, T, K]` of all ranks; `num_invalid` and `group` are put in it."""
    num_local = layout.num_local_experts
    groups = local_groups(ids, rank * num_local, num_local)
    rows = map_rows(groups, num_local, layout.capacity, layout.alignment)
    assignment_to_row = rows.assignment_to_row.reshape(ids.shape)
    return Handle(
        rows.row_to_assignment, assignment_to_row, rows.group_sizes, ids, group, num_invalid, rows.dropped, layout
    )


def layout_by_assignment(layout: Layout) -> Layout:
    """Return the layout of the same rows in which each assignment is a token with one expert."""
    return dataclasses.replace(layout, num_tokens=layout.num_tokens * layout.top_k, top_k=1)


def handle_by_assignment(handle: Handle) -> Handle:
    """Return the handle of the same rows in which each assignment is a token with one expert."""
    layout = layout_by_assignment(handle.layout)
    rows, ids = (a.reshape(layout.num_ranks, -1, 1) for a in (handle.assignment_to_row, handle.topk_idx))
    return dataclasses.replace(handle, assignment_to_row=rows, topk_idx=ids, layout=layout)


def block_owners(group_sizes: Array, num_blocks: int, block_size: int) -> Array:
    """Return the group of each block of rows, `[num_blocks]` int32, for groups of whole blocks; -1 past them."""
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    # A block belongs to the first group that ends after it begins.
    owner = _count_up(ends // block_size, num_blocks)
    return jnp.where(jnp.arange(num_blocks, dtype=jnp.int32) < ends[-1] // block_size, owner, -1)


def row_groups(group_sizes: Array, num_rows: int) -> Array:
    """Return the group of each row, `[R]` int32, -1 past the groups. Negative sizes are empty groups."""
    ends = jnp.cumsum(jnp.clip(group_sizes, 0, num_rows), dtype=jnp.int32)
    groups = _count_up(ends, num_rows)
    return jnp.where(groups < group_sizes.shape[0], groups, -1)


def row_tokens(handle: Handle) -> Array:
    """Return `source_rank * T + token` of each row, `[R]` int32; -1 for padding."""
    return jnp.where(handle.row_to_assignment < 0, -1, handle.row_to_assignment // handle.layout.top_k)


def gather_rows(source: Array, index: Array) -> Array:
    """Return `source[index]` along the first axis, with zeros where `index` is -1."""
    if source.shape[0] == 0:  # Every index is -1.
        return jnp.zeros_like(source, shape=(*index.shape, *source.shape[1:]))
    in_range = jnp.where(index < 0, source.shape[0], index)
    return source.at[in_range].get(mode="fill", fill_value=0)


class Bias(NamedTuple):
    """A bias per group, optionally scaled per row, that is added to the rows of a grouped GEMM."""

    values: Array  # `[G, N]`
    scales: Array | None = None  # `[R]` factor of each row, or None


def add_bias(rows: Array, bias: Bias, group_sizes: Array) -> Array:
    """Add the bias to rows `[R, N]` with one more rounding; rows past the groups stay unchanged."""
    wide = rows.astype(accumulation_dtype(rows.dtype))
    return (wide + bias_rows(bias, group_sizes, rows.shape[0], wide.dtype)).astype(rows.dtype)


def add_bias_of_blocks(blocks: Array, values: Array) -> Array:
    """Add bias `[G, N]` to blocks of rows `[G, M, N]`, with one more rounding."""
    wide = accumulation_dtype(blocks.dtype)
    return (blocks.astype(wide) + values.astype(wide)[:, None, :]).astype(blocks.dtype)


def bias_rows(bias: Bias, group_sizes: Array, num_rows: int, dtype: jnp.dtype) -> Array:
    """Expand the bias to `[R, N]`, with zeros past the groups."""
    groups = row_groups(group_sizes, num_rows)
    rows = gather_rows(bias.values.astype(dtype), groups)
    if bias.scales is None:
        return rows
    # The scale of a row past the groups is undefined.
    scaled = rows * jnp.where(groups < 0, 0, bias.scales.astype(dtype))[:, None]
    # On the CPU, XLA merges this product and the sum that follows into one rounding, in some programs only.
    return lax.optimization_barrier(scaled) if platform() == "cpu" else scaled


def repeat(x: Array, times: int, *, axis: int) -> Array:
    """Repeat each element along an axis, also on explicit mesh axes, where `jnp.repeat` would need a sharding."""
    axis %= x.ndim
    before, (size, *after) = x.shape[:axis], x.shape[axis:]
    each = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), (*before, size, times, *after))
    return each.reshape(*before, size * times, *after)


def count_assignments(topk_idx: Array, num_experts: int) -> Array:
    """Count assignments per expert, `[E]` int32, by comparisons: GPUs serialize a scatter."""
    hits = topk_idx.reshape(-1, 1) == jnp.arange(num_experts, dtype=topk_idx.dtype)[None]
    return hits.sum(axis=0, dtype=jnp.int32)
