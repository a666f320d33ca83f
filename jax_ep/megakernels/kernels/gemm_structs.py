"""Structs of the GEMMs and of the passes between them, on one device; see exchange_structs.py.

`M`, `N` and `K` are GEMM sizes: `[M, K]` rows times `[num_groups, K, N]` weights. A masked GEMM has M rows per group.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypeAlias

Pointer: TypeAlias = Any  # noqa: UP040
"""A Triton pointer or descriptor; on the host an array, the shape and dtype of a result, or a `Descriptor`."""

Value: TypeAlias = Any  # noqa: UP040
"""A Triton scalar or block of values."""


@dataclasses.dataclass(frozen=True)
class GemmSizes:
    """Static sizes that all grouped GEMMs share."""

    M: int  # rows of all groups; of each group in a masked GEMM
    N: int
    K: int
    num_groups: int
    padded_groups: int  # power of two >= num_groups


@dataclasses.dataclass(frozen=True)
class GemmTile:
    """Tile of a grouped GEMM."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int  # row tiles of one rasterization band, which share weights in the L2 cache


@dataclasses.dataclass(frozen=True)
class GluonGemm:
    """Static sizes of the grouped GEMM in Gluon, and of its weight gradient, for which K is all rows."""

    M: int  # rows of all groups; of each group in a weight gradient
    N: int
    steps: int  # of the sum over K
    num_groups: int
    tile_m: int
    tile_n: int
    stages: int  # steps in shared memory
    group_m: int  # row tiles of one band, see gluon_gemm.place
    staged: int = 1  # waves of a consumer that are stored at a time
    home_groups: int = 0  # of the first of two gradients; 0: there is one

    @property
    def groups_at_home(self) -> int:
        """Groups that are no spare slots."""
        return self.home_groups or self.num_groups

    @property
    def tiles_n(self) -> int:
        """Tiles that cover N."""
        return -(-self.N // self.tile_n)


@dataclasses.dataclass(frozen=True)
class GluonGemm16:
    """Static sizes of the grouped GEMM of 16-bit operands in Gluon, and of its weight gradient (gluon_gemm16.py)."""

    M: int  # rows of all groups
    N: int
    K: int  # in a weight gradient the rows of its results
    num_groups: int
    group_m: int  # row tiles of one band
    part_n: int  # columns that are stored at a time: 128 bytes, of activated rows 64
    transposed: bool = False  # weights are [num_groups, N, K]
    is_gradient: bool = False
    home_groups: int = 0  # groups of the first of two arrays of weights, or gradients; 0: there is one array
    activation: Activation | None = None  # weights are [num_groups, K, 2 * N], and results activated rows
    low_tiles: bool = False  # no tile of a gradient of a large group has more than two waves
    weights_n: int = 256  # columns of weights that a tile multiplies
    depth: int = 64  # of a step of the sum
    stages: int = 3  # steps in shared memory
    gathers: bool = False  # rows are those of dispatched tokens, which have no descriptor

    @property
    def tile_n(self) -> int:
        """Columns of a tile of the result."""
        return self.weights_n if self.activation is None else self.weights_n // 2

    @property
    def groups_at_home(self) -> int:
        """Groups that are no spare slots."""
        return self.home_groups or self.num_groups

    @property
    def box_n(self) -> int:
        """Columns of weights that are copied at a time."""
        return self.weights_n if self.activation is None else self.weights_n // 4

    @property
    def tiles_n(self) -> int:
        """Tiles that cover N."""
        return -(-self.N // self.tile_n)


@dataclasses.dataclass(frozen=True)
class PrepackedGemm:
    """Static sizes of the GEMM of prepacked weights in Gluon."""

    M: int  # rows of all groups; of each group if masked
    N: int
    steps: int  # of the sum over K
    num_groups: int
    lanes: int  # power of two > num_groups, at least 32
    tile_m: int
    tiles_n: int  # tiles that cover N
    stages: int  # steps in shared memory
    masked: bool
    decoder: str  # as in `QuantizedGemm`


@dataclasses.dataclass(frozen=True)
class GroupedGemm(GemmSizes):
    """Static sizes of a grouped GEMM."""

    transposed: bool  # weights are [num_groups, N, K]
    tma_parts: int  # parts of a tile's columns that TMA stores in turn; 0: store through a pointer
    tile: GemmTile
    home_groups: int = 0  # groups of the first of two arrays of weights; 0: there is one array


@dataclasses.dataclass(frozen=True)
class QuantizedTile:
    """Tile of a GEMM with quantized weights."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int  # as in `GemmTile`
    swap_ab: bool  # compute the transposed tile: weights are the first operand


@dataclasses.dataclass(frozen=True)
class QuantizedGemm(GemmSizes):
    """Static sizes of a GEMM with quantized weights, `[., M, K]` times `[num_groups, N, K]`."""

    decoder: str  # module of jax_ep/formats/kernels that decodes the weights
    values_per_byte: int
    block_size: int  # values of a column that share a scale; 0: all
    prepacked: bool  # weights are in the layout "prepacked", eight values per uint32
    tma_parts: int  # 0: tiles are stored through a pointer
    tile: QuantizedTile


@dataclasses.dataclass(frozen=True)
class WeightGradientTile:
    """Tile of a weight gradient."""

    block_m: int  # rows of the tile, along K of the forward GEMM
    block_n: int  # columns of the tile
    block_rows: int  # rows of the operands that one step contracts
    group_m: int  # as in `GemmTile`


@dataclasses.dataclass(frozen=True)
class WeightGradient(GemmSizes):
    """Static sizes of a weight gradient: per group, `[K, rows]` times `[rows, N]`."""

    store_parts: int  # 1, 2 or 4 parts of a tile's columns, stored in turn
    tma_store: bool  # store by TMA instead of through a pointer
    tile: WeightGradientTile
    home_groups: int = 0  # as in `GroupedGemm`


class SplitWeights(NamedTuple):
    """Weights or gradients of weights in two arrays, of the first groups and of the others."""

    home: Pointer
    spare: Pointer


class Bias(NamedTuple):
    """A bias that a grouped GEMM adds to its result."""

    values_ptr: Pointer  # [num_groups, N]
    scales_ptr: Pointer  # [M] float32 factor of each row


@dataclasses.dataclass(frozen=True)
class MaskedTile:
    """Tile of a masked GEMM."""

    block_m: int
    block_n: int
    block_k: int
    swap_ab: bool  # compute the transposed tile: weights are the first operand


@dataclasses.dataclass(frozen=True)
class MaskedGemm(GemmSizes):
    """Static sizes of a masked grouped GEMM, `[num_groups, M, K]` times `[num_groups, N, K]`."""

    fp8: bool  # operands are FP8 with scales
    tile: MaskedTile


@dataclasses.dataclass(frozen=True)
class MaskedActivationTile:
    """Blocks of the masked activation."""

    block_m: int
    block_n: int


@dataclasses.dataclass(frozen=True)
class MaskedActivation:
    """Static sizes of a masked gated activation, on the result of a masked GEMM."""

    M: int  # rows of each group
    N: int  # columns of the activated rows
    num_groups: int
    padded_groups: int  # power of two >= num_groups
    quantizes: bool  # whether the result is FP8 with scales
    tile: MaskedActivationTile


@dataclasses.dataclass(frozen=True)
class RowPass:
    """Static sizes of a pass over the rows in use of `[num_rows, width]`."""

    num_rows: int  # all rows, in use or not
    width: int  # columns of the result
    num_groups: int
    padded_groups: int  # power of two >= num_groups
    block_rows: int
    block_columns: int


@dataclasses.dataclass(frozen=True)
class ColumnPass:
    """Static sizes of a pass that transposes `[M, width]` to `[width, num_places]` in blocks of 128 rows of a group."""

    M: int  # all rows, in use or not, the contraction size of a weight gradient
    width: int  # columns of the input
    num_groups: int
    padded_groups: int  # power of two >= num_groups
    block_rows: int  # 128
    block_columns: int
    num_places: int  # columns of the result: each group's rows padded to 128


@dataclasses.dataclass(frozen=True)
class Activation:
    """The computation between the two GEMMs of an expert, as in `jax_ep.Experts`."""

    name: str  # of the activation
    gated: bool  # half of the columns are gates
    interleaved: bool  # gates are the even columns instead of the first half
    alpha: float  # factor inside of "silu"
    clamp: float | None  # limit of gates and of up values; None: no limit
    up_offset: float  # added to up values
    weights_on_input: bool  # router weights scale hidden rows instead of results


class RowBias(NamedTuple):
    """Biases of hidden rows."""

    values_ptr: Pointer  # [num_groups, N]
    group_ptr: Pointer  # [num_rows] group of each row
