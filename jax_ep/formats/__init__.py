"""Formats of quantized expert weights: one file each, which holds all facts of the format as one `Format`."""

from __future__ import annotations

import dataclasses

import jax
from jax import lax
from jax.typing import DTypeLike

from jax_ep.core.expert_matrices import QuantizedExperts
from jax_ep.formats import fp8, fp8_channel, int4, int8, mxfp4
from jax_ep.formats.base import Format, Prepacked
from jax_ep.types import Array

__all__ = [
    "FORMATS",
    "STORED",
    "Format",
    "Prepacked",
    "dequantize",
    "format_of",
    "prepack",
    "stored_name",
    "unprepack",
    "weight_at",
]

FORMATS = {
    found.name: found
    for found in (
        fp8.FORMAT,
        fp8_channel.FORMAT,
        int8.FORMAT,
        int4.FORMAT,
        mxfp4.FORMAT,
    )
}
"""All formats, by their names."""
STORED = (*FORMATS, *(f"{name}_prepacked" for name, found in FORMATS.items() if found.prepacked))
"""Names of all ways to store weights, as `stored_name` has them."""


def format_of(w: QuantizedExperts) -> Format:
    """The format of quantized weights."""
    return FORMATS[w.format]


def stored_name(w: QuantizedExperts) -> str:
    """By which the settings of kernels are looked up."""
    return w.format + ("_prepacked" if w.is_prepacked else "")


def layout_of(w: QuantizedExperts) -> Prepacked:
    """The kernels' order of a format that has one."""
    layout = format_of(w).prepacked
    if layout is None:
        raise ValueError(f"{w.format!r} has no order of its own for kernels.")
    return layout


def prepack(w: QuantizedExperts) -> QuantizedExperts:
    """In the kernels' order, of a format that has one; K is a multiple of `PREPACKED_K`."""
    values, scales = layout_of(w).pack(w.values, w.scales)
    return dataclasses.replace(w, values=values, scales=scales)


def unprepack(w: QuantizedExperts) -> QuantizedExperts:
    """The inverse of `prepack`."""
    values, scales = layout_of(w).unpack(w.values, w.scales)
    return dataclasses.replace(w, values=values, scales=scales)


def dequantize(w: QuantizedExperts, dtype: DTypeLike) -> Array:
    """`[..., N, K]` of `dtype`, multiplied in float32; `smooth` is not divided out."""
    w = unprepack(w) if w.is_prepacked else w
    return format_of(w).dequantize(w.values, w.scales, dtype)


def weight_at(w: QuantizedExperts, group: Array, dtype: DTypeLike) -> Array:
    """The weight of one group of `[G, N, K]`, as `dtype`."""

    def at(x: Array) -> Array:
        return lax.dynamic_index_in_dim(x, group, keepdims=False)

    return dequantize(dataclasses.replace(w, values=at(w.values), scales=jax.tree.map(at, w.scales)), dtype)
