"""Serving path between dispatch and combine: masked grouped GEMM, and gated activation."""

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
from jax_ep.core.fp8 import GROUP_SIZE, split_rows
from jax_ep.core.kernel import Argument, Config, Descriptor, Kernel
from jax_ep.core.layout import power_of_two
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.megakernels import tuned
from jax_ep.megakernels.activation import kind_of
from jax_ep.megakernels.grouped_gemm import gemm_shape
from jax_ep.megakernels.kernels import masked as masked_kernels
from jax_ep.megakernels.kernels.gemm_structs import MaskedActivation, MaskedActivationTile, MaskedGemm, MaskedTile
from jax_ep.megakernels.launch import Programs, launch, num_programs, thread_registers, tile_config
from jax_ep.types import Array, Experts, Tokens

_GEMM = Kernel(masked_kernels.masked_grouped_gemm)
_ACTIVATION = Kernel(masked_kernels.masked_gated_activation)
_SHARED_BYTES = 226 << 10  # of a multiprocessor
ACTIVATION_PROGRAMS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedTiles(Programs):
    """Tiles of a masked GEMM."""

    # Rows of a tile; below 64 the tile is computed transposed (swap_ab), so each warp has columns of the weights.
    block_m: int
    block_n: int = 128  # columns of a tile, at most 128 in FP8
    block_k: int = 128  # depth of one step, 128 in FP8: 128 bytes of a row
    candidates: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (16, 32, 64, 128),
        "block_n": (64, 128),
        "num_stages": (2, 3, 4, 5, 6),
        "programs": (1, 2, 3),
        "num_warps": (4, 8),
    }


def masked_tiles(max_rows: int, expected_rows: int | None, itemsize: int, out_itemsize: int) -> MaskedTiles:
    """Return the tiles for groups of up to `max_rows` rows of elements of `itemsize` bytes.

    Counts scatter, and a group with one row more than a tile takes twice as long. So a tile has room for twice the
    expected rows; extra rows cost little while most of what is read is weights.
    """
    device = jax.local_devices()[0]
    # For Blackwell, Triton 3.9 spills hundreds of registers with swap_ab.
    fewest = 16 if device.platform == "cpu" or float(device.compute_capability) < 10.0 else 64
    wanted = 64 if expected_rows is None else 2 * expected_rows
    block_m = min(max(fewest, power_of_two(min(wanted, max_rows))), 128)
    tiles = MaskedTiles(block_m=block_m, block_k=128 // itemsize)
    if block_m == 128:  # sums of 128 rows, in FP8 next to those of the tensor cores, take the registers of two programs
        tiles = dataclasses.replace(tiles, num_warps=8, programs=1)
    stored = block_m * tiles.block_n * out_itemsize  # on its way to memory, next to what arrives
    stages = (_SHARED_BYTES // tiles.programs - stored) // ((block_m + tiles.block_n) * 128)
    return dataclasses.replace(tiles, num_stages=min(stages, 6))


def masked_gemm(
    operation: str,
    rows: Tokens,
    rhs: QuantizedWeights,
    group_sizes: Array,
    out_dtype: DTypeLike,
    expected_rows: int | None,
) -> tuple[MaskedTiles, MaskedGemm, tuple[Argument, ...]]:
    """Return tiles, sizes and operands of a kernel with a masked GEMM; missing scales are not read."""
    lhs, lhs_scales = split_rows(rows)
    (groups, max_rows, depth), columns = lhs.shape, rhs.shape[2]
    facts = {"groups": groups, "num_rows": max_rows, "depth": depth, "columns": columns}
    dtypes = {"dtype": lhs.dtype, "out_dtype": jnp.dtype(out_dtype)}
    default = masked_tiles(max_rows, expected_rows, lhs.dtype.itemsize, dtypes["out_dtype"].itemsize)
    tiles = tuned.tiles(default, operation, **facts, expected_rows=expected_rows or 0, **dtypes)
    operands: tuple[Argument, ...] = (
        Descriptor(lhs, (1, tiles.block_m, tiles.block_k)),
        Descriptor(rhs.values, (1, tiles.block_n, tiles.block_k)),
        *(group_sizes if scales is None else scales for scales in (lhs_scales, rhs.scales)),
        group_sizes,
    )
    return tiles, gemm_sizes(groups, max_rows, columns, depth, lhs_scales is not None, tiles), operands


def gemm_sizes(groups: int, rows: int, columns: int, depth: int, fp8: bool, tiles: MaskedTiles) -> MaskedGemm:
    """Return the sizes of a masked GEMM."""
    tile = MaskedTile(tiles.block_m, tiles.block_n, tiles.block_k, swap_ab=tiles.block_m < 64)
    return MaskedGemm(*gemm_shape(rows, columns, depth, groups), fp8, tile)


def activation_config(num_tasks: int) -> Config:
    """Return the config of the activation: enough programs per multiprocessor to hide what they wait for."""
    registers = thread_registers(ACTIVATION_PROGRAMS, 4, multiple=8)
    return Config(num_programs(num_tasks, ACTIVATION_PROGRAMS), num_warps=4, max_registers=registers)


def activation_sizes(groups: int, rows: int, inner: int, quantize: bool) -> MaskedActivation:
    """Return the sizes of the activation; `inner` is the number of columns of the result."""
    columns = min(512, max(128 if quantize else 16, power_of_two(inner)))
    tile = MaskedActivationTile(max(1, 2048 // columns), columns)
    return MaskedActivation(rows, inner, groups, max(16, power_of_two(groups)), quantize, tile)


def num_tiles(shape: tuple[int, ...], tile: Any) -> int:
    """Return the number of tiles of `[groups, rows, columns]` if all rows are in use."""
    groups, rows, columns = shape
    return groups * -(-rows // tile.block_m) * -(-columns // tile.block_n)


@functools.partial(jax.jit, static_argnames=("out_dtype", "expected_rows"))
def masked_grouped_gemm(
    rows: Tokens, rhs: QuantizedWeights, group_sizes: Array, *, out_dtype: DTypeLike, expected_rows: int | None
) -> Array:
    """Multiply rows by weights whose values are operands of tensor cores; rows past the sizes are undefined.

    See xla/quantized_gemm.py. `expected_rows` is the expected number of rows of a group, which determines tiles.
    """
    lhs, _ = split_rows(rows)
    shape = (*lhs.shape[:2], rhs.shape[2])
    if 0 in (*lhs.shape, *rhs.shape):
        return jnp.zeros_like(lhs, dtype=out_dtype, shape=shape)
    arrays = vary_alike((rows, rhs, group_sizes))
    tiles, sizes, operands = masked_gemm("masked_grouped_gemm", *arrays, out_dtype, expected_rows)
    config, result = tile_config(tiles, num_tiles(shape, tiles)), jax.ShapeDtypeStruct(shape, out_dtype)
    return launch(_GEMM, operands, (result,), config, {"S": sizes})[0]


@functools.partial(jax.jit, static_argnums=0, static_argnames="quantize")
def masked_gated_activation(
    experts: Experts, hidden: Array, group_sizes: Array, bias: Array | None, *, quantize: bool
) -> tuple[Array, Array | None]:
    """Activate `[G, M, 2I]` (`[G, M, I]` without gates) to `[G, M, I]`; `quantize`: also scales `[G, M, I / 128]`.

    `bias` is `[G, 2I]`, or as wide as `hidden`; or None.
    """
    groups, rows, inner = shape = *hidden.shape[:2], hidden.shape[2] // (2 if experts.gated else 1)
    results = (
        jax.ShapeDtypeStruct(shape, FP8 if quantize else hidden.dtype),
        jax.ShapeDtypeStruct((groups, rows, inner // GROUP_SIZE) if quantize else (1,), jnp.float32),
    )
    if 0 in hidden.shape:
        values, scales = (jnp.zeros_like(hidden, dtype=x.dtype, shape=x.shape) for x in results)
        return values, scales if quantize else None
    sizes = activation_sizes(groups, rows, inner, quantize)
    config, operands = activation_config(num_tiles(shape, sizes.tile)), vary_alike((hidden, group_sizes, bias))
    values, scales = launch(_ACTIVATION, operands, results, config, {"S": sizes, "KIND": kind_of(experts)})
    return values, scales if quantize else None
