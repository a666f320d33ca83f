"""Quantized tensors of checkpoints as array-like objects that decode to float32 only what is indexed.

They support the needed part of NumPy's array interface: `shape`, `ndim`, `dtype`, indexing of the first axis, and
slices of the last two axes.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from jax_ep.checkpoints.files import StoredArray
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.formats import Format, fp8

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
SCALES = "_scale_inv"
"""Suffix of the scales' name."""
_E4M3 = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32)
_CODES = np.stack([np.arange(256, dtype=np.uint8) & 15, np.arange(256, dtype=np.uint8) >> 4], axis=-1)
E2M1_PAIRS = _CODES.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
"""Both numbers of a byte in MXFP4 and NVFP4; the low half comes first."""
INT4_PAIRS = _CODES.astype(np.float32) - 8
PLAIN, AWQ = list(range(8)), [0, 4, 1, 5, 2, 6, 3, 7]
"""Places in an int32, the lowest first, of eight 4-bit numbers; `AWQ` is that of AutoAWQ's GEMM."""


def num_blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of FP8 values `[..., N, K]`."""
    return (*shape[:-2], *(-(-size // GROUP_SIZE) for size in shape[-2:]))


def blocks(part: slice, size: int = GROUP_SIZE) -> slice:
    """Return the slice of blocks that contains a slice of rows or columns."""
    return slice(part.start // size, -(-part.stop // size))


def _unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the 4 or 8-bit numbers of int32 `[..., n]` as uint8 `[..., n, 32 / bits]`, the lowest bits first."""
    octets = words.view(np.uint8).reshape(*words.shape, 4)
    return octets if bits == 8 else _CODES[octets].reshape(*words.shape, 8)


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Unsigned numbers of 4 or 8 bits `[rows, columns]` in int32 `[rows * bits / 32, columns]`, the first lowest."""

    words: StoredArray
    bits: int
    dtype = np.dtype(np.uint8)

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0] * 32 // self.bits, self.words.shape[1]

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        rows, columns = index
        part = blocks(rows, 32 // self.bits)
        numbers = _unpacked(self.words[part, columns], self.bits).swapaxes(1, 2)
        skipped = rows.start - part.start * numbers.shape[1]
        return numbers.reshape(-1, numbers.shape[-1])[skipped : skipped + rows.stop - rows.start]


@dataclasses.dataclass(frozen=True)
class PackedColumns:
    """Unsigned numbers of 4 or 8 bits `[rows, columns]` in int32 `[rows, columns * bits / 32]`.

    `places` orders the columns of an int32; `offset` is added to each.
    """

    words: StoredArray
    bits: int
    places: list[int]
    offset: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.words.shape[1] * 32 // self.bits

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        rows, columns = index
        per = 32 // self.bits
        part = blocks(columns, per)
        words = self.words[rows, part].view(np.uint32) + np.uint32(self.offset)
        numbers = _unpacked(words, self.bits)[..., self.places[:per]].reshape(len(words), -1)
        skipped = columns.start - part.start * per
        return numbers[:, skipped : skipped + columns.stop - columns.start]


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Numbers `[K, N]` minus the zero points of their group of rows, multiplied by its scales.

    Source: AWQ (arXiv:2306.00978) as https://github.com/casper-hansen/AutoAWQ stores it, and GPTQ (arXiv:2210.17323) as
    https://github.com/ModelCloud/GPTQModel does.
    """

    codes: PackedRows | PackedColumns  # unsigned numbers `[K, N]`
    zeros: PackedColumns  # zero points `[G, N]`
    scales: StoredArray  # floats `[G, N]`
    size: int  # rows of a group
    groups: np.ndarray | None = None  # the group of each row, int32 `[K]`; None: groups are successive rows
    dtype = BFLOAT16

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        rows, columns = index
        groups = np.arange(rows.start, rows.stop) // self.size if self.groups is None else self.groups[rows]
        used, of_each = np.unique(groups, return_inverse=True)
        zeros, scales = (
            np.concatenate([array[slice(group, group + 1), columns] for group in used])[of_each].astype(np.float32)
            for array in (self.zeros, self.scales)
        )
        with np.errstate(invalid="ignore"):  # A hostile scale may be infinite.
            return (self.codes[rows, columns] - zeros) * scales


class BlockFP8:
    """FP8 values `[..., N, K]`, multiplied by the scales of their 128 x 128 blocks.

    Source: DeepSeek-V3 (arXiv:2412.19437, section 3.3), whose checkpoints call the factor `weight_scale_inv`.
    """

    dtype, format, block = BFLOAT16, fp8.FORMAT, (GROUP_SIZE, GROUP_SIZE)

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


@dataclasses.dataclass(frozen=True)
class FourBit:
    """4-bit numbers `[..., N, K]`, multiplied by the scales of their blocks.

    Source: OCP Microscaling Formats 1.0,
    https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf,
    sections 5.3.3 and 5.4.1, as in gpt-oss (arXiv:2508.10925); and the compressors "pack-quantized" and
    "nvfp4-pack-quantized" of https://github.com/vllm-project/compressed-tensors; and NVFP4 of
    https://github.com/NVIDIA/Model-Optimizer.
    """

    pairs: np.ndarray  # both numbers of a byte, `E2M1_PAIRS` or `INT4_PAIRS`
    values: StoredArray  # uint8 `[..., N, K / 2]`, the first of two in the low half
    scales: StoredArray  # `[..., N, K / block[1]]` in floats, or uint8 exponents of two
    block: tuple[int, int]  # rows, always 1, and columns that share a scale
    format: Format | None  # the format of `QuantizedWeights` that has these bits, or None
    zeros: PackedRows | None = None  # zero points `[N, K / block[1]]`; None: 8
    divisor: float = 1.0  # divides all scales
    factor: float = 1.0  # multiplies all scales
    dtype = BFLOAT16

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.values.shape[:-1], 2 * self.values.shape[-1])

    @property
    def ndim(self) -> int:
        return self.values.ndim

    def __getitem__(self, index: int | tuple[slice, slice]) -> FourBit | np.ndarray:
        if isinstance(index, int):
            return dataclasses.replace(self, values=self.values[index], scales=self.scales[index])
        rows, columns = index
        _, block = self.block
        groups = blocks(columns, block)
        scales = self.scales[rows, groups]
        codes = self.values[rows, slice(groups.start * block // 2, groups.stop * block // 2)]
        numbers = self.pairs[codes].reshape(*scales.shape, block)
        if self.zeros is not None:
            numbers -= self.zeros[rows, groups][..., None] - np.float32(8)
        factors = (scales.view(ml_dtypes.float8_e8m0fnu) if scales.dtype == np.uint8 else scales).astype(np.float32)
        with np.errstate(all="ignore"):  # Numbers out of float32's range are infinite; the exponent 255 is NaN.
            numbers *= (factors * np.float32(self.factor) / np.float32(self.divisor))[..., None]
        skipped = columns.start - groups.start * block
        return numbers.reshape(len(numbers), block * scales.shape[1])[
            :, skipped : skipped + columns.stop - columns.start
        ]
