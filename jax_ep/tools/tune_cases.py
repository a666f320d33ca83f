"""What `jax-ep tune` measures of exchanges, alone and with products, and of the layer of one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep.core.dtypes import FP8
from jax_ep.core.facts import ExchangeFacts
from jax_ep.megakernels import tuned
from jax_ep.ops import exchange_gemm as ops
from jax_ep.ops import plan as plans
from jax_ep.ops import registry
from jax_ep.ops.low_latency import low_latency_combine, low_latency_dispatch
from jax_ep.ops.moe import fused_moe as public_fused_moe
from jax_ep.settings.operations import Setting
from jax_ep.tools.benchmark import exchange_chains, inputs
from jax_ep.tools.tune_chains import BF16, Sizes, few, make_chain, programs, stored_as
from jax_ep.tools.tune_search import Case
from jax_ep.types import Array, Options


def exchange(sizes: Sizes) -> Iterator[Case]:
    """Dispatch and combine, each alone."""
    layer = _Exchange(sizes)
    for wire, dtype in (("bf16", None), ("fp8", FP8)):
        if dtype is None or sizes.hidden % 128 == 0:
            yield _dispatch(layer, wire, dtype)
    yield _combine(layer)


def _dispatch(layer: _Exchange, wire: str, dtype: Any) -> Case:
    """Of tokens that travel in a dtype, or as they are."""
    case = layer.case

    def sent(zero: Array, x: Array, handle: Any) -> Any:
        options = dataclasses.replace(layer.options, wire_dtype=dtype)
        return layer.run.dispatch_tokens(options, x, None, exchange_chains.local_after(handle, zero))[0]

    return Case(
        operation="dispatch",
        facts=layer.facts | {"wire_dtype": jnp.dtype(dtype or BF16)},
        title=f"dispatch of {layer.sizes.title}, {wire}",
        candidates={
            "num_communicating_programs": programs(),
            "num_warps": few(4, 8, 16),
            "tokens_per_block": few(2, 4, 8, 16, 32),
        },
        make_chain=make_chain("dispatch", layer.mesh, sent, (case.x, layer.handle)),
        moved_bytes=layer.moved_tokens * case.row_bytes(wire),
    )


def _combine(layer: _Exchange) -> Case:
    hidden = layer.sizes.hidden

    def summed(zero: Array, y: Array, handle: Any) -> Any:
        return layer.run.combine_tokens(layer.options, y, None, exchange_chains.local_after(handle, zero))[0]

    return Case(
        operation="combine",
        facts=layer.facts,
        title=f"combine of {layer.sizes.title}",
        candidates={
            "num_combining_programs": programs((1, 2, 4)),
            "num_warps": few(1, 2, 4, 8),
            "tokens_per_block": few(2, 4, 8, 16, 32),
            "rows_in_flight": few(2, 3, 5, 7, 10),
        },
        make_chain=make_chain("combine", layer.mesh, summed, (layer.rows(hidden), layer.handle)),
        moved_bytes=layer.moved_tokens * layer.case.row_bytes("bf16"),
    )


class _Exchange:
    """Tokens of all ranks, and the handle of a dispatch."""

    def __init__(self, sizes: Sizes) -> None:
        model = inputs.Model(sizes.hidden, sizes.intermediate, sizes.experts, sizes.top_k)
        self.sizes, self.mesh = sizes, inputs.expert_mesh(sizes.ranks)
        self.model = model
        self.case = exchange_chains.make_case(self.mesh, sizes.routing, sizes.tokens, BF16, model)
        self.layout, self.run = self.case.layout, registry.get("exchange", "triton")
        self.options = Options("tune", ("expert",))

        def plan(ids: Array) -> Any:
            return exchange_chains.stack(self.run.plan(self.options, ids, self.layout))

        self.handle = jax.jit(self.case.shard_map(plan, 1))(self.case.ids)

    def plan(self, columns: int) -> plans.ExchangeGemmPlan:
        """Of the exchange with GEMMs by `[hidden, columns]` weights, by the settings of now."""
        facts = ExchangeFacts(jnp.dtype(BF16), self.sizes.hidden, self.layout, columns=columns)
        return plans.exchange_gemm(self.options, facts, out_columns=columns)

    @property
    def facts(self) -> dict[str, Any]:
        """By which settings of the exchange are looked up."""
        return tuned.exchange_facts(self.layout, self.sizes.hidden, BF16)

    @property
    def moved_tokens(self) -> float:
        """That the busiest rank sends or receives."""
        remote = self.case.remote
        return float(max(remote.sum(0).max(), remote.sum(1).max()))

    def rows(self, columns: int) -> Array:
        """`[W * R, columns]` random rows of experts."""
        made: Array = inputs.on_ranks(self.mesh, (self.layout.capacity, columns), 2)
        return made

    def weights(self) -> tuple[Array, Array]:
        """Both matrices of all experts."""
        made: tuple[Array, Array] = inputs.make_weights(self.mesh, self.model)
        return made


def exchange_gemm(sizes: Sizes) -> Iterator[Case]:
    """Exchanges with products: in one launch or in two, by how many programs, and with the gradient of matrices."""
    wide = 2 * sizes.intermediate
    layer = _Exchange(sizes)
    layout = layer.layout
    if layer.plan(wide).fused is None:
        return
    w_gate_up, w_down = layer.weights()

    def placed(zero: Array, handle: Any) -> Any:
        return exchange_chains.local_after(handle, zero)

    def first(zero: Array, x: Array, w: Array, handle: Any) -> Any:
        return ops.dispatch_and_multiply(layer.plan(wide), x, None, w, placed(zero, handle))[0]

    def second(zero: Array, h: Array, w: Array, handle: Any) -> Any:
        return ops.multiply_and_combine(layer.plan(sizes.intermediate), h, w, placed(zero, handle), None)

    name = "dispatch_grouped_gemm"
    yield Case(
        operation=name,
        facts=tuned.exchange_gemm_facts(layout, sizes.hidden, wide, BF16),
        title=f"dispatch + GEMM of {sizes.title}",
        candidates={"num_communicating_programs": few(8, 16, 24, 32, 48), "dispatch_mode": ("serial", "fused")},
        start={"dispatch_mode": "fused"},
        make_chain=make_chain(name, layer.mesh, first, (layer.case.x, w_gate_up, layer.handle)),
    )
    name = "grouped_gemm_combine"
    hidden_rows = layer.rows(sizes.intermediate)
    yield Case(
        operation=name,
        facts=tuned.exchange_gemm_facts(layout, sizes.intermediate, sizes.hidden, BF16),
        title=f"GEMM + combine of {sizes.title}",
        candidates={"combine_mode": ("serial", "scatter")},
        make_chain=make_chain(name, layer.mesh, second, (hidden_rows, w_down, layer.handle)),
    )


def weight_gradients(sizes: Sizes) -> Iterator[Case]:
    """The backward pass of dispatch + GEMM: GEMM + combine and the gradient of the matrices, in one launch or apart."""
    layer, wide = _Exchange(sizes), 2 * sizes.intermediate
    layout = layer.layout
    if layer.plan(wide).fused is None:
        return
    w_gate_up, _ = layer.weights()

    def backward(zero: Array, h: Array, w: Array, tokens: Array, handle: Any) -> Any:
        handle = exchange_chains.local_after(handle, zero)
        plan = layer.plan(wide)
        if plan.gradient_mode:
            x = tokens[: layout.num_tokens]  # whose gradient nobody wants
            fused: Any = ops.multiply_with_combine_and_weight_gradient
            return fused(plan, True, "rows", h, None, x, tokens, w, handle)
        sums = ops.multiply_with_combine(plan, True, h, None, w, handle)[0]
        h, sums = lax.optimization_barrier((h, sums))  # as in a layer, where the sums come first
        return ops.weight_gradient(plan, False, "rows", tokens, tokens, h, handle), sums

    name = "grouped_gemm_combine_with_weight_gradient"
    arrays = layer.rows(wide), w_gate_up, layer.rows(sizes.hidden), layer.handle
    yield Case(
        operation=name,
        facts=tuned.exchange_gemm_facts(layout, wide, sizes.hidden, BF16),
        title=f"its gradient of {sizes.title}",
        candidates={
            "combine_mode": ("serial", "scatter"),
            "num_summing_programs": few(8, 16, 24, 32, 48),
            "fuse_weight_gradients": (False, True),
        },
        start={"fuse_weight_gradients": True},
        make_chain=make_chain(name, layer.mesh, backward, arrays),
    )


def low_latency(sizes: Sizes) -> Iterator[Case]:
    """Dispatch and combine of a few tokens."""
    layer = _Exchange(sizes)
    case, local = layer.case, sizes.experts // sizes.ranks
    keywords: dict[str, Any] = {"num_experts": sizes.experts, "max_tokens_per_rank": sizes.tokens}
    weights = case.place(np.full(case.ids.shape, 1 / sizes.top_k, np.float32))
    rows = inputs.on_ranks(layer.mesh, (local, sizes.ranks * sizes.tokens, sizes.hidden), 3)

    def sent(zero: Array, x: Array, ids: Array) -> Any:
        return low_latency_dispatch(x, ids + zero, **keywords, implementation="triton").tokens

    def both_ways(zero: Array, x: Array, ids: Array, weights: Array, rows: Array) -> Any:
        handle = low_latency_dispatch(x, ids + zero, **keywords, implementation="triton").handle
        return low_latency_combine(rows, ids, weights, handle, implementation="triton")

    name = "low_latency_dispatch"
    yield Case(
        operation=name,
        facts=layer.facts | {"wire_dtype": jnp.dtype(FP8)},
        title=f"low-latency dispatch of {sizes.title}",
        candidates={"num_communicating_programs": programs()},
        make_chain=make_chain(name, layer.mesh, sent, (case.x, case.ids), graphs=True),
    )
    name = "low_latency_combine"
    arrays: tuple[Any, ...] = case.x, case.ids, weights, rows
    yield Case(
        operation=name,
        facts=layer.facts,
        title=f"low-latency combine of {sizes.title}",
        candidates={"num_combining_programs": programs()},
        make_chain=make_chain(name, layer.mesh, both_ways, arrays, graphs=True),
    )


def _depths(expert_format: str | None) -> tuple[Setting, ...]:
    """Steps, which 128 columns that share a scale leave no choice unless they are prepacked."""
    if expert_format is None:
        return few(64, 128, 256)
    return few(128, 256) if expert_format.endswith("_prepacked") else (128,)


def fused_moe(sizes: Sizes, expert_format: str | None = None) -> Iterator[Case]:
    """The layer of one device, with all experts, in one launch or in several."""
    mesh = inputs.expert_mesh(1)
    model = inputs.Model(sizes.hidden, sizes.intermediate, sizes.experts, sizes.top_k)
    w_gate_up, w_down = inputs.make_weights(mesh, model)
    if expert_format is not None:
        w_gate_up, w_down = (stored_as(expert_format, w) for w in (w_gate_up, w_down))
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
            "block_m": few(16, 32, 64, 128),
            "hidden_columns": few(32, 64, 128),
            "columns": few(64, 128, 256),
            "splits": few(1, 2, 4, 8),
            "depth": _depths(expert_format),
            "num_stages": few(2, 3, 4),
            "programs": few(1, 2, 3, 4, 5, 6),
            "num_warps": few(2, 4, 8),
            "single_launch": (False, True),
        },
        start={"single_launch": True},
        make_chain=make_chain("fused_moe", mesh, layer, (x, ids, weights, w_gate_up, w_down), graphs=True),
    )
