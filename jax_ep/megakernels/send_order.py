"""The order in which a rank sends its tokens, so that a peer's first experts can start while other tokens travel."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from jax_ep.core.kernel import Config, Kernel
from jax_ep.core.layout import power_of_two
from jax_ep.megakernels.exchange import MOST_EXPERTS, MOST_POSITIONS
from jax_ep.megakernels.kernels import send_order as send_order_kernels
from jax_ep.megakernels.kernels.exchange_gemm_structs import OrderedSends
from jax_ep.megakernels.kernels.exchange_structs import CountTile, SendOrder
from jax_ep.megakernels.launch import group_of, int32, launch, num_programs
from jax_ep.types import Array, Handle, Layout

_COUNT = Kernel(send_order_kernels.send_order_count)
_PLACE = Kernel(send_order_kernels.send_order_place)


def order_sends(handle: Handle) -> OrderedSends:
    """Order the sends of a handle by two small launches, or by XLA if there are too many experts."""
    layout = handle.layout
    sizes = send_order_sizes(layout)
    if layout.num_local_experts >= MOST_EXPERTS or sizes.tile.block > MOST_POSITIONS:
        return sort_sends(handle)
    num_ranks, num_tokens, num_blocks = sizes.num_ranks, sizes.num_tokens, -(-sizes.num_tokens // sizes.tile.block)
    counted = ((num_ranks, num_tokens), (2 * num_ranks, num_blocks, sizes.tile.bins))
    config = Config(num_programs(2 * num_ranks * num_blocks, 4), num_warps=4)
    found = launch(_COUNT, (handle.topk_idx, group_of(handle)), int32(*counted), config, {"S": sizes})
    results = ((num_ranks, num_tokens), (num_ranks,), (num_ranks, sizes.num_local_experts))
    return OrderedSends(*launch(_PLACE, found, int32(*results), config, {"S": sizes}))


def send_order_sizes(layout: Layout) -> SendOrder:
    """Return the sizes of the send order: few blocks, since each adds up the counts of all blocks of a list."""
    lanes, most_blocks = 128, 64
    block = lanes
    while -(-layout.num_tokens // block) > most_blocks:
        block *= 2
    bins = max(32, power_of_two(layout.num_local_experts + 1))
    rows = max(1, min(4096 // bins, power_of_two(-(-layout.num_tokens // block))))
    tile = CountTile(block, lanes, bins, rows)
    return SendOrder(layout.num_ranks, layout.num_tokens, layout.top_k, layout.num_local_experts, tile)


def sort_sends(handle: Handle) -> OrderedSends:
    """Order the sends of a handle by XLA."""
    layout = handle.layout
    num_ranks, num_local = layout.num_ranks, layout.num_local_experts
    rank = group_of(handle)[-1]
    own = lax.dynamic_index_in_dim(handle.topk_idx, rank, keepdims=False)  # [T, K]
    first = jnp.stack([_first_expert(own, r * num_local, num_local) for r in range(num_ranks)])  # [W, T]
    tokens = jnp.broadcast_to(lax.iota(jnp.int32, layout.num_tokens), first.shape)
    _, order = lax.sort((first, tokens + jnp.zeros_like(first)), num_keys=1, is_stable=True)
    arriving = _first_expert(handle.topk_idx, rank * num_local, num_local)  # [W, T]
    experts = lax.iota(jnp.int32, num_local)
    num_needed = jnp.sum(arriving[:, None, :] <= experts[None, :, None], axis=-1, dtype=jnp.int32)
    return OrderedSends(order, jnp.sum(first < num_local, axis=-1, dtype=jnp.int32), num_needed)


def _first_expert(ids: Array, first: Array | int, num_local: int) -> Array:
    """Return the lowest of `[..., K]` ids in `[first, first + num_local)`, relative to `first`, or `num_local`."""
    local = ids - first
    return jnp.min(jnp.where((local >= 0) & (local < num_local), local, num_local), axis=-1)
