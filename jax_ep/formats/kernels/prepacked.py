"""Prepacked 4-bit weights (`jax_ep.quantization.with_layout`): the order that takes the fewest instructions.

The GEMM uses swap_ab: columns of the weights are the rows of the first operand, which tensor cores take from registers;
tokens stay in shared memory. A uint32 holds the eight nibbles that one thread multiplies in 32 of K. A shift and a mask
decode two elements, so no element moves between registers or through shared memory.

Scales are loaded in the step that needs them: loaded ahead, they would keep the compiler from finding a layout that
moves no elements.
"""

import triton
import triton.language as tl

PIECE = tl.constexpr(64)
"""Elements of K decoded at a time; two pieces of MXFP4 have their exponents in one uint32."""


@triton.jit
def join_2x2(a, b, c, d):
    """Join four tensors `[...]` to `[..., 2, 2]`."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def unpack_bf16x2(packed):
    """Unpack the two bfloat16 of a register, `[...]` to `[..., 2]`."""
    first = packed.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.join(first, (packed >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True))


@triton.jit
def unpack_piece(a, b, c, d):
    """Unpack four bf16x2 per packed uint32, `[block_n, depth / 8]` each, to `[block_n, depth]` in order of K."""
    BLOCK_N: tl.constexpr = a.shape[0]
    DEPTH: tl.constexpr = 8 * a.shape[1]
    pairs = join_2x2(unpack_bf16x2(a), unpack_bf16x2(b), unpack_bf16x2(c), unpack_bf16x2(d))
    # Axes: column, 32 of K, thread, element of the pair, pair (two axes). K runs over pairs, threads, elements.
    pairs = tl.reshape(pairs, (BLOCK_N, DEPTH // 32, 4, 2, 2, 2))
    return tl.reshape(tl.permute(pairs, (0, 1, 4, 5, 2, 3)), (BLOCK_N, DEPTH))


@triton.jit
def load_pieces(weights, group, column, k, S: tl.constexpr):
    """Load the packed uint32 `[block_n, PIECE / 8]` of each piece of a step.

    A descriptor with four axes, `[., 2, N / 2, .]`, loads the same columns of both halves: gates and up values.
    """
    BLOCK_N: tl.constexpr = S.tile.block_n
    if len(weights.block_shape) == 4:
        packed = weights.load([group, 0, column, k // 8])
    else:
        packed = weights.load([group, column, k // 8])
    packed = tl.permute(tl.reshape(packed, (BLOCK_N, S.tile.block_k // PIECE, PIECE // 8)), (0, 2, 1))
    # Split the step into its two or four pieces.
    if S.tile.block_k == 2 * PIECE:
        pieces = tl.split(packed)
    else:
        tl.static_assert(S.tile.block_k == 4 * PIECE, "a step has two or four pieces")
        even, odd = tl.split(tl.reshape(packed, (BLOCK_N, PIECE // 8, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        pieces = first, second, third, fourth
    return pieces


@triton.jit
def locate_columns(weights, column, S: tl.constexpr):
    """Return the columns `[block_n]` of `load_pieces`, and a mask of those that exist."""
    columns = tl.arange(0, S.tile.block_n)
    if len(weights.block_shape) == 4:
        # The first half of the tile holds gates, the second the same columns of the up weights.
        HALF: tl.constexpr = S.tile.block_n // 2
        inside = column + columns % HALF < S.N // 2
        columns = columns // HALF * (S.N // 2) + column + columns % HALF
    else:
        columns += column
        inside = columns < S.N
    return columns, inside
