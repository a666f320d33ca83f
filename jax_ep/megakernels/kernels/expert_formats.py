"""Matrices in 8 and 4 bits as products read them: `[., N, K]`, dequantised in registers on their way to tensor cores.

Scales of a column, or of a block of 128 by 128, are factors of sums, in float32. Those of smaller groups are factors of
the elements, which are then rounded to the dtype of the rows; powers of two, as MXFP4 has them, cost no bit.

In memory a byte holds two neighbours of 4 bits. Here the lower halves of bytes are one operand and the upper halves
another, which meet every other element of the rows: a sum has no order, so no element has to move.

Few rows leave about four instructions for each element before these take longer than the memory. So two elements of 4
bits are made at a time, in assembler, and what they are multiplied by on the way is one factor.
"""

import triton
import triton.language as tl

from .quantization import GROUP

# Two bytes become the upper halves of two words of 16 bits: sign, two bits of exponent, one of mantissa, twice. The
# first four bits belong at the top, and three of them at the end of bfloat16's exponent and the start of its mantissa:
# what is zero or subnormal is so there, too. What biases differ by is in the scales: of two bytes in $5, of two in $6.
_E2M1 = tl.constexpr("""{
    .reg .b32 a, b, c, d, e;
    prmt.b32 a, $4, 0, 0x1404;
    prmt.b32 b, $4, 0, 0x3424;
    mov.b32 c, $5;
    mov.b32 e, $6;
    shr.b32 d, a, 6;
    and.b32 d, d, 0x01C001C0;
    lop3.b32 d, a, 0x80008000, d, 0xEA;
    mul.bf16x2 $2, d, c;
    shr.b32 d, b, 6;
    and.b32 d, d, 0x01C001C0;
    lop3.b32 d, b, 0x80008000, d, 0xEA;
    mul.bf16x2 $3, d, e;
    shl.b32 d, a, 4;
    shr.b32 a, a, 2;
    and.b32 a, a, 0x01C001C0;
    lop3.b32 a, d, 0x80008000, a, 0xEA;
    mul.bf16x2 $0, a, c;
    shl.b32 d, b, 4;
    shr.b32 b, b, 2;
    and.b32 b, b, 0x01C001C0;
    lop3.b32 b, d, 0x80008000, b, 0xEA;
    mul.bf16x2 $1, b, e;
}""")

# As the end of the mantissa of 128 in bfloat16, four bits are added to it; 136 is taken off.
_INT4 = tl.constexpr("""{
    .reg .b32 a, b, c, d;
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;
    mov.b32 c, 0x43084308;
    lop3.b32 d, a, 0x000F000F, 0x43004300, 0xEA;
    sub.bf16x2 $0, d, c;
    lop3.b32 d, b, 0x000F000F, 0x43004300, 0xEA;
    sub.bf16x2 $1, d, c;
    shr.b32 a, a, 4;
    lop3.b32 d, a, 0x000F000F, 0x43004300, 0xEA;
    sub.bf16x2 $2, d, c;
    shr.b32 b, b, 4;
    lop3.b32 d, b, 0x000F000F, 0x43004300, 0xEA;
    sub.bf16x2 $3, d, c;
}""")

# Bits of e2m1 in bfloat16 are 2**-126 of what they stand for, and there is no bfloat16 of 2**126 times a scale of 4. So
# elements and sums are less by this, which scales from 2**-64 to 2**33 lose no bit by; greater ones become infinite.
LESS = tl.constexpr(32)
AS_MUCH_MORE = tl.constexpr(2.0**32)


@triton.jit
def e2m1(codes):
    """Codes of 4 bits as float32: a sign, two bits of exponent, one of mantissa."""
    bits = ((codes & 7).to(tl.int32) << 22) | ((codes & 8).to(tl.int32) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def powers(exponents):
    """2 to the power of biased exponents, int32, in float32; 255 is NaN, and the smallest is subnormal."""
    bits = tl.maximum(exponents << 23, 0x00400000)
    return tl.where(exponents == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def factors_of_bits(exponents):
    """2 to the power of biased exponents, less `LESS`, by which bits of e2m1 in bfloat16 are multiplied.

    What has no bfloat16 is infinite, and 255 NaN.
    """
    bits = tl.minimum(exponents + (126 - LESS), 255) << 7
    return tl.where(exponents == 255, 0x7FC0, bits).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def load_group_scales(scales_ptr, group, column, k, S: tl.constexpr):
    """`[BN, BK / SHARING]` scales of the groups of a block, or exponents; zeros outside of the matrix.

    Loaded one step ahead: they come by pointers, which no pipeline covers. Where groups have no scales, any number, as
    for shuffled matrices (shuffled_experts.py), which load theirs in the step itself.
    """
    if S.SHARING > 0 and not S.SHUFFLED:
        per_row: tl.constexpr = S.K // S.SHARING
        columns = column + tl.arange(0, S.tile.BN)[:, None]
        parts = k // S.SHARING + tl.arange(0, S.tile.BK // S.SHARING)[None, :]
        source = scales_ptr + (group.to(tl.int64) * S.N + columns) * per_row + parts
        scales = tl.load(source, mask=(columns < S.N) & (parts < per_row), other=0)
        if S.FORMAT == "mxfp4":
            scales = scales.to(tl.int32)
    else:
        scales = column
    return scales


@triton.jit
def repeated(values, TIMES: tl.constexpr):
    """`[BN, .]` values, each so many times in a row."""
    BN: tl.constexpr = values.shape[0]
    NUM: tl.constexpr = values.shape[1]
    return tl.reshape(tl.broadcast_to(values[:, :, None], (BN, NUM, TIMES)), (BN, NUM * TIMES))


@triton.jit
def of_bytes(scales, S: tl.constexpr):
    """`[BN, BK / SHARING]` scales as those of bytes, `[BN, BK / 2]`."""
    return repeated(scales, S.SHARING // 2)


@triton.jit
def halves(block, scales, dtype: tl.constexpr, S: tl.constexpr):
    """Bytes `[BN, BK / 2]` as the numbers of their lower and upper halves; only those of MXFP4 have their scales."""
    if S.FORMAT == "int4":
        lower, upper = tl.inline_asm_elementwise(
            _INT4, "=r,=r,=r,=r,r", [block], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
        lower, upper = lower.to(dtype), upper.to(dtype)
    elif dtype == tl.bfloat16:
        factors = of_bytes(factors_of_bits(scales), S)
        lower, upper = tl.inline_asm_elementwise(
            _E2M1, "=r,=r,=r,=r,r,r,r", [block, factors], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        factors = of_bytes(powers(scales), S)
        lower, upper = (e2m1(block & 15) * factors).to(dtype), (e2m1(block >> 4) * factors).to(dtype)
    return lower, upper


@triton.jit
def halves_of_rows(rows, S: tl.constexpr):
    """Columns of rows `[BM, BK]` that lower halves of bytes are multiplied by, and those that upper ones are."""
    return tl.split(tl.reshape(rows, (S.tile.BM, S.tile.BK // 2, 2)))


@triton.jit
def load_bytes(matrix, group, column, k, S: tl.constexpr):
    """`[BN, BK]` of a group's matrix as it is stored, through a descriptor; in 4 bits half as many columns."""
    PER_BYTE: tl.constexpr = S.PER_BYTE
    return tl.reshape(matrix.load([group, column, k // PER_BYTE]), (S.tile.BN, S.tile.BK // PER_BYTE))


@triton.jit
def multiply(rows, numbers, total, S: tl.constexpr):
    """`[BM, .]` rows times `[BN, .]` numbers, added to `[BM, BN]`, or with SWAP turned to `[BN, BM]`."""
    if S.tile.SWAP:
        total = tl.dot(numbers, tl.trans(rows), total)
    else:
        total = tl.dot(rows, tl.trans(numbers), total)
    return total


@triton.jit
def of_columns(values, S: tl.constexpr):
    """`[BN]` values of columns beside sums of `multiply`."""
    return values[:, None] if S.tile.SWAP else values[None, :]


@triton.jit
def add_halves(total, even, odd, block, scales, S: tl.constexpr):
    """`total` and the product of both halves of rows, of `halves_of_rows`, with those of a block.

    One scale of a column for the whole step is a factor of its sum, if registers hold two sums; others are of elements.
    """
    dtype: tl.constexpr = even.dtype
    lower, upper = halves(block, scales, dtype, S)
    if S.FORMAT == "int4" and S.SHARING == S.tile.BK and S.tile.BM <= 32:
        part = multiply(odd, upper, multiply(even, lower, tl.zeros(total.shape, tl.float32), S), S)
        total += part * of_columns(tl.reshape(scales, (S.tile.BN,)), S)
    else:
        if S.FORMAT == "int4":
            factors = of_bytes(scales, S)
            lower, upper = (lower * factors).to(dtype), (upper * factors).to(dtype)
        total = multiply(odd, upper, multiply(even, lower, total, S), S)
    return total


@triton.jit
def add_product(total, rows, block, scales, scales_ptr, group, column, k, S: tl.constexpr):
    """`total` and the product of rows `[BM, BK]` with a block of `load_bytes`, whose scales are loaded already."""
    dtype: tl.constexpr = rows.dtype
    if S.PER_BYTE == 2:
        total = add_halves(total, *halves_of_rows(rows, S), block, scales, S)
    elif S.FORMAT == "fp8":
        tl.static_assert(S.tile.BK == GROUP and GROUP % S.tile.BN == 0, "a block has one scale of the matrix")
        column_blocks: tl.constexpr = (S.N + GROUP - 1) // GROUP
        source = scales_ptr + (group.to(tl.int64) * column_blocks + column // GROUP) * (S.K // GROUP) + k // GROUP
        part = multiply(rows, to_float(block, dtype), tl.zeros(total.shape, tl.float32), S)
        total += part * tl.load(source)
    else:
        total = multiply(rows, to_float(block, dtype), total, S)
    return total


@triton.jit
def to_float(block, dtype: tl.constexpr):
    """8 bits as `dtype`; FP8 by way of float32, from which the compiler makes two bfloat16 at a time."""
    if block.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        block = block.to(tl.float16).to(tl.float32)
    return block.to(dtype)


@triton.jit
def scale_columns(total, scales_ptr, group, column, rows_dtype: tl.constexpr, S: tl.constexpr):
    """float32 sums `[BM, BN]` of rows of a dtype, times what products have left to do."""
    total = total.to(tl.float32)
    if S.FORMAT == "mxfp4" and not S.SHUFFLED and rows_dtype == tl.bfloat16:
        total *= AS_MUCH_MORE
    if S.FORMAT == "fp8_channel" or S.FORMAT == "int8":
        columns = column + tl.arange(0, S.tile.BN)
        scales = tl.load(scales_ptr + group.to(tl.int64) * S.N + columns, mask=columns < S.N, other=0.0)
        total *= scales[None, :]
    return total
