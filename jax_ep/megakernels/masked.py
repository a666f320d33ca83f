"""Launches of the serving path between dispatch and combine: masked grouped GEMM, and gated activation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_matrices import QuantizedWeights
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.kernel import Config, Descriptor, Kernel
from jax_ep.core.layout import power_of_two
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.megakernels import tuned
from jax_ep.megakernels.activation import kind_of
from jax_ep.megakernels.grid import num_programs, whole_registers
from jax_ep.megakernels.kernels import masked as masked_kernels
from jax_ep.megakernels.kernels.gemm_structs import MaskedActivation, MaskedActivationTile, MaskedGemm, MaskedTile
from jax_ep.megakernels.launch import launch
from jax_ep.types import Array, Experts

_GEMM = Kernel(masked_kernels.masked_grouped_gemm)
_ACTIVATION = Kernel(masked_kernels.masked_gated_activation)
_SHARED_BYTES = 226 << 10  # of a multiprocessor
ACTIVATION_PROGRAMS = 8


@dataclasses.dataclass(frozen=True)
class MaskedTiles:
    """How a masked product covers its rows.

    Attributes:
      block_m: rows of a tile; below 64, the product is turned and each warp has columns of the matrix.
      block_n: columns of a tile, at most 128 in FP8.
      block_k: depth of one step, 128 in FP8: 128 bytes of a row.
      num_warps: of a program.
      num_stages: blocks in flight, the one in use included.
      programs: per multiprocessor.
      candidates: values that `jax-ep tune` searches, the simplest first.
    """

    block_m: int
    block_n: int = 128
    block_k: int = 128
    num_warps: int = 4
    num_stages: int = 4
    programs: int = 2
    candidates: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (16, 32, 64, 128),
        "block_n": (64, 128),
        "num_stages": (2, 3, 4, 5, 6),
        "programs": (1, 2, 3),
        "num_warps": (4, 8),
    }

    @property
    def swap(self) -> bool:
        """Whether the product is turned."""
        return self.block_m < 64


def _fewest_rows() -> int:
    """Rows of the smallest tile: for Blackwell, Triton 3.9 spills hundreds of registers of turned products."""
    device = jax.local_devices()[0]
    return 16 if device.platform == "cpu" or float(device.compute_capability) < 10.0 else 64


def masked_tiles(max_rows: int, expected_rows: int | None, itemsize: int, out_itemsize: int) -> MaskedTiles:
    """Tiles for groups of up to `max_rows` rows of elements of `itemsize` bytes.

    Counts scatter, and a group with one row more than a tile takes twice as long. So a tile has room for twice the
    expectation; rows that it has too many cost little, as long as matrices are most of what is read.
    """
    wanted = 64 if expected_rows is None else 2 * expected_rows
    block_m = min(max(_fewest_rows(), power_of_two(min(wanted, max_rows))), 128)
    tiles = MaskedTiles(block_m, block_k=128 // itemsize)
    if block_m == 128:  # sums of 128 rows, in FP8 beside those of the tensor cores, take the registers of two programs
        tiles = dataclasses.replace(tiles, num_warps=8, programs=1)
    stored = block_m * tiles.block_n * out_itemsize  # on its way to memory, beside what arrives
    stages = (_SHARED_BYTES // tiles.programs - stored) // ((block_m + tiles.block_n) * 128)
    return dataclasses.replace(tiles, num_stages=min(stages, 6))


def tuned_tiles(
    operation: str,
    product: tuple[int, ...],
    expected_rows: int | None,
    dtype: jnp.dtype,
    out_dtype: jnp.dtype,
) -> MaskedTiles:
    """Tiles for `[groups, max_rows, depth]` times `[groups, columns, depth]`, a `product` of these four."""
    groups, max_rows, depth, columns = product
    sizes = {"groups": groups, "num_rows": max_rows, "depth": depth, "columns": columns}
    default = masked_tiles(max_rows, expected_rows, dtype.itemsize, out_dtype.itemsize)
    facts = {**sizes, "expected_rows": expected_rows or 0, "dtype": dtype, "out_dtype": out_dtype}
    return tuned.tiles(default, operation, **facts)


def gemm_sizes(groups: int, rows: int, columns: int, depth: int, fp8: bool, tiles: MaskedTiles) -> MaskedGemm:
    """What a masked product is compiled for."""
    tile = MaskedTile(tiles.block_m, tiles.block_n, tiles.block_k, tiles.swap)
    return MaskedGemm(rows, columns, depth, groups, max(16, power_of_two(groups)), fp8, tile)


def gemm_operands(
    lhs: Array, rhs: QuantizedWeights, group_sizes: Array, lhs_scales: Array | None, tiles: MaskedTiles
) -> tuple[Array | Descriptor, ...]:
    """Operands of a kernel with a masked product; where there are no scales, they are not read."""
    return (
        Descriptor(lhs, (1, tiles.block_m, tiles.block_k)),
        Descriptor(rhs.values, (1, tiles.block_n, tiles.block_k)),
        group_sizes if lhs_scales is None else lhs_scales,
        group_sizes if rhs.scales is None else rhs.scales,
        group_sizes,
    )


def activation_config(num_tasks: int) -> Config:
    """As many programs of a multiprocessor as can hide what they wait for."""
    registers = whole_registers(ACTIVATION_PROGRAMS, 4)
    return Config(num_programs(num_tasks, ACTIVATION_PROGRAMS), num_warps=4, max_registers=registers)


def activation_sizes(groups: int, rows: int, inner: int, quantize: bool) -> MaskedActivation:
    """What the activation is compiled for; `inner` columns of the result."""
    columns = min(512, max(128 if quantize else 16, power_of_two(inner)))
    tile = MaskedActivationTile(max(1, 2048 // columns), columns)
    return MaskedActivation(rows, inner, groups, max(16, power_of_two(groups)), quantize, tile)


@functools.partial(jax.jit, static_argnames=("out_dtype", "expected_rows", "tiles"))
def masked_grouped_gemm(
    lhs: Array,
    rhs: QuantizedWeights,
    group_sizes: Array,
    lhs_scales: Array | None,
    *,
    out_dtype: DTypeLike,
    expected_rows: int | None,
    tiles: MaskedTiles | None = None,
) -> Array:
    """Multiply rows by weights whose values are operands of tensor cores; rows past the sizes hold anything.

    See xla/quantized_gemm.py. `expected_rows` is how many rows a group should have, which chooses tiles; `tiles` are
    those of the kernel, or None.
    """
    if 0 in (*lhs.shape, *rhs.shape):
        return jnp.zeros_like(lhs, dtype=out_dtype, shape=(*lhs.shape[:2], rhs.shape[2]))
    product = (*lhs.shape, rhs.shape[2])
    tiles = tiles or tuned_tiles("masked_grouped_gemm", product, expected_rows, lhs.dtype, jnp.dtype(out_dtype))
    lhs, rhs, group_sizes, lhs_scales = vary_alike((lhs, rhs, group_sizes, lhs_scales))
    groups, rows, depth, columns = product
    sizes = gemm_sizes(groups, rows, columns, depth, lhs_scales is not None, tiles)
    operands = gemm_operands(lhs, rhs, group_sizes, lhs_scales, tiles)
    most_tasks = groups * -(-rows // tiles.block_m) * -(-columns // tiles.block_n)
    config = Config(num_programs(most_tasks, tiles.programs), tiles.num_warps, tiles.num_stages)
    result = jax.ShapeDtypeStruct((groups, rows, columns), out_dtype)
    return launch(_GEMM, operands, (result,), config, {"S": sizes})[0]


@functools.partial(jax.jit, static_argnums=0, static_argnames="quantize")
def masked_gated_activation(
    experts: Experts, hidden: Array, group_sizes: Array, bias: Array | None, *, quantize: bool
) -> tuple[Array, Array | None]:
    """`[G, M, 2I]` (`[G, M, I]` without gates) to `[G, M, I]` rows, with `quantize` also scales `[G, M, I / 128]`.

    `bias` is `[G, 2I]`, or as wide as `hidden`; or None.
    """
    groups, rows, inner = hidden.shape[0], hidden.shape[1], hidden.shape[2] // (2 if experts.gated else 1)
    if 0 in hidden.shape:
        shape = (groups, rows, inner)
        scales = jnp.zeros_like(hidden, dtype=jnp.float32, shape=(*shape[:2], shape[2] // GROUP_SIZE))
        return jnp.zeros_like(hidden, dtype=FP8 if quantize else None, shape=shape), scales if quantize else None
    hidden, group_sizes, bias = vary_alike((hidden, group_sizes, bias))
    sizes = activation_sizes(groups, rows, inner, quantize)
    num_tasks = groups * -(-rows // sizes.tile.block_m) * -(-inner // sizes.tile.block_n)
    config = activation_config(num_tasks)
    results = (
        jax.ShapeDtypeStruct((groups, rows, inner), FP8 if quantize else hidden.dtype),
        jax.ShapeDtypeStruct((groups, rows, inner // GROUP_SIZE) if quantize else (1,), jnp.float32),
    )
    constants = {"S": sizes, "KIND": kind_of(experts)}
    operands = (hidden, group_sizes) if bias is None else (hidden, group_sizes, bias)
    constants |= {"bias_ptr": None} if bias is None else {}
    values, scales = launch(_ACTIVATION, operands, results, config, constants)
    return values, scales if quantize else None
