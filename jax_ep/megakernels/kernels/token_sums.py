"""Sums of a tile of tokens within some columns, in registers: what is made between the tiles of a product.

Every token takes the time of the one with most choices. listed_sums.py does better where it has shared memory.
"""

import triton
import triton.language as tl

from .masks import destinations


@triton.jit
def send_sums(
    y_ptr,
    slot_row_ptr,
    tokens,
    wanted,
    slots,
    values_ptr,
    first_column,
    end_column,
    H: tl.constexpr,
    K: tl.constexpr,
    TILE_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Sums the rows of each token, in order of k, and stores the sums in the slots."""
    for h in range(first_column, end_column, BLOCK_H):
        columns = h + tl.arange(0, BLOCK_H)[None, :]
        inside = columns < end_column
        total = tl.zeros((TILE_T, BLOCK_H), tl.float32)
        for k in tl.static_range(K):
            row = tl.load(slot_row_ptr + tokens * K + k, mask=wanted, other=-1)
            source = tl.multiple_of(y_ptr + row.to(tl.int64)[:, None] * H + columns, (16, 16))
            total += tl.load(source, mask=(row >= 0)[:, None] & inside, other=0.0).to(tl.float32)
        target = tl.multiple_of(values_ptr + slots.to(tl.int64)[:, None] * H + columns, (16, 16))
        tl.store(target, total.to(y_ptr.dtype.element_ty), mask=wanted[:, None] & inside)


@triton.jit
def add_received(
    values_ptr,
    ids_ptr,
    out_ptr,
    tokens,
    rank,
    first_column,
    end_column,
    T: tl.constexpr,
    W: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    TILE_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Adds what the ranks have sent for these tokens, in rank order."""
    ranks = destinations(ids_ptr, (rank * T + tokens) * K, tokens < T, K, L, W * L)
    for h in range(first_column, end_column, BLOCK_H):
        columns = h + tl.arange(0, BLOCK_H)[None, :]
        inside = columns < end_column
        total = tl.zeros((TILE_T, BLOCK_H), tl.float32)
        for source_rank in tl.static_range(W):
            wanted = ((ranks >> source_rank) & 1 > 0)[:, None]
            slots = source_rank * T + tokens
            source = tl.multiple_of(values_ptr + slots.to(tl.int64)[:, None] * H + columns, (16, 16))
            total += tl.load(source, mask=wanted & inside, other=0.0).to(tl.float32)
        target = tl.multiple_of(out_ptr + tokens.to(tl.int64)[:, None] * H + columns, (16, 16))
        tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(tokens < T)[:, None] & inside)
