"""Weight gradient: `out[g] = lhs[rows of g].T @ rhs[rows of g]`.

Roles as in forward.py: one warpgroup loads steps of rows, and two multiply. Results leave through separate memory
while the next tile is multiplied.

The first and last step of a group may reach into its neighbors, or past all groups, where anything may lie. The loading
warpgroup sets those rows of both operands to zero in shared memory, since zero times NaN is not zero. It has the time
for it, and the registers of the others are full. Such edge steps have separate barriers: the loading warpgroup waits
for its copies, clears rows, and then opens the consumers' barrier. No wait is circular: an edge step is cleared before
the loading warpgroup waits for the next free stage but one, so three stages suffice. Floor: the tensor cores' rate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep.pallas import ring as rings
from jax_ep.pallas.launch import WARPGROUP, Ref, Scalar, in_array_of, int32
from jax_ep.pallas.ring import Ring
from jax_ep.pallas.tiling import ALIGNMENT, CHUNK, STEP, TILE
from jax_ep.types import Array

_BLOCKS = plgpu.Layout.TILED(
    plgpu.Tiling(((ALIGNMENT, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
"""Register layout of blocks of 8 rows: four elements per thread and 64 columns, half a warp per row."""
_CLEAR_COLUMNS = 128  # columns cleared at a time; 64 make the kernel a quarter slower
_BAND = 8  # most row tiles that programs visit together, so that they share columns in the L2 cache


class Tile(NamedTuple):
    """One tile of the result: group, first row and column in it, and first row and end of the operands."""

    group: Array
    row: Array
    column: Array
    start: Array
    end: Array


def tile_locator(start: Ref, end: Ref, out: tuple[Ref, ...]) -> tuple[Callable[[Array], Tile], int]:
    """Return a function of tasks to tiles of `out [num_groups, K, N]`, in one array or two, and the number of tasks."""
    _, rows, columns = out[0].shape
    num_row_tiles, num_column_tiles = -(-rows // TILE), -(-columns // TILE)
    num_tiles = num_row_tiles * num_column_tiles

    def locate(task: Array) -> Tile:
        group, within = lax.div(task, int32(num_tiles)), lax.rem(task, int32(num_tiles))
        # Bands of row tiles, column by column in each band.
        tiles_per_band = int32(_BAND * num_column_tiles)
        first, in_band = lax.div(within, tiles_per_band) * int32(_BAND), lax.rem(within, tiles_per_band)
        height = jnp.minimum(int32(_BAND), int32(num_row_tiles) - first)
        row, column = first + lax.rem(in_band, height), lax.div(in_band, height)
        return Tile(group, row * int32(TILE), column * int32(TILE), start[group], end[group])

    return locate, sum(array.shape[0] for array in out) * num_tiles


class Steps(NamedTuple):
    """Steps of a tile; edge steps come first."""

    total: Array  # number of steps
    begin: Array  # 0 or 1: whether an edge step has rows of earlier groups
    edges: Array  # number of edge steps, at most 2
    first: Array  # the row at which blocks of `STEP` rows begin

    def row(self, k: Array) -> Array:
        """Return the first row of step `k`."""
        ends = self.edges - self.begin
        edge = jnp.where(k < self.begin, int32(0), self.total - int32(1))
        return self.first + jnp.where(k < self.edges, edge, k - ends) * int32(STEP)


def steps_of(tile: Tile) -> Steps:
    """Return the steps of a tile."""
    # Copies begin at aligned rows.
    first = tile.start & int32(-ALIGNMENT)
    total = lax.div(tile.end - first + int32(STEP - 1), int32(STEP))
    total = jnp.where(tile.end > tile.start, total, int32(0))
    begin = jnp.where(tile.start > first, jnp.minimum(total, int32(1)), int32(0))
    whole = jnp.clip(lax.div(tile.end - first, int32(STEP)) - begin, int32(0), total - begin)
    return Steps(total, begin, total - whole, first)


class Loaded(NamedTuple):
    """State of the loading warpgroup.

    Attributes:
      step: the next step.
      is_edge: whether the previous step is an edge step, whose rows still have to be cleared.
      start, end: the rows of that step that belong to the group.
    """

    step: Array
    is_edge: Array
    start: Array
    end: Array


def weight_gradient(
    start: Ref,
    end: Ref,
    lhs: Ref,
    rhs: Ref,
    *out: Ref,
    ring: Ring,
    results: Ref,
    edge: Ref,
    programs: int,
) -> None:
    """Contract `[M, K]` and `[M, N]` over rows to `[num_groups, K, N]`; group g has rows `[start[g], end[g])`.

    `results` are `[CONSUMERS, CHUNK, TILE]` on their way out, `edge` barriers of the ring's slots, which open when both
    operands of an edge step have arrived.
    """
    consumer = lax.axis_index(WARPGROUP)
    locate, num_tasks = tile_locator(start, end, out)

    def load(tile: Tile, loaded: Loaded) -> Loaded:
        steps = steps_of(tile)
        own_row, own_column = pl.multiple_of(tile.row, TILE), pl.multiple_of(tile.column, TILE)

        def one(k: Array, loaded: Loaded) -> Loaded:
            slot, row = lax.rem(loaded.step, int32(ring.stages)), steps.row(k)
            rows = pl.ds(pl.multiple_of(row, ALIGNMENT), STEP)

            def copy(barriers: Ref) -> None:
                left, right = lhs.at[rows, pl.ds(own_row, TILE)], rhs.at[rows, pl.ds(own_column, TILE)]
                plgpu.copy_gmem_to_smem(left, ring.lhs.at[slot], barriers.at[slot])
                plgpu.copy_gmem_to_smem(right, ring.rhs.at[slot], barriers.at[slot])

            is_edge = k < steps.edges
            # Wait until both consumers have read this stage, then fill it.
            plgpu.barrier_wait(ring.empty.at[slot])
            pl.when(is_edge)(lambda: copy(edge))
            pl.when(~is_edge)(lambda: copy(ring.full))
            # Clear the previous step only now: its copies had time to arrive.
            clear_last(loaded)
            return Loaded(loaded.step + int32(1), is_edge, tile.start - row, tile.end - row)

        return lax.fori_loop(int32(0), steps.total, one, loaded)

    def clear_last(loaded: Loaded) -> None:
        """Clear other groups' rows in the step before `loaded.step`, and hand it to the consumers."""

        @pl.when(loaded.is_edge)
        def _clear() -> None:
            slot = rings.before(ring, loaded.step)
            plgpu.barrier_wait(edge.at[slot])
            for buffer in (ring.lhs, ring.rhs):
                _clear_rows(buffer.at[slot], loaded.start, loaded.end)
            plgpu.commit_smem()
            for _ in range(2):  # in tile of two copies
                plgpu.barrier_arrive(ring.full.at[slot])

    def multiply(tile: Tile, step: Array) -> Array:
        steps = steps_of(tile).total
        own = pl.ds(pl.multiple_of(consumer * int32(CHUNK), CHUNK), CHUNK)
        after = step + steps

        def operands(slot: Array) -> tuple[Ref, Ref]:
            return ring.lhs.at[slot, :, own].transpose((1, 0)), ring.rhs.at[slot]

        def product(accumulator: Ref) -> Array:
            rings.multiply_steps(ring, step, steps, accumulator, operands)
            return accumulator[...]

        result = pl.run_scoped(product, plgpu.ACC((CHUNK, TILE)))
        # Release the last stage; a tile without steps used none.
        pl.when(steps > int32(0))(lambda: rings.release(ring, after))
        # Wait until the results of the previous tile have left.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        results[consumer] = result.astype(results.dtype)
        plgpu.commit_smem()
        send(tile)
        return after

    def send(tile: Tile) -> None:
        row = pl.multiple_of(tile.row + consumer * int32(CHUNK), CHUNK)
        block = pl.ds(row, CHUNK), pl.ds(pl.multiple_of(tile.column, TILE), TILE)

        def copy(array: Ref, group: Array) -> None:
            plgpu.copy_smem_to_gmem(results.at[consumer], array.at[(group, *block)])

        # K is a multiple of a half's rows: it stores all of them, or none.
        pl.when(row < int32(out[0].shape[1]))(lambda: in_array_of(out, tile.group, copy))

    begin = Loaded(jnp.int32(0), jnp.bool_(False), jnp.int32(0), jnp.int32(0))
    tasks = int32(num_tasks), programs
    rings.run_tasks(ring, *tasks, locate, load, multiply, begin=begin, finish=clear_last)


def _clear_rows(buffer: Ref, start: Array, end: Array) -> None:
    """Set the rows of `buffer [STEP, columns]` outside of `[start, end)` to zero."""
    start, end = jnp.clip(start, 0, STEP), jnp.clip(end, 0, STEP)
    shape = (ALIGNMENT, _CLEAR_COLUMNS)
    zeros = plgpu.layout_cast(jnp.zeros(shape, buffer.dtype), _BLOCKS)

    def clear_some(columns: Ref, first: Scalar) -> None:
        block = buffer.at[pl.ds(first, ALIGNMENT), columns]
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_BLOCKS) + first
        block[...] = jnp.where((row >= start) & (row < end), plgpu.load(block, layout=_BLOCKS), zeros)

    def clear_all(columns: Ref, block: Array) -> None:
        rows = pl.ds(pl.multiple_of(block * int32(ALIGNMENT), ALIGNMENT), ALIGNMENT)
        buffer[rows, columns] = zeros

    # Blocks at the borders are cleared in part, blocks behind the end as a whole.
    last = pl.multiple_of(end & int32(-ALIGNMENT), ALIGNMENT)
    behind = lax.div(end + int32(ALIGNMENT - 1), int32(ALIGNMENT))
    for column in range(0, buffer.shape[1], _CLEAR_COLUMNS):
        columns = pl.ds(column, _CLEAR_COLUMNS)
        pl.when(start > int32(0))(partial(clear_some, columns, 0))  # groups begin within the first block
        pl.when(end > last)(partial(clear_some, columns, last))
        lax.fori_loop(behind, int32(STEP // ALIGNMENT), lambda i, _, c=columns: clear_all(c, i), None)
