"""The kernel of sums that leave in FP8: `out[n] = sum of y[index[n, k]] over k`, in float32 and in this order.

-1 adds nothing. With K = 1 that is a permutation which quantises on the way. A task is a part of a row of the result.
The same parts of its K rows come by TMA, are added in registers, rounded once with a scale for each line of 128
columns, and leave by TMA. They travel through slots of shared memory, some tasks ahead of their use.

A program has one warpgroup: what it waits for is always on its way. Several programs share a multiprocessor, so that
one moves rows while another one adds. With N sums of R rows of B bytes memory moves what rows there are in the list,
`R * B`, each once, and the sums.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep.core.fp8 import FP8_MAX, MIN_SCALE
from jax_ep.pallas.launch import PROGRAM
from jax_ep.pallas.memory import Ref, Scalar, int32
from jax_ep.types import Array

LINE = 128
"""Columns of a line: those that share a scale."""
WARPS = 4
RESULT_SLOTS = 2
"""Parts of results on their way out."""
_LINES = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, LINE), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
"""How a warpgroup holds lines: each warp one of four, four elements per thread."""

type _Rows = tuple[Array, ...]


class _Tasks(NamedTuple):
    """A program's own tasks, one after another: the first, and how many."""

    first: Array
    number: Array


def unpermute(
    index: Ref,
    y: Ref,
    out: Ref,
    scales: Ref,
    slots: Ref,
    full: Ref,
    out_slots: Ref,
    scale_slots: Ref,
    *,
    programs: int,
) -> None:
    """`index [N * K]` and `y [R, lines, 128]` to sums `[N, lines, 128]` and scales `[N, lines]`.

    `slots [S, K, part, 128]` hold what is added, `full` are their barriers; `out_slots [2, part, 128]` and
    `scale_slots [2, part]` hold results. `part` is a multiple of 4 that divides `lines`.
    """
    num_slots, top_k, part, _ = slots.shape
    ahead = num_slots - 1
    num_parts = y.shape[1] // part
    num_tasks = out.shape[0] * num_parts
    first, count = _own_tasks(num_tasks, programs)

    def place_of(task: Scalar) -> tuple[Array, Any]:
        here = lax.min(first + task, int32(num_tasks - 1))
        line = lax.rem(here, int32(num_parts)) * int32(part)
        return lax.div(here, int32(num_parts)), pl.ds(pl.multiple_of(line, part), part)

    def rows_of(task: Scalar) -> _Rows:
        start = place_of(task)[0] * int32(top_k)
        return tuple(_row_at(index, start + int32(k), y.shape[0]) for k in range(top_k))

    def load(task: Scalar, rows: _Rows) -> None:
        slot, (_, lines) = lax.rem(task, int32(num_slots)), place_of(task)
        for k, row in enumerate(rows):
            plgpu.copy_gmem_to_smem(y.at[pl.ds(row, 1), lines], slots.at[slot, pl.ds(k, 1)], full.at[slot])

    def add(task: Array) -> None:
        slot, here = lax.rem(task, int32(num_slots)), lax.rem(task, int32(RESULT_SLOTS))
        plgpu.barrier_wait(full.at[slot])
        total = _widened(slots.at[slot, 0])
        for k in range(1, top_k):
            total += _widened(slots.at[slot, k])
        plgpu.wait_smem_to_gmem(RESULT_SLOTS - 1, wait_read_only=True)
        row, lines = place_of(task)
        results = (out, out_slots), (scales, scale_slots)
        for value, (_, result) in zip(_quantized(total), results, strict=True):
            result[here] = value.astype(result.dtype)
        # Also what was read is free for copies now.
        plgpu.commit_smem()
        for ref, result in results:
            plgpu.copy_smem_to_gmem(result.at[here], ref.at[row, lines], commit_group=False)
        plgpu.commit_smem_to_gmem_group()

    def step(task: Array, rows: _Rows) -> _Rows:
        later = task + int32(ahead)
        pl.when(later < count)(lambda: load(later, rows))
        # Lists are read a task earlier still: reading one takes as long as moving the rows.
        following = rows_of(later + int32(1))
        add(task)
        return following

    for task in range(ahead):
        pl.when(int32(task) < count)(partial(load, int32(task), rows_of(int32(task))))
    lax.fori_loop(int32(0), count, step, rows_of(int32(ahead)))
    plgpu.wait_smem_to_gmem(0)


def _own_tasks(num_tasks: int, programs: int) -> _Tasks:
    """As many for each program, but for one."""
    program = lax.axis_index(PROGRAM)
    each, more = divmod(num_tasks, programs)
    first = program * int32(each) + jnp.minimum(program, int32(more))
    return _Tasks(first, int32(each) + (program < int32(more)).astype(jnp.int32))


def _row_at(index: Ref, place: Array, num_rows: int) -> Array:
    """The row at a place of a list. What is not there is the one behind the last, which TMA reads as zeros."""
    row = index[place]
    return jnp.where(row < int32(0), int32(num_rows), row)


def _widened(part: Ref) -> Array:
    return plgpu.layout_cast(part[...], _LINES).astype(jnp.float32)


def _quantized(lines: Array) -> tuple[Array, Array]:
    """Lines as FP8 can hold them, and their scales: the arithmetic of core/fp8.py."""
    bits = lax.bitcast_convert_type(lines, jnp.int32) & int32(0x7FFFFFFF)
    largest = lax.bitcast_convert_type(jnp.max(bits, axis=1), jnp.float32)
    scales = jnp.maximum(largest * jnp.float32(1 / FP8_MAX), jnp.float32(MIN_SCALE))
    inverse = lax.broadcast_in_dim(jnp.float32(1) / scales, lines.shape, (0,))
    return jnp.clip(lines * inverse, -FP8_MAX, FP8_MAX), scales
