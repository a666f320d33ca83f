"""Prepare the weights of expert layers for inference, and run layers for decode-sized batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp

from jax_ep.core import check
from jax_ep.core.check import operation
from jax_ep.core.expert_matrices import ExpertWeights
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.mesh_axes import on_automatic_axes, resized_spec
from jax_ep.formats import check_quantized
from jax_ep.ops.moe import routed_moe as routed_moe
from jax_ep.ops.moe_low_latency import low_latency_moe
from jax_ep.quantization import quantize, with_layout
from jax_ep.types import Array, Biases, Experts

LOW_LATENCY_TOKENS = 128
"""Most tokens per rank for which `jax_ep.flax.MoE` takes the low-latency path; with more, it takes that of `moe`.

The low-latency path sends a token once for each of its experts, and its layout has room for all tokens on every expert.
In return it waits once per all-to-all and reads the weights once. With many tokens, the bytes sent decide. With 128
tokens and top-8 of 256 experts, an expert has tens of rows, and its GEMMs are still bound by reading its weights.
"""


def serve(x: Array, topk_idx: Array, topk_weights: Array, weights: ExpertWeights, **options: Any) -> Array:
    """Run `low_latency_moe`; `options` are its other arguments."""
    w_gate_up, w_down, *biases = weights
    options["biases"] = tuple(biases)
    return low_latency_moe(x, topk_idx, topk_weights, w_gate_up, w_down, **options)


@operation
def serving_weights(
    w_gate_up: Array,
    w_down: Array,
    format: str | None,
    *,
    activations: str | None = None,
    experts: Experts | None = None,
    biases: Biases | None = None,
) -> ExpertWeights:
    """Prepare the weights of an expert layer for inference, once: pad, quantize and prepack them as kernels read them.

    They keep their sharding, on automatic and on explicit mesh axes.

    Args:
      w_gate_up: `[..., E, H, 2 * I]`.
      w_down: `[..., E, I, H]`.
      format: see `quantize`. I is padded with zeros to whole scale blocks, which changes no result, and 4-bit weights
        are prepacked, see `with_layout`, if tokens keep their dtype.
      activations: the dtype in which tokens are multiplied, see `quantize`.
      experts: what the experts compute, see `jax_ep.Experts`; None: gates in the first half of the columns.
      biases: `(b_gate_up [..., E, 2 * I], b_down [..., E, H])`, each may be None; None: no biases.

    Returns:
      Both weights, and the biases, as every layer takes them.

    Raises:
      ValueError: shapes that do not fit; an unknown format; H is not whole scale blocks; explicit mesh axes split H or
        I within scale blocks; or I is not whole scale blocks with the caller's own function as activation, whose rows
        cannot be padded.
      TypeError: unsupported dtypes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep.serving import serving_weights
      >>> w = serving_weights(jnp.ones((4, 128, 384)), jnp.ones((4, 192, 128)), "fp8", activations="fp8")
      >>> w.w_gate_up.shape, w.w_down.shape
      ((4, 128, 512), (4, 256, 128))
    """
    function = "serving_weights"
    w_gate_up = check.floating(function, "w_gate_up", w_gate_up, "[..., K, N]")
    w_down = check.floating(function, "w_down", w_down, "[..., K, N]")
    check.same_dtype(function, "w_down", w_down, "w_gate_up", w_gate_up.dtype)
    if w_gate_up.shape[:-2] != w_down.shape[:-2]:
        raise ValueError(
            f"{function}: w_gate_up has shape {w_gate_up.shape} and w_down {w_down.shape}, expected the same axes"
            " before the last two; pass both weights of the same experts."
        )
    inner, hidden = w_down.shape[-2:]
    check.size(function, "axis -2 of w_gate_up", w_gate_up.shape[-2], hidden, "pass [..., E, H, 2 * I]")
    columns = w_gate_up.shape[-1]
    experts = check.expert_function(function, experts, columns, inner)
    b_gate_up, b_down = check.biases(function, biases)
    b_gate_up = check.bias(function, "b_gate_up", b_gate_up, (*w_down.shape[:-2], columns))
    b_down = check.bias(function, "b_down", b_down, (*w_down.shape[:-2], hidden))
    if format is not None:
        wanted = check_quantized.format_named(function, format)
        check_quantized.depth(function, "H, axis -2 of w_gate_up,", wanted, hidden)
        block = GROUP_SIZE if isinstance(activations, str) and activations == "fp8" else wanted.block_k or 1
        if missing := -inner % block:
            if callable(experts.activation):
                check_quantized.depth(function, "I, axis -2 of w_down,", wanted, inner, block)
            w_gate_up = _pad_columns(experts, w_gate_up, missing)
            b_gate_up = None if b_gate_up is None else _pad_columns(experts, b_gate_up, missing)
            w_down = _pad_rows(w_down, missing)
    pair = [quantize(w, format, activations=activations) for w in (w_gate_up, w_down)]
    if format is not None and wanted.prepacked is not None and activations is None:
        pair = [with_layout(w, "prepacked") for w in pair]
    return ExpertWeights(pair[0], pair[1], b_gate_up, b_down)


def _pad_columns(experts: Experts, x: Array, missing: int) -> Array:
    """Append `missing` zeros to each kind of the columns `[..., 2 * I]` of hidden rows; activations of 0 are 0."""
    kinds = 2 if experts.gated else 1
    of_kind = kinds if not experts.interleaved else 1  # blocks of columns that get zeros at their end

    def pad(x: Array) -> Array:
        blocks = x.reshape(*x.shape[:-1], of_kind, x.shape[-1] // of_kind)
        width = [(0, 0)] * (blocks.ndim - 1) + [(0, missing * kinds // of_kind)]
        return jnp.pad(blocks, width).reshape(*x.shape[:-1], x.shape[-1] + kinds * missing)

    return on_automatic_axes(pad, resized_spec(x, -1, x.shape[-1] + kinds * missing), x)


def _pad_rows(w: Array, missing: int) -> Array:
    """Append `missing` rows of zeros to `w [..., I, H]`."""
    width = [(0, 0)] * (w.ndim - 2) + [(0, missing), (0, 0)]
    return on_automatic_axes(partial(jnp.pad, pad_width=width), resized_spec(w, -2, w.shape[-2] + missing), w)
