"""FP8 (e4m3) with one float32 scale per column."""

from __future__ import annotations

import numpy as np

from jax_ep.core import fp8
from jax_ep.core.dtypes import FP8
from jax_ep.formats.base import Format, dequantize_columns, transposed
from jax_ep.types import Array, Quantized


def _quantize(w: Array, _: int) -> Quantized:
    values, scales = fp8.quantize_rows(transposed(w), w.shape[-2])
    return values, scales[..., 0]


FORMAT = Format(
    name="fp8_channel",
    bits=8,
    dtype=FP8,
    scale_dtype=np.dtype("float32"),
    block_n=1,
    block_k=None,
    decoder="column_scales",
    quantize=_quantize,
    dequantize=dequantize_columns,
)
