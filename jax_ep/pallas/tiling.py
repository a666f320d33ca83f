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
"""Rows of a program's accumulators: columns of a forward tile, rows and columns of a weight gradient tile."""
WEIGHT_STAGES = 5
"""Steps of a weight gradient in shared memory, next to results of four bytes; at least three, see gradient.py."""

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


def forward_tiles(num_rows: int, groups: int, out_itemsize: int = 2) -> ForwardTiles:
    """Return the tiles for `[M, K]` rows in groups; few heights compile faster."""
    if num_rows <= 64 * groups:
        return ForwardTiles(_LOW_HEIGHTS)
    return ForwardTiles(_HEIGHTS_TO_FLOAT32) if out_itemsize > 2 else ForwardTiles()
