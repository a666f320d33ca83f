"""Tiles of the grouped GEMM, by shape and GPU; benchmarks/grouped_gemm.py --sweep compares them."""

from __future__ import annotations

import dataclasses

import jax

MAX_GROUPS = 1024
"""More groups would take more registers than a program has to spare."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a grouped GEMM covers its result.

    Attributes:
      block_m: rows of a tile.
      block_n: columns of a tile.
      block_k: depth of one step.
      group_m: row tiles that share the columns of a matrix while they are in the L2 cache.
      num_warps: of a program.
      num_stages: blocks in flight, the one in use included.
      programs: per multiprocessor.
      tma_store: store by TMA, while the next tile is computed.
      store_parts: 1, 2 or 4 parts of a tile's columns that TMA stores one after another: each takes less shared memory.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 4
    programs: int = 1
    tma_store: bool = False
    store_parts: int = 1


@dataclasses.dataclass(frozen=True)
class WeightTiles:
    """How the weight gradient covers its result.

    Attributes:
      block_m: rows of a tile, columns of the left-hand side.
      block_n: columns of a tile, and of the right-hand side.
      block_r: rows of the operands in one step.
      group_m: see `Tiles`, as all that follow.
      num_warps: of a program.
      num_stages: blocks in flight.
      programs: per multiprocessor.
      tma_store: store by TMA, while the next tile is computed.
      store_parts: 1, 2 or 4 parts of a tile's columns that are stored one after another: each takes less shared memory.
    """

    block_m: int = 128
    block_n: int = 256
    block_r: int = 64
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 4
    programs: int = 1
    tma_store: bool = False
    store_parts: int = 1


@dataclasses.dataclass(frozen=True)
class Fp8Tiles:
    """How a grouped GEMM in FP8 covers its result, in steps of the 128 elements that share a scale.

    More than 128 by 128 elements take registers that a program of 8 warps has not: each has a sum, and the product of
    one step.

    Attributes:
      block_m: see `Tiles`, as all that follow.
      block_n: at most 128, the columns that share a scale.
      group_m: as in `Tiles`.
      num_warps: as in `Tiles`.
      num_stages: as in `Tiles`.
      programs: as in `Tiles`.
    """

    block_m: int = 128
    block_n: int = 128
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 5
    programs: int = 1


def forward_tiles(num_rows: int, columns: int, groups: int, out_itemsize: int) -> Tiles:
    """Tiles for `[num_rows, .]` times `[groups, ., columns]`."""
    if jax.default_backend() == "cpu":  # several steps, rows and columns at the sizes of tests
        return Tiles(block_m=64, block_n=32, block_k=16, num_stages=2)
    if num_rows <= 64 * groups or columns <= 128:
        # Few rows: the matrices are read once, whatever the tiles, and narrow ones keep more programs busy.
        return Tiles(block_m=64, block_n=128, num_warps=4, programs=2)
    if out_itemsize <= 2:
        return Tiles(num_stages=3, tma_store=True)
    # Tiles of float32 take twice the memory while they are stored, in the flat loop beside its buffers.
    return Tiles(block_n=128)


def fp8_tiles(num_rows: int, groups: int, out_itemsize: int) -> Fp8Tiles:
    """Tiles for FP8 rows `[num_rows, .]` times `groups` matrices."""
    if jax.default_backend() == "cpu":
        return Fp8Tiles(block_m=32, block_n=64, group_m=2, num_stages=2)
    if num_rows <= 64 * groups:
        return Fp8Tiles(block_m=64, num_warps=4, num_stages=3 if out_itemsize > 2 else 4, programs=2)
    return Fp8Tiles()


def weight_tiles(out_itemsize: int) -> WeightTiles:
    """Tiles for matrices whose elements have so many bytes."""
    if jax.default_backend() == "cpu":
        return WeightTiles(block_m=32, block_n=32, block_r=16, num_stages=2)
    if out_itemsize <= 2:
        # Two programs of narrow tiles: while one stores its tile, the other multiplies.
        return WeightTiles(block_n=128, num_warps=4, num_stages=3, programs=2, tma_store=True, store_parts=2)
    return WeightTiles(block_n=128)


def product_tile(columns: int) -> dict[str, int]:
    """Tile of a product on the tensor cores; narrow where the matrices are."""
    if jax.default_backend() == "cpu":
        return {"BM": 32, "BN": 16, "BK": 16}
    return {"BM": 128, "BN": 256 if columns > 128 else 128, "BK": 64}
