"""Grouped GEMM and its weight gradient on the tensor cores, for bfloat16 and float16.

float32 and float64 stay with the portable loop over ordinary products: cuBLAS has full precision there, tensor cores
have not. So do empty arrays, more than 1024 groups, and results that are neither of the operands' dtype nor float32.

Descriptors need rows of whole 16-byte words. Other arrays are padded with zeros and the result is cut, which costs
copies; the widths of models are multiples of 8.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.typing import DTypeLike

from jax_ep.core.kernel import BOUND, Config, Descriptor, Kernel
from jax_ep.core.layout import power_of_two, round_up
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.megakernels import capability, gemm_tuning
from jax_ep.megakernels.gemm_tuning import Tiles, WeightTiles
from jax_ep.megakernels.grid import num_programs
from jax_ep.megakernels.launch import launch, make_ready
from jax_ep.types import Array
from jax_ep.xla import grouped_gemm as xla

_FORWARD = Kernel("gemm", "grouped_gemm")
_WEIGHTS = Kernel("gemm_weights", "grouped_gemm_weights")
_WORD = 8  # elements of a 16-byte word


def refusal(request: Any) -> str | None:
    """Why these kernels cannot serve a request, or None; other dtypes take the portable loop."""
    if request.dtype not in (jnp.bfloat16, jnp.float16):
        return None
    return capability.missing_tma(f"its grouped GEMM in {request.dtype}")


def has_kernel(lhs: Array, rhs: Array, group_sizes: Array, out_dtype: DTypeLike) -> bool:
    """Whether the kernels take these operands; the portable loop takes all."""
    return (
        lhs.dtype == rhs.dtype
        and lhs.dtype in (jnp.bfloat16, jnp.float16)
        and jnp.dtype(out_dtype) in (lhs.dtype, jnp.float32)
        and 0 not in (*lhs.shape, *rhs.shape, *group_sizes.shape)
        and group_sizes.shape[0] <= gemm_tuning.MAX_GROUPS
        and lhs.shape[0] <= BOUND
    )


def grouped_gemm(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    transpose_rhs: bool,
    out_dtype: DTypeLike,
    tiles: Tiles | None = None,
) -> Array:
    """`out[rows of g] = lhs[rows of g] @ rhs[g]` (or its transpose); rows past the groups are zero.

    Args:
      lhs: `[M, K]`.
      rhs: `[G, K, N]`, or `[G, N, K]` with `transpose_rhs`.
      group_sizes: `[G]` int32.
      transpose_rhs: contract with the last axis of rhs.
      out_dtype: dtype of the result; products are summed in float32 (float64 for float64).
      tiles: of the kernel; None: those for the shape.

    Returns:
      `[M, N]`.
    """
    if not has_kernel(lhs, rhs, group_sizes, out_dtype):
        return xla.grouped_gemm(lhs, rhs, group_sizes, transpose_rhs=transpose_rhs, out_dtype=out_dtype)
    columns = rhs.shape[1 if transpose_rhs else 2]
    groups = group_sizes.shape[0]
    tiles = tiles or gemm_tuning.forward_tiles(lhs.shape[0], columns, groups, jnp.dtype(out_dtype).itemsize)
    make_ready("grouped_gemm")
    return _forward(lhs, rhs, group_sizes, transpose_rhs, jnp.dtype(out_dtype), tiles)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))  # one compilation for eager callers
def _forward(
    lhs: Array, rhs: Array, group_sizes: Array, transpose_rhs: bool, out_dtype: jnp.dtype, tiles: Tiles
) -> Array:
    operands = vary_alike((pad(lhs, 1), pad(rhs, 1, 2), group_sizes))
    run = functools.partial(_launch_forward, transpose_rhs=transpose_rhs, out_dtype=out_dtype, tiles=tiles)
    return sequential_vmap(run)(*operands)[:, : rhs.shape[1 if transpose_rhs else 2]]


def _launch_forward(
    lhs: Array, rhs: Array, group_sizes: Array, *, transpose_rhs: bool, out_dtype: jnp.dtype, tiles: Tiles
) -> Array:
    num_rows, depth = lhs.shape
    groups, columns = rhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    inner, outer = (tiles.block_n, tiles.block_k) if transpose_rhs else (tiles.block_k, tiles.block_n)
    constants = {
        **_sizes(num_rows, columns, depth, groups),
        "BM": tiles.block_m,
        "BN": tiles.block_n,
        "BK": tiles.block_k,
        "GROUP_M": tiles.group_m,
        "TRANSPOSE": transpose_rhs,
        "TMA_PARTS": tiles.store_parts if tiles.tma_store else 0,
    }
    most_tasks = (num_rows // tiles.block_m + groups) * -(-columns // tiles.block_n)
    result: jax.ShapeDtypeStruct | Descriptor = jax.ShapeDtypeStruct((num_rows, columns), out_dtype)
    if tiles.tma_store:
        result = Descriptor(result, (tiles.block_m, tiles.block_n // tiles.store_parts), bounded=True)
    operands = (Descriptor(lhs, (tiles.block_m, tiles.block_k)), Descriptor(rhs, (1, inner, outer)), group_sizes)
    return launch(_FORWARD, operands, (result,), _config(tiles, most_tasks), constants)[0]


def grouped_gemm_weights(
    lhs: Array, rhs: Array, group_sizes: Array, *, out_dtype: DTypeLike, tiles: WeightTiles | None = None
) -> Array:
    """`out[g] = lhs[rows of g].T @ rhs[rows of g]`, the weight gradient of `grouped_gemm`.

    Args:
      lhs: `[M, K]`.
      rhs: `[M, N]`.
      group_sizes: `[G]` int32.
      out_dtype: dtype of the result; sums run in float32 (float64 for float64).
      tiles: of the kernel; None: those for the shape.

    Returns:
      `[G, K, N]`; zero for empty groups.
    """
    if not has_kernel(lhs, rhs, group_sizes, out_dtype):
        return xla.grouped_gemm_weights(lhs, rhs, group_sizes, out_dtype=out_dtype)
    tiles = tiles or gemm_tuning.weight_tiles(jnp.dtype(out_dtype).itemsize)
    make_ready("grouped_gemm")
    return _weights(lhs, rhs, group_sizes, jnp.dtype(out_dtype), tiles)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _weights(lhs: Array, rhs: Array, group_sizes: Array, out_dtype: jnp.dtype, tiles: WeightTiles) -> Array:
    operands = vary_alike((pad(lhs, 1), pad(rhs, 1), group_sizes))
    run = functools.partial(_launch_weights, out_dtype=out_dtype, tiles=tiles)
    return sequential_vmap(run)(*operands)[:, : lhs.shape[1], : rhs.shape[1]]


def _launch_weights(lhs: Array, rhs: Array, group_sizes: Array, *, out_dtype: DTypeLike, tiles: WeightTiles) -> Array:
    num_rows, rows, columns, groups = *lhs.shape, rhs.shape[1], group_sizes.shape[0]
    left = Descriptor(lhs, (tiles.block_r, tiles.block_m), bounded=True)
    right = Descriptor(rhs, (tiles.block_r, tiles.block_n), bounded=True)
    constants = {
        **_sizes(num_rows, columns, rows, groups),
        "BM": tiles.block_m,
        "BN": tiles.block_n,
        "BR": tiles.block_r,
        "GROUP_M": tiles.group_m,
        "PARTS": tiles.store_parts,
        "TMA_STORE": tiles.tma_store,
    }
    num_tasks = groups * -(-rows // tiles.block_m) * -(-columns // tiles.block_n)
    result: jax.ShapeDtypeStruct | Descriptor = jax.ShapeDtypeStruct((groups, rows, columns), out_dtype)
    if tiles.tma_store:
        result = Descriptor(result, (1, tiles.block_m, tiles.block_n // tiles.store_parts))
    return launch(_WEIGHTS, (left, right, group_sizes), (result,), _config(tiles, num_tasks), constants)[0]


def _sizes(num_rows: int, columns: int, depth: int, groups: int) -> dict[str, int]:
    return {"M": num_rows, "N": columns, "K": depth, "G": groups, "GROUPS": max(16, power_of_two(groups))}


def _config(tiles: Tiles | WeightTiles, num_tasks: int) -> Config:
    return Config(num_programs(num_tasks, tiles.programs), tiles.num_warps, tiles.num_stages)


def pad(x: Array, *axes: int) -> Array:
    """`x` with whole 16-byte words along `axes`; a copy only where there are none."""
    missing = [round_up(size, _WORD) - size if axis in axes else 0 for axis, size in enumerate(x.shape)]
    return jnp.pad(x, [(0, more) for more in missing]) if any(missing) else x
