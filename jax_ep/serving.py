"""The matrices of expert layers as serving takes them, and where its path is the faster one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jax_ep.core import check, check_fp8
from jax_ep.core.expert_matrices import QuantizedExperts
from jax_ep.core.named_scopes import operation
from jax_ep.formats import check_quantized
from jax_ep.ops.moe_low_latency import low_latency_moe
from jax_ep.quantization import prepack_experts, quantize_experts, quantize_fp8_weights
from jax_ep.types import Array, Experts, Quantized, result_type

LOW_LATENCY_TOKENS = 128
"""Up to so many tokens per rank, layers that choose by themselves take the low-latency path; beyond, that of `moe`.

The low-latency path sends a token once for each of its experts, and its layout has room for all tokens on every expert;
in return it waits once per exchange and reads the matrices once. With many tokens per rank, what is sent decides, and
with 128 and top-8 of 256 an expert has tens of rows, whose products are still bound by reading its matrices.
"""


@result_type
@dataclasses.dataclass(frozen=True)
class ServingWeights:
    """The matrices of expert layers as `low_latency_moe` takes them; leading axes, such as one of layers, are allowed.

    Attributes:
      w_gate_up: `[..., E, 2 * I, H]`, or in FP8 a pair `(values, scales)`, or `QuantizedExperts`.
      w_down: `[..., E, H, I]`, or such a pair, or `QuantizedExperts`.
      b_gate_up: `[..., E, 2 * I]`, or None.
      b_down: `[..., E, H]`, or None.
    """

    w_gate_up: Array | Quantized | QuantizedExperts
    w_down: Array | Quantized | QuantizedExperts
    b_gate_up: Array | None = None
    b_down: Array | None = None


def serve(x: Array, topk_idx: Array, topk_weights: Array, weights: ServingWeights, **options: Any) -> Array:
    """`low_latency_moe` of `weights`, with its other arguments as options."""
    w_gate_up, w_down, b_gate_up, b_down = (getattr(weights, field.name) for field in dataclasses.fields(weights))
    return low_latency_moe(x, topk_idx, topk_weights, w_gate_up, w_down, biases=(b_gate_up, b_down), **options)


@operation
def serving_weights(
    w_gate_up: Array,
    w_down: Array,
    *,
    experts: Experts | None = None,
    b_gate_up: Array | None = None,
    b_down: Array | None = None,
    fp8: bool = True,
    format: str | None = None,
) -> ServingWeights:
    """Turns the matrices of `moe` into those of `low_latency_moe`, once, before serving.

    They keep their sharding, on automatic and on explicit mesh axes: only the last two axes change.

    Args:
      w_gate_up: `[..., E, H, 2 * I]`.
      w_down: `[..., E, I, H]`.
      experts: what the experts compute, see `jax_ep.Experts`; None: gates in the first half of the columns.
      b_gate_up: `[..., E, 2 * I]`, or None.
      b_down: `[..., E, H]`, or None.
      fp8: quantise them, with tokens and activated rows in FP8 too.
      format: quantise them as `quantize_experts` does, with tokens in their own dtype; then `fp8` counts for nothing.
        In groups of I, it is padded with zeros, which changes no result. In 4 bits they are prepacked, see
        `prepack_experts`, for which kernels take less time.

    Returns:
      Both matrices, transposed, and the biases.

    Raises:
      ValueError: shapes that do not fit; with `fp8`, H is not a multiple of 128; in FP8 or 4 bits, explicit mesh axes
        split H or I where devices hold no whole blocks of 128; or I is no multiple of 128 with a function of the
        caller's as activation, whose rows this function cannot pad.
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
    check.size(function, "axis -2 of w_gate_up", w_gate_up.shape[-2], hidden, "pass [..., E, H, 2 * I]")
    columns = w_gate_up.shape[-1]
    experts = check.expert_function(function, experts, columns, inner)
    b_gate_up = check.bias(function, "b_gate_up", b_gate_up, (*w_down.shape[:-2], columns))
    b_down = check.bias(function, "b_down", b_down, (*w_down.shape[:-2], hidden))
    if not fp8 and format is None:
        return ServingWeights(jnp.swapaxes(w_gate_up, -1, -2), jnp.swapaxes(w_down, -1, -2), b_gate_up, b_down)
    wanted = check_quantized.format_named(function, "fp8" if format is None else format)
    check_quantized.depth(function, "H, axis -2 of w_gate_up,", wanted, hidden)
    missing = -inner % (wanted.block_k or 1)
    if missing:
        if callable(experts.activation):
            check_quantized.depth(function, "I, axis -2 of w_down,", wanted, inner)
        w_gate_up = _pad_columns(experts, w_gate_up, missing)
        b_gate_up = None if b_gate_up is None else _pad_columns(experts, b_gate_up, missing)
        w_down = jnp.pad(w_down, [(0, 0)] * (w_down.ndim - 2) + [(0, missing), (0, 0)])
    if format is None:
        return ServingWeights(quantize_fp8_weights(w_gate_up), quantize_fp8_weights(w_down), b_gate_up, b_down)
    gate_up, down = quantize_experts(w_gate_up, format), quantize_experts(w_down, format)
    if wanted.prepacked is not None:
        gate_up, down = prepack_experts(gate_up), prepack_experts(down)
    return ServingWeights(gate_up, down, b_gate_up, b_down)


def _pad_columns(experts: Experts, x: Array, missing: int) -> Array:
    """So many zeros more in each kind of the columns `[..., 2 * I]` of hidden rows; activations of 0 are 0."""
    at_end = ((0, 0),) * (x.ndim - 1)
    if not experts.gated or experts.interleaved:
        return jnp.pad(x, (*at_end, (0, missing * (2 if experts.gated else 1))))
    halves = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    return jnp.pad(halves, (*at_end, (0, 0), (0, missing))).reshape(*x.shape[:-1], x.shape[-1] + 2 * missing)
