"""INT4, symmetric, up to 7, with one float32 scale per `block_size` elements of a column. Nibbles store 8 more."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep.core import fp8
from jax_ep.formats.base import (
    FLOAT32,
    UINT8,
    BitPlaces,
    Format,
    Prepacked,
    blocks_of,
    pack_nibbles,
    scale_to,
    transposed,
    unpack_nibbles,
)
from jax_ep.types import Array, Quantized

_MAX, _OFFSET = 7.0, 8
BIT_PLACES: BitPlaces = ((3, 4, 5, 6), (7, 8, 9, 10), (11, 12, 13, 14), (31, 0, 1, 2))


def _quantize(w: Array, block_size: int) -> Quantized:
    rows = transposed(w)
    values, scales = scale_to(blocks_of(rows, block_size), _MAX)
    stored = (jnp.round(values).astype(jnp.int8) + _OFFSET).astype(jnp.uint8)
    return pack_nibbles(stored.reshape(rows.shape)), scales


def _dequantize(values: Array, scales: Array, dtype: DTypeLike) -> Array:
    return fp8.dequantize_rows(unpack_nibbles(values).astype(jnp.float32) - _OFFSET, scales, dtype)


FORMAT = Format(
    "int4",
    _quantize,
    _dequantize,
    decoder="int4",
    bits=4,
    dtype=UINT8,
    block_k=fp8.GROUP_SIZE,
    takes_block_size=True,
    prepacked=Prepacked(FLOAT32, step=32, scale_k=None, bit_places=BIT_PLACES),
)
