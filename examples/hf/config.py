"""Decoder configuration from config.json of a Hugging Face checkpoint, without the experts."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from jax_ep.core import json_files
from jax_ep.core.json_files import BOOLEAN, OBJECT, TEXT, array, integer, number, optional, record

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss")
_SIZE, _FACTOR = integer(1, 1 << 30), number(1e-30, 1e12)
_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "rope_theta")
_ROPE = record(dict.fromkeys(_YARN, optional(_FACTOR)), more=True, fewer=_YARN)
_SIZES = ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers")
_REQUIRED = dict.fromkeys((*_SIZES, "max_position_embeddings"), _SIZE) | {"rms_norm_eps": _FACTOR}
_OPTIONAL = {
    **dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window"), optional(_SIZE)),
    **dict.fromkeys(("attention_bias", "tie_word_embeddings", "use_sliding_window"), optional(BOOLEAN)),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), optional(_ROPE)),
    "layer_types": optional(array(TEXT)),
    "rope_theta": optional(_FACTOR),
    "router_aux_loss_coef": number(0, 1e12),
}
_CONFIG = record(_REQUIRED | _OPTIONAL, more=True, fewer=_OPTIONAL)
_TOKENS = array(integer(0, 1 << 30))


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions: angles per position of each channel pair, and a factor for their cosines and sines.

    Attributes:
      frequencies: `head_dim // 2` angles, in radians per position.
      scale: factor for cosines and sines, YaRN's attention factor; 1 without YaRN.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a decoder; static and hashable.

    Attributes:
      vocab_size, hidden_size, num_heads, num_kv_heads, head_dim: sizes of the embedding and of attention.
      mlp_size: width of the dense layers.
      norm_eps: added to mean squares.
      windows: for each layer, how many positions a query sees, including its own; None: all positions up to it.
      rope: rotary positions.
      attention_bias: the four projections of attention have biases.
      head_norms: queries and keys pass a norm per head.
      sinks: each head has a logit that takes part in the softmax and adds nothing.
      tied: the output head shares the embedding's weights.
      balance_weight: weight of the load-balancing loss in training.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    norm_eps: float
    windows: tuple[int | None, ...]
    rope: Rope
    attention_bias: bool
    head_norms: bool
    sinks: bool
    tied: bool
    balance_weight: float

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> DecoderConfig:
        """Build the configuration from a parsed config.json of Transformers 4 or 5."""
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ValueError(f"config.json: model_type is {family!r}, but this example supports only {FAMILIES}")
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(
                f"config.json: hidden_act is {config['hidden_act']!r}, but this example supports only 'silu'"
            )
        try:
            _CONFIG(config, "")
        except ValueError as error:
            raise ValueError(f"config.json: {error}") from error
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            mlp_size=config["intermediate_size"],
            norm_eps=config["rms_norm_eps"],
            windows=_windows(config),
            rope=_rope(config, head_dim),
            attention_bias=config.get("attention_bias", family == "gpt_oss"),
            head_norms=family == "qwen3_moe",
            sinks=family == "gpt_oss",
            tied=config.get("tie_word_embeddings", False),
            balance_weight=config.get("router_aux_loss_coef", 0.0),
        )


def stop_tokens(folder: Path) -> tuple[int, ...]:
    """Return the ids that end a text, from generation_config.json if there is one, which may name more."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            try:
                OBJECT(content := json_files.read(folder / name, 1 << 26), "")
                if (stop := content.get("eos_token_id")) is not None:
                    stop = stop if isinstance(stop, list) else [stop]
                    _TOKENS(stop, "eos_token_id")
                    return tuple(stop)
            except ValueError as error:
                raise ValueError(f"{folder / name}: {error}") from error
    return ()


def _windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    """Return for each layer how many positions a query sees."""
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    if config["model_type"] == "qwen3_moe" and not config.get("use_sliding_window", False):
        window = None
    kinds = config.get("layer_types")
    if config["model_type"] == "gpt_oss" and kinds is None:
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    if kinds is None:
        return (window,) * layers
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != layers:
        raise ValueError(
            f"config.json: layer_types has {len(kinds)} entries, {unknown} of them unknown, expected 'full_attention'"
            f" or 'sliding_attention' for each of the {layers} layers"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(config: dict[str, Any], head_dim: int) -> Rope:
    """Read rotary positions; Transformers 5 writes one dictionary where version 4 wrote two entries."""
    given = config.get("rope_parameters") or (config.get("rope_scaling") or {})
    base = given.get("rope_theta") or config.get("rope_theta")
    if base is None:
        raise ValueError("config.json: rope_theta is missing, expected the base of the rotary positions")
    frequencies = base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return Rope(tuple(frequencies.tolist()))
    if kind == "yarn":
        return _yarn(given, frequencies, base, config["max_position_embeddings"])
    raise ValueError(f"config.json: rope_type is {kind!r}, but this example supports only 'default' and 'yarn'")


def _yarn(given: dict[str, Any], frequencies: np.ndarray, base: float, max_positions: int) -> Rope:
    """Apply YaRN: slow channels are stretched by `factor`, fast ones stay, with a ramp between them.

    Source: Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", section 3,
    https://arxiv.org/abs/2309.00071
    """
    trained = given.get("original_max_position_embeddings") or max_positions
    factor = given.get("factor") or max_positions / trained
    pairs = len(frequencies)

    def pair_of(turns: float) -> float:
        """Return the (fractional) pair that rotates `turns` times over the positions of the training."""
        return pairs * math.log(trained / (2 * math.pi * turns)) / math.log(base)

    first, last = pair_of(given.get("beta_fast") or 32), pair_of(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    slowness = np.clip((np.arange(pairs) - first) / max(last - first, 1e-3), 0, 1)
    stretched = frequencies * (1 - slowness) + frequencies / factor * slowness
    return Rope(tuple(stretched.tolist()), _yarn_scale(given, factor))


def _yarn_scale(given: dict[str, Any], factor: float) -> float:
    """Return the attention factor: explicit, or derived from how much the context is stretched."""

    def of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    if given.get("attention_factor") is not None:
        return given["attention_factor"]
    if given.get("mscale") and given.get("mscale_all_dim"):
        return of(given["mscale"]) / of(given["mscale_all_dim"])
    return of(1)
