"""Quantized weights as kernels use them, by the decoder of their format.

The decoder is the module of this folder that `S.DECODER` names. It has these functions, with the arguments of those
below:
  add_product          rows in 16 bits, or int8
  add_fp8_product      rows in FP8, whose scales are `factors`, shaped for the sums
  load_scales          optional: what a step needs, loaded one step ahead, as the pipeline covers no loads by pointers
  scale_columns        optional: what is left to do to the sums of all steps
  add_prepacked_pair   of formats that can be prepacked: two pieces of a step

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
    """The scales of the step at k; any number where the decoder needs none ahead."""
    scales = column
    if S.decoder != "" and not S.prepacked:
        if hasattr(getattr(decoders, S.decoder), "load_scales"):
            scales = getattr(decoders, S.decoder).load_scales(scales_ptr, group, column, k, S)
    return scales


@triton.jit
def load_packed(weights, group, column, k, S: tl.constexpr):
    """Load `[BN, BK / PER_BYTE]` stored values of a group through a descriptor."""
    PER_BYTE: tl.constexpr = S.values_per_byte
    return tl.reshape(weights.load([group, column, k // PER_BYTE]), (S.tile.block_n, S.tile.block_k // PER_BYTE))


@triton.jit
def add_product(total, rows, packed, scales, scales_ptr, group, column, k, S: tl.constexpr):
    """Add the product of rows `[BM, BK]` and the weights of `load_packed`, whose scales are those of `load_scales`."""
    return getattr(decoders, S.decoder).add_product(total, rows, packed, scales, scales_ptr, group, column, k, S)


@triton.jit
def add_fp8_product(total, rows, row_scales, packed, scales, scales_ptr, group, column, k, S: tl.constexpr):
    """The same of FP8 rows `[BM, 128]` with scales `[BM]`; sums of 128 elements are scaled in float32."""
    tl.static_assert(S.tile.block_k == FP8_BLOCK, "a step has one scale per row")
    factors = row_scales[None, :] if S.tile.swap_ab else row_scales[:, None]
    NUM_DEVICES: tl.constexpr = getattr(decoders, S.decoder)
    return NUM_DEVICES.add_fp8_product(total, rows, factors, packed, scales, scales_ptr, group, column, k, S)


@triton.jit
def scale_columns(total, scales_ptr, group, column, rows_dtype: tl.constexpr, S: tl.constexpr):
    """Float32 sums `[BM, BN]` of all steps, of rows of a dtype, with the scales that are left to apply."""
    total = total.to(tl.float32)
    if S.decoder != "":
        if hasattr(getattr(decoders, S.decoder), "scale_columns"):
            total = getattr(decoders, S.decoder).scale_columns(total, scales_ptr, group, column, rows_dtype, S)
    return total


@triton.jit
def add_prepacked_product(total, rows, weights, scales_ptr, group, column, k, S: tl.constexpr):
    """Add the product of rows `[BM, PIECE]`, one per piece, and a step of prepacked weights to `total [BN, BM]`.

    Pieces free their registers for the next ones. Each pair has a sum of its own: the compiler waits for all products
    that continue `total` together.
    """
    tl.static_assert(S.tile.swap_ab, "the weights are the first operand")
    NUM_DEVICES: tl.constexpr = getattr(decoders, S.decoder)
    columns, inside = locate_columns(weights, column, S)
    pieces = load_pieces(weights, group, column, k, S)
    for i in tl.static_range(0, S.tile.block_k // PIECE, 2):
        at = scales_ptr, group, columns, inside, k + i * PIECE
        total = NUM_DEVICES.add_prepacked_pair(total, rows[i], rows[i + 1], pieces[i], pieces[i + 1], *at, S)
    return total
