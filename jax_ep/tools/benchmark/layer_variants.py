"""Variants of layer.py: the parts of the layer, fused and in sequence, and the whole layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import jax_ep
from jax_ep.core.expert_matrices import QuantizedWeights
from jax_ep.core.facts import ExchangeFacts
from jax_ep.ops import exchange_gemm as ops
from jax_ep.ops import plan as plans
from jax_ep.ops import registry
from jax_ep.quantization import quantize
from jax_ep.tools.benchmark import baselines
from jax_ep.tools.benchmark.exchange_chains import OPTIONS, after, local, stack
from jax_ep.tools.benchmark.inputs import MODELS, make_weights, on_ranks
from jax_ep.tools.benchmark.layer_chains import CAPACITY_FACTOR, Case, Variant, chain, make_case
from jax_ep.tools.benchmark.profiler import Program
from jax_ep.types import COMBINE_MODES, DISPATCH_MODES, Handle, Options, Schedule

BF16 = jnp.dtype("bfloat16")

# --- parts ------------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """An all-to-all and its GEMM: names of the variants that are compared.

    In "gradients" these are two GEMMs: the one with its combine, and the weight gradient.
    """

    exchange: str
    product: str
    fused: str
    sequence: str
    einsum: str


PARTS = {
    "dispatch": Part(
        "dispatch", "GEMM 1", "dispatch + GEMM 1, fused", "dispatch, then GEMM 1", "einsum 1, equal groups"
    ),
    "combine": Part("combine", "GEMM 2", "GEMM 2 + combine, fused", "GEMM 2, then combine", "einsum 2, equal groups"),
    "gradients": Part(
        "GEMM 1 transposed + combine",
        "weight gradients 1",
        "GEMM + combine and weight gradients, one launch",
        "GEMM + combine, then weight gradients",
        "einsum of weight gradients 1, equal groups",
    ),
}


# The same two launches with the GEMM of `pallas`, which layers use if groups are large.
PALLAS = PARTS["dispatch"]._replace(product="GEMM 1, pallas", sequence="dispatch, then GEMM 1, pallas")

# The weight gradient in the kernel of an all-to-all, by mode of GEMM + combine.
GRADIENT_MODES = {
    "scatter": PARTS["gradients"].fused,
    "serial": "GEMM, then combine and weight gradients in one launch",
}

# Dispatch + GEMM 1 in one kernel, and with the default choice.
DISPATCHED = {"fused": PARTS["dispatch"].fused, None: "dispatch + GEMM 1, as chosen"}

# GEMM 2 + combine by mode; `Part.fused` is the default choice, `Part.sequence` is mode "serial" with other tiles.
MODES = {mode: f"GEMM 2 + combine, {mode}" for mode in COMBINE_MODES}


def parts(case: Case, chosen: list[str], *, pallas: bool) -> dict[str, Variant]:
    """Return the parts of the layer with the functions of `triton`.

    With `pallas`, dispatch + GEMM 1 also runs in two kernels with the GEMM of `pallas`.
    """
    run = registry.get("exchange", "triton")
    handle = jax.jit(case.shard_map(lambda ids: stack(run.plan(OPTIONS, ids, case.layout))))(case.inputs[2])
    found: dict[str, Variant] = {}
    if "dispatch" in chosen:
        found |= _dispatch_part(case, handle, pallas=pallas)
    if "combine" in chosen:
        found |= _combine_part(case, handle)
    if "gradients" in chosen:
        found |= _gradients_part(case, handle)
    return found


def _scheduled(**choices: Any) -> Options:
    return dataclasses.replace(OPTIONS, schedule=Schedule(**choices))


def plan_of(case: Case, options: Options, columns: int) -> plans.ExchangeGemmPlan:
    """Plan the all-to-all with GEMMs by `[hidden, columns]` weights."""
    facts = ExchangeFacts(jnp.dtype(BF16), case.model.hidden, case.layout, columns=columns)
    return plans.exchange_gemm(options, facts, out_columns=columns)


def fresh_handle(handle: Handle, zero: Array) -> Handle:
    """Return the handle, available only once the zero is."""
    return dataclasses.replace(after(handle, zero), group_sizes=handle.group_sizes + zero)


def _dispatch_part(case: Case, handle: Handle, *, pallas: bool) -> dict[str, Variant]:
    x, w, part = case.inputs[0], case.weights[0], PARTS["dispatch"]
    exchange = registry.get("exchange", "triton")

    def dispatch(_: Any, fixed: Any, zero: Array) -> Array:
        return exchange.dispatch_tokens(OPTIONS, fixed[1], None, fresh_handle(fixed[0], zero))[0]

    def product(gemm: Any, _: Any, fixed: Any, zero: Array) -> Array:
        return gemm(fixed[1], fixed[2], fixed[0].group_sizes + zero, transpose_rhs=False, out_dtype=BF16)

    def fused(options: Options, _: Any, fixed: Any, zero: Array) -> Array:
        plan = plan_of(case, options, w.shape[2])
        return ops.dispatch_and_multiply(plan, fixed[1], None, fixed[2], fresh_handle(fixed[0], zero))[0]

    def sequence(gemm: Any, _: Any, fixed: Any, zero: Array) -> Array:
        fresh = fresh_handle(fixed[0], zero)
        rows = exchange.dispatch_tokens(OPTIONS, fixed[1], None, fresh)[0]
        return gemm(rows, fixed[2], fresh.group_sizes, transpose_rhs=False, out_dtype=BF16)

    rows = jax.jit(case.shard_map(lambda x, h: exchange.dispatch_tokens(OPTIONS, x, None, local(h))[0]))(x, handle)
    flops = 4.0 * case.layout.num_tokens * case.layout.top_k * case.model.hidden * case.model.intermediate
    found = {part.exchange: Variant(dispatch, (), (handle, x)), part.einsum: _einsum(case, w, flops)}
    for mode, name in DISPATCHED.items():
        step = partial(fused, _scheduled(dispatch_mode=mode))
        found[name] = Variant(step, (), (handle, x, w), flops, part.sequence)
    for names, implementation in ((part, "triton"), (PALLAS, "pallas"))[: 2 if pallas else 1]:
        gemm = registry.get("grouped_gemm", implementation).grouped_gemm
        found[names.product] = Variant(partial(product, gemm), (), (handle, rows, w), flops, part.sequence)
        found[names.sequence] = Variant(partial(sequence, gemm), (), (handle, x, w), flops, part.sequence)
    return found


def _combine_part(case: Case, handle: Handle) -> dict[str, Variant]:
    w, part = case.weights[1], PARTS["combine"]
    exchange = registry.get("exchange", "triton")
    gemm = partial(registry.get("grouped_gemm", "triton").grouped_gemm, transpose_rhs=False, out_dtype=BF16)

    def combine(_: Any, fixed: Any, zero: Array) -> Array:
        return exchange.combine_tokens(OPTIONS, fixed[1], None, fresh_handle(fixed[0], zero))[0]

    def product(_: Any, fixed: Any, zero: Array) -> Array:
        return gemm(fixed[1], fixed[2], fixed[0].group_sizes + zero)

    def fused(mode: str | None, _: Any, fixed: Any, zero: Array) -> Array:
        plan = plan_of(case, _scheduled(combine_mode=mode), w.shape[1])
        return ops.multiply_and_combine(plan, fixed[1], fixed[2], fresh_handle(fixed[0], zero), None)

    def sequence(_: Any, fixed: Any, zero: Array) -> Array:
        fresh = fresh_handle(fixed[0], zero)
        return exchange.combine_tokens(OPTIONS, gemm(fixed[1], fixed[2], fresh.group_sizes), None, fresh)[0]

    hidden = on_ranks(case.mesh, (case.layout.capacity, case.model.intermediate), 5)
    rows = on_ranks(case.mesh, (case.layout.capacity, case.model.hidden), 6)
    flops = 2.0 * case.layout.num_tokens * case.layout.top_k * case.model.hidden * case.model.intermediate
    return {
        part.exchange: Variant(combine, (), (handle, rows)),
        part.product: Variant(product, (), (handle, hidden, w), flops),
        **{
            name: Variant(partial(fused, mode), (), (handle, hidden, w), flops, part.sequence)
            for mode, name in {None: part.fused, **MODES}.items()
        },
        part.sequence: Variant(sequence, (), (handle, hidden, w), flops),
        part.einsum: _einsum(case, w, flops),
    }


def _gradients_part(case: Case, handle: Handle) -> dict[str, Variant]:
    """Return the variants of the backward pass of dispatch + GEMM 1, at random tokens."""
    w, part, layout = case.weights[0], PARTS["gradients"], case.layout

    def combined(_: Any, fixed: Any, zero: Array) -> Array:
        handle, d_hidden, _, w = fixed
        plan = plan_of(case, OPTIONS, w.shape[2])
        return ops.run_combine(plan, True, d_hidden, None, w, fresh_handle(handle, zero), None)[0]

    def gradient(_: Any, fixed: Any, zero: Array) -> Array:
        handle, d_hidden, saved, _ = fixed
        plan = plan_of(case, OPTIONS, w.shape[2])
        return ops.weight_gradient(plan, False, "tokens", saved, saved, d_hidden, fresh_handle(handle, zero))

    def fused(mode: str, _: Any, fixed: Any, zero: Array) -> Any:
        handle, d_hidden, saved, w = fixed
        plan = plan_of(case, _scheduled(combine_mode=mode, fuse_weight_gradients=True), w.shape[2])
        sums, _, gradient = ops.multiply_with_combine_and_weight_gradient(
            plan, True, "tokens", d_hidden, None, saved, saved, w, fresh_handle(handle, zero)
        )
        return sums, gradient

    def sequence(*arguments: Any) -> Any:
        return combined(*arguments), gradient(*arguments)

    d_hidden = on_ranks(case.mesh, (layout.capacity, w.shape[2]), 8)
    saved = on_ranks(case.mesh, (layout.num_ranks * layout.num_tokens, case.model.hidden), 9)
    flops = 4.0 * layout.num_tokens * layout.top_k * case.model.hidden * case.model.intermediate
    fixed = (handle, d_hidden, saved, w)
    return {
        part.exchange: Variant(combined, (), fixed, flops),
        part.product: Variant(gradient, (), fixed, flops),
        **{
            name: Variant(partial(fused, mode), (), fixed, 2 * flops, part.sequence)
            for mode, name in GRADIENT_MODES.items()
        },
        part.sequence: Variant(sequence, (), fixed, 2 * flops),
        part.einsum: _einsum_of_gradients(case, w, flops),
    }


def _equal_groups(case: Case) -> tuple[int, int]:
    """Return the number of local experts, and the rows of each if all had equally many."""
    num_local = case.layout.num_local_experts
    return num_local, case.layout.num_tokens * case.layout.top_k // num_local


def _einsum_of_gradients(case: Case, w: Array, flops: float) -> Variant:
    """Return the batched GEMM of equal groups with as many rows in total, by cuBLAS."""
    batches = on_ranks(case.mesh, (*_equal_groups(case), w.shape[1]), 10)
    cotangents = on_ranks(case.mesh, (*_equal_groups(case), w.shape[2]), 11)
    return Variant(lambda x, d, _: jnp.einsum("grm,grn->gmn", x[0], d[0]), (batches,), (cotangents,), flops, tuned=True)


def _einsum(case: Case, w: Array, flops: float) -> Variant:
    """Return the batched GEMM of equal groups with as many rows in total, by cuBLAS."""
    batches = on_ranks(case.mesh, (*_equal_groups(case), w.shape[1]), 7)
    return Variant(lambda x, w, _: jnp.einsum("gmk,gkn->gmn", x[0], w[0]), (batches,), (w,), flops, tuned=True)


# --- layers -----------------------------------------------------------------------------------------------------------

LAYERS = {
    "moe": "jax_ep.moe",
    "fp8": "jax_ep.moe, recipe fp8",
    "fp8 once": "jax_ep.moe, recipe fp8, matrices quantised before",
    **{mode: f"jax_ep.moe, combine_mode {mode}" for mode in COMBINE_MODES},
    "fused gradients": "jax_ep.moe, weight gradients in the launch of an exchange",
    "gradients apart": "jax_ep.moe, weight gradients in launches of their own",
    **{f"{mode} dispatch": f"jax_ep.moe, dispatch_mode {mode}" for mode in DISPATCH_MODES},
    "xla": "jax_ep.moe, implementation xla",
    "capacity": f"all_to_all + einsum, capacity {CAPACITY_FACTOR}",
    "ragged": "ragged_all_to_all + ragged_dot",
}


BASELINES = ("xla", "capacity", "ragged")
OURS = tuple(key for key in LAYERS if key not in BASELINES)
FP8_DIFFERENCE = 0.6  # a relative error of 0.05 to 0.1 in the norm is several times that in single elements


def _functions(case: Case) -> dict[str, Callable[..., Array]]:
    moe = partial(jax_ep.moe, capacity=case.layout.capacity)
    return {
        "moe": moe,
        "fp8": partial(moe, recipe="fp8"),
        "fp8 once": partial(moe, recipe="fp8"),
        **{mode: partial(moe, schedule=Schedule(combine_mode=mode)) for mode in COMBINE_MODES},
        "fused gradients": partial(moe, schedule=Schedule(fuse_weight_gradients=True)),
        "gradients apart": partial(moe, schedule=Schedule(fuse_weight_gradients=False)),
        **{f"{mode} dispatch": partial(moe, schedule=Schedule(dispatch_mode=mode)) for mode in DISPATCH_MODES},
        "xla": partial(moe, implementation="xla"),
        "capacity": partial(baselines.capacity_layer, capacity=case.slot_capacity),
        "ragged": partial(baselines.ragged_layer, capacity=case.layout.capacity),
    }


def layers(case: Case, chosen: list[str], *, backward: bool) -> dict[str, Variant]:
    """Return the layers, forward or with the gradients of tokens, router weights and expert weights."""
    functions = _functions(case)
    x, d_y, ids, router_weights = case.inputs
    layout, model = case.layout, case.model
    flops = (18.0 if backward else 6.0) * layout.num_tokens * layout.top_k * model.hidden * model.intermediate
    return {
        LAYERS[key]: Variant(
            _layer_step(partial(functions[key], num_experts=model.experts), backward=backward),
            (x, d_y) if backward else (x,),
            (ids, router_weights, *(_quantised_before(case) if key.endswith("once") else case.weights)),
            flops,
            LAYERS["xla"] if key in (*OURS, "ragged") else None,
            key not in OURS,
            baselines.RAGGED_OPTIONS if key == "ragged" else None,
            FP8_DIFFERENCE if key.startswith("fp8") else 0.25,
        )
        for key in chosen
    }


def program(mesh: jax.sharding.Mesh, name: str, tokens: int, *, backward: bool, layer: str = "moe") -> Program:
    """Return one layer of training, to profile."""
    case = make_case(mesh, name, "uniform", tokens, make_weights(mesh, MODELS[name]))
    (variant,) = layers(case, [layer], backward=backward).values()
    return Program(*chain(case, variant)(1), 1)


def _quantised_before(case: Case) -> Any:
    """Quantize the weights once, on the device of each rank."""
    make = case.shard_map(lambda *weights: tuple(quantize(w, "fp8", for_training=True) for w in weights))
    return jax.jit(make)(*case.weights)


def _anew(fixed: Any, zero: Array) -> Any:
    """Return `fixed`, available only once the zero is, so that each call quantizes its weights."""
    return jax.lax.optimization_barrier((fixed, zero))[0]


def _layer_step(layer: Callable[..., Array], *, backward: bool) -> Callable[[Any, Any, Array], Any]:
    def forward(touched: Any, fixed: Any, zero: Array) -> Array:
        ids, router_weights, *weights = _anew(fixed, zero)
        return layer(touched[0], ids + zero, router_weights + zero.astype(jnp.float32), *weights)

    def forward_and_backward(touched: Any, fixed: Any, zero: Array) -> Any:
        (x, d_y), (ids, router_weights, *weights) = touched, _anew(fixed, zero)
        scaled = router_weights + zero.astype(jnp.float32)
        y, pull = jax.vjp(lambda x, s, w, v: layer(x, ids + zero, s, w, v), x, scaled, *weights)
        return y, *(g.master if isinstance(g, QuantizedWeights) else g for g in pull(d_y))

    return forward_and_backward if backward else forward
