"""Decoder of 8-bit weights with a scale per column (`fp8_channel`, `int8`), which multiplies the sum over all of K."""

import triton
import triton.language as tl

from .common import multiply, to_float


@triton.jit
def add_product(total, rows, packed, scales, scales_ptr, group, column, k, S: tl.constexpr):
    """Add the product of unscaled elements, see quantized.py."""
    return multiply(rows, to_float(packed, rows.dtype), total, S)


@triton.jit
def add_fp8_product(total, rows, factors, packed, scales, scales_ptr, group, column, k, S: tl.constexpr):
    """Add the product of FP8 elements times the rows' scales, see quantized.py."""
    return total + multiply(rows, packed, tl.zeros(total.shape, tl.float32), S) * factors


@triton.jit
def scale_columns(total, scales_ptr, group, column, rows_dtype: tl.constexpr, S: tl.constexpr):
    """Multiply by the scale of each column."""
    columns = column + tl.arange(0, S.tile.block_n)
    scales = tl.load(scales_ptr + group.to(tl.int64) * S.N + columns, mask=columns < S.N, other=0.0)
    return total * scales[None, :]
