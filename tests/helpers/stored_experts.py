"""`QuantizedWeights` in all their storage layouts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import oracle_quantized
from jax_ep import QuantizedWeights, formats
from jax_ep.quantization import quantize, with_layout

STORED = tuple(name.replace("_prepacked", " prepacked") for name in formats.STORED)


def store(w: Any, name: str, **options: Any) -> QuantizedWeights:
    """Quantize `[..., K, N]` by a name of `STORED`."""

    @jax.jit
    def run(w: Any) -> QuantizedWeights:
        found = quantize(w, name.split()[0], **options)
        return with_layout(found, "prepacked") if name.endswith(" prepacked") else found

    return run(jnp.asarray(w))


def fp8_weights(values: Any, scales: Any) -> QuantizedWeights:
    """Return FP8 values `[..., N, K]` and the scales of their blocks as weights for FP8 tokens."""
    return QuantizedWeights(jnp.asarray(values), jnp.asarray(scales), "fp8", activations="fp8")


def stand_for(q: QuantizedWeights) -> np.ndarray:
    """Dequantize to `[..., K, N]` in float64."""
    q = with_layout(q, "transposed") if q.is_prepacked else q
    values, scales = jax.tree.map(np.asarray, (q.values, q.scales))
    return np.swapaxes(oracle_quantized.dequantize(values, scales, q.format), -1, -2)
