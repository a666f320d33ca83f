"""Writes golden_blocks.npz: small MoE blocks of Hugging Face's transformers, with outputs and gradients.

Run by a person, in an environment with torch and transformers, when a family is added; `tests/test_models.py` reads
the file. Per family `<family>/`:

    x [T, H], dy [T, H]    tokens, and the cotangent of the output
    y [T, H], dx [T, H]    what the block makes of them, in float32 and evaluation mode
    state/<name>           the block's parameters and buffers by their names in its state_dict, and in their layouts
    grad/<name>            gradients of the parameters

`phimoe_training/` has draws of Phi-3.5-MoE's router in training mode: logits, dw, topk_idx, topk_weights, dlogits.
`families` is JSON: of each family the class of its block, and the configuration.
"""

import importlib
import json
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers

FILE = Path(__file__).with_name("golden_blocks.npz")
T, H, I, E = 7, 16, 6, 8  # noqa: E741

# family: module of transformers, block, configuration, and what the configuration says. Values are chosen so that
# every part of a router acts: few groups, factors other than 1.
FAMILIES = {
    "mixtral": (
        *("mixtral", "MixtralSparseMoeBlock", "MixtralConfig"),
        {"intermediate_size": I, "num_local_experts": E, "num_experts_per_tok": 2},
    ),
    "qwen2_moe": (
        *("qwen2_moe", "Qwen2MoeSparseMoeBlock", "Qwen2MoeConfig"),
        {"moe_intermediate_size": I, "num_experts": E, "num_experts_per_tok": 4, "norm_topk_prob": False}
        | {"shared_expert_intermediate_size": 10},
    ),
    "qwen3_moe": (
        *("qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig"),
        {"moe_intermediate_size": I, "num_experts": E, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "qwen3_moe_unnormalised": (
        *("qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig"),
        {"moe_intermediate_size": I, "num_experts": E, "num_experts_per_tok": 3, "norm_topk_prob": False},
    ),
    "olmoe": (
        *("olmoe", "OlmoeSparseMoeBlock", "OlmoeConfig"),
        {"intermediate_size": I, "num_experts": E, "num_experts_per_tok": 3, "norm_topk_prob": False},
    ),
    "deepseek_v2": (
        *("deepseek_v2", "DeepseekV2Moe", "DeepseekV2Config"),
        {"moe_intermediate_size": I, "n_routed_experts": E, "num_experts_per_tok": 3, "n_shared_experts": 2}
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 4.0},
    ),
    "deepseek_v3": (
        *("deepseek_v3", "DeepseekV3MoE", "DeepseekV3Config"),
        {"moe_intermediate_size": I, "n_routed_experts": E, "num_experts_per_tok": 3, "n_shared_experts": 1}
        | {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    ),
    "glm4_moe": (
        *("glm4_moe", "Glm4MoeMoE", "Glm4MoeConfig"),
        {"moe_intermediate_size": I, "n_routed_experts": E, "num_experts_per_tok": 3, "n_shared_experts": 1}
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
    ),
    "minimax_m2": (
        *("minimax_m2", "MiniMaxM2SparseMoeBlock", "MiniMaxM2Config"),
        {"intermediate_size": I, "num_local_experts": E, "num_experts_per_tok": 3},
    ),
    "ernie4_5_moe": (
        *("ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock", "Ernie4_5_MoeConfig"),
        {"moe_intermediate_size": I, "moe_num_experts": E, "moe_k": 3, "moe_num_shared_experts": 2},
    ),
    "gpt_oss": (
        *("gpt_oss", "GptOssMLP", "GptOssConfig"),
        {"intermediate_size": I, "num_local_experts": E, "num_experts_per_tok": 3},
    ),
    "llama4": (
        *("llama4", "Llama4TextMoe", "Llama4TextConfig"),
        {"intermediate_size": I, "num_local_experts": E, "num_experts_per_tok": 2},
    ),
    "phimoe": (  # 0.01 would leave one expert in nearly every round, and no gradient of the router
        *("phimoe", "PhimoeSparseMoeBlock", "PhimoeConfig"),
        {"intermediate_size": I, "num_local_experts": E, "num_experts_per_tok": 2, "router_jitter_noise": 0.25},
    ),
    "longcat_flash": (
        *("longcat_flash", "LongcatFlashMoE", "LongcatFlashConfig"),
        {"expert_ffn_hidden_size": I, "n_routed_experts": E, "moe_topk": 4, "zero_expert_num": 4}
        | {"routed_scaling_factor": 6.0},
    ),
}
# Standard deviations of products where not 1: gpt-oss clamps at 7.
GAIN = {"gpt_oss": 6.0}


def random(rng, *shape, scale=1.0):
    """Draw normal numbers with few bits, which halve the compressed file."""
    return torch.tensor(rng.normal(scale=scale, size=shape), dtype=torch.bfloat16).float()


def make_block(family):
    """The block with random weights, in evaluation mode."""
    module, block, configuration, options = FAMILIES[family]
    package = f"transformers.models.{module}"
    make_config = getattr(importlib.import_module(f"{package}.configuration_{module}"), configuration)
    config = make_config(hidden_size=H, num_attention_heads=2, num_key_value_heads=2, **options)
    config._experts_implementation = "eager"
    made = getattr(importlib.import_module(f"{package}.modeling_{module}"), block)(config).eval()
    rng = np.random.default_rng(zlib.crc32(family.encode()))
    with torch.no_grad():
        for name, value in made.state_dict().items():
            value.copy_(random(rng, *value.shape, scale=standard_deviation(family, name)))
    return made, {"block": block, "model_type": config.model_type, "hidden_size": H, **options}


def standard_deviation(family, name):
    """Of a parameter or buffer, such that logits and products have about 1 (biased scores a tenth)."""
    if "correction_bias" in name:
        return 0.1
    if name.endswith("bias"):
        return 0.5
    if "experts." in name and "shared" not in name:
        inputs = I if "down_proj" in name else H
        return (GAIN.get(family, 1.0) if "gate_up" in name else 1.0) / inputs**0.5
    return 1.5 / H**0.5


def forward(block, x):
    """Some blocks also return what their router decided."""
    y = block(x[None])
    return (y[0] if isinstance(y, tuple) else y).reshape(x.shape)


def run(family):
    """All arrays of a family, and its description."""
    block, description = make_block(family)
    rng = np.random.default_rng(zlib.crc32(family.encode()) + 1)
    x, dy = random(rng, T, H).requires_grad_(), random(rng, T, H)
    y = forward(block, x)
    y.backward(dy)
    arrays = {"x": x, "dy": dy, "y": y, "dx": x.grad}
    arrays |= {f"state/{name}": value for name, value in block.state_dict().items()}
    for name, parameter in block.named_parameters():
        if parameter.requires_grad:
            arrays[f"grad/{name}"] = parameter.grad
    check(family, block, x, y, arrays)
    return arrays, description


def check(family, block, x, y, arrays):
    """That each part of the block matters to what is written, or the file would show nothing about it."""
    still = [name for name, value in arrays.items() if not value.any()]
    if still:
        raise ValueError(f"{family}: {still} are zero; choose other inputs.")
    for name, value in block.state_dict().items():
        if "correction_bias" in name:
            kept = value.clone()
            value.zero_()
            if torch.equal(forward(block, x), y):
                raise ValueError(f"{family}: without {name} the output is the same; make it larger.")
            value.copy_(kept)
    if family == "gpt_oss":
        experts = block.experts
        products = torch.einsum("th,ehf->tef", x, experts.gate_up_proj) + experts.gate_up_proj_bias
        gate, up, limit = products[..., ::2], products[..., 1::2], experts.limit
        shares = [(gate > limit).float().mean(), (up > limit).float().mean(), (up < -limit).float().mean()]
        if not all(0.05 < share < 0.5 for share in shares):
            raise ValueError(f"{family}: {shares} of the values are clamped; change GAIN.")


def run_training_router():
    """Draws of Phi-3.5-MoE's router: many tokens, so that each outcome of a round is among them."""
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    logits, dw = random(rng, 64, E).requires_grad_(), random(rng, 64, 2)
    topk_weights, topk_idx = sparsemixer(logits, jitter_eps=0.25, training=True)
    topk_weights.backward(dw)
    arrays = {"logits": logits, "dw": dw, "topk_idx": topk_idx.int(), "topk_weights": topk_weights}
    return arrays | {"dlogits": logits.grad}


def main():
    """Writes the file."""
    written, families = {}, {}
    for family in FAMILIES:
        arrays, families[family] = run(family)
        written |= {f"{family}/{name}": value.detach().numpy() for name, value in arrays.items()}
    written |= {f"phimoe_training/{name}": value.detach().numpy() for name, value in run_training_router().items()}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    written["families"] = np.array(json.dumps({"versions": versions, "families": families}))
    np.savez_compressed(FILE, **written)
    print(f"{FILE.name}: {len(families)} families, {FILE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
