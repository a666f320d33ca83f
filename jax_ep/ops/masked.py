"""The expert layer of decode-sized batches, between low-latency dispatch and combine: GEMMs of the rows in use.

Symbols: L local experts, M rows of an expert's block, W * max_tokens_per_rank in the layout of the dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep.core import check, check_fp8, fp8
from jax_ep.core.autodiff import call_without_gradient
from jax_ep.core.check import operation
from jax_ep.core.dtypes import accumulation_dtype
from jax_ep.core.expert_matrices import QArray, QuantizedWeights, as_transposed
from jax_ep.core.facts import MaskedActivationFacts
from jax_ep.core.fp8 import quantize_rows
from jax_ep.core.layout import add_bias_of_blocks
from jax_ep.core.mesh_axes import takes_global_arrays, vary_alike
from jax_ep.formats import check_quantized, needs_decoder
from jax_ep.formats.int8 import quantize_tokens
from jax_ep.formats.qarrays import own_weights
from jax_ep.ops import plan_serving, registry
from jax_ep.ops.plan_serving import PartPlan, QuantizedGemmPlan
from jax_ep.types import Array, Experts, Options, Tokens


@operation
@takes_global_arrays(keeps_rows=True)
def masked_grouped_gemm(
    lhs: Array,
    rhs: Array | QuantizedWeights | QArray,
    group_sizes: Array,
    *,
    lhs_scales: Array | None = None,
    preferred_element_type: DTypeLike | None = None,
    expected_rows: int | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Array:
    """Multiply the rows in use of each expert by its weights, in FP8 or in the dtype of the tokens.

    It takes what `low_latency_dispatch` returns. Experts without rows, and rows past the counts, cost nothing: with
    few rows the time is that of reading the weights of the experts with rows once. It needs no mesh axis. It is for
    inference and has no gradient.

    In FP8 the products of 128 elements of a row are scaled by both scales and added in float32.

    Args:
      lhs: `[L, M, K]` float8_e4m3fn, bfloat16, float16, float32 or float64.
      rhs: `[L, K, N]` of the same dtype; or `QuantizedWeights`, multiplied in the dtype of lhs or as their
        `activations` say: with "fp8", lhs may be FP8 already. The GEMM reads transposed weights: an array or a
        `qwix.QArray` is transposed in each call, so prepare it once with `quantize(w, None)`, or with a format.
      group_sizes: `[L]` int32, how many of the M rows count.
      lhs_scales: `[L, M, K / 128]` float32 of an FP8 lhs, or fewer, of groups of a multiple of 128 columns; else None.
      preferred_element_type: dtype of the result; None: that of lhs, bfloat16 for FP8.
      expected_rows: static, how many rows an expert has on average, for example `W * T * K / E` with K experts per
        token. It only affects the choice of tiles; None: as for up to 64.
      implementation: see `dispatch`.

    Returns:
      `[L, M, N]`; rows past the counts hold anything, NaN included.

    Raises:
      ValueError: shapes that do not fit; in FP8, K is not a multiple of 128.
      TypeError: unsupported or different dtypes, scales missing or too many; the result is differentiated.
      NotImplementedError: no requested implementation supports the call.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> from jax_ep.quantization import quantize, quantize_fp8
      >>> rows, scales = quantize_fp8(jnp.ones((2, 4, 256)))
      >>> w = quantize(jnp.ones((2, 256, 8)), "fp8", activations="fp8")
      >>> sizes = jnp.array([3, 0])
      >>> y = jax_ep.masked_grouped_gemm(rows, w, sizes, lhs_scales=scales)
      >>> y.shape, y.dtype.name, y[0, :3, 0].tolist()
      ((2, 4, 8), 'bfloat16', [256.0, 256.0, 256.0])

    Source: the masked layout and the scales are those of DeepGEMM and DeepSeek-V3 (arXiv:2412.19437, section 3.3).
    """
    function = "masked_grouped_gemm"
    lhs, rows, rhs, group_sizes = checked_operands(function, lhs, rhs, group_sizes, lhs_scales)
    check.known_rows(function, "each block of lhs", "in a masked grouped GEMM", lhs.shape[1])
    out_dtype = check_fp8.result_dtype(function, preferred_element_type, lhs)
    if expected_rows is not None:
        expected_rows = check.integer(function, "expected_rows", expected_rows)
    options = registry.options(function, implementation=implementation)
    plan = plan_serving.masked_gemm(options, lhs.shape, lhs.dtype, rhs, out_dtype)
    return multiply(plan, out_dtype, expected_rows, rows, rhs, group_sizes)


def checked_operands(
    function: str,
    lhs: Array,
    rhs: Array | QuantizedWeights | QArray,
    group_sizes: Array,
    lhs_scales: Array | None,
) -> tuple[Array, Tokens, QuantizedWeights, Array]:
    """Check the operands of a GEMM of masked blocks, and that they fit together; return lhs with and without scales."""
    lhs = check.array(function, "lhs", lhs, "[L, M, K]")
    group_sizes = check.group_sizes(function, group_sizes, lhs.shape[0])
    weights = own_weights(function, "rhs", rhs)
    operands = check_quantized.gemm_operands(function, lhs, weights, group_sizes, lhs_scales)
    lhs, weights, group_sizes, lhs_scales = operands
    return lhs, lhs if lhs_scales is None else (lhs, lhs_scales), as_transposed(weights), group_sizes


@operation
@takes_global_arrays()
def masked_gated_activation(
    hidden: Array,
    group_sizes: Array,
    *,
    experts: Experts | None = None,
    bias: Array | None = None,
    quantize: bool = True,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Array, Array | None]:
    """Activate the rows in use, `activation(gate) * up` or as `Experts` say, and quantize them for the next GEMM.

    It computes in float32 and rounds once. It is for inference and has no gradient.

    Args:
      hidden: `[L, M, 2 * I]` bfloat16, float16, float32 or float64, gate in its first I columns, up in its last.
      group_sizes: `[L]` int32, how many of the M rows count.
      experts: what the experts compute; `weight_on` is ignored. None: `Experts()`.
      bias: `[L, 2 * I]`, added to the hidden rows; None: no bias.
      quantize: to FP8 with one scale per row and 128 columns (True), or to the dtype of hidden (False).
      implementation: see `dispatch`.

    Returns:
      `(rows [L, M, I], scales [L, M, I / 128] float32 or None)`; rows past the counts hold anything, NaN included.

    Raises:
      ValueError: shapes or an activation that do not fit; I is not a multiple of 128 with `quantize`.
      TypeError: unsupported dtypes; the result is differentiated.
      NotImplementedError: no requested implementation supports the call.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> hidden, sizes = jnp.full((2, 4, 256), 2.0), jnp.array([3, 0])
      >>> experts = jax_ep.Experts("relu")
      >>> rows, scales = jax_ep.ops.masked.masked_gated_activation(hidden, sizes, experts=experts)
      >>> rows.shape, scales.shape, (rows.astype(jnp.float32) * scales)[0, 0, 0].item()
      ((2, 4, 128), (2, 4, 1), 4.0)
    """
    function = "masked_gated_activation"
    check.flag(function, "quantize", quantize)
    hidden = check.floating(function, "hidden", hidden, "[L, M, 2 * I]")
    check.int32_rows(function, f"hidden of shape {hidden.shape}", hidden.shape[0] * hidden.shape[1], "split it")
    group_sizes = check.group_sizes(function, group_sizes, hidden.shape[0])
    experts, inner = _checked_activation(experts, hidden)
    bias = check.bias(function, "bias", bias, (hidden.shape[0], hidden.shape[2]))
    if quantize and inner is not None:
        check_fp8.whole_blocks(function, "I, the columns of the activated rows,", inner)
    options = registry.options(function, implementation=implementation)
    facts = MaskedActivationFacts(hidden.dtype, quantize and not callable(experts.activation))
    plan = plan_serving.one_part(options, facts)
    return activate(plan, experts, inner, hidden, group_sizes, bias, quantize)


def _checked_activation(experts: Experts | None, hidden: Array) -> tuple[Experts, int | None]:
    """Return the experts and the columns of activated rows; None: the caller's activation decides."""
    function, columns = "masked_gated_activation", hidden.shape[2]
    gated = experts is None or not isinstance(experts, Experts) or experts.gated
    own = isinstance(experts, Experts) and callable(experts.activation)
    if gated and columns % 2 and not own:
        raise ValueError(
            f"{function}: hidden has {columns} columns, expected an even number, 2 * I; pass gate and up side by side."
        )
    inner = columns // 2 if gated else columns
    return check.expert_function(function, experts, columns, inner), None if own else inner


def multiply(
    plan: QuantizedGemmPlan,
    out_dtype: DTypeLike,
    expected_rows: int | None,
    rows: Tokens,
    rhs: QuantizedWeights,
    group_sizes: Array,
) -> Array:
    """`masked_grouped_gemm` of checked operands."""
    name = plan.gemm.implementation
    kernels = registry.QUANTIZED_GEMM.by(name) if needs_decoder(rhs) else registry.MASKED.by(name)
    run = partial(kernels.masked_grouped_gemm, out_dtype=out_dtype, expected_rows=expected_rows)

    def gemm(rows: Tokens, rhs: QuantizedWeights, group_sizes: Array) -> Array:
        return run(prepared_rows(rows, rhs), rhs, group_sizes)

    operands = vary_alike((rows, rhs, group_sizes))
    remedy = f"{plan.options.function} has no gradient: train with moe or grouped_gemm."
    return call_without_gradient(remedy, gemm, *operands)


def prepared_rows(rows: Tokens, rhs: QuantizedWeights) -> Tokens:
    """Return `[G, M, K]` rows in the dtype in which they are multiplied with these weights."""
    if isinstance(rows, tuple) or rhs.activations is None:
        return rows
    if rhs.activations == "fp8":
        return quantize_rows(rows)
    num_groups, num_rows, depth = rows.shape
    groups = jnp.repeat(jnp.arange(num_groups, dtype=jnp.int32), num_rows)
    values, scales = quantize_tokens(rows.reshape(-1, depth), groups, rhs.smooth)
    return values.reshape(rows.shape), scales.reshape(num_groups, num_rows)


def activate(
    plan: PartPlan,
    experts: Experts,
    inner: int | None,
    hidden: Array,
    group_sizes: Array,
    bias: Array | None,
    quantize: bool,
) -> tuple[Array, Array | None]:
    """`masked_gated_activation` of checked operands, to `inner` columns."""
    if callable(experts.activation):
        return _by_own_function(plan.options, experts.activation, inner, hidden, bias, quantize)
    run = partial(registry.MASKED.by(plan.part.implementation).masked_gated_activation, experts, quantize=quantize)
    return call_without_gradient(
        f"{plan.options.function} has no gradient: train with moe.", run, *vary_alike((hidden, group_sizes, bias))
    )


def _by_own_function(
    options: Options,
    own: Callable[[Array], Array],
    inner: int | None,
    hidden: Array,
    bias: Array | None,
    quantize: bool,
) -> tuple[Array, Array | None]:
    """Activate all rows with the caller's function, padding rows included, in the form in which `moe` passes them."""
    if bias is not None:
        hidden = add_bias_of_blocks(hidden, bias)
    flat = hidden.reshape(hidden.shape[0] * hidden.shape[1], hidden.shape[2])
    rows = check.activation_rows(options.function, own(flat), flat, inner).reshape(*hidden.shape[:2], -1)
    if not quantize:
        return rows.astype(hidden.dtype), None
    check_fp8.whole_blocks(options.function, "I, the columns of the activated rows,", rows.shape[2])
    return fp8.quantize_rows(rows.astype(accumulation_dtype(hidden.dtype)))
