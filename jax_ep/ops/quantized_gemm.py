"""GEMMs of consecutive groups of rows and `QuantizedWeights`, for inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from jax import lax
from jax.typing import DTypeLike

from jax_ep import formats
from jax_ep.core import operations
from jax_ep.core.autodiff import call_without_gradient
from jax_ep.core.expert_matrices import QuantizedWeights
from jax_ep.core.layout import row_groups
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.formats.int8 import quantize_tokens
from jax_ep.ops import registry
from jax_ep.ops.plan_serving import QuantizedGemmPlan
from jax_ep.types import Array, Options, Quantized


def multiply(
    plan: QuantizedGemmPlan, out_dtype: DTypeLike, lhs: Array, rhs: QuantizedWeights, group_sizes: Array
) -> Array:
    """`[M, K]` rows times the weights `[K, N]` of their group, checked; zero past the groups."""

    def gemm(lhs: Array, rhs: QuantizedWeights, group_sizes: Array) -> Array:
        if rhs.activations == "fp8":
            in_fp8 = fp8_operands(plan).quantize_rows(lhs, group_sizes)
            return _multiply_fp8(plan, out_dtype, in_fp8, rhs, group_sizes)
        if plan.dequantizes:
            return _multiply_dequantized(plan, out_dtype, lhs, rhs, group_sizes)
        run = partial(_run(plan).grouped_gemm, out_dtype=out_dtype)
        if rhs.activations is None:
            return run(lhs, rhs, group_sizes)
        rows = quantize_tokens(lhs, row_groups(group_sizes, lhs.shape[0]), rhs.smooth)
        return run(rows, rhs, group_sizes)

    return call_without_gradient(_remedy(plan.options), gemm, *vary_alike((lhs, rhs, group_sizes)))


def _run(plan: QuantizedGemmPlan) -> operations.QuantizedGemm:
    return registry.QUANTIZED_GEMM.by(plan.gemm.implementation)


def fp8_operands(plan: QuantizedGemmPlan) -> operations.Activation:
    """Return the functions that round rows to FP8 for this GEMM."""
    if plan.operands is None:
        raise ValueError(f"{plan.options.function}: these weights take rows as they are; do not round them.")
    return registry.ACTIVATION.by(plan.operands.implementation)


def _multiply_fp8(
    plan: QuantizedGemmPlan, out_dtype: DTypeLike, rows: Quantized, rhs: QuantizedWeights, group_sizes: Array
) -> Array:
    if plan.gemm.operation == "quantized_gemm":
        return _run(plan).grouped_gemm(rows, rhs, group_sizes, out_dtype=out_dtype)
    run = registry.FP8_GEMM.by(plan.gemm.implementation).grouped_gemm_fp8
    return run(rows, (rhs.values, cast(Array, rhs.scales)), group_sizes, out_dtype=out_dtype)


def _multiply_dequantized(
    plan: QuantizedGemmPlan, out_dtype: DTypeLike, lhs: Array, rhs: QuantizedWeights, group_sizes: Array
) -> Array:
    # Once the rows are known: in front of a loop, XLA would dequantize the weights of all layers, and keep them.
    lhs, rhs = lax.optimization_barrier((lhs, rhs))
    run = registry.GROUPED_GEMM.by(plan.gemm.implementation).grouped_gemm
    return run(lhs, formats.dequantize(rhs, lhs.dtype), group_sizes, transpose=True, out_dtype=out_dtype)


def multiply_fp8(
    plan: QuantizedGemmPlan, out_dtype: DTypeLike, rows: Quantized, rhs: QuantizedWeights, group_sizes: Array
) -> Array:
    """`multiply` of rows that are in FP8 already."""
    gemm = partial(_multiply_fp8, plan, out_dtype)
    return call_without_gradient(_remedy(plan.options), gemm, *vary_alike((rows, rhs, group_sizes)))


def without_gradient[*Arguments, Result](
    options: Options, function: Callable[[*Arguments], Result], *arguments: *Arguments
) -> Result:
    """Run a step of a layer of `QuantizedWeights`; differentiating it raises a `TypeError` with the remedy."""
    return call_without_gradient(_remedy(options), function, *arguments)


def _remedy(options: Options) -> str:
    return (
        f"{options.function} with quantized weights has no gradient: train with arrays, with recipe='fp8', or with"
        " jax_ep.lora.LoraWeights of them."
    )


def refuse_gradient(options: Options, weights: Sequence[Array | QuantizedWeights]) -> None:
    """Raise the `TypeError` of a derivative if weights are quantized."""
    if any(isinstance(w, QuantizedWeights) for w in weights):
        raise TypeError(_remedy(options))
