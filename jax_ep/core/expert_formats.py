"""The arithmetic of `QuantizedExperts`: matrices in 8 and 4 bits and back. All formats are symmetric around zero."""

from __future__ import annotations

import dataclasses
import itertools

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_ep.core import fp8, shuffled_experts
from jax_ep.core.expert_matrices import QuantizedExperts
from jax_ep.types import Array

FOUR_BITS = ("int4", "mxfp4")
"""Formats with two elements in a byte, of which shuffled_experts.py has another order."""
MX_GROUP = 32
"""Elements that share an exponent in MXFP4."""
_INT8_MAX, _INT4_MAX = 127.0, 7.0
_EXPONENT_BIAS, _LARGEST_EXPONENT = 127, 2  # of e8m0, and of e2m1, whose largest value is 1.5 * 2**2
_NAN_EXPONENT = 255
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1, by their codes


def quantize(w: Array, expert_format: str, group_size: int) -> QuantizedExperts:
    """`[..., K, N]` in a format; `group_size` is that of "int4"."""
    if expert_format == "fp8":
        return QuantizedExperts(*fp8.quantize_matrices(w), expert_format)
    rows = jnp.swapaxes(w, -1, -2).astype(jnp.float32)
    if expert_format == "mxfp4":
        return QuantizedExperts(*_to_mxfp4(rows), expert_format)
    if expert_format == "int4":
        groups = rows.reshape(*rows.shape[:-1], rows.shape[-1] // group_size, group_size)
        values, scales = _scaled(groups, _INT4_MAX)
        codes = (jnp.round(values).astype(jnp.int8) + 8).astype(jnp.uint8)
        return QuantizedExperts(_packed(codes.reshape(rows.shape)), scales, expert_format)
    if expert_format == "fp8_channel":
        values, scales = fp8.quantize_rows(rows, rows.shape[-1])
        return QuantizedExperts(values, scales[..., 0], expert_format)
    return QuantizedExperts(*_to_int8(rows), expert_format)


def dequantize(values: Array, scales: Array, expert_format: str, dtype: DTypeLike) -> Array:
    """`[..., N, K]` of `dtype`, multiplied in float32."""
    if expert_format == "fp8":
        return fp8.dequantize_matrices(values, scales, dtype)
    if expert_format in ("fp8_channel", "int8"):
        return (values.astype(jnp.float32) * scales[..., None]).astype(dtype)
    if values.dtype == jnp.uint32:
        values, scales = _unshuffled(values, scales, expert_format)
    codes = _unpacked(values)
    if expert_format == "int4":
        numbers = codes.astype(jnp.float32) - 8
    else:
        # 2**-127 is subnormal, and XLA's products on the CPU take such factors for zero.
        numbers = _numbers(codes).reshape(*scales.shape, MX_GROUP) * jnp.where(scales == 0, 0.5, 1.0)[..., None]
        scales = _powers(jnp.maximum(scales, 1))
    groups = numbers.reshape(*scales.shape, codes.shape[-1] // scales.shape[-1])
    return (groups * scales[..., None]).astype(dtype).reshape(codes.shape)


def shuffle(w: QuantizedExperts) -> QuantizedExperts:
    """In the order of shuffled_experts.py; elements of 4 bits, K a multiple of 32."""
    codes = _unpacked(w.values)
    if w.format == "mxfp4":
        # Of a scale that is NaN kernels make infinity: times zero it is NaN again.
        spoilt = jnp.repeat(w.scales == _NAN_EXPONENT, MX_GROUP, axis=-1)
        codes = jnp.where(spoilt, codes & 8, codes)
        scales = shuffled_experts.exponents_by_steps(w.scales)
    else:
        scales = jnp.swapaxes(w.scales, -1, -2)
    return dataclasses.replace(w, values=shuffled_experts.words_of(codes, w.format), scales=scales)


def unshuffle(w: QuantizedExperts) -> QuantizedExperts:
    """The reverse."""
    values, scales = _unshuffled(w.values, w.scales, w.format)
    return dataclasses.replace(w, values=values, scales=scales)


def _unshuffled(words: Array, scales: Array, expert_format: str) -> tuple[Array, Array]:
    values = _packed(shuffled_experts.codes_of(words, expert_format))
    if expert_format == "mxfp4":
        return values, shuffled_experts.exponents_by_columns(scales, 8 * words.shape[-1])
    return values, jnp.swapaxes(scales, -1, -2)


def quantize_tokens(rows: Array, groups: Array, smooth: Array | None) -> tuple[Array, Array]:
    """`[M, K]` rows to int8 and their scales `[M]`, once divided by `smooth [G, K]` of their groups `[M]`; -1: none."""
    wide = rows.astype(jnp.float32)
    if smooth is not None:
        wide = wide / jnp.where((groups < 0)[:, None], 1, smooth[jnp.maximum(groups, 0)])
    return _to_int8(wide)


def matrix_at(rhs: QuantizedExperts, group: Array, dtype: DTypeLike) -> Array:
    """The matrix of a group, of those `[G, N, K]`, as `dtype`."""
    values, scales = (lax.dynamic_index_in_dim(x, group, keepdims=False) for x in (rhs.values, rhs.scales))
    return dequantize(values, scales, rhs.format, dtype)


def _scaled(groups: Array, limit: float) -> tuple[Array, Array]:
    """Numbers up to `limit`, and the scale of each group along the last axis; NaN and infinity spoil their group."""
    scales = fp8.scales_of(groups, (-1,), limit)
    values = groups * (1 / scales)
    return jnp.clip(jnp.where(jnp.isnan(values), 0, values), -limit, limit), scales[..., 0]


def _to_int8(rows: Array) -> tuple[Array, Array]:
    """Integers, and a scale for each row."""
    values, scales = _scaled(rows, _INT8_MAX)
    # Without a barrier XLA may drop the rounding where both directions meet in one program.
    return lax.optimization_barrier((jnp.round(values).astype(jnp.int8), scales))


def _to_mxfp4(rows: Array) -> tuple[Array, Array]:
    """Codes, two a byte, and exponents.

    Source: OCP Microscaling Formats 1.0, section 6.3: the exponent is that of the largest magnitude, less the largest
    of e2m1; what is then beyond e2m1 saturates. Rounding is to nearest, and to the even code between two.
    """
    groups = rows.reshape(*rows.shape[:-1], rows.shape[-1] // MX_GROUP, MX_GROUP)
    largest = fp8.largest_magnitudes(groups, (-1,))[..., 0]
    exponents = (lax.bitcast_convert_type(largest, jnp.int32) >> 23) - _LARGEST_EXPONENT
    exponents = jnp.where(jnp.isfinite(largest), jnp.maximum(exponents, 0), _NAN_EXPONENT).astype(jnp.uint8)
    # The inverse of a power of two is exact: exponents stay below 253.
    inverse = lax.bitcast_convert_type((2 * _EXPONENT_BIAS - exponents.astype(jnp.int32)) << 23, jnp.float32)
    numbers = groups * jnp.where(exponents == _NAN_EXPONENT, 0, inverse)[..., None]
    size = jnp.abs(numbers)
    code = jnp.zeros(size.shape, jnp.uint8)
    for below, (low, high) in enumerate(itertools.pairwise(_MAGNITUDES)):
        middle = jnp.float32((low + high) / 2)
        code = code + ((size > middle) if below % 2 == 0 else (size >= middle)).astype(jnp.uint8)
    codes = code | (jnp.signbit(numbers).astype(jnp.uint8) << 3)
    return _packed(codes.reshape(rows.shape)), exponents


def _numbers(codes: Array) -> Array:
    """Codes of e2m1 as float32."""
    magnitude = codes & 7
    exponent = (magnitude >> 1).astype(jnp.int32)
    mantissa = (magnitude & 1).astype(jnp.int32)
    halves = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    return jnp.where(codes >= 8, -0.5, 0.5).astype(jnp.float32) * halves.astype(jnp.float32)


def _powers(exponents: Array) -> Array:
    """2 to the power of positive exponents less their bias, in float32; 255 is NaN."""
    bits = exponents.astype(jnp.int32) << 23
    return lax.bitcast_convert_type(jnp.where(exponents == _NAN_EXPONENT, 0x7FC00000, bits), jnp.float32)


def _packed(codes: Array) -> Array:
    """Codes of 4 bits `[..., K]` as bytes `[..., K / 2]`, the first of two in the lower half."""
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return lax.optimization_barrier(pairs[..., 0] | (pairs[..., 1] << 4))


def _unpacked(values: Array) -> Array:
    """The reverse."""
    pairs = jnp.stack([values & 15, values >> 4], axis=-1)
    return pairs.reshape(*values.shape[:-1], 2 * values.shape[-1])
