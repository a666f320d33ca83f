"""Segments by `lax.ragged_all_to_all`, which sends actual sizes only. XLA has it on GPUs and TPUs.

Arrays have the static sizes of the worst routing, which on one end grow with the number of ranks. So that end is
processed in windows of twice the size that balanced routing fills. Few ranks need one window, without a loop; with many
ranks there are as many windows as the fullest rank needs, which the ranks agree on first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.core.layout import gather_rows
from jax_ep.core.mesh_axes import Axis, exchange, vary_alike
from jax_ep.types import Array, Layout
from jax_ep.xla.segments import Segments, put, starts

_BALANCED_LOADS = 2  # Window size in balanced loads.


def window_size(layout: Layout) -> int:
    """Return the size of a window: with balanced routing a rank sends and receives at most K tokens per own token."""
    return layout.num_tokens * min(layout.num_ranks, _BALANCED_LOADS * layout.top_k)


def send[Tree](
    rows_of: Callable[[Array], Tree],
    segments: Segments,
    num_rows: int,
    axis: Axis,
    layout: Layout,
    rows: Array | None = None,
) -> Tree:
    """Return what the ranks send here in rank order, in `num_rows` places or in given rows; other rows are zero.

    Args:
      rows_of: maps sent indices `[N]`, -1 for nothing, to arrays `[N, ...]`; called once per window.
      segments: segments of this rank.
      num_rows: rows of the result.
      axis: mesh axes of the ranks.
      layout: static sizes.
      rows: `[P, C]` int32, the rows that each place fills, -1 for none; None: the row with the same index.
    """
    if rows is None:
        return _send_in_windows(rows_of, segments, num_rows, axis, layout)
    return _receive_in_windows(rows_of(segments.sent), segments, num_rows, axis, layout, rows)


def _send_in_windows[Tree](
    rows_of: Callable[[Array], Tree], segments: Segments, num_rows: int, axis: Axis, layout: Layout
) -> Tree:
    num_places = segments.sent.shape[0]
    size = min(window_size(layout), num_places)
    first, first_there = starts(segments.send_counts), exchange(starts(segments.receive_counts), axis)
    first_of_peers = exchange(first, axis) if size < num_places else jnp.zeros_like(first)

    def one_window(start: Array | int, received: Tree) -> Tree:
        begin, counts = _cut(first, segments.send_counts, start, size)
        _, counts_here = _cut(first_of_peers, segments.receive_counts, start, size)
        sizes = jnp.clip(first + begin - start, 0, size), counts, first_there + begin, counts_here
        sent = gather_rows(segments.sent + 1, start + lax.iota(jnp.int32, size)) - 1
        return jax.tree.map(partial(_exchange, sizes, axis), rows_of(sent), received)

    empty = _empty(jax.eval_shape(rows_of, segments.sent), num_rows)
    return _windows(one_window, empty, segments.sent, segments.send_counts, num_places, size, axis)


def _receive_in_windows[Tree](
    parts: Tree, segments: Segments, num_rows: int, axis: Axis, layout: Layout, rows: Array
) -> Tree:
    num_places = rows.shape[0]
    size = min(window_size(layout), num_places)
    first = starts(segments.receive_counts)
    first_there = exchange(first, axis)

    def one_window(start: Array | int, result: Tree) -> Tree:
        begin, counts = _cut(first_there, segments.send_counts, start, size)
        _, counts_here = _cut(first, segments.receive_counts, start, size)
        places_there = jnp.clip(first_there + begin - start, 0, size)
        sizes = starts(segments.send_counts) + begin, counts, places_there, counts_here
        place = start + lax.iota(jnp.int32, size)
        place = jnp.where(place < jnp.sum(segments.receive_counts), place, -1)
        filled = gather_rows(rows + 1, place) - 1

        def put_one(whole: Array, part: Array) -> Array:
            return put(whole, _exchange(sizes, axis, part, _empty(part, size)), filled)

        return jax.tree.map(put_one, result, parts)

    return _windows(one_window, _empty(parts, num_rows), segments.sent, segments.receive_counts, num_places, size, axis)


def _cut(first: Array, counts: Array, start: Array | int, size: int) -> tuple[Array, Array]:
    """Return the start within the window and the length of each segment, whose places begin at `first`."""
    begin = jnp.clip(start - first, 0, counts)
    return begin, jnp.clip(start + size - first, 0, counts) - begin


def _empty[Tree](parts: Tree, num_rows: int) -> Tree:
    return jax.tree.map(lambda part: jnp.zeros((num_rows, *part.shape[1:]), part.dtype), parts)


def _windows[Tree](
    one_window: Callable[[Array | int, Tree], Tree],
    empty: Tree,
    like: Array,
    counts: Array,
    num_places: int,
    size: int,
    axis: Axis,
) -> Tree:
    """Apply `one_window(start, result)` to as many windows as the largest of `counts` on any rank fills."""
    if size == num_places:
        return one_window(0, empty)
    num_windows = -(-lax.pmax(jnp.sum(counts), axis) // size)
    empty = vary_alike((empty, like), over=axis)[0]
    return lax.fori_loop(0, num_windows, lambda i, result: one_window(i * size, result), empty)


def _exchange(sizes: tuple[Array, ...], axis: Axis, operand: Array, output: Array) -> Array:
    if operand.dtype.itemsize == 1 and operand.dtype != jnp.uint8:
        bits = (lax.bitcast_convert_type(part, jnp.uint8) for part in (operand, output))
        return lax.bitcast_convert_type(_exchange(sizes, axis, *bits), operand.dtype)
    return lax.ragged_all_to_all(*vary_alike((operand, output, *sizes)), axis_name=axis)
