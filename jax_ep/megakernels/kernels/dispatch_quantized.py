"""Dispatch in FP8 that leaves rows quantised, for products in FP8."""

import triton
import triton.language as tl

from .dispatch import run_dispatch


@triton.jit
def dispatch_quantized(
    x_ptr,
    ids_ptr,
    slot_row_ptr,
    row_slot_ptr,
    group_ptr,
    table_ptr,
    checked_ptr,
    out_ptr,
    out_scales_ptr,
    W: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    DATA: tl.constexpr,
    SCALES: tl.constexpr,
    FLAGS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LAG: tl.constexpr,
    FP8: tl.constexpr,
    TO_ROWS: tl.constexpr,
    OPERATION: tl.constexpr,
):
    """`dispatch` to FP8 rows `[R, H]` and their scales `[R, H / 128]`."""
    run_dispatch(
        x_ptr,
        ids_ptr,
        slot_row_ptr,
        row_slot_ptr,
        group_ptr,
        table_ptr,
        out_ptr,
        out_scales_ptr,
        W,
        D,
        T,
        K,
        H,
        L,
        R,
        DATA,
        SCALES,
        FLAGS,
        MAX_BLOCKS,
        BLOCK_T,
        BLOCK_H,
        BLOCK_R,
        LAG,
        FP8,
        TO_ROWS,
        OPERATION,
        True,
    )
