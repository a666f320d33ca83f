"""Decoder of INT4 weights: nibbles that store the value plus 8, two per byte, with one float32 scale per block of K."""

import triton
import triton.language as tl

from .common import (
    AND_OR,
    FP8_BLOCK,
    SELECT,
    bf16x2,
    both_halves,
    broadcast_columns,
    e4m3_bytes,
    multiply,
    multiply_fours,
    repeat,
    repeat_per_byte,
    split_even_odd,
    to_float,
)
from .common import load_block_scales as load_scales  # noqa: F401
from .prepacked import PIECE, unpack_piece

# OR a nibble n into the mantissa of a bfloat16 power of two, then subtract that power and the zero point 8:
#
#               s eeeeeeee mmmmmmm
#     128 + n   0 10000110 000nnnn    the last bit of the mantissa is worth 1; subtract 136
#      16 + n   0 10000011 nnnn000    the bit 3 places up is worth 1; subtract 24
#
# Every constant holds this for two bfloat16 in a register.
_BF16X2_128, _BF16X2_136 = bf16x2(128.0), bf16x2(128.0 + 8)
_BF16X2_16, _BF16X2_24 = bf16x2(16.0), bf16x2(16.0 + 8)
_NIBBLES = both_halves(0xF)
_NIBBLES_AT_3 = both_halves(0xF << 3)

# Decode four bytes in $4: the low nibbles of all to $0 and $1, the high nibbles to $2 and $3.
_TO_BF16 = tl.constexpr(f"""{{
    .reg .b32 a, b, c, d;
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;
    mov.b32 c, {_BF16X2_136};
    lop3.b32 d, a, {_NIBBLES}, {_BF16X2_128}, {AND_OR};
    sub.bf16x2 $0, d, c;
    lop3.b32 d, b, {_NIBBLES}, {_BF16X2_128}, {AND_OR};
    sub.bf16x2 $1, d, c;
    shr.b32 a, a, 4;
    lop3.b32 d, a, {_NIBBLES}, {_BF16X2_128}, {AND_OR};
    sub.bf16x2 $2, d, c;
    shr.b32 b, b, 4;
    lop3.b32 d, b, {_NIBBLES}, {_BF16X2_128}, {AND_OR};
    sub.bf16x2 $3, d, c;
}}""")

# Decode eight prepacked nibbles in $4 to four pairs. A shift or rotation brings the nibbles of each pair to bits 3 to 6
# of both halves (BIT_PLACES in ../int4.py).
_UNPACK = tl.constexpr(f"""{{
    .reg .b32 a, c, w;
    mov.b32 w, $4;
    mov.b32 c, {_BF16X2_24};
    lop3.b32 a, w, {_NIBBLES_AT_3}, {_BF16X2_16}, {AND_OR};
    sub.bf16x2 $0, a, c;
    shr.b32 a, w, 4;
    lop3.b32 a, a, {_NIBBLES_AT_3}, {_BF16X2_16}, {AND_OR};
    sub.bf16x2 $1, a, c;
    shr.b32 a, w, 8;
    lop3.b32 a, a, {_NIBBLES_AT_3}, {_BF16X2_16}, {AND_OR};
    sub.bf16x2 $2, a, c;
    shf.l.wrap.b32 a, w, w, 4;
    lop3.b32 a, a, {_NIBBLES_AT_3}, {_BF16X2_16}, {AND_OR};
    sub.bf16x2 $3, a, c;
}}""")

# Decode eight nibbles in $2 to FP8, four at a time, by table lookup with `prmt`:
#
#     nibble   t i i i    i selects a byte of a table of eight values; t selects the table:
#              0          negative values, -8 to -1
#              1          the others, 0 to 7
_NEGATIVE = f"0x{e4m3_bytes(-4, -3, -2, -1):08X}, 0x{e4m3_bytes(-8, -7, -6, -5):08X}".split(", ")
_NOT_NEGATIVE = f"0x{e4m3_bytes(0, 1, 2, 3):08X}, 0x{e4m3_bytes(4, 5, 6, 7):08X}".split(", ")
_TO_FP8 = tl.constexpr(f"""{{
    .reg .b32 m, s, n, p, k;
    and.b32 m, $2, 0x77777777;
    shr.b32 s, $2, 3;
    and.b32 s, s, 0x11111111;
    prmt.b32 n, {_NEGATIVE[1]}, {_NEGATIVE[0]}, m;
    prmt.b32 p, {_NOT_NEGATIVE[0]}, {_NOT_NEGATIVE[1]}, m;
    prmt.b32 k, 0x0000FF00, 0, s;
    lop3.b32 $0, k, p, n, {SELECT};
    shr.b32 m, m, 16;
    shr.b32 s, s, 16;
    prmt.b32 n, {_NEGATIVE[1]}, {_NEGATIVE[0]}, m;
    prmt.b32 p, {_NOT_NEGATIVE[0]}, {_NOT_NEGATIVE[1]}, m;
    prmt.b32 k, 0x0000FF00, 0, s;
    lop3.b32 $1, k, p, n, {SELECT};
}}""")


@triton.jit
def add_product(total, rows, packed, scales, scales_ptr, group, column, k, S: tl.constexpr):
    """Add a product, see quantized.py."""
    even, odd = split_even_odd(rows, S)
    return add_even_odd(total, even, odd, packed, scales, S)


@triton.jit
def add_even_odd(total, even, odd, packed, scales, S: tl.constexpr):
    """Add the product of the even and odd columns of rows with the low and high nibbles.

    If one scale covers the step and registers hold two sums, it multiplies the step's sum; else scales multiply the
    elements.
    """
    dtype: tl.constexpr = even.dtype
    low, high = tl.inline_asm_elementwise(
        _TO_BF16, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )
    low, high = low.to(dtype), high.to(dtype)
    if S.block_size == S.tile.block_k and S.tile.block_m <= 32:
        # One scale per column and step: scale the sum.
        part = multiply(odd, high, multiply(even, low, tl.zeros(total.shape, tl.float32), S), S)
        total += part * broadcast_columns(tl.reshape(scales, (S.tile.block_n,)), S)
    else:
        # Several scales: scale the elements.
        factors = repeat_per_byte(scales, S)
        low, high = (low * factors).to(dtype), (high * factors).to(dtype)
        total = multiply(odd, high, multiply(even, low, total, S), S)
    return total


@triton.jit
def add_fp8_product(total, rows, factors, packed, scales, scales_ptr, group, column, k, S: tl.constexpr):
    """Add a product of FP8 rows, see quantized.py.

    Scales of blocks below 128 multiply the elements, which are bfloat16 then.
    """
    part = tl.zeros(total.shape, tl.float32)
    if S.block_size == FP8_BLOCK:
        first, second = tl.inline_asm_elementwise(
            _TO_FP8, "=r,=r,r", [packed], dtype=(tl.float8e4nv, tl.float8e4nv), is_pure=True, pack=4
        )
        part = multiply_fours(rows, first, second, tl.reshape(scales, (S.tile.block_n,)), part, S)
    else:
        even, odd = split_even_odd(rows, S)
        part = add_even_odd(part, to_float(even, tl.bfloat16), to_float(odd, tl.bfloat16), packed, scales, S)
    return total + part * factors


@triton.jit
def add_prepacked_pair(
    total, first_rows, second_rows, first, second, scales_ptr, group, columns, inside, k, S: tl.constexpr
):
    """Add a pair of prepacked pieces, see `add_prepacked_product` of quantized.py."""
    dtype: tl.constexpr = first_rows.dtype
    if S.block_size == 2 * PIECE:  # one scale covers both pieces: scale their sum
        first, second = unpack_prepacked(first).to(dtype), unpack_prepacked(second).to(dtype)
        scales = load_prepacked_scales(scales_ptr, group, columns, inside, k, 1, S)
        part = multiply(first_rows, first, tl.zeros(total.shape, tl.float32), S)
        total += multiply(second_rows, second, part, S) * scales
    else:
        NUM: tl.constexpr = PIECE // S.block_size
        of_first = repeat(load_prepacked_scales(scales_ptr, group, columns, inside, k, NUM, S), S.block_size)
        of_second = repeat(load_prepacked_scales(scales_ptr, group, columns, inside, k + PIECE, NUM, S), S.block_size)
        first = (unpack_prepacked(first) * of_first).to(dtype)
        second = (unpack_prepacked(second) * of_second).to(dtype)
        part = multiply(first_rows, first, tl.zeros(total.shape, tl.float32), S)
        total += multiply(second_rows, second, part, S)
    return total


@triton.jit
def unpack_prepacked(packed):
    """Decode packed uint32 `[block_n, PIECE / 8]` to unscaled bfloat16 `[block_n, PIECE]`."""
    a, b, c, d = tl.inline_asm_elementwise(
        _UNPACK, "=r,=r,=r,=r,r", [packed], (tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
    )
    return unpack_piece(a, b, c, d)


@triton.jit
def load_prepacked_scales(scales_ptr, group, columns, inside, k, NUM: tl.constexpr, S: tl.constexpr):
    """Load NUM scales of each column from element k on, `[block_n, NUM]`, from `[., K / block_size, N]`."""
    BLOCKS: tl.constexpr = S.K // S.block_size
    blocks = k // S.block_size + tl.arange(0, NUM)[None, :]
    source = scales_ptr + (group.to(tl.int64) * BLOCKS + blocks) * S.N + columns[:, None]
    return tl.load(source, mask=inside[:, None] & (blocks < BLOCKS), other=0.0)
