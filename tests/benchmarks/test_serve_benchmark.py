"""The decoder of benchmarks/serve.py, and how the benchmark counts bytes and groups kernels."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep.tools.benchmark import decoder, harness, serve
from jax_ep.tools.benchmark.serve import Case

MODEL, LAYERS = decoder.MODELS["tiny"], 2
TEXTS, PROMPT, LENGTH = 2, 20, 32


@pytest.fixture(autouse=True)
def _as_benchmarks_run():
    if jax.default_backend() != "cpu":
        pytest.skip("cuDNN has no attention of float32")
    with jax.numpy_rank_promotion("allow"):
        yield


def in_float32(tree):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, tree)


@pytest.fixture(scope="module", params=["bfloat16", "mxfp4"])
def params(request):
    return in_float32(decoder.init_params(MODEL, LAYERS, request.param))


@pytest.fixture(scope="module")
def texts():
    return np.random.default_rng(0).integers(0, MODEL.vocabulary, (TEXTS, LENGTH), np.int32)


def with_room(state):
    """Return the state of a prefill with room for `LENGTH` positions, which holds numbers that must not be read."""

    def enlarged(old):
        return jnp.pad(old, ((0, 0), (0, LENGTH - old.shape[1]), (0, 0), (0, 0)), constant_values=1e3)

    return state._replace(cache=jax.tree.map(enlarged, state.cache))


def norm(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def rotated(x):
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * 10_000.0 ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    parts = first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)
    return np.concatenate(parts, axis=-1)


def oracle(params, tokens):
    """Logits after one text, in NumPy and float64."""
    _, inner, _, top_k = MODEL.experts
    x = params["embedding"][tokens]
    for w in params["layers"]:
        heads = (norm(x, w["attention_norm"]) @ w["qkv"]).reshape(len(x), -1, MODEL.head_dim)
        queries = rotated(norm(heads[:, : MODEL.heads], w["qk_norm"][: MODEL.heads]))
        keys = rotated(norm(heads[:, MODEL.heads : -MODEL.kv_heads], w["qk_norm"][MODEL.heads :]))
        values = heads[:, -MODEL.kv_heads :]
        mixed = []
        for head in range(MODEL.heads):
            group = head % MODEL.kv_heads
            scores = queries[:, head] @ keys[:, group].T / np.sqrt(MODEL.head_dim)
            weights = np.exp(np.where(np.tri(len(x)), scores, -np.inf))
            mixed.append(weights / weights.sum(-1, keepdims=True) @ values[:, group])
        x = x + np.concatenate(mixed, axis=-1) @ w["out"]
        flat = norm(x, w["experts_norm"])
        logits = flat @ w["router"]
        y = np.zeros_like(x)
        for token, scores in enumerate(logits):
            chosen = np.argsort(-scores)[:top_k]
            shares = np.exp(scores[chosen]) / np.exp(scores[chosen]).sum()
            for share, expert in zip(shares, chosen, strict=True):
                gate, up = np.split(flat[token] @ w["experts"][0][expert], [inner])
                y[token] += share * (gate / (1 + np.exp(-gate)) * up) @ w["experts"][1][expert]
        x = x + y
    return norm(x[-1], params["norm"]) @ params["head"]


def test_prefill_equals_oracle(texts):
    params = in_float32(decoder.init_params(MODEL, LAYERS, "bfloat16"))
    state, logits = jax.jit(partial(decoder.prefill, MODEL))(params, texts)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    expected = np.stack([oracle(wide, text) for text in texts])
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(state.token, expected.argmax(-1))


def test_decode_logits_equal_prefill(params, texts):
    prefill, step = (jax.jit(partial(run, MODEL)) for run in (decoder.prefill, decoder.step))
    state = with_room(prefill(params, texts[:, :PROMPT])[0])
    for position in range(PROMPT, LENGTH):
        state, logits = step(params, state._replace(token=jnp.asarray(texts[:, position])))
    whole, expected = prefill(params, texts)
    assert harness.norm_of_difference(logits, expected) < 1e-4
    np.testing.assert_array_equal(state.token, whole.token)
    np.testing.assert_array_equal(state.topk_idx, whole.topk_idx)
    for got, want in zip(jax.tree.leaves(state.cache), jax.tree.leaves(whole.cache), strict=True):
        assert harness.norm_of_difference(got, want) < 1e-4
    assert int(state.position) == LENGTH


def test_decode_is_steps_in_place(params, texts):
    steps = LENGTH - PROMPT
    state = with_room(jax.jit(partial(decoder.prefill, MODEL))(params, texts[:, :PROMPT])[0])
    expected = state
    step = jax.jit(partial(decoder.step, MODEL))
    for _ in range(steps):
        expected, _ = step(params, expected)
    program = jax.jit(partial(decoder.decode, MODEL, steps), donate_argnums=1).lower(params, state).compile()
    assert program.memory_analysis().alias_size_in_bytes >= serve.bytes_of(state.cache)
    got = program(params, state)
    np.testing.assert_array_equal(got.token, expected.token)
    assert harness.norm_of_difference(got.cache[-1][0], expected.cache[-1][0]) < 1e-4


@pytest.mark.parametrize(("weight_format", "bits"), [("bfloat16", 16), ("fp8", 8), ("mxfp4", 4.25)])
def test_floor_counts_touched_weights_and_filled_cache(weight_format, bits):
    model = decoder.MODELS["qwen3-30b"]
    found = serve.floor_bytes(model, decoder.abstract_params(model, 48, weight_format), 16, 1024, 82.5)
    dense = 48 * (2048 * 5120 + 4096 * 2048 + 2048 * 128) + 2048 * (151_936 + 16)
    assert found["dense"] == pytest.approx(2 * dense, rel=1e-3)
    assert found["experts"] == pytest.approx(48 * 82.5 * 3 * 2048 * 768 * bits / 8, rel=1e-3)
    positions = np.mean([1024 - left for left in range(serve.STEPS)])
    assert found["cache"] == pytest.approx(48 * 16 * positions * 2 * 4 * 128 * 2)


def test_figures_of_prefill_count_the_head_once():
    model = decoder.MODELS["qwen3-30b"]
    params = decoder.abstract_params(model, 1, "bfloat16")
    found = serve.figures(model, params, Case("prefill", 1, 4096), 1.0, 1.0)
    layer = 2 * 2048 * 5120 + 2 * 4096 * 2048 + 2 * 4096 * 4096 + 2 * 2048 * 128 + 6 * 8 * 2048 * 768
    assert found["tflops"] == pytest.approx(1e-12 * (4096 * layer + 2 * 2048 * 151_936))
    assert found["tokens_per_s"] == 4096


def test_scopes_of_a_compiled_program():
    found = serve.scopes(
        """
  %loop_add_fusion.3 = bf16[1,2048]{1,0} fusion(%a), kind=kLoop, metadata={op_name="jit(decode)/while/body/router/mul"}
  ROOT %wrapped-reduce = s32[1]{0} fusion(%b), metadata={op_name="jit(decode)/head/argmax/reduce" source_line=3}
  %copy.1 = f32[] copy(%c), metadata={op_name="jit(decode)/add"}
"""
    )
    assert found == {"loop_add_fusion_3": "router", "wrapped_reduce": "head"}


def test_kernels_are_grouped_by_name_and_order():
    layer = [
        ("loop_norm_fusion", "attention"),
        ("nvjet_tst_64x8", "attention"),
        ("cublasLt::splitKreduce_kernel", "attention"),
        ("loop_rotate_fusion", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90", "attention"),
        ("gemm_fusion_dot_7", "attention"),
        ("loop_norm_fusion", "attention"),
        ("nvjet_tst_64x8", "router"),
        ("topk_fusion", "router"),
        ("MemcpyD2D", "other"),
        ("fused_moe", "experts"),
    ]
    head = [("norm_fusion_9", "head"), ("nvjet_tst_128x8", "head"), ("input_reduce_fusion", "head")]
    by_name = {"loop_norm_fusion": "attention", "loop_rotate_fusion": "attention", "topk_fusion": "router"}
    by_name |= {"norm_fusion_9": "head", "input_reduce_fusion": "head", "gemm_fusion_dot_7": "router"}
    run = 2 * (2 * layer + head)
    assert serve.group_kernels([name for name, _ in run], by_name) == [group for _, group in run]


def test_baseline_that_ends_within_a_line(tmp_path):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nprintf '{\"variant\": \"tran'\nprintf '\\377\\n' >&2\nexit 3\n")
    script.chmod(0o755)
    args = serve.options().parse_args(["--quick", "--python", str(script), "--layers", "1", "--cache", "64"])
    args.batches, args.prompt, args.rounds = [1], 64, 3
    assert serve.run_baseline(MODEL, args) == [{"variant": serve.BASELINE, "failed": "exit status 3: \ufffd"}]


def test_repeated_cases_run_once(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(serve, "measure_all", lambda args: seen.append((args.formats, serve.cases_of(args))))
    monkeypatch.setattr(serve, "show", lambda report: None)
    with pytest.raises(AttributeError):  # of the report
        serve.main(["--quick", "--formats", "fp8", "fp8", "--batches", "2", "1", "2", "--phases", "decode"])
    assert seen == [(["fp8"], [Case("decode", 2, 64), Case("decode", 1, 64)])]
