"""Launches of the kernels that plan a balanced pass and place this rank's assignments."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ep.core.balance import PassPlan
from jax_ep.core.kernel import Config, Kernel
from jax_ep.core.layout import power_of_two
from jax_ep.megakernels.kernels import balance_plan as kernels
from jax_ep.megakernels.kernels.exchange_structs import CountTile, PassSizes, PlaceSizes
from jax_ep.megakernels.launch import int32, launch, num_programs
from jax_ep.types import Array

_PLAN = Kernel(kernels.plan_pass)
_COUNT, _PLACE = Kernel(kernels.count_shares), Kernel(kernels.place_assignments)
_LANES, _MOST_COUNTS = 256, 4096


def plan_pass(counts: Array, rows: int, spare: int) -> PassPlan:
    """Plan a pass in one kernel, with the same result as `plan_pass` of xla/balance_plan.py."""
    num_ranks, num_experts = counts.shape
    sizes = PassSizes(
        num_ranks=num_ranks,
        num_experts=num_experts,
        num_local_experts=num_experts // num_ranks,
        spare=spare,
        rows=rows,
        padded_experts=max(32, power_of_two(num_experts)),
        padded_ranks=max(32, power_of_two(num_ranks)),
        padded_slots=max(32, power_of_two(num_ranks * spare)),
    )
    slots, experts = (jax.ShapeDtypeStruct((num_ranks, n), jnp.int32) for n in (spare, num_experts))
    results = (slots, slots, experts, experts, experts, experts)
    copies, _, own, ends, starts, left = launch(_PLAN, (counts,), results, Config(1, num_warps=4), {"S": sizes})
    return PassPlan(copies, own, ends, starts, left)


def place_assignments(topk_idx: Array, counts: Array, plan: PassPlan, rank: Array | int) -> tuple[Array, Array]:
    """Place assignments in two kernels, with the same result as in xla/balance_plan.py."""
    num_ranks, num_experts = counts.shape
    config, sizes = place_sizes(topk_idx.size, num_ranks, num_experts, plan.copies.shape[1])
    ids, (share_counts,) = topk_idx.reshape(-1), int32((config.num_programs, sizes.tile.bins))
    (share_counts,) = launch(_COUNT, (ids,), (share_counts,), config, {"S": sizes})
    operands = (ids, jnp.asarray(rank, jnp.int32)[None], share_counts, *plan[:4])
    slots, left = launch(_PLACE, operands, int32(ids.shape, ids.shape), config, {"S": sizes})
    return slots.reshape(topk_idx.shape), left.reshape(topk_idx.shape)


def place_sizes(num_assignments: int, num_ranks: int, num_experts: int, spare: int) -> tuple[Config, PlaceSizes]:
    """Return config and sizes: a share of the assignments for each of as many programs as run at a time."""
    programs = num_programs(-(-num_assignments // _LANES))
    block, bins = _LANES * -(-num_assignments // (_LANES * programs)), max(32, power_of_two(num_experts))
    tile = CountTile(block, _LANES, bins, max(1, _MOST_COUNTS // bins))
    sizes = PlaceSizes(num_assignments, num_ranks, num_experts, spare, tile)
    return Config(-(-num_assignments // block), num_warps=8), sizes
