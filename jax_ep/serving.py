"""The matrices of expert layers as serving takes them, and where its path is the faster one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_ep.core import check, check_fp8
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.named_scopes import operation
from jax_ep.quantization import quantize_fp8_weights
from jax_ep.types import Array, Quantized

LOW_LATENCY_TOKENS = 128
"""Up to so many tokens per rank, layers that choose by themselves take the low-latency path; beyond, that of `moe`.

The low-latency path sends a token once for each of its experts, and its layout has room for all tokens on every expert;
in return it waits once per exchange and reads the matrices once. With many tokens per rank, what is sent decides, and
with 128 and top-8 of 256 an expert has tens of rows, whose products are still bound by reading its matrices.
"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ServingWeights:
    """The matrices of expert layers as `low_latency_moe` takes them; leading axes, such as one of layers, are allowed.

    Attributes:
      w_gate_up: `[..., E, 2 * I, H]`, or in FP8 a pair `(values, scales)`.
      w_down: `[..., E, H, I]`, or such a pair.
    """

    w_gate_up: Array | Quantized
    w_down: Array | Quantized


@operation
def serving_weights(w_gate_up: Array, w_down: Array, *, fp8: bool = True) -> ServingWeights:
    """Turns the matrices of `moe` into those of `low_latency_moe`, once, before serving.

    They keep their sharding, on automatic and on explicit mesh axes: only the last two axes change.

    Args:
      w_gate_up: `[..., E, H, 2 * I]`.
      w_down: `[..., E, I, H]`.
      fp8: quantise them. I is padded with zeros to a multiple of 128, which changes no result.

    Returns:
      Both matrices, transposed.

    Raises:
      ValueError: shapes that do not fit; with `fp8`, H is not a multiple of 128, or explicit mesh axes split H or I
        where devices hold no whole blocks of 128.
      TypeError: unsupported dtypes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep.serving import serving_weights
      >>> w = serving_weights(jnp.ones((4, 128, 384)), jnp.ones((4, 192, 128)))
      >>> [values.shape for values, scales in (w.w_gate_up, w.w_down)]
      [(4, 512, 128), (4, 128, 256)]
    """
    function = "serving_weights"
    w_gate_up, w_down = (
        check_fp8.matrices(function, name, w, whole=False) for name, w in (("w_gate_up", w_gate_up), ("w_down", w_down))
    )
    check.same_dtype(function, "w_down", w_down, "w_gate_up", w_gate_up.dtype)
    if w_gate_up.shape[:-2] != w_down.shape[:-2]:
        raise ValueError(
            f"{function}: w_gate_up has shape {w_gate_up.shape} and w_down {w_down.shape}, expected the same axes"
            " before the last two; pass both matrices of the same experts."
        )
    inner, hidden = w_down.shape[-2:]
    remedy = "pass gate and up side by side, [..., E, H, 2 * I], for w_down [..., E, I, H]"
    check.size(function, "axis -1 of w_gate_up", w_gate_up.shape[-1], 2 * inner, remedy)
    check.size(function, "axis -2 of w_gate_up", w_gate_up.shape[-2], hidden, remedy)
    if not fp8:
        return ServingWeights(jnp.swapaxes(w_gate_up, -1, -2), jnp.swapaxes(w_down, -1, -2))
    check_fp8.whole_blocks(function, "H, axis -2 of w_gate_up,", hidden)
    missing = -inner % GROUP_SIZE
    halves = w_gate_up.reshape(*w_gate_up.shape[:-1], 2, inner)
    halves = jnp.pad(halves, [(0, 0)] * (halves.ndim - 1) + [(0, missing)])
    w_gate_up = halves.reshape(*w_gate_up.shape[:-1], 2 * (inner + missing))
    w_down = jnp.pad(w_down, [(0, 0)] * (w_down.ndim - 2) + [(0, missing), (0, 0)])
    return ServingWeights(quantize_fp8_weights(w_gate_up), quantize_fp8_weights(w_down))
