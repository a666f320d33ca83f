"""Matrices of experts in other forms than those of training in 16 bits: for inference, and for products in FP8."""

from __future__ import annotations

import dataclasses
from typing import overload

import numpy as np

from jax_ep.types import Array, result_type


@result_type
@dataclasses.dataclass(frozen=True)
class QuantizedExperts:
    """Matrices of experts in 8 or 4 bits, transposed, with their scales; tokens keep their dtype unless they say else.

    A pytree: it passes `jit`, `scan` over stacked layers and `shard_map`, and every array has the leading axes. Made by
    `jax_ep.quantization.quantize_experts`, which says what each format is.

    Attributes:
      values: `[..., E, N, K]` float8_e4m3fn or int8; in 4 bits `[..., E, N, K / 2]` uint8, whose low half is the first
        element, or prepacked `[..., E, N, K / 8]` uint32.
      scales: float32 `[..., E, ceil(N / 128), K / 128]` ("fp8"), `[..., E, N]` ("fp8_channel", "int8") or
        `[..., E, N, K / block_size]` ("int4"); uint8 exponents `[..., E, N, K / 32]` ("mxfp4"). Of prepacked values
        float32 `[..., E, K / block_size, N]`, or uint32 `[..., E, ceil(K / 128), N]` of four exponents each.
      format: as `quantize_experts` takes it.
      smooth: `[..., E, K]` float32 by which columns of tokens are divided, as the matrices have been multiplied by
        them; None: 1. Only with `activations="int8"`.
      activations: tokens are quantised too, where they are multiplied: "int8", each by its largest element; "fp8", by
        that of each 128 columns. None: they keep their dtype.
    """

    values: Array
    scales: Array
    format: str = dataclasses.field(metadata={"static": True})
    smooth: Array | None = None
    activations: str | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """`[..., E, N, K]`, of the matrices for which the values stand."""
        *leading, depth = self.values.shape
        return (*leading, depth * {"uint8": 2, "uint32": 8}.get(self.values.dtype.name, 1))

    @property
    def is_prepacked(self) -> bool:
        """Whether the arrays are in the order of `prepack_experts`."""
        return self.values.dtype == np.uint32


@result_type
@dataclasses.dataclass(frozen=True)
class Fp8Weights:
    """Matrices of experts in training, quantised once for all products of a step; gradients go to the master alone.

    A pytree: it passes `jit`, `scan` over stacked layers and `shard_map`, and every array has the leading axes. Made by
    `jax_ep.quantization.quantize_master_weights`. Blocks of 128 by 128 share a scale.

    Attributes:
      master: `[..., E, K, N]`, as `moe` takes matrices: products read nothing of it but the dtype of its gradient. Or
        `[..., E, K, 2, N]`, as a tensor axis splits columns, of 2 or 1 kinds: then values are `[..., E, 2, N, K]` and
        scales `[..., E, 2, N / 128, K / 128]`.
      values: `[..., E, N, K]` float8_e4m3fn, for the products of the forward pass.
      transposed: float8_e4m3fn of the shape of the master, the same numbers for the gradients of tokens.
      scales: `[..., E, N / 128, K / 128]` float32, of both.
    """

    master: Array
    values: Array
    transposed: Array
    scales: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the master."""
        return self.master.shape

    @property
    def dtype(self) -> np.dtype:
        """That of the master, and of gradients."""
        return self.master.dtype


@result_type
@dataclasses.dataclass(frozen=True)
class TrainingWeights:
    """The experts' matrices of a `jax_ep.flax.MoE`, or of stacked ones, quantised once for all products of a step.

    Made by its `training_weights`. A pytree: it passes `jit`, and scans over layers and over microbatches.

    Attributes:
      w_gate_up: `[..., E, H, 2 * I]`, or with a tensor axis `[..., E, H, 2, I]`.
      w_down: `[..., E, I, H]`.
    """

    w_gate_up: Fp8Weights
    w_down: Fp8Weights


@overload
def with_one_axis_of_columns(w: Array) -> Array: ...


@overload
def with_one_axis_of_columns(w: Fp8Weights) -> Fp8Weights: ...


def with_one_axis_of_columns(w: Array | Fp8Weights) -> Array | Fp8Weights:
    """Matrices `[..., K, 2, N]` as `[..., K, 2 * N]`: all columns of one kind, and then those of the other."""
    if not isinstance(w, Fp8Weights):
        return w.reshape(*w.shape[:-2], -1)
    values, scales = (part.reshape(*part.shape[:-3], -1, part.shape[-1]) for part in (w.values, w.scales))
    return Fp8Weights(with_one_axis_of_columns(w.master), values, with_one_axis_of_columns(w.transposed), scales)
