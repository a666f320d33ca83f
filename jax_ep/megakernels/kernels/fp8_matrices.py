"""Matrices in FP8, with a scale for each block of 128 by 128, turned and as they are.

A block is read once, and the next one is on its way while it is rounded.
"""

import triton
import triton.language as tl

from .fp8_words import fourth, largest_of, store_turned, words_of
from .quantization import GROUP, scales_for
from .tiles import num_turns, task_of_turn


@triton.jit
def locate_block(task, K: tl.constexpr, N: tl.constexpr):
    """Group, first row and first column of a block of `[G, K, N]`; neighbours are neighbouring columns."""
    across: tl.constexpr = (N + GROUP - 1) // GROUP
    down: tl.constexpr = (K + GROUP - 1) // GROUP
    return (task // (across * down)).to(tl.int64), task // across % down * GROUP, task % across * GROUP


@triton.jit
def place_rows(i: tl.constexpr, row, column, K: tl.constexpr, N: tl.constexpr):
    """Where the i-th `fourth` of a block lies from its first element on, and what of it exists."""
    rows, columns = fourth(i, GROUP)[:, None], tl.arange(0, GROUP)[None, :]
    return rows * N + columns, (rows < K - row) & (columns < N - column)


@triton.jit
def load_block(w_ptr, task, exists, K: tl.constexpr, N: tl.constexpr):
    """All four, as they are stored; nothing unless the block exists."""
    group, row, column = locate_block(task, K, N)
    first = w_ptr + (group * (K * N) + row.to(tl.int64) * N + column)
    return (
        load_rows(first, 0, row, column, exists, K, N),
        load_rows(first, 1, row, column, exists, K, N),
        load_rows(first, 2, row, column, exists, K, N),
        load_rows(first, 3, row, column, exists, K, N),
    )


@triton.jit
def load_rows(first, i: tl.constexpr, row, column, exists, K: tl.constexpr, N: tl.constexpr):
    """One of them."""
    places, inside = place_rows(i, row, column, K, N)
    return tl.load(first + places, mask=inside & exists, other=0.0)


@triton.jit
def store_rows(first, i: tl.constexpr, values, row, column, K: tl.constexpr, N: tl.constexpr):
    """One of them in FP8."""
    places, inside = place_rows(i, row, column, K, N)
    tl.store(first + places, values.to(first.dtype.element_ty), mask=inside)


@triton.jit
def quantize_matrices(w_ptr, turned, as_is, K: tl.constexpr, N: tl.constexpr, G: tl.constexpr):
    """`w [G, K, N]` to values `[G, N, K]` and scales `[G, ceil(N / 128), K / 128]`, unless `turned` is None.

    And to values `[G, K, N]` and scales `[G, ceil(K / 128), N / 128]`, unless `as_is` is.
    """
    across: tl.constexpr = (N + GROUP - 1) // GROUP
    down: tl.constexpr = (K + GROUP - 1) // GROUP
    turns = num_turns(G * across * down)
    following = load_block(w_ptr, task_of_turn(0), turns > 0, K, N)
    for turn in range(turns):
        group, row, column = locate_block(task_of_turn(turn), K, N)
        a, b = following[0].to(tl.float32), following[1].to(tl.float32)
        c, d = following[2].to(tl.float32), following[3].to(tl.float32)
        following = load_block(w_ptr, task_of_turn(turn + 1), turn + 1 < turns, K, N)
        bits = tl.max(largest_of(a, b, c, d), axis=1)
        scale, inverse = scales_for(tl.max(bits, axis=0, keep_dims=True)[:, None])
        one = tl.zeros((1, 1), tl.int32)
        if as_is is not None:
            first = as_is.values_ptr + (group * (K * N) + row.to(tl.int64) * N + column)
            store_rows(first, 0, a * inverse, row, column, K, N)
            store_rows(first, 1, b * inverse, row, column, K, N)
            store_rows(first, 2, c * inverse, row, column, K, N)
            store_rows(first, 3, d * inverse, row, column, K, N)
            index = (group * down + row // GROUP) * across + column // GROUP
            tl.store(as_is.scales_ptr + index + one, scale)
        if turned is not None:
            words = words_of(a, b, c, d, inverse)
            inside = tl.arange(0, GROUP) < N - column
            store_turned(turned.values_ptr, group * (K * N) + column.to(tl.int64) * K + row, words, K, inside)
            index = (group * across + column // GROUP) * down + row // GROUP
            tl.store(turned.scales_ptr + index + one, scale)
