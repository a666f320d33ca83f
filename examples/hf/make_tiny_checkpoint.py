"""Write a small checkpoint of random weights in the Hugging Face format of a family, to try serve_hf_moe.py.

    python examples/hf/make_tiny_checkpoint.py qwen3_moe runs/tiny_qwen3_moe

The generated text is meaningless, but the same family and seed give the same weights and thus the same text. Needs
NumPy, safetensors and tokenizers.
"""

from __future__ import annotations

import argparse
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file

from jax_ep.tools.command import Parser, count_or_zero, run

_STOP = "<|endoftext|>"
_VOCAB = 257  # Bytes and the stop token.
READABLE = 95  # The printable ones, which have the first ids.
_COMMON = {
    "vocab_size": _VOCAB,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "eos_token_id": _VOCAB - 1,
    "dtype": "float32",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 3,
        "mlp_only_layers": [0],
        "head_dim": 48,
        "intermediate_size": 160,
        "moe_intermediate_size": 96,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_hidden_layers": 2,
        "intermediate_size": 192,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "sliding_window": 12,
        "tie_word_embeddings": False,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 96,  # Not a multiple of 128, as in published checkpoints.
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "head_dim": 32,
        "intermediate_size": 96,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1.5e5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
        "tie_word_embeddings": False,
    },
}


def config_of(family: str) -> dict[str, Any]:
    """Return the config.json of a family's tiny model."""
    return {"model_type": family} | _COMMON | CONFIGS[family]


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of the tensors, as in the family's published checkpoints."""
    hidden, family = config["hidden_size"], config["model_type"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer, attention = f"model.layers.{index}.", f"model.layers.{index}.self_attn."
        sizes = {"q": (heads, hidden), "k": (kv_heads, hidden), "v": (kv_heads, hidden)}
        for name, (count, inputs) in sizes.items():
            yield f"{attention}{name}_proj.weight", (count * head_dim, inputs)
        yield f"{attention}o_proj.weight", (hidden, heads * head_dim)
        if family == "gpt_oss":
            for name, (count, _) in sizes.items():
                yield f"{attention}{name}_proj.bias", (count * head_dim,)
            yield f"{attention}o_proj.bias", (hidden,)
            yield f"{attention}sinks", (heads,)
        if family == "qwen3_moe":
            yield f"{attention}q_norm.weight", (head_dim,)
            yield f"{attention}k_norm.weight", (head_dim,)
        yield f"{layer}input_layernorm.weight", (hidden,)
        yield f"{layer}post_attention_layernorm.weight", (hidden,)
        yield from _mlp_shapes(config, index)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _mlp_shapes(config: dict[str, Any], index: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of a layer's experts and router, or of its dense layer."""
    hidden, inner, layer = config["hidden_size"], config["intermediate_size"], f"model.layers.{index}."
    if config["model_type"] == "gpt_oss":
        experts = config["num_local_experts"]
        yield f"{layer}mlp.router.weight", (experts, hidden)
        yield f"{layer}mlp.router.bias", (experts,)
        yield f"{layer}mlp.experts.gate_up_proj", (experts, hidden, 2 * inner)
        yield f"{layer}mlp.experts.gate_up_proj_bias", (experts, 2 * inner)
        yield f"{layer}mlp.experts.down_proj", (experts, inner, hidden)
        yield f"{layer}mlp.experts.down_proj_bias", (experts, hidden)
        return
    if config["model_type"] == "mixtral":
        block, experts, names = f"{layer}block_sparse_moe.", config["num_local_experts"], ("w1", "w3", "w2")
    elif index in config["mlp_only_layers"]:
        block, experts, names = f"{layer}mlp.", 0, ("gate_proj", "up_proj", "down_proj")
    else:
        block, experts, names = f"{layer}mlp.", config["num_experts"], ("gate_proj", "up_proj", "down_proj")
        inner = config["moe_intermediate_size"]
    gate, up, down = names
    if experts:
        yield f"{block}gate.weight", (experts, hidden)
    for each in [f"{block}experts.{expert}." for expert in range(experts)] or [block]:
        yield f"{each}{gate}.weight", (inner, hidden)
        yield f"{each}{up}.weight", (inner, hidden)
        yield f"{each}{down}.weight", (hidden, inner)


def weights(family: str, seed: int) -> dict[str, np.ndarray]:
    """Create random float32 weights that depend only on family, seed and tensor name."""
    made = {}
    for name, shape in shapes(config_of(family)):
        rng = np.random.Generator(np.random.PCG64([seed, zlib.crc32(f"{family}/{name}".encode())]))
        made[name] = _random(rng, name, shape)
    return made


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw uniform numbers, scaled so that every part of the model affects its greedy tokens."""
    values = rng.uniform(-1.0, 1.0, shape)
    if "norm" in name:
        values = 1 + 0.3 * values
    elif name in ("model.embed_tokens.weight", "lm_head.weight"):
        values[READABLE:] *= 0.1  # Makes other outputs unlikely, so that the text is readable.
        # Small compared with the output of the layers: a tied head would otherwise repeat the last token.
        values *= 0.1 if "embed" in name else 1.0
    elif "bias" not in name and "sinks" not in name:
        decisive = re.search(r"q_proj|k_proj|router|gate\.weight", name)
        fan_in = shape[1] if name.endswith("weight") else shape[-2]
        values *= (3.0 if decisive else 1.0) * (3 / fan_in) ** 0.5
    return values.astype(np.float32)


def tokenizer() -> tokenizers.Tokenizer:
    """Create a tokenizer with one token per byte, and a stop token."""
    # Characters that stand for bytes: ASCII stands for itself, U+0120 for the space.
    alphabet = sorted(
        tokenizers.pre_tokenizers.ByteLevel.alphabet(), key=lambda char: (char > "~" and char != "Ġ", char)
    )
    made = tokenizers.Tokenizer(tokenizers.models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([_STOP])
    return made


def make(family: str, folder: Path, seed: int = 0) -> None:
    """Write config.json, model.safetensors and tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(family), indent=2) + "\n")
    save_file(weights(family, seed), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer().save(str(folder / "tokenizer.json"))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=sorted(CONFIGS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=count_or_zero, default=0)
    args = parser.parse_args(arguments)
    if (args.folder / "config.json").exists():
        parser.error(f"{args.folder} has a checkpoint already: pass another folder")
    make(args.family, args.folder, args.seed)
    print(f"wrote a tiny {args.family} to {args.folder}")


if __name__ == "__main__":
    run("make_tiny_checkpoint.py", main)
