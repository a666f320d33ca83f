"""Tile arithmetic that decoders share, and builders of bit patterns for their constants."""

import math
import struct

import triton
import triton.language as tl

FP8_BLOCK = tl.constexpr(128)
"""Elements of K, and columns of a block, that share an FP8 scale."""


def bf16x2(value: float) -> str:
    """Return a bfloat16 in both halves of a register, as an assembler literal."""
    return both_halves(int.from_bytes(struct.pack(">f", value)[:2]))


def both_halves(bits: int) -> str:
    """Return 16 bits in both halves of a register, as an assembler literal."""
    return f"0x{bits * 0x10001:08X}"


# lop3 tables, built from the truth columns of its operands a, b and c.
A, B, C = 0xF0, 0xCC, 0xAA
AND_OR = f"0x{A & B | C:02X}"  # a & b | c
OR_AND = f"0x{A | B & C:02X}"  # a | b & c
SELECT = f"0x{A & B | ~A & C:02X}"  # b where a has ones, else c


def e4m3_bytes(*values: float) -> int:
    """Pack four values that e4m3 holds exactly into a 32-bit integer, the first in the lowest byte.

    bit of a byte  7 | 6 5 4 3  | 2 1 0         value = 1.mantissa * 2**(exponent - 7)
                 sign  exponent   mantissa
    """
    word = 0
    for i, value in enumerate(values):
        mantissa, exponent = math.frexp(abs(value))
        bits = int((exponent + 6) * 8 + (2 * mantissa - 1) * 8) if value else 0
        word |= (bits | 0x80 * (value < 0)) << 8 * i
    return word


@triton.jit
def multiply(rows, weights, total, S: tl.constexpr):
    """Add `[block_m, .]` rows times `[block_n, .]` weights to `[block_m, block_n]`, transposed with swap_ab."""
    if S.tile.swap_ab:
        total = tl.dot(weights, tl.trans(rows), total)
    else:
        total = tl.dot(rows, tl.trans(weights), total)
    return total


@triton.jit
def broadcast_columns(values, S: tl.constexpr):
    """Shape `[block_n]` values of columns for the sums of `multiply`."""
    return values[:, None] if S.tile.swap_ab else values[None, :]


@triton.jit
def repeat(values, TIMES: tl.constexpr):
    """Repeat each of `[block_n, .]` values along the last axis."""
    BLOCK_N: tl.constexpr = values.shape[0]
    NUM: tl.constexpr = values.shape[1]
    return tl.reshape(tl.broadcast_to(values[:, :, None], (BLOCK_N, NUM, TIMES)), (BLOCK_N, NUM * TIMES))


@triton.jit
def repeat_per_byte(scales, S: tl.constexpr):
    """Repeat `[block_n, block_k / block_size]` scales to one per byte of two nibbles, `[block_n, block_k / 2]`."""
    return repeat(scales, S.block_size // 2)


@triton.jit
def load_block_scales(scales_ptr, group, column, k, S: tl.constexpr):
    """Load `[block_n, block_k / block_size]` scales of `[., N, K / block_size]`."""
    per_column: tl.constexpr = S.K // S.block_size
    columns = column + tl.arange(0, S.tile.block_n)[:, None]
    blocks = k // S.block_size + tl.arange(0, S.tile.block_k // S.block_size)[None, :]
    source = scales_ptr + (group.to(tl.int64) * S.N + columns) * per_column + blocks
    return tl.load(source, mask=(columns < S.N) & (blocks < per_column), other=0)


@triton.jit
def to_float(values, dtype: tl.constexpr):
    """Convert 8 bits to `dtype`; FP8 goes through float32, from which the compiler makes two bfloat16 at a time."""
    if values.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        values = values.to(tl.float16).to(tl.float32)
    return values.to(dtype)


@triton.jit
def split_even_odd(rows, S: tl.constexpr):
    """Split rows `[block_m, block_k]` into the columns of low and of high nibbles.

    A byte holds two neighbors along K. Low nibbles form one operand and high nibbles another: a sum has no order, so no
    element has to move.
    """
    return tl.split(tl.reshape(rows, (S.tile.block_m, S.tile.block_k // 2, 2)))


@triton.jit
def multiply_fours(rows, first, second, column_scales, total, S: tl.constexpr):
    """Multiply rows `[block_m, block_k]` by two halves of weights `[block_n, block_k / 2]`, and scale.

    The halves hold the first and the second four of every eight elements of K.
    """
    fours = tl.permute(tl.reshape(rows, (S.tile.block_m, S.tile.block_k // 8, 2, 4)), (0, 1, 3, 2))
    first_rows, second_rows = tl.split(fours)
    first_rows = tl.reshape(first_rows, (S.tile.block_m, S.tile.block_k // 2))
    second_rows = tl.reshape(second_rows, (S.tile.block_m, S.tile.block_k // 2))
    return multiply(second_rows, second, multiply(first_rows, first, total, S), S) * broadcast_columns(column_scales, S)
