"""Products of rows in 16 bits and matrices in 8 or 4 bits, which are dequantised in registers.

As in masked.py, the loop over tiles and K is one, blocks come by TMA, and with few rows per tile the product is turned:
then the matrix is the operand that tensor cores of Hopper take from registers, where it has been dequantised, and what
is read from memory has 8 or 4 bits.

Scales of a column of the matrix, or of a block of 128 by 128, are factors of sums, in float32. Those of smaller groups
are factors of the elements, which are then rounded to the dtype of the rows; powers of two, as MXFP4 has them, cost no
bit.
"""

import triton
import triton.language as tl

from .masked import find_masked_tile, number_masked_tasks
from .quantization import GROUP
from .tiles import (
    find_tile,
    locate_groups,
    num_turns,
    number_tasks,
    store_tile,
    task_of_turn,
    tasks_until,
    zero_rest,
)


@triton.jit
def unpack(block, S: tl.constexpr):
    """`[BN, BK / 2]` bytes to `[BN, BK]` codes of 4 bits, the lower half of a byte first."""
    return tl.reshape(tl.join(block & 15, block >> 4), (S.tile.BN, S.tile.BK))


@triton.jit
def e2m1(codes):
    """Codes of 4 bits as float32: a sign, two bits of exponent, one of mantissa."""
    # As the exponent's last bits and the mantissa's first one of a float32, zeros and subnormals of e2m1 are those of
    # float32; 2**126 is what the biases differ by.
    bits = ((codes & 7).to(tl.int32) << 22) | ((codes & 8).to(tl.int32) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def powers(exponents):
    """2 to the power of biased exponents, in float32; 255 is NaN, and the smallest is subnormal."""
    bits = exponents.to(tl.int32) << 23
    bits = tl.where(exponents == 0, 0x00400000, tl.where(exponents == 255, 0x7FC00000, bits))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_scales(scales_ptr, group, column, k, S: tl.constexpr):
    """float32 `[BN, BK / SHARING]` scales of a block; zeros outside of the matrix."""
    per_row: tl.constexpr = S.K // S.SHARING
    columns = column + tl.arange(0, S.tile.BN)[:, None]
    parts = k // S.SHARING + tl.arange(0, S.tile.BK // S.SHARING)[None, :]
    source = scales_ptr + (group.to(tl.int64) * S.N + columns) * per_row + parts
    scales = tl.load(source, mask=(columns < S.N) & (parts < per_row), other=0)
    return powers(scales) if S.FORMAT == "mxfp4" else scales


@triton.jit
def load_matrix(rhs, scales_ptr, group, column, k, dtype: tl.constexpr, S: tl.constexpr):
    """`[BN, BK]` of a group's matrix in `dtype`, without the scales that are factors of sums."""
    BN: tl.constexpr = S.tile.BN
    BK: tl.constexpr = S.tile.BK
    PER_BYTE: tl.constexpr = S.PER_BYTE
    block = tl.reshape(rhs.load([group, column, k // PER_BYTE]), (BN, BK // PER_BYTE))
    if S.FORMAT == "mxfp4":
        numbers = e2m1(unpack(block, S))
    elif S.FORMAT == "int4":
        numbers = unpack(block, S).to(tl.float32) - 8
    else:
        numbers = block.to(dtype)
    if S.SHARING > 0:
        parts = tl.reshape(numbers, (BN, BK // S.SHARING, S.SHARING))
        numbers = tl.reshape(parts * load_scales(scales_ptr, group, column, k, S)[:, :, None], (BN, BK)).to(dtype)
    return numbers


@triton.jit
def multiply_quantized(lhs, rhs, scales_ptr, block, group, row, column, S: tl.constexpr):
    """float32 `[BM, BN]`: rows of `lhs [., M, K]`, in its block, times the matrix of a group."""
    BM: tl.constexpr = S.tile.BM
    BN: tl.constexpr = S.tile.BN
    BK: tl.constexpr = S.tile.BK
    SWAP: tl.constexpr = S.tile.SWAP
    dtype: tl.constexpr = lhs.dtype
    total = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.int32 if dtype == tl.int8 else tl.float32)
    block_scales = scales_ptr
    if S.FORMAT == "fp8":
        tl.static_assert(BK == GROUP and GROUP % BN == 0, "a block has one scale of the matrix")
        column_blocks: tl.constexpr = (S.N + GROUP - 1) // GROUP
        block_scales += (group.to(tl.int64) * column_blocks + column // GROUP) * (S.K // GROUP)
    for k in range(0, S.K, BK):
        a = tl.reshape(lhs.load([block, row, k]), (BM, BK))
        b = load_matrix(rhs, scales_ptr, group, column, k, dtype, S)
        if S.FORMAT == "fp8":
            part = tl.dot(b, tl.trans(a)) if SWAP else tl.dot(a, tl.trans(b))
            total += part * tl.load(block_scales + k // GROUP)
        elif SWAP:
            total = tl.dot(b, tl.trans(a), total)
        else:
            total = tl.dot(a, tl.trans(b), total)
    total = total.to(tl.float32)
    if SWAP:
        total = tl.trans(total)
    if S.SHARING == 0 and S.FORMAT != "fp8":
        columns = column + tl.arange(0, BN)
        scales = tl.load(scales_ptr + group.to(tl.int64) * S.N + columns, mask=columns < S.N, other=0.0)
        total *= scales[None, :]
    return total


@triton.jit
def scale_rows(total, row_scales_ptr, rows, end):
    """Sums `[BM, BN]` times the scales of their rows, if they have some."""
    if row_scales_ptr is not None:
        total *= tl.load(row_scales_ptr + rows, mask=rows < end, other=0.0)[:, None]
    return total


@triton.jit
def grouped_gemm(lhs, rhs, scales_ptr, sizes_ptr, row_scales_ptr, out_ptr, S: tl.constexpr):
    """`out[rows of g] = lhs[rows of g] @ rhs[g].T`, zero past the groups; `lhs` describes `[1, M, K]`.

    Rows of int8 have scales `[M]`.
    """
    group_ends = number_tasks(locate_groups(sizes_ptr, S), S)
    for turn in tl.range(0, num_turns(tasks_until(tl.max(group_ends, axis=0))), flatten=True):
        tile = find_tile(task_of_turn(turn), group_ends, sizes_ptr, S)
        total = multiply_quantized(lhs, rhs, scales_ptr, 0, tile.group, tile.row, tile.column, S)
        total = scale_rows(total, row_scales_ptr, tile.row + tl.arange(0, S.tile.BM), tile.end)
        store_tile(out_ptr, total, tile, S)
    zero_rest(out_ptr, group_ends, S)


@triton.jit
def masked_grouped_gemm(lhs, rhs, scales_ptr, sizes_ptr, row_scales_ptr, out_ptr, S: tl.constexpr):
    """`out[g, i] = lhs[g, i] @ rhs[g].T` for rows i below the group's size; others are not written.

    Rows of int8 have scales `[G, M]`.
    """
    group_ends = number_masked_tasks(sizes_ptr, S)
    for turn in tl.range(0, num_turns(tl.max(group_ends, axis=0)), flatten=True):
        group, row, size, column_tile = find_masked_tile(task_of_turn(turn), group_ends, sizes_ptr, S)
        column = column_tile * S.tile.BN
        total = multiply_quantized(lhs, rhs, scales_ptr, group, group, row, column, S)
        rows = row + tl.arange(0, S.tile.BM)
        before = group.to(tl.int64) * S.M
        total = scale_rows(total, row_scales_ptr, before + rows, before + size)
        columns = column + tl.arange(0, S.tile.BN)
        target = out_ptr + (before + rows)[:, None] * S.N + columns[None, :]
        tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(rows < size)[:, None] & (columns < S.N)[None, :])
