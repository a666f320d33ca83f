"""MXFP4: E2M1 elements, and one power of two (E8M0, a biased exponent in uint8) per 32 elements of a column.

Source: OCP Microscaling Formats 1.0, sections 5.3.3, 5.4.1 and 6.3; as in gpt-oss (arXiv:2508.10925).
"""

from __future__ import annotations

import functools
import itertools
import operator

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_ep.core import fp8
from jax_ep.core.layout import repeat
from jax_ep.formats.base import (
    PREPACKED_DTYPE,
    UINT8,
    BitPlaces,
    Format,
    Prepacked,
    blocks_of,
    pack_nibbles,
    transposed,
    unpack_nibbles,
)
from jax_ep.types import Array, Quantized

BLOCK = 32
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By the low three bits of a nibble: two of exponent, one of mantissa. Bit 3 is the sign."""
E2M1_MAX_EXPONENT = 2  # 6 = 1.5 * 2**2
E8M0_BIAS, E8M0_NAN = 127, 255
SMALLEST_BITS = 1 << 22  # of 2**-127 in float32
_STEP = 128  # elements of K whose four exponents are one prepacked uint32
BIT_PLACES: BitPlaces = ((6, 7, 8, 15), (0, 1, 2, 9), (10, 11, 12, 19), (4, 5, 14, 13))


def _quantize(w: Array, _: int) -> Quantized:
    """Take the exponent of the largest magnitude, less that of 6. Round to the nearest, ties to even, and saturate."""
    rows = transposed(w)
    blocks = blocks_of(rows, BLOCK)
    largest = fp8.largest_magnitudes(blocks, (-1,))[..., 0]
    exponents = (lax.bitcast_convert_type(largest, jnp.int32) >> 23) - E2M1_MAX_EXPONENT
    exponents = jnp.where(jnp.isfinite(largest), jnp.maximum(exponents, 0), E8M0_NAN).astype(jnp.uint8)
    # The inverse of a power of two is exact: exponents stay below 253.
    inverse = lax.bitcast_convert_type((2 * E8M0_BIAS - exponents.astype(jnp.int32)) << 23, jnp.float32)
    numbers = blocks * jnp.where(exponents == E8M0_NAN, 0, inverse)[..., None]
    size = jnp.abs(numbers)
    magnitude = jnp.zeros(size.shape, jnp.uint8)
    for below, (low, high) in enumerate(itertools.pairwise(E2M1_MAGNITUDES)):
        middle = jnp.float32((low + high) / 2)
        magnitude = magnitude + ((size > middle) if below % 2 == 0 else (size >= middle)).astype(jnp.uint8)
    stored = magnitude | (jnp.signbit(numbers).astype(jnp.uint8) << 3)
    return pack_nibbles(stored.reshape(rows.shape)), exponents


def _dequantize(values: Array, exponents: Array, dtype: DTypeLike) -> Array:
    numbers = _e2m1(unpack_nibbles(values))
    # 2**-127 is subnormal, and XLA's products on the CPU take such factors for zero.
    blocks = blocks_of(numbers, BLOCK)
    halved = jnp.where(exponents[..., None] == 0, 0.5 * blocks, blocks).reshape(numbers.shape)
    return fp8.dequantize_rows(halved, powers(jnp.maximum(exponents, 1)), dtype)


def _e2m1(stored: Array) -> Array:
    """Nibbles as float32."""
    exponent = (stored >> 1 & 3).astype(jnp.int32)
    mantissa = (stored & 1).astype(jnp.int32)
    halves = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    magnitude = 0.5 * halves.astype(jnp.float32)
    return jnp.where(stored >= 8, -magnitude, magnitude)  # of two scalars it would lose explicit mesh axes of size 1


def powers(exponents: Array) -> Array:
    """2 to the power of biased exponents, in float32; 0 is the subnormal 2**-127, 255 is NaN."""
    bits = jnp.where(exponents == 0, SMALLEST_BITS, exponents.astype(jnp.int32) << 23)
    return lax.bitcast_convert_type(jnp.where(exponents == E8M0_NAN, 0x7FC00000, bits), jnp.float32)


def _stored(nibbles: Array, exponents: Array) -> Quantized:
    """Four exponents are one uint32 `[..., N, ceil(K / 128)]`, with zeros behind K."""
    # Kernels make infinity of a scale that is NaN: times zero it is NaN again.
    is_nan = repeat(exponents == E8M0_NAN, BLOCK, axis=-1)
    padded = jnp.pad(exponents, [(0, 0)] * (exponents.ndim - 1) + [(0, -exponents.shape[-1] % 4)])
    parts = blocks_of(padded.astype(jnp.uint32), 4)
    steps = functools.reduce(operator.or_, (parts[..., i] << 8 * i for i in range(4)))
    return jnp.where(is_nan, nibbles & 8, nibbles), steps


def _exponents_of(steps: Array, k: int) -> Array:
    parts = jnp.stack([steps >> 8 * i & 255 for i in range(4)], -1).astype(jnp.uint8)
    return lax.slice_in_dim(parts.reshape(*steps.shape[:-1], -1), 0, k // BLOCK, axis=-1)


FORMAT = Format(
    "mxfp4",
    _quantize,
    _dequantize,
    decoder="mxfp4",
    bits=4,
    dtype=UINT8,
    scale_dtype=UINT8,
    block_k=BLOCK,
    prepacked=Prepacked(PREPACKED_DTYPE, _STEP, _STEP, BIT_PLACES, _stored, _exponents_of),
)
