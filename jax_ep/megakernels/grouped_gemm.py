"""Grouped GEMM, its weight gradient, and both in FP8, on the tensor cores.

requirements.py states which operands the kernels support. Descriptors need rows of whole 16-byte words. Other arrays
are padded with zeros and the result is cut, which costs copies; the widths of models are multiples of 8.

Tiles are by shape and GPU; `jax-ep tune` and `tuning.override` choose others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep.core.expert_matrices import GemmWeights, SplitWeights
from jax_ep.core.facts import GemmFacts
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.kernel import Argument, Config, Descriptor, Kernel
from jax_ep.core.layout import Bias, power_of_two, round_up
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.megakernels import compile, tuned
from jax_ep.megakernels.activation import kind_of
from jax_ep.megakernels.kernels import gemm_structs, gluon_gemm, gluon_gemm16, gluon_gradient
from jax_ep.megakernels.kernels import grouped_gemm as grouped_gemm_kernels
from jax_ep.megakernels.kernels.gemm_structs import (
    GemmTile,
    GroupedGemm,
    WeightGradient,
    WeightGradientTile,
)
from jax_ep.megakernels.launch import (
    Programs,
    int32,
    launch,
    new_counters,
    num_programs,
    stores_by_descriptor,
    tile_config,
)
from jax_ep.megakernels.requirements import GLUON_CAPABILITY, in_gluon, runs_gluon
from jax_ep.types import Array, Experts, Quantized

_FORWARD = Kernel(grouped_gemm_kernels.grouped_gemm)
_FP8 = Kernel(grouped_gemm_kernels.grouped_gemm_fp8)
_GLUON = Kernel(gluon_gemm16.grouped_gemm16)
_GLUON_WEIGHT_GRADIENT = Kernel(gluon_gemm16.weight_gradient16)
_GLUON_FP8 = Kernel(gluon_gemm.grouped_gemm_fp8)
_GLUON_FP8_WEIGHT_GRADIENT = Kernel(gluon_gradient.weight_gradient_fp8)
_WEIGHT_GRADIENT = Kernel(grouped_gemm_kernels.weight_gradient)
_FP8_WEIGHT_GRADIENT = Kernel(grouped_gemm_kernels.weight_gradient_fp8)
_WORD = 8  # elements of a 16-byte word
_WAVE, _PART_BYTES = 64, 128  # rows of a wgmma, and bytes of a row that are stored at a time, see gluon_gemm16.py
_MANY_TILES = 16  # of a program: with fewer, the largest group of a weight gradient may take the longest
_ACTIVATED_COLUMNS = 32  # that are stored at a time: a wave stores an even number of parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmPrograms(Programs):
    """How programs compute tiles of a grouped GEMM."""

    block_m: int = 128  # rows of a tile
    block_n: int = 256  # columns of a tile
    group_m: int = 8  # row tiles of one rasterization band, which share the weights in the L2 cache
    num_warps: int = 8
    num_stages: int = 4
    programs: int = 1
    # Run the kernel in Gluon, for GPUs of compute capability 9.0, with fixed tiles in bands of `group_m`
    gluon: bool = False
    candidates: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "programs": (1, 2),
        "num_warps": (4, 8),
        "group_m": (4, 8, 16),
    }

    @property
    def used_candidates(self) -> Mapping[str, tuple[int, ...]]:
        """Candidates of the settings that the kernel has."""
        return {"group_m": self.candidates["group_m"]} if self.gluon else self.candidates


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StoredTiles(GemmPrograms):
    """Tiles of 16-bit operands."""

    tma_store: bool = False  # store by TMA, while the next tile is computed
    # 1, 2 or 4 parts of a tile's columns that TMA stores one after another: each takes less shared memory
    store_parts: int = 1
    candidates: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (64, 128, 256),
        "block_n": (64, 128, 256),
        "num_stages": (2, 3, 4, 5),
        "tma_store": (False, True),
        "store_parts": (1, 2, 4),
        **GemmPrograms.candidates,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles(_StoredTiles):
    """Tiles of a grouped GEMM; block_k is the depth of one step."""

    block_k: int = 64
    candidates: ClassVar[Mapping[str, tuple[int, ...]]] = {**_StoredTiles.candidates, "block_k": (32, 64, 128)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightTiles(_StoredTiles):
    """Tiles of the weight gradient; block_r is the number of rows of the operands in one step."""

    block_r: int = 64
    candidates: ClassVar[Mapping[str, tuple[int, ...]]] = {**_StoredTiles.candidates, "block_r": (32, 64, 128)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8WeightTiles(GemmPrograms):
    """Tiles of the weight gradient of column-wise FP8, in steps of the 128 elements that share a scale.

    At most 128 columns, which share a scale. More than 128 by 128 elements take more registers than a program of 8
    warps has: each element has a sum, and the product of one step.
    """

    block_n: int = 128
    candidates: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (64, 128),
        "block_n": (64, 128),
        "num_stages": (2, 3, 4, 5, 6),
        **GemmPrograms.candidates,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Tiles(Fp8WeightTiles):
    """Tiles of a grouped GEMM in FP8, with the limits of `Fp8WeightTiles`."""

    num_stages: int = 5


def forward_tiles(facts: GemmFacts) -> Tiles:
    """Return the tiles for a grouped GEMM."""
    if jax.default_backend() == "cpu":  # several steps, rows and columns at the sizes of tests
        return Tiles(block_m=64, block_n=32, block_k=16, num_stages=2)
    if in_gluon(facts):
        return Tiles(gluon=True)
    if facts.num_rows <= 64 * facts.groups or facts.columns <= 128:
        # Few rows: the weights are read once, whatever the tiles, and narrow ones keep more programs busy.
        return Tiles(block_m=64, block_n=128, num_warps=4, programs=2)
    if facts.out_dtype.itemsize > 2:
        # Tiles of float32 take twice the memory while they are stored, next to the buffers of the flat loop.
        return Tiles(block_n=128)
    return Tiles(num_stages=3, tma_store=True) if stores_by_descriptor() else Tiles()


def fp8_tiles(num_rows: int, groups: int, out_itemsize: int) -> Fp8Tiles:
    """Return the tiles for FP8 rows `[num_rows, .]` times `groups` weights."""
    if jax.default_backend() == "cpu":
        return Fp8Tiles(block_m=32, block_n=64, group_m=2, num_stages=2)
    if num_rows <= 64 * groups:
        return Fp8Tiles(block_m=64, num_warps=4, num_stages=3 if out_itemsize > 2 else 4, programs=2)
    return Fp8Tiles(gluon=runs_gluon())


def fp8_weight_tiles() -> Fp8WeightTiles:
    """Return the tiles for the weight gradient of column-wise FP8."""
    if jax.default_backend() == "cpu":
        return Fp8WeightTiles(block_m=32, block_n=64, group_m=2, num_stages=2)
    return Fp8WeightTiles(gluon=runs_gluon())


def weight_tiles(facts: GemmFacts) -> WeightTiles:
    """Return the tiles for a weight gradient; its depth is that of the weights."""
    if jax.default_backend() == "cpu":
        return WeightTiles(block_m=32, block_n=32, block_r=16, num_stages=2)
    if in_gluon(facts):
        return WeightTiles(gluon=True)
    if facts.out_dtype.itemsize <= 2:
        # Two programs of narrow tiles: while one stores its tile, the other multiplies.
        narrow = WeightTiles(block_n=128, num_warps=4, num_stages=3, programs=2)
        return dataclasses.replace(narrow, tma_store=True, store_parts=2) if stores_by_descriptor() else narrow
    return WeightTiles(block_n=128)


@functools.partial(jax.jit, static_argnames=("transpose", "out_dtype"))
def grouped_gemm(
    lhs: Array, rhs: GemmWeights, group_sizes: Array, *, transpose: bool, out_dtype: DTypeLike, bias: Bias | None = None
) -> Array:
    """Multiply as in xla/grouped_gemm.py."""
    wanted, groups = rhs.shape[1 if transpose else 2], rhs.shape[0]
    facts = _facts(lhs.dtype, lhs.shape, wanted, groups, out_dtype)
    tiles = tiles_of(facts)
    rhs = jax.tree.map(lambda w: pad(w, 1, 2), rhs)
    lhs, rhs, group_sizes, bias = vary_alike((pad(lhs, 1), rhs, group_sizes, bias))
    (num_rows, depth), columns = lhs.shape, rhs.shape[1 if transpose else 2]
    if tiles.gluon:
        shape, itemsize = (num_rows, columns, depth, groups), jnp.dtype(out_dtype).itemsize
        sizes16 = gluon_gemm16_sizes(shape, tiles.group_m, itemsize, transpose=transpose, experts=None)
        arrays = lhs, rhs, group_sizes, bias_operand(bias, num_rows)
        return _by_gluon(*arrays, sizes=sizes16, out_dtype=out_dtype)[:, :wanted]
    tile = GemmTile(tiles.block_m, tiles.block_n, tiles.block_k, tiles.group_m)
    parts = tiles.store_parts if tiles.tma_store else 0
    sizes = GroupedGemm(*gemm_shape(num_rows, columns, depth, groups), transpose, parts, tile)
    result: Argument = jax.ShapeDtypeStruct((num_rows, columns), out_dtype)
    if tiles.tma_store:
        result = Descriptor(result, (tiles.block_m, tiles.block_n // tiles.store_parts), bounded=True)
    rows = Descriptor(lhs, (tiles.block_m, tiles.block_k))
    weights, sizes = weights_operand(rhs, sizes)
    operands = (rows, weights, group_sizes, bias_operand(bias, num_rows))
    config = tile_config(tiles, (num_rows // tiles.block_m + groups) * -(-columns // tiles.block_n))
    return launch(_FORWARD, operands, (result,), config, {"S": sizes})[0][:, :wanted]


@functools.partial(jax.jit, static_argnames="experts")
def gemm_activation(lhs: Array, rhs: GemmWeights, group_sizes: Array, row_weights: Array, *, experts: Experts) -> Array:
    """`[M, K]` rows times the `[G, K, 2I]` weights of their group, activated, and times `[M]` weights, to `[M, I]`.

    In float32 with one final rounding, of experts that `requirements.activates`. Rows past the groups are zero.

    Source: a dual GEMM with the gated unit in its epilogue, as CUTLASS's, for groups of rows.
    """
    columns, facts = rhs.shape[2] // 2, _facts(lhs.dtype, lhs.shape, rhs.shape[2], rhs.shape[0], lhs.dtype)
    tiles = tiles_of(facts)
    rhs = jax.tree.map(lambda w: pad(w, 1, 2), rhs)
    arrays = vary_alike((pad(lhs, 1), rhs, group_sizes, row_weights.astype(jnp.float32)))
    shape = lhs.shape[0], columns, arrays[0].shape[1], facts.groups
    sizes = gluon_gemm16_sizes(shape, tiles.group_m, lhs.dtype.itemsize, experts=experts)
    return _by_gluon(*arrays, sizes=sizes, out_dtype=lhs.dtype)


def _by_gluon(
    lhs: Array,
    rhs: GemmWeights,
    group_sizes: Array,
    epilogue: Argument | None,
    *,
    sizes: gemm_structs.GluonGemm16,
    out_dtype: DTypeLike,
) -> Array:
    """Multiply in tiles of up to 192 x 256; `epilogue` is a bias, or with activation the weights of rows."""
    check_gluon("grouped_gemm", lhs.dtype, out_dtype)
    operand, sizes = gluon_weights(rhs, sizes)
    operands = Descriptor(lhs, (_WAVE, sizes.depth)), operand, group_sizes, epilogue, new_counters(1, lhs)
    results: tuple[Argument, ...] = gluon_result(sizes, out_dtype), *int32((1,))
    # Tiles have at least two waves, but for one of each group.
    num_tiles = (sizes.M // (2 * _WAVE) + sizes.num_groups + 1) * sizes.tiles_n
    config = Config(num_programs(num_tiles), num_warps=4)
    return launch(_GLUON, operands, results, config, {"S": sizes}, written={-1: -1})[0][:, : sizes.N]


def gluon_gemm16_sizes(
    shape: tuple[int, int, int, int], group_m: int, itemsize: int, *, transpose: bool = False, experts: Experts | None
) -> gemm_structs.GluonGemm16:
    """Return the sizes of a GEMM of rows `[M, K]` to `[M, N]` in groups, `shape` = (M, N, K, groups).

    `itemsize` is that of the result. With experts it has activated rows, and N is half of the columns of the weights.
    """
    if experts is not None:
        return gemm_structs.GluonGemm16(*shape, group_m, _ACTIVATED_COLUMNS, activation=kind_of(experts))
    return gemm_structs.GluonGemm16(*shape, group_m, _PART_BYTES // itemsize, transpose)


def gluon_weights(w: GemmWeights, sizes: gemm_structs.GluonGemm16) -> tuple[Argument, gemm_structs.GluonGemm16]:
    """Describe weights for a GEMM in Gluon; return its sizes with them, too."""
    block = (sizes.box_n, sizes.depth) if sizes.transposed else (sizes.depth, sizes.box_n)
    operand, home = _described(w, (1, *block))
    return operand, dataclasses.replace(sizes, home_groups=home)


def gluon_result(sizes: gemm_structs.GluonGemm16, dtype: DTypeLike) -> Descriptor:
    """Describe the result of a GEMM in Gluon, in rows of whole words."""
    result = jax.ShapeDtypeStruct((sizes.M, round_up(sizes.N, _WORD)), dtype)
    return Descriptor(result, (_WAVE, sizes.part_n), bounded=True)


def weights_operand(w: GemmWeights, sizes: GroupedGemm) -> tuple[Argument, GroupedGemm]:
    """Describe the experts' weights in the blocks of a tile; return the sizes of a GEMM with them, too."""
    depth_and_columns = sizes.tile.block_k, sizes.tile.block_n
    operand, home = _described(w, (1, *(depth_and_columns[::-1] if sizes.transposed else depth_and_columns)))
    return operand, dataclasses.replace(sizes, home_groups=home)


def _described(w: GemmWeights, block: tuple[int, ...]) -> tuple[Argument, int]:
    """Describe weights in one array or in two; return the number of groups in the first of two, else 0, too."""
    if not isinstance(w, SplitWeights):
        return Descriptor(w, block), 0
    return gemm_structs.SplitWeights(*(Descriptor(part, block) for part in w)), w.home.shape[0]


def bias_operand(bias: Bias | None, num_rows: int) -> gemm_structs.Bias | None:
    """Return the operand that kernels take as `bias`, with values for each column that they compute."""
    if bias is None:
        return None
    scales = bias.scales
    if scales is None:
        scales = jnp.ones_like(bias.values, dtype=jnp.float32, shape=(num_rows,))
    return gemm_structs.Bias(pad(bias.values, 1), scales.astype(jnp.float32))


@functools.partial(jax.jit, static_argnames=("out_dtype", "num_home"))
def weight_gradient(
    lhs: Array, rhs: Array, group_sizes: Array, *, out_dtype: DTypeLike, num_home: int = 0
) -> GemmWeights:
    """Contract rows as in xla/grouped_gemm.py."""
    wanted, groups = (lhs.shape[1], rhs.shape[1]), group_sizes.shape[0]
    facts = _facts(lhs.dtype, lhs.shape, wanted[1], groups, out_dtype)
    tiles = _tuned(weight_tiles(facts), "weight_gradient", facts)
    lhs, rhs, group_sizes = vary_alike((pad(lhs, 1), pad(rhs, 1), group_sizes))
    num_rows, rows, columns = *lhs.shape, rhs.shape[1]
    if tiles.gluon:
        arrays = lhs, rhs, group_sizes
        found = _gradient_by_gluon(*arrays, out_dtype=out_dtype, num_home=num_home, group_m=tiles.group_m)
        return _cut_gradient(found, *wanted)
    shape = gemm_shape(num_rows, columns, rows, groups)
    tile = WeightGradientTile(tiles.block_m, tiles.block_n, tiles.block_r, tiles.group_m)
    sizes = WeightGradient(*shape, tiles.store_parts, tiles.tma_store, tile, num_home)
    # Rows of the operands end where the kernel chooses.
    left = Descriptor(lhs, (tiles.block_r, tiles.block_m), bounded=True)
    right = Descriptor(rhs, (tiles.block_r, tiles.block_n), bounded=True)
    block = (1, tiles.block_m, tiles.block_n // tiles.store_parts) if tiles.tma_store else None
    result = _gradient_result((groups, rows, columns), out_dtype, num_home, block)
    config = tile_config(tiles, groups * -(-rows // tiles.block_m) * -(-columns // tiles.block_n))
    found = launch(_WEIGHT_GRADIENT, (left, right, group_sizes), (result,), config, {"S": sizes})[0]
    return _cut_gradient(found, *wanted)


def _gradient_by_gluon(
    lhs: Array, rhs: Array, group_sizes: Array, *, out_dtype: DTypeLike, num_home: int, group_m: int
) -> Any:
    """Contract rows as `weight_gradient`, in tiles of up to 192 x 256; return one array or two."""
    check_gluon("weight_gradient", lhs.dtype, out_dtype)
    (num_rows, rows), columns, groups = lhs.shape, rhs.shape[1], group_sizes.shape[0]
    part_n = _PART_BYTES // jnp.dtype(out_dtype).itemsize
    sizes = gemm_structs.GluonGemm16(
        num_rows, columns, rows, groups, group_m, part_n, is_gradient=True, home_groups=num_home
    )
    # Programs that compute few tiles get low ones of large groups, to end at about the same time.
    num_tiles = (num_home or groups) * -(-rows // (3 * _WAVE)) * sizes.tiles_n
    sizes = dataclasses.replace(sizes, low_tiles=num_tiles < _MANY_TILES * num_programs(num_tiles))
    # Rows of the operands end where the kernel chooses.
    left = Descriptor(lhs, (sizes.depth, _WAVE), bounded=True)
    right = Descriptor(rhs, (sizes.depth, sizes.tile_n), bounded=True)
    result = _gradient_result((groups, rows, columns), out_dtype, num_home, (1, _WAVE, part_n))
    config = Config(num_programs(groups * -(-rows // (2 * _WAVE)) * sizes.tiles_n), num_warps=4)
    operands, results = (left, right, group_sizes, new_counters(1, lhs)), (result, *int32((1,)))
    return launch(_GLUON_WEIGHT_GRADIENT, operands, results, config, {"S": sizes}, written={-1: -1})[0]


def _gradient_result(
    shape: tuple[int, int, int], dtype: DTypeLike, num_home: int, block: tuple[int, int, int] | None
) -> Argument:
    """Describe a gradient of weights `[G, K, N]` in one array or two, stored in blocks or through pointers."""

    def described(groups: int) -> Argument:
        result = jax.ShapeDtypeStruct((groups, *shape[1:]), dtype)
        return Descriptor(result, block) if block else result

    if not num_home:
        return described(shape[0])
    return gemm_structs.SplitWeights(described(num_home), described(shape[0] - num_home))


def _cut_gradient(found: Any, rows: int, columns: int) -> GemmWeights:
    """Return a gradient, in one array or two, without padding."""
    cut = jax.tree.map(lambda w: w[:, :rows, :columns], found)
    return cut if isinstance(cut, jax.Array) else SplitWeights(*cut)


@functools.partial(jax.jit, static_argnames="out_dtype")
def grouped_gemm_fp8(lhs: Quantized, rhs: Quantized, group_sizes: Array, *, out_dtype: DTypeLike) -> Array:
    """Multiply as in xla/grouped_gemm.py."""
    (num_rows, depth), (groups, columns) = lhs[0].shape, rhs[0].shape[:2]
    facts = _facts(lhs[0].dtype, (num_rows, depth), columns, groups, out_dtype)
    tiles = _tuned(fp8_tiles(num_rows, groups, facts.out_dtype.itemsize), "grouped_gemm_fp8", facts)
    values, weights, *others = operands = vary_alike((lhs[0], rhs[0], lhs[1], rhs[1], group_sizes))
    if tiles.gluon:
        return _fp8_by_gluon(*operands, out_dtype=out_dtype, group_m=tiles.group_m)
    left = Descriptor(values[None], (1, tiles.block_m, GROUP_SIZE))
    right = Descriptor(weights, (1, tiles.block_n, GROUP_SIZE))
    result = jax.ShapeDtypeStruct((num_rows, columns), out_dtype)
    config = tile_config(tiles, (num_rows // tiles.block_m + groups) * -(-columns // tiles.block_n))
    constants = {"S": fp8_sizes(num_rows, columns, depth, groups, tiles)}
    return launch(_FP8, (left, right, *others), (result,), config, constants)[0]


def _fp8_by_gluon(*operands: Array, out_dtype: DTypeLike, group_m: int) -> Array:
    """Multiply as `grouped_gemm_fp8` in tiles of 128 x 256, stored in halves."""
    check_gluon("grouped_gemm_fp8")
    lhs, rhs, lhs_scales, rhs_scales, group_sizes = operands
    (num_rows, depth), (groups, columns) = lhs.shape, rhs.shape[:2]
    sizes = gluon_sizes(num_rows, columns, depth, groups, jnp.dtype(out_dtype).itemsize, group_m)
    left = Descriptor(lhs, (sizes.tile_m, GROUP_SIZE))
    right = Descriptor(rhs.reshape(-1, depth), (sizes.tile_n, GROUP_SIZE))
    padded_scales = jnp.pad(lhs_scales.T.reshape(-1), (0, 128))  # tiles read scales past the last row
    result = jax.ShapeDtypeStruct((num_rows, round_up(columns, _WORD)), out_dtype)
    results: tuple[Argument, ...] = Descriptor(result, (64, 128), bounded=True), *int32((1,))
    arguments = (left, right, padded_scales, rhs_scales, group_sizes, new_counters(1, lhs_scales))
    config = Config(num_programs((num_rows // sizes.tile_m + groups + 1) * sizes.tiles_n), num_warps=4)
    return launch(_GLUON_FP8, arguments, results, config, {"S": sizes}, written={-1: -1})[0][:, :columns]


def check_gluon(operation: str, dtype: DTypeLike | None = None, out_dtype: DTypeLike | None = None) -> None:
    """Raise if this GPU does not run kernels in Gluon, which the settings of `operation` ask for.

    With dtypes, operands must have 16 bits, and results at most 32.
    """
    if dtype is not None and (jnp.dtype(dtype).itemsize != 2 or jnp.dtype(out_dtype).itemsize > 4):
        raise NotImplementedError(
            f"grouped_gemm: gluon=True with rows of {jnp.dtype(dtype)} and results of {jnp.dtype(out_dtype)}, expected"
            f" 16-bit rows and results of at most 32 bits; leave gluon out of the settings of {operation}."
        )
    if jax.default_backend() == "gpu" and (capability := compile.device_capability()) != GLUON_CAPABILITY:
        raise NotImplementedError(
            f"grouped_gemm: gluon=True on GPUs of compute capability {capability / 10}, expected"
            f" {GLUON_CAPABILITY / 10}; leave gluon out of the settings of {operation}."
        )


def gluon_sizes(
    num_rows: int, columns: int, depth: int, groups: int, out_itemsize: int, group_m: int
) -> gemm_structs.GluonGemm:
    """Return the sizes of the grouped GEMM in FP8 in Gluon, whose stages leave memory for results of 4 bytes."""
    stages = 3 if out_itemsize > 2 else 4
    return gemm_structs.GluonGemm(num_rows, columns, depth // GROUP_SIZE, groups, 128, 256, stages, group_m)


@functools.partial(jax.jit, static_argnames=("out_dtype", "num_home"))
def weight_gradient_fp8(
    lhs: Quantized, rhs: Quantized, group_sizes: Array, *, out_dtype: DTypeLike, num_home: int = 0
) -> GemmWeights:
    """Contract columns as in xla/grouped_gemm.py."""
    if jnp.dtype(out_dtype) == jnp.float64:  # sums are float32, and tiles of float64 exceed shared memory
        found = weight_gradient_fp8(lhs, rhs, group_sizes, out_dtype=jnp.float32, num_home=num_home)
        return jax.tree.map(lambda w: w.astype(out_dtype), found)
    (rows, places), columns, groups = lhs[0].shape, rhs[0].shape[0], group_sizes.shape[0]
    facts = _facts(lhs[0].dtype, (places, rows), columns, groups, out_dtype)
    tiles = _tuned(fp8_weight_tiles(), "weight_gradient_fp8", facts)
    a, b, *others = vary_alike((lhs[0], rhs[0], lhs[1], rhs[1], group_sizes))
    if tiles.gluon:
        return _fp8_gradient_by_gluon(a, b, *others, out_dtype=out_dtype, num_home=num_home, group_m=tiles.group_m)
    left, right = Descriptor(a, (tiles.block_m, GROUP_SIZE)), Descriptor(b, (tiles.block_n, GROUP_SIZE))
    result = _gradient_result((groups, rows, columns), out_dtype, num_home, None)
    config = tile_config(tiles, groups * -(-rows // tiles.block_m) * -(-columns // tiles.block_n))
    sizes = dataclasses.replace(fp8_weight_sizes(places, columns, rows, groups, tiles), home_groups=num_home)
    found = launch(_FP8_WEIGHT_GRADIENT, (left, right, *others), (result,), config, {"S": sizes})[0]
    return _cut_gradient(found, rows, columns)


def _fp8_gradient_by_gluon(*operands: Array, out_dtype: DTypeLike, num_home: int, group_m: int) -> GemmWeights:
    """Contract as `weight_gradient_fp8` in tiles of 256 x 128."""
    check_gluon("weight_gradient_fp8")
    lhs, rhs, lhs_scales, rhs_scales, group_sizes = operands
    (rows, places), columns, groups = lhs.shape, rhs.shape[0], group_sizes.shape[0]
    sizes = gluon_gradient_sizes(rows, columns, places, groups, jnp.dtype(out_dtype).itemsize, group_m, num_home)
    arguments = (
        Descriptor(lhs, (sizes.tile_m, GROUP_SIZE)),
        Descriptor(rhs, (sizes.tile_n, GROUP_SIZE)),
        Descriptor(pad(lhs_scales, 1), (1, sizes.tile_m)),
        Descriptor(pad(rhs_scales, 1), (1, sizes.tile_n)),
        group_sizes,
        new_counters(1, lhs_scales),
    )
    result = _gradient_result((groups, rows, round_up(columns, _WORD)), out_dtype, num_home, (1, 64, sizes.tile_n))
    results: tuple[Argument, ...] = result, *int32((1,))
    config = Config(num_programs(groups * -(-rows // sizes.tile_m) * sizes.tiles_n), num_warps=4)
    found = launch(_GLUON_FP8_WEIGHT_GRADIENT, arguments, results, config, {"S": sizes}, written={-1: -1})[0]
    return _cut_gradient(found, rows, columns)


def gluon_gradient_sizes(
    rows: int, columns: int, places: int, groups: int, out_itemsize: int, group_m: int, num_home: int = 0
) -> gemm_structs.GluonGemm:
    """Return the sizes of the weight gradient in Gluon; shared memory holds two waves of 2 bytes, or one of 4."""
    staged = 1 if out_itemsize > 2 else 2
    return gemm_structs.GluonGemm(rows, columns, places // GROUP_SIZE, groups, 256, 128, 3, group_m, staged, num_home)


def fp8_weight_sizes(places: int, columns: int, rows: int, groups: int, tiles: Fp8WeightTiles) -> WeightGradient:
    """Return the sizes of the weight gradient in FP8."""
    tile = WeightGradientTile(tiles.block_m, tiles.block_n, GROUP_SIZE, tiles.group_m)
    return WeightGradient(*gemm_shape(places, columns, rows, groups), store_parts=1, tma_store=False, tile=tile)


def fp8_sizes(num_rows: int, columns: int, depth: int, groups: int, tiles: Fp8Tiles) -> GroupedGemm:
    """Return the sizes of the grouped GEMM in FP8."""
    tile = GemmTile(tiles.block_m, tiles.block_n, GROUP_SIZE, tiles.group_m)
    return GroupedGemm(*gemm_shape(num_rows, columns, depth, groups), transposed=True, tma_parts=0, tile=tile)


def _facts(dtype: DTypeLike, shape: tuple[int, ...], columns: int, groups: int, out_dtype: DTypeLike) -> GemmFacts:
    """Return the facts of a GEMM of rows of this shape, or of a weight gradient with such a first factor."""
    num_rows, depth = shape
    return GemmFacts(jnp.dtype(dtype), num_rows, depth, columns, groups, jnp.dtype(out_dtype))


def tiles_of(facts: GemmFacts) -> Tiles:
    """Return the tiles of a grouped GEMM: tuned ones, or the default."""
    return _tuned(forward_tiles(facts), "grouped_gemm", facts)


def _tuned[T: Programs](default: T, operation: str, facts: GemmFacts) -> T:
    return tuned.tiles(default, operation, **dataclasses.asdict(facts))


def gemm_shape(num_rows: int, columns: int, depth: int, groups: int) -> tuple[int, int, int, int, int]:
    """Return the fields of `GemmSizes`; the depth of a weight gradient is the rows of the weights."""
    return num_rows, columns, depth, groups, max(16, power_of_two(groups))


def pad(x: Array, *axes: int) -> Array:
    """Pad `x` to whole 16-byte words along `axes`; a copy only if necessary."""
    missing = [round_up(size, _WORD) - size if axis in axes else 0 for axis, size in enumerate(x.shape)]
    return jnp.pad(x, [(0, more) for more in missing]) if any(missing) else x
