"""`Format`: all facts of a format of quantized weights. A format is a file of this folder, listed in `__init__.py`."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jax_ep.core import fp8
from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_matrices import QuantizedWeights
from jax_ep.types import Array, Quantized

FLOAT32, UINT8, PREPACKED_DTYPE = (np.dtype(name) for name in ("float32", "uint8", "uint32"))


BitPlaces = tuple[tuple[int, int, int, int], ...]
"""For each q, where a uint32 has the bits of the first element, lowest first; the second is 16 up, modulo 32."""


class Prepacked(NamedTuple):
    """The order in which kernels need fewest instructions per element, see `with_layout`; values are uint32."""

    scale_dtype: np.dtype
    step: int  # elements of K that lie on one device
    scale_k: int | None  # elements of K that share a stored scale; None: `block_size`
    bit_places: BitPlaces
    stored: Callable[[Array, Array], Quantized] = lambda nibbles, scales: (nibbles, scales)  # `[..., N, .]`, as packed
    scales_of: Callable[[Array, int], Array] = lambda stored, k: stored  # its inverse, of scales of `k` elements

    def pack(self, values: Array, scales: Array) -> Quantized:
        """Return values and scales in this order."""
        nibbles, scales = self.stored(unpack_nibbles(values), scales)
        return prepack_nibbles(nibbles, self.bit_places), jnp.swapaxes(scales, -1, -2)

    def unpack(self, packed: Array, scales: Array) -> Quantized:
        """Return what `pack` was given, the inverse of `pack`."""
        scales = self.scales_of(jnp.swapaxes(scales, -1, -2), 8 * packed.shape[-1])
        return pack_nibbles(unprepack_nibbles(packed, self.bit_places)), scales


@dataclasses.dataclass(frozen=True)
class Format:
    """One format of expert weights `[..., E, K, N]`, which are stored as `[..., E, N, K]`."""

    name: str
    quantize: Callable[[Array, int], Quantized]  # `(w [..., K, N], block size)` to values `[..., N, K]` and scales
    dequantize: Callable[[Array, Array, DTypeLike], Array]  # the inverse, multiplied in float32
    decoder: str  # module of `formats/kernels`
    bits: int = 8  # of an element; with 4, a byte holds two, the first one in its low nibble
    dtype: np.dtype = FP8  # of stored values
    scale_dtype: np.dtype = FLOAT32
    block_n: int = 1  # columns that share a scale
    block_k: int | None = None  # elements of K that do, or the default of `block_size`; None: all
    takes_block_size: bool = False  # of `quantize`
    activations: str = "fp8"  # what tokens may be quantized to
    is_fp8_operand: bool = False  # values and scales are an operand of FP8 GEMMs as they are
    prepacked: Prepacked | None = None  # None: kernels read the weights as they are

    def block_size(self, w: QuantizedWeights) -> int:
        """Elements of K that share a scale; 0: all of K, or its scales do not fit."""
        if not self.takes_block_size:
            return self.block_k or 0
        shape = () if w.scales is None else w.scales.shape
        blocks = math.prod(shape[-2:-1] if w.is_prepacked else shape[-1:])
        return w.shape[-2] // blocks if blocks else 0

    def scale_shape(self, w: QuantizedWeights) -> tuple[int, ...] | None:
        """Return the expected shape of the scales of `w`; None: K is not a multiple of the block."""
        (*leading, depth, columns), is_prepacked = w.shape, w.layout == "prepacked"
        block = self.block_size(w)
        if self.block_k is None:
            return (*leading, columns)
        if block == 0 or depth % block or (is_prepacked and depth % PREPACKED_K):
            return None
        if is_prepacked and self.prepacked:
            return (*leading, -(-depth // (self.prepacked.scale_k or block)), columns)
        return (*leading, -(-columns // self.block_n), depth // block)


PREPACKED_K = 32
"""K of prepacked weights is a multiple of this: four packed uint32, one of each thread that multiplies them."""


def transposed(w: Array) -> Array:
    """`[..., K, N]` to float32 `[..., N, K]`."""
    return jnp.swapaxes(w, -1, -2).astype(jnp.float32)


def blocks_of(rows: Array, size: int) -> Array:
    """`[..., K]` to `[..., K / size, size]`."""
    return rows.reshape(*rows.shape[:-1], rows.shape[-1] // size, size)


def scale_to(blocks: Array, limit: float) -> tuple[Array, Array]:
    """Numbers up to `limit`, and the scale of each block along the last axis, which NaN and infinity make NaN."""
    scales = fp8.scales_of(blocks, (-1,), limit)
    values = blocks * (1 / scales)
    return jnp.clip(jnp.where(jnp.isnan(values), 0, values), -limit, limit), scales[..., 0]


def dequantize_columns(values: Array, scales: Array, dtype: DTypeLike) -> Array:
    """`values [..., N, K]` times the scale of each column, `[..., N]`."""
    return (values.astype(jnp.float32) * scales[..., None]).astype(dtype)


def pack_nibbles(nibbles: Array) -> Array:
    """Store `[..., K]` nibbles as bytes `[..., K / 2]`, the first of two in the low half."""
    pairs = nibbles.reshape(*nibbles.shape[:-1], nibbles.shape[-1] // 2, 2)
    return lax.optimization_barrier(pairs[..., 0] | (pairs[..., 1] << 4))


def unpack_nibbles(values: Array) -> Array:
    """Invert `pack_nibbles`: bytes `[..., K / 2]` to nibbles `[..., K]`."""
    pairs = jnp.stack([values & 15, values >> 4], axis=-1)
    return pairs.reshape(*values.shape[:-1], 2 * values.shape[-1])


def prepack_nibbles(nibbles: Array, bit_places: BitPlaces) -> Array:
    """Store `[..., K]` nibbles, K a multiple of 32, as uint32 `[..., K / 8]`.

    A thread of a GPU that multiplies weights from registers holds eight of each 32 elements of a column. Thread t of
    four holds 8 * q + 2 * t and the one after it, for q = 0 to 3. These eight are one uint32. For each q a shift and a
    mask put both elements where kernels need them, one in each half of a register (kernels/prepacked.py).
    """
    *leading, size = nibbles.shape
    parts = nibbles.astype(jnp.uint32).reshape(*leading, size // PREPACKED_K, 4, 4, 2)  # q, t, which of two
    bits = (
        (parts[..., q, :, which] >> bit & 1) << (place + 16 * which) % 32
        for q, places in enumerate(bit_places)
        for which in range(2)
        for bit, place in enumerate(places)
    )
    return functools.reduce(operator.or_, bits).reshape(*leading, size // 8)


def unprepack_nibbles(packed: Array, bit_places: BitPlaces) -> Array:
    """Invert `prepack_nibbles`, to uint8."""
    *leading, size = packed.shape
    packed = packed.reshape(*leading, size // 4, 4)

    def nibble(places: tuple[int, ...], which: int) -> Array:
        bits = ((packed >> (place + 16 * which) % 32 & 1) << bit for bit, place in enumerate(places))
        return functools.reduce(operator.or_, bits).astype(jnp.uint8)

    parts = [jnp.stack([nibble(places, which) for which in range(2)], -1) for places in bit_places]
    return jnp.stack(parts, -3).reshape(*leading, 8 * size)
