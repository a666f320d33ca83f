"""First GEMM of gated experts with the activation in its epilogue: activated rows replace the rows of both halves."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from jax_ep.core.expert_matrices import GemmWeights
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.pallas import epilogue, forward_activated, ring, tiling
from jax_ep.pallas.export_cache import lowered_once
from jax_ep.pallas.forward_activated import HALVES
from jax_ep.pallas.grouped_gemm import ROWS, launch_product, pad
from jax_ep.pallas.launch import is_interpreted, num_programs, swizzled, vectors
from jax_ep.pallas.schedule import row_tiles
from jax_ep.pallas.tiling import ALIGNMENT, CHUNK, STEP, TILE, ForwardTiles
from jax_ep.types import Array, Experts

_CHUNK = 32  # rows that leave at a time: half as many as of other products, for the sake of higher tiles


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


@functools.partial(jax.jit, static_argnames=("experts", "tiles", "interpret"))  # one compilation for eager callers
def _run(lhs: Array, rhs: GemmWeights, group_sizes: Array, row_weights: Array, **static: object) -> Array:
    intermediate = rhs.shape[2] // HALVES

    def padded(w: Array) -> Array:
        if intermediate % CHUNK:
            w = pad(w.reshape(*w.shape[:2], HALVES, intermediate), (1, 1, 1, CHUNK)).reshape(*w.shape[:2], -1)
        return pad(w, (1, STEP, 1))

    weights = pad(row_weights.astype(jnp.float32), (ALIGNMENT,))
    operands = vary_alike((pad(lhs, ROWS), *map(padded, jax.tree.leaves(rhs)), group_sizes, weights))
    run = sequential_vmap(functools.partial(_launch_activated, **static))
    return run(*operands)[: lhs.shape[0], :intermediate]


@lowered_once
def _launch_activated(*operands: Array, experts: Experts, tiles: ForwardTiles, interpret: bool) -> Array:
    lhs, *rhs, group_sizes, weights = operands
    schedule, height = row_tiles(group_sizes, lhs.shape[0], tiles, interpret=interpret), tiles.heights[-1]
    columns = rhs[0].shape[2] // HALVES
    programs = num_programs(schedule.group.shape[0] * -(-columns // TILE), interpret)
    shapes = (height, STEP), (HALVES, STEP, TILE)
    slots = [swizzled((tiles.stages, *shape), lhs.dtype) for shape in shapes]
    scratch = {
        "ring": ring.scratch(slots[0], slots[1], tiles.stages, copies=4),
        "weights": vectors(tiles.stages, height, jnp.float32),
        "store": epilogue.columns_scratch(lhs.dtype, _CHUNK),
    }
    body = functools.partial(forward_activated.gemm_activation, experts=experts, tiles=tiles, programs=programs)
    result = jax.ShapeDtypeStruct((lhs.shape[0], columns), lhs.dtype)
    inputs = (schedule, lhs, tuple(rhs), weights)
    return launch_product("gemm_activation", body, inputs, result, scratch, programs, interpret)
