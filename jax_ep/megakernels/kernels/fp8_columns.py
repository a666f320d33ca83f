"""Column-wise FP8 quantization of rows in use, for weight gradients: `[M, width]` to `[width, num_places]`.

Each group's rows are padded to places in multiples of 128 (jax_ep/core/fp8.py). A task is a block of 128 rows
of one group and some columns. It is read once, quantized with one scale per column, transposed as fp8_matrices.py does
it, and stored with zeros in the places behind the last row, while the next block loads. Places past the last block are
not written.

Roles. Programs are persistent and equal; none waits for another. Floor: memory bandwidth, each element read once.
"""

import triton
import triton.language as tl

from .activation import activate_block
from .fp8_matrices import interleaved_rows, max_magnitude, pack_e4m3, store_transposed
from .quantization import GROUP, scales_for
from .rows import store_quantized
from .tiles import Groups, locate_groups, num_own_tasks, own_task


@triton.jit
def locate_places(sizes_ptr, S: tl.constexpr):
    """Return the `Groups` in places: each starts at a multiple of 128 and has whole blocks."""
    places = tl.cdiv(locate_groups(sizes_ptr, S).rows, GROUP) * GROUP
    return Groups(tl.cumsum(places, axis=0) - places, places)


@triton.jit
def find_block(task, groups, places, S: tl.constexpr):
    """Return a task's first place, its first row, the end of its group's rows, and its first column."""
    tiles: tl.constexpr = (S.width + S.block_columns - 1) // S.block_columns
    place = task // tiles * GROUP
    is_group = (places.starts <= place) & (place < places.starts + places.rows)
    # Extract both numbers of the one matching group in a single reduction: end << 32 | behind. Adding num_places keeps
    # `behind` non-negative, since rows start at most num_places before their places.
    end, behind = groups.starts + groups.rows, groups.starts - places.starts + S.num_places
    found = tl.sum(tl.where(is_group, end.to(tl.int64) << 32 | behind.to(tl.int64), 0), axis=0)
    first = place + (found & 0x7FFFFFFF).to(tl.int32) - S.num_places
    return place, first, (found >> 32).to(tl.int32), task % tiles * S.block_columns


@triton.jit
def num_tasks(places, S: tl.constexpr):
    """Return the number of tasks of all blocks in use."""
    return tl.sum(places.rows, axis=0) // GROUP * ((S.width + S.block_columns - 1) // S.block_columns)


@triton.jit
def store_columns(columns, place, column, a, b, c, d, S: tl.constexpr):
    """Quantize and store a block of float32 `[block_rows, block_columns]`, as values `[width, num_places]` and scales.

    The block comes as four interleaved tensors, zero where there are no rows.
    """
    across = column + tl.arange(0, S.block_columns)
    scales, inverse = scales_for(tl.max(max_magnitude(a, b, c, d), axis=0))
    packed = pack_e4m3(a, b, c, d, inverse[None, :])
    store_transposed(
        columns.values_ptr, column.to(tl.int64) * S.num_places + place, packed, S.num_places, across < S.width
    )
    tl.store(columns.scales_ptr + (place // GROUP).to(tl.int64) * S.width + across, scales, mask=across < S.width)


@triton.jit
def load_rows(x_ptr, first, i: tl.constexpr, end, column, S: tl.constexpr):
    """Load the i-th interleaved tensor of rows of `x [M, width]`, as stored; zero behind the group's rows."""
    rows, columns = interleaved_rows(i, S.block_rows), tl.arange(0, S.block_columns)
    source = x_ptr + (first.to(tl.int64) * S.width + column) + (rows[:, None] * S.width + columns[None, :])
    return tl.load(source, mask=(rows < end - first)[:, None] & (columns < S.width - column)[None, :], other=0.0)


@triton.jit
def load_block(x_ptr, first, end, column, S: tl.constexpr):
    """Load the four interleaved tensors of a block."""
    a, b = load_rows(x_ptr, first, 0, end, column, S), load_rows(x_ptr, first, 1, end, column, S)
    c, d = load_rows(x_ptr, first, 2, end, column, S), load_rows(x_ptr, first, 3, end, column, S)
    return a, b, c, d


@triton.jit
def dequantize_interleaved(values, scales_ptr, rows, end, column, S: tl.constexpr):
    """Convert rows to float32 and multiply FP8 rows by their scales."""
    values = values.to(tl.float32)
    if scales_ptr is not None:
        source = scales_ptr + rows.to(tl.int64) * (S.width // GROUP) + column // GROUP
        values *= tl.load(source, mask=rows < end, other=0.0)[:, None]
    return values


@triton.jit
def quantize_columns(x_ptr, scales_ptr, sizes_ptr, columns, rows, S: tl.constexpr):
    """Quantize `x [M, width]` to `columns`, and row-wise to `rows` unless that is None.

    Unless it is None, `scales [M, width / 128]` says that `x` is FP8.
    """
    groups = locate_groups(sizes_ptr, S)
    places = locate_places(sizes_ptr, S)
    count = num_own_tasks(num_tasks(places, S))
    place, first, end, column = find_block(own_task(0), groups, places, S)
    block = load_block(x_ptr, first, tl.where(count > 0, end, first), column, S)
    for i in range(count):
        a = dequantize_interleaved(block[0], scales_ptr, first + interleaved_rows(0, S.block_rows), end, column, S)
        b = dequantize_interleaved(block[1], scales_ptr, first + interleaved_rows(1, S.block_rows), end, column, S)
        c = dequantize_interleaved(block[2], scales_ptr, first + interleaved_rows(2, S.block_rows), end, column, S)
        d = dequantize_interleaved(block[3], scales_ptr, first + interleaved_rows(3, S.block_rows), end, column, S)
        # Load the next block while this one is quantized.
        place_here, first_here, end_here, column_here = place, first, end, column
        place, first, end, column = find_block(own_task(i + 1), groups, places, S)
        block = load_block(x_ptr, first, tl.where(i + 1 < count, end, first), column, S)
        store_columns(columns, place_here, column_here, a, b, c, d, S)
        if rows is not None:
            store_quantized(rows, first_here + interleaved_rows(0, S.block_rows), column_here, a, end_here, S)
            store_quantized(rows, first_here + interleaved_rows(1, S.block_rows), column_here, b, end_here, S)
            store_quantized(rows, first_here + interleaved_rows(2, S.block_rows), column_here, c, end_here, S)
            store_quantized(rows, first_here + interleaved_rows(3, S.block_rows), column_here, d, end_here, S)


@triton.jit
def activate_rows(hidden_ptr, weights_ptr, bias, rows, column, end, KIND: tl.constexpr, S: tl.constexpr):
    """Compute the weighted activation of some hidden rows; zero where there are none."""
    values = activate_block(hidden_ptr, weights_ptr, bias, rows, column, end, KIND, S)
    # A bias makes missing rows nonzero.
    return tl.where((rows < end)[:, None], values, 0.0)


@triton.jit
def activate_columns(hidden_ptr, weights_ptr, sizes_ptr, bias, columns, KIND: tl.constexpr, S: tl.constexpr):
    """Compute the weighted activation of hidden rows and quantize it to `columns`."""
    ROWS: tl.constexpr = S.block_rows
    groups = locate_groups(sizes_ptr, S)
    places = locate_places(sizes_ptr, S)
    for i in range(num_own_tasks(num_tasks(places, S))):
        place, first, end, column = find_block(own_task(i), groups, places, S)
        # Activate the four interleaved tensors of the block.
        a = activate_rows(hidden_ptr, weights_ptr, bias, first + interleaved_rows(0, ROWS), column, end, KIND, S)
        b = activate_rows(hidden_ptr, weights_ptr, bias, first + interleaved_rows(1, ROWS), column, end, KIND, S)
        c = activate_rows(hidden_ptr, weights_ptr, bias, first + interleaved_rows(2, ROWS), column, end, KIND, S)
        d = activate_rows(hidden_ptr, weights_ptr, bias, first + interleaved_rows(3, ROWS), column, end, KIND, S)
        store_columns(columns, place, column, a, b, c, d, S)
