"""GEMMs of rows and quantized weights, which are decoded in registers (jax_ep/formats/kernels).

Roles and tasks as in masked.py and tiles.py: persistent, equal programs; one loop over tiles and K; weights come by TMA
as they are stored. With few rows, warp-level instructions take both operands from registers, decoded weights included.
FP8 and int8 rows, and prepacked weights, use swap_ab if there are few rows, since Hopper's tensor cores take at least
64 rows of the first operand. Floor: reading the quantized weights once at memory bandwidth.
"""

import triton
import triton.language as tl

from jax_ep.formats.kernels import quantized
from jax_ep.formats.kernels.common import FP8_BLOCK
from jax_ep.formats.kernels.prepacked import PIECE

from .masked import find_masked_tile, number_masked_tasks, store_masked_tile
from .tiles import find_tile, locate_groups, num_own_tasks, number_tasks, own_task, store_tile, tasks_until, zero_rest


@triton.jit
def multiply_quantized(lhs, rhs, scales_ptr, row_scales_ptr, block, group, row, column, S: tl.constexpr):
    """Compute a tile in float32 `[block_m, block_n]`: rows of one block of `lhs [., M, K]` times a group's weights.

    int8 rows have one scale each, FP8 rows one per step.
    """
    BLOCK_M: tl.constexpr = S.tile.block_m
    BLOCK_N: tl.constexpr = S.tile.block_n
    BLOCK_K: tl.constexpr = S.tile.block_k
    SWAP_AB: tl.constexpr = S.tile.swap_ab
    dtype: tl.constexpr = tl.int32 if lhs.dtype == tl.int8 else tl.float32
    total = tl.zeros((BLOCK_N, BLOCK_M) if SWAP_AB else (BLOCK_M, BLOCK_N), dtype)
    ahead = quantized.load_scales(scales_ptr, group, column, 0, S)
    # Rows of other groups and past the last row are computed too, and not stored.
    scaled = tl.cast(block, tl.int64) * S.M + tl.minimum(row + tl.arange(0, BLOCK_M), S.M - 1)
    for k in range(0, S.K, BLOCK_K):
        if S.prepacked:
            # Prepacked weights are decoded in pieces of K.
            first = tl.reshape(lhs.load([block, row, k]), (BLOCK_M, PIECE))
            second = tl.reshape(lhs.load([block, row, k + PIECE]), (BLOCK_M, PIECE))
            total = quantized.add_prepacked_product(total, (first, second), rhs, scales_ptr, group, column, k, S)
        else:
            rows = tl.reshape(lhs.load([block, row, k]), (BLOCK_M, BLOCK_K))
            packed = quantized.load_packed(rhs, group, column, k, S)
            # Load scales one step ahead: the software pipeline covers TMA loads only.
            scales, ahead = ahead, quantized.load_scales(scales_ptr, group, column, k + BLOCK_K, S)
            if lhs.dtype == tl.float8e4nv:
                row_scales = tl.load(row_scales_ptr + scaled * (S.K // FP8_BLOCK) + k // FP8_BLOCK)
                total = quantized.add_fp8_product(
                    total, rows, row_scales, packed, scales, scales_ptr, group, column, k, S
                )
            else:
                total = quantized.add_product(total, rows, packed, scales, scales_ptr, group, column, k, S)
    # Apply the scales that are left, then those of int8 rows.
    total = quantized.scale_columns(tl.trans(total) if SWAP_AB else total, scales_ptr, group, column, lhs.dtype, S)
    if lhs.dtype == tl.int8:
        total *= tl.load(row_scales_ptr + scaled)[:, None]
    return total


@triton.jit
def quantized_grouped_gemm(lhs, rhs, scales_ptr, sizes_ptr, row_scales_ptr, out_ptr, S: tl.constexpr):
    """Compute `out[rows of g] = lhs[rows of g] @ rhs[g].T`, and zeros past the groups; `lhs` describes `[1, M, K]`.

    int8 rows have scales `[M]`, FP8 rows `[M, K / 128]`.
    """
    group_ends = number_tasks(locate_groups(sizes_ptr, S), S)
    for i in tl.range(0, num_own_tasks(tasks_until(tl.max(group_ends, axis=0))), flatten=True):
        tile = find_tile(own_task(i), group_ends, sizes_ptr, S)
        total = multiply_quantized(lhs, rhs, scales_ptr, row_scales_ptr, 0, tile.group, tile.row, tile.column, S)
        store_tile(out_ptr, total, tile, S)
    zero_rest(out_ptr, group_ends, S)


@triton.jit
def quantized_masked_grouped_gemm(lhs, rhs, scales_ptr, sizes_ptr, row_scales_ptr, out_ptr, S: tl.constexpr):
    """Compute `out[g, i] = lhs[g, i] @ rhs[g].T` for rows i below the group's size; other rows are not written.

    int8 rows have scales `[num_groups, M]`, FP8 rows `[num_groups, M, K / 128]`.
    """
    group_ends = number_masked_tasks(sizes_ptr, S)
    for i in tl.range(0, num_own_tasks(tl.max(group_ends, axis=0)), flatten=True):
        group, row, size, column_tile = find_masked_tile(own_task(i), group_ends, sizes_ptr, S)
        column = column_tile * S.tile.block_n
        total = multiply_quantized(lhs, rhs, scales_ptr, row_scales_ptr, group, group, row, column, S)
        store_masked_tile(out_ptr, total, group, row, size, column, S)
