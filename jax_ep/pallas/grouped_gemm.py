"""Grouped GEMM and its weight gradient for bfloat16 and float16 on Hopper's tensor cores, accumulated in float32.

The kernels are written for Pallas's Mosaic GPU backend, which gives access to wgmma and TMA. Pallas's Triton
backend, which would run on more GPUs, has neither. On the CPU they run in
Mosaic's interpreter, with the same barriers and copies.

TMA moves blocks of 8 rows of 128 bytes here. Operands of other sizes are padded with zeros and the result is cut, which
costs copies; the widths of models are multiples of 64.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jax_ep.core.expert_matrices import GemmWeights, SplitWeights
from jax_ep.core.layout import Bias, add_bias, round_up
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.pallas import epilogue, forward, gradient, ring, tiling
from jax_ep.pallas.launch import is_interpreted, launch, num_programs, swizzled
from jax_ep.pallas.schedule import row_tiles
from jax_ep.pallas.tiling import ALIGNMENT, CHUNK, CONSUMERS, STEP, TILE, WEIGHT_STAGES, ForwardTiles
from jax_ep.types import Array
from jax_ep.xla import grouped_gemm as xla

_ROWS, _MATRICES = (ALIGNMENT, STEP), (1, STEP, STEP)  # what sizes must be multiples of
_STATIC = ("out_dtype", "interpret")


def grouped_gemm(
    lhs: Array,
    rhs: GemmWeights,
    group_sizes: Array,
    *,
    transpose: bool,
    out_dtype: DTypeLike,
    bias: Bias | None = None,
    tiles: ForwardTiles | None = None,
) -> Array:
    """See xla/grouped_gemm.py. `tiles` are those of the kernel; None: those for the shape.

    Source: persistent, warp-specialized GEMMs as in CUTLASS and DeepGEMM, here in Pallas.
    """
    tiles = tiles or tiling.forward_tiles(lhs.shape[0], group_sizes.shape[0], jnp.dtype(out_dtype).itemsize)
    static = {"transpose": transpose, "out_dtype": jnp.dtype(out_dtype), "tiles": tiles}
    rows = _forward(lhs, rhs, group_sizes, **static, interpret=is_interpreted())
    return rows if bias is None else add_bias(rows, bias, group_sizes)


@functools.partial(jax.jit, static_argnames=(*_STATIC, "transpose", "tiles"))  # one compilation for eager callers
def _forward(lhs: Array, rhs: GemmWeights, group_sizes: Array, *, transpose: bool, **static: Any) -> Array:
    weights = (_pad(w, _MATRICES) for w in jax.tree.leaves(rhs))
    operands = vary_alike((_pad(lhs, _ROWS), *weights, group_sizes))
    run = sequential_vmap(functools.partial(_launch_forward, transpose=transpose, **static))
    return run(*operands)[: lhs.shape[0], : rhs.shape[1 if transpose else 2]]


def _launch_forward(
    *operands: Array, transpose: bool, out_dtype: jnp.dtype, tiles: ForwardTiles, interpret: bool
) -> Array:
    lhs, *rhs, group_sizes = operands
    schedule = row_tiles(group_sizes, lhs.shape[0], tiles, interpret=interpret)
    columns = rhs[0].shape[1 if transpose else 2]
    programs = num_programs(schedule.group.shape[0] * -(-columns // TILE), interpret)
    left, right = (tiles.heights[-1], STEP), (TILE, STEP) if transpose else (STEP, TILE)
    slots = [swizzled((tiles.stages, *shape), lhs.dtype) for shape in (left, right)]
    scratch = {"ring": ring.scratch(slots[0], slots[1], tiles.stages), "store": epilogue.scratch(out_dtype)}
    body = functools.partial(forward.grouped_gemm, tiles=tiles, transpose=transpose, programs=programs)
    result = jax.ShapeDtypeStruct((lhs.shape[0], columns), out_dtype)
    return _launch_product("grouped_gemm", body, (schedule, lhs, tuple(rhs)), result, scratch, programs, interpret)


def weight_gradient(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    out_dtype: DTypeLike,
    num_home: int = 0,
) -> GemmWeights:
    """Contract the rows of each group as in xla/grouped_gemm.py."""
    static = {"out_dtype": jnp.dtype(out_dtype), "interpret": is_interpreted()}
    found = _gradient(lhs, rhs, group_sizes, **static, num_home=num_home)
    return SplitWeights(*found) if num_home else found[0]


@functools.partial(jax.jit, static_argnames=(*_STATIC, "num_home"))
def _gradient(lhs: Array, rhs: Array, group_sizes: Array, **static: Any) -> list[Array]:
    # Copies past the last column are cut off where there are more than those of one line.
    columns = STEP if rhs.shape[1] > STEP else 2 * STEP
    operands = vary_alike((_pad(lhs, _ROWS), _pad(rhs, (ALIGNMENT, columns)), group_sizes))
    run = sequential_vmap(functools.partial(_launch_gradient, **static))
    return [w[:, : lhs.shape[1], : rhs.shape[1]] for w in run(*operands)]


def _launch_gradient(*operands: Array, out_dtype: jnp.dtype, interpret: bool, num_home: int = 0) -> list[Array]:
    lhs, rhs, group_sizes = operands
    groups = xla.locate_groups(group_sizes, lhs.shape[0])
    shape = (group_sizes.shape[0], lhs.shape[1], rhs.shape[1])
    num_tasks = shape[0] * -(-shape[1] // TILE) * -(-shape[2] // TILE)
    programs = num_programs(num_tasks, interpret)
    operand = swizzled((WEIGHT_STAGES, STEP, TILE), lhs.dtype)
    scratch = {
        "ring": ring.scratch(operand, operand, WEIGHT_STAGES),
        "results": swizzled((CONSUMERS, CHUNK, TILE), out_dtype),
        "edge": plgpu.Barrier(num_arrivals=2, num_barriers=WEIGHT_STAGES),
    }
    body = functools.partial(gradient.weight_gradient, programs=programs)
    inputs = (groups.starts, groups.ends, lhs, rhs)
    parts = (num_home, shape[0] - num_home) if num_home else shape[:1]
    result = [jax.ShapeDtypeStruct((part, *shape[1:]), out_dtype) for part in parts]
    return _launch_product("grouped_gemm_weight_gradient", body, inputs, result, scratch, programs, interpret)


_launch_product = functools.partial(launch, warpgroups=tiling.CONSUMERS + 1)  # those that multiply, and one that loads


def _pad(x: Array, multiples: tuple[int, ...]) -> Array:
    """`x` with its sizes rounded up to multiples; a copy only where they are none."""
    missing = [round_up(size, multiple) - size for size, multiple in zip(x.shape, multiples, strict=True)]
    return jnp.pad(x, [(0, more) for more in missing]) if any(missing) else x
