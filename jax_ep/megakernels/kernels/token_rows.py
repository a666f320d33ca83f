"""Where tokens go, and their copies: destination ranks, heap slots and expert rows.

A token goes once to each rank that has one of its experts, into the fixed slot `[source rank, token]` of that rank's
heap. There it is copied to each of its expert rows. Addresses carry an explicit alignment hint: Triton cannot derive
it for pointers from the heap, and falls back to 2-byte accesses without it.
"""

import triton
import triton.language as tl

from .indices import as_column, indices_in_row
from .quantization import dequantize, scale_offsets


@triton.jit
def destinations(
    topk_idx_ptr, first_ids, in_range, TOP_K: tl.constexpr, LOCAL_EXPERTS: tl.constexpr, NUM_EXPERTS: tl.constexpr
):
    """Return each token's destination ranks as int64 bits: bit r is set if the token has an expert on rank r.

    `first_ids` is the index of each token's first expert id.
    """
    ranks = first_ids.to(tl.int64) * 0
    for k in tl.static_range(TOP_K):
        expert = tl.load(topk_idx_ptr + first_ids + k, mask=in_range, other=-1)
        # Invalid ids have no destination.
        valid = (expert >= 0) & (expert < NUM_EXPERTS)
        ranks = ranks | tl.where(valid, 1, 0).to(tl.int64) << tl.where(valid, expert // LOCAL_EXPERTS, 0).to(tl.int64)
    return ranks


@triton.jit
def goes_to(ranks, rank):
    """Test whether a set of ranks, as bits, contains `rank`."""
    return (ranks >> rank.to(tl.int64)) & 1 > 0


@triton.jit
def send_mask(topk_idx_ptr, first_ids, in_range, rank, TOP_K: tl.constexpr, LOCAL_EXPERTS: tl.constexpr):
    """Return which tokens have an expert on `rank`."""
    first = rank * LOCAL_EXPERTS
    mask = in_range & False
    for k in tl.static_range(TOP_K):
        expert = tl.load(topk_idx_ptr + first_ids + k, mask=in_range, other=-1)
        mask = mask | ((expert >= first) & (expert < first + LOCAL_EXPERTS))
    return mask


@triton.jit
def copy_tokens(x_ptr, tokens, slots, mask, values_ptr, HIDDEN: tl.constexpr, BLOCK_HIDDEN: tl.constexpr):
    """Copy tokens to slots, such as those in a peer's heap."""
    for h in range(0, HIDDEN, BLOCK_HIDDEN):
        columns = h + indices_in_row(BLOCK_HIDDEN)
        inside = as_column(mask) & (columns < HIDDEN)
        source = tl.multiple_of(x_ptr + as_column(tokens.to(tl.int64)) * HIDDEN + columns, (16, 16))
        target = tl.multiple_of(values_ptr + as_column(slots.to(tl.int64)) * HIDDEN + columns, (16, 16))
        tl.store(target, tl.load(source, mask=inside), mask=inside)


@triton.jit
def store_rows(values, assignment_to_row_ptr, mask, out_ptr, columns, inside, S: tl.constexpr):
    """Store columns of tokens in each of their rows of `out`."""
    TOP_K: tl.constexpr = S.top_k
    for k in tl.static_range(TOP_K):
        row = tl.load(assignment_to_row_ptr + k, mask=mask, other=-1)
        target = tl.multiple_of(out_ptr + row.to(tl.int64)[:, None] * S.hidden + columns, (16, 16))
        tl.store(target, values, mask=(row >= 0)[:, None] & inside)


@triton.jit
def store_scales(scales, assignment_to_row_ptr, mask, out_ptr, h, S: tl.constexpr):
    """Store the scales of columns `[h, h + block_hidden)` of tokens in each of their rows."""
    TOP_K: tl.constexpr = S.top_k
    for k in tl.static_range(TOP_K):
        row = tl.load(assignment_to_row_ptr + k, mask=mask, other=-1)
        offsets, exists = scale_offsets(row, h, S.hidden, S.tile.block_hidden)
        tl.store(out_ptr + offsets, scales, mask=(row >= 0)[:, None] & exists)


@triton.jit
def copy_to_rows(received, slots, mask, assignment_to_row_ptr, out, S: tl.constexpr):
    """Copy received tokens to each of their rows of `out`; both are `Rows`.

    Each token is read once from the heap and written to all of its rows.
    """
    BLOCK_HIDDEN: tl.constexpr = S.tile.block_hidden
    for h in range(0, S.hidden, BLOCK_HIDDEN):
        columns = h + tl.arange(0, BLOCK_HIDDEN)[None, :]
        inside = columns < S.hidden
        source = tl.multiple_of(received.values_ptr + slots.to(tl.int64)[:, None] * S.hidden + columns, (16, 16))
        values = tl.load(source, mask=mask[:, None] & inside, other=0.0)
        if S.fp8:
            offsets, exists = scale_offsets(slots, h, S.hidden, BLOCK_HIDDEN)
            scales = tl.load(received.scales_ptr + offsets, mask=mask[:, None] & exists, other=0.0)
            if S.quantized:
                # Rows stay FP8: the scales go along.
                store_scales(scales, assignment_to_row_ptr + slots * S.top_k, mask, out.scales_ptr, h, S)
            else:
                dtype: tl.constexpr = out.values_ptr.dtype.element_ty
                values = dequantize(values, scales, S.tile.block_tokens, BLOCK_HIDDEN).to(dtype)
        store_rows(values, assignment_to_row_ptr + slots * S.top_k, mask, out.values_ptr, columns, inside, S)


@triton.jit
def clear_padding(out_ptr, row_to_assignment_ptr, first, S: tl.constexpr):
    """Zero the padding rows among `block_rows` rows from `first` on."""
    rows = first + tl.arange(0, S.tile.block_rows)
    empty = (tl.load(row_to_assignment_ptr + rows, mask=rows < S.num_rows, other=0) < 0)[:, None]
    zeros = tl.zeros((S.tile.block_rows, S.tile.block_hidden), out_ptr.dtype.element_ty)
    for h in range(0, S.hidden, S.tile.block_hidden):
        columns = h + tl.arange(0, S.tile.block_hidden)[None, :]
        target = tl.multiple_of(out_ptr + rows.to(tl.int64)[:, None] * S.hidden + columns, (16, 16))
        tl.store(target, zeros, mask=empty & (columns < S.hidden))
