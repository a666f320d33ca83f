"""qwix: its rules for experts, and its arrays as `QuantizedWeights`. Imported on demand; needs qwix 0.1.8 and Flax."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from flax import nnx

from jax_ep.core import check
from jax_ep.core.check import errors_begin_with
from jax_ep.core.expert_matrices import QArray, QuantizedWeights
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.flax import MoE
from jax_ep.formats import qarrays
from jax_ep.quantization import with_layout
from jax_ep.values import shown, type_name

__all__ = ["apply_rules", "from_qarray", "to_qarray"]

_RULES = {("int8", None): "int8", ("int4", 128): "int4", ("float8_e4m3fn", None): "fp8_channel", ("mxfp4", 32): "mxfp4"}
"""Format of a rule's `weight_qtype` and `tile_size`."""
_WITH_INT8, _WITH_OTHERS = "int8", "float8_e4m3fn"
"""The `act_qtype`s of rules with int8 weights, and with others."""
_SEPARATE = "give experts a separate rule, before others"
_FIXED = (
    *("weight_calibration_method", "act_calibration_method", "act_static_scale", "dropout"),
    *("lora_a_initializer", "lora_b_initializer"),
)
"""Fields of rules that experts have with qwix's default only, which is "absmax" and a dynamic scale."""
_TOKENS = {None: None, _WITH_INT8: "int8", _WITH_OTHERS: "fp8"}
"""Activations of a rule's `act_qtype`."""
_SERVED = ("w_gate_up", "w_down", "b_gate_up", "b_down", "serving_arrays", "serving_tree")


@errors_begin_with("apply_rules")
def apply_rules(model: nnx.Module, rules: Sequence[Any], *, rngs: nnx.Rngs | None = None) -> nnx.Module:
    """Return a copy of a model whose `jax_ep.flax.MoE` layers follow qwix's rules for quantization and LoRA.

    `qwix.quantize_model` and `qwix.apply_lora_to_model` reach all other layers: call them with the result. A layer
    follows the first rule whose `module_path` matches its path and whose `op_names`, if any, include "ragged_dot". Its
    experts are quantized as by `MoE.to_serving`; a `LoraRule` then adds adapters as by `MoE.add_lora`. A layer at
    several paths has the first one of `nnx.iter_modules`.

    Args:
      model: Flax NNX model, not inside `jit`, or such a layer itself, whose path is "".
      rules: `qwix.QuantizationRule`s and `qwix.LoraRule`s, the first match first. Of `weight_qtype` with `tile_size`,
        these exist: int8, int4 with 128, float8_e4m3fn, "mxfp4" with 32. `act_qtype` is None, int8 with int8 weights,
        or float8_e4m3fn with others. None as `weight_qtype` leaves the weights as they are. Calibration is "absmax",
        dynamic for tokens. Adapters have qwix's default initializers and no dropout.
      rngs: initializes adapters.

    Returns:
      The copy.

    Raises:
      ValueError: no rule matches a layer, or one asks for what experts do not have.
      TypeError: `rules` is no list of rules.

    Example:
      >>> import jax.numpy as jnp, qwix
      >>> from flax import nnx
      >>> from jax_ep.flax import MoE
      >>> from jax_ep.integrations.qwix import apply_rules
      >>> moe = MoE(128, 64, num_experts=4, num_experts_per_tok=2, rngs=nnx.Rngs(0))
      >>> moe = apply_rules(moe, [qwix.LoraRule(weight_qtype=jnp.int8, rank=4, alpha=8.0)], rngs=nnx.Rngs(1))
      >>> moe.w_down_lora_a.shape, moe.lora_scale
      ((4, 64, 4), 2.0)
    """
    _check_rules(rules)
    model = nnx.clone(model)
    layers = {"/".join(map(str, path)): layer for path, layer in nnx.iter_modules(model) if isinstance(layer, MoE)}
    if not layers:
        raise ValueError(
            "apply_rules: model has no jax_ep.flax.MoE, expected one or more; call qwix alone for other layers."
        )
    found = {path: next((rule for rule in rules if _matches(rule, path)), None) for path in layers}
    if not any(found.values()):
        raise ValueError(
            f"apply_rules: no rule matches the MoE layers {list(layers)}, expected one; check module_path and op_names."
        )
    for path, rule in found.items():
        _check_rule(path, rule, rngs)  # Those of all layers, before any layer changes.
    for path, layer in layers.items():
        if found[path] is not None:
            _apply(layer, found[path], rngs)
    return model


def _check_rules(rules: Any) -> None:
    import qwix

    check.instance("apply_rules", "rules", rules, list | tuple, "a list of qwix.QuantizationRule or qwix.LoraRule")
    for rule in rules:
        check.instance("apply_rules", "one of rules", rule, qwix.QuantizationRule, "a rule of qwix")
        try:
            re.compile(rule.module_path)
        except re.error as error:
            raise ValueError(
                f"apply_rules: module_path={rule.module_path!r} of a rule, expected a regular expression ({error});"
                " escape what is none with re.escape."
            ) from error


def _matches(rule: Any, path: str) -> bool:
    return bool(re.fullmatch(rule.module_path, path)) and (not rule.op_names or "ragged_dot" in rule.op_names)


def _dtype_name(path: str, field: str, qtype: Any) -> str | None:
    """Return the name of a dtype of a rule."""
    if qtype is None or isinstance(qtype, str):
        return qtype
    return check.dtype(f"apply_rules: the rule of {path!r}", field, qtype, "a dtype such as 'int8', or None").name


def _check_rule(path: str, rule: Any, rngs: nnx.Rngs | None) -> None:
    """Check that experts support a rule."""
    if rule is None:
        return
    weight, tokens = (_dtype_name(path, field, getattr(rule, field)) for field in ("weight_qtype", "act_qtype"))
    if (weight, rule.tile_size) not in {*_RULES, (None, None)}:
        known = ", ".join(f"{qtype} with tile_size={tile}" for qtype, tile in _RULES)
        raise ValueError(
            f"apply_rules: the rule of {path!r} has weight_qtype={weight}, tile_size={rule.tile_size}, expected one of"
            f" {known}; {_SEPARATE}."
        )
    for name in _FIXED:
        default = getattr(type(rule), name, None)
        if (value := getattr(rule, name, default)) not in (default, "absmax", False):
            expected = "the default" if callable(default) else repr(default)
            raise ValueError(
                f"apply_rules: the rule of {path!r} has {name}={shown(value)}, expected {expected}; {_SEPARATE}."
            )
    if tokens not in (None, {None: None, "int8": _WITH_INT8}.get(weight, _WITH_OTHERS)):
        raise ValueError(
            f"apply_rules: the rule of {path!r} has act_qtype={shown(tokens)} with weight_qtype={weight}, expected"
            f" None, or {_WITH_INT8!r} with int8 and {_WITH_OTHERS!r} with other weights; {_SEPARATE}."
        )
    if weight is not None and hasattr(rule, "bwd_qtype"):
        raise ValueError(
            f"apply_rules: the rule of {path!r} is {type_name(rule)} for quantized training, expected a"
            " qwix.QuantizationRule for inference or a qwix.LoraRule; to train experts quantized, give them a rule"
            " without weight_qtype before others, and construct the MoE with recipe='fp8'."
        )
    if hasattr(rule, "rank"):
        check.integer("apply_rules", "rank", rule.rank)
        check.finite("apply_rules", "alpha", rule.alpha)
        if rngs is None:
            raise ValueError("apply_rules: rngs=None with a LoraRule, expected an nnx.Rngs for adapters; pass one.")


def _apply(layer: MoE, rule: Any, rngs: nnx.Rngs | None) -> None:
    """Change a layer by a checked rule."""
    weight, tokens = (_dtype_name("", "", qtype) for qtype in (rule.weight_qtype, rule.act_qtype))
    if weight is not None:
        served = layer.to_serving(_RULES[weight, rule.tile_size], activations=_TOKENS[tokens])
        for name in _SERVED:
            setattr(layer, name, getattr(served, name))
    if hasattr(rule, "rank") and rngs is not None:
        layer.add_lora(rule.rank, scale=rule.alpha / rule.rank, rngs=rngs)


@errors_begin_with("from_qarray")
def from_qarray(w: Any) -> QuantizedWeights:
    """Return a `qwix.QArray` of expert weights as `QuantizedWeights`, with the same values bit for bit.

    Layers and GEMMs take a QArray, too, and convert it in each call, which copies its values. For many calls, as in
    decoding, convert it once.

    Args:
      w: QArray that stands for `[..., E, K, N]`: int8 or float8_e4m3fn with scales that K does not split, float8_e4m3fn
        with one scale for 128 by 128, int4 with scales for even tiles of K, or "mxfp4" with tiles of 32. Other axes of
        the scale may have size 1.

    Returns:
      Weights in the format "int8", "fp8_channel", "fp8", "int4" or "mxfp4", whose tokens keep their dtype. For tokens
      in 8 bits, replace `activations` by `dataclasses.replace`.

    Raises:
      ValueError: a zero point, or scales for other tiles.
      TypeError: not a QArray, or one of another dtype.

    Example:
      >>> import jax.numpy as jnp, qwix
      >>> from jax_ep.integrations.qwix import from_qarray
      >>> w = from_qarray(qwix.quantize(jnp.ones((2, 4, 6)), jnp.int8, channelwise_axes=(0, 2)))
      >>> w.format, w.shape, w.values.shape, w.scales.shape
      ('int8', (2, 4, 6), (2, 6, 4), (2, 6))
    """
    if not isinstance(w, QArray):
        raise TypeError(
            f"from_qarray: w is {type_name(w)}, expected a qwix.QArray; pass qwix.quantize(...) of weights."
        )
    return qarrays.from_qarray("from_qarray", "w", w)


@errors_begin_with("to_qarray")
def to_qarray(w: QuantizedWeights) -> Any:
    """Return `QuantizedWeights` as a `qwix.QArray`, with the same values bit for bit.

    Args:
      w: weights that stand for `[..., E, K, N]`, with a format.

    Returns:
      `qwix.QArray` with a `qvalue [..., E, K, N]` and a float32 scale, which does not record `activations`.

    Raises:
      ValueError: no format, weights for training, or with `smooth`; in "fp8", N is not whole scale blocks.
      TypeError: not `QuantizedWeights`.

    Example:
      >>> import jax.numpy as jnp, jax_ep, qwix
      >>> from jax_ep.integrations.qwix import to_qarray
      >>> w = to_qarray(jax_ep.quantize(jnp.ones((2, 128, 6)), "int4"))
      >>> w.qvalue.dtype.name, w.shape, w.scale.shape, qwix.dequantize(w)[0, 0, 0].item()
      ('int4', (2, 128, 6), (2, 1, 6), 1.0)
    """
    import qwix

    check.instance("to_qarray", "w", w, QuantizedWeights, "QuantizedWeights")
    blocks = w.format == "fp8" and w.shape[-1] % GROUP_SIZE
    if w.format is None or w.master is not None or w.smooth is not None or blocks:
        raise ValueError(
            f"to_qarray: w is {w.format!r} of {w.shape}, expected weights with a format, in 'fp8' with N a multiple of"
            " 128, without master and smooth; convert qwix.quantize(jax_ep.dequantize(w, ...), ...)."
        )
    return qwix.QArray(**qarrays.to_qarray(with_layout(w, "transposed")))
