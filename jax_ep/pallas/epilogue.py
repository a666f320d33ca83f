"""How tiles leave, of which some rows belong to other programs.

From accumulators through shared memory by TMA: transposed ones, a chunk of rows of 128 bytes at a time; others, a chunk
of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jax_ep.pallas.memory import WARPGROUP, Ref, Scalar, int32, line, swizzled
from jax_ep.pallas.tiling import CHUNK, CONSUMERS
from jax_ep.types import Array

_SLOTS = 2  # chunks of a consumer on their way out: more leave no room for operands, which cost more than they gained

type Target = Callable[[Scalar, int], Ref]
type Block = Callable[[Scalar, int, int, int], Ref]


def columns_scratch(out_dtype: DTypeLike, rows: int | None = None) -> Any:
    """Declares chunks of each consumer for `store_columns`, in two views.

    They have so many `rows`; None: as 8 KB have. Whole chunks leave swizzled. Single rows can be addressed only where
    they lie one after another. Both views have one shape, so that each consumer has the same memory in both.
    """
    shape = (CONSUMERS, _SLOTS, rows or line(out_dtype), CHUNK)
    return plgpu.RefUnion(swizzled(shape, out_dtype), plgpu.SMEM(shape, out_dtype))


def store_columns(views: Ref, result: Array, target: Target, bounds: tuple[Array, Array]) -> None:
    """Stores the transposed `[64, rows]` float32 of a consumer, but for rows out of `bounds`.

    Args:
      views: see `columns_scratch`.
      result: accumulators.
      target: `(first, height)` to rows of the result.
      bounds: first row and end; only the first chunk and the last one may have other rows.
    """
    swizzled_view, _ = views
    chunk = swizzled_view.shape[2]
    firsts = range(0, result.shape[1], chunk)
    for number, first in enumerate(firsts):
        height = min(chunk, result.shape[1] - first)
        values = result[:, first : first + height].astype(swizzled_view.dtype)
        # At the first chunk the slot may be that of the last one of another tile, of any number of chunks.
        plgpu.wait_smem_to_gmem(_SLOTS - 1 if number else 0, wait_read_only=True)
        whole = partial(_store_chunk, views, values, number, partial(target, int32(first), height))
        if number in (0, len(firsts) - 1):
            start = jnp.maximum(bounds[0] - int32(first), int32(0))
            rows = jnp.minimum(bounds[1] - int32(first), int32(height)) - start
            pl.when(rows == int32(height))(whole)
            part = partial(_store_part, views, values, number, target, int32(first), start, rows)
            pl.when(rows < int32(height))(part)
        else:
            whole()


def _store_chunk(views: Ref, values: Array, number: int, target: Callable[[], Ref]) -> None:
    buffer, _ = views
    chunk = buffer.at[lax.axis_index(WARPGROUP), number % _SLOTS, pl.ds(0, values.shape[1])]
    if values.dtype.itemsize > 2:  # shared memory itself transposes 16-bit elements as they are stored
        values = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
    chunk.transpose((1, 0))[...] = values
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(chunk, target())


def _store_part(
    views: Ref, values: Array, number: int, target: Target, first: Scalar, start: Array, rows: Array
) -> None:
    """Stores `rows` rows from `start` on, both of the chunk of this number, which begins with row `first`."""
    _, buffer = views
    chunk = buffer.at[lax.axis_index(WARPGROUP), number % _SLOTS]
    part = chunk.at[pl.ds(0, values.shape[1])]
    _store_slowly(part.transpose((1, 0)), plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED))
    plgpu.commit_smem()
    _store_boxes(chunk, lambda here, height: target(first + here, height), start, rows)


def _store_boxes(chunk: Ref, target: Target, start: Scalar, rows: Scalar) -> None:
    """Sends `rows` rows from `start` on, fewer than a chunk, whose rows lie one after another, as one group of copies.

    The boxes of TMA have static heights: powers of two, the tallest first.
    """
    rows, height = jnp.maximum(rows, int32(0)), 1 << (chunk.shape[0] - 1).bit_length() - 1
    while height:
        here = start + (rows & int32(-2 * height))
        send = partial(plgpu.copy_smem_to_gmem, chunk.at[pl.ds(here, height)], target(here, height), commit_group=False)
        pl.when((rows & int32(height)) != int32(0))(send)
        height //= 2
    plgpu.commit_smem_to_gmem_group()


def rows_scratch(out_dtype: DTypeLike, chunks: int) -> Any:
    """Declares so many chunks of each consumer for `store_rows`, in the two views of `columns_scratch`."""
    shape = (CONSUMERS, chunks, CHUNK, line(out_dtype))
    return plgpu.RefUnion(swizzled(shape, out_dtype), plgpu.SMEM(shape, out_dtype))


def store_rows(
    views: Ref, parts: Sequence[Array], block: Block, bounds: tuple[Scalar, Scalar], num_columns: Scalar
) -> None:
    """Stores the float32 of a consumer, but for rows out of `bounds` and columns that are not there.

    Args:
      views: see `rows_scratch`.
      parts: `[64, columns]` of accumulators, one beside the other.
      block: `(row, height, column, width)` to a part of the result.
      bounds: first row and end.
      num_columns: how many there are, a multiple of 64.
    """
    swizzled_view, plain = views
    slots, height, width = swizzled_view.shape[1:]
    consumer, of_part = lax.axis_index(WARPGROUP), parts[0].shape[1]
    start = jnp.clip(bounds[0], int32(0), int32(height))
    rows = jnp.clip(bounds[1], start, int32(height)) - start
    chunks = [part[:, first : first + width] for part in parts for first in range(0, of_part, width)]
    for number, chunk in enumerate(chunks):
        values, slot, first = chunk.astype(swizzled_view.dtype), number % slots, number * width
        is_there = int32(first) < num_columns
        # At the first chunk the slot may be that of the last one of another tile, of any number of chunks.
        if number == 0 or number >= slots:
            plgpu.wait_smem_to_gmem(slots - 1 if number else 0, wait_read_only=True)

        def whole(values: Array = values, slot: int = slot, first: int = first) -> None:
            buffer = swizzled_view.at[consumer, slot]
            buffer[...] = values
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, block(int32(0), height, first, width))

        def some(values: Array = values, slot: int = slot, first: int = first) -> None:
            buffer = plain.at[consumer, slot]
            _store_slowly(buffer, values)
            plgpu.commit_smem()
            _store_boxes(buffer, lambda here, height: block(here, height, first, width), start, rows)

        pl.when((rows == int32(height)) & is_there)(whole)
        pl.when((rows < int32(height)) & (rows > int32(0)) & is_there)(some)


def _store_slowly(target: Ref, values: Array) -> None:
    """Stores where rows lie one after another, which takes a warp several turns at the same banks."""
    if hasattr(plgpu, "store"):  # since JAX 0.12, where other stores must take one turn
        plgpu.store(target, values, optimized=False)
    else:
        target[...] = values
