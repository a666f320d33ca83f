"""The end of a dispatch: from tokens, as they are or quantised, to expert-major rows."""

import triton
import triton.language as tl

from .quantization import dequantize, scale_offsets


@triton.jit
def store_rows(values, slot_row_ptr, wanted, out_ptr, columns, inside, H: tl.constexpr, K: tl.constexpr):
    """Stores columns of tokens in each of their rows of `out`."""
    for k in tl.static_range(K):
        row = tl.load(slot_row_ptr + k, mask=wanted, other=-1)
        target = tl.multiple_of(out_ptr + row.to(tl.int64)[:, None] * H + columns, (16, 16))
        tl.store(target, values, mask=(row >= 0)[:, None] & inside)


@triton.jit
def store_scales(scales, slot_row_ptr, wanted, out_ptr, h, H: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Stores the scales of columns `[h, h + COLUMNS)` of tokens for each of their rows."""
    for k in tl.static_range(K):
        row = tl.load(slot_row_ptr + k, mask=wanted, other=-1)
        offsets, exists = scale_offsets(row, h, H, COLUMNS)
        tl.store(out_ptr + offsets, scales, mask=(row >= 0)[:, None] & exists)


@triton.jit
def copy_to_rows(
    values_ptr,
    scales_ptr,
    slots,
    wanted,
    slot_row_ptr,
    out_ptr,
    out_scales_ptr,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FP8: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """Copies received tokens to each of their rows of `out`."""
    for h in range(0, H, BLOCK_H):
        columns = h + tl.arange(0, BLOCK_H)[None, :]
        inside = columns < H
        source = tl.multiple_of(values_ptr + slots.to(tl.int64)[:, None] * H + columns, (16, 16))
        values = tl.load(source, mask=wanted[:, None] & inside, other=0.0)
        if FP8:
            offsets, exists = scale_offsets(slots, h, H, BLOCK_H)
            scales = tl.load(scales_ptr + offsets, mask=wanted[:, None] & exists, other=0.0)
            if QUANTIZED:
                store_scales(scales, slot_row_ptr + slots * K, wanted, out_scales_ptr, h, H, K, BLOCK_H)
            else:
                values = dequantize(values, scales, BLOCK_T, BLOCK_H).to(out_ptr.dtype.element_ty)
        store_rows(values, slot_row_ptr + slots * K, wanted, out_ptr, columns, inside, H, K)


@triton.jit
def clear_padding(
    out_ptr, row_slot_ptr, first, H: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Zeroes those of the rows from `first` on that belong to no slot."""
    rows = first + tl.arange(0, ROWS)
    empty = (tl.load(row_slot_ptr + rows, mask=rows < R, other=0) < 0)[:, None]
    zeros = tl.zeros((ROWS, BLOCK_H), out_ptr.dtype.element_ty)
    for h in range(0, H, BLOCK_H):
        columns = h + tl.arange(0, BLOCK_H)[None, :]
        target = tl.multiple_of(out_ptr + rows.to(tl.int64)[:, None] * H + columns, (16, 16))
        tl.store(target, zeros, mask=empty & (columns < H))
