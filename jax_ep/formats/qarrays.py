"""Arrays of qwix as `QuantizedWeights`, and back. qwix is not imported: an array of it is known by its fields."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep.core import check
from jax_ep.core.expert_matrices import LoraWeights, QArray, QuantizedWeights
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.layout import repeat
from jax_ep.core.mesh_axes import spec_of
from jax_ep.formats import mxfp4
from jax_ep.formats.base import pack_nibbles, unpack_nibbles
from jax_ep.types import Array
from jax_ep.values import shown

_BY_DTYPE = {"int8": "int8", "float8_e4m3fn": "fp8_channel", "int4": "int4"}
_EXPECTED = (
    "int8 or float8_e4m3fn with one scale per column, float8_e4m3fn with one per 128 by 128, int4 with one per even"
    " tile of K, or 'mxfp4'; quantize with channelwise_axes=(0, 2), or pass qwix.dequantize(w)"
)


def own_weights(function: str, name: str, w: Any) -> Any:
    """Return a `qwix.QArray`, also one under adapters, as `QuantizedWeights`; return anything else unchanged.

    All layers and GEMMs call it with their weights, so that this module decides what a QArray stands for.
    """
    if isinstance(w, LoraWeights) and isinstance(w.base, QArray):
        return dataclasses.replace(w, base=from_qarray(function, f"{name}.base", w.base))
    return from_qarray(function, name, w) if isinstance(w, QArray) else w


def from_qarray(function: str, name: str, w: QArray) -> QuantizedWeights:
    """Return a `qwix.QArray` that stands for `[..., E, K, N]` as `QuantizedWeights`, with the same values."""
    values, scale = (
        check.array(function, f"{name}.{part}", getattr(w, part), "[..., E, K, N]") for part in ("qvalue", "scale")
    )
    format, tiles = _format(function, name, w, values, scale)
    of_block = (-2, -1) if format == "fp8" else (-2,)
    scale = scale.astype(jnp.float32)
    for axis in range(-values.ndim, 0):
        if axis not in of_block:
            scale = repeat(scale, tiles[axis], axis=axis)
    scale = _split_like(scale, values)
    values, scale = jnp.swapaxes(values, -1, -2), jnp.swapaxes(scale, -1, -2)
    if format in ("int8", "fp8_channel"):
        return QuantizedWeights(values, scale[..., 0], format)
    if format == "int4":
        values = pack_nibbles((values.astype(jnp.int8) + 8).astype(jnp.uint8))
    if format == "mxfp4":  # Scales are powers of two: only the exponent is stored.
        values = pack_nibbles(lax.bitcast_convert_type(values, jnp.uint4).astype(jnp.uint8))
        scale = _exponents(function, name, scale)
    return QuantizedWeights(values, scale, format)


def to_qarray(w: QuantizedWeights) -> dict[str, Any]:
    """Return the fields of a `qwix.QArray` with the values of transposed weights, without master and smooth."""
    values, scale = w.values, w.scales
    if w.format == "int4":
        values = (unpack_nibbles(values).astype(jnp.int8) - 8).astype(jnp.int4)
    if w.format == "mxfp4":
        values = lax.bitcast_convert_type(unpack_nibbles(values).astype(jnp.uint4), jnp.float4_e2m1fn)
        scale = mxfp4.powers(jnp.asarray(scale))
    scale = jnp.asarray(scale)
    scale = scale[..., None] if scale.ndim < values.ndim else scale
    fields = {"qvalue": jnp.swapaxes(values, -1, -2), "scale": jnp.swapaxes(scale, -1, -2)}
    return fields | ({"qtype": "mxfp4"} if w.format == "mxfp4" else {})


def _format(function: str, name: str, w: QArray, values: Array, scale: Array) -> tuple[str, tuple[int, ...]]:
    """Return the format with the values of a QArray, and the sizes of its tiles; raise if there is none."""
    stored = values.dtype.name
    qtype = w.qtype if isinstance(w.qtype, str) else stored
    kind = stored if qtype == stored else f"{shown(qtype)} in {stored}"
    pairs = tuple(zip(values.shape, scale.shape, strict=False))
    if scale.ndim != values.ndim or any(number < 1 or size % number for size, number in pairs):
        raise ValueError(
            f"{function}: {name} is a QArray with values {values.shape} and scales {scale.shape}, expected scales of"
            " whole tiles of the values; make it with qwix.quantize."
        )
    if not jnp.issubdtype(scale.dtype, jnp.floating):
        raise TypeError(
            f"{function}: {name} is a QArray with scales of {scale.dtype}, expected floats; make it with qwix.quantize."
        )
    tiles = tuple(size // number for size, number in pairs)
    format = _BY_DTYPE.get(stored)
    if stored == "float8_e4m3fn" and tiles[-2:] == (GROUP_SIZE, GROUP_SIZE):
        format = "fp8"
    if qtype == "mxfp4" and stored == "float4_e2m1fn":
        format = "mxfp4"
    if format is None or qtype not in (stored, format):
        raise TypeError(f"{function}: {name} is a QArray of dtype {kind}, expected {_EXPECTED}.")
    if w.zero_point is not None:
        raise ValueError(
            f"{function}: {name} is a QArray of {kind} with a zero point, expected symmetric weights; quantize with"
            " calibration_method='absmax', or pass qwix.dequantize(w)."
        )
    fits = {"int4": tiles[-2] % 2 == 0, "mxfp4": tiles[-2] == mxfp4.BLOCK, "fp8": True}
    if not fits.get(format, scale.shape[-2] == 1):
        raise ValueError(
            f"{function}: {name} is a QArray of {kind} with scales for tiles {tiles} of {values.shape}, expected"
            f" {_EXPECTED}."
        )
    return format, tiles


def _split_like(scale: Array, values: Array) -> Array:
    """Give the leading axes of the scale, which may be repeated ones, the explicit mesh axes of those of the values."""
    leading, own = spec_of(values)[:-2], spec_of(scale)
    return scale if leading == own[:-2] else jax.sharding.reshard(scale, jax.P(*leading, *own[-2:]))


def _exponents(function: str, name: str, scale: Array) -> Array:
    """Return the biased exponents of powers of two and of 0; NaN's for other numbers, which are an eager error."""
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    fits = (bits & np.uint32(0x807FFFFF) == 0) | (bits == mxfp4.SMALLEST_BITS) | jnp.isnan(scale)
    known = check.known_values(fits)
    if known is not None and not known.all():
        raise ValueError(
            f"{function}: {name} is a QArray of 'mxfp4' with a scale that is no power of two, expected powers of two,"
            " as only their exponents are stored; make it with qwix.quantize, or pass qwix.dequantize(w)."
        )
    return jnp.where(fits, bits >> 23, mxfp4.E8M0_NAN).astype(jnp.uint8)
