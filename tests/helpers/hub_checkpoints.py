"""Tiny checkpoints with the names of published ones, and their parameters assembled by NumPy."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from cases import BF16, F32, assert_same_bits
from jax_ep import Router
from jax_ep.checkpoints import Checkpoint
from jax_ep.core.router import SharedExperts

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
Layers = dict[int, dict[str, np.ndarray]]

EXPERTS, HIDDEN, WIDTH, NUM_LAYERS = 8, 12, 10, 4


@dataclasses.dataclass(frozen=True)
class Hub:
    """One family: its config, which of four layers are MoE, the resulting options, and its tensors' names.

    `gate`, `up` and `down` are one tensor per expert, [out, in]; with `fused`, `gate` is [E, in, out] of both, and
    `down` [E, in, out]. `shared` is the width of the shared experts.
    """

    config: Mapping[str, Any]
    layers: tuple[int, ...]
    options: Mapping[str, Any]
    router: str
    gate: str
    up: str
    down: str
    experts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prefix: str = "model.layers.{}."
    fused: bool = False
    selection_bias: str | None = None
    biases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shared: int = 0
    shared_prefix: str = ""
    shared_gate: str | None = None


MLP = {f"{name}": f"mlp.experts.{{}}.{name}_proj.weight" for name in ("gate", "up", "down")}
SPARSE = {n: f"block_sparse_moe.experts.{{}}.{w}.weight" for n, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))}
SIZES = {"hidden_size": HIDDEN, "num_hidden_layers": NUM_LAYERS, "num_experts_per_tok": 2, "hidden_act": "silu"}
SMALL = SIZES | {"moe_intermediate_size": WIDTH, "intermediate_size": 99}
LOCAL = SIZES | {"intermediate_size": WIDTH, "num_local_experts": EXPERTS}
SOFTMAX = {"router": Router()}
NOT_RENORMALIZED = {"router": Router(renormalize=False)}
V3_ROUTER = Router("sigmoid", num_groups=4, topk_groups=2, scale=2.5, selection_bias=True)
DEEPSEEK_V3 = {"router": V3_ROUTER, "shared_experts": SharedExperts()}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_routed_experts": EXPERTS}
GATE = {"router": "mlp.gate.weight", **MLP}
BLOCK_SPARSE = {"router": "block_sparse_moe.gate.weight", **SPARSE}
ALL, SHARED = (0, 1, 2, 3), {"shared_prefix": "mlp.shared_experts."}
BIASED = GATE | SHARED | {"selection_bias": "mlp.gate.e_score_correction_bias"}
LLAMA4 = Hub(
    LOCAL | {"model_type": "llama4_text", "num_experts_per_tok": 1, "intermediate_size_mlp": 99}
    | {"interleave_moe_layer_step": 2},
    (1, 3),
    {"router": Router("sigmoid", renormalize=False), "shared_experts": SharedExperts(), "num_experts_per_tok": 1},
    experts={"weight_on": "input"}, router="feed_forward.router.weight", gate="feed_forward.experts.gate_up_proj",
    up="", down="feed_forward.experts.down_proj", fused=True, shared=WIDTH,
    shared_prefix="feed_forward.shared_expert.",
)  # fmt: skip
GPT_OSS_BIASES = {f"b_{name}": f"mlp.experts.{name}_proj_bias" for name in ("gate_up", "down")}
# Config, MoE layers, options, names of tensors.
HUB = {
    "mixtral": Hub(LOCAL | {"model_type": "mixtral"}, ALL, SOFTMAX, **BLOCK_SPARSE),
    "qwen2_moe": Hub(
        SMALL | {"model_type": "qwen2_moe", "num_experts": EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": False}
        | {"shared_expert_intermediate_size": 14},
        (0, 2, 3),
        NOT_RENORMALIZED | {"shared_experts": SharedExperts(intermediate_size=14, gate=True)},
        **GATE, shared=14, shared_prefix="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate.weight",
    ),
    "qwen3_moe": Hub(
        SMALL | {"model_type": "qwen3_moe", "num_experts": EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 2}
        | {"mlp_only_layers": []},
        (1, 3), SOFTMAX, **GATE,
    ),
    "olmoe": Hub(
        SIZES | {"model_type": "olmoe", "num_experts": EXPERTS, "intermediate_size": WIDTH, "norm_topk_prob": False},
        ALL, NOT_RENORMALIZED, **GATE,
    ),
    "deepseek_v2": Hub(
        SMALL | GROUPS | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "scoring_func": "softmax"}
        | {"first_k_dense_replace": 1, "n_shared_experts": 2, "norm_topk_prob": False, "moe_layer_freq": 1},
        (1, 2, 3),
        {"router": Router(renormalize=False, num_groups=4, topk_groups=2, group_score="max", scale=2.5)}
        | {"shared_experts": SharedExperts(2)},
        **GATE, **SHARED, shared=2 * WIDTH,
    ),
    **{
        name: Hub(
            SMALL | GROUPS | {"model_type": name, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
            | {"norm_topk_prob": True, "first_k_dense_replace": 3, "n_shared_experts": 1, "moe_layer_freq": 1},
            (3,), DEEPSEEK_V3, **BIASED, shared=WIDTH,
        )
        for name in ("deepseek_v3", "kimi_k2")
    },
    "glm4_moe": Hub(
        SMALL | GROUPS | {"model_type": "glm4_moe", "norm_topk_prob": True, "first_k_dense_replace": 1}
        | {"n_shared_experts": 1},
        (1, 2, 3), DEEPSEEK_V3, **BIASED, shared=WIDTH,
    ),
    "minimax_m2": Hub(
        LOCAL | {"model_type": "minimax_m2", "scoring_func": "sigmoid", "use_routing_bias": True},
        ALL, {"router": Router("sigmoid", selection_bias=True)},
        **BLOCK_SPARSE, selection_bias="block_sparse_moe.e_score_correction_bias",
    ),
    "ernie4_5_moe": Hub(
        {name: value for name, value in SMALL.items() if name != "num_experts_per_tok"}
        | {"model_type": "ernie4_5_moe", "moe_num_experts": EXPERTS, "moe_k": 2, "moe_num_shared_experts": 2}
        | {"moe_layer_start_index": 1, "moe_layer_end_index": 2, "moe_layer_interval": 1, "use_bias": False},
        (1, 2), {"router": Router(selection_bias=True), "shared_experts": SharedExperts(2)},
        **GATE, **SHARED, selection_bias="mlp.moe_statics.e_score_correction_bias", shared=2 * WIDTH,
    ),
    "gpt_oss": Hub(
        LOCAL | {"model_type": "gpt_oss", "swiglu_limit": 7.0},
        ALL, {"use_bias": True, "router": Router(logit_bias=True)}, "mlp.router.weight",
        gate="mlp.experts.gate_up_proj", up="", down="mlp.experts.down_proj", fused=True,
        experts={"interleaved": True, "alpha": 1.702, "clamp": 7.0, "up_offset": 1.0},
        biases={"b_router": "mlp.router.bias"} | GPT_OSS_BIASES,
    ),
    "llama4_text": LLAMA4,
    "llama4": dataclasses.replace(
        LLAMA4, config={"model_type": "llama4", "text_config": LLAMA4.config}, prefix="language_model.model.layers.{}."
    ),
    "phimoe": Hub(
        LOCAL | {"model_type": "phimoe", "router_jitter_noise": 0.01}, ALL, {"router": Router("sparsemixer")},
        **BLOCK_SPARSE,
    ),
    "longcat_flash": Hub(
        {"model_type": "longcat_flash", "hidden_size": HIDDEN, "num_layers": NUM_LAYERS, "moe_topk": 2}
        | {"expert_ffn_hidden_size": WIDTH, "ffn_hidden_size": 99, "n_routed_experts": EXPERTS, "zero_expert_num": 0}
        | {"routed_scaling_factor": 6.0},
        ALL, {"router": Router(renormalize=False, scale=6.0, selection_bias=True)},
        **GATE | {"router": "mlp.router.classifier.weight"}, selection_bias="mlp.router.e_score_correction_bias",
    ),
}  # fmt: skip

NO_LAYERS = {**HUB["mixtral"].config, "num_hidden_layers": 0}  # For checkpoints of other tensors alone.


def layer(hub, number, rng, dtype=F32):
    """Return the stored tensors of a layer, and its expected parameters."""
    prefix = hub.prefix.format(number)
    stored = {}

    def tensor(name, *shape):
        stored[prefix + name] = rng.standard_normal(shape).astype(dtype)
        return stored[prefix + name]

    want = {"router": tensor(hub.router, EXPERTS, HIDDEN).T.astype(F32)}
    if hub.fused:
        want["w_gate_up"] = tensor(hub.gate, EXPERTS, HIDDEN, 2 * WIDTH)
        want["w_down"] = tensor(hub.down, EXPERTS, WIDTH, HIDDEN)
    else:
        gates = [tensor(hub.gate.format(e), WIDTH, HIDDEN).T for e in range(EXPERTS)]
        ups = [tensor(hub.up.format(e), WIDTH, HIDDEN).T for e in range(EXPERTS)]
        want["w_gate_up"] = np.concatenate([np.stack(gates), np.stack(ups)], axis=-1)
        want["w_down"] = np.stack([tensor(hub.down.format(e), HIDDEN, WIDTH).T for e in range(EXPERTS)])
    sizes = {"b_router": (EXPERTS,), "b_gate_up": (EXPERTS, 2 * WIDTH), "b_down": (EXPERTS, HIDDEN)}
    for parameter, name in hub.biases.items():
        bias = tensor(name, *sizes[parameter])
        want[parameter] = bias.astype(F32) if parameter == "b_router" else bias
    if hub.selection_bias:
        leading = (1,) if "moe_statics" in hub.selection_bias else ()
        want["router_bias"] = tensor(hub.selection_bias, *leading, EXPERTS).reshape(-1).astype(F32)
    if hub.shared:
        halves = [tensor(f"{hub.shared_prefix}{name}_proj.weight", hub.shared, HIDDEN).T for name in ("gate", "up")]
        want["shared_gate_up"] = np.concatenate(halves, axis=-1)
        want["shared_down"] = tensor(f"{hub.shared_prefix}down_proj.weight", HIDDEN, hub.shared).T
    if hub.shared_gate:
        want["shared_gate"] = tensor(hub.shared_gate, 1, HIDDEN).T
    return stored, want


def write(folder, config, *files):
    """Write a checkpoint of one file, or of several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    if len(files) == 1:
        save_file(_dense(files[0]), folder / "model.safetensors")
        return folder
    weight_map = {}
    for i, tensors in enumerate(files, 1):
        name = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        save_file(_dense(tensors), folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _dense(tensors):
    return {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in tensors.items()}


def written(name, folder, rng, dtype=F32, **more):
    """Write a checkpoint in two files, with the layers split over both; return the parameters of its layers."""
    hub = HUB[name]
    files = [{"other": np.arange(6, dtype=dtype).reshape(2, 3)}, {}]
    want = {}
    for number in hub.layers:
        tensors, want[number] = layer(hub, number, rng, dtype)
        for i, (tensor, value) in enumerate(tensors.items()):
            files[i % 2][tensor] = value
    return Checkpoint(write(folder, dict(hub.config) | more, *files)), want


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert_same_bits(np.asarray(got[name]), value, name)


def fp8_checkpoint(folder, rng, hidden=256, width=384, scale_dtype=F32):
    """Write DeepSeek-V3 with two experts in block-wise FP8; return stored pairs [E, N, K] by parameter."""
    sizes = {"hidden_size": hidden, "moe_intermediate_size": width, "n_routed_experts": 2, "n_group": 1}
    config = HUB["deepseek_v3"].config | sizes | {"topk_group": 1, "quantization_config": FP8_CONFIG}
    prefix = "model.layers.3.mlp."
    tensors = {f"{prefix}gate.weight": rng.standard_normal((2, hidden)).astype(BF16)}
    tensors[f"{prefix}gate.e_score_correction_bias"] = rng.standard_normal(2).astype(F32)
    pairs = {}
    for block in ("experts.0", "experts.1", "shared_experts"):
        for name, rows, columns in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
            tensor = f"{prefix}{block}.{name}_proj.weight"
            values = rng.standard_normal((rows, columns)).astype(FP8)
            scales = rng.uniform(0.5, 2, (-(-rows // 128), -(-columns // 128))).astype(scale_dtype)
            tensors |= {tensor: values, f"{tensor}_scale_inv": scales}
            pairs[f"{block}.{name}"] = values, scales
    return Checkpoint(write(folder, config, tensors)), pairs


def in_int32(codes, bits=4, order=None):
    """Pack codes of the last axis in int32: the lowest bits have the first one, or that of `order`."""
    per = 32 // bits
    words = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, per)[..., order or list(range(per))]
    return (words << np.arange(0, 32, bits, dtype=np.uint32)).sum(-1, dtype=np.uint32).view(np.int32)


def packed_config(kind, size):
    """Return the `quantization_config` that compressed-tensors, or ModelOpt, writes."""
    if kind == "modelopt":
        weights = {"num_bits": 4, "type": "float", "group_size": size, "dynamic": False}
        return {"quant_method": kind, "quant_algo": "NVFP4", "config_groups": {"group_0": {"weights": weights}}}
    weights = {"num_bits": 4, "type": "float" if kind == "nvfp4" else "int", "symmetric": kind != "asymmetric"}
    weights |= {"group_size": size, "strategy": "group", "actorder": None, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
