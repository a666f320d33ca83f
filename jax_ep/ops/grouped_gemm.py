"""Grouped GEMM: consecutive groups of rows times one matrix each, and the weight gradient.

Both are closed under differentiation, so gradients of any order exist.

Source: adapters are those of LoRA (arXiv:2106.09685), on quantized weights those of QLoRA (arXiv:2305.14314).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep import formats
from jax_ep.core import check, check_fp8
from jax_ep.core.autodiff import saves_operands
from jax_ep.core.check import operation
from jax_ep.core.dtypes import FP8, accumulation_dtype
from jax_ep.core.expert_matrices import GemmWeights, LoraWeights, QArray, QuantizedWeights, as_array, num_home
from jax_ep.core.facts import GemmFacts
from jax_ep.core.layout import Bias
from jax_ep.core.mesh_axes import takes_global_arrays, vary_alike
from jax_ep.formats import check_quantized
from jax_ep.formats.qarrays import own_weights
from jax_ep.ops import plan as plans
from jax_ep.ops import plan_lora, plan_serving, quantized_gemm, registry
from jax_ep.ops.plan import FEWEST_COLUMNS, GemmPlan
from jax_ep.ops.plan_lora import LoraGemmPlan
from jax_ep.ops.plan_serving import QuantizedGemmPlan
from jax_ep.types import Array, Options


@operation
@takes_global_arrays(keeps_rows=True)
def grouped_gemm(
    lhs: Array,
    rhs: Array | QuantizedWeights | QArray | LoraWeights,
    group_sizes: Array,
    *,
    lhs_scales: Array | None = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Array:
    """Multiply consecutive groups of rows by one matrix each, as `lax.ragged_dot` does; time grows with the rows in
    use.

    It is differentiable in `lhs` and `rhs`, to any order, and needs no mesh axis. Sums run in float32 (float64 for
    float64).

    FP8 operands come with scales, and have no gradient (`moe(recipe="fp8")` has one). The products of 128 elements
    of a row are scaled by both scales and added in float32.

    Args:
      lhs: `[M, K]` bfloat16, float16, float32, float64 or float8_e4m3fn.
      rhs: `[G, K, N]` of the same dtype; or `QuantizedWeights`, multiplied in the dtype of lhs or as their
        `activations` say: with "fp8", lhs may be FP8 already. Then there is no gradient. Or a `qwix.QArray`,
        converted to those in each call. Or `LoraWeights`: then `lhs`, which is not FP8, and the adapters have
        gradients.
      group_sizes: `[G]` int32, rows of each group; rows past their sum belong to none.
      lhs_scales: `[M, K / 128]` float32 of an FP8 lhs, from `quantize_fp8`; else None.
      preferred_element_type: dtype of the result; None: that of lhs, bfloat16 for FP8.
      implementation: see `dispatch`.

    Returns:
      `[M, N]`; rows past the groups are zero, whatever lhs holds there.

    Raises:
      ValueError: shapes that do not fit; in FP8, K is not a multiple of 128.
      TypeError: unsupported or different dtypes, scales missing or too many; FP8 operands are differentiated.
      NotImplementedError: no requested implementation supports the call.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> from jax_ep.quantization import quantize, quantize_fp8
      >>> rhs = jnp.stack([jnp.eye(2), 3 * jnp.eye(2)])
      >>> jax_ep.grouped_gemm(jnp.ones((3, 2)), rhs, jnp.array([1, 1]))[:, 0].tolist()
      [1.0, 3.0, 0.0]
      >>> rows, scales = quantize_fp8(jnp.ones((3, 128)))
      >>> w = quantize(jnp.ones((2, 128, 4)), "fp8", activations="fp8")
      >>> y = jax_ep.grouped_gemm(rows, w, jnp.array([1, 1]), lhs_scales=scales)
      >>> y.shape, y.dtype.name, y[:, 0].tolist()
      ((3, 4), 'bfloat16', [128.0, 128.0, 0.0])

    Source: the scales are those of DeepSeek-V3 (arXiv:2412.19437, section 3.3).
    """
    options = registry.options("grouped_gemm", implementation=implementation)
    w = own_weights("grouped_gemm", "rhs", rhs)
    if isinstance(w, LoraWeights):
        return _grouped_gemm_lora(options, lhs, w, group_sizes, lhs_scales, preferred_element_type)
    if isinstance(w, QuantizedWeights) and w.format is None:
        w = as_array(check_quantized.weights("grouped_gemm", "rhs", w))
    if isinstance(w, QuantizedWeights) or lhs_scales is not None or getattr(lhs, "dtype", None) == FP8:
        lhs = check.array("grouped_gemm", "lhs", lhs, "[M, K]")
        operands = check_quantized.gemm_operands("grouped_gemm", lhs, w, group_sizes, lhs_scales)
        lhs, weights, group_sizes, lhs_scales = operands
        check.known_rows("grouped_gemm", "lhs", "with quantized weights", lhs.shape[0])
        out_dtype = check_fp8.result_dtype("grouped_gemm", preferred_element_type, lhs)
        plan = plan_serving.quantized_gemm(options, lhs.shape, lhs.dtype, weights, out_dtype)
        if lhs_scales is None:
            return quantized_gemm.multiply(plan, out_dtype, lhs, weights, group_sizes)
        return quantized_gemm.multiply_fp8(plan, out_dtype, (lhs, lhs_scales), weights, group_sizes)
    lhs, w, group_sizes = checked(options.function, lhs, w, group_sizes)
    out_dtype = jnp.dtype(check.result_dtype(options.function, preferred_element_type, lhs.dtype))
    groups, depth, columns = w.shape
    facts = GemmFacts(lhs.dtype, lhs.shape[0], depth, columns, groups, out_dtype)
    return multiply(plans.gemm(options, facts), False, out_dtype, *vary_alike((lhs, w, group_sizes)))


def _grouped_gemm_lora(
    options: Options, lhs: Array, rhs: LoraWeights, group_sizes: Array, lhs_scales: Any, dtype: DTypeLike | None
) -> Array:
    """`grouped_gemm` of arguments that are not checked."""
    lhs = check.floating(options.function, "lhs", lhs, "[M, K]")
    base = check_quantized.gemm_operands(options.function, lhs, rhs.base, group_sizes, lhs_scales)
    lhs, group_sizes = base[0], base[2]
    w = checked_lora(options.function, "rhs", rhs, as_array(base[1]), lhs.dtype)
    out_dtype = jnp.dtype(check.result_dtype(options.function, dtype, lhs.dtype))
    plan = plan_lora.lora_gemm(options, lhs.shape[0], lhs.dtype, w, out_dtype)
    return multiply_lora(plan, out_dtype, *vary_alike((lhs, w, group_sizes)))


def checked_lora(function: str, name: str, w: LoraWeights, base: Any, dtype: DTypeLike) -> LoraWeights:
    """Return `w` with its checked base `[G, K, ...]`, and adapters of `dtype` that fit it."""
    if isinstance(w.base, LoraWeights) or (w.a is None) != (w.b is None):
        raise ValueError(f"{function}: {name} is LoraWeights of LoraWeights, or has one of a and b; pass both or none.")
    if w.a is None:
        return dataclasses.replace(w, base=base)
    groups, depth, *columns = base.shape
    remedy = "make them with jax_ep.lora.init"
    a = check.array(function, f"{name}.a", w.a, f"[{groups}, {depth}, r >= 1]", remedy=remedy)
    shape = ", ".join(map(str, (groups, a.shape[-1], *columns)))
    b = check.array(function, f"{name}.b", w.b, f"[{shape}]", remedy=remedy)
    for part, value in (("a", a), ("b", b)):
        check.same_dtype(function, f"{name}.{part}", value, "the tokens", dtype)
    return LoraWeights(base, a, b, check.finite(function, f"{name}.scale", w.scale))


def checked(function: str, lhs: Array, rhs: Array, group_sizes: Array) -> tuple[Array, Array, Array]:
    """Return operands that fit together."""
    lhs = check.floating(function, "lhs", lhs, "[M, K]")
    check.int32_rows(function, f"lhs of shape {lhs.shape}", lhs.shape[0], "split it")
    group_sizes = check.group_sizes(function, group_sizes)
    rhs = check.expert_weights(function, "rhs", rhs, (group_sizes.shape[0], lhs.shape[1]), lhs.dtype, "group_sizes")
    return lhs, rhs, group_sizes


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 7))
def multiply(
    plan: GemmPlan,
    transpose: bool,
    out_dtype: DTypeLike,
    lhs: Array,
    rhs: GemmWeights,
    group_sizes: Array,
    bias: Bias | None = None,
    sums: GemmPlan | None = None,
) -> Array:
    """`[M, K]` rows times the `[G, K, N]` matrix of their group (`[G, N, K]` if `transpose`), plus its bias.

    `sums` adds up the gradient of the bias, if there is one.
    """
    run = plan.run.grouped_gemm
    return run(lhs, rhs, group_sizes, transpose=transpose, out_dtype=out_dtype, bias=bias)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 5))
def weight_gradient(
    plan: GemmPlan, out_dtype: DTypeLike, lhs: Array, rhs: Array, group_sizes: Array, num_home: int = 0
) -> GemmWeights:
    """Multiply `[M, K]` and `[M, N]` rows to `[G, K, N]`, one matrix per group; in two arrays for `num_home` > 0."""
    return plan.run.weight_gradient(lhs, rhs, group_sizes, out_dtype=out_dtype, num_home=num_home)


def sum_groups(sums: GemmPlan, rows: Array, scales: Array | None, group_sizes: Array) -> Array:
    """`[M, N]` rows, times their scales if there are any, added up for each group: `[G, N]` in float32 or float64."""
    column = jnp.ones_like(rows, shape=rows.shape[:1]) if scales is None else scales.astype(rows.dtype)
    factors = jnp.broadcast_to(column[:, None], (rows.shape[0], FEWEST_COLUMNS))
    wide = accumulation_dtype(rows.dtype)
    return cast(Array, weight_gradient(sums, wide, *vary_alike((factors, rows, group_sizes))))[:, 0]


def bias_gradient(sums: GemmPlan, rows: Array, bias: Bias, group_sizes: Array) -> Bias:
    """Return the cotangent of a bias, given that of the rows `[M, N]` to which it was added."""
    d_values = sum_groups(sums, rows, bias.scales, group_sizes).astype(bias.values.dtype)
    if bias.scales is None:
        return Bias(d_values, None)
    wide = accumulation_dtype(rows.dtype)
    columns = jnp.broadcast_to(bias.values.astype(rows.dtype)[:, :, None], (*bias.values.shape, FEWEST_COLUMNS))
    d_scales = multiply(sums, False, wide, *vary_alike((rows, columns, group_sizes)))[:, 0]
    return Bias(d_values, d_scales.astype(bias.scales.dtype))


def _multiply_backward(
    plan: GemmPlan,
    transpose: bool,
    out_dtype: DTypeLike,
    sums: GemmPlan | None,
    residuals: tuple[Array, GemmWeights, Array, Bias | None],
    cotangent: Array,
) -> tuple[Array, GemmWeights, None, Bias | None]:
    lhs, rhs, group_sizes, bias = residuals
    back, cotangent = plan.transposed, cotangent.astype(lhs.dtype)
    d_lhs = multiply(back, not transpose, lhs.dtype, cotangent, rhs, group_sizes)
    rows = (cotangent, lhs) if transpose else (lhs, cotangent)
    d_rhs = weight_gradient(back, rhs.dtype, *rows, group_sizes, num_home(rhs))
    d_bias = None if bias is None else bias_gradient(cast(GemmPlan, sums), cotangent, bias, group_sizes)
    return d_lhs, d_rhs, None, d_bias


def _weight_gradient_backward(
    plan: GemmPlan,
    out_dtype: DTypeLike,
    num_home: int,
    residuals: tuple[Array, Array, Array],
    cotangent: GemmWeights,
) -> tuple[Array, Array, None]:
    lhs, rhs, group_sizes = residuals
    back, cotangent = plan.transposed, jax.tree.map(lambda w: w.astype(lhs.dtype), cotangent)
    d_lhs = multiply(back, True, lhs.dtype, rhs, cotangent, group_sizes)
    d_rhs = multiply(back, False, lhs.dtype, lhs, cotangent, group_sizes)
    return d_lhs, d_rhs, None


multiply.defvjp(saves_operands(multiply), _multiply_backward)
weight_gradient.defvjp(saves_operands(weight_gradient), _weight_gradient_backward)


def multiply_lora(plan: LoraGemmPlan, out_dtype: DTypeLike, lhs: Array, w: Any, group_sizes: Array) -> Array:
    """`[M, K]` rows times the weights of their group, of any kind, to `[M, N]`."""
    if not isinstance(w, LoraWeights):
        return multiply(cast(GemmPlan, plan.base), False, out_dtype, lhs, w, group_sizes)
    y = _frozen(plan, out_dtype, lhs, w.base, group_sizes)
    if plan.thin is None:
        return y
    down, up = plan.thin
    thin = w.scale * multiply(down, False, lhs.dtype, lhs, w.a, group_sizes)
    delta = multiply(up, False, out_dtype, thin, w.b, group_sizes)
    wide = accumulation_dtype(out_dtype)
    return (y.astype(wide) + delta.astype(wide)).astype(out_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _frozen(plan: LoraGemmPlan, out_dtype: DTypeLike, lhs: Array, base: Any, group_sizes: Array) -> Array:
    """Rows times weights that have no gradient."""
    if isinstance(plan.base, QuantizedGemmPlan):
        return quantized_gemm.multiply(plan.base, out_dtype, lhs, base, group_sizes)
    return multiply(plan.base, False, out_dtype, lhs, base, group_sizes)


def _frozen_forward(
    plan: LoraGemmPlan, out_dtype: DTypeLike, lhs: Array, base: Any, group_sizes: Array
) -> tuple[Array, tuple[Array, Any, Array]]:
    return _frozen(plan, out_dtype, lhs, base, group_sizes), (lhs[:0], base, group_sizes)


def _frozen_backward(
    plan: LoraGemmPlan, out_dtype: DTypeLike, residuals: tuple[Array, Any, Array], cotangent: Array
) -> tuple[Array, None, None]:
    like, base, group_sizes = residuals
    cotangent, transpose = cotangent.astype(like.dtype), True
    if isinstance(base, QuantizedWeights):  # after its cotangent is known, so that no pass holds all layers' weights
        base, cotangent = jax.lax.optimization_barrier((base, cotangent))
        base, transpose = formats.dequantize(base, like.dtype), False
    return multiply(plan.transposed, transpose, like.dtype, cotangent, base, group_sizes), None, None


_frozen.defvjp(_frozen_forward, _frozen_backward)
