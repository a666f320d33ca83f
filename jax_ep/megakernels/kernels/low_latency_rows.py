"""Rows in the regions of the low-latency area: one at a time, as it is or in FP8, and received tokens to their rows."""

import triton
import triton.language as tl

from .quantization import GROUP, dequantize, quantize
from .regions import part_of


@triton.jit
def store_row(
    values,
    index,
    h,
    region,
    wire: tl.constexpr,
    H: tl.constexpr,
    VALUES_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FP8: tl.constexpr,
):
    """Stores columns `[h, h + BLOCK_H)` of a row in a region, as row `index` of what is sent."""
    columns = h + tl.arange(0, BLOCK_H)
    if FP8:
        groups = h // GROUP + tl.arange(0, BLOCK_H // GROUP)
        values, scales = quantize(tl.reshape(values, (1, BLOCK_H)), 1, BLOCK_H)
        values = tl.reshape(values, (BLOCK_H,))
        target = part_of(region, SCALES_AT, tl.float32) + index.to(tl.int64) * (H // GROUP) + groups
        tl.store(target, tl.reshape(scales, (BLOCK_H // GROUP,)), mask=groups < H // GROUP)
    target = part_of(region, VALUES_AT, wire) + index.to(tl.int64) * H + columns
    tl.store(tl.multiple_of(target, 16), values.to(wire), mask=columns < H)


@triton.jit
def load_row(
    wanted,
    index,
    h,
    region,
    wire: tl.constexpr,
    SUM: tl.constexpr,
    H: tl.constexpr,
    VALUES_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FP8: tl.constexpr,
):
    """What `store_row` has stored, zero if not `wanted`."""
    columns = h + tl.arange(0, BLOCK_H)
    source = part_of(region, VALUES_AT, wire) + index.to(tl.int64) * H + columns
    values = tl.load(tl.multiple_of(source, 16), mask=wanted & (columns < H), other=0.0)
    if FP8:
        groups = h // GROUP + tl.arange(0, BLOCK_H // GROUP)
        source = part_of(region, SCALES_AT, tl.float32) + index.to(tl.int64) * (H // GROUP) + groups
        scales = tl.load(source, mask=wanted & (groups < H // GROUP), other=0.0)
        scales = tl.reshape(scales, (1, BLOCK_H // GROUP))
        values = tl.reshape(dequantize(tl.reshape(values, (1, BLOCK_H)), scales, 1, BLOCK_H), (BLOCK_H,))
    return values.to(SUM)


@triton.jit
def copy_tokens(
    rows,
    tokens,
    wanted,
    region,
    out_ptr,
    out_scales_ptr,
    H: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    VALUES_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Copies tokens `[BLOCK_C]` that lie in a region to `rows [BLOCK_C, BLOCK_K]`."""
    choice = tl.arange(0, BLOCK_K)[None, :]
    values_ptr = part_of(region, VALUES_AT, out_ptr.dtype.element_ty)
    for h in range(0, H, BLOCK_H):
        columns = h + tl.arange(0, BLOCK_H)[None, :]
        inside = columns < H
        source = tl.multiple_of(values_ptr + tokens.to(tl.int64)[:, None] * H + columns, (16, 16))
        values = tl.load(source, mask=wanted[:, None] & inside)
        for k in tl.static_range(K):
            row = tl.max(tl.where(choice == k, rows, -1), axis=1)
            target = tl.multiple_of(out_ptr + row.to(tl.int64)[:, None] * H + columns, (16, 16))
            tl.store(target, values, mask=(row >= 0)[:, None] & inside)
    if G > 0:
        groups = tl.arange(0, BLOCK_G)[None, :]
        source = part_of(region, SCALES_AT, tl.float32) + tokens.to(tl.int64)[:, None] * G + groups
        scales = tl.load(source, mask=wanted[:, None] & (groups < G))
        for k in tl.static_range(K):
            row = tl.max(tl.where(choice == k, rows, -1), axis=1)
            target = out_scales_ptr + row.to(tl.int64)[:, None] * G + groups
            tl.store(target, scales, mask=(row >= 0)[:, None] & (groups < G))
