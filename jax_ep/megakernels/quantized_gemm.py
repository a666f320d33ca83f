"""GEMMs with quantized weights."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_matrices import QuantizedWeights
from jax_ep.core.fp8 import split_rows
from jax_ep.core.kernel import Config, Descriptor, Kernel
from jax_ep.core.layout import power_of_two
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.formats import format_of, stored_name
from jax_ep.megakernels import tuned
from jax_ep.megakernels.grouped_gemm import check_gluon, gemm_shape
from jax_ep.megakernels.kernels import gluon_quantized
from jax_ep.megakernels.kernels import quantized_gemm as quantized_gemm_kernels
from jax_ep.megakernels.kernels.gemm_structs import PrepackedGemm, QuantizedGemm, QuantizedTile
from jax_ep.megakernels.launch import (
    Programs,
    int32,
    launch,
    new_counters,
    num_programs,
    thread_registers,
    tile_config,
)
from jax_ep.megakernels.masked import MaskedTiles, num_tiles
from jax_ep.megakernels.requirements import runs_gluon
from jax_ep.types import Array, Tokens

_GROUPED = Kernel(quantized_gemm_kernels.quantized_grouped_gemm)
_MASKED = Kernel(quantized_gemm_kernels.quantized_masked_grouped_gemm)
_GLUON = Kernel(gluon_quantized.prepacked_gemm)
_FEWEST_DENSE_ROWS = 512  # of a group, from which weights of 8 bits are dequantized first: see design/grouped_gemm.md
_GLUON_COLUMNS = gluon_quantized.COLUMNS.value  # of a tile
_DEPTH = 128  # of a block: that of the blocks of FP8, and a multiple of all other groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedTiles(Programs):
    """Tiles of a GEMM with quantized weights."""

    block_m: int  # rows of a tile; below 64, the tile is computed transposed (swap_ab) if rows are quantized, too
    block_n: int = 128  # columns of a tile
    candidates: ClassVar[Mapping[str, tuple[int, ...]]] = {
        **MaskedTiles.candidates,
        "block_n": (64, 128, 256),
        "num_stages": (2, 3, 4, 5),
    }


@dataclasses.dataclass(frozen=True)
class Language:
    """Whether a kernel in Gluon runs, for prepacked weights on GPUs of compute capability 9.0, or one in Triton."""

    gluon: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class GluonTiles:
    """Tiles of 128 columns of the kernel in Gluon; see `Programs`."""

    block_m: int  # rows of a tile
    num_stages: int = 4
    programs: int = 3
    candidates: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (8, 16, 32, 64, 128),
        "num_stages": (2, 3, 4, 6),
        "programs": (1, 2, 3, 4),
    }


def quantized_tiles(rows_of_group: int, activations: str | None = None, *, prepacked: bool = False) -> QuantizedTiles:
    """Return the tiles for groups of about this many rows, which are quantized too, or not."""
    # Room for twice as many, as counts scatter.
    block_m = min(max(16, power_of_two(2 * rows_of_group)), 128)
    if prepacked:
        # Elements are converted once for all rows of a tile, so more rows cost little; accumulators take registers.
        if block_m == 128:
            return QuantizedTiles(block_m=block_m, num_warps=8, programs=1)
        return QuantizedTiles(block_m=block_m, programs=3 if block_m == 16 else 2)
    if activations is not None:
        if block_m < 64:
            return QuantizedTiles(block_m=block_m, block_n=64, num_stages=4)
        return QuantizedTiles(block_m=block_m, num_warps=8, programs=1)
    # Elements are converted again for each tile of rows, by as many warps as have registers.
    if rows_of_group <= 8:
        return QuantizedTiles(block_m=16, programs=3)
    if rows_of_group <= 48:
        return QuantizedTiles(block_m=32, num_stages=4)
    return QuantizedTiles(block_m=128, num_warps=8, programs=1)


def gluon_tiles(rows_of_group: int) -> GluonTiles:
    """Return the tiles of the kernel in Gluon; sums of more rows take the registers of more programs."""
    block_m = min(max(8, power_of_two(2 * rows_of_group)), 64)
    return GluonTiles(block_m=block_m, programs=2 if block_m == 64 else 3)


def quantized_facts(rows_of_group: int, dtype: jnp.dtype, rhs: QuantizedWeights) -> dict[str, Any]:
    """Return the facts by which settings are looked up."""
    groups, depth, columns = rhs.shape
    sizes = {"rows_of_group": rows_of_group, "depth": depth, "columns": columns, "groups": groups}
    return {**sizes, "dtype": dtype, "format": stored_name(rhs)}


def _tuned_tiles(rows_of_group: int, dtype: jnp.dtype, rhs: QuantizedWeights) -> QuantizedTiles:
    default = quantized_tiles(rows_of_group, rhs.activations, prepacked=rhs.is_prepacked)
    return tuned.tiles(default, "quantized_gemm", **quantized_facts(rows_of_group, dtype, rhs))


def tuned_gluon_tiles(rows_of_group: int, dtype: jnp.dtype, rhs: QuantizedWeights) -> GluonTiles | None:
    """Return the tiles of the kernel in Gluon, or None for the one in Triton."""
    default = Language(runs_in_gluon(rhs, dtype))
    facts = quantized_facts(rows_of_group, dtype, rhs)
    if not tuned.tiles(default, "quantized_gemm", **facts).gluon:
        return None
    return tuned.tiles(gluon_tiles(rows_of_group), "quantized_gemm_gluon", **facts)


def dequantizes_first(rows_of_group: int, dtype: jnp.dtype, rhs: QuantizedWeights) -> bool:
    """Return whether a GEMM of 16-bit rows takes less time if its weights are dequantized in memory first."""
    default = rows_of_group >= _FEWEST_DENSE_ROWS and format_of(rhs).bits == 8 and dtype == jnp.bfloat16
    return tuned.setting("quantized_gemm", "dequantize", default, **quantized_facts(rows_of_group, dtype, rhs))


def runs_in_gluon(rhs: QuantizedWeights, dtype: DTypeLike) -> bool:
    """Return whether this GPU runs the kernel in Gluon, and the kernel reads these weights and rows of this dtype."""
    return is_gluon_operand(rhs, dtype) and runs_gluon()


def is_gluon_operand(rhs: QuantizedWeights, dtype: DTypeLike) -> bool:
    """Return whether the kernel in Gluon reads these weights and rows of this dtype."""
    has_scale_per_step = rhs.format == "mxfp4" or format_of(rhs).block_size(rhs) == _DEPTH
    whole_words = rhs.shape[-1] % 4 == 0  # rows of scales, which TMA reads
    return rhs.is_prepacked and dtype == jnp.bfloat16 and has_scale_per_step and whole_words


def sizes_of(num_rows: int, rhs: QuantizedWeights, tiles: QuantizedTiles) -> QuantizedGemm:
    """Return the sizes of the kernels; `num_rows` are those of a block if groups are masked."""
    groups, depth, columns = rhs.shape
    tile = QuantizedTile(tiles.block_m, tiles.block_n, _DEPTH, group_m=8, swap_ab=swaps_ab(rhs, tiles.block_m))
    return QuantizedGemm(*gemm_shape(num_rows, columns, depth, groups), **storage_of(rhs), tma_parts=0, tile=tile)


def swaps_ab(rhs: QuantizedWeights, block_m: int) -> bool:
    """Return whether columns of the weights are the rows of the product, for blocks of this many rows.

    Tensor cores take at least 64 rows of 8 bits; blocks of few rows would leave most of them empty. FP8 weights are
    converted in the registers that tensor cores read, once for all rows of a block. With 16 rows, warp instructions are
    as fast; with 128 rows, the transposed GEMM has too few registers.
    """
    if rhs.activations is not None:
        return block_m < 64
    return rhs.is_prepacked or (rhs.values.dtype == FP8 and block_m in (32, 64))


def storage_of(rhs: QuantizedWeights) -> dict[str, Any]:
    """Return how the kernels find elements and scales, see `QuantizedGemm`."""
    wanted = format_of(rhs)
    sizes = {"values_per_byte": 8 // wanted.bits, "block_size": wanted.block_size(rhs), "prepacked": rhs.is_prepacked}
    return {"decoder": wanted.decoder, **sizes}


@functools.partial(jax.jit, static_argnames="out_dtype")
def grouped_gemm(rows: Tokens, rhs: QuantizedWeights, group_sizes: Array, *, out_dtype: DTypeLike) -> Array:
    """Multiply as in xla/quantized_gemm.py."""
    lhs, row_scales = split_rows(rows)
    num_rows, (groups, _, columns) = lhs.shape[0], rhs.shape
    rows_of_group = -(-num_rows // groups)
    if gluon := tuned_gluon_tiles(rows_of_group, lhs.dtype, rhs):
        return _by_gluon(lhs, rhs, group_sizes, gluon, out_dtype)
    tiles = _tuned_tiles(rows_of_group, lhs.dtype, rhs)
    most_tasks = (num_rows // tiles.block_m + groups) * -(-columns // tiles.block_n)
    result = jax.ShapeDtypeStruct((num_rows, columns), out_dtype)
    return _launch(_GROUPED, (lhs[None], rhs, group_sizes, row_scales), result, tiles, most_tasks)


@functools.partial(jax.jit, static_argnames=("out_dtype", "expected_rows"))
def masked_grouped_gemm(
    rows: Tokens, rhs: QuantizedWeights, group_sizes: Array, *, out_dtype: DTypeLike, expected_rows: int | None
) -> Array:
    """Multiply as in xla/quantized_gemm.py; rows past the sizes are undefined."""
    lhs, row_scales = split_rows(rows)
    if gluon := tuned_gluon_tiles(_rows_of_masked(lhs, expected_rows), lhs.dtype, rhs):
        return _by_gluon(lhs, rhs, group_sizes, gluon, out_dtype)
    tiles = tiles_of_masked(lhs, rhs, expected_rows)
    shape = (*lhs.shape[:2], rhs.shape[2])
    result = jax.ShapeDtypeStruct(shape, out_dtype)
    return _launch(_MASKED, (lhs, rhs, group_sizes, row_scales), result, tiles, num_tiles(shape, tiles))


def tiles_of_masked(lhs: Array, rhs: QuantizedWeights, expected_rows: int | None) -> QuantizedTiles:
    """Return the tiles for masked groups of rows."""
    return _tuned_tiles(_rows_of_masked(lhs, expected_rows), lhs.dtype, rhs)


def _rows_of_masked(lhs: Array, expected_rows: int | None) -> int:
    return min(lhs.shape[1], expected_rows or 32)


def _by_gluon(lhs: Array, rhs: QuantizedWeights, group_sizes: Array, tiles: GluonTiles, out_dtype: DTypeLike) -> Array:
    """Multiply rows `[M, K]` of groups in order, or `[G, M, K]` of masked groups."""
    check_gluon("quantized_gemm")
    if not is_gluon_operand(rhs, lhs.dtype):
        raise NotImplementedError(
            f"grouped_gemm: gluon=True with {stored_name(rhs)} weights of N={rhs.shape[-1]} and"
            f" block_size={format_of(rhs).block_size(rhs)} and {lhs.dtype} rows, expected prepacked MXFP4, or prepacked"
            f" INT4 with block_size={_DEPTH}, N a multiple of 4, and bfloat16 rows; leave gluon out of the settings of"
            " quantized_gemm."
        )
    lhs, rhs, group_sizes = vary_alike((lhs, rhs, group_sizes))
    sizes = gluon_sizes(lhs.shape, rhs, tiles)
    operands = (
        Descriptor(lhs.reshape(-1, lhs.shape[-1]), (sizes.tile_m, _DEPTH // 2)),
        Descriptor(rhs.values.reshape(-1, rhs.values.shape[-1]), (_GLUON_COLUMNS, _DEPTH // 8)),
        Descriptor(cast(Array, rhs.scales).reshape(-1, sizes.N), (1, _GLUON_COLUMNS)),
        group_sizes,
        new_counters(1, lhs),
    )
    results = jax.ShapeDtypeStruct((*lhs.shape[:-1], sizes.N), out_dtype), *int32((1,))
    most_tiles = (math.prod(lhs.shape[:-1]) // sizes.tile_m + sizes.num_groups + 1) * sizes.tiles_n
    config = Config(num_programs(most_tiles, tiles.programs), 4, max_registers=gluon_registers(tiles.programs))
    return launch(_GLUON, operands, results, config, {"S": sizes}, written={-1: -1})[0]


def gluon_registers(programs: int, consumers: int = 1) -> int:
    """Return the registers of a thread at the start, with a warpgroup per consumer and one that copies."""
    return min(255, thread_registers(programs, 4 * (consumers + 1), multiple=8))


def gluon_sizes(shape: tuple[int, ...], rhs: QuantizedWeights, tiles: GluonTiles) -> PrepackedGemm:
    """Return the sizes of the kernel in Gluon for rows of this shape."""
    groups, depth, columns = rhs.shape
    return PrepackedGemm(
        M=shape[-2],
        N=columns,
        steps=-(-depth // _DEPTH),
        num_groups=groups,
        lanes=max(32, power_of_two(groups + 1)),
        tile_m=tiles.block_m,
        tiles_n=-(-columns // _GLUON_COLUMNS),
        stages=tiles.num_stages,
        masked=len(shape) == 3,
        decoder=format_of(rhs).decoder,
    )


def blocks_of(lhs: Array, rhs: QuantizedWeights, tiles: QuantizedTiles) -> tuple[Descriptor, Descriptor]:
    """Describe rows and weights in the blocks that the kernels read."""
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
    """Launch with `[1, M, K]` rows, or `[G, M, K]` if groups are masked, weights, sizes, and scales of rows or None."""
    lhs, rhs, group_sizes, row_scales = vary_alike(arrays)
    operands = (*blocks_of(lhs, rhs, tiles), rhs.scales, group_sizes, row_scales)
    constants = {"S": sizes_of(lhs.shape[1], rhs, tiles)}
    return launch(kernel, operands, (result,), tile_config(tiles, most_tasks), constants)[0]
