"""Sums that leave as FP8: `out[n] = sum of y[index[n, k]] over k`, in float32 and in this order; -1 adds nothing.

With top_k = 1 this is a permutation that quantizes on the way.

Roles. A program is one warpgroup and takes a contiguous share of the tasks; no program waits for another. A task is a
part of one row of the result. TMA brings the same part of its top_k rows into slots of shared memory, some tasks ahead.
The warpgroup waits for a slot's copies, adds the parts in registers, rounds once with a scale per line of 128 columns,
and sends the result by TMA. It waits only for its own copies, so it cannot deadlock. Several programs share a
multiprocessor: one moves rows while another adds.

Floor: memory bandwidth, each listed row read once and each sum written once.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep.core.fp8 import FP8_MAX, MIN_SCALE
from jax_ep.pallas.launch import PROGRAM, Ref, Scalar, int32
from jax_ep.pallas.requirements import LINE, WARPS
from jax_ep.types import Array

RESULT_SLOTS = 2
"""Parts of results in flight."""
_LINES = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, LINE), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
"""Register layout of lines: each warp holds one of four, each thread four elements."""

type _Rows = tuple[Array, ...]


class _Tasks(NamedTuple):
    """A program's contiguous share of tasks.

    Attributes:
      first: the first task.
      number: how many there are.
    """

    first: Array
    number: Array


def unpermute(
    index: Ref, y: Ref, out: Ref, scales: Ref, slots: Ref, full: Ref, out_slots: Ref, scale_slots: Ref, *, programs: int
) -> None:
    """Sum `y [R, lines, 128]` by `index [N * top_k]` to `out [N, lines, 128]` and scales `[N, lines]`.

    `slots [S, top_k, part, 128]` hold what is added, `full` are their barriers; `out_slots [2, part, 128]` and
    `scale_slots [2, part]` hold results. `part` is a multiple of 4 that divides `lines`.
    """
    num_slots, top_k, part, _ = slots.shape
    ahead = num_slots - 1
    num_parts = y.shape[1] // part
    num_tasks = out.shape[0] * num_parts
    first, count = _own_tasks(num_tasks, programs)

    def locate(task: Scalar) -> tuple[Array, Ref]:
        here = lax.min(first + task, int32(num_tasks - 1))
        line = lax.rem(here, int32(num_parts)) * int32(part)
        return lax.div(here, int32(num_parts)), pl.ds(pl.multiple_of(line, part), part)

    def rows_of(task: Scalar) -> _Rows:
        start = locate(task)[0] * int32(top_k)
        return tuple(_row_at(index, start + int32(k), y.shape[0]) for k in range(top_k))

    def load(task: Scalar, rows: _Rows) -> None:
        slot, (_, lines) = lax.rem(task, int32(num_slots)), locate(task)
        for k, row in enumerate(rows):
            plgpu.copy_gmem_to_smem(y.at[pl.ds(row, 1), lines], slots.at[slot, pl.ds(k, 1)], full.at[slot])

    def add(task: Array) -> None:
        slot, here = lax.rem(task, int32(num_slots)), lax.rem(task, int32(RESULT_SLOTS))
        # Wait until all copies of this task have arrived, then add in order of k.
        plgpu.barrier_wait(full.at[slot])
        total = _widened(slots.at[slot, 0])
        for k in range(1, top_k):
            total += _widened(slots.at[slot, k])
        # Wait until this result slot's previous copy has left.
        plgpu.wait_smem_to_gmem(RESULT_SLOTS - 1, wait_read_only=True)
        row, lines = locate(task)
        results = (out, out_slots), (scales, scale_slots)
        for value, (_, result) in zip(_quantized(total), results, strict=True):
            result[here] = value.astype(result.dtype)
        # The commit also orders the reads of the slot before its next copies.
        plgpu.commit_smem()
        for ref, result in results:
            plgpu.copy_smem_to_gmem(result.at[here], ref.at[row, lines], commit_group=False)
        plgpu.commit_smem_to_gmem_group()

    def step(task: Array, rows: _Rows) -> _Rows:
        later = task + int32(ahead)
        pl.when(later < count)(lambda: load(later, rows))
        # Read the list one task further ahead: that takes as long as moving the rows.
        following = rows_of(later + int32(1))
        add(task)
        return following

    # Fill all slots but one, then run the loop: load `ahead` tasks ahead of the sums.
    for task in range(ahead):
        pl.when(int32(task) < count)(partial(load, int32(task), rows_of(int32(task))))
    lax.fori_loop(int32(0), count, step, rows_of(int32(ahead)))
    plgpu.wait_smem_to_gmem(0)


def _own_tasks(num_tasks: int, programs: int) -> _Tasks:
    """Return this program's share; shares differ by at most one task."""
    program = lax.axis_index(PROGRAM)
    each, more = divmod(num_tasks, programs)
    first = program * int32(each) + jnp.minimum(program, int32(more))
    return _Tasks(first, int32(each) + (program < int32(more)).astype(jnp.int32))


def _row_at(index: Ref, position: Array, num_rows: int) -> Array:
    """Read a row from the list; -1 becomes the row behind the last, which TMA reads as zeros."""
    row = index[position]
    return jnp.where(row < int32(0), int32(num_rows), row)


def _widened(part: Ref) -> Array:
    return plgpu.layout_cast(part[...], _LINES).astype(jnp.float32)


def _quantized(lines: Array) -> tuple[Array, Array]:
    """Scale lines to the FP8 range and return them with their scales; the arithmetic of core/fp8.py."""
    bits = lax.bitcast_convert_type(lines, jnp.int32) & int32(0x7FFFFFFF)
    largest = lax.bitcast_convert_type(jnp.max(bits, axis=1), jnp.float32)
    scales = jnp.maximum(largest * jnp.float32(1 / FP8_MAX), jnp.float32(MIN_SCALE))
    inverse = lax.broadcast_in_dim(jnp.float32(1) / scales, lines.shape, (0,))
    return jnp.clip(lines * inverse, -FP8_MAX, FP8_MAX), scales
