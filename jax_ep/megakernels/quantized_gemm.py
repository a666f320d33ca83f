"""GEMMs with quantized weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_matrices import QuantizedWeights
from jax_ep.core.fp8 import split_rows
from jax_ep.core.kernel import Descriptor, Kernel
from jax_ep.core.layout import power_of_two
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.formats import format_of, stored_name
from jax_ep.megakernels import tuned
from jax_ep.megakernels.grouped_gemm import gemm_shape
from jax_ep.megakernels.kernels import quantized_gemm as quantized_gemm_kernels
from jax_ep.megakernels.kernels.gemm_structs import QuantizedGemm, QuantizedTile
from jax_ep.megakernels.launch import Programs, launch, tile_config
from jax_ep.megakernels.masked import MaskedTiles, num_tiles
from jax_ep.types import Array, Tokens

_GROUPED = Kernel(quantized_gemm_kernels.quantized_grouped_gemm)
_MASKED = Kernel(quantized_gemm_kernels.quantized_masked_grouped_gemm)
_DEPTH = 128  # of a block: that of the blocks of FP8, and a multiple of all other groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedTiles(Programs):
    """Tiles of a GEMM with quantized weights.

    Attributes:
      block_m: rows of a tile; below 64, the tile is computed transposed (swap_ab) if rows are quantized, too.
      block_n: columns of a tile.
    """

    block_m: int
    block_n: int = 128
    candidates: ClassVar[Mapping[str, tuple[int, ...]]] = {
        **MaskedTiles.candidates,
        "block_n": (64, 128, 256),
        "num_stages": (2, 3, 4, 5),
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


def _tuned_tiles(rows_of_group: int, dtype: jnp.dtype, rhs: QuantizedWeights) -> QuantizedTiles:
    groups, depth, columns = rhs.shape
    sizes = {"rows_of_group": rows_of_group, "depth": depth, "columns": columns, "groups": groups}
    default = quantized_tiles(rows_of_group, rhs.activations, prepacked=rhs.is_prepacked)
    return tuned.tiles(default, "quantized_gemm", **sizes, dtype=dtype, format=stored_name(rhs))


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
    tiles = _tuned_tiles(-(-num_rows // groups), lhs.dtype, rhs)
    most_tasks = (num_rows // tiles.block_m + groups) * -(-columns // tiles.block_n)
    result = jax.ShapeDtypeStruct((num_rows, columns), out_dtype)
    return _launch(_GROUPED, (lhs[None], rhs, group_sizes, row_scales), result, tiles, most_tasks)


@functools.partial(jax.jit, static_argnames=("out_dtype", "expected_rows"))
def masked_grouped_gemm(
    rows: Tokens, rhs: QuantizedWeights, group_sizes: Array, *, out_dtype: DTypeLike, expected_rows: int | None
) -> Array:
    """Multiply as in xla/quantized_gemm.py; rows past the sizes are undefined."""
    lhs, row_scales = split_rows(rows)
    tiles = tiles_of_masked(lhs, rhs, expected_rows)
    shape = (*lhs.shape[:2], rhs.shape[2])
    result = jax.ShapeDtypeStruct(shape, out_dtype)
    return _launch(_MASKED, (lhs, rhs, group_sizes, row_scales), result, tiles, num_tiles(shape, tiles))


def tiles_of_masked(lhs: Array, rhs: QuantizedWeights, expected_rows: int | None) -> QuantizedTiles:
    """Return the tiles for masked groups of rows."""
    return _tuned_tiles(min(lhs.shape[1], expected_rows or 32), lhs.dtype, rhs)


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
