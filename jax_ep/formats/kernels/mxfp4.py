"""Decoder of MXFP4 weights: E2M1 nibbles, two per byte, with one power of two (a biased exponent, E8M0) per 32 of K.

Placing the bits of E2M1 into a bfloat16 keeps zeros and subnormal numbers what they are:

                bit   15 14 . . . . . .  8  7  6 5 . . . . 0
    nibble             s                 e  e  m
    bfloat16           s  0 0 0 0 0 0    e  e  m 0 0 0 0 0 0      E2M1_BF16_MASK has these four bits

The result is 2**-126 of the value, since the exponent biases are 127 and 1. bfloat16 cannot hold a factor of 2**126
times a large scale, so elements and sums stay smaller by 2**-E2M1_SHIFT until the end. Scales from 2**-64 to 2**33 lose
no bit by this; larger ones become infinite.
"""

import triton
import triton.language as tl

from .common import (
    AND_OR,
    OR_AND,
    both_halves,
    e4m3_bytes,
    load_block_scales,
    multiply,
    multiply_fours,
    repeat_per_byte,
    split_even_odd,
)
from .prepacked import PIECE, unpack_piece

E2M1_BF16_MASK = 0x81C0
E2M1_BIAS_SHIFT = 127 - 1
E2M1_SHIFT = 32
UNDO_E2M1_SHIFT = tl.constexpr(2.0**E2M1_SHIFT)
_UNDO_BIAS_SHIFT = tl.constexpr(2.0**E2M1_BIAS_SHIFT)
_EXPONENT_OFFSET = tl.constexpr(E2M1_BIAS_SHIFT - E2M1_SHIFT)
_NAN_EXPONENT = tl.constexpr(255)
# Masks for two bfloat16 in a register.
_SIGN = both_halves(1 << 15)
_EXPONENT_MANTISSA = both_halves(E2M1_BF16_MASK & 0x7FFF)
_E2M1 = both_halves(E2M1_BF16_MASK)

# Decode four bytes in $4: the low nibbles of all to $0 and $1, the high nibbles to $2 and $3, times the factors of the
# first two bytes in $5 and of the others in $6. `prmt` puts each byte into the upper half of 16 bits:
#
#     bit          15 14 13 12  11 10  9  8  7 ... 0
#     byte          s  e  e  m   s  e  e  m  0       high nibble: the sign is in place, the rest moves down by 6
#                                                    low nibble: the sign moves up by 4, the rest down by 2
_TO_BF16 = tl.constexpr(f"""{{
    .reg .b32 a, b, c, d, e;
    prmt.b32 a, $4, 0, 0x1404;
    prmt.b32 b, $4, 0, 0x3424;
    mov.b32 c, $5;
    mov.b32 e, $6;
    shr.b32 d, a, 6;
    and.b32 d, d, {_EXPONENT_MANTISSA};
    lop3.b32 d, a, {_SIGN}, d, {AND_OR};
    mul.bf16x2 $2, d, c;
    shr.b32 d, b, 6;
    and.b32 d, d, {_EXPONENT_MANTISSA};
    lop3.b32 d, b, {_SIGN}, d, {AND_OR};
    mul.bf16x2 $3, d, e;
    shl.b32 d, a, 4;
    shr.b32 a, a, 2;
    and.b32 a, a, {_EXPONENT_MANTISSA};
    lop3.b32 a, d, {_SIGN}, a, {AND_OR};
    mul.bf16x2 $0, a, c;
    shl.b32 d, b, 4;
    shr.b32 b, b, 2;
    and.b32 b, b, {_EXPONENT_MANTISSA};
    lop3.b32 b, d, {_SIGN}, b, {AND_OR};
    mul.bf16x2 $1, b, e;
}}""")

# Decode eight prepacked nibbles in $4 to four pairs, times the factor in both halves of $5. A shift or rotation brings
# each pair to the bits of E2M1_BF16_MASK. The last pair comes from two places (BIT_PLACES in ../mxfp4.py): all bits but
# the higher exponent bit by a shift up, that bit by a shift down.
_LAST_SHIFTED_UP = both_halves(E2M1_BF16_MASK & ~(1 << 8))
_LAST_SHIFTED_DOWN = both_halves(1 << 8)
_UNPACK = tl.constexpr(f"""{{
    .reg .b32 a, b, c, w;
    mov.b32 w, $4;
    mov.b32 c, $5;
    and.b32 a, w, {_E2M1};
    mul.bf16x2 $0, a, c;
    shl.b32 a, w, 6;
    and.b32 a, a, {_E2M1};
    mul.bf16x2 $1, a, c;
    shf.l.wrap.b32 a, w, w, 28;
    and.b32 a, a, {_E2M1};
    mul.bf16x2 $2, a, c;
    shl.b32 a, w, 2;
    and.b32 a, a, {_LAST_SHIFTED_UP};
    shr.b32 b, w, 6;
    lop3.b32 a, b, {_LAST_SHIFTED_DOWN}, a, {AND_OR};
    mul.bf16x2 $3, a, c;
}}""")

# Convert four exponents in $4 to bfloat16 factors, each in both halves of a register: `bf16_factors` for two exponents
# at a time. The exponent field of bfloat16 begins at bit 7.
_BYTES = both_halves(0xFF)
_OFFSETS = both_halves(_EXPONENT_OFFSET.value)
TO_FACTORS = tl.constexpr(f"""{{
    .reg .b32 a, b, m;
    and.b32 a, $4, {_BYTES};
    prmt.b32 b, $4, 0, 0x4341;
    mov.b32 m, {_BYTES};
    add.u32 a, a, {_OFFSETS};
    add.u32 b, b, {_OFFSETS};
    min.u16x2 a, a, m;
    min.u16x2 b, b, m;
    shl.b32 a, a, 7;
    shl.b32 b, b, 7;
    prmt.b32 $0, a, 0, 0x1010;
    prmt.b32 $1, b, 0, 0x1010;
    prmt.b32 $2, a, 0, 0x3232;
    prmt.b32 $3, b, 0, 0x3232;
}}""")

# Decode eight nibbles in $2 to FP8, four at a time, by table lookup with `prmt`:
#
#     nibble   s i i i    i selects a byte of the table of magnitudes in $3 and $7; $4 to $6 and $8 to $10 repeat them
#                         for the other three bytes. s is the sign: with bit 3 of its selector set, `prmt` repeats the
#                         top bit of a byte.
_TO_FP8 = tl.constexpr(f"""{{
    .reg .b32 m, q, s, t, u, v;
    and.b32 m, $2, 0x77777777;
    or.b32 q, $2, 0x77777777;
    mov.b32 u, $3;
    mov.b32 v, $7;
    prmt.b32 t, u, v, m;
    prmt.b32 s, 0, 0x80000000, q;
    shl.b32 s, s, 1;
    lop3.b32 $0, t, s, 0x80808080, {OR_AND};
    shr.b32 m, m, 16;
    shr.b32 q, q, 16;
    prmt.b32 t, u, v, m;
    prmt.b32 s, 0, 0x80000000, q;
    shl.b32 s, s, 1;
    lop3.b32 $1, t, s, 0x80808080, {OR_AND};
}}""")
# The table: magnitudes of E2M1 times 2**6, so that they stay normal in e4m3 when divided by up to 2**11.
_FP8_SCALE = 2.0**6
_ZERO_TO_1_5 = tl.constexpr(e4m3_bytes(*(x * _FP8_SCALE for x in (0.0, 0.5, 1.0, 1.5))))
_TWO_TO_6 = tl.constexpr(e4m3_bytes(*(x * _FP8_SCALE for x in (2.0, 3.0, 4.0, 6.0))))
_MAX_SHIFT = tl.constexpr(11)
_UNDO_FP8_SCALE = tl.constexpr(1 / _FP8_SCALE)


@triton.jit
def e2m1(nibbles):
    """Convert nibbles to float32.

    The bits e, e, m go to bits 24 to 22, where float32 has its exponent's low and mantissa's high bits, the sign to bit
    31. The biases differ by 126.
    """
    bits = ((nibbles & 7).to(tl.int32) << 22) | ((nibbles & 8).to(tl.int32) << 28)
    return bits.to(tl.float32, bitcast=True) * _UNDO_BIAS_SHIFT


@triton.jit
def powers(exponents):
    """Return 2 to the power of biased exponents, int32, in float32; 255 is NaN, and the smallest power is subnormal."""
    # Exponent 0 is 2**-127, a subnormal number: the highest mantissa bit alone.
    bits = tl.maximum(exponents << 23, 0x00400000)
    return tl.where(exponents == _NAN_EXPONENT, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def bf16_factors(exponents):
    """Return the factors of E2M1 bits in bfloat16: 2 to the power of biased exponents, times 2**(126 - E2M1_SHIFT).

    Factors that bfloat16 cannot hold are infinite; exponent 255 is NaN.
    """
    bits = tl.minimum(exponents + _EXPONENT_OFFSET, 255) << 7
    return tl.where(exponents == _NAN_EXPONENT, 0x7FC0, bits).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def load_scales(scales_ptr, group, column, k, S: tl.constexpr):
    """Load the exponents of a step as int32, see quantized.py."""
    return load_block_scales(scales_ptr, group, column, k, S).to(tl.int32)


@triton.jit
def add_product(total, rows, packed, scales, scales_ptr, group, column, k, S: tl.constexpr):
    """Add a product, see quantized.py; two elements are decoded at a time and scaled at once."""
    dtype: tl.constexpr = rows.dtype
    even, odd = split_even_odd(rows, S)
    if dtype == tl.bfloat16:
        factors = repeat_per_byte(bf16_factors(scales), S)
        low, high = tl.inline_asm_elementwise(
            _TO_BF16, "=r,=r,=r,=r,r,r,r", [packed, factors], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        factors = repeat_per_byte(powers(scales), S)
        low, high = (e2m1(packed & 15) * factors).to(dtype), (e2m1(packed >> 4) * factors).to(dtype)
    return multiply(odd, high, multiply(even, low, total, S), S)


@triton.jit
def add_fp8_product(total, rows, factors, packed, scales, scales_ptr, group, column, k, S: tl.constexpr):
    """Add a product of FP8 rows, see quantized.py; the largest of a step's four scales multiplies the sum.

    Smaller scales shift the table that their elements come from. That is exact up to 2**11; smaller elements become
    zero.
    """
    part = tl.zeros(total.shape, tl.float32)
    largest = tl.max(scales, axis=1)
    shifts = largest[:, None] - scales
    # Subtract the shift from the exponent of each byte, which begins at bit 3; zero, the lowest byte, stays zero.
    low = tl.where(shifts > _MAX_SHIFT, 0, _ZERO_TO_1_5 - shifts * 0x08080800)
    high = tl.where(shifts > _MAX_SHIFT, 0, _TWO_TO_6 - shifts * 0x08080808)
    first, second = tl.inline_asm_elementwise(
        _TO_FP8,
        "=r,=r,r,r,r,r,r,r,r,r,r",
        [packed, repeat_per_byte(low, S), repeat_per_byte(high, S)],
        dtype=(tl.float8e4nv, tl.float8e4nv),
        is_pure=True,
        pack=4,
    )
    part = multiply_fours(rows, first, second, powers(largest) * _UNDO_FP8_SCALE, part, S)
    return total + part * factors


@triton.jit
def scale_columns(total, scales_ptr, group, column, rows_dtype: tl.constexpr, S: tl.constexpr):
    """Undo the shift of `bf16_factors`; prepacked products undo it step by step."""
    if not S.prepacked and rows_dtype == tl.bfloat16:
        total *= UNDO_E2M1_SHIFT
    return total


@triton.jit
def add_prepacked_pair(
    total, first_rows, second_rows, first, second, scales_ptr, group, columns, inside, k, S: tl.constexpr
):
    """Add a pair of prepacked pieces, see `add_prepacked_product` of quantized.py."""
    dtype: tl.constexpr = first_rows.dtype
    of_first, of_second = load_prepacked_factors(scales_ptr, group, columns, inside, k, S)
    first = unpack_prepacked(first, of_first, dtype)
    second = unpack_prepacked(second, of_second, dtype)
    part = multiply(first_rows, first, tl.zeros(total.shape, tl.float32), S)
    part = multiply(second_rows, second, part, S)
    return total + part * (UNDO_E2M1_SHIFT if dtype == tl.bfloat16 else 1.0)


@triton.jit
def unpack_prepacked(packed, factors, dtype: tl.constexpr):
    """Decode packed uint32 `[block_n, PIECE / 8]` to `[block_n, PIECE]`; bfloat16 stays smaller by the shift."""
    a, b, c, d = tl.inline_asm_elementwise(
        _UNPACK, "=r,=r,=r,=r,r,r", [packed, factors], (tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
    )
    values = unpack_piece(a, b, c, d)
    return values if dtype == tl.bfloat16 else (values.to(tl.float32) * UNDO_E2M1_SHIFT).to(dtype)


@triton.jit
def load_prepacked_factors(scales_ptr, group, columns, inside, k, S: tl.constexpr):
    """Load the bf16x2 factors `[block_n, PIECE / 8]` of each packed uint32, for the two pieces from element k on."""
    step = group.to(tl.int64) * ((S.K + 2 * PIECE - 1) // (2 * PIECE)) + k // (2 * PIECE)
    exponents = tl.load(scales_ptr + step * S.N + columns, mask=inside & (k < S.K), other=0)
    a, b, c, d = tl.inline_asm_elementwise(
        TO_FACTORS, "=r,=r,=r,=r,r", [exponents], (tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
    )
    # Select instead of joining: for a join the compiler would choose another order of elements within a warp.
    is_first = tl.arange(0, PIECE // 8)[None, :] < PIECE // 16
    return tl.where(is_first, a[:, None], b[:, None]), tl.where(is_first, c[:, None], d[:, None])
