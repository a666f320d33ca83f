"""What `jax-ep tune` measures: operations in the sizes of a layer, as chains of calls, with the values of settings.

A chain is a scan in which each call needs a number from the one before, so that XLA can neither merge calls nor start
one early. Settings come to it as they come to any program: by `jax_ep.tuning.override`, around its tracing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep import tuning
from jax_ep.core.dtypes import FP8
from jax_ep.megakernels import tuned
from jax_ep.ops import registry
from jax_ep.ops.low_latency import low_latency_combine, low_latency_dispatch
from jax_ep.ops.masked import masked_grouped_gemm
from jax_ep.ops.moe import fused_moe as public_fused_moe
from jax_ep.quantization import quantize_experts
from jax_ep.settings.operations import Setting
from jax_ep.tools import bench
from jax_ep.tools.tune_search import Case, Run, Settings
from jax_ep.types import Array, Options

BF16 = jnp.dtype(jnp.bfloat16)
_SPEC = jax.P("expert")
Step = Callable[..., Any]
"""`(zero, *arrays) -> any arrays` of one rank; it must need the zero."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of an expert layer, and who shares it.

    Attributes:
      tokens: T, of a rank.
      hidden: H.
      intermediate: I.
      experts: E, of all ranks.
      top_k: K.
      ranks: W.
      routing: "uniform" or "zipf".
    """

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    ranks: int
    routing: str

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.tokens} tokens x {self.hidden}, {self.ranks} ranks"


def _is_small() -> bool:
    """Whether kernels run in the interpreter, where a program takes the time of its elements."""
    return jax.default_backend() == "cpu"


def _programs(per_multiprocessor: Sequence[int] = (1, 2)) -> tuple[int, ...]:
    if _is_small():
        return 1, 2
    count = jax.local_devices()[0].core_count
    return tuple(sorted({8, 16, 24, 32, 48, 64, 96, *(count * n for n in per_multiprocessor)}))


def _few(*values: Setting) -> tuple[Setting, ...]:
    """All, or in the interpreter the first two."""
    return values[:2] if _is_small() else values


def _make_chain(
    operation: str, mesh: jax.sharding.Mesh, step: Step, arrays: tuple[Any, ...], graphs: bool = False
) -> Callable[[Settings], Callable[[int], Run]]:
    """See `Case.make_chain`; with `graphs` as CUDA graphs, for calls that take less time than their launch."""
    harness, waiting = bench.library("harness"), bench.library("waiting")
    options = harness.GRAPHS if graphs and not _is_small() else None

    def compile_chain(settings: Settings, n: int) -> Run:
        def body(*local: Any) -> Array:
            def once(zero: Array, _: None) -> tuple[Array, None]:
                zero, inputs = lax.optimization_barrier((zero, local))
                results = lax.optimization_barrier(jax.tree.leaves(step(zero, *inputs)))
                return waiting.zero_after(results[0]), None

            return lax.scan(once, jnp.zeros((), jnp.int32), None, length=n)[0][None]

        specs = (_SPEC,) * len(arrays)
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=_SPEC, check_vma=False)
        with tuning.override(operation, **settings):
            return partial(jax.jit(mapped).lower(*arrays).compile(options), *arrays)

    return lambda settings: partial(compile_chain, settings)


def exchange(sizes: Sizes) -> Iterator[Case]:
    """Dispatch and combine, each alone."""
    chains, layer = bench.library("exchange_chains"), _Exchange(sizes)
    run, layout, case = layer.run, layer.layout, layer.case
    facts = tuned.exchange_facts(layout, sizes.hidden, BF16)
    moved = float(max(case.remote.sum(0).max(), case.remote.sum(1).max()) * case.row_bytes("bf16"))

    def sent(zero: Array, x: Array, handle: Any, wire: Any) -> Any:
        options = dataclasses.replace(layer.options, wire_dtype=wire)
        return run.dispatch_tokens(options, x, None, chains.after(chains.local(handle), zero))[0]

    def summed(zero: Array, y: Array, handle: Any) -> Any:
        return run.combine_tokens(layer.options, y, None, chains.after(chains.local(handle), zero))[0]

    sending = {
        "num_communicating_programs": _programs(),
        "num_warps": _few(4, 8, 16),
        "tokens_per_block": _few(2, 4, 8, 16, 32),
    }
    for wire, dtype in (("bf16", None), ("fp8", FP8)):
        if dtype is not None and sizes.hidden % 128:
            continue
        yield Case(
            operation="dispatch",
            facts=facts | {"wire_dtype": jnp.dtype(dtype or BF16)},
            title=f"dispatch of {sizes.title}, {wire}",
            candidates=sending,
            make_chain=_make_chain("dispatch", layer.mesh, partial(sent, wire=dtype), (case.x, layer.handle)),
            moved_bytes=moved * case.row_bytes(wire) / case.row_bytes("bf16"),
        )
    summing = {
        "num_combining_programs": _programs((1, 2, 4)),
        "num_warps": _few(1, 2, 4, 8),
        "tokens_per_block": _few(2, 4, 8, 16, 32),
        "rows_in_flight": _few(2, 3, 5, 7, 10),
    }
    yield Case(
        operation="combine",
        facts=facts,
        title=f"combine of {sizes.title}",
        candidates=summing,
        make_chain=_make_chain("combine", layer.mesh, summed, (layer.rows(sizes.hidden), layer.handle)),
        moved_bytes=moved,
    )


class _Exchange:
    """Tokens of all ranks, and the handle of a dispatch."""

    def __init__(self, sizes: Sizes) -> None:
        inputs, chains = bench.library("inputs"), bench.library("exchange_chains")
        model = inputs.Model(sizes.hidden, sizes.intermediate, sizes.experts, sizes.top_k)
        self.mesh = inputs.expert_mesh(sizes.ranks)
        self.model, self._inputs = model, inputs
        self.case = chains.make_case(self.mesh, sizes.routing, sizes.tokens, BF16, model)
        self.layout, self.run = self.case.layout, registry.get("exchange", "triton")
        self.options = Options("tune", ("expert",))

        def plan(ids: Array) -> Any:
            return chains.stack(self.run.plan(self.options, ids, self.layout))

        self.handle = jax.jit(self.case.shard_map(plan, 1))(self.case.ids)

    def rows(self, columns: int) -> Array:
        """`[W * R, columns]` random rows of experts."""
        made: Array = self._inputs.on_ranks(self.mesh, (self.layout.capacity, columns), 2)
        return made

    def weights(self) -> tuple[Array, Array]:
        """Both matrices of all experts."""
        made: tuple[Array, Array] = self._inputs.make_weights(self.mesh, self.model)
        return made


def exchange_gemm(sizes: Sizes) -> Iterator[Case]:
    """Exchanges with products: in one launch or in two, by how many programs, and with the gradient of matrices."""
    run: Any = registry.get("exchange_gemm", "triton")
    chains = bench.library("exchange_chains")
    wide = 2 * sizes.intermediate
    layer = _Exchange(sizes)
    layout, options = layer.layout, layer.options
    if not run.fuses(layout, BF16, sizes.hidden, wide):
        return
    w_gate_up, w_down = layer.weights()

    def placed(zero: Array, handle: Any) -> Any:
        return chains.after(chains.local(handle), zero)

    def first(zero: Array, x: Array, w: Array, handle: Any) -> Any:
        handle = placed(zero, handle)
        return run.dispatch_grouped_gemm(options, x, None, w, handle, transpose_rhs=False, save_as=None)[0]

    def second(zero: Array, h: Array, w: Array, handle: Any) -> Any:
        return run.grouped_gemm_combine(options, h, None, w, placed(zero, handle), transpose_rhs=False)[0]

    name = "dispatch_grouped_gemm"
    yield Case(
        operation=name,
        facts=tuned.exchange_gemm_facts(layout, sizes.hidden, wide, BF16),
        title=f"dispatch + GEMM of {sizes.title}",
        candidates={"num_communicating_programs": _few(8, 16, 24, 32, 48), "dispatch_mode": ("serial", "fused")},
        start={"dispatch_mode": "fused"},
        make_chain=_make_chain(name, layer.mesh, first, (layer.case.x, w_gate_up, layer.handle)),
    )
    name = "grouped_gemm_combine"
    hidden_rows = layer.rows(sizes.intermediate)
    yield Case(
        operation=name,
        facts=tuned.exchange_gemm_facts(layout, sizes.intermediate, sizes.hidden, BF16),
        title=f"GEMM + combine of {sizes.title}",
        candidates={"combine_mode": ("serial", "scatter")},
        make_chain=_make_chain(name, layer.mesh, second, (hidden_rows, w_down, layer.handle)),
    )


def weight_gradients(sizes: Sizes) -> Iterator[Case]:
    """The backward pass of dispatch + GEMM: GEMM + combine and the gradient of the matrices, in one launch or apart."""
    run: Any = registry.get("exchange_gemm", "triton")
    chains, layer, wide = bench.library("exchange_chains"), _Exchange(sizes), 2 * sizes.intermediate
    layout, options = layer.layout, layer.options
    if not run.fuses(layout, BF16, wide, sizes.hidden):
        return
    w_gate_up, _ = layer.weights()

    def backward(zero: Array, h: Array, w: Array, tokens: Array, handle: Any) -> Any:
        handle = chains.after(chains.local(handle), zero)
        if run.fuses_weight_gradient(options.schedule, layout, BF16, wide, sizes.hidden):
            fused: Any = run.grouped_gemm_combine_with_weight_gradient
            return fused(options, h, None, w, tokens, handle, transpose_rhs=True, saved_as="rows")
        sums = run.grouped_gemm_combine(options, h, None, w, handle, transpose_rhs=True)[0]
        h, sums = lax.optimization_barrier((h, sums))  # as in a layer, where the sums come first
        return run.weight_gradient(tokens, h, handle, transpose=False, saved_as="rows"), sums

    name = "grouped_gemm_combine_with_weight_gradient"
    arrays = layer.rows(wide), w_gate_up, layer.rows(sizes.hidden), layer.handle
    yield Case(
        operation=name,
        facts=tuned.exchange_gemm_facts(layout, wide, sizes.hidden, BF16),
        title=f"its gradient of {sizes.title}",
        candidates={
            "combine_mode": ("serial", "scatter"),
            "num_summing_programs": _few(8, 16, 24, 32, 48),
            "fuse_weight_gradients": (False, True),
        },
        start={"fuse_weight_gradients": True},
        make_chain=_make_chain(name, layer.mesh, backward, arrays),
    )


def low_latency(sizes: Sizes) -> Iterator[Case]:
    """Dispatch and combine of a few tokens."""
    layer = _Exchange(sizes)
    case, local = layer.case, sizes.experts // sizes.ranks
    keywords: dict[str, Any] = {"num_experts": sizes.experts, "max_tokens_per_rank": sizes.tokens}
    inputs = bench.library("inputs")
    weights = case.place(np.full(case.ids.shape, 1 / sizes.top_k, np.float32))
    rows = inputs.on_ranks(layer.mesh, (local, sizes.ranks * sizes.tokens, sizes.hidden), 3)
    facts = tuned.exchange_facts(layer.layout, sizes.hidden, BF16)

    def sent(zero: Array, x: Array, ids: Array) -> Any:
        return low_latency_dispatch(x, ids + zero, **keywords, implementation="triton").tokens

    def both_ways(zero: Array, x: Array, ids: Array, weights: Array, rows: Array) -> Any:
        handle = low_latency_dispatch(x, ids + zero, **keywords, implementation="triton").handle
        return low_latency_combine(rows, ids, weights, handle, implementation="triton")

    name = "low_latency_dispatch"
    yield Case(
        operation=name,
        facts=facts | {"wire_dtype": jnp.dtype(FP8)},
        title=f"low-latency dispatch of {sizes.title}",
        candidates={"num_communicating_programs": _programs()},
        make_chain=_make_chain(name, layer.mesh, sent, (case.x, case.ids), graphs=True),
    )
    name = "low_latency_combine"
    arrays: tuple[Any, ...] = case.x, case.ids, weights, rows
    yield Case(
        operation=name,
        facts=facts,
        title=f"low-latency combine of {sizes.title}",
        candidates={"num_combining_programs": _programs()},
        make_chain=_make_chain(name, layer.mesh, both_ways, arrays, graphs=True),
    )


def masked_gemm(sizes: Sizes) -> Iterator[Case]:
    """The first product between a low-latency dispatch and its combine."""
    inputs, local = bench.library("inputs"), sizes.experts // sizes.ranks
    mesh = inputs.expert_mesh(1)
    expected = -(-sizes.ranks * sizes.tokens * sizes.top_k // sizes.experts)
    most = sizes.ranks * sizes.tokens
    counts = jnp.full((local,), min(expected, most), jnp.int32)

    def multiplied(zero: Array, rows: Array, w: Array, counts: Array) -> Any:
        options: dict[str, Any] = {"expected_rows": expected, "implementation": "triton"}
        return masked_grouped_gemm(rows, w, counts + zero, **options)

    rows = inputs.on_ranks(mesh, (local, most, sizes.hidden), 3)
    name, columns = "masked_grouped_gemm", 2 * sizes.intermediate
    w = inputs.on_ranks(mesh, (local, columns, sizes.hidden), 4, sizes.hidden**-0.5)
    product = {"num_rows": most, "depth": sizes.hidden, "columns": columns, "groups": local}
    tiles = {
        "block_m": _few(16, 32, 64, 128),
        "block_n": _few(64, 128),
        "num_stages": _few(2, 3, 4, 5, 6),
        "programs": _few(1, 2, 3),
        "num_warps": _few(4, 8),
    }
    yield Case(
        operation=name,
        facts=product | {"expected_rows": expected, "dtype": BF16, "out_dtype": BF16},
        title=f"masked product of {sizes.title}",
        candidates=tiles,
        make_chain=_make_chain(name, mesh, multiplied, (rows, w, counts), graphs=True),
    )


def grouped_gemm(sizes: Sizes) -> Iterator[Case]:
    """Both products of the layer with the experts of a rank, and the gradient of the matrices."""
    inputs, run = bench.library("inputs"), registry.get("grouped_gemm", "triton")
    mesh, local = inputs.expert_mesh(1), sizes.experts // sizes.ranks
    rows = sizes.tokens * sizes.top_k
    model = inputs.Model(sizes.hidden, sizes.intermediate, local, 1)
    ids = inputs.routing(sizes.routing, rows, model, np.random.default_rng(0)) if local > 1 else np.zeros(rows, int)
    counts = jnp.asarray(np.bincount(ids.reshape(-1), minlength=local), jnp.int32)
    stored = {
        "num_stages": _few(2, 3, 4, 5),
        "tma_store": (False, True),
        "store_parts": _few(1, 2, 4),
        "programs": _few(1, 2),
        "num_warps": _few(4, 8),
        "group_m": _few(4, 8, 16),
    }
    blocks = {"block_m": _few(64, 128, 256), "block_n": _few(64, 128, 256)}

    def product(zero: Array, x: Array, w: Array, counts: Array) -> Any:
        return run.grouped_gemm(x, w, counts + zero, transpose_rhs=False, out_dtype=BF16)

    def gradient(zero: Array, x: Array, y: Array, counts: Array) -> Any:
        return run.weight_gradient(x, y, counts + zero, out_dtype=BF16)

    for depth, columns in ((sizes.hidden, 2 * sizes.intermediate), (sizes.intermediate, sizes.hidden)):
        x, y = (inputs.on_ranks(mesh, (rows, width), seed) for seed, width in enumerate((depth, columns)))
        w = inputs.on_ranks(mesh, (local, depth, columns), 2, depth**-0.5)
        facts = {
            "num_rows": rows,
            "depth": depth,
            "columns": columns,
            "groups": local,
            "dtype": BF16,
            "out_dtype": BF16,
        }
        text = f"{rows} rows x {depth} x {columns}, {local} groups"
        yield Case(
            operation="grouped_gemm",
            facts=facts,
            title=f"product of {text}",
            candidates=blocks | {"block_k": _few(32, 64, 128)} | stored,
            make_chain=_make_chain("grouped_gemm", mesh, product, (x, w, counts)),
        )
        yield Case(
            operation="weight_gradient",
            facts=facts,
            title=f"weight gradient of {text}",
            candidates=blocks | {"block_r": _few(32, 64, 128)} | stored,
            make_chain=_make_chain("weight_gradient", mesh, gradient, (x, y, counts)),
        )


def quantized_gemm(sizes: Sizes, expert_format: str) -> Iterator[Case]:
    """The first product with matrices in 8 or 4 bits."""
    inputs, run = bench.library("inputs"), registry.get("quantized_gemm", "triton")
    mesh, local = inputs.expert_mesh(1), sizes.experts // sizes.ranks
    rows, columns = sizes.tokens * sizes.top_k, 2 * sizes.intermediate
    x = inputs.on_ranks(mesh, (rows, sizes.hidden), 0)
    w = inputs.on_ranks(mesh, (local, sizes.hidden, columns), 1, sizes.hidden**-0.5)
    matrices = jax.jit(partial(quantize_experts, format=expert_format))(w)
    counts = jnp.full((local,), rows // local, jnp.int32)
    per_group = -(-rows // local)

    def product(zero: Array, x: Array, w: Any, counts: Array) -> Any:
        return run.grouped_gemm(x, w, counts + zero, None, out_dtype=BF16)

    facts: Mapping[str, Any] = {"rows_of_group": per_group, "depth": sizes.hidden, "columns": columns, "groups": local}
    yield Case(
        operation="quantized_gemm",
        facts={**facts, "dtype": BF16, "format": expert_format},
        title=f"product in {expert_format} of {rows} rows x {sizes.hidden} x {columns}, {local} groups",
        candidates={
            "block_m": _few(16, 32, 64, 128),
            "block_n": _few(64, 128, 256),
            "num_stages": _few(2, 3, 4, 5),
            "programs": _few(1, 2, 3),
            "num_warps": _few(4, 8),
        },
        make_chain=_make_chain("quantized_gemm", mesh, product, (x, matrices, counts), graphs=True),
    )


def fused_moe(sizes: Sizes, expert_format: str | None = None) -> Iterator[Case]:
    """The layer of one device, with all experts, in one launch or in several."""
    inputs = bench.library("inputs")
    mesh = inputs.expert_mesh(1)
    model = inputs.Model(sizes.hidden, sizes.intermediate, sizes.experts, sizes.top_k)
    w_gate_up, w_down = inputs.make_weights(mesh, model)
    if expert_format is not None:
        quantize = jax.jit(partial(quantize_experts, format=expert_format))
        w_gate_up, w_down = quantize(w_gate_up), quantize(w_down)
    ids = jnp.asarray(inputs.routing(sizes.routing, sizes.tokens, model, np.random.default_rng(0)))
    x = inputs.on_ranks(mesh, (sizes.tokens, sizes.hidden), 2)
    weights = jnp.full(ids.shape, 1 / sizes.top_k, jnp.float32)

    def layer(zero: Array, x: Array, ids: Array, weights: Array, gate_up: Any, down: Any) -> Any:
        return public_fused_moe(x, ids + zero, weights, gate_up, down, implementation="triton")

    shape = {"hidden": sizes.hidden, "intermediate": sizes.intermediate, "format": expert_format or BF16}
    yield Case(
        operation="fused_moe",
        facts={"num_slots": sizes.tokens * sizes.top_k, "num_experts": sizes.experts, **shape},
        title=f"layer of {sizes.tokens} tokens x {sizes.hidden}, {sizes.experts} experts, {shape['format']}",
        candidates={
            "block_m": _few(16, 32, 64, 128),
            "hidden_columns": _few(32, 64, 128),
            "columns": _few(64, 128, 256),
            "splits": _few(1, 2, 4, 8),
            "depth": _few(64, 128, 256) if expert_format is None else (128,),  # columns that share a scale
            "num_stages": _few(2, 3, 4),
            "programs": _few(1, 2, 3, 4),
            "num_warps": _few(4, 8),
            "single_launch": (False, True),
        },
        start={"single_launch": True},
        make_chain=_make_chain("fused_moe", mesh, layer, (x, ids, weights, w_gate_up, w_down), graphs=True),
    )
