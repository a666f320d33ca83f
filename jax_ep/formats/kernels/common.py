"""Tile arithmetic that decoders share, and the bit patterns of which they build their constants."""

import math
import struct

import triton
import triton.language as tl

FP8_BLOCK = tl.constexpr(128)
"""Elements of K, and columns of a block, that share an FP8 scale."""


def bf16x2(value: float) -> str:
    """A bfloat16 in both halves of a register, as assembler writes it."""
    bits = struct.pack(">f", value)[:2].hex().upper()
    return f"0x{bits}{bits}"


def e4m3_bytes(*values: float) -> int:
    """Four values that FP8 (e4m3) holds exactly, as the bytes of a register, the first one lowest."""
    word = 0
    for i, value in enumerate(values):
        mantissa, exponent = math.frexp(abs(value))
        bits = int((exponent + 6) * 8 + (2 * mantissa - 1) * 8) if value else 0
        word |= (bits | 0x80 * (value < 0)) << 8 * i
    return word


@triton.jit
def multiply(rows, weights, total, S: tl.constexpr):
    """Add `[BM, .]` rows times `[BN, .]` weights to `[BM, BN]`, or to `[BN, BM]` with SWAP."""
    if S.tile.swap_ab:
        total = tl.dot(weights, tl.trans(rows), total)
    else:
        total = tl.dot(rows, tl.trans(weights), total)
    return total


@triton.jit
def broadcast_columns(values, S: tl.constexpr):
    """`[BN]` values of columns, shaped for the sums of `multiply`."""
    return values[:, None] if S.tile.swap_ab else values[None, :]


@triton.jit
def repeat(values, TIMES: tl.constexpr):
    """Repeat each of `[BN, .]` values along the last axis."""
    BLOCK_N: tl.constexpr = values.shape[0]
    NUM: tl.constexpr = values.shape[1]
    return tl.reshape(tl.broadcast_to(values[:, :, None], (BLOCK_N, NUM, TIMES)), (BLOCK_N, NUM * TIMES))


@triton.jit
def repeat_per_byte(scales, S: tl.constexpr):
    """`[BN, BK / BLOCK_SIZE]` scales, one per byte of two nibbles, `[BN, BK / 2]`."""
    return repeat(scales, S.block_size // 2)


@triton.jit
def load_block_scales(scales_ptr, group, column, k, S: tl.constexpr):
    """Load `[BN, BK / BLOCK_SIZE]` scales of `[., N, K / BLOCK_SIZE]`."""
    per_column: tl.constexpr = S.K // S.block_size
    columns = column + tl.arange(0, S.tile.block_n)[:, None]
    blocks = k // S.block_size + tl.arange(0, S.tile.block_k // S.block_size)[None, :]
    source = scales_ptr + (group.to(tl.int64) * S.N + columns) * per_column + blocks
    return tl.load(source, mask=(columns < S.N) & (blocks < per_column), other=0)


@triton.jit
def to_float(values, dtype: tl.constexpr):
    """Convert 8 bits to `dtype`; FP8 by way of float32, from which the compiler makes two bfloat16 at a time."""
    if values.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        values = values.to(tl.float16).to(tl.float32)
    return values.to(dtype)


@triton.jit
def split_even_odd(rows, S: tl.constexpr):
    """Split rows `[BM, BK]` into the columns of low and of high nibbles.

    A byte holds two neighbors. The low nibbles of all bytes are one operand and the high ones another: a sum has no
    order, so no element has to move.
    """
    return tl.split(tl.reshape(rows, (S.tile.block_m, S.tile.block_k // 2, 2)))


@triton.jit
def multiply_fours(rows, first, second, column_scales, total, S: tl.constexpr):
    """Multiply rows `[BM, BK]` by weights `[BN, BK / 2]`, the first and the second four of every eight, and scale."""
    fours = tl.permute(tl.reshape(rows, (S.tile.block_m, S.tile.block_k // 8, 2, 4)), (0, 1, 3, 2))
    first_rows, second_rows = tl.split(fours)
    first_rows = tl.reshape(first_rows, (S.tile.block_m, S.tile.block_k // 2))
    second_rows = tl.reshape(second_rows, (S.tile.block_m, S.tile.block_k // 2))
    return multiply(second_rows, second, multiply(first_rows, first, total, S), S) * broadcast_columns(column_scales, S)
