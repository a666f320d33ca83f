"""Decoder of FP8 weights with one scale per block of 128 by 128, which multiplies the sum of each step of 128."""

import triton
import triton.language as tl

from .common import FP8_BLOCK, broadcast_columns, multiply, to_float


@triton.jit
def locate_scales(scales_ptr, group, column, k, S: tl.constexpr):
    """Return a pointer to the scale of the block at (column, k), and the number of column blocks."""
    column_blocks: tl.constexpr = (S.N + FP8_BLOCK - 1) // FP8_BLOCK
    row = group.to(tl.int64) * column_blocks + column // FP8_BLOCK
    return scales_ptr + row * (S.K // FP8_BLOCK) + k // FP8_BLOCK, column_blocks


@triton.jit
def add_product(total, rows, packed, scales, scales_ptr, group, column, k, S: tl.constexpr):
    """Add the scaled product of one step, see quantized.py."""
    tl.static_assert(S.tile.block_k == FP8_BLOCK and FP8_BLOCK % S.tile.block_n == 0, "a tile has one scale in a step")
    source, _ = locate_scales(scales_ptr, group, column, k, S)
    # One scale for the tile and step: scale the sum of the step, then add.
    part = multiply(rows, to_float(packed, rows.dtype), tl.zeros(total.shape, tl.float32), S)
    return total + part * tl.load(source)


@triton.jit
def add_fp8_product(total, rows, factors, packed, scales, scales_ptr, group, column, k, S: tl.constexpr):
    """Add the scaled product of one step, see quantized.py; a tile may span several column blocks."""
    part = multiply(rows, packed, tl.zeros(total.shape, tl.float32), S)
    BLOCK_N: tl.constexpr = S.tile.block_n
    source, column_blocks = locate_scales(scales_ptr, group, column, k, S)
    if BLOCK_N > FP8_BLOCK:
        # A scale per column block.
        blocks = tl.arange(0, BLOCK_N) // FP8_BLOCK
        inside = column // FP8_BLOCK + blocks < column_blocks
        factors *= broadcast_columns(tl.load(source + blocks * (S.K // FP8_BLOCK), mask=inside, other=0.0), S)
    else:
        factors *= tl.load(source)
    return total + part * factors
