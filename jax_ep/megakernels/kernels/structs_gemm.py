"""Structures of products, alone and in a launch with an exchange; see structs.py."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from .structs import Combine, Product, SumTile


@dataclasses.dataclass(frozen=True)
class GemmTile:
    """How a product is covered.

    Attributes:
      BM: rows of a tile.
      BN: columns of a tile.
      BK: depth of one step.
      GROUP_M: row tiles that share the columns of a matrix while they are in the L2 cache.
    """

    BM: int
    BN: int
    BK: int
    GROUP_M: int


@dataclasses.dataclass(frozen=True)
class GroupedGemm(Product):
    """Static sizes of a grouped GEMM.

    Attributes:
      TRANSPOSED: matrices are `[G, N, K]`.
      TMA_PARTS: parts of a tile's columns that TMA stores one after another; 0: tiles are stored through a pointer.
      tile: blocks.
    """

    TRANSPOSED: bool
    TMA_PARTS: int
    tile: GemmTile


@dataclasses.dataclass(frozen=True)
class QuantizedTile:
    """How a product with quantised matrices is covered.

    Attributes:
      BM, BN, BK, GROUP_M: as those of `GemmTile`.
      SWAP: the product is turned.
    """

    BM: int
    BN: int
    BK: int
    GROUP_M: int
    SWAP: bool


@dataclasses.dataclass(frozen=True)
class QuantizedGemm(Product):
    """Static sizes of a product with quantised matrices, `[., M, K]` times `[G, N, K]`.

    Attributes:
      DECODER: the module of jax_ep/formats/kernels that decodes the weights.
      PER_BYTE: elements in a byte.
      BLOCK_SIZE: elements of a column that share a scale; 0: all.
      PREPACKED: elements are in the order of `prepack_experts`, eight in a uint32.
      TMA_PARTS: 0, as tiles are stored through a pointer.
      tile: blocks.
    """

    DECODER: str
    PER_BYTE: int
    BLOCK_SIZE: int
    PREPACKED: bool
    TMA_PARTS: int
    tile: QuantizedTile


@dataclasses.dataclass(frozen=True)
class WeightGradientTile:
    """How the gradient of a group's matrix is covered.

    Attributes:
      BM: rows of a tile.
      BN: columns of a tile.
      BR: rows of the operands in one step.
      GROUP_M: as that of `GemmTile`.
      STAGES: steps in flight; None: as many as the launch says.
    """

    BM: int
    BN: int
    BR: int
    GROUP_M: int
    STAGES: int | None


@dataclasses.dataclass(frozen=True)
class WeightGradient(Product):
    """Static sizes of a weight gradient: for each group, `[K, rows]` times `[rows, N]`.

    Attributes:
      PARTS: 1, 2 or 4 parts of a tile's columns that are stored one after another.
      TMA_STORE: tiles are stored by TMA; else through a pointer.
      tile: blocks.
    """

    PARTS: int
    TMA_STORE: bool
    tile: WeightGradientTile


class Groups(NamedTuple):
    """Where the rows of each group are, each `[GROUPS]` int32.

    Attributes:
      starts: first rows.
      rows: numbers of rows.
    """

    starts: Any
    rows: Any


class Tile(NamedTuple):
    """A tile of a grouped GEMM.

    Attributes:
      group: whose matrix it is a product with.
      row: its first row.
      end: of the group's rows, where the tile ends, too, or before.
      column: its first column.
    """

    group: Any
    row: Any
    end: Any
    column: Any


class Bias(NamedTuple):
    """Added to a product: `values_ptr [G, N]`, a row for each group, times `scales_ptr [M]` float32 of each row."""

    values_ptr: Any
    scales_ptr: Any


class GradientTile(NamedTuple):
    """A tile of a group's weight gradient.

    Attributes:
      group: whose gradient.
      start: first of the group's rows, over which the sum runs.
      end: behind the last of them.
      row: first row of the tile.
      column: its first column.
    """

    group: Any
    start: Any
    end: Any
    row: Any
    column: Any


class WeightGradientOperands(NamedTuple):
    """Bounded descriptors of the two arrays, `[M, K]` and `[M, N]`, whose rows a weight gradient multiplies."""

    lhs: Any
    rhs: Any


class HandleArrays(NamedTuple):
    """The arrays of a handle: ids and slot_row `[W, T, K]`, row_slot `[R]`, sizes `[L]`."""

    ids_ptr: Any
    slot_row_ptr: Any
    row_slot_ptr: Any
    sizes_ptr: Any


class OrderedSends(NamedTuple):
    """What each rank sends, in which order, and what its experts wait for.

    A token goes to a rank when that computes the first of the token's experts there. So the tokens that local experts
    0..e need are a prefix of what each source sends.

    Attributes:
      order_ptr: `[W, T]` int32. This rank's tokens in the order in which they go to each rank; those that do not, last.
      num_sends_ptr: `[W]` int32. Tokens that go to each rank.
      num_needed_ptr: `[W, L]` int32. How many of the tokens that each source sends here local experts 0..e need.
    """

    order_ptr: Any
    num_sends_ptr: Any
    num_needed_ptr: Any


@dataclasses.dataclass(frozen=True)
class DispatchGemm:
    """Static sizes of dispatch + GEMM.

    Attributes:
      T: tokens of a rank.
      K: experts of a token.
      COMM: programs that communicate first.
      BLOCK_T: tokens of a task and of a flag.
      BLOCK_H: columns that are copied at a time.
      SAVES: tokens that arrive are copied.
      WEIGHTS: byte offset in the data area of router weights.
      product: of all rows with the matrices of the local experts.
    """

    T: int
    K: int
    COMM: int
    BLOCK_T: int
    BLOCK_H: int
    SAVES: bool
    WEIGHTS: int
    product: GroupedGemm


@dataclasses.dataclass(frozen=True)
class GemmCombine:
    """Static sizes of GEMM + combine.

    Attributes:
      T: tokens of a rank.
      K: experts of a token.
      DROPS: slots may have found no row.
      CLEAR_T: tokens whose slots are cleared at a time, where they found none.
      CLEAR_H: columns of that.
      SUM_T: tokens of a task that makes sums.
      WEIGHT_T: tokens whose slots get the values of their rows at a time.
      WEIGHTS: byte offset in the data area of what comes back for slots, such as gradients of router weights.
      CHOICES: a power of two that covers K.
      sums: how rows are added up.
      product: of all rows with the matrices of the local experts.
      gradient: of these matrices; None: the launch makes none.
    """

    T: int
    K: int
    DROPS: bool
    CLEAR_T: int
    CLEAR_H: int
    SUM_T: int
    WEIGHT_T: int
    WEIGHTS: int
    CHOICES: int
    sums: SumTile
    product: GroupedGemm
    gradient: WeightGradient | None


@dataclasses.dataclass(frozen=True)
class CombineWithWeightGradient:
    """Static sizes of combine beside the weight gradient.

    Attributes:
      COMM: programs that communicate first.
      TASKS: tiles of the gradient that are taken at a time.
      combine: sizes of combine.
      gradient: sizes of the gradient.
    """

    COMM: int
    TASKS: int
    combine: Combine
    gradient: WeightGradient


class TokensByRow(NamedTuple):
    """Where the tokens of rows are.

    Attributes:
      own_ptr: `[T, .]` tokens of this rank.
      received_ptr: `[W * T, .]` tokens that arrive.
      row_slot_ptr: `[R]` slot of each row.
      rank: this rank.
    """

    own_ptr: Any
    received_ptr: Any
    row_slot_ptr: Any
    rank: Any
