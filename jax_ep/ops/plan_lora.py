"""Plans of GEMMs and layers of frozen weights with LoRA adapters.

No kernel that fuses a GEMM with an all-to-all has adapters: their thin GEMMs read the same rows as that of the base.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep.core.expert_matrices import LoraWeights, QuantizedWeights, base_of
from jax_ep.core.facts import ExchangeFacts, GemmFacts
from jax_ep.ops.plan import (
    ActivationPlan,
    AroundExchange,
    ExchangePlan,
    GemmPlan,
    LayerSizes,
    activation,
    exchange,
    gemm,
    group_sums,
    resolution,
)
from jax_ep.ops.plan_serving import QuantizedGemmPlan, quantized_gemm
from jax_ep.types import Experts, Options


@dataclasses.dataclass(frozen=True)
class LoraGemmPlan:
    """GEMM by the base, its transpose, and the two thin ones, by a and b; None: no adapters."""

    base: GemmPlan | QuantizedGemmPlan
    transposed: GemmPlan
    thin: tuple[GemmPlan, GemmPlan] | None


@resolution
def lora_gemm(options: Options, num_rows: int, dtype: DTypeLike, w: Any, out_dtype: DTypeLike) -> LoraGemmPlan:
    """Resolve the GEMM of rows `[num_rows, K]` of `dtype` and weights in any form."""
    (groups, depth, columns), dtype, out_dtype = w.shape, jnp.dtype(dtype), jnp.dtype(out_dtype)

    def resolve(depth: int, columns: int, out_dtype: jnp.dtype) -> GemmPlan:
        return gemm(options, GemmFacts(dtype, num_rows, depth, columns, groups, out_dtype))

    base, thin = base_of(w), None
    if isinstance(w, LoraWeights) and w.a is not None:
        rank = w.a.shape[-1]
        thin = resolve(depth, rank, dtype), resolve(rank, columns, out_dtype)
    if isinstance(base, QuantizedWeights):
        base_gemm = quantized_gemm(options, (num_rows, depth), dtype, base, out_dtype)
        return LoraGemmPlan(base_gemm, resolve(columns, depth, dtype), thin)
    plan = resolve(depth, columns, out_dtype)
    return LoraGemmPlan(plan, plan.transposed, thin)


@dataclasses.dataclass(frozen=True)
class LoraLayerPlan(AroundExchange):
    """The expert layer with adapters, one operation after another.

    `back` is the plan of combine, and `sums` those of the gradient of the second bias.
    """

    back: ExchangePlan
    first: LoraGemmPlan
    second: LoraGemmPlan
    activation: ActivationPlan
    sums: GemmPlan


@resolution
def lora_layer(
    options: Options,
    facts: ExchangeFacts,
    experts: Experts,
    sizes: LayerSizes,
    weights: tuple[Any, Any],
    sum_dtype: DTypeLike,
) -> LoraLayerPlan:
    """Resolve both directions of the layer with adapters."""
    rows, dtype, groups = facts.layout.capacity, facts.dtype, facts.layout.num_local_experts
    whole = exchange(options, dataclasses.replace(facts, columns=sizes.columns))
    first, second = (lora_gemm(options, rows, dtype, w, dtype) for w in weights)
    between = activation(options, experts, dtype, rows, sizes.columns, groups)
    sums = group_sums(options, dtype, rows, facts.hidden, groups)
    return LoraLayerPlan(whole, whole.with_sums(sum_dtype), first, second, between, sums)
