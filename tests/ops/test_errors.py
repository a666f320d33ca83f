"""Every argument that a caller can get wrong, the exception it raises, and its message."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jax_ep
from mistakes import (
    DISPATCH,
    FLOATING,
    FP8,
    GOOD,
    SIZES,
    array,
    check,
    dispatch_handle,
    dtype,
    f32,
    fp8,
    fp8_weights,
    i32,
    low_latency_handle,
    positive,
    rank,
    size,
    trace,
    value,
)

T, K, E, W, H, INNER, N, MAX_T, L, R = SIZES

ROUTED_IN = [*DISPATCH, "moe"]
TOKENS_IN = [*ROUTED_IN, "fused_moe", "low_latency_dispatch", "low_latency_moe"]
WEIGHTS_IN = [*ROUTED_IN, "fused_moe", "low_latency_combine", "low_latency_moe"]
MASKED_IN = ["topk_router", "load_balancing_loss", "router_z_loss"]
PAIRS_IN = ["dispatch", "low_latency_dispatch"]
COMBINE = ["combine", "grouped_gemm_combine"]
DIVISIBLE = "multiple|divi(de|sible)"
NARROW = {"w": f32(L, 200, N), "w_gate_up": f32(L, 200, 2 * INNER), "w_down": f32(L, INNER, 200)}
NO_COLUMNS = {"x": f32(T, 0), "w_gate_up": f32(E, 0, 2 * INNER), "w_down": f32(E, INNER, 0)}
FP8_WIRE = {"schedule": jax_ep.Schedule(wire_dtype=FP8)}
HALF_PAIR = (fp8(T, H), f32(T, 3))
IN_BLOCKS = {"topk_idx": None, "handle": dispatch_handle(capacity=32, alignment=8)}


@pytest.mark.parametrize("name", GOOD)
def test_errors_valid_arguments(name):
    """The cases below each change one of these arguments, which their exception must name."""
    assert jax.tree.leaves(trace(name))


DISPATCH_CASES = [
    # tokens
    *rank(TOKENS_IN, "x", f32(T), "T", "H"),
    *rank(TOKENS_IN, "x", f32(1, T, H), "T", "H"),
    *dtype(TOKENS_IN, "x", i32(T, H), FLOATING),
    *value(TOKENS_IN, {"x": fp8(T, H)}, r"\bx\b; float8_e4m3fn; scales|cast", TypeError),
    *value(["fused_moe", "low_latency_moe"], NO_COLUMNS, rf"\bx\b; ({T}, 0); H >= 1; column"),
    # expert ids
    *rank([*TOKENS_IN, "moe_sort"], "topk_idx", i32(T), "T", "K"),
    *size(TOKENS_IN, "topk_idx", i32(T - 1, K), T - 1, T),
    *dtype([*TOKENS_IN, "moe_sort"], "topk_idx", f32(T, K), "int32"),
    *dtype([*TOKENS_IN, "moe_sort"], "topk_idx", array(jnp.bool_, T, K), "int32"),
    *value([*TOKENS_IN, "moe_sort"], {"topk_idx": i32(T, 0)}, f"topk_idx; ({T}, 0); at least|positive"),
    *value(DISPATCH, {"topk_idx": None}, "topk_idx; handle; pass|give"),
    # weights of the router
    *value(WEIGHTS_IN, {"topk_weights": f32(T, 3)}, f"topk_weights; ({T}, 3); ({T}, {K})"),
    *dtype([*WEIGHTS_IN, "moe_sort"], "topk_weights", i32(T, K), "float32"),
    *value(["moe", "fused_moe"], {"topk_weights": None}, "topk_weights; None", TypeError),
    # experts
    *value([*ROUTED_IN, "low_latency_dispatch"], {"num_experts": 10}, f"10; {W}; {DIVISIBLE}"),
    *positive([*ROUTED_IN, "low_latency_dispatch", "moe_sort"], "num_experts"),
    *value("moe", {"num_experts": 2 * E}, f"w_gate_up; {L}; {2 * L}; num_experts is that of all ranks"),
    *value("dispatch", {"num_experts": 2**31 - 1, "axis_name": ()}, f"{2**31 - 1}; at least 1 and below 2\\*\\*31 - 1"),
    # layout
    *positive(ROUTED_IN, "capacity"),
    *value(ROUTED_IN, {"capacity": 1.25}, r"capacity; 1\.25; \bint; rows per rank", TypeError),
    *positive(DISPATCH, "alignment"),
    *value(DISPATCH, {"capacity": 100, "alignment": 16}, "100; 16; multiple"),
    *value("dispatch", {"capacity": 2**33}, f"capacity; {2**33}; 2\\*\\*31"),
    *value("dispatch", {"axis_name": ("expert", "expert")}, "axis_name; 'expert', 'expert'; twice"),
    # wire
    *value(
        ["low_latency_dispatch", "low_latency_moe", "low_latency_gemm_combine"],
        FP8_WIRE,
        "wire_dtype=float8_e4m3fn; expected None; quantize=True",
    ),
    *value(ROUTED_IN, NARROW | FP8_WIRE | {"x": f32(T, 200)}, f"200; 128; {DIVISIBLE}; unquanti[sz]ed"),
    *value("combine", FP8_WIRE | {"y": f32(R, 200)}, f"200; 128; {DIVISIBLE}; unquanti[sz]ed"),
    # FP8 pairs
    *value(["dispatch", "low_latency_dispatch"], {"x": HALF_PAIR}, f"3; {H}; quantize_fp8"),
    *value(PAIRS_IN, {"x": (f32(T, H), f32(T, 2))}, "float32; float8_e4m3fn; quantize_fp8", TypeError),
    *value(PAIRS_IN, {"x": (fp8(T, H), f32(T, 2), f32(T, 2))}, r"3; \(values, scales\)", (TypeError, ValueError)),
    # handles
    *value(DISPATCH, {"topk_idx": None, "handle": dispatch_handle(num_tokens=11)}, f"handle; {T}; 11"),
    *value(DISPATCH, {"topk_idx": None, "handle": dispatch_handle(num_experts=16)}, f"handle; {E}; 16"),
    *value(DISPATCH, {"topk_idx": None, "handle": dispatch_handle(top_k=3)}, f"handle|topk_weights; {K}; 3"),
    *value("dispatch", IN_BLOCKS | {"capacity": 40, "alignment": 8}, "handle; 40; 32"),
    *value("dispatch", IN_BLOCKS | {"alignment": 4}, "handle; 4; 8"),
    *value(DISPATCH, {"handle": "layout"}, "handle; str; dispatch", TypeError),
    *value(COMBINE, {"handle": None}, "handle; None; dispatch; field handle", TypeError),
    *value("combine", {"handle": low_latency_handle()}, "handle; LowLatencyHandle; dispatch|combine", TypeError),
    *value("low_latency_combine", {"handle": dispatch_handle()}, "handle; LowLatencyHandle; dispatch", TypeError),
]

THREE = fp8_weights(3, H, N)
IN_FP8 = {"lhs": fp8(20, H), "rhs": fp8_weights(3, H, N), "lhs_scales": f32(20, 2)}
FP8_GEMM_CASES = [
    *value("grouped_gemm", IN_FP8 | {"rhs": fp8_weights(3, 128, N)}, f"rhs; 128; {H}; G, K, N"),
    *value("grouped_gemm", IN_FP8 | {"group_sizes": i32(7)}, "rhs; 3; 7; pass"),
    *value("grouped_gemm", IN_FP8 | {"lhs": fp8(1, 20, H)}, f"lhs; (1, 20, {H}); M, K"),
    *value("grouped_gemm", IN_FP8 | {"rhs": fp8_weights(H, N)}, f"rhs; ({H}, {N}); K, N"),
    *value("grouped_gemm", IN_FP8 | {"rhs": f32(3, H, N)}, "rhs; float8_e4m3fn; QuantizedWeights; quantize", TypeError),
    *value("grouped_gemm", IN_FP8 | {"lhs_scales": None}, "lhs_scales; None; (20, 2)", TypeError),
    *value("grouped_gemm", IN_FP8 | {"rhs": replace(THREE, scales=None)}, "rhs.scales; None; quantize", TypeError),
    *value("grouped_gemm", {"lhs_scales": f32(20, 2)}, "lhs_scales; float32; None", TypeError),
    *value("grouped_gemm", IN_FP8 | {"lhs_scales": f32(20, 4)}, "lhs_scales; (20, 4); (20, 2); 128"),
    *value(
        "grouped_gemm",
        IN_FP8 | {"rhs": replace(fp8_weights(3, H, N), scales=f32(3, N, 2))},
        f"rhs; (3, {N}, 2); (3, {N}, {H}); quantize",
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
    *value("grouped_gemm", {"preferred_element_type": jnp.int32}, f"preferred_element; int32; {FLOATING}", TypeError),
    # fused dispatch and combine
    *rank("dispatch_grouped_gemm", "w", f32(H, N), "L", "H", "N"),
    *size("dispatch_grouped_gemm", "w", f32(E, H, N), E, L),
    *size("dispatch_grouped_gemm", "w", f32(L, 250, N), 250, H),
    *dtype("dispatch_grouped_gemm", "w", array(jnp.bfloat16, L, H, N), "float32"),
    *rank("grouped_gemm_combine", "w", f32(INNER, H), "L", "I", "H"),
    *size("grouped_gemm_combine", "w", f32(L, 25, H), 25, INNER),
    *size("grouped_gemm_combine", "w", f32(3, INNER, H), 3, L),
    *size("grouped_gemm_combine", "h", f32(R + 3, INNER), R + 3, R),
    *value(
        ["moe", "fused_moe", "dispatch", "combine", "low_latency_dispatch", "low_latency_moe"],
        {"schedule": "serial"},
        "schedule; str; jax_ep.Schedule; None",
        TypeError,
    ),
    # the layer
    *value("moe", {"w_gate_up": f32(L, H, 50)}, "w_gate_up; w_down; 50; 48; 24"),
    *value("fused_moe", {"w_gate_up": f32(E, H, 50)}, "w_down; 50; 48; 24"),
    *size("moe", "w_gate_up", f32(L, 250, 2 * INNER), 250, H),
    *size("moe", "w_gate_up", f32(E, H, 2 * INNER), E, L),
    *size("moe", "w_down", f32(L, INNER, 250), 250, H),
    *size("fused_moe", "w_down", f32(5, INNER, H), 5, E),
    *rank("moe", "w_down", f32(INNER, H), "L", "I", "H"),
    *rank("fused_moe", "w_down", f32(INNER, H), "[EL]", "I", "H"),
    *dtype("moe", "w_down", array(jnp.bfloat16, L, INNER, H), "float32"),
    *dtype("fused_moe", "w_gate_up", array(jnp.bfloat16, E, H, 2 * INNER), "float32"),
    # its products in FP8
    *value(["moe", "fused_moe"], {"recipe": "fp8"}, f"{H}; {INNER}; 128; multiple; pad; recipe=None"),
    *value(
        "moe",
        {"x": f32(T, 200), "w_gate_up": f32(L, 200, 256), "w_down": f32(L, 128, 200), "recipe": "fp8"},
        "200; 128; multiple; pad; recipe=None",
    ),
    *value(["moe", "fused_moe"], {"recipe": "fp7"}, "recipe='fp7'; expected 'fp8' or None; pass; None"),
    *value(["moe", "fused_moe"], {"recipe": FP8}, "recipe; expected 'fp8' or None; None; pass", TypeError),
    # sorting
    *positive("moe_sort", "block_size"),
    *value("moe_sort", {"topk_weights": f32(T, 3)}, f"topk_weights; ({T}, 3); ({T}, {K})"),
]

LOW_LATENCY_CASES = [
    *value("low_latency_dispatch", {"max_tokens_per_rank": 5}, f"{T}; 5; max_tokens_per_rank; raise|split|fewer"),
    *positive("low_latency_dispatch", "max_tokens_per_rank"),
    *positive("low_latency_dispatch", "group_size"),
    *value("low_latency_dispatch", {"group_size": 96}, f"group_size; 96; {H}; {DIVISIBLE}"),
    *dtype("low_latency_dispatch", "num_tokens", f32(), "int32"),
    *value("low_latency_dispatch", {"num_tokens": i32(1)}, "num_tokens; (1); scalar"),
    *rank("low_latency_combine", "y", f32(R, H), "L", "M", "H"),
    *size("low_latency_combine", "y", f32(L, W * MAX_T + 1, H), W * MAX_T + 1, W * MAX_T),
    *dtype("low_latency_combine", "y", i32(L, W * MAX_T, H), FLOATING),
    *value("low_latency_combine", {"topk_idx": i32(13, K), "topk_weights": f32(13, K)}, "topk_idx; 13"),
]

ROUTER_CASES = [
    *rank(["topk_router", "sparsemixer_router"], "logits", f32(32), "T", "E"),
    *dtype(["topk_router", "sparsemixer_router"], "logits", i32(T, 32), FLOATING),
    *value("topk_router", {"k": 0}, r"\bk\b; 0; 1"),
    *value("topk_router", {"k": 33}, r"\bk\b; 33; 32"),
    *value("topk_router", {"k": 2.0}, r"\bk\b; float|2\.0; \bint", TypeError),
    *value("topk_router", {"router": "sigmoid"}, r"router; \bstr\b; jax_ep.Router", TypeError),
    *value("topk_router", {"router": jax_ep.Router(selection_bias=True)}, "selection_bias; None; 32"),
    *size("topk_router", "bias", f32(31), 31, 32),
    *dtype("topk_router", "bias", i32(32), FLOATING),
    *value("topk_router", {"router": jax_ep.Router(num_groups=5)}, "num_groups; 5; 32"),
    *value(
        "topk_router",
        {"router": jax_ep.Router(num_groups=16, topk_groups=3), "k": 7},
        "topk_groups; 7; 6; raise|increase|lower|reduce|at least|at most",
    ),
    *rank(MASKED_IN, "token_mask", array(jnp.bool_, T, 1), "T"),
    *value(MASKED_IN, {"token_mask": f32(T)}, "token_mask; float32; bool.*attention_mask", TypeError),
    *size(MASKED_IN, "token_mask", array(jnp.bool_, 7), 7, T),
    *value("sparsemixer_router", {"logits": f32(T, 1)}, "logits; 1; 2; pass"),
    *value("sparsemixer_router", {"jitter_eps": -0.1}, "jitter_eps; -0.1; 0; pass"),
    *value("sparsemixer_router", {"jitter_eps": None}, "jitter_eps; None; number", TypeError),
    *value("sparsemixer_router", {"key": 0}, r"key; \bint\b; jax\.random\.key", TypeError),
    *value("sparsemixer_router", {"key": f32()}, r"key; shape \(\); jax\.random\.key", TypeError),
    *value("identity_experts", {"routing": i32(T, K)}, "routing; topk_router", TypeError),
    *value(
        "identity_experts", {"routing": jax_ep.types.Routing(i32(T, K), None, f32(T, 32))}, "weights; Non", TypeError
    ),
    *value("identity_experts", {"routing": jax_ep.types.Routing(i32(T, K), f32(T, K), None)}, "scores; Non", TypeError),
    *value("identity_experts", {"num_experts": 33}, "num_experts; 33; 32; pass"),
    *positive("identity_experts", "num_experts"),
    *rank("load_balancing_loss", "scores", f32(32), "T", "E"),
    *size("load_balancing_loss", "topk_idx", i32(7, K), 7, T),
    *dtype("load_balancing_loss", "topk_idx", f32(T, K), "int32"),
    *dtype("load_balancing_loss", "scores", i32(T, 32), FLOATING),
    *rank("router_z_loss", "logits", f32(2, T, 32), "T", "E"),
    *dtype("router_z_loss", "logits", i32(T, 32), FLOATING),
    *value("quantize_fp8", {"x": f32(T, 200)}, f"200; 128; {DIVISIBLE}|group_size"),
    *positive("quantize_fp8", "group_size"),
    *dtype("quantize_fp8", "x", i32(T, H), FLOATING),
    *size("dequantize_fp8", "scales", f32(T, 3), 3, H),
    *size("dequantize_fp8", "scales", f32(7, 2), 7, T),
    *dtype("dequantize_fp8", "values", f32(T, H), "float8_e4m3fn"),
]

LAYERS, OWN = ("moe", "fused_moe"), jax_ep.Experts(lambda hidden: hidden)
EXPERTS_CASES = [
    *value(LAYERS, {"experts": "silu"}, r"experts; \bstr\b; jax_ep.Experts", TypeError),
    *value("moe", {"w_gate_up": f32(L, H, INNER)}, f"{INNER}; {2 * INNER}; gated=False"),
    *value(LAYERS, {"experts": jax_ep.Experts(gated=False)}, f"gated; {2 * INNER}; {INNER}"),
    *value(LAYERS, {"experts": OWN}, f"activation; {2 * INNER}; {INNER}; change"),
    *value(LAYERS, {"biases": (f32(L, INNER), None)}, f"b_gate_up; {INNER}; {2 * INNER}"),
    *value(LAYERS, {"biases": (None, f32(H))}, f"b_down; ({H}); rank 2; reshape"),
    *value(LAYERS, {"biases": f32(L, H)}, r"biases; array; \(b_gate_up, b_down\)", TypeError),
    *value(LAYERS, {"biases": (f32(L, H),)}, r"tuple of 1; \(b_gate_up, b_down\)", TypeError),
    *value(LAYERS, {"biases": (None, i32(L, H))}, f"b_down; int32; {FLOATING}; cast", TypeError),
    *dtype("dispatch", "num_tokens", f32(), "int32"),
    *value("dispatch", {"num_tokens": i32(1)}, "num_tokens; (1); scalar"),
    *value("dispatch", {"num_tokens": 3, "handle": dispatch_handle()}, "num_tokens; handle"),
    *value("row_experts", {"handle": i32(R)}, "handle; Handle; Dispatched", TypeError),
]

LOCAL = fp8_weights(L, H, N)
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
    *value(GEMM, {"rhs": f32(L, H, N)}, "rhs; float8_e4m3fn; QuantizedWeights", TypeError),
    *value(GEMM, {"lhs_scales": None}, f"lhs_scales; None; ({L}, {MAX_T}, 2)", TypeError),
    *value(GEMM, {"lhs": f32(L, MAX_T, H), "rhs": f32(L, H, N)}, "lhs_scales; float32; None", TypeError),
    *value(GEMM, {"lhs_scales": f32(L, MAX_T, 4)}, f"lhs_scales; ({L}, {MAX_T}, 4); ({L}, {MAX_T}, 2); 128"),
    *value(GEMM, {"rhs": replace(LOCAL, scales=f32(L, N, 2))}, f"rhs; ({L}, {N}, 2); ({L}, {N}, {H}); quantize"),
    *dtype(GEMM, "lhs_scales", array(jnp.bfloat16, L, MAX_T, 2), "float32"),
    *value(GEMM, {"preferred_element_type": jnp.int32}, f"preferred_element; int32; {FLOATING}", TypeError),
    *positive(GEMM, "expected_rows"),
    *rank(ACTIVATION, "hidden", f32(L, 2 * H), "L", "M", r"2 \* I"),
    *dtype(ACTIVATION, "hidden", i32(L, MAX_T, 2 * H), FLOATING),
    *value(ACTIVATION, {"experts": "relu"}, r"experts; \bstr\b; jax_ep.Experts", TypeError),
    *value(ACTIVATION, {"hidden": f32(L, MAX_T, 255)}, "hidden; 255; even"),
    *value(ACTIVATION, {"hidden": f32(L, MAX_T, 400)}, "200; 128; multiple; pad"),
    *value(LAYER, {"w_down": f32(L, H, H)}, "w_gate_up; w_down; quantized; array; quantize", TypeError),
    *value(
        LAYER,
        {"w_gate_up": replace(fp8_weights(L, H, 2 * H), values=f32(L, 2 * H, H))},
        "w_gate_up; float32; float8_e4m3fn; quantize",
        TypeError,
    ),
    *value(LAYER, {"w_gate_up": fp8_weights(E, H, 2 * H)}, f"w_gate_up; {E}; {L}; local expert"),
    *value(LAYER, {"w_down": fp8_weights(L, 128, H)}, f"w_gate_up; w_down; {2 * H}; {H}; gated"),
    *value(LAYER, {"w_gate_up": f32(L, 2 * H, H), "w_down": f32(L, H, H)}, f"w_gate_up; {2 * H}; {H}; L, K, N"),
    *rank(FUSED, "lhs", fp8(L, H), "L", "M", "K"),
    *size(FUSED, "lhs", fp8(L, W * MAX_T + 1, 128), W * MAX_T + 1, W * MAX_T),
    *size(FUSED, "rhs", fp8_weights(L, 256, H), 256, 128),
    *size(FUSED, "group_sizes", i32(3), 3, L),
    *value(FUSED, {"lhs_scales": None}, f"lhs_scales; None; ({L}, {W * MAX_T}, 1)", TypeError),
    *value(FUSED, {"topk_weights": f32(T, 3)}, f"topk_weights; ({T}, 3); ({T}, {K}); one weight"),
    *value(FUSED, {"topk_idx": i32(13, K), "topk_weights": f32(13, K)}, "topk_idx; 13"),
    *value(FUSED, {"handle": dispatch_handle()}, "handle; LowLatencyHandle; dispatch", TypeError),
    *positive(FUSED, "expected_rows"),
    *value(LAYER, {"experts": "relu"}, r"experts; \bstr\b; jax_ep.Experts", TypeError),
    *value(LAYER, {"max_tokens_per_rank": 5}, f"{T}; 5; max_tokens_per_rank"),
    *positive(LAYER, "max_tokens_per_rank"),
    *positive(LAYER, "num_experts"),
    *value(MATRICES, {"w": f32(H)}, rf"\bw\b; ({H}); K, N; reshape"),
    *value(MATRICES, {"w": f32(L, 200, N)}, r"\bK\b; 200; 128; multiple; pad"),
    *dtype(MATRICES, "w", i32(L, H, N), FLOATING),
    *value("dequantize", {"w": replace(LOCAL, scales=f32(L, 2, 2))}, f"values; ({L}, {N}, {H}); ({L}, 2, 2); quantize"),
]

TABLE = FP8_GEMM_CASES + MASKED_CASES + DISPATCH_CASES + COMPUTE_CASES + LOW_LATENCY_CASES + ROUTER_CASES
TABLE += EXPERTS_CASES


@pytest.mark.parametrize(("name", "changes", "error", "fragments"), TABLE)
def test_errors_explain_mistakes(name, changes, error, fragments):
    """Messages start with the called function, not an inner one: `moe` users do not search for `dispatch`."""
    check(error, (f"^{name}: ", *fragments), trace, name, **changes)
