"""How tiles leave, of which some rows belong to other programs.

From accumulators through shared memory by TMA: transposed ones, a chunk of rows of 128 bytes at a time; others, a chunk
of columns.
"""

from __future__ import annotations

from collections.abc import Callable
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
_BOX = 8  # rows

type Target = Callable[[Scalar, int], Ref]
type Block = Callable[[Scalar, int, int, int], Ref]


def columns_scratch(out_dtype: DTypeLike) -> Any:
    """Declares chunks of each consumer for `store_columns`, in two views.

    Whole chunks leave swizzled. Single rows can be addressed only where they lie one after another. Both views have one
    shape, so that each consumer has the same memory in both.
    """
    chunks = (CONSUMERS, _SLOTS, line(out_dtype), CHUNK)
    return plgpu.RefUnion(swizzled(chunks, out_dtype), plgpu.SMEM(chunks, out_dtype))


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
        whole = partial(_store_chunk, views, values, number, partial(target, int32(first), height))
        if number in (0, len(firsts) - 1):
            start = jnp.maximum(bounds[0] - int32(first), int32(0))
            rows = jnp.minimum(bounds[1] - int32(first), int32(height)) - start
            pl.when(rows == int32(height))(whole)
            part = partial(_store_part, views, values, target, int32(first), start, rows)
            pl.when(rows < int32(height))(part)
        else:
            whole()


def _store_chunk(views: Ref, values: Array, number: int, target: Callable[[], Ref]) -> None:
    buffer, _ = views
    consumer, slot = lax.axis_index(WARPGROUP), number % _SLOTS
    # Other slots may still be read. At the first chunk it may be this one: tiles have any number of them.
    plgpu.wait_smem_to_gmem(0 if number == 0 else _SLOTS - 1, wait_read_only=True)
    chunk = buffer.at[consumer, slot, pl.ds(0, values.shape[1])]
    if values.dtype.itemsize > 2:  # shared memory itself transposes 16-bit elements as they are stored
        values = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
    chunk.transpose((1, 0))[...] = values
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(chunk, target())


def _store_part(views: Ref, values: Array, target: Target, first: Scalar, start: Array, rows: Array) -> None:
    """Stores `rows` rows from `start` on, both of a chunk that begins with row `first`.

    The boxes of TMA have static heights: as many as possible have `_BOX` rows, the others one.
    """
    _, buffer = views
    consumer = lax.axis_index(WARPGROUP)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    chunk = buffer.at[consumer, 0, pl.ds(0, values.shape[1])]
    _store_slowly(chunk.transpose((1, 0)), plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED))
    plgpu.commit_smem()

    _store_boxes(partial(_boxes_of, buffer), lambda here, height: target(first + here, height), start, rows)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # whole chunks lie in the same memory


def _boxes_of(plain: Ref, first: Scalar, height: int) -> Ref:
    """Rows of a consumer's first chunk, in the view in which they lie one after another."""
    return plain.at[lax.axis_index(WARPGROUP), 0, pl.ds(first, height)]


def _store_boxes(source: Target, target: Target, start: Scalar, rows: Scalar) -> None:
    """Sends `rows` rows from `start` on; the boxes of TMA have static heights."""

    def send(height: int, start: Array, count: Array) -> None:
        def one(i: Array, _: None) -> None:
            here = start + i * int32(height)
            plgpu.copy_smem_to_gmem(source(here, height), target(here, height))

        lax.fori_loop(int32(0), count, one, None)

    tall = lax.div(rows, int32(_BOX))
    send(_BOX, start, tall)
    send(1, start + tall * int32(_BOX), rows - tall * int32(_BOX))


def rows_scratch(out_dtype: DTypeLike) -> Any:
    """Declares chunks of each consumer for `store_rows`, in the two views of `columns_scratch`."""
    shape = (CONSUMERS, _SLOTS, CHUNK, line(out_dtype))
    return plgpu.RefUnion(swizzled(shape, out_dtype), plgpu.SMEM(shape, out_dtype))


def store_rows(views: Ref, result: Array, block: Block, bounds: tuple[Array, Array], num_columns: Scalar) -> None:
    """Stores the `[64, columns]` float32 of a consumer, but for rows out of `bounds` and columns that are not there.

    Args:
      views: see `rows_scratch`.
      result: accumulators.
      block: `(row, height, column, width)` to a part of the result.
      bounds: first row and end.
      num_columns: how many there are, a multiple of 64.
    """
    swizzled_view, plain = views
    height, chunk = swizzled_view.shape[2:]
    consumer = lax.axis_index(WARPGROUP)
    start = jnp.clip(bounds[0], int32(0), int32(height))
    rows = jnp.clip(bounds[1], start, int32(height)) - start
    for number, first in enumerate(range(0, result.shape[1], chunk)):
        values, slot = result[:, first : first + chunk].astype(swizzled_view.dtype), number % _SLOTS
        is_there = int32(first) < num_columns

        def whole(values: Array = values, slot: int = slot, first: int = first) -> None:
            # At the first chunk the slot may be that of the last one of another tile, of any number of chunks.
            plgpu.wait_smem_to_gmem(_SLOTS - 1 if first else 0, wait_read_only=True)
            buffer = swizzled_view.at[consumer, slot]
            buffer[...] = values
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, block(int32(0), height, first, chunk))

        def part(values: Array = values, first: int = first) -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            buffer = plain.at[consumer, 0]
            _store_slowly(buffer, values)
            plgpu.commit_smem()
            source = partial(_boxes_of, plain)
            _store_boxes(source, lambda here, height: block(here, height, first, chunk), start, rows)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # whole chunks lie in the same memory

        pl.when((rows == int32(height)) & is_there)(whole)
        pl.when((rows < int32(height)) & (rows > int32(0)) & is_there)(part)


def _store_slowly(target: Ref, values: Array) -> None:
    """Stores where rows lie one after another, which takes a warp several turns at the same banks."""
    if hasattr(plgpu, "store"):  # since JAX 0.12, where other stores must take one turn
        plgpu.store(target, values, optimized=False)
    else:
        target[...] = values
