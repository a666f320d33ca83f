"""The end of a dispatch: from tokens, as they are or quantised, to expert-major rows."""

import triton
import triton.language as tl

from .quantization import dequantize, scale_offsets


@triton.jit
def store_rows(values, slot_row_ptr, mask, out_ptr, columns, inside, S: tl.constexpr):
    """Stores columns of tokens in each of their rows of `out`."""
    TOP_K: tl.constexpr = S.top_k
    for k in tl.static_range(TOP_K):
        row = tl.load(slot_row_ptr + k, mask=mask, other=-1)
        target = tl.multiple_of(out_ptr + row.to(tl.int64)[:, None] * S.hidden + columns, (16, 16))
        tl.store(target, values, mask=(row >= 0)[:, None] & inside)


@triton.jit
def store_scales(scales, slot_row_ptr, mask, out_ptr, h, S: tl.constexpr):
    """Stores the scales of columns `[h, h + BLOCK_H)` of tokens for each of their rows."""
    TOP_K: tl.constexpr = S.top_k
    for k in tl.static_range(TOP_K):
        row = tl.load(slot_row_ptr + k, mask=mask, other=-1)
        offsets, exists = scale_offsets(row, h, S.hidden, S.tile.block_hidden)
        tl.store(out_ptr + offsets, scales, mask=(row >= 0)[:, None] & exists)


@triton.jit
def copy_to_rows(received, tokens, mask, slot_row_ptr, out, S: tl.constexpr):
    """Copies received tokens to each of their rows of `out`; both are `Rows`."""
    BLOCK_HIDDEN: tl.constexpr = S.tile.block_hidden
    for h in range(0, S.hidden, BLOCK_HIDDEN):
        columns = h + tl.arange(0, BLOCK_HIDDEN)[None, :]
        inside = columns < S.hidden
        source = tl.multiple_of(received.values_ptr + tokens.to(tl.int64)[:, None] * S.hidden + columns, (16, 16))
        values = tl.load(source, mask=mask[:, None] & inside, other=0.0)
        if S.fp8:
            offsets, exists = scale_offsets(tokens, h, S.hidden, BLOCK_HIDDEN)
            scales = tl.load(received.scales_ptr + offsets, mask=mask[:, None] & exists, other=0.0)
            if S.quantized:
                store_scales(scales, slot_row_ptr + tokens * S.top_k, mask, out.scales_ptr, h, S)
            else:
                values = dequantize(values, scales, S.tile.block_tokens, BLOCK_HIDDEN).to(
                    out.values_ptr.dtype.element_ty
                )
        store_rows(values, slot_row_ptr + tokens * S.top_k, mask, out.values_ptr, columns, inside, S)


@triton.jit
def clear_padding(out_ptr, row_slot_ptr, first, S: tl.constexpr):
    """Zeroes those of BLOCK_R rows from `first` on that belong to no slot."""
    rows = first + tl.arange(0, S.tile.block_rows)
    empty = (tl.load(row_slot_ptr + rows, mask=rows < S.num_rows, other=0) < 0)[:, None]
    zeros = tl.zeros((S.tile.block_rows, S.tile.block_hidden), out_ptr.dtype.element_ty)
    for h in range(0, S.hidden, S.tile.block_hidden):
        columns = h + tl.arange(0, S.tile.block_hidden)[None, :]
        target = tl.multiple_of(out_ptr + rows.to(tl.int64)[:, None] * S.hidden + columns, (16, 16))
        tl.store(target, zeros, mask=empty & (columns < S.hidden))
