"""Structs of exchange_gemm.py, the all-to-all fused with grouped GEMMs; see exchange_structs.py."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from .exchange_structs import SumTile
from .gemm_structs import GluonGemm16, GroupedGemm, Pointer


class HandleArrays(NamedTuple):
    """The arrays of a dispatch handle."""

    topk_idx_ptr: Pointer  # [num_ranks, num_tokens, top_k] expert ids of all ranks
    assignment_to_row_ptr: Pointer  # [num_ranks, num_tokens, top_k] row of each assignment here; -1: none
    row_to_assignment_ptr: Pointer  # [num_rows] assignment of each row; -1: padding
    sizes_ptr: Pointer  # [num_local_experts] rows of each expert, padding included


class OrderedSends(NamedTuple):
    """The order in which each rank sends its tokens, and the prefix that each expert waits for.

    A rank sends a token when its destination computes the first of the token's experts there. So the tokens that local
    experts 0..e need are a prefix of what each source sends.
    """

    order_ptr: Pointer  # [num_ranks, num_tokens] int32: own tokens in send order per destination, then the others
    num_sends_ptr: Pointer  # [num_ranks] int32: tokens that go to each rank
    num_needed_ptr: Pointer  # [num_ranks, num_local_experts] int32: tokens of each source that experts 0..e need


@dataclasses.dataclass(frozen=True)
class DispatchGemm:
    """Static sizes of dispatch + GEMM."""

    num_tokens: int  # per rank
    top_k: int
    comm_programs: int  # programs that start with the communication queue
    block_tokens: int  # tokens per task and flag
    block_hidden: int  # columns copied at a time
    saves_tokens: bool  # whether received tokens are copied to a result
    weights_offset: int  # byte offset of router weights in the data area
    gemm: GroupedGemm | GluonGemm16  # of all rows with the weights of the local experts


@dataclasses.dataclass(frozen=True)
class GemmCombine:
    """Static sizes of GEMM + combine."""

    num_tokens: int  # per rank
    top_k: int
    may_drop: bool  # whether the capacity may leave assignments without a row
    clear_tokens: int  # tokens whose dropped assignments are zeroed at a time
    clear_hidden: int  # columns zeroed at a time
    sum_tokens: int  # tokens per task that sums rows
    weight_tokens: int  # tokens whose assignments get their row values at a time
    weights_offset: int  # byte offset of values per assignment, such as gradients of router weights, in the data area
    padded_top_k: int  # power of two >= top_k
    sums: SumTile
    gemm: GroupedGemm  # of all rows with the weights of the local experts
