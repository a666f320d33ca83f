"""Tile sizes of the GEMMs: chosen by shape, static in the kernel."""

from __future__ import annotations

import dataclasses

CONSUMERS = 2
"""Warpgroups that multiply; one more loads."""
STEP = 64
"""Length of K in one step: a row of 128 bytes, the widest that shared memory swizzles."""
ALIGNMENT = 8
"""Rows of the swizzled blocks of operands in shared memory. Copies of whole blocks begin at multiples of it."""
ROW_UNIT = 16
"""Unit of the block_m candidates of forward tiles."""
CHUNK = 64
"""Rows of a consumer's accumulators: as many as the tensor cores take at a time."""
TILE = CONSUMERS * CHUNK
"""Rows of a program's accumulators: columns of a forward tile, rows of a weight gradient tile."""

_FEWEST_STAGES = 4
_LOW_HEIGHTS = (32, 64, 80, 96, 112, 128)
_HEIGHTS_TO_FLOAT32 = tuple(range(32, 257, 32))


@dataclasses.dataclass(frozen=True)
class ForwardTiles:
    """Tile sizes of the forward kernel."""

    # Candidates for block_m, multiples of `ROW_UNIT` in increasing order. Each has a loop in the kernel, which takes
    # time to compile. Above half of the last one, a missing multiple makes tiles of groups that have few of them
    # compute extra rows. Below that, one tile serves a group, and reading its weights takes longer than multiplying:
    # every other multiple suffices. Extra rows of a tile must lie in the last chunk that it stores, of 64 rows, or 32
    # in float32.
    heights: tuple[int, ...] = (64, 128, 192, 224, 240, 256)
    stages: int = 4  # steps whose operands are in shared memory
    # Most row tiles that programs visit together, so that they share columns of the weights in the L2 cache
    band: int = 4


@dataclasses.dataclass(frozen=True)
class WeightTiles:
    """Tile sizes of the weight gradient kernel.

    Raises:
      ValueError: with fewer stages, producer and consumers would wait for each other.
    """

    columns: int  # block_n, 128 or 256; a tile has `TILE` rows, half of them for each consumer
    # See `ForwardTiles`; at least four. The producer hands over a step when the next one's slot is free, and the slot
    # of a tile's last step is free in the second step of the next tile.
    stages: int
    band: int = 8  # see `ForwardTiles`

    def __post_init__(self) -> None:
        if self.stages < _FEWEST_STAGES:
            raise ValueError(f"stages={self.stages}, weight gradients need at least {_FEWEST_STAGES}.")


def forward_tiles(num_rows: int, groups: int, out_itemsize: int = 2) -> ForwardTiles:
    """Return the tiles for `[M, K]` rows in groups; few heights compile faster."""
    if num_rows <= 64 * groups:
        return ForwardTiles(_LOW_HEIGHTS)
    return ForwardTiles(_HEIGHTS_TO_FLOAT32) if out_itemsize > 2 else ForwardTiles()


def weight_tiles(columns: int, out_itemsize: int = 2) -> WeightTiles:
    """Return the tiles for `[num_groups, K, N]` out of `[M, K]` and `[M, N]`."""
    if out_itemsize > 2:  # results of another dtype have their own shared memory
        return WeightTiles(128, 5)
    return WeightTiles(256, 4) if _are_wide(columns) else WeightTiles(128, 6)


def _are_wide(columns: int) -> bool:
    """Return whether wide tiles pay: they read less, unless an eighth of them would lie outside of the weights."""
    return -(-columns // 256) * 256 * 7 <= columns * 8
