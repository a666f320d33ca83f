"""The slots of one device sorted by expert, in whole blocks: what block-wise kernels begin with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_ep.core import check
from jax_ep.core.check import operation
from jax_ep.core.facts import SortFacts
from jax_ep.core.layout import SortSizes, dropless_capacity
from jax_ep.core.mesh_axes import on_automatic_axes, vary_alike
from jax_ep.ops import plan_serving, registry
from jax_ep.ops.plan_serving import PartPlan
from jax_ep.types import Array, SortedTokens


@operation
def moe_sort(
    topk_idx: Array,
    topk_weights: Array | None = None,
    *,
    num_experts: int,
    block_size: int,
    first_expert: int = 0,
    num_local_experts: int | None = None,
    num_tokens: Array | int | None = None,
    implementation: str | Sequence[str] | None = None,
) -> SortedTokens:
    """Sort the assignments of one device by expert and pad every expert to whole blocks, for block-wise kernels.

    It is differentiable in `topk_weights` and needs no mesh axis.

    Args:
      topk_idx: `[T, K]` int32 expert ids; -1 is no expert.
      topk_weights: `[T, K]` float32 router weights, or None.
      num_experts: E.
      block_size: rows per block.
      first_expert: with num_local_experts, the experts of this device, both static: assignments to others have no row.
      num_local_experts: L; None: all from first_expert on.
      num_tokens: `[]` int32, tokens at and past this index have no row; None: all T count.
      implementation: see `dispatch`.

    Returns:
      `SortedTokens(slots [P] int32, weights [P] or None, block_expert [P // block_size] int32, group_sizes [L] int32,
      num_rows [] int32)` with `P = round_up(T * K + min(L, T * K) * (block_size - 1), block_size)`, which holds any
      routing. Experts are counted from first_expert on.

    Raises:
      ValueError: shapes or sizes that do not fit, or ids out of range where they are known.
      TypeError: unsupported dtypes.
      NotImplementedError: no requested implementation supports the call.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> jax_ep.moe_sort(jnp.array([[1], [0], [1]]), num_experts=2, block_size=2).slots.tolist()
      [1, -1, 0, 2, -1, -1]
      >>> jax_ep.moe_sort(jnp.array([[1], [0], [1]]), num_experts=2, block_size=2, first_expert=1).slots.tolist()
      [0, 2, -1, -1]

    Source: the block-aligned sort that vLLM's fused MoE kernel takes as its input.
    """
    function = "moe_sort"
    num_experts = check.integer(function, "num_experts", num_experts, most=check.MOST_EXPERTS)
    block_size = check.integer(function, "block_size", block_size)
    first_expert, num_local = _local_experts(num_experts, first_expert, num_local_experts)
    topk_idx = check.expert_ids(function, topk_idx, None, num_experts, all_count=num_tokens is None)
    num_rows = dropless_capacity(topk_idx.size, num_local, block_size)
    sizes = f"topk_idx of shape {topk_idx.shape} with num_local_experts={num_local} and {block_size=}"
    check.int32_rows(function, sizes, num_rows, "pass fewer tokens in each call, or a smaller block_size")
    if topk_weights is not None:
        dtype = getattr(topk_weights, "dtype", jnp.float32)
        topk_weights = check.router_weights(function, topk_weights, topk_idx.shape, dtype)
    if num_tokens is not None:
        num_tokens = check.token_count(function, num_tokens, topk_idx.shape[0])
    options = registry.options(function, implementation=implementation)
    arrays = vary_alike((topk_weights, topk_idx, num_tokens))
    specs = SortedTokens(P(), None if topk_weights is None else P(), P(), P(), P())  # type: ignore[arg-type]
    plan = plan_serving.one_part(options, SortFacts(topk_idx.dtype, topk_idx.size, num_local))
    sort = partial(sort_slots, plan, SortSizes(first_expert, num_local, block_size))
    return on_automatic_axes(sort, specs, *arrays)


def _local_experts(num_experts: int, first_expert: int, num_local_experts: int | None) -> tuple[int, int]:
    """Return the first of this device's experts, and how many there are."""
    function = "moe_sort"
    first_expert = check.integer(function, "first_expert", first_expert, least=0)
    if num_local_experts is None:
        num_local_experts = max(1, num_experts - first_expert)
    num_local_experts = check.integer(function, "num_local_experts", num_local_experts)
    if first_expert + num_local_experts > num_experts:
        raise ValueError(
            f"{function}: {first_expert=} and {num_local_experts=} reach past {num_experts=}; expected experts among"
            " these: change one of them."
        )
    return first_expert, num_local_experts


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sort_slots(
    plan: PartPlan, sizes: SortSizes, topk_weights: Array | None, topk_idx: Array, num_tokens: Array | None
) -> SortedTokens:
    """`moe_sort` of checked arguments."""
    run = registry.MOE_SORT.by(plan.part.implementation).moe_sort
    return run(topk_idx, topk_weights, num_tokens, sizes)


type _Saved = tuple[Array | None, Array]


def _forward(
    plan: PartPlan, sizes: SortSizes, topk_weights: Array | None, topk_idx: Array, num_tokens: Array | None
) -> tuple[SortedTokens, _Saved]:
    found = sort_slots(plan, sizes, topk_weights, topk_idx, num_tokens)
    return found, (topk_weights, found.slots)


def _backward(
    plan: PartPlan, sizes: SortSizes, residuals: _Saved, cotangents: SortedTokens
) -> tuple[Array | None, None, None]:
    weights, slots = residuals
    if weights is None:
        return None, None, None
    index = jnp.where(slots < 0, weights.size, slots)
    d_weights = jnp.zeros_like(weights).reshape(-1).at[index].add(cotangents.weights, mode="drop")
    return d_weights.reshape(weights.shape), None, None


sort_slots.defvjp(_forward, _backward)
