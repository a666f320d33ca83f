"""FP8 tiles with one float32 scale per row and 128 columns; the same numbers as jax_ep/quantization.py."""

import triton
import triton.language as tl

GROUP = tl.constexpr(128)


@triton.jit
def quantize(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`[ROWS, COLUMNS]` to float8_e4m3fn values and `[ROWS, COLUMNS // 128]` scales."""
    groups = tl.reshape(values.to(tl.float32), (ROWS, COLUMNS // GROUP, GROUP))
    scales = tl.maximum(tl.max(tl.abs(groups), axis=2) * (1.0 / 448.0), 2.0**-120)
    # Maxima skip NaN; one in the group must spoil all of it.
    has_nan = tl.max((groups != groups).to(tl.int32), axis=2) > 0
    scales = tl.where(has_nan, float("nan"), scales)
    scaled = tl.div_rn(groups, tl.broadcast_to(scales[:, :, None], (ROWS, COLUMNS // GROUP, GROUP)))
    clipped = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
    return tl.reshape(clipped.to(tl.float8e4nv), (ROWS, COLUMNS)), scales


@triton.jit
def dequantize(values, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The inverse, in float32."""
    groups = tl.reshape(values.to(tl.float32), (ROWS, COLUMNS // GROUP, GROUP))
    return tl.reshape(groups * scales[:, :, None], (ROWS, COLUMNS))


@triton.jit
def scale_offsets(rows, h, H: tl.constexpr, COLUMNS: tl.constexpr):
    """Where the scales of columns `[h, h + COLUMNS)` of `rows` lie, and which of them exist."""
    groups = h // GROUP + tl.arange(0, COLUMNS // GROUP)[None, :]
    return rows.to(tl.int64)[:, None] * (H // GROUP) + groups, groups < H // GROUP
