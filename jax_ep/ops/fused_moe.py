"""The expert layer on one device in one launch, where an implementation has it.

Where a gradient is wanted, the layer runs in several launches, which keep what the gradient needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from jax.typing import DTypeLike

from jax_ep.core.expert_matrices import QuantizedWeights
from jax_ep.core.facts import Part
from jax_ep.ops import quantized_gemm, registry
from jax_ep.types import Array, Experts, Options

Layer = Callable[..., Array]
type _Pull = Callable[[Array], tuple[object, ...]]
Matrices = tuple[Array, Array] | tuple[QuantizedWeights, QuantizedWeights]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4))
def run(
    options: Options,
    part: Part,
    experts: Experts,
    out_dtype: DTypeLike,
    unfused: Layer,
    topk_idx: Array,
    x: Array,
    topk_weights: Array,
    matrices: Matrices,
    biases: tuple[Array | None, Array | None],
) -> Array:
    """`moe` of checked arguments on one device; `unfused(topk_idx, x, topk_weights, matrices, biases)` is the same."""
    launch = registry.get("fused_moe", part.implementation).fused_moe
    w_gate_up, w_down = matrices
    return launch(experts, x, topk_idx, topk_weights, w_gate_up, w_down, biases, out_dtype=out_dtype)


def _forward(
    options: Options,
    part: Part,
    experts: Experts,
    out_dtype: DTypeLike,
    unfused: Layer,
    topk_idx: Array,
    x: Array,
    topk_weights: Array,
    matrices: Matrices,
    biases: tuple[Array | None, Array | None],
) -> tuple[Array, _Pull]:
    quantized_gemm.refuse_gradient(options, matrices)
    return jax.vjp(partial(unfused, topk_idx), x, topk_weights, matrices, biases)


def _backward(
    options: Options, part: Part, experts: Experts, out_dtype: DTypeLike, unfused: Layer, pull: _Pull, cotangent: Array
) -> tuple[object, ...]:
    return None, *pull(cotangent)


run.defvjp(_forward, _backward)
