"""Grouped GEMM with gated activation: `out[r] = weights[r] * act(lhs[r] @ gate[g]) * (lhs[r] @ up[g])`, r in group g.

Activated rows replace the rows of both halves of the first GEMM of gated experts, which never reach memory.

Roles and tiles as in forward.py, with two accumulators per consumer: the gate and the up value of each element. So
tiles have at most half as many rows, and stores half as many bytes as both GEMMs' results.

Router weights of a tile's rows are loaded with each step: they are 1 % of its bytes and need no separate barriers.
Rows past the groups are not written.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ep.core.activations import activate_pairs
from jax_ep.core.expert_matrices import GemmWeights
from jax_ep.core.layout import round_up
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.pallas import epilogue, tiling
from jax_ep.pallas import ring as rings
from jax_ep.pallas.export_cache import lowered_once
from jax_ep.pallas.forward import Tile, load_tile, store_tile, tile_locator
from jax_ep.pallas.grouped_gemm import ROWS, launch_product, pad
from jax_ep.pallas.launch import WARPGROUP, Ref, in_array_of, int32, is_interpreted, line, num_programs, swizzled
from jax_ep.pallas.ring import Ring
from jax_ep.pallas.schedule import RowTiles, row_tiles
from jax_ep.pallas.tiling import ALIGNMENT, CHUNK, STEP, TILE, ForwardTiles
from jax_ep.types import Array, Experts

_HALVES = 2  # of the first GEMM's weights: gates and up values
_CHUNK = 32  # rows that leave at a time: half as many as of other products, for the sake of higher tiles
_BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def gemm_activation(
    experts: Experts,
    lhs: Array,
    rhs: GemmWeights,
    group_sizes: Array,
    row_weights: Array,
    *,
    tiles: ForwardTiles | None = None,
) -> Array:
    """`[M, K]` rows times the `[G, K, 2I]` matrix of their group, activated, and times `[M]` weights, to `[M, I]`.

    In float32 with one final rounding, of experts that `requirements.activates`. Rows past the groups hold anything.
    `tiles` are those of the kernel; None: the package's.

    Source: a dual GEMM with the gated unit in its epilogue, as CUTLASS's, for groups of rows.
    """
    static = {"experts": experts, "tiles": tiles or tiling.activated_tiles(), "interpret": is_interpreted()}
    return _run(lhs, rhs, group_sizes, row_weights, **static)


@partial(jax.jit, static_argnames=("experts", "tiles", "interpret"))  # one compilation for eager callers
def _run(lhs: Array, rhs: GemmWeights, group_sizes: Array, row_weights: Array, **static: object) -> Array:
    intermediate = rhs.shape[2] // _HALVES

    def padded(w: Array) -> Array:
        if intermediate % CHUNK:
            w = pad(w.reshape(*w.shape[:2], _HALVES, intermediate), (1, 1, 1, CHUNK)).reshape(*w.shape[:2], -1)
        return pad(w, (1, STEP, 1))

    weights = pad(row_weights.astype(jnp.float32), (ALIGNMENT,))
    operands = vary_alike((pad(lhs, ROWS), *map(padded, jax.tree.leaves(rhs)), group_sizes, weights))
    run = sequential_vmap(partial(_launch_activated, **static))
    return run(*operands)[: lhs.shape[0], :intermediate]


@lowered_once
def _launch_activated(*operands: Array, experts: Experts, tiles: ForwardTiles, interpret: bool) -> Array:
    lhs, *rhs, group_sizes, weights = operands
    schedule, height = row_tiles(group_sizes, lhs.shape[0], tiles, interpret=interpret), tiles.heights[-1]
    columns = rhs[0].shape[2] // _HALVES
    programs = num_programs(schedule.group.shape[0] * -(-columns // TILE), interpret)
    shapes = (height, STEP), (_HALVES, STEP, TILE)
    slots = [swizzled((tiles.stages, *shape), lhs.dtype) for shape in shapes]
    scratch = {
        "ring": rings.scratch(slots[0], slots[1], tiles.stages, copies=4),
        # TMA copies begin at whole lines. GPUs end the program at a misaligned copy; the interpreter does not check it.
        "weights": plgpu.SMEM((tiles.stages, round_up(height, line(jnp.float32))), jnp.float32),
        "store": epilogue.scratch(lhs.dtype, _CHUNK),
    }
    body = partial(_kernel, experts=experts, tiles=tiles, programs=programs)
    result = jax.ShapeDtypeStruct((lhs.shape[0], columns), lhs.dtype)
    inputs = (schedule, lhs, tuple(rhs), weights)
    return launch_product("gemm_activation", body, inputs, result, scratch, programs, interpret)


def _kernel(
    rows: RowTiles,
    lhs: Ref,
    rhs: tuple[Ref, ...],
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
    """Multiply `[M, K]` and `[num_groups, K, 2 * intermediate]`, activate, and scale by `[M]` row weights.

    The result is `[M, intermediate]`. `rhs` are weights in one array or in two, see forward.py. `weights` are `[stages,
    rows]`, those of the rows in the ring; `store` is `epilogue.scratch`.
    """
    consumer = lax.axis_index(WARPGROUP)
    locate, tiles_per_row = tile_locator(rows, lhs, rhs, out)

    def load_weights(tile: Tile, slot: Array, k_block: pl.Slice, own_rows: pl.Slice) -> None:
        full = ring.full.at[slot]
        # The same columns of gates and of up values.
        for half in range(_HALVES):
            column = pl.multiple_of(tile.column + int32(half * out.shape[1]), CHUNK)

            def copy(w: Ref, group: Array, column: Array = column, half: int = half) -> None:
                block = w.at[group, k_block, pl.ds(column, TILE)]
                plgpu.copy_gmem_to_smem(block, ring.rhs.at[slot, half], full)

            in_array_of(rhs, tile.group, copy)
        plgpu.copy_gmem_to_smem(row_weights.at[own_rows], weights.at[slot, pl.ds(0, own_rows.size)], full)

    def multiply(tile: Tile, step: Array) -> Array:
        first = consumer * int32(CHUNK)
        columns = pl.ds(pl.multiple_of(first, CHUNK), CHUNK)
        after = step + tile.steps

        def multiply_rows(block_m: int) -> None:
            some = pl.ds(0, block_m)

            def operands(slot: Array) -> list[tuple[Ref, Ref]]:
                left = ring.lhs.at[slot, some].transpose((1, 0))
                return [(ring.rhs.at[slot, half, :, columns].transpose((1, 0)), left) for half in range(_HALVES)]

            def products(*accumulators: Ref) -> list[Array]:
                rings.multiply_steps(ring, step, tile.steps, accumulators, operands)
                return [accumulator[...] for accumulator in accumulators]

            gate, up = pl.run_scoped(products, *[plgpu.ACC((CHUNK, block_m))] * _HALVES)
            # Read the weights before the last stage is released.
            factors = plgpu.load(weights.at[rings.before(ring, after), some], layout=_BY_COLUMN)
            rings.release(ring, after)
            activated = activate_pairs(experts, gate, up, _sigmoid)
            store_tile(store, activated * lax.broadcast_in_dim(factors, activated.shape, (1,)), out, tile)

        heights = [partial(multiply_rows, block_m) for block_m in tiles.heights]
        pl.when(tile.steps > int32(0))(lambda: lax.switch(tile.block_m_index, heights))
        return after

    load = partial(load_tile, lhs, ring, tiles, load_weights)
    num_tasks, begin = rows.total[0] * int32(tiles_per_row), jnp.int32(0)
    rings.run_tasks(ring, num_tasks, programs, locate, load, multiply, begin=begin, reverses=True)


def _sigmoid(x: Array) -> Array:
    """Compute the sigmoid without a division, which takes many instructions; exact in float32 up to a few ulps."""
    return jnp.square(lax.rsqrt(1 + jnp.exp(-x)))
