"""Sizes of the tiles of a product: chosen by its shape, static in its kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

CONSUMERS = 2
"""Warpgroups that multiply; one more loads."""
STEP = 64
"""Length of the contraction in one step: a row of 128 bytes, the widest that shared memory swizzles."""
FP8_STEP = 128
"""The same of 8-bit operands: as many bytes, and the block of the contraction that shares scales."""
ALIGNMENT = 8
"""Rows of the blocks in which operands lie in shared memory. Copies of whole blocks begin at multiples of it."""
ROW_UNIT = 16
"""Heights of forward tiles are multiples of it."""
CHUNK = 64
"""Rows of the accumulators of a consumer, as many as tensor cores take at a time; it stores some columns at once."""
TILE = CONSUMERS * CHUNK
"""Rows of the accumulators of a program: columns of a forward tile, and rows of one of weight gradients."""

_FEWEST_STAGES = 4
_LOW_HEIGHTS = (32, 64, 80, 96, 112, 128)


@dataclasses.dataclass(frozen=True)
class ForwardTiles:
    """Sizes of the forward kernel.

    Attributes:
      heights: how many rows a tile may have, multiples of `ROW_UNIT` in increasing order. Each has a loop of its own in
        the kernel, which takes time to compile. All multiples above half of the last one are there, so that several
        tiles of a group can have the height that it needs; below, where one tile serves a group, reading its matrix
        takes longer than multiplying, and every other does. Rows that a tile is too high by must lie in the last chunk
        that it stores, of 32 rows in float32.
      stages: steps whose operands are in shared memory.
      band: most tiles of rows that programs visit together, so that they find each other's columns in the L2 cache.
      candidates: values that sweeps measure, the simplest first.
    """

    heights: tuple[int, ...] = (32, 64, 96, 128, 144, 160, 176, 192, 208, 224, 240, 256)
    stages: int = 4
    band: int = 4
    candidates: ClassVar[Mapping[str, tuple[int, ...]]] = {"stages": (3, 4), "band": (2, 4, 8, 16)}


@dataclasses.dataclass(frozen=True)
class Fp8Tiles:
    """Sizes of the forward kernel in FP8.

    Attributes:
      heights: how many rows a tile may have.
      columns: of a tile, 128 or 256.
      stages: see `ForwardTiles`.
      band: see `ForwardTiles`.
    """

    heights: ClassVar[tuple[int, int]] = (CHUNK, TILE)
    columns: int = 256
    stages: int = 3
    band: int = 4


@dataclasses.dataclass(frozen=True)
class WeightTiles:
    """Sizes of the kernel of weight gradients.

    Attributes:
      columns: of a tile of the result, 128 or 256; it has `TILE` rows, a part of them for each consumer.
      stages: see `ForwardTiles`; at least four. The loading warpgroup hands a step over when the next one's slot is
        free, and the slot of a tile's last step is free in the second step of the next tile.
      band: see `ForwardTiles`.

    Raises:
      ValueError: fewer stages, which would wait for each other.
    """

    columns: int
    stages: int
    band: int = 8
    candidates: ClassVar[Mapping[str, tuple[int, ...]]] = {"columns": (128, 256), "band": (4, 8, 16)}

    def __post_init__(self) -> None:
        if self.stages < _FEWEST_STAGES:
            raise ValueError(f"stages={self.stages}, weight gradients need at least {_FEWEST_STAGES}.")


@dataclasses.dataclass(frozen=True)
class Fp8WeightTiles:
    """Sizes of the kernel of weight gradients in FP8: fields of `WeightTiles` and `Fp8Tiles`."""

    columns: int = 256
    stages: int = 3
    band: int = 8


def forward_tiles(num_rows: int, groups: int) -> ForwardTiles:
    """For `[M, K]` rows in groups: where they are small, fewer heights, whose kernel takes less time to compile."""
    return ForwardTiles(_LOW_HEIGHTS) if num_rows <= 64 * groups else ForwardTiles()


def activated_tiles() -> ForwardTiles:
    """For products that store activated rows: two sums for each leave registers for half of the rows, or some more."""
    return ForwardTiles((*_LOW_HEIGHTS, 144), band=8)


def weight_tiles(columns: int, out_itemsize: int = 2) -> WeightTiles:
    """For `[G, K, N]` out of `[M, K]` and `[M, N]`."""
    if out_itemsize > 2:  # results of another dtype have memory of their own
        return WeightTiles(128, 5)
    return WeightTiles(256, 4) if _are_wide(columns) else WeightTiles(128, 6)


def fp8_tiles(columns: int) -> Fp8Tiles:
    """For `[M, N]`."""
    return Fp8Tiles() if _are_wide(columns) else Fp8Tiles(128, 5)


def fp8_weight_tiles(columns: int) -> Fp8WeightTiles:
    """For `[G, K, N]` out of columns in FP8."""
    return Fp8WeightTiles() if _are_wide(columns) else Fp8WeightTiles(128, 5)


def _are_wide(columns: int) -> bool:
    """Wide tiles read less, but not where an eighth of them would lie outside of the matrix."""
    return -(-columns // 256) * 256 * 7 <= columns * 8
