"""The whole expert layer of one device in one launch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep.core import check
from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_matrices import ExpertWeights, QuantizedWeights
from jax_ep.core.facts import FusedMoEFacts
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.kernel import Argument, Config, Descriptor, Kernel
from jax_ep.core.layout import SortSizes, power_of_two
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.core.router import SMALLEST_SUM, Router, RouterInputs
from jax_ep.formats import format_of, stored_name
from jax_ep.megakernels import tuned
from jax_ep.megakernels.activation import kind_of, quantize_rows
from jax_ep.megakernels.cost_model import few_rows, serves_in_one_launch
from jax_ep.megakernels.grouped_gemm import check_gluon
from jax_ep.megakernels.kernels import fused_moe as fused_moe_kernels
from jax_ep.megakernels.kernels import gluon_fused_moe, gluon_quantized
from jax_ep.megakernels.kernels.fused_moe_structs import (
    FusedGemm,
    FusedMoE,
    FusedTile,
    GluonMoE,
    LayerScratch,
    LayerTensors,
    RoutedLayerTensors,
    SortedLayerTensors,
)
from jax_ep.megakernels.kernels.route import RouterSizes
from jax_ep.megakernels.launch import Programs, all_programs, int32, launch, new_counters, thread_registers
from jax_ep.megakernels.moe_sort import moe_sort
from jax_ep.megakernels.quantized_gemm import (
    Language,
    gluon_registers,
    is_gluon_operand,
    runs_in_gluon,
    storage_of,
    swaps_ab,
)
from jax_ep.megakernels.requirements import has_tma, is_readable, runs_gluon
from jax_ep.types import Array, Experts, Schedule

_FUSED = Kernel(fused_moe_kernels.fused_moe)
_GLUON = Kernel(gluon_fused_moe.fused_moe)
_MOST_UNSORTED = 512  # assignments, which every program sorts itself
_MOST_ROUTED = 1024  # experts whose logits a program holds in registers
_FEW_BYTES = 1 << 24  # of rows of the result in float32; larger ones have the dtype of tokens
Matrices = Array | QuantizedWeights


@dataclasses.dataclass(frozen=True)
class FusedTiles(Programs):
    """Tasks of the layer."""

    block_m: int = 16  # assignments of a block, at least the 16 rows that tensor cores multiply without swap_ab
    hidden_columns: int = 64  # columns of I of a task of the first GEMM
    columns: int = 64  # columns of H of a task of the second GEMM
    splits: int = 1  # parts of I that are separate tasks of the second GEMM
    depth: int = 128  # depth of one step of either GEMM
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
    """Return whether one launch supports the layer of this many assignments."""
    in_16_bits = dtype in (jnp.bfloat16, jnp.float16)
    taken = num_slots > 0 and in_16_bits and not callable(experts.activation) and has_tma()
    return taken and _is_read(w_gate_up) and _is_read(w_down)


def is_fastest(num_slots: int, dtype: DTypeLike, w_gate_up: Matrices, w_down: Matrices, *, specialized: bool) -> bool:
    """Return whether one launch should be faster than several of `dtype` rows; see cost_model.py for `specialized`."""
    single_launch = tuned.schedule(Schedule(), "fused_moe", **layer_facts(num_slots, w_down)).single_launch
    if single_launch is not None:
        return single_launch
    (num_experts, intermediate, hidden), (bits, in_fp8) = w_down.shape, _bits(w_down)
    in_gluon = all(isinstance(w, QuantizedWeights) and runs_in_gluon(w, dtype) for w in (w_gate_up, w_down))
    return serves_in_one_launch(
        *(num_slots, num_experts, hidden, intermediate, bits),
        in_fp8=in_fp8,
        swap_ab=_swaps_ab(w_down),
        specialized=specialized,
        in_gluon=in_gluon,
    )


def gathers(facts: FusedMoEFacts) -> bool:
    """Return whether this launch takes less time for the tokens of all ranks than several for rows of its experts.

    It does with prepacked weights (decode_layer_qwen3.json, decode_layer_gpt_oss.json), but not with those of 8 and 16
    bits (no report).
    """
    return _takes_in_gluon(facts)


def _bits(w_down: Matrices) -> tuple[int, bool]:
    """Return the bits of an element, and whether rows are FP8, too."""
    if not isinstance(w_down, QuantizedWeights):
        return 16, False
    return format_of(w_down).bits, w_down.activations == "fp8"


def _swaps_ab(w: Matrices) -> bool:
    """Return whether elements are converted in the registers of tensor cores, once for all rows of a block."""
    return isinstance(w, QuantizedWeights) and not w.activations and swaps_ab(w, 32)


def layer_facts(num_slots: int, w_down: Matrices) -> dict[str, object]:
    """Return the facts by which settings are looked up."""
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


class _Routing(NamedTuple):
    """The routing of a launch: ids and weights, or what the launch chooses them by."""

    top_k: int
    arrays: tuple[Array, ...]  # ids and weights, or logits, bias and mask
    router: RouterSizes | None  # None: ids and weights
    num_ranks: int = 1  # that share the assignments

    def results(self, num_tokens: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Describe the ids and weights that the launch chooses; of one element if it does not."""
        shape = (1,) if self.router is None else (num_tokens, self.top_k)
        return jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)


def fused_moe(
    experts: Experts,
    x: Array,
    topk_idx: Array,
    topk_weights: Array,
    parts: ExpertWeights,
    *,
    out_dtype: DTypeLike,
    num_ranks: int = 1,
) -> Array:
    """Compute the expert layer of one device: `jax_ep.moe` without a mesh axis, with checked arguments.

    With more than one rank, about one in `num_ranks` ids is that of an expert here, and the others are none.
    """
    x, topk_idx, topk_weights, parts = vary_alike((x, topk_idx, topk_weights, parts))
    routing = _Routing(topk_idx.shape[1], (topk_idx, topk_weights), None, num_ranks)
    return _launch(experts, x, routing, parts, out_dtype)[0]


def routed_moe(
    experts: Experts,
    router: Router,
    top_k: int,
    x: Array,
    inputs: RouterInputs,
    parts: ExpertWeights,
    *,
    out_dtype: DTypeLike,
) -> tuple[Array, Array]:
    """Choose experts and compute their layer on one device; return the output and the ids.

    See `reason_against_router` for what it takes.
    """
    (logits, *optional), x, parts = vary_alike((inputs, x, parts))
    sizes = router_sizes(router, top_k, logits.shape[1], *(array is not None for array in optional))
    arrays = logits, *(logits if array is None else array for array in optional)
    return _launch(experts, x, _Routing(top_k, arrays, sizes), parts, out_dtype)


def router_sizes(router: Router, top_k: int, num_experts: int, has_bias: bool, has_mask: bool) -> RouterSizes:
    """Return the sizes of a router."""
    return RouterSizes(
        score=router.score,
        renormalize=router.renormalize,
        scale=router.scale,
        smallest_sum=SMALLEST_SUM,
        has_bias=has_bias,
        has_mask=has_mask,
        padded_experts=power_of_two(num_experts),
        padded_top_k=power_of_two(top_k),
    )


def reason_against_router(
    experts: Experts, router: Router, top_k: int, x: Array, logits: Array, parts: ExpertWeights
) -> str:
    """Return why the launch of the layer of tokens `x` cannot choose experts by these logits; empty: it can."""
    if router.score == "sparsemixer" or router.num_groups > 1:
        return "the launch of the layer has no groups of experts and no SparseMixer"
    if logits.shape[1] > _MOST_ROUTED or logits.dtype.itemsize > 4:
        return f"the launch of the layer takes logits of up to 32 bits and {_MOST_ROUTED} experts"
    weights = parts[:2]
    if not runs_layer_in_gluon(FusedMoEFacts(x.dtype, experts, x.shape[0] * top_k, *weights)):
        if fused_sizes(experts, x.shape, top_k, *weights)[1].presorted:
            return f"assignments are sorted before the launch: more than {_MOST_UNSORTED}, or many per expert"
    return ""


def _launch(
    experts: Experts, x: Array, routing: _Routing, parts: ExpertWeights, out_dtype: DTypeLike
) -> tuple[Array, Array]:
    """Run the kernel; return the output and the ids that it has chosen, if it does."""
    w_gate_up, w_down, *biases = parts
    facts = FusedMoEFacts(x.dtype, experts, x.shape[0] * routing.top_k, w_gate_up, w_down, routing.num_ranks)
    if runs_layer_in_gluon(facts):
        return _by_gluon(facts, x, routing, parts, out_dtype)
    weights, own_slots = (w_gate_up, w_down), facts.own_slots
    config, sizes = fused_sizes(experts, x.shape, routing.top_k, *weights, routing.router, own_slots=own_slots)
    (gate_up, gate_up_scales), (down, down_scales) = (
        _operands(w, product) for w, product in ((w_gate_up, sizes.gate_up), (w_down, sizes.down))
    )
    tokens, token_scales = x, routing.arrays[1]
    if sizes.gate_up.fp8_rows:
        tokens, token_scales = quantize_rows(x, jnp.full((1,), sizes.num_tokens, jnp.int32))
    kind = LayerTensors if routing.router is None else RoutedLayerTensors
    tensors: tuple[Any, ...] = kind(tokens, token_scales, gate_up, down, *routing.arrays)
    if sizes.presorted:
        topk_idx = routing.arrays[0]
        found = moe_sort(topk_idx, None, None, SortSizes(0, sizes.num_experts, sizes.down.tile.block_m))
        tensors = SortedLayerTensors._make((*tensors, found.slots, found.block_expert, found.num_rows))
    counters = new_counters(3 + sizes.max_blocks, x)
    results: tuple[Argument, ...] = (
        _scratch(sizes, routing, x.dtype),
        jax.ShapeDtypeStruct(x.shape, out_dtype),
        *int32(counters.shape),
    )
    operands = (tensors, gate_up_scales, down_scales, *biases, counters)
    constants = {"KIND": kind_of(experts), "S": sizes}
    scratch, out, _ = launch(_FUSED, operands, results, config, constants, written={-1: -1})
    return out, scratch.topk_idx_ptr


def _scratch(sizes: FusedMoE, routing: _Routing, dtype: DTypeLike) -> LayerScratch:
    """Return the scratch memory for tokens of `dtype`."""
    slots, in_fp8 = sizes.num_tokens * sizes.top_k, sizes.down.fp8_rows
    rows = (slots, sizes.down.k_splits, sizes.hidden)
    order, blocks = int32(*((1 if sizes.presorted else size,) for size in (sizes.padded_assignments, sizes.max_blocks)))
    return LayerScratch(
        jax.ShapeDtypeStruct((slots, sizes.intermediate_size), FP8 if in_fp8 else dtype),
        jax.ShapeDtypeStruct((slots, sizes.intermediate_size // GROUP_SIZE) if in_fp8 else (1,), jnp.float32),
        _summed_rows(rows, dtype),
        order,
        blocks,
        *routing.results(sizes.num_tokens),
    )


def _summed_rows(shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """Describe the rows that the last phase sums."""
    return jax.ShapeDtypeStruct(shape, jnp.float32 if 4 * math.prod(shape) <= _FEW_BYTES else dtype)


def _operands(w: Matrices, product: FusedGemm) -> tuple[Descriptor, Array | None]:
    """Return weights as the kernel reads them, and their scales."""
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
    router: RouterSizes | None = None,
    *,
    own_slots: int | None = None,
) -> tuple[Config, FusedMoE]:
    """Return config and sizes for tokens `[T, H]`, from shapes and formats of the weights.

    `own_slots` are the assignments to experts of this device; None: all.
    """
    (num_tokens, hidden), (num_experts, intermediate, _) = shape, w_down.shape
    slots, (bits, in_fp8) = num_tokens * top_k, _bits(w_down)
    own_slots = own_slots or slots
    prepacked = [isinstance(w, QuantizedWeights) and w.is_prepacked for w in (w_gate_up, w_down)]
    halves = prepacked[0] and experts.gated and not experts.interleaved
    swap_ab = any(map(_swaps_ab, (w_gate_up, w_down)))
    default = fused_tiles(own_slots, num_experts, hidden, intermediate, bits, in_fp8=in_fp8, swap_ab=swap_ab)
    tiles = tuned.tiles(default, "fused_moe", **layer_facts(own_slots, w_down))
    _check_tiles(tiles, in_fp8=in_fp8, prepacked=any(prepacked))
    wide = 2 if experts.interleaved or halves else 1
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
        router=router,
    )
    # With three programs or more, limit the registers: the compiler would give a thread too many.
    registers = thread_registers(tiles.programs, tiles.num_warps, multiple=8) if tiles.programs > 2 else None
    return Config(all_programs(tiles.programs), tiles.num_warps, tiles.num_stages, registers), sizes


def _check_tiles(tiles: FusedTiles, *, in_fp8: bool, prepacked: bool) -> None:
    if in_fp8:
        reason, remedy = "the columns of tokens in FP8 that share a scale", "leave the setting out"
        check.multiple("fused_moe", "hidden_columns", tiles.hidden_columns, GROUP_SIZE, reason, remedy)
    if prepacked and tiles.depth not in (128, 256):
        raise ValueError(
            f"fused_moe: depth={tiles.depth} with prepacked weights, expected 128 or 256; leave the setting out."
        )


def _product(w: Matrices, tiles: FusedTiles, columns: int, splits: int, *, halves: bool = False) -> FusedGemm:
    stored: dict[str, Any] = {"decoder": "", "values_per_byte": 1, "block_size": 0, "prepacked": False}
    fp8_rows = swap_ab = False
    if isinstance(w, QuantizedWeights):
        stored, fp8_rows, swap_ab = storage_of(w), w.activations is not None, swaps_ab(w, tiles.block_m)
    tile = FusedTile(tiles.block_m, columns, tiles.depth, swap_ab=swap_ab)
    stored |= {"split_halves": halves, "fp8_rows": fp8_rows, "k_splits": splits}
    return FusedGemm(N=w.shape[2], K=w.shape[1], **stored, tile=tile)


def fused_tiles(
    slots: int,
    num_experts: int,
    hidden: int,
    intermediate: int,
    bits: int,
    *,
    in_fp8: bool = False,
    swap_ab: bool = False,
) -> FusedTiles:
    """Return the tiles for this many assignments to experts that are chosen alike.

    Elements of weights have `bits` bits. Rows in FP8 share a scale in 128 columns, which one task computes. `swap_ab`
    is true of prepacked weights, and of FP8 in blocks of 32 and 64.
    """
    layer = _Layer(_active_experts(slots, num_experts), hidden, intermediate)
    rows = slots / layer.active
    converted = bits < 16 and not in_fp8
    if rows > max(48, few_rows(bits, in_fp8=in_fp8, swap_ab=swap_ab)):
        return _tiles_of_many_rows(converted=converted, in_fp8=in_fp8)
    if converted and not swap_ab:
        block_m = 16 if rows <= 20 else 32 if rows <= 36 or bits == 4 else 64
    else:
        block_m = 16 if rows <= 12 else 32 if rows <= (36 if swap_ab and bits == 8 else 26) else 64
    if swap_ab and (bits == 4 or block_m > 16):
        return _swapped_tiles(block_m, bits, layer)
    if in_fp8:
        if bits == 4 and layer.hidden_tasks(128) <= all_programs(5):
            return FusedTiles(block_m, 128, 128, num_stages=4, programs=2)
        return FusedTiles(block_m, 128, 128, programs=3 if bits == 4 else 2)
    many = layer.row_tasks(128) >= all_programs(3)
    if converted and block_m <= 32 and (many or layer.hidden_tasks(64) > all_programs(4)):
        return _converted_tiles(block_m, bits, layer, many=many)
    if many:
        return FusedTiles(block_m, columns=128, programs=2 if layer.hidden_tasks(64) <= all_programs(3) else 3)
    return _tiles_of_few_tasks(block_m, bits, layer)


def _active_experts(slots: int, num_experts: int) -> float:
    """Return the expected number of experts that have rows."""
    return num_experts * (1 - (1 - 1 / num_experts) ** slots)


class _Layer(NamedTuple):
    """Experts that have rows, and the columns of both GEMMs."""

    active: float
    hidden: int
    intermediate: int

    def hidden_tasks(self, columns: int) -> float:
        """Return the number of tasks of the first GEMM, in tiles of this many columns."""
        return self.active * -(-self.intermediate // columns)

    def row_tasks(self, columns: int) -> float:
        """Return the number of tasks of the second GEMM, in tiles of this many columns."""
        return self.active * -(-self.hidden // columns)


def _tiles_of_many_rows(*, converted: bool, in_fp8: bool) -> FusedTiles:
    if in_fp8:
        return FusedTiles(64, 128, 128, num_warps=8, programs=1)
    if converted:
        return FusedTiles(128, 64, 128, num_warps=8, programs=1)
    return FusedTiles(128, 128, 256, depth=64, num_warps=8, num_stages=4, programs=1)


def _swapped_tiles(block_m: int, bits: int, layer: _Layer) -> FusedTiles:
    # Elements are converted once for all rows of a block, so more rows cost little; accumulators take registers.
    most = {16: 4, 32: 3, 64: 2}[block_m]
    # A warpgroup takes at least 64 columns: in 4 bits, gates and up values are columns of one GEMM.
    if bits == 4 and layer.hidden_tasks(64) < all_programs(2):
        programs = _programs(layer.hidden_tasks(32), most)
        return FusedTiles(block_m, 32, 64, _splits(layer, 64, programs, all_busy=False), 256, programs=programs)
    programs = _programs(layer.hidden_tasks(64), most)
    return FusedTiles(block_m, 64, 128, _splits(layer, 128, programs, all_busy=True), programs=programs)


def _converted_tiles(block_m: int, bits: int, layer: _Layer, *, many: bool) -> FusedTiles:
    # Conversions dominate: use as many warps as have registers, or wide tiles, which read rows less often.
    splits = _splits(layer, 128, 3, all_busy=True)
    wide = block_m == 32 or (bits == 4 and (not many or layer.hidden_tasks(128) >= all_programs(5)))
    columns = 128 if wide else 64
    programs = _programs(layer.hidden_tasks(columns), 2 if block_m == 32 else 4 if bits == 8 else 3)
    return FusedTiles(block_m, columns, 128, splits, programs=programs)


def _tiles_of_few_tasks(block_m: int, bits: int, layer: _Layer) -> FusedTiles:
    # All programs read from the start, and each enough at a time: of small experts wide tiles of rows, if nearly all
    # programs have one.
    wide = layer.intermediate < 1024 and 1.1 * layer.row_tasks(128) >= all_programs(1)
    columns = 128 if wide else 64
    hidden_columns = 32 if layer.hidden_tasks(32) <= all_programs(2) else 64
    few = wide and max(layer.row_tasks(columns), layer.hidden_tasks(hidden_columns)) <= all_programs(1)
    stages = 4 if block_m == 16 and (bits == 16 or not wide) else 3
    splits = _splits(layer, columns, 8, all_busy=False)
    return FusedTiles(block_m, hidden_columns, columns, splits, num_stages=stages, programs=1 if few else 2)


def _programs(tasks: float, most: int) -> int:
    """Return the fewest programs per multiprocessor, 2 or more, that run all tasks at once, or `most`."""
    return next((number for number in range(2, most) if tasks <= all_programs(number)), most)


def _splits(layer: _Layer, columns: int, programs: int, *, all_busy: bool) -> int:
    """Return the number of parts of I, of at least 512 columns each, that are separate tasks of the second GEMM.

    With `all_busy` they are the fewest that give every program a task, otherwise the most that leave none a second one.
    """
    splits, tasks, most = 1, layer.row_tasks(columns), all_programs(programs)
    while layer.intermediate >= 1024 * splits and (splits * tasks < most if all_busy else 2 * splits * tasks <= most):
        splits *= 2
    return splits


# --- in Gluon ---------------------------------------------------------------------------------------------------------

_HALF, _COLUMNS = gluon_fused_moe.HALF.value, gluon_fused_moe.COLUMNS.value  # of a tile of either GEMM
_GLUON_ROWS = {8: 5, 16: 12, 32: 26}  # rows per expert that has some, up to which a block has this many
_COPY_REGISTERS = {8: 32, 16: 32, 32: 32, 64: 48}  # of a thread that copies, by rows of a block
_MOST_SHARED_ROWS = gluon_quantized.MMA_SYNC_ROWS.value  # of a block whose steps two warpgroups share
_SUM_HIDDEN = 512  # columns of a task that sums rows


@dataclasses.dataclass(frozen=True)
class GluonLayerTiles:
    """Tasks of the layer in Gluon: 64 columns of I in the first GEMM, 128 columns of H in the second."""

    block_m: int  # assignments of a block
    splits: int  # parts of I that are separate tasks of the second GEMM
    programs: int  # see `Programs`
    num_stages: int = 4
    consumers: int = 1  # warpgroups that share the steps of a tile; 1 for more than 16 rows, or an odd num_stages
    candidates: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (8, 16, 32, 64),
        "consumers": (1, 2),
        "splits": (1, 2, 4, 8),
        "num_stages": (2, 3, 4, 6),
        "programs": (1, 2, 3, 4),
    }


def runs_layer_in_gluon(layer: FusedMoEFacts) -> bool:
    """Return whether the kernel in Gluon computes this layer."""
    takes, slots, w_down = _takes_in_gluon(layer), layer.own_slots, layer.w_down
    facts = layer_facts(slots, w_down)
    # Its tiles are wide: a token of small experts has few, and smaller tiles in Triton may take less time.
    wanted = takes and runs_gluon() and 2 * _gluon_layer(slots, w_down).hidden_tasks(_HALF) > all_programs(1)
    default = Language(wanted)
    if not tuned.tiles(default, "fused_moe", **facts).gluon:
        return False
    check_gluon("fused_moe")
    if not takes:
        raise NotImplementedError(
            f"fused_moe: gluon=True with {layer.num_slots} assignments of {layer.dtype} tokens to"
            f" {facts['format']} weights, expected at most {_MOST_UNSORTED} assignments of bfloat16 tokens, gated"
            " experts, and both matrices prepacked MXFP4, or both prepacked INT4 with block_size=128; leave gluon"
            " out of the settings of fused_moe."
        )
    return True


def _takes_in_gluon(facts: FusedMoEFacts) -> bool:
    """Return whether the kernel in Gluon supports this layer, on GPUs that run it."""
    weights = facts.w_gate_up, facts.w_down
    read = [w for w in weights if isinstance(w, QuantizedWeights) and is_gluon_operand(w, facts.dtype)]
    alike = len(read) == 2 and read[0].format == read[1].format
    return alike and facts.experts.gated and facts.num_slots <= _MOST_UNSORTED


def _gluon_layer(slots: int, w_down: Matrices) -> _Layer:
    num_experts, intermediate, hidden = w_down.shape
    return _Layer(_active_experts(slots, num_experts), hidden, intermediate)


def gluon_tiles(slots: int, w_down: QuantizedWeights) -> GluonLayerTiles:
    """Return the tiles of the kernel in Gluon for this many assignments to experts that are chosen alike."""
    layer = _gluon_layer(slots, w_down)
    block_m = next((size for size, rows in _GLUON_ROWS.items() if slots <= rows * layer.active), 64)
    tasks, most = layer.hidden_tasks(_HALF), {8: 4, 16: 4, 32: 3, 64: 2}[block_m]
    # Fewer programs divide few tasks better. More rows, and INT4, need the registers of more programs.
    few = 2 if tasks < all_programs(4) else 3 if tasks < all_programs(10) or w_down.format != "mxfp4" else 4
    # With about one task per multiprocessor, as of a single token, two warpgroups share its steps.
    shared = block_m <= _MOST_SHARED_ROWS and tasks <= 1.4 * all_programs(1)
    programs, consumers = (1, 2) if shared else (min(few, most), 1)
    splits = _splits(layer, _COLUMNS, 2 * programs, all_busy=True)
    default = GluonLayerTiles(block_m, splits, programs, consumers=consumers)
    tiles = tuned.tiles(default, "fused_moe_gluon", **layer_facts(slots, w_down))
    if tiles.block_m > _MOST_SHARED_ROWS or tiles.num_stages % 2:
        return dataclasses.replace(tiles, consumers=1)
    return tiles


def gluon_sizes(
    shape: tuple[int, ...],
    top_k: int,
    w_down: QuantizedWeights,
    tiles: GluonLayerTiles,
    router: RouterSizes | None = None,
) -> GluonMoE:
    """Return the sizes of the kernel in Gluon for tokens `[T, H]`."""
    (num_tokens, hidden), (num_experts, intermediate, _) = shape, w_down.shape
    step, copy_registers = gluon_fused_moe.STEP.value, _COPY_REGISTERS[tiles.block_m]
    row_steps = -(-intermediate // step)
    return GluonMoE(
        num_tokens=num_tokens,
        top_k=top_k,
        hidden=hidden,
        intermediate_size=intermediate,
        num_experts=num_experts,
        decoder=format_of(w_down).decoder,
        slots=max(128, power_of_two(num_tokens * top_k)),
        bins=max(128, power_of_two(num_experts + 1)),
        tile_m=tiles.block_m,
        stages=tiles.num_stages,
        consumers=tiles.consumers,
        copy_registers=copy_registers,
        # Three warpgroups have the registers of the launch: two of consumers, one of copying warps.
        help_registers=(3 * gluon_registers(tiles.programs, 2) - copy_registers) // 16 * 8,
        hidden_tiles=-(-intermediate // _HALF),
        hidden_steps=-(-hidden // step),
        row_tiles=-(-hidden // _COLUMNS),
        row_steps=row_steps,
        k_splits=tiles.splits,
        split_steps=-(-row_steps // tiles.splits),
        sum_hidden=_SUM_HIDDEN,
        sum_tiles=-(-hidden // _SUM_HIDDEN),
        sum_tasks=num_tokens * -(-hidden // _SUM_HIDDEN),
        router=router,
    )


def gluon_weights(w: QuantizedWeights) -> gluon_fused_moe.Weights:
    """Describe weights as the kernel in Gluon reads them."""
    words = gluon_fused_moe.WORDS.value
    return gluon_fused_moe.Weights(
        Descriptor(w.values.reshape(-1, w.values.shape[-1]), (_HALF, words)),
        Descriptor(cast(Array, w.scales).reshape(-1, w.shape[-1]), (1, _HALF)),
    )


def _by_gluon(
    facts: FusedMoEFacts, x: Array, routing: _Routing, parts: ExpertWeights, out_dtype: DTypeLike
) -> tuple[Array, Array]:
    """Run the kernel in Gluon as `_launch` does."""
    slots, tiles = facts.num_slots, gluon_tiles(facts.own_slots, parts.w_down)
    sizes = gluon_sizes(x.shape, routing.top_k, parts.w_down, tiles, routing.router)
    counters = new_counters(3 + min(slots, sizes.num_experts + slots // sizes.tile_m), x)
    results: tuple[Argument, ...] = (
        gluon_fused_moe.Outputs(
            jax.ShapeDtypeStruct((slots, sizes.intermediate_size), x.dtype),
            _summed_rows((slots, sizes.k_splits, sizes.hidden), x.dtype),
            jax.ShapeDtypeStruct(x.shape, out_dtype),
            *routing.results(sizes.num_tokens),
        ),
        *int32(counters.shape),
    )
    kind = gluon_fused_moe.Inputs if routing.router is None else gluon_fused_moe.RoutedInputs
    operands = (*map(gluon_weights, parts[:2]), kind(x, *routing.arrays), *parts[2:], counters)
    registers = gluon_registers(tiles.programs, tiles.consumers)
    config = Config(all_programs(tiles.programs), 4, max_registers=registers)
    constants = {"KIND": kind_of(facts.experts), "S": sizes}
    found = launch(_GLUON, operands, results, config, constants, written={-1: -1})[0]
    return found.out_ptr, found.topk_idx_ptr
