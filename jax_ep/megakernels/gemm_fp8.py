"""Launch of the grouped GEMM of FP8 rows and matrices.

Empty arrays, more than 1024 groups and results in float64 stay with the portable loop.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.typing import DTypeLike

from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.kernel import BOUND, Config, Descriptor, Kernel
from jax_ep.core.layout import power_of_two
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.megakernels import capability, gemm_tuning
from jax_ep.megakernels.gemm_tuning import Fp8Tiles
from jax_ep.megakernels.grid import num_programs
from jax_ep.megakernels.launch import launch, make_ready
from jax_ep.types import Array
from jax_ep.xla import fp8

_KERNEL = Kernel("gemm_fp8", "grouped_gemm_fp8")


def refusal(request: Any) -> str | None:
    """Why this kernel cannot serve an FP8 request, or None."""
    return capability.missing_tma("its grouped GEMM in FP8")


def grouped_gemm_fp8(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    lhs_scales: Array,
    rhs_scales: Array,
    *,
    out_dtype: DTypeLike,
    tiles: Fp8Tiles | None = None,
) -> Array:
    """`out[rows of g] = lhs[rows of g] @ rhs[g].T`, zero past the groups; see fp8.py.

    Args:
      lhs: `[M, K]` float8_e4m3fn.
      rhs: `[G, N, K]` float8_e4m3fn.
      group_sizes: `[G]` int32.
      lhs_scales: `[M, K / 128]`.
      rhs_scales: `[G, ceil(N / 128), K / 128]`.
      out_dtype: dtype of the result.
      tiles: of the kernel; None: those for the shape.

    Returns:
      `[M, N]`.
    """
    groups, out_dtype = rhs.shape[0], jnp.dtype(out_dtype)
    has_kernel = groups <= gemm_tuning.MAX_GROUPS and lhs.shape[0] <= BOUND and out_dtype != jnp.float64
    if 0 in (*lhs.shape, *rhs.shape) or not has_kernel:
        operands = (lhs, rhs, group_sizes, lhs_scales, rhs_scales)
        return fp8.grouped_gemm_fp8(*operands, out_dtype=out_dtype)
    tiles = tiles or gemm_tuning.fp8_tiles(lhs.shape[0], groups, out_dtype.itemsize)
    make_ready("grouped_gemm")
    return _gemm(lhs, rhs, group_sizes, lhs_scales, rhs_scales, out_dtype, tiles)


@functools.partial(jax.jit, static_argnums=(5, 6))  # one compilation for eager callers
def _gemm(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    lhs_scales: Array,
    rhs_scales: Array,
    out_dtype: jnp.dtype,
    tiles: Fp8Tiles,
) -> Array:
    operands = vary_alike((lhs, rhs, group_sizes, lhs_scales, rhs_scales))
    return sequential_vmap(functools.partial(_launch, out_dtype=out_dtype, tiles=tiles))(*operands)


def _launch(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    lhs_scales: Array,
    rhs_scales: Array,
    *,
    out_dtype: jnp.dtype,
    tiles: Fp8Tiles,
) -> Array:
    (num_rows, depth), (groups, columns) = lhs.shape, rhs.shape[:2]
    operands = (
        Descriptor(lhs[None], (1, tiles.block_m, GROUP_SIZE)),
        Descriptor(rhs, (1, tiles.block_n, GROUP_SIZE)),
        lhs_scales,
        rhs_scales,
        group_sizes,
    )
    most_tasks = (num_rows // tiles.block_m + groups) * -(-columns // tiles.block_n)
    config = Config(num_programs(most_tasks, tiles.programs), tiles.num_warps, tiles.num_stages)
    constants = constants_of(num_rows, columns, depth, groups, tiles)
    return launch(_KERNEL, operands, (jax.ShapeDtypeStruct((num_rows, columns), out_dtype),), config, constants)[0]


def constants_of(num_rows: int, columns: int, depth: int, groups: int, tiles: Fp8Tiles) -> dict[str, int]:
    """The kernel's `tl.constexpr` parameters."""
    sizes = {"M": num_rows, "N": columns, "K": depth, "G": groups, "GROUPS": max(16, power_of_two(groups))}
    return sizes | {"BM": tiles.block_m, "BN": tiles.block_n, "GROUP_M": tiles.group_m}
