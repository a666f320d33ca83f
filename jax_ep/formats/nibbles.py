"""Two ways to store 4-bit elements: two nibbles per byte, and prepacked uint32 of eight nibbles.

A thread of a GPU that multiplies weights from registers holds eight of each 32 elements of a column: 8 * q + 2 * t
and the one behind it, q = 0 to 3, for thread t of four. These eight are one uint32. For each q a shift and a mask put
both elements where kernels need them, one in each half of a register (kernels/prepacked.py).
"""

from __future__ import annotations

import functools
import operator

import jax.numpy as jnp
from jax import lax

from jax_ep.formats.base import PREPACKED_K
from jax_ep.types import Array

BitPlaces = tuple[tuple[int, int, int, int], ...]
"""For each q, where a uint32 has the bits of the first element, lowest first; the second is 16 up, modulo 32."""


def pack(nibbles: Array) -> Array:
    """`[..., K]` nibbles as bytes `[..., K / 2]`, the first of two in the low half."""
    pairs = nibbles.reshape(*nibbles.shape[:-1], nibbles.shape[-1] // 2, 2)
    return lax.optimization_barrier(pairs[..., 0] | (pairs[..., 1] << 4))


def unpack(values: Array) -> Array:
    """The inverse of `pack`."""
    pairs = jnp.stack([values & 15, values >> 4], axis=-1)
    return pairs.reshape(*values.shape[:-1], 2 * values.shape[-1])


def prepack(nibbles: Array, bit_places: BitPlaces) -> Array:
    """`[..., K]` nibbles, K a multiple of 32, as uint32 `[..., K / 8]`."""
    *leading, size = nibbles.shape
    parts = nibbles.astype(jnp.uint32).reshape(*leading, size // PREPACKED_K, 4, 4, 2)  # q, t, which of two
    bits = (
        (parts[..., q, :, which] >> bit & 1) << (place + 16 * which) % 32
        for q, places in enumerate(bit_places)
        for which in range(2)
        for bit, place in enumerate(places)
    )
    return functools.reduce(operator.or_, bits).reshape(*leading, size // 8)


def unprepack(packed: Array, bit_places: BitPlaces) -> Array:
    """The inverse of `prepack`, uint8."""
    *leading, size = packed.shape
    packed = packed.reshape(*leading, size // 4, 4)

    def nibble(places: tuple[int, ...], which: int) -> Array:
        bits = ((packed >> (place + 16 * which) % 32 & 1) << bit for bit, place in enumerate(places))
        return functools.reduce(operator.or_, bits).astype(jnp.uint8)

    parts = [jnp.stack([nibble(places, which) for which in range(2)], -1) for places in bit_places]
    return jnp.stack(parts, -3).reshape(*leading, 8 * size)
