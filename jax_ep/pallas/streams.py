"""What the kernels of local steps share: rows travel through slots of shared memory, some tasks ahead of their use.

A program has one warpgroup, which is enough to move rows at the memory's rate: what it waits for is always on its way.
Several programs share a multiprocessor, so that one moves rows while another one waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep.pallas.launch import PROGRAM
from jax_ep.pallas.memory import Ref, Scalar, int32
from jax_ep.types import Array

PROGRAMS_PER_CORE = 2
SLOT_BYTES = 96 << 10
"""Shared memory of a program: `PROGRAMS_PER_CORE` programs have room on a multiprocessor of Hopper."""

type Rows = tuple[Array, ...]


class Tasks(NamedTuple):
    """A program's own tasks, one after another: the first, and how many."""

    first: Array
    number: Array


def own_tasks(num_tasks: int, programs: int) -> Tasks:
    """As many for each program, but for one."""
    program = lax.axis_index(PROGRAM)
    each, more = divmod(num_tasks, programs)
    first = program * int32(each) + jnp.minimum(program, int32(more))
    return Tasks(first, int32(each) + (program < int32(more)).astype(jnp.int32))


def row_at(index: Ref, place: Array, num_rows: int) -> Array:
    """The row at a place of a list. What is not there is the one behind the last, which TMA reads as zeros."""
    row = index[place]
    return jnp.where(row < int32(0), int32(num_rows), row)


def stream(
    count: Array,
    ahead: int,
    rows_of: Callable[[Scalar], Rows],
    load: Callable[[Scalar, Rows], None],
    use: Callable[[Array], None],
) -> None:
    """Uses what tasks 0 to `count` load, each of which begins to load when the one `ahead` of it is used.

    Lists of rows are read a task earlier still: reading one takes as long as moving the rows.
    """
    for task in range(ahead):
        pl.when(int32(task) < count)(partial(load, int32(task), rows_of(int32(task))))

    def step(task: Array, rows: Rows) -> Rows:
        later = task + int32(ahead)
        pl.when(later < count)(lambda: load(later, rows))
        following = rows_of(later + int32(1))
        use(task)
        return following

    lax.fori_loop(int32(0), count, step, rows_of(int32(ahead)))
    plgpu.wait_smem_to_gmem(0)
