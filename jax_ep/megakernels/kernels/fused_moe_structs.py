"""Structs of fused_moe.py and moe_sort.py, the expert layer of one device; see exchange_structs.py."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from .gemm_structs import Pointer
from .route import RouterSizes


@dataclasses.dataclass(frozen=True)
class Sort:
    """Static sizes of the sort of assignments by expert."""

    num_assignments: int
    top_k: int
    first_expert: int  # the first local expert
    num_local_experts: int
    num_rows: int  # rows of all experts, padding included
    block_size: int  # rows per block of one expert
    per_program: int  # assignments of a program, a multiple of `lanes`
    lanes: int  # assignments that get their rows at a time
    count_block: int  # assignments counted at a time
    bins: int  # power of two >= local experts


class LayerTensors(NamedTuple):
    """Inputs of the expert layer."""

    x_ptr: Pointer  # [num_tokens, hidden], FP8 if the first GEMM takes FP8 rows
    x_scales_ptr: Pointer  # [num_tokens, hidden / 128] float32 scales of FP8 tokens; else any float32 array
    gate_up: Pointer  # descriptor of [num_experts, hidden, 2 * intermediate] ([., hidden, intermediate] without gates);
    # quantized weights are [num_experts, ., hidden]
    down: Pointer  # descriptor of [num_experts, intermediate, hidden]; quantized weights are [num_experts, hidden, .]
    topk_idx_ptr: Pointer  # [num_tokens, top_k] expert ids
    weights_ptr: Pointer  # [num_tokens, top_k] float32 router weights


class SortedLayerTensors(NamedTuple):
    """Inputs of the expert layer with sorted assignments, as in `jax_ep.types.SortedTokens` for blocks of block_m."""

    x_ptr: Pointer  # as in `LayerTensors`, up to weights_ptr
    x_scales_ptr: Pointer
    gate_up: Pointer
    down: Pointer
    topk_idx_ptr: Pointer
    weights_ptr: Pointer
    assignments_ptr: Pointer  # [num_rows] assignment of each row; -1: padding
    block_expert_ptr: Pointer  # [num_rows / block_m] expert of each block
    num_rows_ptr: Pointer  # [] rows in use


class RoutedLayerTensors(NamedTuple):
    """Inputs of the expert layer whose launch chooses the experts."""

    x_ptr: Pointer  # as in `LayerTensors`, up to down
    x_scales_ptr: Pointer
    gate_up: Pointer
    down: Pointer
    logits_ptr: Pointer  # [num_tokens, num_experts]
    bias_ptr: Pointer  # [num_experts] float32, or unused
    mask_ptr: Pointer  # [num_tokens] bool, or unused


class LayerScratch(NamedTuple):
    """Intermediate results of the expert layer, by assignment."""

    hidden_ptr: Pointer  # [num_tokens * top_k, intermediate] activated rows, FP8 if the second GEMM takes FP8 rows
    hidden_scales_ptr: Pointer  # [num_tokens * top_k, intermediate / 128] float32 scales of FP8 rows; else unused
    rows_ptr: Pointer  # [num_tokens * top_k, k_splits, hidden] rows of the result, or partial sums of them
    order_ptr: Pointer  # [padded_assignments] expert * padded_assignments + assignment, sorted; unused if presorted
    blocks_ptr: Pointer  # [max_blocks] first position of each block in it; unused if presorted
    topk_idx_ptr: Pointer  # [num_tokens, top_k] expert ids that the launch chooses; else unused
    weights_ptr: Pointer  # [num_tokens, top_k] float32, their router weights


@dataclasses.dataclass(frozen=True)
class FusedTile:
    """Tile of one GEMM of the expert layer."""

    block_m: int  # assignments per block
    block_n: int
    block_k: int
    swap_ab: bool  # compute the transposed tile: weights are the first operand


@dataclasses.dataclass(frozen=True)
class FusedGemm:
    """Static sizes of one GEMM of the expert layer."""

    N: int
    K: int
    decoder: str  # as in `QuantizedGemm`; "": weights are [num_experts, K, N] in the tokens' dtype
    values_per_byte: int  # of quantized weights [num_experts, N, K]
    block_size: int  # as in `QuantizedGemm`
    prepacked: bool  # as in `QuantizedGemm`
    split_halves: bool  # a tile of prepacked weights has half of its columns from the gates, half from the up weights
    fp8_rows: bool  # rows are FP8 with a scale per 128 columns; else they have the tokens' dtype
    k_splits: int  # parts of K that are separate tasks
    tile: FusedTile


@dataclasses.dataclass(frozen=True)
class FusedMoE:
    """Static sizes of the expert layer in one launch."""

    num_tokens: int
    top_k: int
    hidden: int
    intermediate_size: int
    num_experts: int
    padded_assignments: int  # power of two >= num_tokens * top_k
    max_blocks: int  # most blocks of assignments
    presorted: bool  # assignments come sorted by expert; else every program sorts them
    sum_tokens: int  # tokens per task that sums rows
    sum_hidden: int  # columns per task that sums rows
    block_intermediate: int  # columns of a tile of activated rows
    gate_up: FusedGemm
    down: FusedGemm
    router: RouterSizes | None  # None: ids and weights are given


@dataclasses.dataclass(frozen=True)
class GluonMoE:
    """Static sizes of the expert layer in one launch in Gluon."""

    num_tokens: int
    top_k: int
    hidden: int
    intermediate_size: int
    num_experts: int
    decoder: str  # as in `QuantizedGemm`
    slots: int  # power of two >= num_tokens * top_k, at least 128
    bins: int  # power of two >= num_experts, at least 128
    tile_m: int  # assignments per block
    stages: int  # steps in shared memory
    consumers: int  # warpgroups that share the steps of a tile, 1 or 2
    copy_registers: int  # of a thread that copies
    help_registers: int  # of a thread of the second consumer
    hidden_tiles: int  # tiles that cover intermediate_size
    hidden_steps: int  # of the sum over K of the first GEMM
    row_tiles: int  # tiles that cover hidden
    row_steps: int  # of the sum over K of the second GEMM
    k_splits: int  # parts of these steps that are separate tasks
    split_steps: int  # steps of a part, the last excepted
    sum_hidden: int  # columns per task that sums rows
    sum_tiles: int  # tasks of a token
    sum_tasks: int
    router: RouterSizes | None  # None: ids and weights are given
