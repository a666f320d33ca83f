"""The kernel of `out[r] = x[index[r]]`, with zeros for -1: rows travel from memory to memory by TMA alone.

A task is a block of rows of the result. Its rows come one by one, and leave as what they are there, one piece of
memory. No thread sees their elements, so that any dtype is as good as bytes.

With R rows of B bytes from T, memory moves `(min(R, T) + R) * B` bytes if caches hold what is read twice. In expert
order each program walks through all tokens, expert by expert and in step with the others, so that few rows are read
from memory more than once for each expert that a program has.
"""

from __future__ import annotations

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep.pallas.memory import Ref, int32
from jax_ep.pallas.streams import Rows, own_tasks, row_at, stream
from jax_ep.types import Array


def permute(index: Ref, x: Ref, out: Ref, slots: Ref, full: Ref, *, programs: int) -> None:
    """`index [R]` and `x [T, lines, columns]` to `[R, lines, columns]`.

    `slots [S, rows, lines, columns]` hold blocks, `full` are their barriers; `rows` divide R.
    """
    num_slots, height = slots.shape[:2]
    ahead = num_slots // 2  # as many blocks arrive as leave
    num_blocks = out.shape[0] // height
    first, count = own_tasks(num_blocks, programs)

    def start_of(task: Array) -> Array:
        return pl.multiple_of(lax.min(first + task, int32(num_blocks - 1)) * int32(height), height)

    def rows_of(task: Array) -> Rows:
        return tuple(row_at(index, start_of(task) + int32(i), x.shape[0]) for i in range(height))

    def load(task: Array, rows: Rows) -> None:
        slot = lax.rem(task, int32(num_slots))
        plgpu.wait_smem_to_gmem(num_slots - ahead - 1, wait_read_only=True)  # the block before has left this slot
        for i, row in enumerate(rows):
            plgpu.copy_gmem_to_smem(x.at[pl.ds(row, 1)], slots.at[slot, pl.ds(i, 1)], full.at[slot])

    def use(task: Array) -> None:
        slot = lax.rem(task, int32(num_slots))
        plgpu.barrier_wait(full.at[slot])
        plgpu.copy_smem_to_gmem(slots.at[slot], out.at[pl.ds(start_of(task), height)])

    stream(count, ahead, rows_of, load, use)
