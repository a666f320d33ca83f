"""Grouped GEMM on the layout of a low-latency dispatch: the rows of each group that count, times its matrix.

With few rows per group the matrices are nearly all that is read, each once. So what counts is how many bytes of them
are under way: blocks of [BN, BK] come by TMA, several per program, and one loop over tiles and K keeps them coming
across the end of a tile.

Tensor cores of Hopper multiply 64 rows at a time, but as few as 8 columns. With fewer than 64 rows per tile the product
is turned (SWAP): columns of the matrix stand in for rows, `out.T = rhs @ lhs.T`.

In FP8, products of one block of K are scaled and added in float32 registers, since the sums inside of the tensor cores
keep fewer bits. Source: section 3.3 of DeepSeek-V3 (arXiv:2412.19437).
"""

import triton
import triton.language as tl

from .quantization import GROUP


@triton.jit
def multiply_masked(
    lhs,
    rhs,
    lhs_scales_ptr,
    rhs_scales_ptr,
    group,
    row,
    column,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    FP8: tl.constexpr,
    RAGGED: tl.constexpr = False,
):
    """float32 `[BM, BN]`, or `[BN, BM]` with SWAP, from descriptors of `[G, M, K]` and `[G, N, K]`.

    With RAGGED the rows of all groups are one block, `[1, M, K]`, and so are their scales.
    """
    block = group
    if RAGGED:
        block = group * 0
    total = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    num_scales: tl.constexpr = K // GROUP
    if FP8:
        tl.static_assert(BK == GROUP and GROUP % BN == 0, "a block has one scale of the matrix")
        rows = block.to(tl.int64) * M + tl.minimum(row + tl.arange(0, BM), M - 1)
        lhs_scales = lhs_scales_ptr + rows * num_scales
        column_blocks: tl.constexpr = (N + GROUP - 1) // GROUP
        rhs_scales = rhs_scales_ptr + (group.to(tl.int64) * column_blocks + column // GROUP) * num_scales
    for k in range(0, K, BK):
        a = tl.reshape(lhs.load([block, row, k]), (BM, BK))
        b = tl.reshape(rhs.load([group, column, k]), (BN, BK))
        if FP8:
            scale = tl.load(lhs_scales + k // GROUP) * tl.load(rhs_scales + k // GROUP)
            if SWAP:
                total += tl.dot(b, tl.trans(a)) * scale[None, :]
            else:
                total += tl.dot(a, tl.trans(b)) * scale[:, None]
        elif SWAP:
            total = tl.dot(b, tl.trans(a), total)
        else:
            total = tl.dot(a, tl.trans(b), total)
    return total
