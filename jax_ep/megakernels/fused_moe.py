"""Launch of the whole expert layer on one device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_matrices import QuantizedWeights
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.kernel import Argument, Config, Constants, Descriptor, Kernel
from jax_ep.core.layout import power_of_two
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.formats import format_of, stored_name
from jax_ep.megakernels import tuned
from jax_ep.megakernels.activation import kind_of, quantize_rows
from jax_ep.megakernels.capability import has_tma
from jax_ep.megakernels.cost_model import few_rows, serves_in_one_launch
from jax_ep.megakernels.grid import all_programs, whole_registers
from jax_ep.megakernels.kernels import fused_moe as fused_moe_kernels
from jax_ep.megakernels.kernels.fused_moe_structs import (
    FusedGemm,
    FusedMoE,
    FusedTile,
    LayerScratch,
    LayerTensors,
    SortedLayerTensors,
)
from jax_ep.megakernels.launch import launch
from jax_ep.megakernels.moe_sort import moe_sort
from jax_ep.megakernels.quantized_gemm import is_turned, storage_of
from jax_ep.megakernels.requirements import is_readable
from jax_ep.types import Array, Experts, Schedule

_FUSED = Kernel(fused_moe_kernels.fused_moe)
_MOST_UNSORTED = 512  # slots, which every program sorts for itself
_FEW_BYTES = 1 << 24  # that rows of the result have in float32; more are in the dtype of tokens
Matrices = Array | QuantizedWeights


@dataclasses.dataclass(frozen=True)
class FusedTiles:
    """How the layer is cut into tasks.

    Attributes:
      block_m: slots of a block.
      hidden_columns: columns of I of a task of the first product.
      columns: columns of H of a task of the second.
      splits: parts of I that are tasks of the second product of their own.
      depth: of one step of either product.
      num_warps: of a program.
      num_stages: steps in flight, the one in use included.
      programs: of a multiprocessor.
      candidates: values that `jax-ep tune` searches, the simplest first.
    """

    block_m: int = 16  # the fewest that tensor cores multiply without turning the product
    hidden_columns: int = 64
    columns: int = 64
    splits: int = 1
    depth: int = 128
    num_warps: int = 4
    num_stages: int = 3
    programs: int = 2
    candidates: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (16, 32, 64, 128),
        "hidden_columns": (32, 64, 128),
        "columns": (64, 128, 256),
        "splits": (1, 2, 4, 8),
        "depth": (64, 128, 256),
        "num_stages": (2, 3, 4),
        "programs": (1, 2, 3, 4, 5, 6),
        "num_warps": (2, 4, 8),
    }


def fuses(experts: Experts, num_slots: int, dtype: DTypeLike, w_gate_up: Matrices, w_down: Matrices) -> bool:
    """Whether the layer of so many slots is one launch."""
    in_16_bits = dtype in (jnp.bfloat16, jnp.float16)
    taken = num_slots > 0 and in_16_bits and not callable(experts.activation) and has_tma()
    return taken and _is_read(w_gate_up) and _is_read(w_down)


def is_fastest(num_slots: int, w_gate_up: Matrices, w_down: Matrices, *, by_pallas: bool) -> bool:
    """Whether it should be faster than several launches; see cost_model.py for `by_pallas`."""
    single_launch = tuned.schedule(Schedule(), "fused_moe", **_facts(num_slots, w_down)).single_launch
    if single_launch is not None:
        return single_launch
    (num_experts, intermediate, hidden), (bits, in_fp8) = w_down.shape, _bits(w_down)
    sizes = num_slots, num_experts, hidden, intermediate
    return serves_in_one_launch(*sizes, bits, in_fp8=in_fp8, turned=_is_turned(w_down), by_pallas=by_pallas)


def _bits(w_down: Matrices) -> tuple[int, bool]:
    """Of an element, and whether rows are FP8, too."""
    if not isinstance(w_down, QuantizedWeights):
        return 16, False
    return format_of(w_down).bits, w_down.activations == "fp8"


def _is_turned(w: Matrices) -> bool:
    """Whether elements are converted where tensor cores take them from, once for all rows of a block of 32 or 64."""
    return isinstance(w, QuantizedWeights) and not w.activations and is_turned(w, 32)


def _facts(num_slots: int, w_down: Matrices) -> dict[str, object]:
    """By which settings are looked up."""
    num_experts, intermediate, hidden = w_down.shape
    if isinstance(w_down, QuantizedWeights):
        kind = stored_name(w_down) + ("_tokens" if w_down.activations else "")
    else:
        kind = str(w_down.dtype)
    sizes = {"num_slots": num_slots, "num_experts": num_experts, "hidden": hidden, "intermediate": intermediate}
    return {**sizes, "format": kind}


def _is_read(w: Matrices) -> bool:
    if isinstance(w, QuantizedWeights):
        whole = w.activations is None or (w.activations == "fp8" and w.shape[1] % GROUP_SIZE == 0)
        return whole and is_readable(w)
    return 0 not in w.shape and all(size % 8 == 0 for size in w.shape[1:])


def fused_moe(
    experts: Experts,
    x: Array,
    topk_idx: Array,
    topk_weights: Array,
    w_gate_up: Matrices,
    w_down: Matrices,
    biases: tuple[Array | None, Array | None],
    *,
    out_dtype: DTypeLike,
    tiles: FusedTiles | None = None,
) -> Array:
    """The expert layer of one device: `jax_ep.moe` without a mesh axis, of checked arguments.

    Args:
      experts: what they compute.
      x: `[T, H]`.
      topk_idx: `[T, K]`; what is no expert has no row.
      topk_weights: `[T, K]` float32.
      w_gate_up: `[E, H, 2 * I]`, or `[E, H, I]` without gates; or `QuantizedWeights` of them.
      w_down: `[E, I, H]`; or `QuantizedWeights`.
      biases: of both products, `[E, 2 * I]` or `[E, I]`, and `[E, H]`; or None.
      out_dtype: of the result.
      tiles: how it is cut; None: as suits its sizes.

    Returns:
      `[T, H]`.
    """
    everything = vary_alike((x, topk_idx, topk_weights, w_gate_up, w_down, biases))
    x, topk_idx, topk_weights, w_gate_up, w_down, biases = everything
    config, sizes = fused_sizes(experts, x.shape, topk_idx.shape[1], w_gate_up, w_down, tiles)
    (gate_up, gate_up_scales), (down, down_scales) = (
        _operands(w, product) for w, product in ((w_gate_up, sizes.gate_up), (w_down, sizes.down))
    )
    tokens, token_scales = x, topk_weights
    if sizes.gate_up.fp8_rows:
        tokens, token_scales = quantize_rows(x, jnp.full((1,), sizes.num_tokens, jnp.int32))
    tensors: LayerTensors | SortedLayerTensors = LayerTensors(
        tokens, token_scales, gate_up, down, topk_idx, topk_weights
    )
    if sizes.presorted:
        order = {"first_expert": 0, "num_local_experts": sizes.num_experts, "block_size": sizes.down.tile.block_m}
        found = moe_sort(topk_idx, None, None, **order)
        tensors = SortedLayerTensors._make((*tensors, found.slots, found.block_expert, found.num_rows))
    named = {"gate_up_scales_ptr": gate_up_scales, "down_scales_ptr": down_scales}
    named |= dict(zip(("gate_up_bias_ptr", "down_bias_ptr"), biases, strict=True))
    counters = jnp.zeros((2 + sizes.max_blocks,), jnp.int32)
    operands: tuple[Argument, ...] = (tensors, *(value for value in named.values() if value is not None), counters)
    constants: Constants = {name: None for name, value in named.items() if value is None}
    constants |= {"KIND": kind_of(experts), "S": sizes}
    scratch = _scratch(sizes, x.dtype)
    results = (scratch, jax.ShapeDtypeStruct(x.shape, out_dtype), jax.ShapeDtypeStruct(counters.shape, counters.dtype))
    written = {len(tensors) + len(operands) - 2: len(scratch) + 1}
    return launch(_FUSED, operands, results, config, constants, written=written)[1]


def _scratch(sizes: FusedMoE, dtype: DTypeLike) -> LayerScratch:
    """Shapes and dtypes, for tokens of `dtype`."""
    slots, in_fp8 = sizes.num_tokens * sizes.top_k, sizes.down.fp8_rows
    rows = (slots, sizes.down.k_splits, sizes.hidden)
    return LayerScratch(
        jax.ShapeDtypeStruct((slots, sizes.intermediate_size), FP8 if in_fp8 else dtype),
        jax.ShapeDtypeStruct((slots, sizes.intermediate_size // GROUP_SIZE) if in_fp8 else (1,), jnp.float32),
        jax.ShapeDtypeStruct(rows, jnp.float32 if 4 * math.prod(rows) <= _FEW_BYTES else dtype),
        jax.ShapeDtypeStruct((1 if sizes.presorted else sizes.padded_assignments,), jnp.int32),
        jax.ShapeDtypeStruct((1 if sizes.presorted else sizes.max_blocks,), jnp.int32),
    )


def _operands(w: Matrices, product: FusedGemm) -> tuple[Descriptor, Array | None]:
    """Matrices as the kernel reads them, and their scales."""
    columns, depth = product.tile.block_n, product.tile.block_k
    if isinstance(w, QuantizedWeights):
        stored = depth * w.values.shape[-1] // w.shape[-2]
        if product.split_halves:
            halves = w.values.reshape(w.shape[0], 2, w.shape[2] // 2, -1)
            return Descriptor(halves, (1, 2, columns // 2, stored)), w.scales
        return Descriptor(w.values, (1, columns, stored)), w.scales
    return Descriptor(w, (1, depth, columns)), None


def fused_sizes(
    experts: Experts,
    shape: tuple[int, ...],
    top_k: int,
    w_gate_up: Matrices,
    w_down: Matrices,
    tiles: FusedTiles | None = None,
) -> tuple[Config, FusedMoE]:
    """Config and sizes for tokens `[T, H]`; of the matrices, only shapes and formats count."""
    num_tokens, hidden = shape
    num_experts, intermediate, _ = w_down.shape
    slots = num_tokens * top_k
    prepacked = [isinstance(w, QuantizedWeights) and w.is_prepacked for w in (w_gate_up, w_down)]
    halves = prepacked[0] and experts.gated and not experts.interleaved
    wide = 2 if experts.interleaved or halves else 1
    bits, in_fp8 = _bits(w_down)
    turned = any(map(_is_turned, (w_gate_up, w_down)))
    default = fused_tiles(slots, num_experts, hidden, intermediate, bits, in_fp8=in_fp8, turned=turned)
    tiles = tiles or tuned.tiles(default, "fused_moe", **_facts(slots, w_down))
    if in_fp8 and tiles.hidden_columns % GROUP_SIZE:
        raise ValueError(
            f"fused_moe: hidden_columns={tiles.hidden_columns} with tokens in FP8, expected a multiple of {GROUP_SIZE},"
            " the columns that share a scale; leave the setting out."
        )
    if any(prepacked) and tiles.depth not in (128, 256):
        raise ValueError(
            f"fused_moe: depth={tiles.depth} with prepacked weights, expected 128 or 256; leave the setting out."
        )
    sizes = FusedMoE(
        num_tokens=num_tokens,
        top_k=top_k,
        hidden=hidden,
        intermediate_size=intermediate,
        num_experts=num_experts,
        padded_assignments=max(16, power_of_two(slots)),
        max_blocks=min(slots, num_experts + slots // tiles.block_m),
        presorted=slots > _MOST_UNSORTED or tiles.block_m > 32,
        sum_tokens=min(8, power_of_two(num_tokens)),
        sum_hidden=256,
        block_intermediate=tiles.hidden_columns,
        gate_up=_product(w_gate_up, tiles, wide * tiles.hidden_columns, 1, halves=halves),
        down=_product(w_down, tiles, tiles.columns, tiles.splits),
    )
    # Of three programs and more the compiler gives a thread more than leave room for so many.
    registers = whole_registers(tiles.programs, tiles.num_warps) if tiles.programs > 2 else None
    return Config(all_programs(tiles.programs), tiles.num_warps, tiles.num_stages, registers), sizes


def _product(w: Matrices, tiles: FusedTiles, columns: int, splits: int, *, halves: bool = False) -> FusedGemm:
    if not isinstance(w, QuantizedWeights):
        tile = FusedTile(tiles.block_m, columns, tiles.depth, swap_ab=False)
        stored: dict[str, Any] = {"decoder": "", "values_per_byte": 1, "block_size": 0, "prepacked": False}
        return FusedGemm(
            w.shape[2], w.shape[1], **stored, split_halves=False, fp8_rows=False, k_splits=splits, tile=tile
        )
    tile = FusedTile(tiles.block_m, columns, tiles.depth, swap_ab=is_turned(w, tiles.block_m))
    sizes: dict[str, Any] = {"N": w.shape[2], "K": w.shape[1], "k_splits": splits, **storage_of(w)}
    return FusedGemm(**sizes, split_halves=halves, fp8_rows=w.activations is not None, tile=tile)


def fused_tiles(
    slots: int,
    num_experts: int,
    hidden: int,
    intermediate: int,
    bits: int,
    *,
    in_fp8: bool = False,
    turned: bool = False,
) -> FusedTiles:
    """Tiles for so many slots, of about as many rows of each expert as there are (benchmarks/fused_moe.py --tiles).

    Elements of matrices have so many bits. Rows in FP8 share a scale in 128 columns, which are of one task then. Turned
    are products of prepacked weights, and those of FP8 in blocks of 32 and 64.
    """
    active = num_experts * (1 - (1 - 1 / num_experts) ** slots)  # experts that have rows, if all are chosen alike
    rows = slots / active
    converted = bits < 16 and not in_fp8
    if rows > max(48, few_rows(bits, in_fp8=in_fp8, turned=turned)):
        return _tiles_of_many_rows(converted=converted, in_fp8=in_fp8)
    layer = _Layer(active, hidden, intermediate)
    if converted and not turned:
        block_m = 16 if rows <= 20 else 32 if rows <= 36 or bits == 4 else 64
    else:
        block_m = 16 if rows <= 12 else 32 if rows <= (36 if turned and bits == 8 else 26) else 64
    if turned and (bits == 4 or block_m > 16):
        return _turned_tiles(block_m, bits, layer)
    if in_fp8:
        if bits == 4 and layer.hidden_tasks(128) <= all_programs(5):
            return FusedTiles(block_m, 128, 128, num_stages=4, programs=2)
        return FusedTiles(block_m, 128, 128, programs=3 if bits == 4 else 2)
    many = layer.row_tasks(128) >= all_programs(3)
    if converted and block_m <= 32 and (many or layer.hidden_tasks(64) > all_programs(4)):
        return _converted_tiles(block_m, bits, layer, many=many)
    return FusedTiles(block_m, columns=128, programs=3) if many else _tiles_of_few_tasks(block_m, layer)


class _Layer(NamedTuple):
    """Experts that have rows, and the columns of both products."""

    active: float
    hidden: int
    intermediate: int

    def hidden_tasks(self, columns: int) -> float:
        """Of the first product, in tiles of so many columns."""
        return self.active * -(-self.intermediate // columns)

    def row_tasks(self, columns: int) -> float:
        """Of the second."""
        return self.active * -(-self.hidden // columns)


def _tiles_of_many_rows(*, converted: bool, in_fp8: bool) -> FusedTiles:
    if in_fp8:
        return FusedTiles(64, 128, 128, num_warps=8, programs=1)
    if converted:
        return FusedTiles(128, 64, 128, num_warps=8, programs=1)
    return FusedTiles(128, 128, 256, depth=64, num_warps=8, num_stages=4, programs=1)


def _turned_tiles(block_m: int, bits: int, layer: _Layer) -> FusedTiles:
    # An element is made once for all rows of a block, so more of them cost little; accumulators take registers.
    programs = {16: 4, 32: 3, 64: 2}[block_m]
    # A warpgroup takes 64 columns at the least: in 4 bits gates and what they multiply are columns of one product.
    columns = 64 if bits == 4 and layer.hidden_tasks(64) < all_programs(2) else 128
    splits = _splits(layer.row_tasks(columns), all_programs(programs), layer.intermediate)
    return FusedTiles(block_m, columns // 2, columns, splits, programs=programs)


def _converted_tiles(block_m: int, bits: int, layer: _Layer, *, many: bool) -> FusedTiles:
    # Instructions for elements are what there is most of: by as many warps as there are registers for, or in wide
    # tiles, which read rows less often.
    splits = _splits(layer.row_tasks(128), all_programs(3), layer.intermediate)
    wide = block_m == 32 or (bits == 4 and (not many or layer.hidden_tasks(128) >= all_programs(5)))
    programs = 2 if block_m == 32 else 4 if bits == 8 else 3
    return FusedTiles(block_m, 128 if wide else 64, 128, splits, programs=programs)


def _tiles_of_few_tasks(block_m: int, layer: _Layer) -> FusedTiles:
    # So that all programs read from the start, and each enough at a time.
    columns = 32 if layer.hidden_tasks(32) <= all_programs(2) else 64
    splits = 1
    while 2 * splits * layer.row_tasks(64) <= all_programs(8) and layer.intermediate >= 768 * splits:
        splits *= 2
    return FusedTiles(block_m, columns, splits=splits, num_stages=4 if block_m == 16 else 3)


def _splits(tasks: float, programs: int, intermediate: int) -> int:
    """In how many parts of at least 512 columns of I the second product is made, so that all programs have tasks."""
    splits = 1
    while splits * tasks < programs and intermediate >= 1024 * splits:
        splits *= 2
    return splits
