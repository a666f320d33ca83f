"""The kernel of `out[r] = weights[r] * act(lhs[r] @ gate[g]) * (lhs[r] @ up[g])` for the rows r of group g.

That of forward.py with two sums for each element, of a gate and of what it multiplies, in the registers of the same
consumer. So tiles have half as many rows at most, and what they store half as many bytes as the rows of both products;
these are not stored, and nobody has to read them.

Weights of a tile's rows travel with each step: they are a hundredth of it, and need no barriers of their own. Rows past
the groups hold anything.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep.core.activations import activate_pairs
from jax_ep.pallas import ring as rings
from jax_ep.pallas.forward import Place, place_of, store_tile
from jax_ep.pallas.memory import WARPGROUP, Ref, int32
from jax_ep.pallas.ring import Ring
from jax_ep.pallas.schedule import RowTiles
from jax_ep.pallas.tiling import ALIGNMENT, CHUNK, STEP, TILE, ForwardTiles
from jax_ep.types import Array, Experts

HALVES = 2
"""Of a matrix: gates, and what they multiply."""


def gemm_activation(
    rows: RowTiles,
    lhs: Ref,
    rhs: Ref,
    row_weights: Ref,
    out: Ref,
    ring: Ring,
    weights: Ref,
    store: Ref,
    *,
    experts: Experts,
    tiles: ForwardTiles,
    programs: int,
) -> None:
    """`[M, K]`, `[G, K, 2I]` and `[M]` to `[M, I]`.

    `weights` are `[stages, height]`, those of the rows in the ring; `store` is `epilogue.columns_scratch`.
    """
    tiles_per_row = -(-out.shape[1] // TILE)
    consumer = lax.axis_index(WARPGROUP)
    num_steps = -(-lhs.shape[1] // STEP)
    locate = partial(place_of, rows, tiles_per_row=tiles_per_row, num_steps=num_steps, num_groups=rhs.shape[0])

    def load(place: Place, step: Array) -> Array:
        def load_rows(height: int) -> Array:
            own_rows, some = pl.ds(pl.multiple_of(place.row, ALIGNMENT), height), pl.ds(0, height)

            def one(k: Array, step: Array) -> Array:
                slot, depth = lax.rem(step, int32(tiles.stages)), pl.ds(k * int32(STEP), STEP)
                full = ring.full.at[slot]
                plgpu.barrier_wait(ring.empty.at[slot])
                plgpu.copy_gmem_to_smem(lhs.at[own_rows, depth], ring.lhs.at[slot, some], full)
                for half in range(HALVES):
                    column = pl.multiple_of(place.column + int32(half * out.shape[1]), CHUNK)
                    block = rhs.at[place.group, depth, pl.ds(column, TILE)]
                    plgpu.copy_gmem_to_smem(block, ring.rhs.at[slot, half], full)
                plgpu.copy_gmem_to_smem(row_weights.at[own_rows], weights.at[slot, some], full)
                return step + int32(1)

            return lax.fori_loop(int32(0), place.steps, one, step)

        return lax.switch(place.height, [partial(load_rows, height) for height in tiles.heights])

    def multiply(place: Place, step: Array) -> Array:
        first = consumer * int32(CHUNK)
        columns = pl.ds(pl.multiple_of(first, CHUNK), CHUNK)
        after = step + place.steps

        def multiply_rows(height: int) -> None:
            some = pl.ds(0, height)

            def operands(slot: Array) -> list[tuple[Ref, Ref]]:
                left = ring.lhs.at[slot, some].transpose((1, 0))
                return [(ring.rhs.at[slot, half, :, columns].transpose((1, 0)), left) for half in range(HALVES)]

            def products(*accumulators: Ref) -> list[Array]:
                rings.multiply_steps(ring, tiles.stages, step, place.steps, accumulators, operands)
                return [accumulator[...] for accumulator in accumulators]

            gate, up = pl.run_scoped(products, *[plgpu.ACC((CHUNK, height))] * HALVES)
            factors = plgpu.load(weights.at[rings.before(after, tiles.stages), some], layout=_BY_COLUMN)
            rings.release(ring, tiles.stages, after)
            activated = activate_pairs(experts, gate, up, _sigmoid)
            store_tile(store, activated * lax.broadcast_in_dim(factors, activated.shape, (1,)), out, place)

        heights = [partial(multiply_rows, height) for height in tiles.heights]
        pl.when(place.steps > int32(0))(lambda: lax.switch(place.height, heights))
        return after

    num_tasks = rows.total[0] * int32(tiles_per_row)
    begin = jnp.int32(0)
    rings.run_tasks(ring, tiles.stages, num_tasks, programs, locate, load, multiply, begin=begin, turning=True)


def _sigmoid(x: Array) -> Array:
    """Exact to float32 but for some units in the last place, without a division, which takes many instructions."""
    return jnp.square(lax.rsqrt(1 + jnp.exp(-x)))


_BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)
