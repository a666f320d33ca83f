"""How long the modes of GEMM + combine should take, and so which one to choose; docs/performance.md tells why."""

from __future__ import annotations

import jax

from jax_ep.megakernels import gemm_tuning
from jax_ep.megakernels.grid import all_programs
from jax_ep.types import Layout

LINK, MEMORY, TENSOR_CORES = 350e9, 2.6e12, 600e12
"""What an H200 does in a second: bytes sent to other GPUs, bytes moved to make sums, operations of grouped GEMMs."""
COMBINE_MEMORY = 3.8e12
"""The second of them for combine by itself (dispatch_combine_2_gpus.json, moe_layer_combine.json)."""
GRADIENTS = 0.73 * 735e12
"""Operations of weight gradients in a second, by two programs of four warps per multiprocessor or one of eight."""
FAR, FAR_MEMORY = 1 << 30, 1.5e12
"""Rows that arrive in so many bytes or more are added at this rate, waits for the last ones included."""
AMONG_TILES = 0.53e12
"""Bytes moved in a second to make sums where each program makes some between its tiles (moe_layer.json, "reduce")."""
MEETING_SECONDS = 50e-6
"""What the end of GEMM + combine costs beside its sums: all programs of all ranks meet there (moe_layer.json)."""
CHUNK_SECONDS = 60e-6
"""Products and sums of a chunk take at least as long: it costs each program some waits, and two ends of its loop."""


def _holders(layout: Layout) -> float:
    """Expected number of ranks with an expert of a token."""
    ranks = layout.num_ranks
    return ranks * (1 - ((ranks - 1) / ranks) ** layout.top_k)


def _product(layout: Layout, features: int, hidden: int) -> float:
    """Seconds per token to compute the products."""
    return 2 * layout.top_k * features * hidden / TENSOR_CORES


def _made(layout: Layout, hidden: int) -> float:
    """Bytes per token that are moved to make sums of products: rows read, and sums written, read and added up."""
    return (layout.top_k + 2 * _holders(layout) + 1) * 2 * hidden


def _scattered(layout: Layout, hidden: int) -> float:
    """Seconds per token to send each row of an expert on another rank by itself."""
    remote = (layout.num_ranks - 1) / layout.num_ranks
    return layout.top_k * remote * 2 * hidden / LINK


def _scattered_sums(layout: Layout, hidden: int) -> float:
    """Seconds per token to add rows that have come one by one, once all ranks have sent."""
    row = 2 * hidden
    rate = FAR_MEMORY if layout.num_tokens * layout.top_k * row >= FAR else MEMORY
    meeting = MEETING_SECONDS / layout.num_tokens if layout.num_ranks > 1 else 0.0
    return (layout.top_k + 1) * row / rate + meeting


def reduced_chunks(layout: Layout, features: int, hidden: int) -> int:
    """Chunks of columns whose sums are made while others are multiplied."""
    tile = gemm_tuning.product_tile(hidden)
    column_tiles = -(-hidden // tile["BN"])
    if jax.default_backend() == "cpu":
        most = 4.0
    else:
        num_rows = min(layout.capacity, layout.num_tokens * layout.top_k)  # in use, where experts are equally loaded
        turns = column_tiles * -(-num_rows // tile["BM"]) / all_programs()
        time = _product(layout, features, hidden) + _made(layout, hidden) / AMONG_TILES
        most = min(turns / 2, layout.num_tokens * time / CHUNK_SECONDS)
    return next(chunks for chunks in range(8, 0, -1) if column_tiles % chunks == 0 and chunks <= max(1, most))


def combine_times(layout: Layout, features: int, hidden: int) -> dict[str, float]:
    """Seconds per token that each mode of GEMM + combine should take, the simplest mode first.

    docs/performance.md tells why.
    """
    remote = (layout.num_ranks - 1) / layout.num_ranks
    product, sent = _product(layout, features, hidden), _holders(layout) * remote * 2 * hidden / LINK
    made, between = (_made(layout, hidden) / rate for rate in (COMBINE_MEMORY, AMONG_TILES))
    last = 1 / reduced_chunks(layout, features, hidden)
    return {
        "serial": product + max(sent, made),
        "scatter": max(product, _scattered(layout, hidden)) + _scattered_sums(layout, hidden),
        "reduce": max(product + (1 - last) * between, (1 - last) * sent) + last * max(sent, between),
    }


def backward_times(layout: Layout, features: int, hidden: int, mode: str | None) -> dict[str, float]:
    """Seconds per token of GEMM + combine and the gradient of its matrices: its parts, and both in one launch.

    In one launch the rows have the time of both products to travel. docs/performance.md tells more.
    """
    times = combine_times(layout, features, hidden)
    product = _product(layout, features, hidden)
    gradient = product * TENSOR_CORES / GRADIENTS
    combined = min(times.values()) if mode is None else times[mode]
    products = max(product + gradient, _scattered(layout, hidden))
    return {"parts": combined + gradient, "one launch": products + _scattered_sums(layout, hidden)}


def combine_mode(layout: Layout, features: int, hidden: int) -> str:
    """The simplest mode of GEMM + combine of those that should take least time, up to a hundredth."""
    times = combine_times(layout, features, hidden)
    return next(mode for mode, time in times.items() if time <= 1.01 * min(times.values()))
