"""The plan of an exchange: every rank learns the ids of all, and derives the rows of its own experts."""

from __future__ import annotations

from jax_ep import layout as rows
from jax_ep.collectives import Axis
from jax_ep.megakernels.heap_launch import group_on
from jax_ep.megakernels.words import exchange_words
from jax_ep.mesh_axes import varying_axes
from jax_ep.types import Array, Handle, Layout


def plan(topk_idx: Array, layout: Layout, axis: Axis) -> Handle:
    """`[T, K]` ids of this rank to the handle, whose `group` tells kernels the devices of the ranks."""
    group = group_on(axis, varying_axes(topk_idx))
    ids = exchange_words(topk_idx.reshape(-1), group, layout.num_ranks, different=False, after=None)
    num_invalid = rows.count_invalid(topk_idx, layout.num_experts)
    return rows.make_handle(ids.reshape(-1, *topk_idx.shape), group[-1], num_invalid, layout, group)
