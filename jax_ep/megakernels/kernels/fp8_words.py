"""Blocks that become FP8 and are turned: four neighbours of a column, in as many blocks of rows, become one word.

So what threads exchange through shared memory, when a block is turned, are words and not bytes.
"""

import triton
import triton.language as tl

from .quantization import magnitudes

# Four float32 in e4m3, saturated, the first in the lowest byte. Put together from bytes by shifts instead, the third
# was wrong in every other column on H200s, from code that is right as Triton makes it.
_CODES = tl.constexpr("""{
    .reg .b16 a, b;
    cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;
    mov.b32 $0, {a, b};
}""")


@triton.jit
def fourth(i: tl.constexpr, ROWS: tl.constexpr):
    """`[ROWS / 4]`: every fourth row, from i on."""
    return i + 4 * tl.arange(0, ROWS // 4)


@triton.jit
def largest_of(a, b, c, d):
    """The largest `magnitudes` of four."""
    first, second = tl.maximum(magnitudes(a), magnitudes(b)), tl.maximum(magnitudes(c), magnitudes(d))
    return tl.maximum(first, second)


@triton.jit
def words_of(a, b, c, d, factors):
    """`[ROWS / 4, .]` float32 of `fourth` times factors, in FP8, four in a word."""
    scaled = [a * factors, b * factors, c * factors, d * factors]
    return tl.inline_asm_elementwise(_CODES, "=r,r,r,r,r", scaled, tl.int32, True, 1)


@triton.jit
def store_turned(values_ptr, at, words, STRIDE: tl.constexpr, mask):
    """Stores `[ROWS / 4, COLUMNS]` words as `[COLUMNS, ROWS]` bytes, from byte `at` on."""
    ROWS: tl.constexpr = words.shape[0]
    COLUMNS: tl.constexpr = words.shape[1]
    target = values_ptr.to(tl.pointer_type(tl.int32)) + at // 4
    inside = tl.arange(0, COLUMNS)[:, None] * (STRIDE // 4) + tl.arange(0, ROWS)[None, :]
    tl.store(target + inside, tl.trans(words), mask=mask[:, None])
