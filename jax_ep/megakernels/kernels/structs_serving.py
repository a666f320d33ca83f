"""Structures of low latency, of masked products, and of passes over rows; see structs.py."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from .structs import Product
from .structs_gemm import QuantizedGemm


class LowLatencyBuffers(NamedTuple):
    """The low-latency buffers of a launch (low_latency_buffers.py), each `[RANKS]` by rank.

    Attributes:
      epochs: numbers of this launch.
      outgoing: addresses of the buffers to write to.
      incoming: addresses of the buffers to read.
    """

    epochs: Any
    outgoing: Any
    incoming: Any


class LowLatencyPlan(NamedTuple):
    """What a low-latency dispatch says of its rows, as `LowLatencyHandle`.

    Attributes:
      sizes_ptr: `[L]` rows of each local expert.
      token_ptr: `[L, W * M]` token of each row at its source; -1: none.
      start_ptr: `[L, W]` position of the first row of each source.
      count_ptr: `[L, W]` rows of each source.
      slot_row_ptr: `[W, M, K]` row of each slot here; -1: none.
      own_ids_ptr: `[M, K]` ids of this rank's tokens.
      num_invalid_ptr: `[]` invalid ones among them.
    """

    sizes_ptr: Any
    token_ptr: Any
    start_ptr: Any
    count_ptr: Any
    slot_row_ptr: Any
    own_ids_ptr: Any
    num_invalid_ptr: Any


class RowSources(NamedTuple):
    """Where rows of a low-latency dispatch came from, and where they belong: as those of `LowLatencyPlan`."""

    token_ptr: Any
    start_ptr: Any
    slot_row_ptr: Any
    own_ids_ptr: Any


@dataclasses.dataclass(frozen=True)
class LowLatencyDispatchTile:
    """Blocks of low-latency dispatch.

    Attributes:
      SEND_H: columns of a token that are sent at a time.
      BLOCK_T: tokens of a task that brings them to their rows.
      BLOCK_H: columns of these at a time.
      BLOCK_G: a power of two that covers G.
      CHOICES: a power of two that covers K.
      RANKS: a power of two that covers W.
      CHUNK: tokens whose ids are compared at a time.
      LAG: blocks between sending one and copying what has arrived.
      DIRECT: each copy computes its rows by itself.
    """

    SEND_H: int
    BLOCK_T: int
    BLOCK_H: int
    BLOCK_G: int
    CHOICES: int
    RANKS: int
    CHUNK: int
    LAG: int
    DIRECT: bool


@dataclasses.dataclass(frozen=True)
class LowLatency:
    """Static sizes that low-latency dispatch and combine have in common.

    Attributes:
      W: ranks of the group.
      T: tokens of a rank.
      M: tokens that a rank may have.
      K: experts of a token.
      H: columns.
      L: local experts.
    """

    W: int
    T: int
    M: int
    K: int
    H: int
    L: int


@dataclasses.dataclass(frozen=True)
class LowLatencyDispatch(LowLatency):
    """Static sizes of low-latency dispatch.

    Attributes:
      G: scales of a token.
      GROUP: columns of a scale, where the kernel quantises; else 0.
      IDS: byte offset of the ids in a low-latency buffer.
      VALUES: byte offset of the tokens.
      SCALES: byte offset of their scales.
      COUNTED: only some of the tokens count.
      tile: blocks.
    """

    G: int
    GROUP: int
    IDS: int
    VALUES: int
    SCALES: int
    COUNTED: bool
    tile: LowLatencyDispatchTile


@dataclasses.dataclass(frozen=True)
class LowLatencyCombineTile:
    """Blocks of low-latency combine.

    Attributes:
      BLOCK_H: columns at a time.
      CHOICES: a power of two that covers K.
      RANKS: a power of two that covers W.
      LAG: tokens between sending for one and adding what has arrived.
      SUMS: the weighted sum of a token's rows travels, not each row.
    """

    BLOCK_H: int
    CHOICES: int
    RANKS: int
    LAG: int
    SUMS: bool


@dataclasses.dataclass(frozen=True)
class LowLatencyCombine(LowLatency):
    """Static sizes of low-latency combine.

    Attributes:
      WEIGHTS: byte offset of the router weights in a low-latency buffer.
      VALUES: byte offset of the sums or rows.
      SCALES: byte offset of their scales.
      FP8: they travel as FP8.
      tile: blocks.
    """

    WEIGHTS: int
    VALUES: int
    SCALES: int
    FP8: bool
    tile: LowLatencyCombineTile


@dataclasses.dataclass(frozen=True)
class MaskedTile:
    """How a masked product is covered.

    Attributes:
      BM: rows of a tile.
      BN: columns of a tile.
      BK: depth of one step.
      SWAP: the product is turned.
    """

    BM: int
    BN: int
    BK: int
    SWAP: bool


@dataclasses.dataclass(frozen=True)
class MaskedGemm(Product):
    """Static sizes of a masked grouped GEMM, `[G, M, K]` times `[G, N, K]`.

    Attributes:
      FP8: operands have scales.
      tile: blocks.
    """

    FP8: bool
    tile: MaskedTile


@dataclasses.dataclass(frozen=True)
class MaskedActivationTile:
    """Blocks of the masked activation: BM rows, BN columns."""

    BM: int
    BN: int


@dataclasses.dataclass(frozen=True)
class MaskedActivation:
    """Static sizes of a masked gated activation.

    Attributes:
      M, G, GROUPS: as those of `MaskedGemm`.
      N: columns of the result.
      QUANTIZE: the result is FP8 with scales.
      tile: blocks.
    """

    M: int
    N: int
    G: int
    GROUPS: int
    QUANTIZE: bool
    tile: MaskedActivationTile


@dataclasses.dataclass(frozen=True)
class LowLatencyGemmCombine(LowLatency):
    """Static sizes of a masked grouped GEMM with low-latency combine.

    Attributes:
      VALUES: byte offset of the rows in a low-latency buffer.
      BLOCK_H: columns that are added up at a time.
      CHOICES: a power of two that covers K.
      RANKS: a power of two that covers W.
      QUANTIZED: matrices are in 8 or 4 bits.
      gemm: of the product.
    """

    VALUES: int
    BLOCK_H: int
    CHOICES: int
    RANKS: int
    QUANTIZED: bool
    gemm: MaskedGemm | QuantizedGemm


@dataclasses.dataclass(frozen=True)
class Sort:
    """Static sizes of the sort of slots by expert.

    Attributes:
      N: slots.
      K: slots of a token.
      FIRST: the first local expert.
      L: local experts.
      R: rows.
      BLOCK_SIZE: rows of a block of one expert.
      BLOCK: slots of a program, whole LANES.
      LANES: slots that get their rows at a time.
      COUNTED: slots that are counted at a time.
      BINS: a power of two that covers the experts.
    """

    N: int
    K: int
    FIRST: int
    L: int
    R: int
    BLOCK_SIZE: int
    BLOCK: int
    LANES: int
    COUNTED: int
    BINS: int


class LayerTensors(NamedTuple):
    """What an expert layer on one device is made of.

    Attributes:
      x_ptr: `[T, H]` tokens, in FP8 where the first product takes them so.
      x_scales_ptr: `[T, H / 128]` float32 of tokens in FP8; else anything in float32.
      gate_up: descriptor of `[E, H, 2 * I]`, or of `[E, H, I]` without gates; in 8 or 4 bits of `[E, ., H]`.
      down: descriptor of `[E, I, H]`; in 8 or 4 bits of `[E, H, I]`.
      ids_ptr: `[T, K]` experts.
      weights_ptr: `[T, K]` float32.
    """

    x_ptr: Any
    x_scales_ptr: Any
    gate_up: Any
    down: Any
    ids_ptr: Any
    weights_ptr: Any


class SortedLayerTensors(NamedTuple):
    """The same, and the slots sorted by expert, as `jax_ep.SortedTokens` has them for blocks of BM.

    Attributes:
      x_ptr, x_scales_ptr, gate_up, down, ids_ptr, weights_ptr: as those of `LayerTensors`.
      slots_ptr: `[R]` slots.
      block_expert_ptr: `[R / BM]` experts.
      num_rows_ptr: `[]` rows in use.
    """

    x_ptr: Any
    x_scales_ptr: Any
    gate_up: Any
    down: Any
    ids_ptr: Any
    weights_ptr: Any
    slots_ptr: Any
    block_expert_ptr: Any
    num_rows_ptr: Any


class LayerScratch(NamedTuple):
    """What lies between the products of the expert layer, and behind the second, by slots.

    Attributes:
      hidden_ptr: `[T * K, I]` activated rows, in FP8 where the second product takes them so.
      hidden_scales_ptr: `[T * K, I / 128]` float32 then; else nothing.
      rows_ptr: `[T * K, SPLITS, H]` rows of the result, or parts of them.
      order_ptr: `[SLOTS]` expert * SLOTS + slot, in order, of slots that are not sorted; else nothing.
      blocks_ptr: `[MOST_BLOCKS]` the first place of each block in it; else nothing.
    """

    hidden_ptr: Any
    hidden_scales_ptr: Any
    rows_ptr: Any
    order_ptr: Any
    blocks_ptr: Any


@dataclasses.dataclass(frozen=True)
class FusedTile:
    """Blocks of a product of the expert layer in one launch.

    Attributes:
      BM: slots of a block.
      BN: columns of the matrix.
      BK: depth of one step.
      SWAP: the product is turned, so that the matrix is what tensor cores take 64 rows of.
    """

    BM: int
    BN: int
    BK: int
    SWAP: bool


@dataclasses.dataclass(frozen=True)
class FusedProduct:
    """Static sizes of a product of the expert layer in one launch.

    Attributes:
      N: columns of a matrix.
      K: its depth.
      DECODER: see `QuantizedGemm`; "": weights are `[E, K, N]` in the dtype of tokens.
      PER_BYTE: elements in a byte, of `[E, N, K]`.
      BLOCK_SIZE, PREPACKED: see `QuantizedGemm`.
      HALVES: blocks of prepacked weights have half of their columns in the first half, of gates, half in the second.
      FP8_TOKENS: rows are FP8, with a scale for each 128 columns; else of the dtype of tokens.
      SPLITS: parts of the depth that are tasks of their own.
      tile: blocks.
    """

    N: int
    K: int
    DECODER: str
    PER_BYTE: int
    BLOCK_SIZE: int
    PREPACKED: bool
    HALVES: bool
    FP8_TOKENS: bool
    SPLITS: int
    tile: FusedTile


@dataclasses.dataclass(frozen=True)
class FusedMoE:
    """Static sizes of the expert layer in one launch.

    Attributes:
      T: tokens.
      K: experts of a token.
      H: columns of tokens.
      INNER: columns of activated rows.
      E: experts.
      SLOTS: a power of two that covers T * K.
      MOST_BLOCKS: blocks of slots that there may be.
      SORTED: slots are sorted by expert; else every program sorts them.
      BT: tokens whose sums are one task.
      BH: columns of that.
      BN: columns of I of a tile of hidden rows.
      gate_up: the first product.
      down: the second product.
    """

    T: int
    K: int
    H: int
    INNER: int
    E: int
    SLOTS: int
    MOST_BLOCKS: int
    SORTED: bool
    BT: int
    BH: int
    BN: int
    gate_up: FusedProduct
    down: FusedProduct


@dataclasses.dataclass(frozen=True)
class RowPass:
    """Static sizes of a pass over the rows in use of `[R, H]`.

    Attributes:
      R: rows, in use or not.
      H: columns.
      G: groups.
      GROUPS: a power of two that covers the groups.
      BR: rows of a block.
      BC: columns of a block.
    """

    R: int
    H: int
    G: int
    GROUPS: int
    BR: int
    BC: int


@dataclasses.dataclass(frozen=True)
class ColumnPass:
    """Static sizes of a pass over blocks of 128 rows of a group, which turns `[M, H]` into `[H, P]`.

    Attributes:
      M: rows, in use or not.
      H: columns.
      G: groups.
      GROUPS: a power of two that covers the groups.
      BR: 128, rows of a block.
      BC: columns of a block.
      P: places for rows.
    """

    M: int
    H: int
    G: int
    GROUPS: int
    BR: int
    BC: int
    P: int


@dataclasses.dataclass(frozen=True)
class Activation:
    """What experts compute between their products, as `jax_ep.Experts` says it.

    Attributes:
      NAME: of the activation.
      GATED: half of the columns are gates.
      INTERLEAVED: gates are in the even columns, else in the first half.
      ALPHA: factor in "silu".
      CLAMP: limit of gates and of what they multiply; None: there is none.
      UP_OFFSET: added to what gates multiply.
      ON_INPUT: weights scale hidden rows, else results.
    """

    NAME: str
    GATED: bool
    INTERLEAVED: bool
    ALPHA: float
    CLAMP: float | None
    UP_OFFSET: float
    ON_INPUT: bool


class RowBias(NamedTuple):
    """Biases of hidden rows: `values_ptr [G, N]`, and the group of each row, `group_ptr [R]`."""

    values_ptr: Any
    group_ptr: Any
