"""Rows in use as columns in FP8, for weight gradients: `[H, P]` of `[M, H]`, see jax_ep/core/fp8_columns.py.

A task is a block of 128 rows of one group and some columns: read once, rounded with a scale for each column, turned,
and written with zeros in the places behind the last row. Places past the blocks in use are not written.
"""

import triton
import triton.language as tl

from .activation import activate_block, load_block, store_quantized
from .quantization import GROUP, scales_for
from .structs_gemm import Groups
from .tiles import locate_groups, num_turns, task_of_turn


@triton.jit
def locate_places(sizes_ptr, S: tl.constexpr):
    """The `Groups`, in places: each begins at a multiple of 128 and has whole blocks."""
    places = tl.cdiv(locate_groups(sizes_ptr, S).rows, GROUP) * GROUP
    return Groups(tl.cumsum(places, axis=0) - places, places)


@triton.jit
def find_block(task, groups, places, S: tl.constexpr):
    """First place of a task's block, its rows `[BR]`, the end of its group's, and the first column."""
    tiles: tl.constexpr = (S.H + S.BC - 1) // S.BC
    place = task // tiles * GROUP
    is_group = (places.starts <= place) & (place < places.starts + places.rows)
    start = tl.sum(tl.where(is_group, groups.starts, 0), axis=0)
    end = start + tl.sum(tl.where(is_group, groups.rows, 0), axis=0)
    inside = place - tl.sum(tl.where(is_group, places.starts, 0), axis=0)
    return place, start + inside + tl.arange(0, S.BR), end, task % tiles * S.BC


@triton.jit
def num_tasks(places, S: tl.constexpr):
    """Of all blocks in use."""
    return tl.sum(places.rows, axis=0) // GROUP * ((S.H + S.BC - 1) // S.BC)


@triton.jit
def store_columns(columns, place, column, values, S: tl.constexpr):
    """Stores a block of float32 `[BR, BC]`, zero where there are no rows, as values `[H, P]` and scales."""
    lines = column + tl.arange(0, S.BC)
    bits = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    scales, inverse = scales_for(bits)
    turned = tl.trans((values * inverse[None, :]).to(columns.values_ptr.dtype.element_ty))
    places = (place + tl.arange(0, S.BR))[None, :]
    target = columns.values_ptr + lines.to(tl.int64)[:, None] * S.P + places
    tl.store(target, turned, mask=(lines < S.H)[:, None])
    tl.store(columns.scales_ptr + (place // GROUP).to(tl.int64) * S.H + lines, scales, mask=lines < S.H)


@triton.jit
def quantize_columns(x_ptr, scales_ptr, sizes_ptr, columns, rows, S: tl.constexpr):
    """`x [M, H]`, in FP8 if there are `scales [M, H / 128]`, to columns; and to rows in FP8 unless these are None."""
    groups = locate_groups(sizes_ptr, S)
    places = locate_places(sizes_ptr, S)
    for turn in range(num_turns(num_tasks(places, S))):
        place, lines, end, column = find_block(task_of_turn(turn), groups, places, S)
        across = (column + tl.arange(0, S.BC))[None, :]
        values = load_block(x_ptr, lines, across, (lines < end)[:, None] & (across < S.H), S.H)
        if scales_ptr is not None:
            scales = tl.load(scales_ptr + lines.to(tl.int64) * (S.H // GROUP) + column // GROUP, lines < end, 0.0)
            values *= scales[:, None]
        store_columns(columns, place, column, values, S)
        if rows is not None:
            store_quantized(rows, lines, column, values, end, S)


@triton.jit
def activate_columns(hidden_ptr, weights_ptr, sizes_ptr, bias, columns, KIND: tl.constexpr, S: tl.constexpr):
    """The weighted activation of `hidden` rows to columns."""
    groups = locate_groups(sizes_ptr, S)
    places = locate_places(sizes_ptr, S)
    for turn in range(num_turns(num_tasks(places, S))):
        place, lines, end, column = find_block(task_of_turn(turn), groups, places, S)
        values = activate_block(hidden_ptr, weights_ptr, bias, lines, column, end, KIND, S)
        # Of rows that there are not, a bias and a clamp may make something.
        store_columns(columns, place, column, tl.where((lines < end)[:, None], values, 0.0), S)
