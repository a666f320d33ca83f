"""Rows in use as columns in FP8, for weight gradients: `[H, P]` of `[M, H]`, see jax_ep/core/fp8.py.

A task is a block of 128 rows of one group and some columns: read once, rounded with a scale for each column, turned,
and written with zeros in the places behind the last row, while the next one is on its way. Places past the blocks in
use are not written.
"""

import triton
import triton.language as tl

from .activation import activate_block, store_quantized
from .fp8_words import fourth, largest_of, store_turned, words_of
from .quantization import GROUP, scales_for
from .tiles import Groups, locate_groups, num_turns, task_of_turn


@triton.jit
def locate_places(sizes_ptr, S: tl.constexpr):
    """The `Groups`, in places: each begins at a multiple of 128 and has whole blocks."""
    places = tl.cdiv(locate_groups(sizes_ptr, S).rows, GROUP) * GROUP
    return Groups(tl.cumsum(places, axis=0) - places, places)


@triton.jit
def find_block(task, groups, places, S: tl.constexpr):
    """First place of a task's block, its first row, the end of those of its group, and its first column."""
    tiles: tl.constexpr = (S.width + S.block_columns - 1) // S.block_columns
    place = task // tiles * GROUP
    is_group = (places.starts <= place) & (place < places.starts + places.rows)
    # Both numbers of the one group by one sum; how far rows are behind places is never more than P.
    end, behind = groups.starts + groups.rows, groups.starts - places.starts + S.num_places
    found = tl.sum(tl.where(is_group, end.to(tl.int64) << 32 | behind.to(tl.int64), 0), axis=0)
    first = place + (found & 0x7FFFFFFF).to(tl.int32) - S.num_places
    return place, first, (found >> 32).to(tl.int32), task % tiles * S.block_columns


@triton.jit
def num_tasks(places, S: tl.constexpr):
    """Of all blocks in use."""
    return tl.sum(places.rows, axis=0) // GROUP * ((S.width + S.block_columns - 1) // S.block_columns)


@triton.jit
def store_columns(columns, place, column, a, b, c, d, S: tl.constexpr):
    """Stores a block of float32 `[BR, BC]`, zero where there are no rows, as values `[H, P]` and scales."""
    lines = column + tl.arange(0, S.block_columns)
    scales, inverse = scales_for(tl.max(largest_of(a, b, c, d), axis=0))
    words = words_of(a, b, c, d, inverse[None, :])
    store_turned(columns.values_ptr, column.to(tl.int64) * S.num_places + place, words, S.num_places, lines < S.width)
    tl.store(columns.scales_ptr + (place // GROUP).to(tl.int64) * S.width + lines, scales, mask=lines < S.width)


@triton.jit
def load_rows(x_ptr, first, i: tl.constexpr, end, column, S: tl.constexpr):
    """`fourth` of rows of `x [M, H]` as they are stored, BC columns of them; zero behind those of the group."""
    lines, across = fourth(i, S.block_rows), tl.arange(0, S.block_columns)
    source = x_ptr + (first.to(tl.int64) * S.width + column) + (lines[:, None] * S.width + across[None, :])
    return tl.load(source, mask=(lines < end - first)[:, None] & (across < S.width - column)[None, :], other=0.0)


@triton.jit
def load_block(x_ptr, first, end, column, S: tl.constexpr):
    """All four."""
    a, b = load_rows(x_ptr, first, 0, end, column, S), load_rows(x_ptr, first, 1, end, column, S)
    c, d = load_rows(x_ptr, first, 2, end, column, S), load_rows(x_ptr, first, 3, end, column, S)
    return a, b, c, d


@triton.jit
def unscaled(values, scales_ptr, lines, end, column, S: tl.constexpr):
    """Rows in float32, of FP8 times their scales."""
    values = values.to(tl.float32)
    if scales_ptr is not None:
        source = scales_ptr + lines.to(tl.int64) * (S.width // GROUP) + column // GROUP
        values *= tl.load(source, mask=lines < end, other=0.0)[:, None]
    return values


@triton.jit
def quantize_columns(x_ptr, scales_ptr, sizes_ptr, columns, rows, S: tl.constexpr):
    """`x [M, H]`, in FP8 if there are `scales [M, H / 128]`, to columns; and to rows in FP8 unless these are None."""
    groups = locate_groups(sizes_ptr, S)
    places = locate_places(sizes_ptr, S)
    turns = num_turns(num_tasks(places, S))
    place, first, end, column = find_block(task_of_turn(0), groups, places, S)
    block = load_block(x_ptr, first, tl.where(turns > 0, end, first), column, S)
    for turn in range(turns):
        a = unscaled(block[0], scales_ptr, first + fourth(0, S.block_rows), end, column, S)
        b = unscaled(block[1], scales_ptr, first + fourth(1, S.block_rows), end, column, S)
        c = unscaled(block[2], scales_ptr, first + fourth(2, S.block_rows), end, column, S)
        d = unscaled(block[3], scales_ptr, first + fourth(3, S.block_rows), end, column, S)
        at, line, used, across = place, first, end, column
        place, first, end, column = find_block(task_of_turn(turn + 1), groups, places, S)
        block = load_block(x_ptr, first, tl.where(turn + 1 < turns, end, first), column, S)
        store_columns(columns, at, across, a, b, c, d, S)
        if rows is not None:
            store_quantized(rows, line + fourth(0, S.block_rows), across, a, used, S)
            store_quantized(rows, line + fourth(1, S.block_rows), across, b, used, S)
            store_quantized(rows, line + fourth(2, S.block_rows), across, c, used, S)
            store_quantized(rows, line + fourth(3, S.block_rows), across, d, used, S)


@triton.jit
def activate_rows(hidden_ptr, weights_ptr, bias, lines, column, end, KIND: tl.constexpr, S: tl.constexpr):
    """The weighted activation of some `hidden` rows; zero where there are none."""
    values = activate_block(hidden_ptr, weights_ptr, bias, lines, column, end, KIND, S)
    # Of rows that there are not, a bias and a clamp may make something.
    return tl.where((lines < end)[:, None], values, 0.0)


@triton.jit
def activate_columns(hidden_ptr, weights_ptr, sizes_ptr, bias, columns, KIND: tl.constexpr, S: tl.constexpr):
    """The weighted activation of `hidden` rows to columns."""
    groups = locate_groups(sizes_ptr, S)
    places = locate_places(sizes_ptr, S)
    for turn in range(num_turns(num_tasks(places, S))):
        place, first, end, column = find_block(task_of_turn(turn), groups, places, S)
        a = activate_rows(hidden_ptr, weights_ptr, bias, first + fourth(0, S.block_rows), column, end, KIND, S)
        b = activate_rows(hidden_ptr, weights_ptr, bias, first + fourth(1, S.block_rows), column, end, KIND, S)
        c = activate_rows(hidden_ptr, weights_ptr, bias, first + fourth(2, S.block_rows), column, end, KIND, S)
        d = activate_rows(hidden_ptr, weights_ptr, bias, first + fourth(3, S.block_rows), column, end, KIND, S)
        store_columns(columns, place, column, a, b, c, d, S)
