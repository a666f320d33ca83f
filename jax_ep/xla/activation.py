"""The weighted activation between the two matmuls, and FP8 quantization of its operands, in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep.core import activations, fp8
from jax_ep.core.activations import HiddenRows
from jax_ep.core.dtypes import accumulation_dtype
from jax_ep.core.expert_matrices import GemmWeights, joined
from jax_ep.core.layout import Bias, bias_rows
from jax_ep.types import Array, Experts, Quantized, Tokens


def activate(experts: Experts, rows: HiddenRows) -> Array:
    """Activate and weight rows: return `[R, I]`, computed in float32 with one final rounding."""
    return _activate_wide(experts, rows).astype(rows.hidden.dtype)


def activate_gradient(
    experts: Experts, rows: HiddenRows, d_rows: Array, *, keep: bool
) -> tuple[Array, Array, Array | None]:
    """Return the cotangents of `hidden` and `weights`, and, with `keep`, the recomputed output of `activate`."""

    def run(hidden: Array, weights: Array) -> Array:
        return activate(experts, rows._replace(hidden=hidden, weights=weights))

    activated, pull = jax.vjp(run, rows.hidden, rows.weights)
    return *pull(d_rows), activated if keep else None


def _activate_wide(experts: Experts, rows: HiddenRows) -> Array:
    """Compute `activate` in the accumulation dtype, without the final rounding."""
    wide = rows.hidden.astype(accumulation_dtype(rows.hidden.dtype))
    factors = rows.weights.astype(wide.dtype)[:, None]
    if experts.weight_on == "input":
        wide = wide * factors
    if rows.bias is not None:
        wide = wide + bias_rows(Bias(rows.bias), rows.group_sizes, wide.shape[0], wide.dtype)
    activated = activations.activate(experts, wide)
    return activated if experts.weight_on == "input" else activated * factors


def quantize_rows(x: Array, group_sizes: Array) -> Quantized:
    """Quantize rows `[R, H]`, in use or not, to FP8 values and scales `[R, H / 128]`."""
    return fp8.quantize_rows(x)


def dequantize_rows(values: Array, scales: Array, group_sizes: Array, *, dtype: DTypeLike) -> Array:
    """Invert `quantize_rows`, rounding to `dtype`."""
    return fp8.dequantize_rows(values, scales, dtype)


def quantize_matrices(w: GemmWeights, group_sizes: Array | None = None, *, transpose: bool = True) -> Quantized:
    """Quantize `[G, K, N]` to FP8 `[G, N, K]` and scales `[G, ceil(N / 128), K / 128]`, also of groups without rows.

    With `transpose=False`, return `[G, K, N]` and scales `[G, ceil(K / 128), N / 128]`.
    """
    return fp8.quantize_matrices(joined(w), transpose=transpose)


@jax.jit  # one compilation for eager callers
def quantize_masters(w: Array) -> tuple[Array, Array, Array]:
    """Quantize `[..., K, N]`, multiples of 128, to FP8 `[..., N, K]` and `[..., K, N]`, and the scales of the first."""
    values, scales = fp8.quantize_matrices(w)
    return values, jnp.swapaxes(values, -1, -2), scales


def quantize_columns(x: Tokens, group_sizes: Array) -> Quantized:
    """Quantize rows `[R, H]`, which may be in FP8, column-wise to `[H, P]` (core/fp8.py)."""
    rows = fp8.dequantize_rows(*x, jnp.float32) if isinstance(x, tuple) else x
    return fp8.quantize_columns(rows, group_sizes)


def quantize_both_ways(x: Array, group_sizes: Array) -> tuple[Quantized, Quantized]:
    """Quantize the same rows with both `quantize_rows` and `quantize_columns`."""
    return quantize_rows(x, group_sizes), quantize_columns(x, group_sizes)


def activate_columns(experts: Experts, rows: HiddenRows) -> Quantized:
    """Activate and weight rows, and quantize them column-wise with one rounding; see `activate_quantized`."""
    return fp8.quantize_columns(_activate_wide(experts, rows), rows.group_sizes)


def activate_quantized(experts: Experts, rows: HiddenRows) -> Quantized:
    """Activate and weight rows, and quantize them to FP8 with one rounding: values `[R, I]`, scales `[R, I / 128]`."""
    return fp8.quantize_rows(_activate_wide(experts, rows))
