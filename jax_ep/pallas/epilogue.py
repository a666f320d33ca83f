"""Stores of tiles in which some rows belong to other programs.

Transposed accumulators leave through shared memory by TMA, in chunks of rows of 128 bytes. A chunk with all of its rows
leaves as one swizzled copy. A chunk at a group's border leaves as copies of single powers of two of rows, since TMA
boxes have static sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jax_ep.pallas.launch import WARPGROUP, Ref, Scalar, Scratch, int32, line, swizzled
from jax_ep.pallas.tiling import CHUNK, CONSUMERS
from jax_ep.types import Array

_SLOTS = 2  # chunks of a consumer in flight: more leave too little room for operands

type Target = Callable[[Scalar, int], Ref]


def scratch(out_dtype: DTypeLike) -> Scratch:
    """Declare chunks of each consumer for `store`, in two views.

    A chunk has as many rows as 8 KB hold. Whole chunks leave from the swizzled view. Single rows can be
    addressed only in the plain view. Both views have one shape, so that each consumer has the same memory in both.
    """
    shape = (CONSUMERS, _SLOTS, line(out_dtype), CHUNK)
    return plgpu.RefUnion(swizzled(shape, out_dtype), plgpu.SMEM(shape, out_dtype))


def store(views: Ref, result: Array, target: Target, bounds: tuple[Array, Array]) -> None:
    """Store the transposed `[64, rows]` float32 of a consumer, except rows out of `bounds`.

    Args:
      views: see `scratch`.
      result: accumulators.
      target: `(first, height)` to rows of the result.
      bounds: first row and end; only the first and the last chunk may have other rows.
    """
    swizzled_view, _ = views
    chunk = swizzled_view.shape[2]
    firsts = range(0, result.shape[1], chunk)
    for number, first in enumerate(firsts):
        height = min(chunk, result.shape[1] - first)
        values = result[:, first : first + height].astype(swizzled_view.dtype)
        # Wait until this slot's previous copy has left; the first chunk waits for all copies of the previous tile.
        plgpu.wait_smem_to_gmem(_SLOTS - 1 if number else 0, wait_read_only=True)
        whole = partial(_store_chunk, views, values, number, partial(target, int32(first), height))
        # Only border chunks may have rows of other tiles.
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
    # 16-bit elements are transposed by the store itself.
    if values.dtype.itemsize > 2:
        values = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
    chunk.transpose((1, 0))[...] = values
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(chunk, target())


def _store_part(
    views: Ref, values: Array, number: int, target: Target, first: Scalar, start: Array, rows: Array
) -> None:
    """Store `rows` rows from `start` on, both relative to the chunk, which begins with row `first`.

    They leave as one group of copies. TMA boxes have static heights: powers of two, the largest first.
    """
    chunk = views[1].at[lax.axis_index(WARPGROUP), number % _SLOTS]
    part = chunk.at[pl.ds(0, values.shape[1])].transpose((1, 0))
    values = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
    if hasattr(plgpu, "store"):  # from JAX 0.12 on, other stores must be free of bank conflicts
        plgpu.store(part, values, optimized=False)
    else:
        part[...] = values
    plgpu.commit_smem()
    rows, height = jnp.maximum(rows, int32(0)), 1 << (chunk.shape[0] - 1).bit_length() - 1
    while height:
        # Rows in larger boxes come before this one.
        here = start + (rows & int32(-2 * height))
        box, place = chunk.at[pl.ds(here, height)], target(first + here, height)
        send = partial(plgpu.copy_smem_to_gmem, box, place, commit_group=False)
        pl.when((rows & int32(height)) != int32(0))(send)
        height //= 2
    plgpu.commit_smem_to_gmem_group()
