"""Static configurations and result pytrees: everything that crosses a function boundary, with its shapes.

Symbols, per shard: T tokens per rank, H hidden size, K experts per token, E experts, W ranks on the expert axis,
L = E / W local experts, I expert intermediate size, R rows of the expert-major layout.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

TOKENS_NAME = "jax_ep.tokens"
"""What `jax.checkpoint` policies know dispatched tokens as."""
HIDDEN_NAME = "jax_ep.hidden"
"""And the results of the first product."""
COMBINE_MODES = ("scatter", "serial")
DISPATCH_MODES = ("fused", "serial")
"""How a product and the combine after it run: see `jax_ep.grouped_gemm_combine`."""
AxisName = str | tuple[str, ...]
Array = jax.Array
Quantized = tuple[Array, Array]
"""FP8 rows: `(values float8_e4m3fn [N, H], scales float32 [N, H // group_size])`."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """What is static in one dispatch: its sizes, from which it alone derives every other, and its mesh axes.

    Attributes:
      num_ranks: W, ranks on the expert axis.
      num_experts: E, experts over all ranks, contiguous per rank.
      num_tokens: T, tokens per rank.
      top_k: K, experts per token.
      capacity: R, rows of the expert-major layout on each rank.
      alignment: every group starts at a multiple of this many rows.
      axis: mesh axes over which the experts are spread, in order, without those of one rank, which change nothing.
    """

    num_ranks: int
    num_experts: int
    num_tokens: int
    top_k: int
    capacity: int
    alignment: int = 1
    axis: tuple[str, ...] = ()

    @property
    def num_local_experts(self) -> int:
        """L = E / W."""
        return self.num_experts // self.num_ranks

    @property
    def num_slots(self) -> int:
        """W * T * K: the (source rank, token, k) triples that can ask for a row."""
        return self.num_ranks * self.num_tokens * self.top_k


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Handle:
    """Where every row of a dispatch came from, and where every slot went; a pytree, so a value like any other.

    Attributes:
      row_slot: `[R]` int32. `(source_rank * T + token) * K + k` of each row; -1 marks padding.
      slot_row: `[W, T, K]` int32. The row of each slot on this rank; -1: not here, dropped or no expert.
      group_sizes: `[L]` int32. Rows of each local expert, alignment padding included.
      ids: `[W, T, K]` int32. Expert ids of the tokens of all ranks.
      group: `[W + 1]` int32, device numbers of the ranks and this rank's position, where the implementation writes to
        its peers' memory; else None.
      num_invalid: `[]` int32. Ids of this rank's tokens outside `[0, E)` other than -1; they were treated as -1.
      num_dropped: `[]` int32. Slots that should have had a row on this rank, but lay past its capacity.
      layout: static sizes and axes.
    """

    row_slot: Array
    slot_row: Array
    group_sizes: Array
    ids: Array
    group: Array | None
    num_invalid: Array
    num_dropped: Array
    layout: Layout = dataclasses.field(metadata={"static": True})


class Dispatched(NamedTuple):
    """Tokens in expert-major order on the rank that owns the experts.

    Attributes:
      tokens: `[R, H]`, ordered by expert, source rank, token, k; padding rows are zero. A `(values, scales)` pair
        when the input was one.
      weights: `[R]` router weight of each row (0 for padding), or None when no weights were given.
      group_sizes: `[L]` int32, ready for `grouped_gemm` and `lax.ragged_dot`.
      handle: what `combine` and a later `dispatch(handle=...)` need.
      dropped: `[]` int32, rows that did not fit this rank's `capacity`.
    """

    tokens: Array | Quantized
    weights: Array | None
    group_sizes: Array
    handle: Handle
    dropped: Array


class DispatchedGemm(NamedTuple):
    """`Dispatched` whose rows went through the local experts' matrices.

    Attributes:
      hidden: `[R, N]`; padding rows are zero.
      weights: `[R]` router weight of each row, or None.
      group_sizes: `[L]` int32.
      handle: see `Dispatched`.
      dropped: `[]` int32.
    """

    hidden: Array
    weights: Array | None
    group_sizes: Array
    handle: Handle
    dropped: Array


class SortedTokens(NamedTuple):
    """Slots of one device sorted by expert, every expert padded to whole blocks.

    Attributes:
      slots: `[P]` int32, `token * K + k` of each row; -1 marks padding.
      weights: `[P]` router weights (0 for padding), or None.
      block_expert: `[P // block_size]` int32, the expert of each block; -1 past the last used block.
      group_sizes: `[E]` int32, rows of each expert, padding included.
      num_rows: `[]` int32, the sum of `group_sizes`.
    """

    slots: Array
    weights: Array | None
    block_expert: Array
    group_sizes: Array
    num_rows: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowLatencyHandle:
    """Where the rows of a low-latency dispatch came from.

    Attributes:
      source_token: `[L, W * max_tokens_per_rank]` int32, token index on its source rank; -1 past the count.
      source_start: `[L, W]` int32, first row of each source rank within each expert.
      source_count: `[L, W]` int32, rows of each source rank within each expert.
      slot_row: `[W, max_tokens_per_rank, K]` int32, row `expert * W * max_tokens_per_rank + i` of each slot on this
        rank; -1: not here.
      num_invalid: `[]` int32, see `Handle`.
      layout: static sizes and axes; `num_tokens` is `max_tokens_per_rank`, `capacity` is `L * W * max_tokens_per_rank`.
      own_ids: `[max_tokens_per_rank, K]` int32, expert ids of this rank's tokens, -1 for those that do not count; None
        where `group` is.
      group: see `Handle`.
    """

    source_token: Array
    source_start: Array
    source_count: Array
    slot_row: Array
    num_invalid: Array
    layout: Layout = dataclasses.field(metadata={"static": True})
    own_ids: Array | None = None
    group: Array | None = None


class LowLatencyDispatched(NamedTuple):
    """Tokens of a decode-sized batch, in one fixed block of rows per local expert.

    Attributes:
      tokens: `[L, W * max_tokens_per_rank, H]`, float8_e4m3fn where quantised; rows past the count hold anything.
      scales: `[L, W * max_tokens_per_rank, H // group_size]` float32, or None where not quantised.
      group_sizes: `[L]` int32, rows received by each local expert.
      handle: what `low_latency_combine` needs.
    """

    tokens: Array
    scales: Array | None
    group_sizes: Array
    handle: LowLatencyHandle


class Routing(NamedTuple):
    """What a router decided.

    Attributes:
      topk_idx: `[T, K]` int32 expert ids, best first.
      topk_weights: `[T, K]` float32 (float64 for float64 logits), differentiable with respect to the logits.
      scores: `[T, E]` like the weights, the scores before selection, for `load_balancing_loss`.
    """

    topk_idx: Array
    topk_weights: Array
    scores: Array
