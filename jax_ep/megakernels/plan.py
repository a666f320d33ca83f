"""The plan of an exchange: every rank learns the ids of all, and derives the rows of its own experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ep import context, ffi
from jax_ep.core import layout as rows
from jax_ep.core.collectives import Axis
from jax_ep.core.kernel import Config, Kernel
from jax_ep.core.mesh_axes import varying_axes
from jax_ep.megakernels import tuning
from jax_ep.megakernels.heap_launch import group_on, launch_on_heap
from jax_ep.megakernels.words import exchange_words
from jax_ep.types import Array, Handle, Layout

_PLAN = Kernel("plan", "plan")
# The kernel keeps a slot's local expert and its place in its block in one word (kernels/plan.py).
MOST_EXPERTS, MOST_PLACES = 1 << 10, 1 << 20


def plan(topk_idx: Array, layout: Layout, axis: Axis) -> Handle:
    """`[T, K]` ids of this rank to the handle, whose `group` tells kernels the devices of the ranks."""
    group = group_on(axis, varying_axes(topk_idx))
    config, blocks = tuning.plan(layout)
    if layout.num_local_experts <= MOST_EXPERTS and blocks["BLOCK"] <= MOST_PLACES:
        return _plan_in_one_launch(topk_idx, layout, group, config, blocks)
    # Beyond that each block would count thousands of experts: sorting, which knows no experts, is better.
    ids = exchange_words(topk_idx.reshape(-1), group, layout.num_ranks, different=False, after=None)
    num_invalid = rows.count_invalid(topk_idx, layout.num_experts)
    ids = ids.reshape(layout.num_ranks, *topk_idx.shape)
    return rows.make_handle(ids, group[-1], num_invalid, layout, group)


def _plan_in_one_launch(
    topk_idx: Array, layout: Layout, group: Array, config: Config, blocks: dict[str, int]
) -> Handle:
    """The same by one kernel."""
    slots = topk_idx.size
    context.reserve("dispatch", layout.num_ranks * rows.round_up(slots, 32) * 4)
    per_slot = (layout.num_ranks, layout.num_tokens, layout.top_k)
    source_blocks = -(-slots // blocks["BLOCK"])
    scratch = (per_slot, (layout.num_ranks * source_blocks, blocks["BINS"]), (source_blocks,))
    shapes = ((layout.capacity,), per_slot, (layout.num_local_experts,), per_slot, (), (), *scratch)
    constants = {
        "W": layout.num_ranks,
        "N": slots,
        "L": layout.num_local_experts,
        "R": layout.capacity,
        "ALIGNMENT": layout.alignment,
        "OPERATION": int(ffi.Operation.DISPATCH),
        **blocks,
    }
    results = tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
    row_slot, slot_row, sizes, ids, num_invalid, num_dropped, *_ = launch_on_heap(
        _PLAN, (topk_idx.reshape(-1),), group, results, config, constants
    )
    return Handle(row_slot, slot_row, sizes, ids, group, num_invalid, num_dropped, layout)
