"""Formats of quantized expert weights: one file each, which holds all facts of the format as one `Format`."""

from __future__ import annotations

import dataclasses

import jax
from jax import lax
from jax.typing import DTypeLike

from jax_ep.core.expert_matrices import QuantizedExperts
from jax_ep.formats import fp8, fp8_channel, int4, int8, mxfp4
from jax_ep.formats.base import Format
from jax_ep.types import Array

FORMATS: dict[str, Format] = {x.FORMAT.name: x.FORMAT for x in (fp8, fp8_channel, int8, int4, mxfp4)}
"""All formats, by their names."""
STORED = (*FORMATS, *(f"{name}_prepacked" for name, found in FORMATS.items() if found.prepacked))
"""Names of all ways to store weights, as `stored_name` has them."""


def format_of(w: QuantizedExperts) -> Format:
    """The format of quantized weights."""
    return FORMATS[w.format]


def stored_name(w: QuantizedExperts) -> str:
    """By which the settings of kernels are looked up."""
    return w.format + ("_prepacked" if w.is_prepacked else "")


def dequantize(w: QuantizedExperts, dtype: DTypeLike) -> Array:
    """`[..., N, K]` of `dtype`, multiplied in float32; `smooth` is not divided out."""
    wanted, values, scales = format_of(w), w.values, w.scales
    if w.is_prepacked and wanted.prepacked:
        values, scales = wanted.prepacked.unpack(values, scales)
    return wanted.dequantize(values, scales, dtype)


def weight_at(w: QuantizedExperts, group: Array, dtype: DTypeLike) -> Array:
    """The weight of one group of `[G, N, K]`, as `dtype`."""
    parts = (lax.dynamic_index_in_dim(x, group, keepdims=False) for x in jax.tree.leaves((w.values, w.scales)))
    values, scales = jax.tree.unflatten(jax.tree.structure((w.values, w.scales)), parts)
    return dequantize(dataclasses.replace(w, values=values, scales=scales), dtype)
