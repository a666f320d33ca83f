"""Formats of quantized expert weights: one file each, which holds all facts of the format as one `Format`."""

from __future__ import annotations

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_ep.core.expert_matrices import QuantizedWeights
from jax_ep.formats import fp8, int4, int8, mxfp4
from jax_ep.formats.base import Format
from jax_ep.types import Array

FORMATS: dict[str, Format] = {x.name: x for x in (fp8.FORMAT, fp8.CHANNEL, int8.FORMAT, int4.FORMAT, mxfp4.FORMAT)}
"""All formats, by their names."""
STORED = (*FORMATS, *(f"{name}_prepacked" for name, found in FORMATS.items() if found.prepacked))
"""Names of all ways to store weights, as `stored_name` has them."""


def format_of(w: QuantizedWeights) -> Format:
    """Return the format of quantized weights, which must have one."""
    return FORMATS[str(w.format)]


def needs_decoder(w: QuantizedWeights) -> bool:
    """Return whether kernels convert elements; if not, values and scales are operands of tensor cores as stored."""
    return w.format is not None and not (format_of(w).is_fp8_operand and w.activations == "fp8")


def stored_name(w: QuantizedWeights) -> str:
    """Return the name by which settings of kernels are looked up."""
    return format_of(w).name + ("_prepacked" if w.is_prepacked else "")


def dequantize(w: QuantizedWeights, dtype: DTypeLike) -> Array:
    """`[..., N, K]` of `dtype`, multiplied in float32 and divided by `smooth`."""
    if w.smooth is None:
        return _scaled(w, dtype)
    return (_scaled(w, jnp.float32) / w.smooth[..., None, :]).astype(dtype)


def weight_at(w: QuantizedWeights, group: Array, dtype: DTypeLike) -> Array:
    """`[N, K]` of one group of `[G, K, N]`, as `dtype`; `smooth` is not divided out, as it divides the tokens."""
    parts = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, group, keepdims=False), (w.values, w.scales))
    return _scaled(dataclasses.replace(w, values=parts[0], scales=parts[1]), dtype)


def _scaled(w: QuantizedWeights, dtype: DTypeLike) -> Array:
    if w.format is None:
        return w.values.astype(dtype)
    wanted, values, scales = format_of(w), w.values, cast(Array, w.scales)
    if w.is_prepacked and wanted.prepacked:
        values, scales = wanted.prepacked.unpack(values, scales)
    return wanted.dequantize(values, scales, dtype)
