"""`QuantizedWeights` in all their storage layouts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import oracle
import oracle_quantized
from cases import F32, reals
from jax_ep import QuantizedWeights, formats
from jax_ep.quantization import dequantize, quantize, with_layout

STORED = tuple(name.replace("_prepacked", " prepacked") for name in formats.STORED)
PREPACKED = tuple(name for name in STORED if name.endswith(" prepacked"))


relaid = jax.jit(with_layout, static_argnames="layout")
quantized = jax.jit(quantize, static_argnames=("format", "block_size", "activations", "for_training"))
dense = jax.jit(dequantize, static_argnames="dtype")


@partial(jax.jit, static_argnames=("name", "block_size", "activations"))
def store(w, name, block_size=None, activations=None):
    """Quantize `[..., K, N]` by a name of `STORED`."""
    found = quantize(w, name.split()[0], block_size=block_size, activations=activations)
    return with_layout(found, "prepacked") if name.endswith(" prepacked") else found


def fp8_weights(values, scales):
    """Return FP8 values `[..., N, K]` and the scales of their blocks as weights for FP8 tokens."""
    return QuantizedWeights(jnp.asarray(values), jnp.asarray(scales), "fp8", activations="fp8")


def stand_for(q):
    """Dequantize to `[..., K, N]` in float64."""
    q = relaid(q, layout="transposed") if q.is_prepacked else q
    values, scales = jax.tree.map(np.asarray, (q.values, q.scales))
    return np.swapaxes(oracle_quantized.dequantize(values, scales, q.format), -1, -2)


class Fp8Operands:
    """Operands in FP8 with scales of very different sizes: `lhs [*rows, K]` and `rhs [G, N, K]`."""

    def __init__(self, rng, rows, depth, groups, columns):
        blocks = depth // 128
        self.lhs = (100 * reals(rng, *rows, depth)).clip(-448, 448).astype(oracle.FP8)
        self.rhs = (100 * reals(rng, groups, columns, depth)).clip(-448, 448).astype(oracle.FP8)
        self.lhs_scales = (2.0 ** rng.uniform(-9, 2, (*rows, blocks))).astype(F32)
        self.rhs_scales = (2.0 ** rng.uniform(-9, 2, (groups, -(-columns // 128), blocks))).astype(F32)

    def dequantized(self):
        rhs = oracle_quantized.dequantize(self.rhs, self.rhs_scales, "fp8")
        return oracle.dequantize(self.lhs, self.lhs_scales, np.float64), rhs
