"""FP8 (e4m3) with one float32 scale per block of 128 by 128, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3)."""

from __future__ import annotations

import numpy as np

from jax_ep.core import fp8
from jax_ep.core.dtypes import FP8
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.formats.base import Format

FORMAT = Format(
    name="fp8",
    bits=8,
    dtype=FP8,
    scale_dtype=np.dtype("float32"),
    block_n=GROUP_SIZE,
    block_k=GROUP_SIZE,
    decoder="fp8",
    quantize=lambda w, _: fp8.quantize_matrices(w),
    dequantize=fp8.dequantize_matrices,
    is_fp8_operand=True,
)
