"""The expert layer of frozen weights with LoRA adapters, one operation after another; see `plan_lora`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jax_ep.core.activations import HiddenRows
from jax_ep.core.autodiff import HIDDEN_NAME
from jax_ep.core.expert_matrices import ExpertWeights, LoraWeights, QuantizedWeights
from jax_ep.core.layout import Bias, add_bias
from jax_ep.formats import check_quantized
from jax_ep.ops import exchange, exchange_gemm
from jax_ep.ops.activation import activate
from jax_ep.ops.activation_gemm_combine import bias_of_result
from jax_ep.ops.grouped_gemm import bias_gradient, checked_lora, multiply_lora
from jax_ep.ops.plan import GemmPlan
from jax_ep.ops.plan_lora import LoraLayerPlan
from jax_ep.types import Array, Handle, Options


def checked_layer(options: Options, parts: ExpertWeights, bases: tuple[Any, Any], dtype: DTypeLike) -> tuple[Any, Any]:
    """Check both weights of a layer with adapters; those without are quantized weights, which get a gradient of rows,
    or arrays, which are trained.
    """
    if options.recipe is not None:
        raise ValueError(
            f"{options.function}: recipe={options.recipe!r} with LoraWeights, expected None, since the base is frozen;"
            " leave recipe out, and pass an array or jax_ep.quantize(w, 'fp8') as the base."
        )
    check_quantized.no_fused_gemms(options, "LoraWeights")

    def whole(name: str, w: Any, base: Any) -> Any:
        if isinstance(w, LoraWeights):
            return checked_lora(options.function, name, w, base, dtype)
        return LoraWeights(base) if isinstance(base, QuantizedWeights) else base

    return whole("w_gate_up", parts.w_gate_up, bases[0]), whole("w_down", parts.w_down, bases[1])


def run(plan: LoraLayerPlan, x: Array, weights: Array, handle: Handle, parts: ExpertWeights) -> Array:
    """Run `moe` with adapters; the backward pass keeps the result of the first GEMM, and computes thin rows again."""
    first = partial(multiply_lora, plan.first, x.dtype)
    hidden, row_weights = exchange_gemm.dispatch_then(plan, first, x, weights, parts.w_gate_up, handle)
    hidden, row_weights = checkpoint_name((hidden, row_weights), HIDDEN_NAME)
    experts = plan.activation.experts

    @jax.checkpoint
    def second(hidden: Array, row_weights: Array, parts: ExpertWeights, handle: Handle) -> Array:
        sizes = handle.group_sizes
        rows = activate(plan.activation, parts.w_down.shape[1], HiddenRows(hidden, row_weights, parts.b_gate_up, sizes))
        y = multiply_lora(plan.second, rows.dtype, rows, parts.w_down, sizes)
        bias = bias_of_result(experts, parts.b_down, row_weights)
        y = y if bias is None else _with_bias(plan.sums, y, bias, sizes)
        return exchange.combine_tokens(plan.back, y, None, handle)[0]

    return second(hidden, row_weights, parts._replace(w_gate_up=None), handle)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_bias(sums: GemmPlan, rows: Array, bias: Bias, group_sizes: Array) -> Array:
    return add_bias(rows, bias, group_sizes)


_with_bias.defvjp(
    lambda sums, rows, bias, group_sizes: (add_bias(rows, bias, group_sizes), (bias, group_sizes)),
    lambda sums, residuals, cotangent: (cotangent, bias_gradient(sums, cotangent, *residuals), None),
)
