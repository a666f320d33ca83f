"""Tiles of the masked kernels, by the rows that a group can have and is expected to have."""

from __future__ import annotations

import dataclasses

import jax

from jax_ep.core.layout import power_of_two

_SHARED_BYTES = 226 << 10  # of a multiprocessor
ACTIVATION_PROGRAMS = 8


@dataclasses.dataclass(frozen=True)
class MaskedTiles:
    """How a masked product covers its rows.

    Attributes:
      block_m: rows of a tile; below 64, the product is turned and each warp has columns of the matrix.
      block_n: columns of a tile, at most 128 in FP8.
      block_k: depth of one step, 128 in FP8: 128 bytes of a row.
      num_warps: of a program.
      num_stages: blocks in flight, the one in use included.
      programs: per multiprocessor.
    """

    block_m: int
    block_n: int = 128
    block_k: int = 128
    num_warps: int = 4
    num_stages: int = 4
    programs: int = 2

    @property
    def swap(self) -> bool:
        """Whether the product is turned."""
        return self.block_m < 64


def _fewest_rows() -> int:
    """Rows of the smallest tile: for Blackwell, Triton 3.9 spills hundreds of registers of turned products."""
    device = jax.local_devices()[0]
    return 16 if device.platform == "cpu" or float(device.compute_capability) < 10.0 else 64


def masked_tiles(max_rows: int, expected_rows: int | None, itemsize: int, out_itemsize: int) -> MaskedTiles:
    """Tiles for groups of up to `max_rows` rows of elements of `itemsize` bytes.

    Counts scatter, and a group with one row more than a tile takes twice as long. So a tile has room for twice the
    expectation; rows that it has too many cost little, as long as matrices are most of what is read.
    """
    wanted = 64 if expected_rows is None else 2 * expected_rows
    block_m = min(max(_fewest_rows(), power_of_two(min(wanted, max_rows))), 128)
    tiles = MaskedTiles(block_m, block_k=128 // itemsize)
    if block_m == 128:  # sums of 128 rows, in FP8 beside those of the tensor cores, take the registers of two programs
        tiles = dataclasses.replace(tiles, num_warps=8, programs=1)
    stored = block_m * tiles.block_n * out_itemsize  # on its way to memory, beside what arrives
    stages = (_SHARED_BYTES // tiles.programs - stored) // ((block_m + tiles.block_n) * 128)
    return dataclasses.replace(tiles, num_stages=min(stages, 6))


def activation_tile(inner: int, quantize: bool) -> tuple[int, int]:
    """Rows and columns of a tile of the activation, for `inner` columns of the result."""
    columns = min(512, max(128 if quantize else 16, power_of_two(inner)))
    return max(1, 2048 // columns), columns
