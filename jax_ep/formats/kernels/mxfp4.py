"""MXFP4 weights: E2M1 nibbles, two per byte, with one power of two (a biased exponent, E8M0) per 32 of K.

Bits of E2M1 in bfloat16, where zeros and subnormal numbers stay what they are:

    nibble                   s e e m
    bfloat16   s 0 0 0 0 0 0 e e m 0 0 0 0 0 0      E2M1_BF16_MASK has these four

They stand for 2**-126 of the value, as the biases are 127 and 1, and bfloat16 has no factor of 2**126 times a large
scale. So elements and sums stay smaller by 2**-E2M1_SHIFT until the end. Scales from 2**-64 to 2**33 lose no bit by
this; larger ones become infinite.
"""

import triton
import triton.language as tl

from .common import e4m3_bytes, load_block_scales, multiply, multiply_fours, repeat_per_byte, split_even_odd
from .prepacked import PIECE, unpack_piece

E2M1_BF16_MASK = 0x81C0
E2M1_BIAS_SHIFT = 127 - 1
E2M1_SHIFT = 32
UNDO_E2M1_SHIFT = tl.constexpr(2.0**E2M1_SHIFT)
_EXPONENT_OFFSET = tl.constexpr(E2M1_BIAS_SHIFT - E2M1_SHIFT)
_NAN_EXPONENT = tl.constexpr(255)
_SIGN = f"0x{0x8000 * 0x10001:08X}"
_EXPONENT_MANTISSA = f"0x{(E2M1_BF16_MASK & 0x7FFF) * 0x10001:08X}"
_E2M1 = f"0x{E2M1_BF16_MASK * 0x10001:08X}"

# Four bytes in $4 to the low nibbles of all, $0 and $1, and the high ones, $2 and $3, times the factors of the first
# two bytes in $5 and of the others in $6. `prmt` puts each byte into the upper half of 16 bits: that is the place of a
# high nibble's sign, and a shift by six is right for its other bits. A low nibble is moved up by four first.
_TO_BF16 = tl.constexpr(f"""{{
    .reg .b32 a, b, c, d, e;
    prmt.b32 a, $4, 0, 0x1404;
    prmt.b32 b, $4, 0, 0x3424;
    mov.b32 c, $5;
    mov.b32 e, $6;
    shr.b32 d, a, 6;
    and.b32 d, d, {_EXPONENT_MANTISSA};
    lop3.b32 d, a, {_SIGN}, d, 0xEA;
    mul.bf16x2 $2, d, c;
    shr.b32 d, b, 6;
    and.b32 d, d, {_EXPONENT_MANTISSA};
    lop3.b32 d, b, {_SIGN}, d, 0xEA;
    mul.bf16x2 $3, d, e;
    shl.b32 d, a, 4;
    shr.b32 a, a, 2;
    and.b32 a, a, {_EXPONENT_MANTISSA};
    lop3.b32 a, d, {_SIGN}, a, 0xEA;
    mul.bf16x2 $0, a, c;
    shl.b32 d, b, 4;
    shr.b32 b, b, 2;
    and.b32 b, b, {_EXPONENT_MANTISSA};
    lop3.b32 b, d, {_SIGN}, b, 0xEA;
    mul.bf16x2 $1, b, e;
}}""")

# Eight prepacked nibbles in $4 to four pairs of bfloat16, times the factor in both halves of $5. A shift or rotation
# brings each pair to E2M1_BF16_MASK; the last pair has bits that come from two places (BIT_PLACES in ../mxfp4.py).
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
    and.b32 a, a, 0x80C080C0;
    shr.b32 b, w, 6;
    lop3.b32 a, b, 0x01000100, a, 0xEA;
    mul.bf16x2 $3, a, c;
}}""")

# Four exponents in $4, each to a bfloat16 twice: what `bf16_factors` computes, of two exponents at a time.
_TO_FACTORS = tl.constexpr(f"""{{
    .reg .b32 a, b, m;
    and.b32 a, $4, 0x00FF00FF;
    prmt.b32 b, $4, 0, 0x4341;
    mov.b32 m, 0x00FF00FF;
    add.u32 a, a, 0x{_EXPONENT_OFFSET.value * 0x10001:08X};
    add.u32 b, b, 0x{_EXPONENT_OFFSET.value * 0x10001:08X};
    min.u16x2 a, a, m;
    min.u16x2 b, b, m;
    shl.b32 a, a, 7;
    shl.b32 b, b, 7;
    prmt.b32 $0, a, 0, 0x1010;
    prmt.b32 $1, b, 0, 0x1010;
    prmt.b32 $2, a, 0, 0x3232;
    prmt.b32 $3, b, 0, 0x3232;
}}""")

# Eight nibbles in $2 to FP8, four at a time: the low three bits select a byte of the table of magnitudes in $3 (of the
# bytes behind in $4 to $6, which have the same) and $7. Bit 3 is the sign: `prmt` repeats the top bit of a byte there.
_TO_FP8 = tl.constexpr("""{
    .reg .b32 m, q, s, t, u, v;
    and.b32 m, $2, 0x77777777;
    or.b32 q, $2, 0x77777777;
    mov.b32 u, $3;
    mov.b32 v, $7;
    prmt.b32 t, u, v, m;
    prmt.b32 s, 0, 0x80000000, q;
    shl.b32 s, s, 1;
    lop3.b32 $0, t, s, 0x80808080, 0xF8;
    shr.b32 m, m, 16;
    shr.b32 q, q, 16;
    prmt.b32 t, u, v, m;
    prmt.b32 s, 0, 0x80000000, q;
    shl.b32 s, s, 1;
    lop3.b32 $1, t, s, 0x80808080, 0xF8;
}""")
# Magnitudes of E2M1 times 2**6, so that they stay normal in e4m3 when divided by up to 2**11.
_FP8_SCALE = 2.0**6
_ZERO_TO_1_5 = tl.constexpr(e4m3_bytes(*(x * _FP8_SCALE for x in (0.0, 0.5, 1.0, 1.5))))
_TWO_TO_6 = tl.constexpr(e4m3_bytes(*(x * _FP8_SCALE for x in (2.0, 3.0, 4.0, 6.0))))
_MOST_SHIFTS = tl.constexpr(11)
_UNDO_FP8_SCALE = tl.constexpr(1 / _FP8_SCALE)


@triton.jit
def e2m1(nibbles):
    """Nibbles as float32, by the same bits."""
    bits = ((nibbles & 7).to(tl.int32) << 22) | ((nibbles & 8).to(tl.int32) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126


@triton.jit
def powers(exponents):
    """2 to the power of biased exponents, int32, in float32; 255 is NaN, and the smallest is subnormal."""
    bits = tl.maximum(exponents << 23, 0x00400000)
    return tl.where(exponents == _NAN_EXPONENT, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def bf16_factors(exponents):
    """What bits of E2M1 in bfloat16 are multiplied by: 2 to the power of biased exponents, times 2**(126 - shift).

    What bfloat16 cannot hold is infinite, and 255 is NaN.
    """
    bits = tl.minimum(exponents + _EXPONENT_OFFSET, 255) << 7
    return tl.where(exponents == _NAN_EXPONENT, 0x7FC0, bits).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def load_scales(scales_ptr, group, column, k, S: tl.constexpr):
    """See quantized.py; exponents in int32."""
    return load_block_scales(scales_ptr, group, column, k, S).to(tl.int32)


@triton.jit
def add_product(total, rows, packed, scales, scales_ptr, group, column, k, S: tl.constexpr):
    """See quantized.py; two elements are decoded at a time, and scaled on the way."""
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
    """See quantized.py; the largest of a step's four scales multiplies the sum.

    Another scale shifts the table from which its elements come. That is exact up to 2**11; what is smaller is zero.
    """
    part = tl.zeros(total.shape, tl.float32)
    largest = tl.max(scales, axis=1)
    shifts = largest[:, None] - scales
    # Zero, the lowest byte, stays zero; other bytes have their exponent from bit 3 on.
    low = tl.where(shifts > _MOST_SHIFTS, 0, _ZERO_TO_1_5 - shifts * 0x08080800)
    high = tl.where(shifts > _MOST_SHIFTS, 0, _TWO_TO_6 - shifts * 0x08080808)
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
    """Undo the shift of `bf16_factors`, which prepacked products undo step by step."""
    if not S.prepacked and rows_dtype == tl.bfloat16:
        total *= UNDO_E2M1_SHIFT
    return total


@triton.jit
def add_prepacked_pair(
    total, first_rows, second_rows, first, second, scales_ptr, group, columns, inside, k, S: tl.constexpr
):
    """See `add_prepacked_product` of quantized.py."""
    dtype: tl.constexpr = first_rows.dtype
    of_first, of_second = load_prepacked_factors(scales_ptr, group, columns, inside, k, S)
    first = unpack_prepacked(first, of_first, dtype, S)
    second = unpack_prepacked(second, of_second, dtype, S)
    part = multiply(first_rows, first, tl.zeros(total.shape, tl.float32), S)
    part = multiply(second_rows, second, part, S)
    return total + part * (UNDO_E2M1_SHIFT if dtype == tl.bfloat16 else 1.0)


@triton.jit
def unpack_prepacked(packed, factors, dtype: tl.constexpr, S: tl.constexpr):
    """`[BN, PIECE / 8]` packed uint32 to `[BN, PIECE]`, in bfloat16 smaller by the shift."""
    a, b, c, d = tl.inline_asm_elementwise(
        _UNPACK, "=r,=r,=r,=r,r,r", [packed, factors], (tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
    )
    values = unpack_piece(a, b, c, d, S)
    return values if dtype == tl.bfloat16 else (values.to(tl.float32) * UNDO_E2M1_SHIFT).to(dtype)


@triton.jit
def load_prepacked_factors(scales_ptr, group, columns, inside, k, S: tl.constexpr):
    """`[BN, PIECE / 8]` factors of the packed uint32 of two pieces from element k on, each twice in bfloat16."""
    step = group.to(tl.int64) * ((S.K + 2 * PIECE - 1) // (2 * PIECE)) + k // (2 * PIECE)
    exponents = tl.load(scales_ptr + step * S.N + columns, mask=inside & (k < S.K), other=0)
    a, b, c, d = tl.inline_asm_elementwise(
        _TO_FACTORS, "=r,=r,=r,=r,r", [exponents], (tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
    )
    # Not by a join, for which the compiler would choose another order of elements for instructions of a warp.
    is_first = tl.arange(0, PIECE // 8)[None, :] < PIECE // 16
    return tl.where(is_first, a[:, None], b[:, None]), tl.where(is_first, c[:, None], d[:, None])
