"""FP8 tiles with one float32 scale per row and group of columns; the same numbers as jax_ep/quantization.py."""

import triton
import triton.language as tl

GROUP = tl.constexpr(128)

# 1 / $1 of normal numbers whose inverse is normal, rounded as IEEE wants it: an estimate and one step of Newton's. The
# division of CUDA has a call for all other numbers, around which one after another is made, and registers are short.
_INVERSE = tl.constexpr("""{
    .reg .f32 x, y, e;
    mov.b32 x, $1;
    rcp.approx.ftz.f32 y, x;
    neg.f32 x, x;
    fma.rn.f32 e, x, y, 0f3F800000;
    fma.rn.f32 y, y, e, y;
    mov.b32 $0, y;
}""")


@triton.jit
def scales_for(bits):
    """Scales of groups, and their inverses; `bits` are the largest magnitudes of the groups as integers."""
    largest = bits.to(tl.float32, bitcast=True) * (1.0 / 448.0)
    scales = tl.where(largest < 2.0**-120, 2.0**-120, largest)
    inverse = tl.inline_asm_elementwise(_INVERSE, "=r,r", [scales], tl.float32, True, 1)
    return scales, tl.where(scales == float("inf"), 0.0, inverse)


@triton.jit
def magnitudes(values):
    """Of float32 as integers, which keep their order; NaN is the largest: one spoils its group, as in XLA."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def quantize(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr = GROUP):
    """`[ROWS, COLUMNS]` to float8_e4m3fn values and `[ROWS, COLUMNS // SIZE]` scales."""
    groups = tl.reshape(values.to(tl.float32), (ROWS, COLUMNS // SIZE, SIZE))
    scales, inverse = scales_for(tl.max(magnitudes(groups), axis=2))
    # The conversion saturates at 448.
    return tl.reshape((groups * inverse[:, :, None]).to(tl.float8e4nv), (ROWS, COLUMNS)), scales


@triton.jit
def dequantize(values, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The inverse, in float32."""
    groups = tl.reshape(values.to(tl.float32), (ROWS, COLUMNS // GROUP, GROUP))
    return tl.reshape(groups * scales[:, :, None], (ROWS, COLUMNS))


@triton.jit
def scale_offsets(rows, h, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr):
    """Where the scales of columns `[h, h + COLUMNS)` of `rows` lie, and which of them exist."""
    groups = h // GROUP + tl.arange(0, COLUMNS // GROUP)[None, :]
    return rows.to(tl.int64)[:, None] * (HIDDEN // GROUP) + groups, groups < HIDDEN // GROUP
