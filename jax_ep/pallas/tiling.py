"""Sizes of the tiles of a product: chosen by its shape, static in its kernel."""

from __future__ import annotations

import dataclasses

CONSUMERS = 2
"""Warpgroups that multiply; one more loads."""
STEP = 64
"""Length of the contraction in one step: a row of 128 bytes, the widest that shared memory swizzles."""
ALIGNMENT = 8
"""Rows of the blocks in which operands lie in shared memory. Copies of whole blocks begin at multiples of it."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sizes of one kernel.

    Attributes:
      rows: of a tile of the result, 64 or 128, in weight gradients 128; each consumer has 64.
      columns: of a tile of the result, 128 or 256; consumers share them out where the tile has 64 rows.
      stages: steps whose operands are in shared memory.
      band: tiles of rows that programs visit together, so that they find each other's columns in the L2 cache.
    """

    rows: int
    columns: int
    stages: int
    band: int = 8

    @property
    def splits_columns(self) -> bool:
        """Whether the second consumer has the other columns, not the other rows."""
        return self.rows == 64

    @property
    def consumer_columns(self) -> int:
        """Columns of one consumer."""
        return self.columns // CONSUMERS if self.splits_columns else self.columns


def forward_tiles(num_rows: int, columns: int, groups: int) -> Tiles:
    """For `[M, K]` rows in groups to `[M, N]`: groups of few rows get low tiles.

    Bands of four tiles: programs whose groups have remainders stay closer together, so that they share what the L2
    cache holds. What would let some of them run ahead costs more than it saves (docs/performance.md).
    """
    return _tiles(64 if num_rows <= 64 * groups else 128, columns, band=4)


def weight_tiles(columns: int) -> Tiles:
    """For `[G, K, N]` out of `[M, K]` and `[M, N]`."""
    return _tiles(128, columns, band=8)


def _tiles(rows: int, columns: int, band: int) -> Tiles:
    # Wide tiles read less, but not where an eighth of them would lie outside of the matrix.
    wide = -(-columns // 256) * 256 * 7 <= columns * 8
    return Tiles(rows, 256, 4, band) if wide else Tiles(rows, 128, 6, band)
