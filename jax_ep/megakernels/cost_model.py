"""How long the modes of fused operations should take, and so which one to choose; docs/design/fused.md tells why."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jax_ep.pallas import requirements
from jax_ep.types import Layout

LINK, MEMORY, TENSOR_CORES = 350e9, 2.6e12, 600e12
"""What an H200 does in a second: bytes sent to other GPUs, bytes moved to make sums, operations of grouped GEMMs."""
ALONE = 1.08
"""How much faster `pallas` makes a product by itself than a launch of `triton`, which may exchange rows too, does."""
DEEP = 4096
"""From this depth on; below, the end of a tile takes its share (grouped_gemm_gpu.json)."""
COMBINE_MEMORY = 3.8e12
"""The second of them for combine by itself (dispatch_combine_2_gpus.json, moe_layer_combine.json)."""
SHOWN = 0.6
"""Part of the exchange by which dispatch + GEMM takes longer than the product (moe_layer_4_gpus.json)."""
COPIES = 3.8e12
"""Bytes that a copy of rows moves in a second."""
LAUNCH_SECONDS = 10e-6
"""What one launch more costs, by which few tokens are served in one."""
GRADIENTS = 0.73 * 735e12
"""Operations of weight gradients in a second, by two programs of four warps per multiprocessor or one of eight."""
GRADIENTS_ALONE = 1.06
"""How much faster `pallas` makes them, in a launch of their own."""
BESIDE = 0.15
"""Part of the time of sums by which the gradient takes longer in their launch: they move bytes, it multiplies."""
FAR, FAR_MEMORY = 1 << 30, 1.5e12
"""Rows that arrive in so many bytes or more count with this rate: their stores hold up the products by then."""
MEETING_SECONDS = 50e-6
"""What the end of GEMM + combine costs beside its sums: all programs of all ranks meet there (moe_layer.json)."""


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


def is_from_pallas(num_rows: int, depth: int, columns: int, groups: int) -> bool:
    """Whether a product of these sizes, and the gradient of its matrices, are launches of `pallas`."""
    return jax.default_backend() == "gpu" and requirements.multiplies_fastest(num_rows, depth, columns, groups)


def _is_from_pallas(layout: Layout, features: int, hidden: int) -> bool:
    """Whether a product in a launch of its own comes from there."""
    return is_from_pallas(layout.capacity, features, hidden, layout.num_local_experts)


def _product_alone(layout: Layout, features: int, hidden: int) -> float:
    """Seconds per token to compute the products in a launch of their own."""
    time = _product(layout, features, hidden)
    if _is_from_pallas(layout, features, hidden):
        time /= 1 + (ALONE - 1) * min(1.0, features / DEEP)
    return time


def _summed(layout: Layout, hidden: int) -> tuple[float, float]:
    """Seconds per token of combine by itself: to send the sums, and to move what they are made of."""
    remote = (layout.num_ranks - 1) / layout.num_ranks
    return _holders(layout) * remote * 2 * hidden / LINK, _made(layout, hidden) / COMBINE_MEMORY


def combine_times(layout: Layout, features: int, hidden: int) -> dict[str, float]:
    """Seconds per token that each mode of GEMM + combine should take, the simplest mode first.

    docs/design/fused.md tells why.
    """
    product, (sent, made) = _product(layout, features, hidden), _summed(layout, hidden)
    return {
        "serial": _product_alone(layout, features, hidden) + max(sent, made),
        "scatter": max(product, _scattered(layout, hidden)) + _scattered_sums(layout, hidden),
    }


def dispatch_mode(layout: Layout, hidden: int, columns: int, save_as: str | None) -> str:
    """Of the modes of dispatch + GEMM, `[., hidden]` times `[hidden, columns]`, the simpler one unless it is slower.

    In one launch a part of the exchange shows in spite of the products; in two the saved tokens, in the other the saved
    rows, are a copy. Times are those of even loads; uneven ones cost the one launch some percent more than the two.
    """
    sent, _ = _summed(layout, hidden)
    token = 2 * 2 * hidden / COPIES  # to read and write one
    rows, tokens = layout.top_k * token, _holders(layout) * token
    serial = _product_alone(layout, hidden, columns) + sent + (tokens if save_as == "tokens" else 0.0)
    serial += LAUNCH_SECONDS / layout.num_tokens
    fused = _product(layout, hidden, columns) + SHOWN * sent + (rows if save_as == "rows" else 0.0)
    return "serial" if serial <= 1.03 * fused else "fused"


class BackwardTimes(NamedTuple):
    """Seconds per token of GEMM + combine and the gradient of its matrices, by mode of the first.

    Attributes:
      apart: the gradient in a launch of its own.
      beside: the gradient in the launch of the exchange, where there is one.
    """

    apart: dict[str, float]
    beside: dict[str, float]


def backward_times(layout: Layout, features: int, hidden: int) -> BackwardTimes:
    """How long each way should take; docs/design/fused.md tells why.

    What travels has the time of the gradient, too, or, in mode "scatter", that of both products.
    """
    product, (sent, made) = _product(layout, features, hidden), _summed(layout, hidden)
    gradient = product * TENSOR_CORES / GRADIENTS
    alone = gradient / (GRADIENTS_ALONE if _is_from_pallas(layout, features, hidden) else 1)
    both = max(product + gradient, _scattered(layout, hidden))
    return BackwardTimes(
        {mode: time + alone for mode, time in combine_times(layout, features, hidden).items()},
        {
            "scatter": both + _scattered_sums(layout, hidden),
            "serial": _product_alone(layout, features, hidden) + max(gradient + BESIDE * made, sent),
        },
    )


def combine_mode(layout: Layout, features: int, hidden: int) -> str:
    """The simplest mode of GEMM + combine of those that should take least time, up to a hundredth."""
    times = combine_times(layout, features, hidden)
    return next(mode for mode, time in times.items() if time <= 1.01 * min(times.values()))
