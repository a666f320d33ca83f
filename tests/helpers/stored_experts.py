"""`QuantizedExperts` in all their storage layouts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import oracle_quantized
from jax_ep import QuantizedExperts, formats
from jax_ep.quantization import prepack_experts, quantize_experts, unprepack_experts

STORED = tuple(name.replace("_prepacked", " prepacked") for name in formats.STORED)


def store(w: Any, name: str, **options: Any) -> QuantizedExperts:
    """Quantize `[..., K, N]` by a name of `STORED`."""

    @jax.jit
    def run(w: Any) -> QuantizedExperts:
        found = quantize_experts(w, name.split()[0], **options)
        return prepack_experts(found) if name.endswith(" prepacked") else found

    return run(jnp.asarray(w))


def stand_for(q: QuantizedExperts) -> np.ndarray:
    """Dequantize to `[..., K, N]` in float64."""
    q = unprepack_experts(q) if q.is_prepacked else q
    values, scales = jax.tree.map(np.asarray, (q.values, q.scales))
    return np.swapaxes(oracle_quantized.dequantize(values, scales, q.format), -1, -2)
