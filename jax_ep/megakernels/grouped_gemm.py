"""Grouped GEMM, its weight gradient, and the product of FP8 rows and matrices, on the tensor cores.

requirements.py says which operands the kernels take.

Descriptors need rows of whole 16-byte words. Other arrays are padded with zeros and the result is cut, which costs
copies; the widths of models are multiples of 8.

Tiles are by shape and GPU; benchmarks/grouped_gemm.py --parts sweep compares them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep.core.bias import Bias
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.kernel import Config, Constants, Descriptor, Kernel
from jax_ep.core.layout import power_of_two, round_up
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.megakernels import tuned
from jax_ep.megakernels.grid import num_programs
from jax_ep.megakernels.kernels import gemm_structs
from jax_ep.megakernels.kernels import grouped_gemm as grouped_gemm_kernels
from jax_ep.megakernels.launch import launch, stores_by_descriptor
from jax_ep.types import Array

_FORWARD = Kernel(grouped_gemm_kernels.grouped_gemm)
_FP8 = Kernel(grouped_gemm_kernels.grouped_gemm_fp8)
_WEIGHT_GRADIENT = Kernel(grouped_gemm_kernels.weight_gradient)
_FP8_WEIGHT_GRADIENT = Kernel(grouped_gemm_kernels.weight_gradient_fp8)
_WORD = 8  # elements of a 16-byte word


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Programs:
    """How programs work on tiles.

    Attributes:
      group_m: row tiles that share the columns of a matrix while they are in the L2 cache.
      num_warps: of a program.
      num_stages: blocks in flight, the one in use included.
      programs: per multiprocessor.
      candidates: values that `jax-ep tune` searches, the simplest first.
    """

    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 4
    programs: int = 1
    candidates: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "programs": (1, 2),
        "num_warps": (4, 8),
        "group_m": (4, 8, 16),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StoredTiles(_Programs):
    """How tiles are stored.

    Attributes:
      tma_store: store by TMA, while the next tile is computed.
      store_parts: 1, 2 or 4 parts of a tile's columns that TMA stores one after another: each takes less shared memory.
    """

    tma_store: bool = False
    store_parts: int = 1
    candidates: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (64, 128, 256),
        "block_n": (64, 128, 256),
        "num_stages": (2, 3, 4, 5),
        "tma_store": (False, True),
        "store_parts": (1, 2, 4),
        **_Programs.candidates,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles(_StoredTiles):
    """How a grouped GEMM covers its result: rows and columns of a tile, and depth of one step."""

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    candidates: ClassVar[Mapping[str, tuple[int, ...]]] = {**_StoredTiles.candidates, "block_k": (32, 64, 128)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightTiles(_StoredTiles):
    """How the weight gradient covers its result: rows and columns of a tile, and rows of the operands in one step."""

    block_m: int = 128
    block_n: int = 256
    block_r: int = 64
    candidates: ClassVar[Mapping[str, tuple[int, ...]]] = {**_StoredTiles.candidates, "block_r": (32, 64, 128)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Tiles(_Programs):
    """How a grouped GEMM in FP8 covers its result, in steps of the 128 elements that share a scale.

    More than 128 by 128 elements take registers that a program of 8 warps has not: each has a sum, and the product of
    one step. At most 128 columns, which share a scale.
    """

    block_m: int = 128
    block_n: int = 128
    num_stages: int = 5
    candidates: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (64, 128),
        "block_n": (64, 128),
        "num_stages": (2, 3, 4, 5, 6),
        **_Programs.candidates,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8WeightTiles(_Programs):
    """How the weight gradient of FP8 columns covers its result, in steps of the 128 places that share a scale.

    As many elements as of `Fp8Tiles`, for the same reason.
    """

    block_m: int = 128
    block_n: int = 128
    candidates: ClassVar[Mapping[str, tuple[int, ...]]] = Fp8Tiles.candidates


def forward_tiles(num_rows: int, columns: int, groups: int, out_itemsize: int) -> Tiles:
    """Tiles for `[num_rows, .]` times `[groups, ., columns]`."""
    if jax.default_backend() == "cpu":  # several steps, rows and columns at the sizes of tests
        return Tiles(block_m=64, block_n=32, block_k=16, num_stages=2)
    if num_rows <= 64 * groups or columns <= 128:
        # Few rows: the matrices are read once, whatever the tiles, and narrow ones keep more programs busy.
        return Tiles(block_m=64, block_n=128, num_warps=4, programs=2)
    if out_itemsize > 2:
        # Tiles of float32 take twice the memory while they are stored, in the flat loop beside its buffers.
        return Tiles(block_n=128)
    return Tiles(num_stages=3, tma_store=True) if stores_by_descriptor() else Tiles()


def fp8_tiles(num_rows: int, groups: int, out_itemsize: int) -> Fp8Tiles:
    """Tiles for FP8 rows `[num_rows, .]` times `groups` matrices."""
    if jax.default_backend() == "cpu":
        return Fp8Tiles(block_m=32, block_n=64, group_m=2, num_stages=2)
    if num_rows <= 64 * groups:
        return Fp8Tiles(block_m=64, num_warps=4, num_stages=3 if out_itemsize > 2 else 4, programs=2)
    return Fp8Tiles()


def fp8_weight_tiles() -> Fp8WeightTiles:
    """Tiles for the weight gradient of FP8 columns."""
    if jax.default_backend() == "cpu":
        return Fp8WeightTiles(block_m=32, block_n=64, group_m=2, num_stages=2)
    return Fp8WeightTiles()


def weight_tiles(out_itemsize: int) -> WeightTiles:
    """Tiles for matrices whose elements have so many bytes."""
    if jax.default_backend() == "cpu":
        return WeightTiles(block_m=32, block_n=32, block_r=16, num_stages=2)
    if out_itemsize <= 2:
        # Two programs of narrow tiles: while one stores its tile, the other multiplies.
        narrow = WeightTiles(block_n=128, num_warps=4, num_stages=3, programs=2)
        return dataclasses.replace(narrow, tma_store=True, store_parts=2) if stores_by_descriptor() else narrow
    return WeightTiles(block_n=128)


@functools.partial(jax.jit, static_argnames=("transpose_rhs", "out_dtype", "tiles"))
def grouped_gemm(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    transpose_rhs: bool,
    out_dtype: DTypeLike,
    bias: Bias | None = None,
    tiles: Tiles | None = None,
) -> Array:
    """See xla/grouped_gemm.py. `tiles` are those of the kernel; None: those for the shape."""
    wanted, groups = rhs.shape[1 if transpose_rhs else 2], rhs.shape[0]
    facts = _facts(lhs.shape, wanted, groups, lhs.dtype, out_dtype)
    default = forward_tiles(lhs.shape[0], wanted, groups, jnp.dtype(out_dtype).itemsize)
    tiles = tiles or tuned.tiles(default, "grouped_gemm", **facts)
    lhs, rhs, group_sizes, bias = vary_alike((pad(lhs, 1), pad(rhs, 1, 2), group_sizes, bias))
    (num_rows, depth), columns = lhs.shape, rhs.shape[1 if transpose_rhs else 2]
    inner, outer = (tiles.block_n, tiles.block_k) if transpose_rhs else (tiles.block_k, tiles.block_n)
    sizes = gemm_structs.GroupedGemm(
        **common_sizes(num_rows, columns, depth, groups),
        transposed=transpose_rhs,
        tma_parts=tiles.store_parts if tiles.tma_store else 0,
        tile=gemm_structs.GemmTile(tiles.block_m, tiles.block_n, tiles.block_k, tiles.group_m),
    )
    most_tasks = (num_rows // tiles.block_m + groups) * -(-columns // tiles.block_n)
    result: jax.ShapeDtypeStruct | Descriptor = jax.ShapeDtypeStruct((num_rows, columns), out_dtype)
    if tiles.tma_store:
        result = Descriptor(result, (tiles.block_m, tiles.block_n // tiles.store_parts), bounded=True)
    operands = (Descriptor(lhs, (tiles.block_m, tiles.block_k)), Descriptor(rhs, (1, inner, outer)), group_sizes)
    added, constants = bias_arguments(bias, num_rows)
    constants |= {"S": sizes}
    return launch(_FORWARD, operands + added, (result,), _config(tiles, most_tasks), constants)[0][:, :wanted]


def bias_arguments(bias: Bias | None, num_rows: int) -> tuple[tuple[gemm_structs.Bias, ...], Constants]:
    """The operand that kernels take as `bias`, with values for each column that they compute; or the constant."""
    if bias is None:
        return (), {"bias": None}
    scales = bias.scales
    if scales is None:
        scales = jnp.ones_like(bias.values, dtype=jnp.float32, shape=(num_rows,))
    return (gemm_structs.Bias(pad(bias.values, 1), scales.astype(jnp.float32)),), {}


@functools.partial(jax.jit, static_argnames=("out_dtype", "tiles"))
def weight_gradient(
    lhs: Array, rhs: Array, group_sizes: Array, *, out_dtype: DTypeLike, tiles: WeightTiles | None = None
) -> Array:
    """See xla/grouped_gemm.py; `tiles` as for `grouped_gemm`."""
    wanted = lhs.shape[1], rhs.shape[1]
    facts = _facts(lhs.shape, wanted[1], group_sizes.shape[0], lhs.dtype, out_dtype)
    tiles = tiles or tuned.tiles(weight_tiles(jnp.dtype(out_dtype).itemsize), "weight_gradient", **facts)
    lhs, rhs, group_sizes = vary_alike((pad(lhs, 1), pad(rhs, 1), group_sizes))
    num_rows, rows, columns, groups = *lhs.shape, rhs.shape[1], group_sizes.shape[0]
    left = Descriptor(lhs, (tiles.block_r, tiles.block_m), bounded=True)
    right = Descriptor(rhs, (tiles.block_r, tiles.block_n), bounded=True)
    sizes = gemm_structs.WeightGradient(
        **common_sizes(num_rows, columns, rows, groups),
        store_parts=tiles.store_parts,
        tma_store=tiles.tma_store,
        tile=gemm_structs.WeightGradientTile(
            tiles.block_m, tiles.block_n, tiles.block_r, tiles.group_m, num_stages=None
        ),
    )
    num_tasks = groups * -(-rows // tiles.block_m) * -(-columns // tiles.block_n)
    result: jax.ShapeDtypeStruct | Descriptor = jax.ShapeDtypeStruct((groups, rows, columns), out_dtype)
    if tiles.tma_store:
        result = Descriptor(result, (1, tiles.block_m, tiles.block_n // tiles.store_parts))
    operands, config = (left, right, group_sizes), _config(tiles, num_tasks)
    return launch(_WEIGHT_GRADIENT, operands, (result,), config, {"S": sizes})[0][:, : wanted[0], : wanted[1]]


@functools.partial(jax.jit, static_argnames=("out_dtype", "tiles"))
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
    """See xla/grouped_gemm.py; `tiles` as for `grouped_gemm`."""
    operands = vary_alike((lhs, rhs, group_sizes, lhs_scales, rhs_scales))
    lhs, rhs, group_sizes, lhs_scales, rhs_scales = operands
    (num_rows, depth), (groups, columns), out_dtype = lhs.shape, rhs.shape[:2], jnp.dtype(out_dtype)
    facts = _facts(lhs.shape, columns, groups, lhs.dtype, out_dtype)
    tiles = tiles or tuned.tiles(fp8_tiles(num_rows, groups, out_dtype.itemsize), "grouped_gemm_fp8", **facts)
    left = Descriptor(lhs[None], (1, tiles.block_m, GROUP_SIZE))
    right = Descriptor(rhs, (1, tiles.block_n, GROUP_SIZE))
    most_tasks = (num_rows // tiles.block_m + groups) * -(-columns // tiles.block_n)
    result = jax.ShapeDtypeStruct((num_rows, columns), out_dtype)
    constants = {"S": fp8_sizes(num_rows, columns, depth, groups, tiles)}
    kernel_operands = (left, right, lhs_scales, rhs_scales, group_sizes)
    return launch(_FP8, kernel_operands, (result,), _config(tiles, most_tasks), constants)[0]


@functools.partial(jax.jit, static_argnames=("out_dtype", "tiles"))
def weight_gradient_fp8(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    lhs_scales: Array,
    rhs_scales: Array,
    *,
    out_dtype: DTypeLike,
    tiles: Fp8WeightTiles | None = None,
) -> Array:
    """See xla/grouped_gemm.py; `tiles` as for `grouped_gemm`."""
    operands = vary_alike((lhs, rhs, group_sizes, lhs_scales, rhs_scales))
    lhs, rhs, group_sizes, lhs_scales, rhs_scales = operands
    (rows, places), columns, groups, out_dtype = lhs.shape, rhs.shape[0], group_sizes.shape[0], jnp.dtype(out_dtype)
    facts = _facts((places, rows), columns, groups, lhs.dtype, out_dtype)
    tiles = tiles or tuned.tiles(fp8_weight_tiles(), "weight_gradient_fp8", **facts)
    left, right = (Descriptor(x, (block, GROUP_SIZE)) for x, block in ((lhs, tiles.block_m), (rhs, tiles.block_n)))
    tasks = groups * -(-rows // tiles.block_m) * -(-columns // tiles.block_n)
    result = jax.ShapeDtypeStruct((groups, rows, columns), out_dtype)
    constants = {"S": fp8_weight_sizes(places, columns, rows, groups, tiles)}
    kernel_operands = (left, right, lhs_scales, rhs_scales, group_sizes)
    return launch(_FP8_WEIGHT_GRADIENT, kernel_operands, (result,), _config(tiles, tasks), constants)[0]


def fp8_weight_sizes(
    num_places: int, columns: int, rows: int, groups: int, tiles: Fp8WeightTiles
) -> gemm_structs.WeightGradient:
    """The sizes of the kernel."""
    sizes = common_sizes(num_places, columns, rows, groups)
    tile = gemm_structs.WeightGradientTile(tiles.block_m, tiles.block_n, GROUP_SIZE, tiles.group_m, num_stages=None)
    return gemm_structs.WeightGradient(**sizes, store_parts=1, tma_store=False, tile=tile)


def fp8_sizes(num_rows: int, columns: int, depth: int, groups: int, tiles: Fp8Tiles) -> gemm_structs.GroupedGemm:
    """The sizes of the kernel."""
    sizes = common_sizes(num_rows, columns, depth, groups)
    tile = gemm_structs.GemmTile(tiles.block_m, tiles.block_n, GROUP_SIZE, tiles.group_m)
    return gemm_structs.GroupedGemm(**sizes, transposed=True, tma_parts=0, tile=tile)


def _facts(shape: tuple[int, ...], columns: int, groups: int, dtype: jnp.dtype, out_dtype: DTypeLike) -> Constants:
    """By which settings are looked up, for rows of this shape; of a weight gradient, those of its first factor."""
    sizes = {"num_rows": shape[0], "depth": shape[1], "columns": columns, "groups": groups}
    return {**sizes, "dtype": dtype, "out_dtype": jnp.dtype(out_dtype)}


def common_sizes(num_rows: int, columns: int, depth: int, groups: int) -> dict[str, int]:
    """What a product and a weight gradient have in common; the gradient's depth is the rows of a matrix."""
    return {
        "M": num_rows,
        "N": columns,
        "K": depth,
        "num_groups": groups,
        "padded_groups": max(16, power_of_two(groups)),
    }


def _config(tiles: _Programs, num_tasks: int) -> Config:
    return Config(num_programs(num_tasks, tiles.programs), tiles.num_warps, tiles.num_stages)


def pad(x: Array, *axes: int) -> Array:
    """`x` with whole 16-byte words along `axes`; a copy only where there are none."""
    missing = [round_up(size, _WORD) - size if axis in axes else 0 for axis, size in enumerate(x.shape)]
    return jnp.pad(x, [(0, more) for more in missing]) if any(missing) else x
