"""Dequantized `QuantizedWeights` in float64, by the definitions of the formats; `FORMATS` has all formats."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SLACK = 1 + 1e-6  # Of float32.


def nibbles(values):
    """Unpack bytes `[..., K / 2]` to nibbles `[..., K]`, the lower half first."""
    out = np.empty((*values.shape[:-1], 2 * values.shape[-1]), np.int64)
    out[..., 0::2], out[..., 1::2] = values % 16, values // 16
    return out


def to_float64(values):
    return values.astype(np.float64)


def fp8_error(w, scale):
    return SLACK * np.maximum(np.abs(w) * 2.0**-4, scale * 2.0**-10)


def e2m1_error(w, largest):
    """Return a quarter of the element, except between 6 and 8 times the scale, or half of the smallest step."""
    step = 2.0 ** (np.floor(np.log2(np.maximum(largest, 1e-300))) - 2)
    return SLACK * np.maximum(np.maximum(np.abs(w) / 4, np.abs(w) - 6 * step), step / 4)


def integer_error(w, scale):
    """Return half a step. Multiplying by the float32 inverse is off by some units of 127."""
    return (1 + 1e-4) * scale / 2


class Format(NamedTuple):
    """Columns and elements of K that share a scale (None: all), the error bound, and the storage.

    Scales are the largest magnitude divided by `limit`, or powers of two; then errors are those of the magnitude.
    """

    block: tuple[int, int | None]
    error: Callable[[np.ndarray, np.ndarray], np.ndarray]
    limit: float | None = None
    numbers: Callable[[np.ndarray], np.ndarray] = to_float64
    scales: Callable[[np.ndarray], np.ndarray] = to_float64
    stored_bits: Callable[[int], float] | None = None  # Of an element, by the block size.


FORMATS = {
    "fp8": Format((128, 128), fp8_error, 448),
    "fp8_channel": Format((1, None), fp8_error, 448),
    "int8": Format((1, None), integer_error, 127),
    "int4": Format((1, 128), integer_error, 7, lambda x: nibbles(x) - 8.0, stored_bits=lambda size: 4 + 32 / size),
    "mxfp4": Format(
        (1, 32),
        e2m1_error,
        None,
        lambda x: E2M1[nibbles(x)],
        lambda x: np.where(x == 255, np.nan, 2.0 ** (x.astype(np.float64) - 127)),
        lambda _: 4.25,
    ),
}


def dequantize(values, scales, expert_format):
    """Dequantize to `[..., N, K]` float64."""
    numbers = FORMATS[expert_format].numbers(values)
    return numbers * scale_of_each(scales, numbers.shape, expert_format)


def scale_of_each(scales, shape, expert_format):
    """Return the scale of each element of `[..., N, K]` of this shape in float64."""
    found = FORMATS[expert_format]
    columns, depth = found.block
    scales = found.scales(scales)[..., None] if depth is None else found.scales(scales)
    size = depth if columns > 1 else shape[-1] // scales.shape[-1]  # INT4 has blocks of several sizes.
    return scales.repeat(columns, -2).repeat(size, -1)[..., : shape[-2], : shape[-1]]


def largest_of_block(w, expert_format, block_size=None):
    """Return the largest magnitude among those that share a scale with each element of `w [..., N, K]`."""
    found, (*leading, columns, depth) = FORMATS[expert_format], w.shape
    rows, size = found.block[0], block_size or found.block[1] or depth
    largest = np.abs(w).reshape(*leading, columns, depth // size, size).max(-1)
    blocks = [largest[..., i : i + rows, :].max(-2, keepdims=True).repeat(rows, -2) for i in range(0, columns, rows)]
    return np.concatenate(blocks, -2)[..., :columns, :].repeat(size, -1)
