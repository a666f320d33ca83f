"""Structs of the low-latency kernels, low_latency*.py; see exchange_structs.py."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from .gemm_structs import MaskedGemm, Pointer, QuantizedGemm


class LowLatencyPlan(NamedTuple):
    """Arrays that a low-latency dispatch records about its rows, as in `LowLatencyHandle`."""

    sizes_ptr: Pointer  # [num_local_experts] rows of each expert
    token_ptr: Pointer  # [num_local_experts, num_ranks * max_tokens] token of each row at its source; -1: none
    start_ptr: Pointer  # [num_local_experts, num_ranks] position of the first row of each source
    count_ptr: Pointer  # [num_local_experts, num_ranks] rows of each source
    assignment_to_row_ptr: Pointer  # [num_ranks, max_tokens, top_k] row of each assignment here; -1: none
    own_topk_idx_ptr: Pointer  # [max_tokens, top_k] expert ids of this rank's tokens
    num_invalid_ptr: Pointer  # [] invalid ids among them


class RowSources(NamedTuple):
    """Origin of each row of a low-latency dispatch; fields as in `LowLatencyPlan`."""

    token_ptr: Pointer
    start_ptr: Pointer
    assignment_to_row_ptr: Pointer
    own_topk_idx_ptr: Pointer


@dataclasses.dataclass(frozen=True)
class LowLatency:
    """Static sizes that low-latency dispatch and combine share."""

    num_ranks: int
    num_tokens: int  # of this rank
    max_tokens: int  # that a rank may have
    top_k: int
    hidden: int
    num_local_experts: int


@dataclasses.dataclass(frozen=True)
class LowLatencyDispatchTile:
    """Blocks of low-latency dispatch."""

    send_hidden: int  # columns of a token sent at a time
    block_tokens: int  # tokens per task that copies them to their rows
    block_hidden: int  # columns copied at a time
    padded_scales: int  # power of two >= num_scales
    padded_top_k: int  # power of two >= top_k
    padded_ranks: int  # power of two >= num_ranks
    chunk: int  # tokens whose ids are compared at a time
    lag: int  # blocks between sending a block and copying a received one
    direct: bool  # each copy computes its rows itself


@dataclasses.dataclass(frozen=True)
class LowLatencyDispatch(LowLatency):
    """Static sizes of low-latency dispatch."""

    num_scales: int  # scales of a token; 0: tokens have no scales
    scale_block: int  # columns that share a scale, if the kernel quantizes; else 0
    ids_offset: int  # byte offset of the ids in a low-latency buffer
    values_offset: int  # byte offset of the tokens
    scales_offset: int  # byte offset of their scales
    has_num_tokens: bool  # only the first `num_tokens` tokens, a runtime value, count
    tile: LowLatencyDispatchTile


@dataclasses.dataclass(frozen=True)
class LowLatencyCombineTile:
    """Blocks of low-latency combine."""

    block_hidden: int  # columns sent or added up at a time
    padded_top_k: int  # power of two >= top_k
    padded_ranks: int  # power of two >= num_ranks
    lag: int  # tokens between sending for one and adding received values
    sends_sums: bool  # the weighted sum of a token's rows travels, instead of each row


@dataclasses.dataclass(frozen=True)
class LowLatencyCombine(LowLatency):
    """Static sizes of low-latency combine."""

    weights_offset: int  # byte offset of the router weights in a low-latency buffer
    values_offset: int  # byte offset of the sums or rows
    scales_offset: int  # byte offset of their scales
    fp8: bool  # sums or rows travel as FP8
    tile: LowLatencyCombineTile


@dataclasses.dataclass(frozen=True)
class LowLatencyGemmCombine(LowLatency):
    """Static sizes of a masked grouped GEMM fused with low-latency combine."""

    values_offset: int  # byte offset of the rows in a low-latency buffer
    block_hidden: int  # columns added up at a time
    padded_top_k: int  # power of two >= top_k
    padded_ranks: int  # power of two >= num_ranks
    quantized: bool  # weights have 8 or 4 bits
    gemm: MaskedGemm | QuantizedGemm
