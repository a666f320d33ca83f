"""FP8 (e4m3) with float32 scales: "fp8" has one per block of 128 by 128, and "fp8_channel" one per column.

Source of the blocks: DeepSeek-V3 (arXiv:2412.19437, section 3.3).
"""

from __future__ import annotations

from jax_ep.core.fp8 import GROUP_SIZE, dequantize_matrices, quantize_matrices, quantize_rows
from jax_ep.formats.base import Format, dequantize_columns, transposed
from jax_ep.types import Array, Quantized

FORMAT = Format(
    "fp8",
    lambda w, _: quantize_matrices(w),
    dequantize_matrices,
    decoder="fp8",
    block_n=GROUP_SIZE,
    block_k=GROUP_SIZE,
    is_fp8_operand=True,
)


def _quantize_columns(w: Array, _: int) -> Quantized:
    values, scales = quantize_rows(transposed(w), w.shape[-2])
    return values, scales[..., 0]


CHANNEL = Format("fp8_channel", _quantize_columns, dequantize_columns, decoder="column_scales")
