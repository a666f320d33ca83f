"""How results leave: from accumulators through shared memory by TMA, all rows of a consumer or some."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jax_ep.pallas.memory import CHUNK_ROWS, WARPGROUP, Ref, Scalar, chunk_columns, int32, swizzled
from jax_ep.pallas.tiling import CONSUMERS
from jax_ep.types import Array

type Target = Callable[[Scalar, int, int], Ref]


def scratch(out_dtype: DTypeLike) -> Any:
    """Declares two chunks of each consumer, in two views.

    Whole chunks leave swizzled. Single rows can be addressed only where they lie one after another. Both views have one
    shape, so that each consumer has the same memory in both.
    """
    chunks = (CONSUMERS, 2, CHUNK_ROWS, chunk_columns(out_dtype))
    return plgpu.RefUnion(swizzled(chunks, out_dtype), plgpu.SMEM(chunks, out_dtype))


def store(views: Ref, result: Array, target: Target, bounds: tuple[Array, Array], limit: Scalar | None) -> None:
    """Stores rows `bounds` of the `[64, columns]` float32 of a consumer; others belong to other programs.

    Args:
      views: see `scratch`.
      result: accumulators.
      target: `(first, height, column)` to the part of the result that begins with this row and column of the
        accumulators.
      bounds: may lie outside of the 64 rows.
      limit: how many columns the result has from the first of the accumulators on; None: as many as they or more. A
        copy to columns behind the last one is not cut off where the result is one chunk wide: it reaches the next row.
    """
    start, end = jnp.maximum(bounds[0], int32(0)), jnp.minimum(bounds[1], int32(CHUNK_ROWS))
    rows = end - start
    pl.when(rows == int32(CHUNK_ROWS))(lambda: store_whole(views, result, target, limit))
    pl.when((rows > int32(0)) & (rows < int32(CHUNK_ROWS)))(
        lambda: _store_rows(views, result, target, start, rows, limit)
    )


def store_whole(views: Ref, result: Array, target: Target, limit: Scalar | None) -> None:
    """`store` of all rows, which come in whole blocks."""
    buffer, _ = views
    consumer, width = lax.axis_index(WARPGROUP), chunk_columns(buffer.dtype)
    columns = range(0, result.shape[1], width)

    def store_chunk(number: int, column: int) -> None:
        slot = number % 2
        # The other slot may still be read. It is this one, of the tile before, where there is one chunk in a tile, or
        # may be where tiles have different numbers of them.
        alone = len(columns) == 1 or (limit is not None and number == 0)
        plgpu.wait_smem_to_gmem(0 if alone else 1, wait_read_only=True)
        buffer[consumer, slot] = result[:, column : column + width].astype(buffer.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer.at[consumer, slot], target(int32(0), CHUNK_ROWS, column))

    for number, column in enumerate(columns):
        _where_inside(column, limit, partial(store_chunk, number, column))


def _store_rows(views: Ref, result: Array, target: Target, start: Array, rows: Array, limit: Scalar | None) -> None:
    """The boxes of TMA have static heights: 32 rows, 16, ... as the bits of `rows` say."""
    _, buffer = views
    consumer, width = lax.axis_index(WARPGROUP), chunk_columns(buffer.dtype)

    def store_box(height: int, column: int) -> None:
        first = start + (rows & int32(-2 * height))
        plgpu.copy_smem_to_gmem(buffer.at[consumer, 0, pl.ds(first, height)], target(first, height, column))

    def store_chunk(column: int) -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffer[consumer, 0] = result[:, column : column + width].astype(buffer.dtype)
        plgpu.commit_smem()
        for height in (32, 16, 8, 4, 2, 1):
            pl.when((rows & int32(height)) != int32(0))(partial(store_box, height, column))

    for column in range(0, result.shape[1], width):
        _where_inside(column, limit, partial(store_chunk, column))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # whole chunks lie in the same memory


def _where_inside(column: int, limit: Scalar | None, run: Callable[[], None]) -> None:
    if limit is None:
        run()
    else:
        pl.when(int32(column) < limit)(run)
