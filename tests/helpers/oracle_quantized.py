"""What `QuantizedExperts` stand for, in float64, by the definitions of the formats and in plain NumPy."""

from __future__ import annotations

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nibbles(values: np.ndarray) -> np.ndarray:
    """Bytes `[..., K / 2]` to codes `[..., K]`, the lower half first."""
    out = np.empty((*values.shape[:-1], 2 * values.shape[-1]), np.int64)
    out[..., 0::2], out[..., 1::2] = values % 16, values // 16
    return out


def dequantize(values: np.ndarray, scales: np.ndarray, expert_format: str) -> np.ndarray:
    """`[..., N, K]` float64."""
    if expert_format in ("int4", "mxfp4"):
        codes = nibbles(values)
        numbers = codes - 8.0 if expert_format == "int4" else E2M1[codes]
        if expert_format == "mxfp4":
            scales = np.where(scales == 255, np.nan, 2.0 ** (scales.astype(np.float64) - 127))
    else:
        numbers = values.astype(np.float64)
    scales = scales.astype(np.float64)
    if expert_format == "fp8":
        scales = scales.repeat(128, -2)[..., : numbers.shape[-2], :]
    if expert_format in ("fp8_channel", "int8"):
        scales = scales[..., None]
    return numbers * scales.repeat(numbers.shape[-1] // scales.shape[-1], -1)


def largest_error(w: np.ndarray, expert_format: str, block_size: int) -> np.ndarray:
    """Bound of |dequantised - w| by element, of `w [..., N, K]` in float64: what `quantize_experts` says."""
    size = {"fp8": 128, "int4": block_size, "mxfp4": 32}.get(expert_format, w.shape[-1])
    *leading, columns, depth = w.shape
    largest = np.abs(w).reshape(*leading, columns, depth // size, size).max(-1)
    if expert_format == "fp8":
        blocks = [largest[..., i : i + 128, :].max(-2, keepdims=True) for i in range(0, columns, 128)]
        largest = np.concatenate([b.repeat(128, -2) for b in blocks], -2)[..., :columns, :]
    largest = largest.repeat(size, -1)
    slack = 1 + 1e-6  # of float32
    if expert_format in ("fp8", "fp8_channel"):
        return slack * np.maximum(np.abs(w) * 2.0**-4, largest / 448 * 2.0**-10)
    if expert_format in ("int8", "int4"):
        # A product of the float32 inverse is off by some units of 127.
        return (1 + 1e-4) * largest / (127 if expert_format == "int8" else 7) / 2
    # A quarter of the element, but for what lies between 6 and 8 times the scale, and half of the smallest step.
    step = 2.0 ** (np.floor(np.log2(np.maximum(largest, 1e-300))) - 2)
    return slack * np.maximum(np.maximum(np.abs(w) / 4, np.abs(w) - 6 * step), step / 4)
