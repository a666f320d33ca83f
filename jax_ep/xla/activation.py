"""The weighted activation between the two products, and its operands in FP8, as plain JAX."""

from __future__ import annotations

from jax.typing import DTypeLike

from jax_ep.core import activations, fp8
from jax_ep.types import Array, Quantized


def activate(hidden: Array, weights: Array, group_sizes: Array, *, activation: str, gated: bool) -> Array:
    """`[R, 2 * I]` hidden rows (`[R, I]` where not gated), activated and weighted, to `[R, I]`."""
    return activations.weighted(hidden, weights, activation, gated)


def activate_gradient(
    hidden: Array, weights: Array, d_rows: Array, group_sizes: Array, *, activation: str, gated: bool
) -> tuple[Array, Array]:
    """Cotangents of `hidden` and `weights`."""
    return activations.weighted_gradient(hidden, weights, d_rows, activation, gated)


def quantize_rows(x: Array, group_sizes: Array) -> Quantized:
    """`[R, H]` rows, in use or not, to FP8 values and their scales `[R, H / 128]`."""
    return fp8.quantize_rows(x)


def dequantize_rows(values: Array, scales: Array, group_sizes: Array, *, dtype: DTypeLike) -> Array:
    """The inverse of `quantize_rows`, rounded to `dtype`."""
    return fp8.dequantize_rows(values, scales, dtype)


def quantize_matrices(w: Array) -> Quantized:
    """`[G, K, N]` to FP8 `[G, N, K]` and scales `[G, ceil(N / 128), K / 128]`."""
    return fp8.quantize_matrices(w)


def activate_quantized(
    hidden: Array, weights: Array, group_sizes: Array, *, activation: str, gated: bool, keep: bool
) -> tuple[Array, Array, Array | None]:
    """Activated and weighted rows, rounded once: in FP8, and with `keep` also in the dtype of `hidden`.

    Args:
      hidden: `[R, 2 * I]`, or `[R, I]` where not gated.
      weights: `[R]`.
      group_sizes: `[L]` int32.
      activation: its name.
      gated: whether the last I columns are factors of the activated first.
      keep: return the rows too.

    Returns:
      values `[R, I]`, scales `[R, I / 128]`, and rows `[R, I]` or None.
    """
    rows = activations.weighted_wide(hidden, weights, activation, gated)
    return *fp8.quantize_rows(rows), rows.astype(hidden.dtype) if keep else None
