"""The operations that `jax-ep tune` measures: their settings, and chains of calls.

Candidates of tiles are next to each kernel's tile dataclass; those of other settings are here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import tuning
from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_matrices import QuantizedWeights
from jax_ep.core.facts import ExchangeFacts, FusedMoEFacts, GemmFacts
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.megakernels import grouped_gemm, tuned
from jax_ep.megakernels.fused_moe import FusedTiles, GluonLayerTiles, layer_facts, runs_layer_in_gluon
from jax_ep.megakernels.masked import MaskedTiles
from jax_ep.megakernels.quantized_gemm import GluonTiles, QuantizedTiles, quantized_facts, tuned_gluon_tiles
from jax_ep.megakernels.requirements import MOST_LOW_LATENCY_TOKENS
from jax_ep.ops import exchange_gemm as ops
from jax_ep.ops import plan as plans
from jax_ep.ops import registry
from jax_ep.ops.fused_moe import fused_moe as public_fused_moe
from jax_ep.ops.low_latency import low_latency_combine, low_latency_dispatch
from jax_ep.ops.masked import masked_grouped_gemm
from jax_ep.settings.operations import Setting
from jax_ep.tools.benchmark import harness
from jax_ep.tools.benchmark.chains import chain
from jax_ep.tools.benchmark.exchange import local_after, make_handle
from jax_ep.tools.benchmark.fused_moe import stored_as
from jax_ep.tools.benchmark.inputs import Model, expert_mesh, make_case, make_weights, on_ranks, routing
from jax_ep.tools.tune_search import Case, Run, Settings
from jax_ep.types import Array, Experts, Options

_BF16 = jnp.dtype(jnp.bfloat16)
_PROGRAMS, _BLOCKS = (8, 16, 24, 32, 48), (2, 4, 8, 16, 32)

Make = Callable[[], Iterator[Case]]


class Sizes(NamedTuple):
    """An expert layer, and the ranks that share it."""

    tokens: int  # per rank
    model: Model  # sizes of the layer
    ranks: int  # number of ranks
    routing: str  # "uniform" or "zipf"

    @property
    def title(self) -> str:
        return f"{self.tokens} tokens x {self.model.hidden}, {self.ranks} ranks"


def makers(parts: Sequence[str], all_sizes: Sequence[Sizes], formats: Sequence[str]) -> Iterator[Make]:
    """Yield functions that make the cases of one group, and their arrays."""
    made: dict[str, list[Callable[[Sizes], Iterator[Case]]]] = {
        "exchange": [_exchange],
        "exchange-gemm": [_exchange_gemm],
        "low-latency": [_low_latency, _masked_gemm],
        "grouped-gemm": [_grouped_gemm, _grouped_gemm_fp8],
        "fused-moe": [_fused_moe],
    }
    quantized = {"grouped-gemm": _quantized_gemm, "fused-moe": _fused_moe}
    for sizes in all_sizes:
        for part in parts:
            if part == "low-latency" and sizes.tokens > MOST_LOW_LATENCY_TOKENS:
                reason = f"low-latency is for at most {MOST_LOW_LATENCY_TOKENS} tokens per rank; pass --tokens"
                yield partial(_left_out, sizes, reason)
                continue
            for make in made.get(part, ()):
                yield partial(make, sizes)
            for name in formats if part in quantized else ():
                yield partial(quantized[part], sizes, name)


def _left_out(sizes: Sizes, reason: str) -> NoReturn:
    raise NotImplementedError(f"{sizes.title}: {reason}")


def is_small() -> bool:
    """Return whether kernels run in the interpreter, whose time grows with the number of elements."""
    return jax.default_backend() == "cpu"


def _case(
    operation: str,
    facts: Mapping[str, Any],
    title: str,
    candidates: Mapping[str, Sequence[Setting]],
    step: Callable[..., Any],
    arrays: tuple[Any, ...],
    *,
    mesh: jax.sharding.Mesh | None = None,
    graphs: bool = False,
    start: Settings | None = None,
) -> Case:
    """Make a case whose chains run `step(zero, *arrays)`; `graphs` for calls that are shorter than their launch.

    Arrays are those of all ranks of `mesh`, or of one device. Settings take effect as in any program: by
    `jax_ep.tuning.override`, around tracing. In the interpreter only the first two candidates of each one are tried.
    """
    options = harness.GRAPHS if graphs and not is_small() else None

    def compile_chain(settings: Settings, n: int) -> Run:
        with tuning.override(operation, **settings):
            return partial(chain(mesh or expert_mesh(1), step, arrays, n)[0].lower(*arrays).compile(options), *arrays)

    return Case(
        operation=operation,
        facts=facts,
        title=title,
        candidates={name: values[: 2 if is_small() else None] for name, values in candidates.items()},
        start=start or {},
        make_chain=lambda settings: partial(compile_chain, settings),
    )


def _programs(per_multiprocessor: Sequence[int] = (1, 2)) -> tuple[int, ...]:
    """Return numbers of communicating programs, up to some per multiprocessor."""
    if is_small():
        return 1, 2
    count = jax.local_devices()[0].core_count
    return tuple(sorted({*_PROGRAMS, 64, 96, *(count * n for n in per_multiprocessor)}))


# --- all-to-all, alone and with GEMMs -------------------------------------------------------------------------------


class _Exchange:
    """Tokens of all ranks, and the handle of a dispatch."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.mesh, self.options = sizes, expert_mesh(sizes.ranks), Options("tune", ("expert",))
        self.case = make_case(self.mesh, sizes.routing, sizes.tokens, sizes.model)
        self.layout, self.run = self.case.layout, registry.EXCHANGE.by("triton")
        self.facts = tuned.exchange_facts(self.layout, sizes.model.hidden, _BF16)
        self.handle = make_handle(self.case, "triton")

    def plan(self, columns: int) -> plans.ExchangeGemmPlan:
        """Plan the all-to-all with GEMMs by `[hidden, columns]` weights, with the settings in effect."""
        facts = ExchangeFacts(_BF16, self.sizes.model.hidden, self.layout, columns=columns)
        return plans.exchange_gemm(self.options, facts, out_columns=columns)

    def rows(self, columns: int) -> Array:
        """Make random expert rows of all ranks."""
        return on_ranks(self.mesh, (self.layout.capacity, columns), 2)


def _exchange(sizes: Sizes) -> Iterator[Case]:
    """Yield dispatch and combine, each alone."""
    layer = _Exchange(sizes)
    case = layer.case

    def dispatch(dtype: Any, zero: Array, x: Array, handle: Any) -> Any:
        options = dataclasses.replace(layer.options, wire_dtype=dtype)
        return layer.run.dispatch_tokens(options, x, None, local_after(handle, zero))[0]

    def combine(zero: Array, y: Array, handle: Any) -> Any:
        return layer.run.combine_tokens(layer.options, y, None, local_after(handle, zero))[0]

    for wire, dtype in (("bf16", None), ("fp8", FP8)):
        if dtype is None or sizes.model.hidden % GROUP_SIZE == 0:
            yield _case(
                "dispatch",
                layer.facts | {"wire_dtype": jnp.dtype(dtype or _BF16)},
                f"dispatch of {sizes.title}, {wire}",
                {"num_communicating_programs": _programs(), "num_warps": (4, 8, 16), "tokens_per_block": _BLOCKS},
                partial(dispatch, dtype),
                (case.x, layer.handle),
                mesh=layer.mesh,
            )
    yield _case(
        "combine",
        layer.facts,
        f"combine of {sizes.title}",
        {
            "num_combining_programs": _programs((1, 2, 4)),
            "num_warps": (1, 2, 4, 8),
            "tokens_per_block": _BLOCKS,
            "rows_in_flight": (2, 3, 5, 7, 10),
        },
        combine,
        (layer.rows(sizes.model.hidden), layer.handle),
        mesh=layer.mesh,
    )


def _exchange_gemm(sizes: Sizes) -> Iterator[Case]:
    """Yield the all-to-alls with a GEMM: in one kernel or in two, and by how many programs."""
    wide, layer = 2 * sizes.model.intermediate, _Exchange(sizes)
    layout = layer.layout
    if (plan := layer.plan(wide)).fused is None:
        _left_out(sizes, plan.reason)
    w_gate_up, w_down = make_weights(layer.mesh, sizes.model)

    def first(zero: Array, x: Array, w: Array, handle: Any) -> Any:
        return ops.dispatch_and_multiply(layer.plan(wide), x, None, w, local_after(handle, zero))[0]

    def second(zero: Array, h: Array, w: Array, handle: Any) -> Any:
        handle = local_after(handle, zero)
        return ops.multiply_and_combine(layer.plan(sizes.model.intermediate), h, w, handle, None)

    yield _case(
        "dispatch_grouped_gemm",
        tuned.exchange_gemm_facts(layout, sizes.model.hidden, wide, _BF16),
        f"dispatch + GEMM of {sizes.title}",
        {"num_communicating_programs": _PROGRAMS, "dispatch_mode": ("serial", "fused")},
        first,
        (layer.case.x, w_gate_up, layer.handle),
        start={"dispatch_mode": "fused"},
        mesh=layer.mesh,
    )
    yield _case(
        "grouped_gemm_combine",
        tuned.exchange_gemm_facts(layout, sizes.model.intermediate, sizes.model.hidden, _BF16),
        f"GEMM + combine of {sizes.title}",
        {"combine_mode": ("serial", "scatter")},
        second,
        (layer.rows(sizes.model.intermediate), w_down, layer.handle),
        mesh=layer.mesh,
    )


def _low_latency(sizes: Sizes) -> Iterator[Case]:
    """Yield low-latency dispatch and combine."""
    layer = _Exchange(sizes)
    case, local = layer.case, sizes.model.experts // sizes.ranks
    keywords: dict[str, Any] = {"num_experts": sizes.model.experts, "max_tokens_per_rank": sizes.tokens}
    rows = on_ranks(layer.mesh, (local, sizes.ranks * sizes.tokens, sizes.model.hidden), 3)

    def dispatch(zero: Array, x: Array, ids: Array) -> Any:
        return low_latency_dispatch(x, ids + zero, **keywords, implementation="triton").tokens

    def round_trip(zero: Array, x: Array, ids: Array, weights: Array, rows: Array) -> Any:
        handle = low_latency_dispatch(x, ids + zero, **keywords, implementation="triton").handle
        return low_latency_combine(rows, ids, weights, handle, implementation="triton")

    yield _case(
        "low_latency_dispatch",
        layer.facts | {"wire_dtype": jnp.dtype(FP8)},
        f"low-latency dispatch of {sizes.title}",
        {"num_communicating_programs": _programs()},
        dispatch,
        (case.x, case.topk_idx),
        graphs=True,
        mesh=layer.mesh,
    )
    yield _case(
        "low_latency_combine",
        layer.facts,
        f"low-latency combine of {sizes.title}",
        {"num_combining_programs": _programs()},
        round_trip,
        (case.x, case.topk_idx, case.topk_weights, rows),
        graphs=True,
        mesh=layer.mesh,
    )


# --- GEMMs of one device --------------------------------------------------------------------------------------------


class _Gemm(NamedTuple):
    """A GEMM of the layer with the experts of one rank."""

    x: Array  # `[rows, K]`
    y: Array  # `[rows, N]` results, or cotangents of them
    w: Array  # `[experts, K, N]` weights
    counts: Array  # rows of each expert, of all ranks

    @property
    def title(self) -> str:
        return f"{self.x.shape[0]} rows x {self.w.shape[1]} x {self.w.shape[2]}, {self.w.shape[0]} groups"

    def facts(self, num_rows: int, dtype: Any) -> dict[str, Any]:
        """Return the facts of the GEMM and of its weight gradient."""
        groups, depth, columns = self.w.shape
        sizes = {"num_rows": num_rows, "depth": depth, "columns": columns, "groups": groups}
        return sizes | {"dtype": jnp.dtype(dtype), "out_dtype": _BF16}


def _gemms(sizes: Sizes) -> Iterator[_Gemm]:
    """Yield both GEMMs of the layer."""
    mesh, local, rows = expert_mesh(1), sizes.model.experts // sizes.ranks, sizes.tokens * sizes.model.top_k
    model = sizes.model._replace(experts=local, top_k=1)
    ids = routing(sizes.routing, rows, model, np.random.default_rng(0)) if local > 1 else np.zeros(rows, int)
    counts = jnp.asarray(np.bincount(ids.reshape(-1), minlength=local), jnp.int32)
    for depth, columns in (
        (sizes.model.hidden, 2 * sizes.model.intermediate),
        (sizes.model.intermediate, sizes.model.hidden),
    ):
        x, y = (on_ranks(mesh, (rows, width), seed) for seed, width in enumerate((depth, columns)))
        yield _Gemm(x, y, on_ranks(mesh, (local, depth, columns), 2, depth**-0.5), counts)


def _grouped_gemm(sizes: Sizes) -> Iterator[Case]:
    """Yield the GEMMs of the layer and their weight gradients."""
    run = registry.GROUPED_GEMM.by("triton")

    def gemm(zero: Array, x: Array, w: Array, counts: Array) -> Any:
        return run.grouped_gemm(x, w, counts + zero, transpose=False, out_dtype=_BF16)

    def gradient(zero: Array, x: Array, y: Array, counts: Array) -> Any:
        return run.weight_gradient(x, y, counts + zero, out_dtype=_BF16)

    for one in _gemms(sizes):
        facts, arrays = one.facts(one.x.shape[0], _BF16), (one.x, one.w, one.counts)
        tiles: grouped_gemm.GemmPrograms = grouped_gemm.forward_tiles(GemmFacts(**facts))
        yield _case("grouped_gemm", facts, f"GEMM of {one.title}", tiles.used_candidates, gemm, arrays)
        name, title, arrays = "weight_gradient", f"weight gradient of {one.title}", (one.x, one.y, one.counts)
        tiles = grouped_gemm.weight_tiles(GemmFacts(**facts))
        yield _case(name, facts, title, tiles.used_candidates, gradient, arrays)


def _grouped_gemm_fp8(sizes: Sizes) -> Iterator[Case]:
    """Yield the GEMMs and weight gradients in FP8."""
    if sizes.model.hidden % GROUP_SIZE or sizes.model.intermediate % GROUP_SIZE:
        _left_out(sizes, f"FP8 GEMMs need a hidden and an intermediate size that are multiples of {GROUP_SIZE}")
    run, quantize = registry.FP8_GEMM.by("triton"), registry.ACTIVATION.by("xla")

    def gemm(zero: Array, x: Any, w: Any, counts: Array) -> Any:
        return run.grouped_gemm_fp8(x, w, counts + zero, out_dtype=_BF16)

    def gradient(zero: Array, x: Any, y: Any, counts: Array) -> Any:
        return run.weight_gradient_fp8(x, y, counts + zero, out_dtype=_BF16)

    for one in _gemms(sizes):
        x, w = jax.jit(quantize.quantize_rows)(one.x, one.counts), jax.jit(quantize.quantize_matrices)(one.w)
        name, facts, title = "grouped_gemm_fp8", one.facts(one.x.shape[0], FP8), f"GEMM in FP8 of {one.title}"
        tiles: grouped_gemm.GemmPrograms = grouped_gemm.fp8_tiles(facts["num_rows"], facts["groups"], _BF16.itemsize)
        yield _case(name, facts, title, tiles.used_candidates, gemm, (x, w, one.counts))
        x, y = (jax.jit(quantize.quantize_columns)(rows, one.counts) for rows in (one.x, one.y))
        name, title = "weight_gradient_fp8", f"weight gradient in FP8 of {one.title}"
        facts = one.facts(x[0].shape[1], FP8)
        tiles = grouped_gemm.fp8_weight_tiles()
        yield _case(name, facts, title, tiles.used_candidates, gradient, (x, y, one.counts))


def _quantized_gemm(sizes: Sizes, expert_format: str) -> Iterator[Case]:
    """Yield the first GEMM with quantized weights."""
    run, mesh, local = registry.QUANTIZED_GEMM.by("triton"), expert_mesh(1), sizes.model.experts // sizes.ranks
    rows, columns = sizes.tokens * sizes.model.top_k, 2 * sizes.model.intermediate
    x = on_ranks(mesh, (rows, sizes.model.hidden), 0)
    w = on_ranks(mesh, (local, sizes.model.hidden, columns), 1, sizes.model.hidden**-0.5)
    counts = jnp.full((local,), rows // local, jnp.int32)

    def gemm(zero: Array, x: Array, w: Any, counts: Array) -> Any:
        return run.grouped_gemm(x, w, counts + zero, out_dtype=_BF16)

    stored = stored_as(expert_format, w)
    known = -(-rows // local), _BF16, stored
    in_gluon = tuned_gluon_tiles(*known) is not None
    yield _case(
        "quantized_gemm_gluon" if in_gluon else "quantized_gemm",
        quantized_facts(*known),
        f"GEMM in {expert_format} of {rows} rows x {sizes.model.hidden} x {columns}, {local} groups",
        GluonTiles.candidates if in_gluon else QuantizedTiles.candidates,
        gemm,
        (x, stored, counts),
        graphs=True,
    )


def _masked_gemm(sizes: Sizes) -> Iterator[Case]:
    """Yield the first GEMM between a low-latency dispatch and its combine."""
    local, mesh = sizes.model.experts // sizes.ranks, expert_mesh(1)
    expected = -(-sizes.ranks * sizes.tokens * sizes.model.top_k // sizes.model.experts)
    most, columns = sizes.ranks * sizes.tokens, 2 * sizes.model.intermediate
    counts = jnp.full((local,), min(expected, most), jnp.int32)
    rows = on_ranks(mesh, (local, most, sizes.model.hidden), 3)
    w = QuantizedWeights(on_ranks(mesh, (local, columns, sizes.model.hidden), 4, sizes.model.hidden**-0.5))

    def gemm(zero: Array, rows: Array, w: QuantizedWeights, counts: Array) -> Any:
        return masked_grouped_gemm(rows, w, counts + zero, expected_rows=expected, implementation="triton")

    facts = {"num_rows": most, "expected_rows": expected, "depth": sizes.model.hidden, "columns": columns}
    yield _case(
        "masked_grouped_gemm",
        facts | {"groups": local, "dtype": _BF16, "out_dtype": _BF16},
        f"masked GEMM of {sizes.title}",
        MaskedTiles.candidates,
        gemm,
        (rows, w, counts),
        graphs=True,
    )


def _fused_moe(sizes: Sizes, expert_format: str | None = None) -> Iterator[Case]:
    """Yield the layer of one device with all experts, in one kernel or in several."""
    mesh = expert_mesh(1)
    weights: tuple[Any, ...] = make_weights(mesh, sizes.model)
    depths: tuple[int, ...] = FusedTiles.candidates["depth"]
    if expert_format is not None:
        weights = tuple(stored_as(expert_format, w) for w in weights)
        # A step has whole scale blocks of 128; only prepacked kernels take two of them.
        depths = (128, 256) if expert_format.endswith("_prepacked") else (128,)
    ids = jnp.asarray(routing(sizes.routing, sizes.tokens, sizes.model, np.random.default_rng(0)))
    x = on_ranks(mesh, (sizes.tokens, sizes.model.hidden), 2)
    topk_weights = jnp.full(ids.shape, 1 / sizes.model.top_k, jnp.float32)

    def layer(zero: Array, x: Array, ids: Array, topk_weights: Array, gate_up: Any, down: Any) -> Any:
        return public_fused_moe(x, ids + zero, topk_weights, gate_up, down, implementation="triton")

    facts = layer_facts(ids.size, weights[1])
    title = f"layer of {sizes.tokens} tokens x {sizes.model.hidden}, {sizes.model.experts} experts, {facts['format']}"
    arrays = (x, ids, topk_weights, *weights)
    candidates: dict[str, tuple[Setting, ...]] = {"single_launch": (False, True)}
    if runs_layer_in_gluon(FusedMoEFacts(_BF16, Experts(), ids.size, *weights)):
        yield _case("fused_moe_gluon", facts, title, GluonLayerTiles.candidates, layer, arrays, graphs=True)
    else:
        candidates |= {**FusedTiles.candidates, "depth": depths}
    start: Settings = {"single_launch": True}
    yield _case("fused_moe", facts, title, candidates, layer, arrays, start=start, graphs=True)
