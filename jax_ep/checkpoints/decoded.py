"""Quantized tensors of checkpoints as array-like objects that decode to float32 only what is indexed.

They support the needed part of NumPy's array interface: `shape`, `ndim`, `dtype`, indexing of the first axis, and
slices of the last two axes.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from jax_ep.checkpoints.files import StoredArray
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.formats.mxfp4 import BLOCK

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
MXFP4_BYTES = BLOCK // 2
"""Packed bytes of values that share a scale."""
SCALES = "_scale_inv"
"""Suffix of the scales' name."""
_E4M3 = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32)
_E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
# Both values of a byte; the low nibble comes first.
_E2M1_PAIRS = np.stack([np.tile(_E2M1, 16), np.repeat(_E2M1, 16)], axis=-1)


def num_blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of FP8 values `[..., N, K]`."""
    return (*shape[:-2], *(-(-size // GROUP_SIZE) for size in shape[-2:]))


def blocks(part: slice) -> slice:
    """Return the slice of blocks that contains a slice of rows or columns."""
    return slice(part.start // GROUP_SIZE, -(-part.stop // GROUP_SIZE))


class BlockFP8:
    """FP8 values `[..., N, K]`, multiplied by the scales of their 128 x 128 blocks.

    Source: DeepSeek-V3 (arXiv:2412.19437, section 3.3), whose checkpoints call the factor `weight_scale_inv`.
    """

    dtype = BFLOAT16

    def __init__(self, values: StoredArray, scales: StoredArray) -> None:
        self.values, self.scales = values, scales
        self.shape, self.ndim = values.shape, values.ndim

    def __getitem__(self, index: int | tuple[slice, slice]) -> BlockFP8 | np.ndarray:
        if isinstance(index, int):
            return BlockFP8(self.values[index], self.scales[index])
        values = _E4M3[self.values[index].view(np.uint8)]
        scales = self.scales[tuple(blocks(part) for part in index)].astype(np.float32)
        for axis, part in enumerate(index):
            of_each = np.arange(part.start, part.stop) // GROUP_SIZE - part.start // GROUP_SIZE
            scales = scales.take(of_each, axis)
        values *= scales
        return values


class MXFP4:
    """MXFP4 values `[..., N, K]`: blocks `[..., N, K / 32, 16]` of two values per byte, and power-of-two scales.

    The scales have shape `[..., N, K / 32]`.

    Source: OCP Microscaling Formats 1.0,
    https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf,
    sections 5.3.3 and 5.4.1; as in gpt-oss (arXiv:2508.10925).
    """

    dtype = BFLOAT16

    def __init__(self, blocks: StoredArray, scales: StoredArray) -> None:
        self.blocks, self.scales = blocks, scales
        self.shape = (*scales.shape[:-1], BLOCK * scales.shape[-1])
        self.ndim = scales.ndim

    def __getitem__(self, index: int | tuple[slice, slice]) -> MXFP4 | np.ndarray:
        if isinstance(index, int):
            return MXFP4(self.blocks[index], self.scales[index])
        rows, columns = index
        groups = slice(columns.start // BLOCK, -(-columns.stop // BLOCK))
        values = dequantize_mxfp4(self.blocks[rows, groups], self.scales[rows, groups])
        skipped = columns.start - groups.start * BLOCK
        return values[:, skipped : skipped + columns.stop - columns.start]


def dequantize_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Dequantize `blocks [..., G, 16]` uint8 with `scales [..., G]` uint8 exactly to float32 `[..., 32 * G]`.

    Values out of float32's range become infinite: 4 and 6 times the two largest scales. Scale 255 is NaN.
    """
    factors = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    values = _E2M1_PAIRS[blocks].reshape(*scales.shape, BLOCK)
    with np.errstate(over="ignore", invalid="ignore"):
        values *= factors[..., None]
    return values.reshape(*scales.shape[:-1], BLOCK * scales.shape[-1])
