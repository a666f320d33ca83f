"""Matrices in 4 bits in the order of `jax_ep.quantization.shuffle_experts`; core/shuffled_experts.py has it.

The product is turned: columns of the matrix are the rows of the first operand, which tensor cores take from registers,
and tokens stay in shared memory. A word has the eight elements of a thread in 32 of a column, two of which are made by
a shift, a mask and a product, so no element moves between registers, nor through shared memory.

Scales are loaded in the step that needs them: loaded ahead, as for other orders, they would end the compiler's search
for a way of laying elements out that moves none.
"""

import triton
import triton.language as tl

from .expert_formats import AS_MUCH_MORE, multiply, repeated

# Eight codes of e2m1 in $4, whose bits come to where bfloat16 has its sign, the end of its exponent and the start of
# its mantissa; $5 is the scale, twice, with what biases differ by.
_E2M1 = tl.constexpr("""{
    .reg .b32 a, b, c, w;
    mov.b32 w, $4;
    mov.b32 c, $5;
    and.b32 a, w, 0x81C081C0;
    mul.bf16x2 $0, a, c;
    shl.b32 a, w, 6;
    and.b32 a, a, 0x81C081C0;
    mul.bf16x2 $1, a, c;
    shf.l.wrap.b32 a, w, w, 28;
    and.b32 a, a, 0x81C081C0;
    mul.bf16x2 $2, a, c;
    shl.b32 a, w, 2;
    and.b32 a, a, 0x80C080C0;
    shr.b32 b, w, 6;
    lop3.b32 a, b, 0x01000100, a, 0xEA;
    mul.bf16x2 $3, a, c;
}""")

# Of four exponents in $4, each as bfloat16, twice: what factors_of_bits of expert_formats.py is, of 94 = 126 - LESS.
_FACTORS = tl.constexpr("""{
    .reg .b32 a, b, m;
    and.b32 a, $4, 0x00FF00FF;
    prmt.b32 b, $4, 0, 0x4341;
    mov.b32 m, 0x00FF00FF;
    add.u32 a, a, 0x005E005E;
    add.u32 b, b, 0x005E005E;
    min.u16x2 a, a, m;
    min.u16x2 b, b, m;
    shl.b32 a, a, 7;
    shl.b32 b, b, 7;
    prmt.b32 $0, a, 0, 0x1010;
    prmt.b32 $1, b, 0, 0x1010;
    prmt.b32 $2, a, 0, 0x3232;
    prmt.b32 $3, b, 0, 0x3232;
}""")

# Eight codes of INT4: in the mantissa of 16 in bfloat16 they are added to it; 24 is taken off.
_INT4 = tl.constexpr("""{
    .reg .b32 a, c, w;
    mov.b32 w, $4;
    mov.b32 c, 0x41C041C0;
    lop3.b32 a, w, 0x00780078, 0x41804180, 0xEA;
    sub.bf16x2 $0, a, c;
    shr.b32 a, w, 4;
    lop3.b32 a, a, 0x00780078, 0x41804180, 0xEA;
    sub.bf16x2 $1, a, c;
    shr.b32 a, w, 8;
    lop3.b32 a, a, 0x00780078, 0x41804180, 0xEA;
    sub.bf16x2 $2, a, c;
    shf.l.wrap.b32 a, w, w, 4;
    lop3.b32 a, a, 0x00780078, 0x41804180, 0xEA;
    sub.bf16x2 $3, a, c;
}""")
PIECE = tl.constexpr(64)  # elements of a column that are made at a time; the exponents of two pieces are one word


@triton.jit
def in_order(a, b, c, d):
    """Four of shape `[...]` as the last two axes of `[..., 2, 2]`."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def both_halves(word):
    """Two bfloat16 in a word, `[...]`, as `[..., 2]`."""
    first = word.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.join(first, (word >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True))


@triton.jit
def in_columns(a, b, c, d, S: tl.constexpr):
    """Pairs of elements `[BN, PIECE / 8]`, four of a word, as bfloat16 `[BN, PIECE]` in the order of the matrix."""
    BN: tl.constexpr = S.tile.BN
    parts = in_order(both_halves(a), both_halves(b), both_halves(c), both_halves(d))
    parts = tl.reshape(parts, (BN, PIECE // 32, 4, 2, 2, 2))  # ., 32 of a column, thread, which of two, q
    return tl.reshape(tl.permute(parts, (0, 1, 4, 5, 2, 3)), (BN, PIECE))


@triton.jit
def mxfp4_numbers(words, factors, dtype: tl.constexpr, S: tl.constexpr):
    """Words `[BN, PIECE / 8]` as numbers `[BN, PIECE]`, in bfloat16 less by `AS_MUCH_MORE`."""
    a, b, c, d = tl.inline_asm_elementwise(
        _E2M1,
        "=r,=r,=r,=r,r,r",
        [words, factors],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    numbers = in_columns(a, b, c, d, S)
    return numbers if dtype == tl.bfloat16 else (numbers.to(tl.float32) * AS_MUCH_MORE).to(dtype)


@triton.jit
def int4_numbers(words, S: tl.constexpr):
    """Words `[BN, PIECE / 8]` as bfloat16 `[BN, PIECE]`, without their scales."""
    a, b, c, d = tl.inline_asm_elementwise(
        _INT4, "=r,=r,=r,=r,r", [words], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
    )
    return in_columns(a, b, c, d, S)


@triton.jit
def load_words(matrix, group, column, k, S: tl.constexpr):
    """Words `[BN, PIECE / 8]` of a group's columns from `column` on, for each piece of a step.

    Of a matrix described as `[., 2, N / 2, .]` from there on in both halves.
    """
    BN: tl.constexpr = S.tile.BN
    if len(matrix.block_shape) == 4:
        words = matrix.load([group, 0, column, k // 8])
    else:
        words = matrix.load([group, column, k // 8])
    words = tl.permute(tl.reshape(words, (BN, S.tile.BK // PIECE, PIECE // 8)), (0, 2, 1))
    if S.tile.BK == 2 * PIECE:
        pieces = tl.split(words)
    else:
        tl.static_assert(S.tile.BK == 4 * PIECE, "a step has two pieces or four")
        even, odd = tl.split(tl.reshape(words, (BN, PIECE // 8, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        pieces = first, second, third, fourth
    return pieces


@triton.jit
def locate_columns(matrix, column, S: tl.constexpr):
    """`[BN]` columns of `load_words`, and which of them exist."""
    columns = tl.arange(0, S.tile.BN)
    if len(matrix.block_shape) == 4:
        HALF: tl.constexpr = S.tile.BN // 2
        inside = column + columns % HALF < S.N // 2
        columns = columns // HALF * (S.N // 2) + column + columns % HALF
    else:
        columns += column
        inside = columns < S.N
    return columns, inside


@triton.jit
def load_factors(scales_ptr, group, columns, inside, k, S: tl.constexpr):
    """`[BN, PIECE / 8]` factors of words of MXFP4, each twice in bfloat16, of two pieces from element k on."""
    step = group.to(tl.int64) * ((S.K + 2 * PIECE - 1) // (2 * PIECE)) + k // (2 * PIECE)
    exponents = tl.load(scales_ptr + step * S.N + columns, mask=inside & (k < S.K), other=0)
    a, b, c, d = tl.inline_asm_elementwise(
        _FACTORS, "=r,=r,=r,=r,r", [exponents], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
    )
    # Not by a join, which would make the compiler choose another order of elements for instructions of a warp.
    is_first = tl.arange(0, PIECE // 8)[None, :] < PIECE // 16
    return tl.where(is_first, a[:, None], b[:, None]), tl.where(is_first, c[:, None], d[:, None])


@triton.jit
def load_scales(scales_ptr, group, columns, inside, k, NUM: tl.constexpr, S: tl.constexpr):
    """`[BN, NUM]` scales of INT4, from element k of each column on."""
    PARTS: tl.constexpr = S.K // S.SHARING
    parts = k // S.SHARING + tl.arange(0, NUM)[None, :]
    source = scales_ptr + (group.to(tl.int64) * PARTS + parts) * S.N + columns[:, None]
    return tl.load(source, mask=inside[:, None] & (parts < PARTS), other=0.0)


@triton.jit
def add_shuffled_product(total, rows, matrix, scales_ptr, group, column, k, S: tl.constexpr):
    """`total [BN, BM]` and the turned product of rows `[BM, PIECE]`, of each piece, with a step of a group's matrix.

    In pieces, so that elements of one need their registers while the other's are free again. For that two of them have
    a sum of their own: products that go on with `total` the compiler waits for together.
    """
    tl.static_assert(S.tile.SWAP, "the matrix is the first operand")
    dtype: tl.constexpr = rows[0].dtype
    columns, inside = locate_columns(matrix, column, S)
    words = load_words(matrix, group, column, k, S)
    for i in tl.static_range(0, S.tile.BK // PIECE, 2):
        at = k + i * PIECE
        if S.FORMAT == "mxfp4":
            of_first, of_second = load_factors(scales_ptr, group, columns, inside, at, S)
            first = mxfp4_numbers(words[i], of_first, dtype, S)
            second = mxfp4_numbers(words[i + 1], of_second, dtype, S)
            scales = AS_MUCH_MORE if dtype == tl.bfloat16 else 1.0
        elif S.SHARING == 2 * PIECE:
            first, second = int4_numbers(words[i], S).to(dtype), int4_numbers(words[i + 1], S).to(dtype)
            scales = load_scales(scales_ptr, group, columns, inside, at, 1, S)
        else:
            NUM: tl.constexpr = PIECE // S.SHARING
            of_first = repeated(load_scales(scales_ptr, group, columns, inside, at, NUM, S), S.SHARING)
            of_second = repeated(load_scales(scales_ptr, group, columns, inside, at + PIECE, NUM, S), S.SHARING)
            first = (int4_numbers(words[i], S) * of_first).to(dtype)
            second = (int4_numbers(words[i + 1], S) * of_second).to(dtype)
            scales = 1.0
        part = multiply(rows[i], first, tl.zeros(total.shape, tl.float32), S)
        total += multiply(rows[i + 1], second, part, S) * scales
    return total
