"""Quantized weights in kernels, by the decoder of their format.

`S.decoder` names a module of this folder. It has these functions, with the arguments of those below:
  add_product          for rows in 16 bits, or int8
  add_fp8_product      for FP8 rows, whose scales are `factors`, shaped for the sums
  load_scales          optional: what a step needs, loaded one step ahead, since the pipeline covers TMA loads only
  scale_columns        optional: the scales that are left after all steps
  add_prepacked_pair   only for formats that can be prepacked: two pieces of a step

Weights are `[., N, K]` and become bfloat16, float16 or FP8 in registers, on their way to the tensor cores. Scales of a
column, or of a block of 128 by 128, multiply float32 sums. Scales of smaller blocks multiply the elements, which are
then rounded to the dtype of the rows; a power of two, as in MXFP4, loses no bits.

`S` holds the sizes of one GEMM: N, K, decoder, values_per_byte, block_size, prepacked, and a tile with block_m,
block_n, block_k and swap_ab.
"""

import triton
import triton.language as tl

from . import decoders
from .common import FP8_BLOCK
from .prepacked import PIECE, load_pieces, locate_columns


@triton.jit
def load_scales(scales_ptr, group, column, k, S: tl.constexpr):
    """Load the scales of the step at k; return any number if the decoder needs none ahead."""
    scales = column
    if S.decoder != "" and not S.prepacked:
        if hasattr(getattr(decoders, S.decoder), "load_scales"):
            scales = getattr(decoders, S.decoder).load_scales(scales_ptr, group, column, k, S)
    return scales


@triton.jit
def load_packed(weights, group, column, k, S: tl.constexpr):
    """Load `[block_n, block_k / values_per_byte]` stored values of a group through a descriptor."""
    PER_BYTE: tl.constexpr = S.values_per_byte
    return tl.reshape(weights.load([group, column, k // PER_BYTE]), (S.tile.block_n, S.tile.block_k // PER_BYTE))


@triton.jit
def add_product(total, rows, packed, scales, scales_ptr, group, column, k, S: tl.constexpr):
    """Add the product of rows `[block_m, block_k]` and the weights of `load_packed`, with scales of `load_scales`."""
    return getattr(decoders, S.decoder).add_product(total, rows, packed, scales, scales_ptr, group, column, k, S)


@triton.jit
def add_fp8_product(total, rows, row_scales, packed, scales, scales_ptr, group, column, k, S: tl.constexpr):
    """Add the product of FP8 rows `[block_m, 128]` with scales `[block_m]`; sums over 128 are scaled in float32."""
    tl.static_assert(S.tile.block_k == FP8_BLOCK, "a step has one scale per row")
    factors = row_scales[None, :] if S.tile.swap_ab else row_scales[:, None]
    DECODER: tl.constexpr = getattr(decoders, S.decoder)
    return DECODER.add_fp8_product(total, rows, factors, packed, scales, scales_ptr, group, column, k, S)


@triton.jit
def scale_columns(total, scales_ptr, group, column, rows_dtype: tl.constexpr, S: tl.constexpr):
    """Apply the scales that are left to float32 sums `[block_m, block_n]` of all steps, for rows of a dtype."""
    total = total.to(tl.float32)
    if S.decoder != "":
        if hasattr(getattr(decoders, S.decoder), "scale_columns"):
            total = getattr(decoders, S.decoder).scale_columns(total, scales_ptr, group, column, rows_dtype, S)
    return total


@triton.jit
def add_prepacked_product(total, rows, weights, scales_ptr, group, column, k, S: tl.constexpr):
    """Add the product of rows and a step of prepacked weights to `total [block_n, block_m]`.

    Rows are a tuple of `[block_m, PIECE]`, one per piece. Pieces free their registers for the next ones. Each pair has
    its own sum, since the compiler waits for all products that continue `total` at once.
    """
    tl.static_assert(S.tile.swap_ab, "the weights are the first operand")
    DECODER: tl.constexpr = getattr(decoders, S.decoder)
    columns, inside = locate_columns(weights, column, S)
    pieces = load_pieces(weights, group, column, k, S)
    for i in tl.static_range(0, S.tile.block_k // PIECE, 2):
        at = scales_ptr, group, columns, inside, k + i * PIECE
        total = DECODER.add_prepacked_pair(total, rows[i], rows[i + 1], pieces[i], pieces[i + 1], *at, S)
    return total
