"""Compare the growth of a kernel's time with that of its bytes, from one number of ranks to the next."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

MARGIN = 1.1
"""How much faster than its bytes a time may grow: single timings differ by some percent."""

LEAST_SHARE = 0.02
"""Kernels with a smaller share of the busy time are ignored: their time is that of the launch."""


class Moved(NamedTuple):
    """Bytes of the most loaded rank.

    Attributes:
      rows: of its expert rows.
      sent: of tokens that it sends or receives, once per token and rank.
      sent_apart: the same, once per token and expert.
      ids: of the expert ids of all ranks.
    """

    rows: float
    sent: float
    sent_apart: float
    ids: float


_TOKENS, _IDS = ("rows", "sent"), ("ids",)
KERNELS = {
    "dispatch": _TOKENS,
    "combine": _TOKENS,
    "dispatch_gemm": _TOKENS,
    "gemm_combine": ("rows", "sent_apart"),
    "combine_with_weight_gradient": _TOKENS,
    "plan": _IDS,
    "all_gather_i32": _IDS,
    "send_order_count": _IDS,
    "send_order_place": _IDS,
}
"""The bytes that a kernel moves, by its name in the profiler; all others, such as GEMMs, move rows."""


class Travelling(NamedTuple):
    """`[W, W]` numbers of tokens from each rank to each other rank; 0 to itself.

    Attributes:
      tokens: once per rank that has one of their experts.
      pairs: once per token and expert.
    """

    tokens: np.ndarray
    pairs: np.ndarray


def travelling(ids: np.ndarray, num_ranks: int, num_experts: int) -> Travelling:
    """Count the tokens that ranks send, from `[W * T, K]` ids."""
    owner = ids.reshape(num_ranks, -1, ids.shape[1]) // (num_experts // num_ranks)  # [W, T, K]
    others = 1 - np.eye(num_ranks, dtype=np.int64)
    here = [owner == rank for rank in range(num_ranks)]
    tokens = np.stack([mask.any(axis=2).sum(axis=1) for mask in here], axis=1)
    pairs = np.stack([mask.sum(axis=(1, 2)) for mask in here], axis=1)
    return Travelling(tokens * others, pairs * others)


def moved(ids: np.ndarray, num_ranks: int, num_experts: int, row_bytes: int) -> Moved:
    """Return the bytes of the most loaded rank, from `[W * T, K]` ids."""
    travel = travelling(ids, num_ranks, num_experts)
    rows = np.bincount(ids.reshape(-1) // (num_experts // num_ranks), minlength=num_ranks).max()
    sent, apart = (float(max(part.sum(axis=0).max(), part.sum(axis=1).max()) * row_bytes) for part in travel)
    return Moved(float(rows * row_bytes), sent, apart, 4.0 * ids.size)


def allowed(kinds: Sequence[str], before: Moved, after: Moved) -> float:
    """Return the growth of the bytes that grow most; infinity if there were none."""

    def ratio(kind: str) -> float:
        old, new = getattr(before, kind), getattr(after, kind)
        return new / old if old else math.inf if new else 0.0

    return max(map(ratio, kinds))


def warnings(
    what: str, kinds: Sequence[str], seconds: Mapping[int, float], bytes_by_ranks: Mapping[int, Moved]
) -> list[str]:
    """Return a line for each step between numbers of ranks in which a time grows faster than its bytes."""
    found = []
    for fewer, more in itertools.pairwise(sorted(seconds)):
        bytes_grow = allowed(kinds, bytes_by_ranks[fewer], bytes_by_ranks[more])
        time_grows = seconds[more] / seconds[fewer] if seconds[fewer] > 0 else math.nan
        if time_grows > MARGIN * bytes_grow:
            times = f"{1e6 * seconds[fewer]:.0f} us to {1e6 * seconds[more]:.0f} us, {time_grows:.2f} times"
            found.append(f"{what}: from {fewer} to {more} ranks the time goes from {times}, its bytes {bytes_grow:.2f}")
    return found
