"""`QuantizedExperts` in each way in which they may be stored."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import oracle_quantized
from jax_ep import QuantizedExperts
from jax_ep.core.expert_matrices import EXPERT_FORMATS
from jax_ep.quantization import quantize_experts, shuffle_experts, unshuffle_experts

STORED = (*EXPERT_FORMATS, "int4 shuffled", "mxfp4 shuffled")


def store(w: Any, name: str, **options: Any) -> QuantizedExperts:
    """Matrices `[..., K, N]` by a name of `STORED`."""

    @jax.jit
    def run(w: Any) -> QuantizedExperts:
        found = quantize_experts(w, name.split()[0], **options)
        return shuffle_experts(found) if name.endswith(" shuffled") else found

    return run(jnp.asarray(w))


def stand_for(q: QuantizedExperts) -> np.ndarray:
    """The matrices `[..., K, N]` in float64."""
    q = unshuffle_experts(q) if q.is_shuffled else q
    return np.swapaxes(oracle_quantized.dequantize(np.asarray(q.values), np.asarray(q.scales), q.format), -1, -2)
