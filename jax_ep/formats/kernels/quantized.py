"""Quantized weights as kernels use them: the functions of a format's decoder, chosen by `S.DECODER`.

Weights are `[., N, K]` and become bfloat16, float16 or FP8 in registers, on their way to the tensor cores. Scales of a
column, or of a block of 128 by 128, multiply float32 sums. Scales of smaller blocks multiply the elements, which are
then rounded to the dtype of the rows; a power of two, as in MXFP4, loses no bits.

`S` holds the sizes of one GEMM: N, K, DECODER, PER_BYTE, BLOCK_SIZE, PREPACKED, and `tile` with BM, BN, BK, SWAP.
"""

import triton
import triton.language as tl

from . import decoders
from .common import FP8_BLOCK
from .prepacked import PIECE, load_pieces, locate_columns


@triton.jit
def load_scales(scales_ptr, group, column, k, S: tl.constexpr):
    """Load the block scales of one step, `[BN, BK / BLOCK_SIZE]`; zeros outside of the weights.

    Kernels load them one step ahead: they come by pointers, which the pipeline does not cover. Any number where the
    decoder loads its scales in the step itself.
    """
    scales = column
    if S.DECODER != "" and not S.PREPACKED:
        scales = getattr(decoders, S.DECODER).load_scales(scales_ptr, group, column, k, S)
    return scales


@triton.jit
def load_packed(weights, group, column, k, S: tl.constexpr):
    """Load `[BN, BK / PER_BYTE]` stored values of a group through a descriptor."""
    PER_BYTE: tl.constexpr = S.PER_BYTE
    return tl.reshape(weights.load([group, column, k // PER_BYTE]), (S.tile.BN, S.tile.BK // PER_BYTE))


@triton.jit
def add_product(total, rows, packed, scales, scales_ptr, group, column, k, S: tl.constexpr):
    """Add the product of rows `[BM, BK]` and the weights of `load_packed`, whose scales are those of `load_scales`."""
    return getattr(decoders, S.DECODER).add_product(total, rows, packed, scales, scales_ptr, group, column, k, S)


@triton.jit
def add_fp8_product(total, rows, row_scales, packed, scales, scales_ptr, group, column, k, S: tl.constexpr):
    """Add the product of FP8 rows `[BM, 128]`, with scales `[BM]`, and the weights of `load_packed`.

    Hopper's tensor cores multiply FP8 by FP8 only, so all weights become FP8. Sums of 128 elements are scaled in
    float32. `total` is `[BM, BN]`, or `[BN, BM]` with SWAP.
    """
    tl.static_assert(S.tile.BK == FP8_BLOCK, "a step has one scale per row")
    factors = row_scales[None, :] if S.tile.SWAP else row_scales[:, None]
    D: tl.constexpr = getattr(decoders, S.DECODER)
    return D.add_fp8_product(total, rows, factors, packed, scales, scales_ptr, group, column, k, S)


@triton.jit
def scale_columns(total, scales_ptr, group, column, rows_dtype: tl.constexpr, S: tl.constexpr):
    """Apply what is left to do to the sums `[BM, BN]` of all steps, in float32."""
    total = total.to(tl.float32)
    if S.DECODER != "":
        total = getattr(decoders, S.DECODER).scale_columns(total, scales_ptr, group, column, rows_dtype, S)
    return total


@triton.jit
def add_prepacked_product(total, rows, weights, scales_ptr, group, column, k, S: tl.constexpr):
    """Add the product of rows `[BM, PIECE]`, one per piece, and a step of prepacked weights to `total [BN, BM]`.

    It runs in pieces, so that registers of one piece are free for the next. Pairs of pieces have a sum of their own:
    the compiler waits for all products that continue `total` together.
    """
    tl.static_assert(S.tile.SWAP, "the weights are the first operand")
    D: tl.constexpr = getattr(decoders, S.DECODER)
    columns, inside = locate_columns(weights, column, S)
    pieces = load_pieces(weights, group, column, k, S)
    for i in tl.static_range(0, S.tile.BK // PIECE, 2):
        total = D.add_prepacked_pair(
            total, rows[i], rows[i + 1], pieces[i], pieces[i + 1], scales_ptr, group, columns, inside, k + i * PIECE, S
        )
    return total
