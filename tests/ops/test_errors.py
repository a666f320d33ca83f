"""Every argument that a caller can get wrong, the exception it raises, and its message."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jax_ep
from mistakes import (
    FLOATING,
    FP8,
    GOOD,
    INNER,
    MAX_T,
    E,
    H,
    K,
    L,
    N,
    R,
    T,
    W,
    array,
    check,
    dispatch_handle,
    dtype,
    f32,
    fp8,
    fp8_weights,
    i32,
    low_latency_handle,
    number,
    positive,
    rank,
    shape,
    size,
    trace,
    value,
)

DISPATCH = ["dispatch", "dispatch_grouped_gemm"]
ROUTED_IN = [*DISPATCH, "moe"]
TOKENS_IN = [*ROUTED_IN, "fused_moe", "low_latency_dispatch", "low_latency_moe"]
WEIGHTS_IN = [*ROUTED_IN, "fused_moe", "low_latency_combine", "low_latency_moe"]
MASKED_IN = ["topk_router", "load_balancing_loss", "router_z_loss"]
PAIRS_IN = ["dispatch", "low_latency_dispatch"]
COMBINE = ["combine", "grouped_gemm_combine"]
DIVISIBLE = "multiple|divi(de|sible)"
NARROW = {"w": f32(L, 200, N), "w_gate_up": f32(L, 200, 2 * INNER), "w_down": f32(L, INNER, 200)}
BESIDE = jax_ep.Schedule(fuse_weight_gradients=True)
HALF_PAIR = (fp8(T, H), f32(T, 3))


@pytest.mark.parametrize("name", GOOD)
def test_errors_valid_arguments(name):
    """The cases below each change one of these arguments, which their exception must name."""
    assert jax.tree.leaves(trace(name))


DISPATCH_CASES = [
    # tokens
    *rank(TOKENS_IN, "x", f32(T), "T", "H"),
    *rank(TOKENS_IN, "x", f32(1, T, H), "T", "H"),
    *dtype(TOKENS_IN, "x", i32(T, H), FLOATING),
    *value(
        TOKENS_IN, "FP8 without scales", {"x": fp8(T, H)}, r"\bx\b", "float8_e4m3fn", "scales|cast", error=TypeError
    ),
    # expert ids
    *rank([*TOKENS_IN, "moe_sort"], "topk_idx", i32(T), "T", "K"),
    *size(TOKENS_IN, "topk_idx", i32(T - 1, K), T - 1, T),
    *dtype([*TOKENS_IN, "moe_sort"], "topk_idx", f32(T, K), "int32"),
    *dtype([*TOKENS_IN, "moe_sort"], "topk_idx", array(jnp.bool_, T, K), "int32"),
    *value([*TOKENS_IN, "moe_sort"], "K = 0", {"topk_idx": i32(T, 0)}, "topk_idx", shape(T, 0), "at least|positive"),
    *value(DISPATCH, "neither ids nor handle", {"topk_idx": None}, "topk_idx", "handle", "pass|give"),
    # weights of the router
    *value(WEIGHTS_IN, "other weights", {"topk_weights": f32(T, 3)}, "topk_weights", shape(T, 3), shape(T, K)),
    *dtype([*WEIGHTS_IN, "moe_sort"], "topk_weights", i32(T, K), "float32"),
    *value(["moe", "fused_moe"], "no weights", {"topk_weights": None}, "topk_weights", "None", error=TypeError),
    # experts
    *value(
        [*ROUTED_IN, "low_latency_dispatch"], "uneven experts", {"num_experts": 10}, number(10), number(W), DIVISIBLE
    ),
    *positive([*ROUTED_IN, "low_latency_dispatch", "moe_sort"], "num_experts"),
    # layout
    *positive(ROUTED_IN, "capacity"),
    *positive(DISPATCH, "alignment"),
    *value(
        DISPATCH, "capacity off the alignment", {"capacity": 100, "alignment": 16}, number(100), number(16), "multiple"
    ),
    # wire
    *value(
        ["low_latency_dispatch", "low_latency_moe", "low_latency_gemm_combine"],
        "FP8 wire of a schedule",
        {"schedule": jax_ep.Schedule(wire_dtype=FP8)},
        *("wire_dtype=float8_e4m3fn", "expected None", "quantize=True"),
    ),
    *value(
        ROUTED_IN,
        "FP8 wire and odd H",
        NARROW | {"x": f32(T, 200), "schedule": jax_ep.Schedule(wire_dtype=FP8)},
        *(number(200), number(128), DIVISIBLE, "unquanti[sz]ed|wire_dtype"),
    ),
    *value(
        "combine",
        "FP8 wire and odd H",
        {"y": f32(R, 200), "schedule": jax_ep.Schedule(wire_dtype=FP8)},
        *(number(200), number(128), DIVISIBLE, "unquanti[sz]ed|wire_dtype"),
    ),
    # FP8 pairs
    *value(
        ["dispatch", "low_latency_dispatch"], "other scales", {"x": HALF_PAIR}, number(3), number(H), "quantize_fp8"
    ),
    *value(
        PAIRS_IN,
        "a pair of float32 values",
        {"x": (f32(T, H), f32(T, 2))},
        *("float32", "float8_e4m3fn", "quantize_fp8"),
        error=TypeError,
    ),
    *value(
        PAIRS_IN,
        "three arrays",
        {"x": (fp8(T, H), f32(T, 2), f32(T, 2))},
        *(r"\bx\b", number(3), r"\(values, scales\)"),
        error=(TypeError, ValueError),
    ),
    # handles
    *value(
        DISPATCH,
        "the handle of more tokens",
        {"topk_idx": None, "topk_weights": None, "handle": dispatch_handle(num_tokens=11)},
        *("handle", number(T), number(11)),
    ),
    *value(
        DISPATCH,
        "the handle of more experts",
        {"topk_idx": None, "handle": dispatch_handle(num_experts=16)},
        *("handle", number(E), number(16)),
    ),
    *value(
        DISPATCH,
        "the handle of a larger K",
        {"topk_idx": None, "handle": dispatch_handle(top_k=3)},
        *("handle|topk_weights", number(K), number(3)),
    ),
    *value(DISPATCH, "a string as handle", {"handle": "layout"}, "handle", "str", "dispatch", error=TypeError),
    *value(COMBINE, "no handle", {"handle": None}, "handle", "None", "dispatch", error=TypeError),
    *value(
        "combine",
        "a low-latency handle",
        {"handle": low_latency_handle()},
        *("handle", "LowLatencyHandle", r"\bdispatch|low_latency_combine"),
        error=TypeError,
    ),
    *value(
        "low_latency_combine",
        "the handle of dispatch",
        {"handle": dispatch_handle()},
        *("handle", "LowLatencyHandle", r"\bdispatch|low_latency_dispatch"),
        error=TypeError,
    ),
]

IN_FP8 = {"lhs": fp8(20, H), "rhs": fp8_weights(3, H, N), "lhs_scales": f32(20, 2)}
FP8_GEMM_CASES = [
    *value(
        "grouped_gemm",
        "another K in FP8",
        IN_FP8 | {"rhs": fp8_weights(3, 128, N)},
        *("rhs", number(128), number(H), r"G, K, N"),
    ),
    *value("grouped_gemm", "FP8 of 7 groups", IN_FP8 | {"group_sizes": i32(7)}, "rhs", number(3), number(7), "pass"),
    *value("grouped_gemm", "FP8 rows of rank 3", IN_FP8 | {"lhs": fp8(1, 20, H)}, "lhs", shape(1, 20, H), "M, K"),
    *value("grouped_gemm", "FP8 matrices of rank 2", IN_FP8 | {"rhs": fp8_weights(H, N)}, "rhs", shape(H, N), "K, N"),
    *value(
        "grouped_gemm",
        "FP8 times float32",
        IN_FP8 | {"rhs": f32(3, H, N)},
        *("rhs", "float8_e4m3fn", "QuantizedWeights", "quantize"),
        error=TypeError,
    ),
    *value(
        "grouped_gemm",
        "no scales of lhs",
        IN_FP8 | {"lhs_scales": None},
        *("lhs_scales", "None", shape(20, 2)),
        error=TypeError,
    ),
    *value(
        "grouped_gemm",
        "no scales of rhs",
        IN_FP8 | {"rhs": dataclasses.replace(fp8_weights(3, H, N), scales=None)},
        *("rhs.scales", "None", "quantize"),
        error=TypeError,
    ),
    *value(
        "grouped_gemm",
        "scales of float32",
        {"lhs_scales": f32(20, 2)},
        *("lhs_scales", "float32", "None"),
        error=TypeError,
    ),
    *value(
        "grouped_gemm",
        "scales per 64 columns",
        IN_FP8 | {"lhs_scales": f32(20, 4)},
        *("lhs_scales", shape(20, 4), shape(20, 2), number(128)),
    ),
    *value(
        "grouped_gemm",
        "scales per column",
        IN_FP8 | {"rhs": dataclasses.replace(fp8_weights(3, H, N), scales=f32(3, N, 2))},
        *("rhs", shape(3, N, 2), shape(3, N, H), "quantize"),
    ),
]

COMPUTE_CASES = [
    # combine
    *rank("combine", "y", f32(R), "R", "H"),
    *size("combine", "y", f32(R + 3, H), R + 3, R),
    *dtype("combine", "y", i32(R, H), FLOATING),
    # grouped GEMM
    *rank("grouped_gemm", "lhs", f32(1, 20, H), "M", "K"),
    *rank("grouped_gemm", "rhs", f32(H, N), "G", "K", "N"),
    *rank("grouped_gemm", "group_sizes", i32(3, 1), "G"),
    *size("grouped_gemm", "rhs", f32(3, 250, N), 250, H),
    *size("grouped_gemm", "group_sizes", i32(7), 7, 3),
    *dtype("grouped_gemm", "group_sizes", f32(3), "int32"),
    *dtype("grouped_gemm", "lhs", i32(20, H), FLOATING),
    *dtype("grouped_gemm", "rhs", array(jnp.bfloat16, 3, H, N), "float32"),
    *value(
        "grouped_gemm",
        "an integer result",
        {"preferred_element_type": jnp.int32},
        *("preferred_element_type", "int32", FLOATING),
        error=TypeError,
    ),
    # fused dispatch and combine
    *rank("dispatch_grouped_gemm", "w", f32(H, N), "L", "H", "N"),
    *size("dispatch_grouped_gemm", "w", f32(E, H, N), E, L),
    *size("dispatch_grouped_gemm", "w", f32(L, 250, N), 250, H),
    *dtype("dispatch_grouped_gemm", "w", array(jnp.bfloat16, L, H, N), "float32"),
    *rank("grouped_gemm_combine", "w", f32(INNER, H), "L", "I", "H"),
    *size("grouped_gemm_combine", "w", f32(L, 25, H), 25, INNER),
    *size("grouped_gemm_combine", "w", f32(3, INNER, H), 3, L),
    *size("grouped_gemm_combine", "h", f32(R + 3, INNER), R + 3, R),
    # gradients in one launch
    *value(
        ["moe", "dispatch_grouped_gemm"],
        "one launch that there is not",
        {"schedule": BESIDE, "implementation": "xla"},
        *("fuse_weight_gradients=True", "'xla'", "float32", number(H), "'triton'", "leave it None in the schedule"),
    ),
    *value(
        "moe",
        "one launch and FP8 on the wire",
        {"schedule": dataclasses.replace(BESIDE, wire_dtype=FP8)},
        *("wire_dtype=float8_e4m3fn", "wire_dtype=None", "leave it None in the schedule"),
    ),
    *value(
        "moe",
        "one launch and products in FP8",
        {"schedule": BESIDE, "recipe": "fp8", "w_gate_up": f32(L, H, 256), "w_down": f32(L, 128, H)},
        *("fuse_weight_gradients", "recipe='fp8'", "None"),
    ),
    *value(
        ["moe", "fused_moe", "dispatch", "combine", "low_latency_dispatch", "low_latency_moe"],
        "a schedule by name",
        {"schedule": "serial"},
        *("schedule", "str", "jax_ep.Schedule", "None"),
        error=TypeError,
    ),
    # the layer
    *value("moe", "another I", {"w_gate_up": f32(L, H, 50)}, "w_gate_up", "w_down", number(50), number(48), number(24)),
    *value("fused_moe", "another I", {"w_gate_up": f32(E, H, 50)}, "w_down", number(50), number(48), number(24)),
    *size("moe", "w_gate_up", f32(L, 250, 2 * INNER), 250, H),
    *size("moe", "w_gate_up", f32(E, H, 2 * INNER), E, L),
    *size("moe", "w_down", f32(L, INNER, 250), 250, H),
    *size("fused_moe", "w_down", f32(5, INNER, H), 5, E),
    *rank("moe", "w_down", f32(INNER, H), "L", "I", "H"),
    *rank("fused_moe", "w_down", f32(INNER, H), "[EL]", "I", "H"),
    *dtype("moe", "w_down", array(jnp.bfloat16, L, INNER, H), "float32"),
    *dtype("fused_moe", "w_gate_up", array(jnp.bfloat16, E, H, 2 * INNER), "float32"),
    # its products in FP8
    *value(
        ["moe", "fused_moe"],
        "products in FP8 and odd I",
        {"recipe": "fp8"},
        *(number(H), number(INNER), number(128), "multiple", "pad", "recipe=None"),
    ),
    *value(
        "moe",
        "products in FP8 and odd H",
        {"x": f32(T, 200), "w_gate_up": f32(L, 200, 256), "w_down": f32(L, 128, 200), "recipe": "fp8"},
        *(number(200), number(128), "multiple", "pad", "recipe=None"),
    ),
    *value(
        ["moe", "fused_moe"],
        "a recipe that there is not",
        {"recipe": "fp7"},
        *("recipe='fp7'", "expected 'fp8' or None", "pass", "None"),
    ),
    *value(
        ["moe", "fused_moe"],
        "a dtype in place of a recipe",
        {"recipe": FP8},
        *("recipe", "expected 'fp8' or None", "None", "pass"),
        error=TypeError,
    ),
    # sorting
    *positive("moe_sort", "block_size"),
    *value("moe_sort", "other weights", {"topk_weights": f32(T, 3)}, "topk_weights", shape(T, 3), shape(T, K)),
]

LOW_LATENCY_CASES = [
    *value(
        "low_latency_dispatch",
        "more tokens than the maximum",
        {"max_tokens_per_rank": 5},
        *(number(T), number(5), "max_tokens_per_rank", "raise|increase|at least|split|fewer"),
    ),
    *positive("low_latency_dispatch", "max_tokens_per_rank"),
    *positive("low_latency_dispatch", "group_size"),
    *value("low_latency_dispatch", "group_size", {"group_size": 96}, "group_size", number(96), number(H), DIVISIBLE),
    *dtype("low_latency_dispatch", "num_tokens", f32(), "int32"),
    *value("low_latency_dispatch", "num_tokens", {"num_tokens": i32(1)}, "num_tokens", shape(1), "scalar"),
    *rank("low_latency_combine", "y", f32(R, H), "L", "M", "H"),
    *size("low_latency_combine", "y", f32(L, W * MAX_T + 1, H), W * MAX_T + 1, W * MAX_T),
    *dtype("low_latency_combine", "y", i32(L, W * MAX_T, H), FLOATING),
    *value(
        "low_latency_combine",
        "more tokens than dispatched",
        {"topk_idx": i32(13, K), "topk_weights": f32(13, K)},
        *("topk_idx", number(13), f"{number(MAX_T)}|{number(T)}"),
    ),
]

ROUTER_CASES = [
    *rank(["topk_router", "sparsemixer_router"], "logits", f32(32), "T", "E"),
    *dtype(["topk_router", "sparsemixer_router"], "logits", i32(T, 32), FLOATING),
    *value("topk_router", "k = 0", {"k": 0}, r"\bk\b", number(0), number(1)),
    *value("topk_router", "k > E", {"k": 33}, r"\bk\b", number(33), number(32)),
    *value("topk_router", "k = 2.0", {"k": 2.0}, r"\bk\b", r"float|2\.0", r"\bint", error=TypeError),
    *value("topk_router", "a name", {"router": "sigmoid"}, "router", r"\bstr\b", "jax_ep.Router", error=TypeError),
    *value(
        "topk_router", "no bias", {"router": jax_ep.Router(selection_bias=True)}, "selection_bias", "None", number(32)
    ),
    *size("topk_router", "bias", f32(31), 31, 32),
    *dtype("topk_router", "bias", i32(32), FLOATING),
    *value(
        "topk_router", "uneven groups", {"router": jax_ep.Router(num_groups=5)}, "num_groups", number(5), number(32)
    ),
    *value(
        "topk_router",
        "fewer selectable experts than k",
        {"router": jax_ep.Router(num_groups=16, topk_groups=3), "k": 7},
        *("topk_groups", number(7), number(6), "raise|increase|lower|reduce|at least|at most"),
    ),
    *rank(MASKED_IN, "token_mask", array(jnp.bool_, T, 1), "T"),
    *value(MASKED_IN, "mask", {"token_mask": f32(T)}, "token_mask", "float32", "bool.*attention_mask", error=TypeError),
    *size(MASKED_IN, "token_mask", array(jnp.bool_, 7), 7, T),
    *value("sparsemixer_router", "one expert", {"logits": f32(T, 1)}, "logits", number(1), number(2), "pass"),
    *value("sparsemixer_router", "jitter_eps < 0", {"jitter_eps": -0.1}, "jitter_eps", number(-0.1), number(0), "pass"),
    *value("sparsemixer_router", "no eps", {"jitter_eps": None}, "jitter_eps", "None", "number", error=TypeError),
    *value("sparsemixer_router", "a seed", {"key": 0}, "key", r"\bint\b", r"jax\.random\.key", error=TypeError),
    *value("sparsemixer_router", "no key", {"key": f32()}, "key", "float32", r"jax\.random\.key", error=TypeError),
    *value("identity_experts", "ids", {"routing": i32(T, K)}, "routing", "topk_router", error=TypeError),
    *value("identity_experts", "too many", {"num_experts": 33}, "num_experts", number(33), number(32), "pass"),
    *positive("identity_experts", "num_experts"),
    *rank("load_balancing_loss", "scores", f32(32), "T", "E"),
    *size("load_balancing_loss", "topk_idx", i32(7, K), 7, T),
    *dtype("load_balancing_loss", "topk_idx", f32(T, K), "int32"),
    *dtype("load_balancing_loss", "scores", i32(T, 32), FLOATING),
    *rank("router_z_loss", "logits", f32(2, T, 32), "T", "E"),
    *dtype("router_z_loss", "logits", i32(T, 32), FLOATING),
    *value("quantize_fp8", "odd H", {"x": f32(T, 200)}, number(200), number(128), f"{DIVISIBLE}|group_size"),
    *positive("quantize_fp8", "group_size"),
    *dtype("quantize_fp8", "x", i32(T, H), FLOATING),
    *size("dequantize_fp8", "scales", f32(T, 3), 3, H),
    *size("dequantize_fp8", "scales", f32(7, 2), 7, T),
    *dtype("dequantize_fp8", "values", f32(T, H), "float8_e4m3fn"),
]

LAYERS, OWN = ("moe", "fused_moe"), jax_ep.Experts(lambda hidden: hidden)
EXPERTS_CASES = [
    *value(LAYERS, "experts by name", {"experts": "silu"}, "experts", r"\bstr\b", "jax_ep.Experts", error=TypeError),
    *value("moe", "no gates", {"w_gate_up": f32(L, H, INNER)}, number(INNER), number(2 * INNER), "gated=False"),
    *value(LAYERS, "gates", {"experts": jax_ep.Experts(gated=False)}, "gated", number(2 * INNER), number(INNER)),
    *value(LAYERS, "rows of a function", {"experts": OWN}, "activation", number(2 * INNER), number(INNER), "change"),
    *value(LAYERS, "b_gate_up", {"biases": (f32(L, INNER), None)}, "b_gate_up", number(INNER), number(2 * INNER)),
    *value(LAYERS, "a bias for all", {"biases": (None, f32(H))}, "b_down", shape(H), "rank 2", "reshape"),
    *value(LAYERS, "one bias", {"biases": f32(L, H)}, "biases", "array", r"\(b_gate_up, b_down\)", error=TypeError),
    *value(LAYERS, "a bias too few", {"biases": (f32(L, H),)}, "tuple of 1", r"\(b_gate_up, b_down\)", error=TypeError),
    *value(
        LAYERS, "b_down of int32", {"biases": (None, i32(L, H))}, "b_down", "int32", FLOATING, "cast", error=TypeError
    ),
    *dtype("dispatch", "num_tokens", f32(), "int32"),
    *value("dispatch", "num_tokens", {"num_tokens": i32(1)}, "num_tokens", shape(1), "scalar"),
    *value(
        "dispatch", "num_tokens with a handle", {"num_tokens": 3, "handle": dispatch_handle()}, "num_tokens", "handle"
    ),
    *value("row_experts", "no handle", {"handle": i32(R)}, "handle", "Handle", "Dispatched", error=TypeError),
]

GEMM, ACTIVATION, MATRICES = "masked_grouped_gemm", "masked_gated_activation", "quantize"
LAYER, FUSED = "low_latency_moe", "low_latency_gemm_combine"
MASKED_CASES = [
    *rank(GEMM, "lhs", fp8(MAX_T, H), "L", "M", "K"),
    *rank(GEMM, "rhs", fp8_weights(H, N), "L", "K", "N"),
    *rank([GEMM, ACTIVATION], "group_sizes", i32(L, 1), "G"),
    *dtype([GEMM, ACTIVATION], "group_sizes", f32(L), "int32"),
    *size([GEMM, ACTIVATION], "group_sizes", i32(3), 3, L),
    *dtype(GEMM, "lhs", i32(L, MAX_T, H), FLOATING),
    *size(GEMM, "rhs", fp8_weights(3, H, N), 3, L),
    *size(GEMM, "rhs", fp8_weights(L, 128, N), 128, H),
    *value(GEMM, "float32 rhs", {"rhs": f32(L, H, N)}, "rhs", "float8_e4m3fn", "QuantizedWeights", error=TypeError),
    *value(GEMM, "no scales of lhs", {"lhs_scales": None}, "lhs_scales", "None", shape(L, MAX_T, 2), error=TypeError),
    *value(
        GEMM,
        "scales of float32",
        {"lhs": f32(L, MAX_T, H), "rhs": f32(L, H, N)},
        *("lhs_scales", "float32", "None"),
        error=TypeError,
    ),
    *value(
        GEMM,
        "scales per 64 columns",
        {"lhs_scales": f32(L, MAX_T, 4)},
        *("lhs_scales", shape(L, MAX_T, 4), shape(L, MAX_T, 2), number(128)),
    ),
    *value(
        GEMM,
        "scales per column",
        {"rhs": dataclasses.replace(fp8_weights(L, H, N), scales=f32(L, N, 2))},
        *("rhs", shape(L, N, 2), shape(L, N, H), "quantize"),
    ),
    *dtype(GEMM, "lhs_scales", array(jnp.bfloat16, L, MAX_T, 2), "float32"),
    *value(
        GEMM,
        "an integer result",
        {"preferred_element_type": jnp.int32},
        *("preferred_element_type", "int32", FLOATING),
        error=TypeError,
    ),
    *positive(GEMM, "expected_rows"),
    *rank(ACTIVATION, "hidden", f32(L, 2 * H), "L", "M", r"2 \* I"),
    *dtype(ACTIVATION, "hidden", i32(L, MAX_T, 2 * H), FLOATING),
    *value(ACTIVATION, "by name", {"experts": "relu"}, "experts", r"\bstr\b", "jax_ep.Experts", error=TypeError),
    *value(ACTIVATION, "odd columns", {"hidden": f32(L, MAX_T, 255)}, "hidden", number(255), "even"),
    *value(ACTIVATION, "odd I", {"hidden": f32(L, MAX_T, 400)}, number(200), number(128), "multiple", "pad"),
    *value(
        LAYER,
        "one matrix in FP8",
        {"w_down": f32(L, H, H)},
        *("w_gate_up", "w_down", "QuantizedWeights", "array", "quantize"),
        error=TypeError,
    ),
    *value(
        LAYER,
        "float32 values",
        {"w_gate_up": dataclasses.replace(fp8_weights(L, H, 2 * H), values=f32(L, 2 * H, H))},
        *("w_gate_up", "float32", "float8_e4m3fn", "quantize"),
        error=TypeError,
    ),
    *value(
        LAYER,
        "matrices of all experts",
        {"w_gate_up": fp8_weights(E, H, 2 * H)},
        *("w_gate_up", number(E), number(L), "local expert"),
    ),
    *value(
        LAYER,
        "another I",
        {"w_down": fp8_weights(L, 128, H)},
        *("w_gate_up", "w_down", number(2 * H), number(H), "gated"),
    ),
    *value(
        LAYER,
        "transposed arrays",
        {"w_gate_up": f32(L, 2 * H, H), "w_down": f32(L, H, H)},
        *("w_gate_up", number(2 * H), number(H), r"L, K, N"),
    ),
    *rank(FUSED, "lhs", fp8(L, H), "L", "M", "K"),
    *size(FUSED, "lhs", fp8(L, W * MAX_T + 1, 128), W * MAX_T + 1, W * MAX_T),
    *size(FUSED, "rhs", fp8_weights(L, 256, H), 256, 128),
    *size(FUSED, "group_sizes", i32(3), 3, L),
    *value(FUSED, "no scales", {"lhs_scales": None}, "lhs_scales", "None", shape(L, W * MAX_T, 1), error=TypeError),
    *value(FUSED, "other weights", {"topk_weights": f32(T, 3)}, "topk_weights", shape(T, 3), shape(T, K), "one weight"),
    *value(
        FUSED,
        "more tokens than dispatched",
        {"topk_idx": i32(13, K), "topk_weights": f32(13, K)},
        *("topk_idx", number(13), f"{number(MAX_T)}|{number(T)}"),
    ),
    *value(
        FUSED,
        "the handle of dispatch",
        {"handle": dispatch_handle()},
        *("handle", "LowLatencyHandle", r"\bdispatch|low_latency_dispatch"),
        error=TypeError,
    ),
    *positive(FUSED, "expected_rows"),
    *value(LAYER, "by name", {"experts": "relu"}, "experts", r"\bstr\b", "jax_ep.Experts", error=TypeError),
    *value(
        LAYER, "more tokens than the maximum", {"max_tokens_per_rank": 5}, number(T), number(5), "max_tokens_per_rank"
    ),
    *positive(LAYER, "max_tokens_per_rank"),
    *positive(LAYER, "num_experts"),
    *value(MATRICES, "a vector", {"w": f32(H)}, r"\bw\b", shape(H), "K, N", "reshape"),
    *value(MATRICES, "odd K", {"w": f32(L, 200, N)}, r"\bK\b", number(200), number(128), "multiple", "pad"),
    *dtype(MATRICES, "w", i32(L, H, N), FLOATING),
    *value(
        "dequantize",
        "other scales",
        {"w": dataclasses.replace(fp8_weights(L, H, N), scales=f32(L, 2, 2))},
        *("values", shape(L, N, H), shape(L, 2, 2), "quantize"),
    ),
]

TABLE = FP8_GEMM_CASES + MASKED_CASES + DISPATCH_CASES + COMPUTE_CASES + LOW_LATENCY_CASES + ROUTER_CASES
TABLE += EXPERTS_CASES


@pytest.mark.parametrize(("name", "changes", "error", "fragments"), TABLE)
def test_errors_explain_mistakes(name, changes, error, fragments):
    """Messages start with the called function, not an inner one: `moe` users do not search for `dispatch`."""
    check(error, (f"^{name}: ", *fragments), trace, name, **changes)
