"""FP8 operands of a grouped GEMM and what becomes of them: of the rows in use, in one pass each, and of matrices."""

import triton
import triton.language as tl

from .activation import activate_block, load_block, store_block
from .quantization import GROUP, dequantize, quantize, scale_offsets, scales_for
from .rows import block_of_task, rows_in_use
from .tiles import num_turns, task_of_turn


@triton.jit
def store_quantized(
    values_ptr, scales_ptr, rows, column, values, used, H: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """Stores a block of float32 `[BR, BC]` as values of `[R, H]` and scales of `[R, H / 128]`."""
    columns = (column + tl.arange(0, BC))[None, :]
    values, scales = quantize(values, BR, BC)
    store_block(values_ptr, rows, columns, values, (rows < used)[:, None] & (columns < H), H)
    offsets, exist = scale_offsets(rows, column, H, BC)
    tl.store(scales_ptr + offsets, scales, mask=(rows < used)[:, None] & exist)


@triton.jit
def quantize_rows(
    x_ptr,
    sizes_ptr,
    values_ptr,
    scales_ptr,
    R: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """`x [R, H]` to FP8 values and `[R, H / 128]` scales."""
    used = rows_in_use(sizes_ptr, R, L, BLOCK_L)
    column_tiles: tl.constexpr = (H + BC - 1) // BC
    for task in range(tl.program_id(0), tl.cdiv(used, BR) * column_tiles, tl.num_programs(0)):
        rows, column, columns, wanted = block_of_task(task, used, H, BR, BC)
        values = load_block(x_ptr, rows, columns, wanted, H)
        store_quantized(values_ptr, scales_ptr, rows, column, values, used, H, BR, BC)


@triton.jit
def dequantize_rows(
    values_ptr,
    scales_ptr,
    sizes_ptr,
    out_ptr,
    R: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """The inverse, in the dtype of `out [R, H]`."""
    used = rows_in_use(sizes_ptr, R, L, BLOCK_L)
    column_tiles: tl.constexpr = (H + BC - 1) // BC
    for task in range(tl.program_id(0), tl.cdiv(used, BR) * column_tiles, tl.num_programs(0)):
        rows, column, columns, wanted = block_of_task(task, used, H, BR, BC)
        values = tl.load(values_ptr + rows.to(tl.int64)[:, None] * H + columns, mask=wanted, other=0.0)
        offsets, exist = scale_offsets(rows, column, H, BC)
        scales = tl.load(scales_ptr + offsets, mask=(rows < used)[:, None] & exist, other=0.0)
        store_block(out_ptr, rows, columns, dequantize(values, scales, BR, BC), wanted, H)


@triton.jit
def activate_rows(
    hidden_ptr,
    weights_ptr,
    sizes_ptr,
    values_ptr,
    scales_ptr,
    rows_ptr,
    R: tl.constexpr,
    INNER: tl.constexpr,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    KEEP: tl.constexpr,
):
    """The weighted activation of activation.py to FP8 `[R, INNER]` and, with KEEP, also to `rows` as it does."""
    used = rows_in_use(sizes_ptr, R, L, BLOCK_L)
    column_tiles: tl.constexpr = (INNER + BC - 1) // BC
    for task in range(tl.program_id(0), tl.cdiv(used, BR) * column_tiles, tl.num_programs(0)):
        rows, column, columns, wanted = block_of_task(task, used, INNER, BR, BC)
        values = activate_block(hidden_ptr, weights_ptr, rows, columns, wanted, used, INNER, GATED, ACTIVATION)
        if KEEP:
            store_block(rows_ptr, rows, columns, values, wanted, INNER)
        store_quantized(values_ptr, scales_ptr, rows, column, values, used, INNER, BR, BC)


@triton.jit
def quantize_matrices(w_ptr, values_ptr, scales_ptr, K: tl.constexpr, N: tl.constexpr, G: tl.constexpr):
    """`w [G, K, N]` to values `[G, N, K]` and scales `[G, ceil(N / 128), K / 128]`, one per block of 128 by 128."""
    column_blocks: tl.constexpr = (N + GROUP - 1) // GROUP
    depth_blocks: tl.constexpr = K // GROUP
    lanes = tl.arange(0, GROUP)
    for turn in range(num_turns(G * column_blocks * depth_blocks)):
        task = task_of_turn(turn)
        # Neighbours read neighbouring columns.
        group = (task // (column_blocks * depth_blocks)).to(tl.int64)
        depth = task // column_blocks % depth_blocks
        k = (depth * GROUP + lanes)[:, None]
        block = task % column_blocks
        columns = (block * GROUP + lanes)[None, :]
        source = w_ptr + group * (K * N) + k * N + columns
        values = tl.load(source, mask=columns < N, other=0.0).to(tl.float32)
        bits = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        scale, inverse = scales_for(tl.max(bits, axis=0, keep_dims=True)[:, None])
        turned = tl.trans((values * inverse).to(values_ptr.dtype.element_ty))
        columns = (block * GROUP + lanes)[:, None]
        target = values_ptr + group * (K * N) + columns.to(tl.int64) * K + (depth * GROUP + lanes)[None, :]
        tl.store(target, turned, mask=columns < N)
        place = (group * column_blocks + block) * depth_blocks + depth + tl.zeros((1, 1), tl.int32)
        tl.store(scales_ptr + place, scale)
