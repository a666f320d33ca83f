"""Products of tokens in FP8, with a scale for each 128 columns, and matrices in 8 and 4 bits (expert_formats.py).

Tensor cores of Hopper multiply FP8 with FP8. So elements of 4 bits become float8_e4m3fn, which holds all of them: by
tables of eight bytes, from which one instruction takes four. The sums of 128 elements are scaled and added in float32.

MXFP4 has four exponents in so many elements. The largest is a factor of the sum; what another is less is in the table
from which its elements come, which is exact while that is at most 2**11: what is less counts as zero.
"""

import triton
import triton.language as tl

from .expert_formats import add_halves, halves_of_rows, multiply, of_bytes, of_columns, powers, to_float
from .quantization import GROUP

# Of eight codes of e2m1 in $2: the tables in $3 and $7 have their magnitudes, and signs come of a byte that is repeated
# bit by bit where bit 3 of a code is set.
_E2M1 = tl.constexpr("""{
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

# Of eight codes of INT4, which stand for 8 less: two tables, and bit 3 says of which an element is.
_INT4 = tl.constexpr("""{
    .reg .b32 m, s, n, p, k;
    and.b32 m, $2, 0x77777777;
    shr.b32 s, $2, 3;
    and.b32 s, s, 0x11111111;
    prmt.b32 n, 0xCACCCED0, 0xB8C0C4C8, m;
    prmt.b32 p, 0x44403800, 0x4E4C4A48, m;
    prmt.b32 k, 0x0000FF00, 0, s;
    lop3.b32 $0, k, p, n, 0xCA;
    shr.b32 m, m, 16;
    shr.b32 s, s, 16;
    prmt.b32 n, 0xCACCCED0, 0xB8C0C4C8, m;
    prmt.b32 p, 0x44403800, 0x4E4C4A48, m;
    prmt.b32 k, 0x0000FF00, 0, s;
    lop3.b32 $1, k, p, n, 0xCA;
}""")
_ZERO_TO_3_2, _2_TO_6 = tl.constexpr(0x6C686000), tl.constexpr(0x7C787470)  # magnitudes of e2m1, times 2**6
_SHIFTS = tl.constexpr(11)  # by which they stay normal
_INVERSE = tl.constexpr(2.0**-6)


@triton.jit
def mxfp4_in_fp8(block, exponents, S: tl.constexpr):
    """Bytes `[BN, BK / 2]` as numbers of which eight are in turn four of the first and four of the second result.

    With them the scales `[BN]` of all.
    """
    largest = tl.max(exponents, axis=1)
    less = largest[:, None] - exponents
    # A code of zero, the lowest byte, stays zero.
    low = tl.where(less > _SHIFTS, 0, _ZERO_TO_3_2 - less * 0x08080800)
    high = tl.where(less > _SHIFTS, 0, _2_TO_6 - less * 0x08080808)
    first, second = tl.inline_asm_elementwise(
        _E2M1,
        "=r,=r,r,r,r,r,r,r,r,r,r",
        [block, of_bytes(low, S), of_bytes(high, S)],
        dtype=(tl.float8e4nv, tl.float8e4nv),
        is_pure=True,
        pack=4,
    )
    return first, second, powers(largest) * _INVERSE


@triton.jit
def int4_in_fp8(block):
    """Bytes `[BN, BK / 2]` as numbers, likewise."""
    return tl.inline_asm_elementwise(
        _INT4, "=r,=r,r", [block], dtype=(tl.float8e4nv, tl.float8e4nv), is_pure=True, pack=4
    )


@triton.jit
def fours(rows, BM: tl.constexpr, BK: tl.constexpr):
    """`[BM, BK]` as the first and the second four of each eight columns."""
    halves_of_eight = tl.permute(tl.reshape(rows, (BM, BK // 8, 2, 4)), (0, 1, 3, 2))
    first, second = tl.split(halves_of_eight)
    return tl.reshape(first, (BM, BK // 2)), tl.reshape(second, (BM, BK // 2))


@triton.jit
def add_fp8_product(total, rows, row_scales, block, scales, scales_ptr, group, column, k, S: tl.constexpr):
    """`total` and the product of rows `[BM, 128]` in FP8, with scales `[BM]`, and a block of `load_bytes`.

    `scales` are those of `load_group_scales`. Sums, and `total`, are `[BM, BN]`, or with SWAP turned to `[BN, BM]`.
    """
    tl.static_assert(S.tile.BK == GROUP, "rows have one scale in a step")
    part = tl.zeros(total.shape, tl.float32)
    factors = row_scales[None, :] if S.tile.SWAP else row_scales[:, None]
    if S.PER_BYTE == 2 and (S.FORMAT == "mxfp4" or S.SHARING == GROUP):
        if S.FORMAT == "mxfp4":
            first, second, column_scales = mxfp4_in_fp8(block, scales, S)
        else:
            first, second = int4_in_fp8(block)
            column_scales = tl.reshape(scales, (S.tile.BN,))
        first_rows, second_rows = fours(rows, S.tile.BM, S.tile.BK)
        part = multiply(second_rows, second, multiply(first_rows, first, part, S), S)
        part *= of_columns(column_scales, S)
    elif S.PER_BYTE == 2:
        even, odd = halves_of_rows(rows, S)
        part = add_halves(part, to_float(even, tl.bfloat16), to_float(odd, tl.bfloat16), block, scales, S)
    else:
        part = multiply(rows, block, part, S)
    if S.FORMAT == "fp8":
        BN: tl.constexpr = S.tile.BN
        column_blocks: tl.constexpr = (S.N + GROUP - 1) // GROUP
        source = scales_ptr + (group.to(tl.int64) * column_blocks + column // GROUP) * (S.K // GROUP) + k // GROUP
        if BN > GROUP:
            blocks = tl.arange(0, BN) // GROUP
            inside = column // GROUP + blocks < column_blocks
            factors *= of_columns(tl.load(source + blocks * (S.K // GROUP), mask=inside, other=0.0), S)
        else:
            factors *= tl.load(source)
    return total + part * factors
