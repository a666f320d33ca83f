"""Masked grouped GEMM and activation of the serving path, in plain XLA."""

from __future__ import annotations

import functools

import jax

from jax_ep.core import fp8
from jax_ep.core.activations import activate
from jax_ep.core.dtypes import accumulation_dtype
from jax_ep.types import Array, Experts
from jax_ep.xla.quantized_gemm import masked_grouped_gemm as masked_grouped_gemm


@functools.partial(jax.jit, static_argnums=0, static_argnames="quantize")
def masked_gated_activation(
    experts: Experts, hidden: Array, group_sizes: Array, bias: Array | None, *, quantize: bool
) -> tuple[Array, Array | None]:
    """Activate all rows, valid or not; skipping rows would cost XLA more.

    Args:
      experts: the activation.
      hidden: `[G, M, 2 * I]`, or `[G, M, I]` without gates.
      group_sizes: `[G]` int32.
      bias: one value per column of `hidden` and group, or None.
      quantize: round to FP8, with one scale per 128 columns.

    Returns:
      `[G, M, I]` in FP8 or the dtype of hidden, and scales `[G, M, I / 128]` or None.
    """
    wide = hidden.astype(accumulation_dtype(hidden.dtype))
    if bias is not None:
        wide = wide + bias.astype(wide.dtype)[:, None, :]
    rows = activate(experts, wide)
    return fp8.quantize_rows(rows) if quantize else (rows.astype(hidden.dtype), None)
