"""FP8 (e4m3) with one float32 scale per column."""

from __future__ import annotations

from jax_ep.core import fp8
from jax_ep.formats.base import Format, dequantize_columns, transposed
from jax_ep.types import Array, Quantized


def _quantize(w: Array, _: int) -> Quantized:
    values, scales = fp8.quantize_rows(transposed(w), w.shape[-2])
    return values, scales[..., 0]


FORMAT = Format("fp8_channel", _quantize, dequantize_columns, decoder="column_scales")
