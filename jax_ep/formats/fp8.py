"""FP8 (e4m3) with one float32 scale per block of 128 by 128, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3)."""

from __future__ import annotations

from jax_ep.core.fp8 import GROUP_SIZE, dequantize_matrices, quantize_matrices
from jax_ep.formats.base import Format

FORMAT = Format(
    "fp8",
    lambda w, _: quantize_matrices(w),
    dequantize_matrices,
    decoder="fp8",
    block_n=GROUP_SIZE,
    block_k=GROUP_SIZE,
    is_fp8_operand=True,
)
