"""The plan of an exchange: every rank learns the ids of all, and derives the rows of its own experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ep import context, ffi
from jax_ep import layout as rows
from jax_ep.collectives import Axis
from jax_ep.kernel import Config, Kernel
from jax_ep.megakernels import tuning
from jax_ep.megakernels.heap_launch import group_on, launch_on_heap
from jax_ep.megakernels.kernels.structs import Plan, PlanScratch
from jax_ep.megakernels.small_exchange import all_gather_i32
from jax_ep.mesh_axes import varying_axes
from jax_ep.types import Array, Handle, Layout

_PLAN = Kernel("plan", "plan")
# The kernel keeps a slot's local expert and its position in its block in one word (kernels/plan.py).
MOST_EXPERTS, MOST_POSITIONS = 1 << 10, 1 << 20


def plan(topk_idx: Array, layout: Layout, axis: Axis) -> Handle:
    """`[T, K]` ids of this rank to the handle, whose `group` tells kernels the devices of the ranks."""
    group = group_on(axis, varying_axes(topk_idx))
    config, sizes = tuning.plan(layout)
    if layout.num_local_experts <= MOST_EXPERTS and sizes.tile.BLOCK <= MOST_POSITIONS:
        return _plan_in_one_launch(topk_idx, layout, group, config, sizes)
    # Beyond that each block would count thousands of experts: sorting, which knows no experts, is better.
    ids = all_gather_i32(topk_idx.reshape(-1), group)
    num_invalid = rows.count_invalid(topk_idx, layout.num_experts)
    ids = ids.reshape(layout.num_ranks, *topk_idx.shape)
    return rows.make_handle(ids, group[-1], num_invalid, layout, group)


def _plan_in_one_launch(topk_idx: Array, layout: Layout, group: Array, config: Config, sizes: Plan) -> Handle:
    """The same by one kernel."""
    context.reserve("dispatch", layout.num_ranks * rows.round_up(sizes.N, 32) * 4)
    per_slot = (layout.num_ranks, layout.num_tokens, layout.top_k)
    source_blocks = -(-sizes.N // sizes.tile.BLOCK)
    shapes = ((layout.capacity,), per_slot, (layout.num_local_experts,), per_slot, (), ())
    scratch = PlanScratch(
        *map(_int32, (per_slot, (layout.num_ranks * source_blocks, sizes.tile.BINS), (source_blocks,)))
    )
    results = (*map(_int32, shapes), scratch)
    constants = {"S": sizes, "OPERATION": int(ffi.Operation.DISPATCH)}
    row_slot, slot_row, group_sizes, ids, num_invalid, num_dropped, _ = launch_on_heap(
        _PLAN, (topk_idx.reshape(-1),), group, results, config, constants
    )
    return Handle(row_slot, slot_row, group_sizes, ids, group, num_invalid, num_dropped, layout)


def _int32(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
