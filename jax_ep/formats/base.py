"""`Format`: all facts of a format of quantized weights. A format is a file of this folder, listed in `__init__.py`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep.core import fp8
from jax_ep.core.expert_matrices import QuantizedExperts
from jax_ep.types import Array, Quantized


@dataclasses.dataclass(frozen=True)
class Prepacked:
    """The order in which kernels read a format's weights with fewest instructions, see `prepack_experts`.

    Attributes:
      scale_dtype: dtype of the scales; values are uint32.
      step: elements of K that must lie on one device.
      scale_shape: `[..., N, K]` and the block size to the shape of the scales.
      pack: values and scales to those of this order.
      unpack: the inverse.
    """

    scale_dtype: np.dtype
    step: int
    scale_shape: Callable[[tuple[int, ...], int], tuple[int, ...]]
    pack: Callable[[Array, Array], Quantized]
    unpack: Callable[[Array, Array], Quantized]


@dataclasses.dataclass(frozen=True)
class Format:
    """One format of quantized expert weights `[..., E, K, N]`, which are stored as `[..., E, N, K]`.

    Attributes:
      name: as `quantize_experts` takes it.
      bits: bits of an element; with 4, a byte holds two, the first one in its low nibble.
      dtype: dtype of the stored values.
      scale_dtype: dtype of the scales.
      block_n: columns that share a scale.
      block_k: elements of K that share a scale, or the default where the caller may choose; None: all of K.
      takes_block_size: whether the caller may choose the elements of K that share a scale.
      activations: what tokens may be quantized to, see `quantize_experts`.
      is_fp8_operand: values and scales are an operand of the FP8 GEMMs as they are.
      decoder: the module of `formats/kernels` with the kernels' part.
      quantize: `(w [..., K, N], block size)` to values `[..., N, K]` and scales.
      dequantize: values and scales to `[..., N, K]` of a dtype, multiplied in float32.
      prepacked: the kernels' order; None: kernels read the weights as they are.
    """

    name: str
    bits: int
    dtype: np.dtype
    scale_dtype: np.dtype
    block_n: int
    block_k: int | None
    decoder: str
    quantize: Callable[[Array, int], Quantized]
    dequantize: Callable[[Array, Array, DTypeLike], Array]
    takes_block_size: bool = False
    activations: str = "fp8"
    is_fp8_operand: bool = False
    prepacked: Prepacked | None = None

    def block_size(self, w: QuantizedExperts) -> int:
        """Elements of K that share a scale; 0: all of K, or its scales do not fit."""
        if not self.takes_block_size:
            return self.block_k or 0
        blocks = math.prod(w.scales.shape[-2:-1] if w.is_prepacked else w.scales.shape[-1:])
        return w.shape[-1] // blocks if blocks else 0

    def scale_shape(self, w: QuantizedExperts) -> tuple[int, ...] | None:
        """The shape that its scales should have; None: K is not whole blocks."""
        *leading, columns, depth = w.shape
        block = self.block_size(w)
        if self.block_k is not None and (block == 0 or depth % block):
            return None
        if w.is_prepacked and self.prepacked is not None:
            return None if depth % PREPACKED_K else self.prepacked.scale_shape(w.shape, block)
        blocks = () if self.block_k is None else (depth // block,)
        return (*leading, -(-columns // self.block_n), *blocks)


PREPACKED_DTYPE = np.dtype("uint32")
PREPACKED_K = 32
"""K of prepacked weights is a multiple of this: four packed uint32, one of each thread that multiplies them."""


def transposed(w: Array) -> Array:
    """`[..., K, N]` to float32 `[..., N, K]`."""
    return jnp.swapaxes(w, -1, -2).astype(jnp.float32)


def blocks_of(rows: Array, size: int) -> Array:
    """`[..., K]` to `[..., K / size, size]`."""
    return rows.reshape(*rows.shape[:-1], rows.shape[-1] // size, size)


def scale_to(blocks: Array, limit: float) -> tuple[Array, Array]:
    """Numbers up to `limit`, and the scale of each block along the last axis, which NaN and infinity make NaN."""
    scales = fp8.scales_of(blocks, (-1,), limit)
    values = blocks * (1 / scales)
    return jnp.clip(jnp.where(jnp.isnan(values), 0, values), -limit, limit), scales[..., 0]


def dequantize_columns(values: Array, scales: Array, dtype: DTypeLike) -> Array:
    """`values [..., N, K]` times the scale of each column, `[..., N]`."""
    return (values.astype(jnp.float32) * scales[..., None]).astype(dtype)
