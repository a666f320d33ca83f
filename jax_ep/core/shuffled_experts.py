"""The order of `shuffle_experts`: elements of 4 bits in words, each bit where kernels need it, and scales by steps.

A thread of a GPU holds, of a matrix that tensor cores multiply from registers, eight elements of each 32 of a column:
those 8 * q + 2 * t and the one behind, q = 0 to 3 of thread t of four. They are one word of 32 bits here, for which of
q the same few instructions make both elements, one in each half of a register: at most a shift, and a mask.
"""

from __future__ import annotations

import functools
import operator

import jax.numpy as jnp
from jax import lax

from jax_ep.types import Array

GROUP = 32
"""Elements of a column in four words, one of each thread."""
STEP = 128
"""Elements of a column whose exponents are one word."""
# Where a word has the bits of the first of two elements, from the lowest on, for each q; those of the other one are 16
# places further, round the word. Instructions that bring them to where they belong are in kernels/shuffled_experts.py.
_PLACES = {
    "mxfp4": ((6, 7, 8, 15), (0, 1, 2, 9), (10, 11, 12, 19), (4, 5, 14, 13)),
    "int4": ((3, 4, 5, 6), (7, 8, 9, 10), (11, 12, 13, 14), (31, 0, 1, 2)),
}


def words_of(codes: Array, expert_format: str) -> Array:
    """Codes of 4 bits `[..., K]`, K a multiple of `GROUP`, as words `[..., K / 8]` uint32."""
    leading, depth = codes.shape[:-1], codes.shape[-1]
    parts = codes.astype(jnp.uint32).reshape(*leading, depth // GROUP, 4, 4, 2)  # q, t, which of two
    bits = (
        (parts[..., q, :, which] >> bit & 1) << (place + 16 * which) % 32
        for q, places in enumerate(_PLACES[expert_format])
        for which in range(2)
        for bit, place in enumerate(places)
    )
    return functools.reduce(operator.or_, bits).reshape(*leading, depth // 8)


def codes_of(words: Array, expert_format: str) -> Array:
    """The reverse, uint8."""
    leading, size = words.shape[:-1], words.shape[-1]
    words = words.reshape(*leading, size // 4, 4)

    def code(places: tuple[int, ...], which: int) -> Array:
        bits = ((words >> (place + 16 * which) % 32 & 1) << bit for bit, place in enumerate(places))
        return functools.reduce(operator.or_, bits).astype(jnp.uint8)

    parts = [jnp.stack([code(places, which) for which in range(2)], -1) for places in _PLACES[expert_format]]
    return jnp.stack(parts, -3).reshape(*leading, 8 * size)


def exponents_by_steps(exponents: Array) -> Array:
    """Exponents `[..., N, K / 32]` uint8 as words of four, `[..., ceil(K / 128), N]` uint32, behind K zeros."""
    leading, size = exponents.shape[:-1], exponents.shape[-1]
    padding = [(0, 0)] * len(leading) + [(0, -size % 4)]
    parts = jnp.pad(exponents, padding).astype(jnp.uint32).reshape(*leading, -(-size // 4), 4)
    words = functools.reduce(operator.or_, (parts[..., i] << 8 * i for i in range(4)))
    return jnp.swapaxes(words, -1, -2)


def exponents_by_columns(words: Array, depth: int) -> Array:
    """The reverse, of K elements."""
    words = jnp.swapaxes(words, -1, -2)
    parts = jnp.stack([words >> 8 * i & 255 for i in range(4)], -1).astype(jnp.uint8)
    return lax.slice_in_dim(parts.reshape(*words.shape[:-1], -1), 0, depth // GROUP, axis=-1)
