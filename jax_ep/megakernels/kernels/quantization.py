"""FP8 (e4m3) with one float32 scale per row and group of columns; same numbers as jax_ep/core/fp8.py, bit for bit."""

import triton
import triton.language as tl

GROUP = tl.constexpr(128)  # columns that share a scale
E4M3_MAX = tl.constexpr(448.0)
MIN_SCALE = tl.constexpr(2.0**-120)  # keeps the inverse of a scale finite

# $0 = 1 / $1, correctly rounded, for normal numbers with a normal inverse: an estimate and one Newton step. CUDA's
# division also handles all other numbers, by a call that serializes the threads and takes registers.
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
    """Return the scales of groups and their inverses; `bits` are the groups' largest `magnitudes`."""
    largest = bits.to(tl.float32, bitcast=True) * (1.0 / E4M3_MAX)
    # A comparison instead of `maximum`, so that NaN stays NaN and reaches its whole group, as in XLA.
    scales = tl.where(largest < MIN_SCALE, MIN_SCALE, largest)
    inverse = tl.inline_asm_elementwise(_INVERSE, "=r,r", [scales], tl.float32, True, 1)
    # An infinite maximum has inverse 0: finite values become 0, infinite ones NaN.
    return scales, tl.where(scales == float("inf"), 0.0, inverse)


@triton.jit
def magnitudes(values):
    """Return the absolute values of float32 as integers of the same order; NaN is the largest."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def quantize(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr = GROUP):
    """Quantize `[ROWS, COLUMNS]` to float8_e4m3fn values and `[ROWS, COLUMNS // SIZE]` scales."""
    groups = tl.reshape(values.to(tl.float32), (ROWS, COLUMNS // SIZE, SIZE))
    scales, inverse = scales_for(tl.max(magnitudes(groups), axis=2))
    # The conversion saturates at E4M3_MAX.
    return tl.reshape((groups * inverse[:, :, None]).to(tl.float8e4nv), (ROWS, COLUMNS)), scales


@triton.jit
def dequantize(values, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Multiply `[ROWS, COLUMNS]` FP8 values by their scales, to float32."""
    groups = tl.reshape(values.to(tl.float32), (ROWS, COLUMNS // GROUP, GROUP))
    return tl.reshape(groups * scales[:, :, None], (ROWS, COLUMNS))


@triton.jit
def scale_offsets(rows, h, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the offsets of the scales of columns `[h, h + COLUMNS)` of `rows`, and a mask of those that exist."""
    groups = h // GROUP + tl.arange(0, COLUMNS // GROUP)[None, :]
    return rows.to(tl.int64)[:, None] * (HIDDEN // GROUP) + groups, groups < HIDDEN // GROUP
