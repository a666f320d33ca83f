"""FP8 weights with one scale per block of 128 by 128, transposed and untransposed; and transposes of FP8 blocks.

Roles. Programs are persistent and equal; none waits for another. A task is one block: read once, quantized, and stored
in one or both layouts while the next block loads. Floor: memory bandwidth, each element read once.

Transposing a block. A block `[ROWS, COLUMNS]` lives in four tensors `[ROWS / 4, COLUMNS]`, each with every fourth row.
So the same element of the four tensors holds four neighbors of a column, which pack into one 32-bit word:

    rows 4i .. 4i + 3 of a column      a[i]   b[i]   c[i]   d[i]
    word i of the transposed line      byte 0 byte 1 byte 2 byte 3

Threads exchange these packed through shared memory instead of bytes.
"""

import triton
import triton.language as tl

from .quantization import GROUP, magnitudes, scales_for
from .tiles import locate_weights, num_own_tasks, own_task

# Four float32 to e4m3, saturated, the first in the lowest byte. Packing bytes by shifts instead gave a wrong third byte
# in every other column on H200, although Triton's PTX was right.
_PACK_E4M3 = tl.constexpr("""{
    .reg .b16 a, b;
    cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;
    mov.b32 $0, {a, b};
}""")


@triton.jit
def interleaved_rows(i: tl.constexpr, ROWS: tl.constexpr):
    """Return every fourth row of ROWS, from i on: `[ROWS / 4]`."""
    return i + 4 * tl.arange(0, ROWS // 4)


@triton.jit
def max_magnitude(a, b, c, d):
    """Return the elementwise largest `magnitudes` of four tensors."""
    first, second = tl.maximum(magnitudes(a), magnitudes(b)), tl.maximum(magnitudes(c), magnitudes(d))
    return tl.maximum(first, second)


@triton.jit
def pack_e4m3(a, b, c, d, factors):
    """Scale four interleaved tensors `[ROWS / 4, .]` by factors and pack them as FP8, four to an int32."""
    scaled = [a * factors, b * factors, c * factors, d * factors]
    return tl.inline_asm_elementwise(_PACK_E4M3, "=r,r,r,r,r", scaled, tl.int32, True, 1)


@triton.jit
def store_transposed(values_ptr, first_byte, packed, STRIDE: tl.constexpr, mask):
    """Store packed `[ROWS / 4, COLUMNS]` as bytes `[COLUMNS, ROWS]`, from `first_byte` on."""
    ROWS: tl.constexpr = packed.shape[0]
    COLUMNS: tl.constexpr = packed.shape[1]
    target = values_ptr.to(tl.pointer_type(tl.int32)) + first_byte // 4
    inside = tl.arange(0, COLUMNS)[:, None] * (STRIDE // 4) + tl.arange(0, ROWS)[None, :]
    tl.store(target + inside, tl.trans(packed), mask=mask[:, None])


@triton.jit
def locate_block(task, K: tl.constexpr, N: tl.constexpr):
    """Return group, first row and first column of a block of `[num_groups, K, N]`, in row-major order of blocks."""
    column_blocks: tl.constexpr = (N + GROUP - 1) // GROUP
    row_blocks: tl.constexpr = (K + GROUP - 1) // GROUP
    group = (task // (column_blocks * row_blocks)).to(tl.int64)
    return group, task // column_blocks % row_blocks * GROUP, task % column_blocks * GROUP


@triton.jit
def place_rows(i: tl.constexpr, row, column, K: tl.constexpr, N: tl.constexpr):
    """Return the offsets of the i-th interleaved tensor in a block, and a mask of its elements that exist."""
    rows, columns = interleaved_rows(i, GROUP)[:, None], tl.arange(0, GROUP)[None, :]
    return rows * N + columns, (rows < K - row) & (columns < N - column)


@triton.jit
def load_block(w, task, exists, K: tl.constexpr, N: tl.constexpr, HOME_GROUPS: tl.constexpr):
    """Load the four interleaved tensors of a block; zeros unless the block exists."""
    group, row, column = locate_block(task, K, N)
    w_ptr, group = locate_weights(w, group, HOME_GROUPS)
    first = w_ptr + (group * (K * N) + row.to(tl.int64) * N + column)
    return (
        load_rows(first, 0, row, column, exists, K, N),
        load_rows(first, 1, row, column, exists, K, N),
        load_rows(first, 2, row, column, exists, K, N),
        load_rows(first, 3, row, column, exists, K, N),
    )


@triton.jit
def load_rows(first, i: tl.constexpr, row, column, exists, K: tl.constexpr, N: tl.constexpr):
    """Load the i-th interleaved tensor of a block."""
    places, inside = place_rows(i, row, column, K, N)
    return tl.load(first + places, mask=inside & exists, other=0.0)


@triton.jit
def store_rows(first, i: tl.constexpr, values, row, column, K: tl.constexpr, N: tl.constexpr):
    """Store the i-th interleaved tensor of a block as FP8."""
    places, inside = place_rows(i, row, column, K, N)
    tl.store(first + places, values.to(first.dtype.element_ty), mask=inside)


@triton.jit
def count_used(sizes_ptr, NUM_GROUPS: tl.constexpr, HOME_GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr):
    """Return the number of groups up to the last one that is at home or has rows."""
    index = tl.arange(0, PADDED_GROUPS)
    sizes = tl.load(sizes_ptr + index, mask=index < NUM_GROUPS, other=0)
    return tl.maximum(tl.max(tl.where(sizes > 0, index + 1, 0), axis=0), HOME_GROUPS)


@triton.jit
def quantize_matrices(
    w, sizes_ptr, transposed, untransposed, K: tl.constexpr, N: tl.constexpr,
    NUM_GROUPS: tl.constexpr, HOME_GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr,
):  # fmt: skip
    """Quantize `w [num_groups, K, N]`, or `SplitWeights` of HOME_GROUPS and the other groups, in one or both layouts.

    Unless `sizes` is None, the results end after the last group at home and the last one that has rows.
    Unless `transposed` is None: values `[num_groups, N, K]`, scales `[num_groups, ceil(N / 128), K / 128]`. Unless
    `untransposed` is None: values `[num_groups, K, N]`, scales `[num_groups, ceil(K / 128), N / 128]`.
    """
    column_blocks: tl.constexpr = (N + GROUP - 1) // GROUP
    row_blocks: tl.constexpr = (K + GROUP - 1) // GROUP
    num_groups = NUM_GROUPS
    if sizes_ptr is not None:
        num_groups = count_used(sizes_ptr, NUM_GROUPS, HOME_GROUPS, PADDED_GROUPS)
    count = num_own_tasks(num_groups * column_blocks * row_blocks)
    following = load_block(w, own_task(0), count > 0, K, N, HOME_GROUPS)
    for i in range(count):
        group, row, column = locate_block(own_task(i), K, N)
        a, b = following[0].to(tl.float32), following[1].to(tl.float32)
        c, d = following[2].to(tl.float32), following[3].to(tl.float32)
        # Load the next block while this one is quantized.
        following = load_block(w, own_task(i + 1), i + 1 < count, K, N, HOME_GROUPS)
        # One scale for the whole block.
        bits = tl.max(max_magnitude(a, b, c, d), axis=1)
        scale, inverse = scales_for(tl.max(bits, axis=0, keep_dims=True)[:, None])
        one = tl.zeros((1, 1), tl.int32)
        if untransposed is not None:
            first = untransposed.values_ptr + (group * (K * N) + row.to(tl.int64) * N + column)
            store_rows(first, 0, a * inverse, row, column, K, N)
            store_rows(first, 1, b * inverse, row, column, K, N)
            store_rows(first, 2, c * inverse, row, column, K, N)
            store_rows(first, 3, d * inverse, row, column, K, N)
            index = (group * row_blocks + row // GROUP) * column_blocks + column // GROUP
            tl.store(untransposed.scales_ptr + index + one, scale)
        if transposed is not None:
            packed = pack_e4m3(a, b, c, d, inverse)
            inside = tl.arange(0, GROUP) < N - column
            store_transposed(transposed.values_ptr, group * (K * N) + column.to(tl.int64) * K + row, packed, K, inside)
            index = (group * column_blocks + column // GROUP) * row_blocks + row // GROUP
            tl.store(transposed.scales_ptr + index + one, scale)
