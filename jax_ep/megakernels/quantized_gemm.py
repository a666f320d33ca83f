"""Launches of products with quantised matrices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_matrices import QuantizedWeights
from jax_ep.core.kernel import Argument, Config, Constants, Descriptor, Kernel
from jax_ep.core.layout import power_of_two
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.formats import format_of, stored_name
from jax_ep.megakernels import tuned
from jax_ep.megakernels.grid import num_programs
from jax_ep.megakernels.grouped_gemm import common_sizes
from jax_ep.megakernels.kernels import quantized_gemm as quantized_gemm_kernels
from jax_ep.megakernels.kernels.gemm_structs import QuantizedGemm, QuantizedTile
from jax_ep.megakernels.launch import launch
from jax_ep.types import Array

_GROUPED = Kernel(quantized_gemm_kernels.quantized_grouped_gemm)
_MASKED = Kernel(quantized_gemm_kernels.quantized_masked_grouped_gemm)
_DEPTH = 128  # of a block: that of the blocks of FP8, and a multiple of all other groups


@dataclasses.dataclass(frozen=True)
class QuantizedTiles:
    """How a product covers its rows.

    Attributes:
      block_m: rows of a tile; below 64, products of rows that are quantised are turned.
      block_n: columns of a tile.
      num_warps: of a program.
      num_stages: blocks in flight, the one in use included.
      programs: per multiprocessor.
      candidates: values that `jax-ep tune` searches, the simplest first.
    """

    block_m: int
    block_n: int = 128
    num_warps: int = 4
    num_stages: int = 3
    programs: int = 2
    candidates: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (16, 32, 64, 128),
        "block_n": (64, 128, 256),
        "num_stages": (2, 3, 4, 5),
        "programs": (1, 2, 3),
        "num_warps": (4, 8),
    }


def quantized_tiles(rows_of_group: int, activations: str | None = None, *, prepacked: bool = False) -> QuantizedTiles:
    """Tiles for groups of about so many rows, which are quantised, too, or not."""
    # Room for twice as many, as counts scatter.
    block_m = min(max(16, power_of_two(2 * rows_of_group)), 128)
    if prepacked:
        # An element is made once for all rows of a tile, so more of them cost little; accumulators take registers.
        if block_m == 128:
            return QuantizedTiles(block_m, num_warps=8, programs=1)
        return QuantizedTiles(block_m, programs=3 if block_m == 16 else 2)
    if activations is not None:
        if block_m < 64:
            return QuantizedTiles(block_m, block_n=64, num_stages=4)
        return QuantizedTiles(block_m, num_warps=8, programs=1)
    # Elements are converted anew for each tile of rows, but by as many warps as registers are there for.
    if rows_of_group <= 8:
        return QuantizedTiles(16, programs=3)
    if rows_of_group <= 48:
        return QuantizedTiles(32, num_stages=4)
    return QuantizedTiles(128, num_warps=8, programs=1)


def _tuned_tiles(rows_of_group: int, dtype: jnp.dtype, rhs: QuantizedWeights) -> QuantizedTiles:
    groups, depth, columns = rhs.shape
    sizes = {"rows_of_group": rows_of_group, "depth": depth, "columns": columns, "groups": groups}
    default = quantized_tiles(rows_of_group, rhs.activations, prepacked=rhs.is_prepacked)
    return tuned.tiles(default, "quantized_gemm", **sizes, dtype=dtype, format=stored_name(rhs))


def sizes_of(num_rows: int, rhs: QuantizedWeights, tiles: QuantizedTiles) -> QuantizedGemm:
    """What the kernels are compiled for; `num_rows` are those of a block where groups are masked."""
    groups, depth, columns = rhs.shape
    sizes: dict[str, Any] = {**common_sizes(num_rows, columns, depth, groups), **storage_of(rhs)}
    return QuantizedGemm(
        **sizes,
        tma_parts=0,
        tile=QuantizedTile(tiles.block_m, tiles.block_n, _DEPTH, group_m=8, swap_ab=is_turned(rhs, tiles.block_m)),
    )


def is_turned(rhs: QuantizedWeights, block_m: int) -> bool:
    """Whether columns of the matrix are the rows of products of blocks of so many rows.

    Tensor cores take 64 rows of 8 bits at the least, of which a few would leave most empty. FP8 is converted where they
    take it from, once for all rows of a block: of 16 it is as fast by instructions of a warp, and blocks of 128 leave
    turned products no registers.
    """
    if rhs.activations is not None:
        return block_m < 64
    return rhs.is_prepacked or (rhs.values.dtype == FP8 and block_m in (32, 64))


def storage_of(rhs: QuantizedWeights) -> dict[str, Any]:
    """How the kernels find elements and scales, see `QuantizedGemm`."""
    wanted = format_of(rhs)
    sizes = {"values_per_byte": 8 // wanted.bits, "block_size": wanted.block_size(rhs), "prepacked": rhs.is_prepacked}
    return {"decoder": wanted.decoder, **sizes}


@functools.partial(jax.jit, static_argnames=("out_dtype", "tiles"))
def grouped_gemm(
    lhs: Array,
    rhs: QuantizedWeights,
    group_sizes: Array,
    row_scales: Array | None,
    *,
    out_dtype: DTypeLike,
    tiles: QuantizedTiles | None = None,
) -> Array:
    """See xla/quantized_gemm.py. `tiles` are those of the kernel; None: those for the shape."""
    num_rows, (groups, _, columns) = lhs.shape[0], rhs.shape
    tiles = tiles or _tuned_tiles(-(-num_rows // groups), lhs.dtype, rhs)
    most_tasks = (num_rows // tiles.block_m + groups) * -(-columns // tiles.block_n)
    result = jax.ShapeDtypeStruct((num_rows, columns), out_dtype)
    return _launch(_GROUPED, (lhs[None], rhs, group_sizes, row_scales), result, tiles, most_tasks)


@functools.partial(jax.jit, static_argnames=("out_dtype", "expected_rows", "tiles"))
def masked_grouped_gemm(
    lhs: Array,
    rhs: QuantizedWeights,
    group_sizes: Array,
    row_scales: Array | None,
    *,
    out_dtype: DTypeLike,
    expected_rows: int | None,
    tiles: QuantizedTiles | None = None,
) -> Array:
    """See xla/quantized_gemm.py; rows past the sizes hold anything here. `tiles` as for `grouped_gemm`."""
    groups, most_rows, _ = lhs.shape
    tiles = tiles or masked_tiles(most_rows, expected_rows, lhs.dtype, rhs)
    most_tasks = groups * -(-most_rows // tiles.block_m) * -(-rhs.shape[2] // tiles.block_n)
    result = jax.ShapeDtypeStruct((groups, most_rows, rhs.shape[2]), out_dtype)
    return _launch(_MASKED, (lhs, rhs, group_sizes, row_scales), result, tiles, most_tasks)


def masked_tiles(most_rows: int, expected_rows: int | None, dtype: jnp.dtype, rhs: QuantizedWeights) -> QuantizedTiles:
    """Tiles for groups of up to `most_rows` rows of `dtype`."""
    return _tuned_tiles(min(most_rows, expected_rows or 32), dtype, rhs)


def blocks_of(lhs: Array, rhs: QuantizedWeights, tiles: QuantizedTiles) -> tuple[Descriptor, Descriptor]:
    """Rows and matrices as the kernels read them."""
    columns = (1, tiles.block_n, _DEPTH * rhs.values.shape[-1] // rhs.shape[-2])
    rows = (1, tiles.block_m, _DEPTH // 2 if rhs.is_prepacked else _DEPTH)
    return Descriptor(lhs, rows), Descriptor(rhs.values, columns)


def _launch(
    kernel: Kernel,
    arrays: tuple[Array, QuantizedWeights, Array, Array | None],
    result: jax.ShapeDtypeStruct,
    tiles: QuantizedTiles,
    most_tasks: int,
) -> Array:
    """The arrays: `[1, M, K]` rows, or `[G, M, K]` where groups are masked, matrices, sizes, scales of rows or None."""
    lhs, rhs, group_sizes, row_scales = vary_alike(arrays)
    sizes = sizes_of(lhs.shape[1], rhs, tiles)
    operands: tuple[Argument, ...] = (*blocks_of(lhs, rhs, tiles), cast(Array, rhs.scales), group_sizes)
    operands += () if row_scales is None else (row_scales,)
    constants: Constants = {"S": sizes} | ({"row_scales_ptr": None} if row_scales is None else {})
    config = Config(num_programs(most_tasks, tiles.programs), tiles.num_warps, tiles.num_stages)
    return launch(kernel, operands, (result,), config, constants)[0]
