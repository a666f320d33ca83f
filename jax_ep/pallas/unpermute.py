"""The kernel of `out[n] = sum of y[index[n, k]] over k`, in float32 and in this order; -1 adds nothing.

A task is a part of a row of the result. The same parts of its K rows come by TMA, are added in registers, rounded once,
and leave by TMA. The result may be in FP8, with a scale for each line of 128 columns; with K = 1 that is a permutation
which quantises on the way.

With N rows of B bytes memory moves what rows there are in the list, and `N * B`: each row is read once.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep.core.fp8 import FP8_MAX, MIN_SCALE
from jax_ep.pallas.memory import Ref, int32
from jax_ep.pallas.streams import Rows, own_tasks, row_at, stream
from jax_ep.types import Array

LINE = 128
"""Columns of a line: those that share a scale."""
WARPS = 4
RESULT_SLOTS = 2
"""Parts of results on their way out."""
_LINES = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, LINE), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
"""How a warpgroup holds lines: each warp one of four, four elements per thread."""


def unpermute(index: Ref, y: Ref, *refs: Ref, slots: Ref, full: Ref, results: tuple[Ref, ...], programs: int) -> None:
    """`index [N * K]` and `y [R, lines, 128]` to sums `[N, lines, 128]`, and scales `[N, lines]` if they are in FP8.

    `slots [S, K, part, 128]` hold what is added, `full` are their barriers; `results` are `[2, part, 128]`, and
    `[2, part]` for scales. `part` divides `lines`.
    """
    num_slots, top_k, part, _ = slots.shape
    num_parts = y.shape[1] // part
    num_tasks = refs[0].shape[0] * num_parts
    first, count = own_tasks(num_tasks, programs)

    def place_of(task: Array) -> tuple[Array, Any]:
        here = lax.min(first + task, int32(num_tasks - 1))
        line = lax.rem(here, int32(num_parts)) * int32(part)
        return lax.div(here, int32(num_parts)), pl.ds(pl.multiple_of(line, part), part)

    def rows_of(task: Array) -> Rows:
        start = place_of(task)[0] * int32(top_k)
        return tuple(row_at(index, start + int32(k), y.shape[0]) for k in range(top_k))

    def load(task: Array, rows: Rows) -> None:
        slot, (_, lines) = lax.rem(task, int32(num_slots)), place_of(task)
        for k, row in enumerate(rows):
            plgpu.copy_gmem_to_smem(y.at[pl.ds(row, 1), lines], slots.at[slot, pl.ds(k, 1)], full.at[slot])

    def use(task: Array) -> None:
        slot, here = lax.rem(task, int32(num_slots)), lax.rem(task, int32(RESULT_SLOTS))
        plgpu.barrier_wait(full.at[slot])
        total = _widened(slots.at[slot, 0])
        for k in range(1, top_k):
            total += _widened(slots.at[slot, k])
        plgpu.wait_smem_to_gmem(RESULT_SLOTS - 1, wait_read_only=True)
        parts = _quantized(total) if len(refs) > 1 else (total,)
        for result, value in zip(results, parts, strict=True):
            result[here] = value.astype(result.dtype)
        # Also what was read is free for copies now.
        plgpu.commit_smem()
        row, lines = place_of(task)
        for result, ref in zip(results, refs, strict=True):
            plgpu.copy_smem_to_gmem(result.at[here], ref.at[row, lines], commit_group=False)
        plgpu.commit_smem_to_gmem_group()

    stream(count, num_slots - 1, rows_of, load, use)


def _widened(part: Ref) -> Array:
    values = part[...]
    at_once = math.gcd(values.shape[0], WARPS)  # elements of a thread, next to each other
    layout = _LINES if at_once == WARPS else plgpu.Layout.WG_STRIDED(values.shape, vec_size=at_once)
    return plgpu.layout_cast(values, layout).astype(jnp.float32)


def _quantized(lines: Array) -> tuple[Array, Array]:
    """Lines as FP8 can hold them, and their scales: the arithmetic of core/fp8.py."""
    bits = lax.bitcast_convert_type(lines, jnp.int32) & int32(0x7FFFFFFF)
    largest = lax.bitcast_convert_type(jnp.max(bits, axis=1), jnp.float32)
    scales = jnp.maximum(largest * jnp.float32(1 / FP8_MAX), jnp.float32(MIN_SCALE))
    inverse = lax.broadcast_in_dim(jnp.float32(1) / scales, lines.shape, (0,))
    return jnp.clip(lines * inverse, -FP8_MAX, FP8_MAX), scales
