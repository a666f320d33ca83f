"""The order in which a rank sends its tokens, so that a peer's first experts can start while other tokens travel."""

from __future__ import annotations

from jax_ep.core.kernel import Config, Kernel
from jax_ep.core.layout import power_of_two
from jax_ep.megakernels.exchange import MOST_POSITIONS
from jax_ep.megakernels.kernels import send_order as send_order_kernels
from jax_ep.megakernels.kernels.exchange_gemm_structs import OrderedSends
from jax_ep.megakernels.kernels.exchange_structs import CountTile, SendOrder
from jax_ep.megakernels.launch import group_of, int32, launch, num_programs
from jax_ep.types import Handle, Layout

_COUNT = Kernel(send_order_kernels.send_order_count)
_PLACE = Kernel(send_order_kernels.send_order_place)


def order_sends(handle: Handle) -> OrderedSends:
    """Order the sends of a handle by two small launches."""
    sizes = send_order_sizes(handle.layout)
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
    while -(-layout.num_tokens // block) > most_blocks and block < MOST_POSITIONS:
        block *= 2
    bins = max(32, power_of_two(layout.num_local_experts + 1))
    rows = max(1, min(4096 // bins, power_of_two(-(-layout.num_tokens // block))))
    tile = CountTile(block, lanes, bins, rows)
    return SendOrder(layout.num_ranks, layout.num_tokens, layout.top_k, layout.num_local_experts, tile)
