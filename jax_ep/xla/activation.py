"""The weighted activation between the two matmuls, and FP8 quantization of its operands, in plain JAX."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep.core import activations, fp8
from jax_ep.types import Array, Experts, Quantized, Tokens


def activate(experts: Experts, hidden: Array, weights: Array, bias: Array | None, group_sizes: Array) -> Array:
    """Activate and weight hidden rows `[R, N]`, with an optional bias `[L, N]` per expert; return `[R, I]`."""
    return activations.weighted(experts, hidden, weights, bias, group_sizes)


def activate_gradient(
    experts: Experts,
    hidden: Array,
    weights: Array,
    bias: Array | None,
    d_rows: Array,
    group_sizes: Array,
    *,
    keep: bool,
) -> tuple[Array, Array, Array | None]:
    """Return the cotangents of `hidden` and `weights`, and, with `keep`, the recomputed output of `activate`."""
    d_hidden, d_weights, rows = activations.weighted_gradient(experts, hidden, weights, bias, d_rows, group_sizes)
    return d_hidden, d_weights, rows if keep else None


def quantize_rows(x: Array, group_sizes: Array) -> Quantized:
    """Quantize rows `[R, H]`, in use or not, to FP8 values and scales `[R, H / 128]`."""
    return fp8.quantize_rows(x)


def dequantize_rows(values: Array, scales: Array, group_sizes: Array, *, dtype: DTypeLike) -> Array:
    """Invert `quantize_rows`, rounding to `dtype`."""
    return fp8.dequantize_rows(values, scales, dtype)


def quantize_matrices(w: Array, *, transpose: bool = True) -> Quantized:
    """Quantize `[G, K, N]` to FP8 `[G, N, K]` and scales `[G, ceil(N / 128), K / 128]`.

    With `transpose=False`, return `[G, K, N]` and scales `[G, ceil(K / 128), N / 128]`.
    """
    return fp8.quantize_matrices(w, transpose=transpose)


def quantize_masters(w: Array) -> tuple[Array, Array, Array]:
    """Quantize `[G, K, N]`, multiples of 128, to FP8 `[G, N, K]` and `[G, K, N]`, and the scales of the first."""
    values, scales = fp8.quantize_matrices(w)
    return values, jnp.swapaxes(values, 1, 2), scales


def quantize_columns(x: Tokens, group_sizes: Array) -> Quantized:
    """Quantize rows `[R, H]`, which may be in FP8, column-wise to `[H, P]` (core/fp8.py)."""
    rows = fp8.dequantize_rows(*x, jnp.float32) if isinstance(x, tuple) else x
    return fp8.quantize_columns(rows, group_sizes)


def quantize_both_ways(x: Array, group_sizes: Array) -> tuple[Quantized, Quantized]:
    """Quantize the same rows with both `quantize_rows` and `quantize_columns`."""
    return quantize_rows(x, group_sizes), quantize_columns(x, group_sizes)


def activate_columns(
    experts: Experts, hidden: Array, weights: Array, bias: Array | None, group_sizes: Array
) -> Quantized:
    """Activate and weight rows, and quantize them column-wise with one rounding; see `activate_quantized`."""
    rows = activations.weighted_wide(experts, hidden, weights, bias, group_sizes)
    return fp8.quantize_columns(rows, group_sizes)


def activate_quantized(
    experts: Experts, hidden: Array, weights: Array, bias: Array | None, group_sizes: Array
) -> Quantized:
    """Activate, weight and quantize rows to FP8, rounding once.

    Args:
      experts: the activation.
      hidden: `[R, N]`.
      weights: `[R]`.
      bias: `[L, N]` of the hidden rows, or None.
      group_sizes: `[L]` int32.

    Returns:
      Values `[R, I]` and scales `[R, I / 128]`.
    """
    return fp8.quantize_rows(activations.weighted_wide(experts, hidden, weights, bias, group_sizes))
