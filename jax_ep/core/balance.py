"""`Balance`, and the result of planning one balanced pass: who computes which rows, and needs which copies.

The plan is a function of the assignments per source rank and expert alone. It uses integers only and breaks ties toward
the lowest index, so every rank computes the same plan and no further communication is needed.

T tokens per rank, K experts per token, E experts, W ranks, L = E / W experts at home, R rows that a rank computes in a
pass, S spare slots for copies of experts per rank.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from jax_ep.core import check
from jax_ep.core.layout import round_up
from jax_ep.types import Array
from jax_ep.values import shown

_TILE = 128
WORK = ("rows_before", "rows_after", "copies", "passes")
"""What balancing a call does on a rank: rows of the experts at home, rows and copies in all passes, and the passes."""


@dataclasses.dataclass(frozen=True)
class Balance:
    """Balance an expert layer in each call: every rank computes about the same number of rows, whatever the routing.

    Ranks whose experts are chosen too often hand rows to ranks with room, which fetch copies of the experts' weights
    for the time of the call. Each rank computes at most `ceil(rows * T * K)` rows in a pass, a static number. A layer
    without `Balance` reserves memory for `W * T * K` rows. Nothing is dropped: assignments that the
    spare slots cannot place run in further passes of the same size.

    Attributes:
      rows: rows per rank and pass, as a multiple of T * K, the mean; at least 1. Smaller values move more rows.
      spare_experts: copies that a rank can hold at a time. They bound the memory for copied weights. With E / W or
        more a single pass always suffices. None: E / W in `dispatch`, which has one pass. In layers None means E / W
        if that is at most 128, weights are not quantized, and copies are sent through peer memory and take at most
        2 GiB with all that they need; otherwise 2.

    Raises:
      ValueError: a number out of its range.
      TypeError: a value of another type.

    Example:
      >>> import jax_ep
      >>> jax_ep.Balance(rows=1.25).rows_per_rank(4096 * 8)
      40960

    Source: transient copies of experts planned in each step, as in MoonEP, ECHO (Megatron Core) and LLEP.
    """

    rows: float = 1.1
    spare_experts: int | None = None

    def __post_init__(self) -> None:
        rows = check.number("Balance", "rows", self.rows, remedy="pass a float such as 1.1")
        if not 1 <= rows <= 1024:
            raise ValueError(
                f"Balance: rows={shown(self.rows)}, expected a number from 1 to 1024; pass 1.1 for 10 % more than the"
                " mean."
            )
        object.__setattr__(self, "rows", rows)
        if self.spare_experts is not None:
            remedy = "leave it out for the default"
            spare_experts = check.integer("Balance", "spare_experts", self.spare_experts, most=1024, remedy=remedy)
            object.__setattr__(self, "spare_experts", spare_experts)

    def rows_per_rank(self, num_assignments: int) -> int:
        """Rows per rank and pass for `num_assignments` = T * K assignments per rank.

        From 1024 rows on it is a multiple of 128, since the fastest kernels take whole tiles.
        """
        remedy = "pass the tokens of a rank times K"
        number = check.integer("Balance.rows_per_rank", "num_assignments", num_assignments, least=0, remedy=remedy)
        rows = math.ceil(round(self.rows * number, 6))
        return rows if rows < 8 * _TILE else round_up(rows, _TILE)


class PassPlan(NamedTuple):
    """The placement of rows in one pass."""

    copies: Array  # `[W, S]` expert in each spare slot, -1 if the slot is free. Used slots come first.
    own: Array  # `[W, E]` rows of a rank's own tokens that it computes itself: the first ones, by token and k
    # `[W, E]` the other rows of an expert, ordered by source rank, token and k, are divided among the ranks at these
    # positions: rank r computes those from `ends[r - 1]` to `ends[r]`.
    ends: Array
    starts: Array  # `[W, E]` position of a source rank's first row among these
    left: Array  # `[W, E]` assignments per source rank and expert that remain for later passes
