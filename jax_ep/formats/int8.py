"""INT8, symmetric, with one float32 scale per column. Tokens may be quantized the same way, each by its own scale."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep.formats.base import Format, dequantize_columns, scale_to, transposed
from jax_ep.types import Array, Quantized

_MAX = 127.0


def quantize_rows(rows: Array) -> Quantized:
    """`[..., K]` to int8, and one scale per row."""
    values, scales = scale_to(rows, _MAX)
    # Without a barrier XLA may drop the rounding where quantize and dequantize meet in one program.
    return lax.optimization_barrier((jnp.round(values).astype(jnp.int8), scales))


def quantize_tokens(rows: Array, groups: Array, smooth: Array | None) -> Quantized:
    """`[M, K]` rows to int8 and their scales `[M]`, once divided by `smooth [G, K]` of their groups `[M]`; -1: none."""
    wide = rows.astype(jnp.float32)
    if smooth is not None:
        wide = wide / jnp.where((groups < 0)[:, None], 1, smooth[jnp.maximum(groups, 0)])
    return quantize_rows(wide)


FORMAT = Format(
    "int8",
    lambda w, _: quantize_rows(transposed(w)),
    dequantize_columns,
    decoder="column_scales",
    dtype=np.dtype("int8"),
    activations="int8",
)
