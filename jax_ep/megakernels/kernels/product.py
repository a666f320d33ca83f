"""Tiles of a product inside a kernel that also communicates: which rows and columns a tile has, and its sum over K.

The rows of a group are covered by tiles of BM rows, and by one of BM / 2 where at most that many remain. Tiles are
numbered group by group; in a group, GROUP_M row tiles times all column tiles come one after another, row tiles fastest,
so that the tiles which run at a time share what they read.
"""

import triton
import triton.language as tl

from .gemm_tile import load_rhs

GROUP_M = tl.constexpr(8)


@triton.jit
def row_tiles(size, BM: tl.constexpr):
    """Row tiles of a group of `size` rows."""
    return (size + BM - 1) // BM


@triton.jit
def count_row_tiles(sizes_ptr, G: tl.constexpr, BLOCK_G: tl.constexpr, BM: tl.constexpr):
    """Row tiles of all groups."""
    groups = tl.arange(0, BLOCK_G)
    return tl.sum(row_tiles(tl.load(sizes_ptr + groups, mask=groups < G, other=0), BM), axis=0)


@triton.jit
def find_group(tile, group, first_tile, first_row, sizes_ptr, COLUMN_TILES: tl.constexpr, BM: tl.constexpr):
    """From a group at or before that of `tile`, with its first tile and row, to the group of `tile`.

    Tiles come to a program in rising order: it moves on from its last one, mostly by a few groups.
    """
    size = tl.load(sizes_ptr + group)
    tiles = row_tiles(size, BM) * COLUMN_TILES
    while tile >= first_tile + tiles:
        group += 1
        first_tile += tiles
        first_row += size
        size = tl.load(sizes_ptr + group)
        tiles = row_tiles(size, BM) * COLUMN_TILES
    return group, first_tile, first_row, size


@triton.jit
def multiply(
    a_ptrs,
    b_desc,
    group,
    column,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """`[BM, BN]` float32: rows at `a_ptrs` (`[BM, BK]`, their first columns) times columns of the group's matrix.

    `b_desc` describes `[G, K, N]`, or `[G, N, K]` if TRANSPOSED; what it reads past K or N is zero.
    """
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        if K % BK == 0:
            a = tl.load(a_ptrs)
        else:
            a = tl.load(a_ptrs, mask=(k + tl.arange(0, BK) < K)[None, :], other=0.0)
        a_ptrs += BK
        total = tl.dot(a, load_rhs(b_desc, group, k, column, BN, BK, TRANSPOSED), total)
    return total
