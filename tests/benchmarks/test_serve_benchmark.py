"""The decoder of benchmarks/serve.py, and how the benchmark counts bytes and groups kernels."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep.tools.benchmark import decoder, harness, inputs, serve
from jax_ep.tools.benchmark.serve import Case

MODEL, LAYERS = decoder.MODELS["tiny"], 2
GPT_OSS = decoder.MODELS["tiny-gpt-oss"]
TEXTS, PROMPT, LENGTH = 2, 20, 32


@pytest.fixture(autouse=True)
def _as_benchmarks_run():
    if jax.default_backend() != "cpu":
        pytest.skip("cuDNN has no attention of float32")
    with jax.numpy_rank_promotion("allow"):
        yield


def in_float32(tree):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, tree)


@pytest.fixture(scope="module", params=["tiny", "tiny-gpt-oss"])
def model(request):
    return decoder.MODELS[request.param]


@pytest.fixture(scope="module", params=["bfloat16", "mxfp4"])
def params(request, model):
    return in_float32(decoder.init_params(model, LAYERS, request.param))


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


def mixed_heads(model, w, queries, keys, values, window):
    """Values mixed by the softmax of all visible scores and, if there are sinks, of the sink, which has no value."""
    behind = np.arange(len(keys))[:, None] - np.arange(len(keys))
    mixed = []
    for head in range(model.heads):
        group = head % model.kv_heads
        scores = queries[:, head] @ keys[:, group].T / np.sqrt(model.head_dim)
        weights = np.exp(np.where((behind >= 0) & (behind < window), scores, -np.inf))
        rest = np.exp(w["sinks"][head]) if "sinks" in w else 0
        mixed.append(weights / (weights.sum(-1, keepdims=True) + rest) @ values[:, group])
    return np.concatenate(mixed, axis=-1)


def expert_of_gpt_oss(row, w, expert):
    hidden = row @ w.w_gate_up[expert] + w.b_gate_up[expert]
    gate, up = np.minimum(hidden[::2], 7), np.clip(hidden[1::2], -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1) @ w.w_down[expert] + w.b_down[expert]


def expert_of_qwen(row, w, expert):
    gate, up = np.split(row @ w.w_gate_up[expert], 2)
    return (gate / (1 + np.exp(-gate)) * up) @ w.w_down[expert]


def oracle(model, params, tokens):
    """Logits after one text, in NumPy and float64."""
    run_expert = expert_of_gpt_oss if model == GPT_OSS else expert_of_qwen
    x = params["embedding"][tokens]
    for layer, (w, experts) in enumerate(params["layers"]):
        rows = norm(x, w["attention_norm"]) @ w["qkv"] + w.get("qkv_bias", 0)
        heads = rows.reshape(len(x), -1, model.head_dim)
        queries, keys, values = np.split(heads, [model.heads, model.heads + model.kv_heads], axis=1)
        if "qk_norm" in w:
            queries, keys = norm(queries, w["qk_norm"][: model.heads]), norm(keys, w["qk_norm"][model.heads :])
        window = 8 if model == GPT_OSS and layer % 2 == 0 else len(x)
        mixed = mixed_heads(model, w, rotated(queries), rotated(keys), values, window)
        x = x + mixed @ w["out"] + w.get("out_bias", 0)
        flat = norm(x, w["experts_norm"])
        logits = flat @ w["router"] + w.get("router_bias", 0)
        y = np.zeros_like(x)
        for token, scores in enumerate(logits):
            chosen = np.argsort(-scores)[: model.experts.top_k]
            shares = np.exp(scores[chosen]) / np.exp(scores[chosen]).sum()
            for share, expert in zip(shares, chosen, strict=True):
                y[token] += share * run_expert(flat[token], experts, expert)
        x = x + y
    return norm(x[-1], params["norm"]) @ params["head"]


def test_prefill_equals_oracle(model, texts):
    params = in_float32(decoder.init_params(model, LAYERS, "bfloat16"))
    state, logits = jax.jit(partial(decoder.prefill, model))(params, texts)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    expected = np.stack([oracle(model, wide, text) for text in texts])
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(state.token, expected.argmax(-1))


def test_decode_logits_equal_prefill(model, params, texts):
    prefill, step = (jax.jit(partial(run, model)) for run in (decoder.prefill, decoder.step))
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


def test_decode_is_steps_in_place(model, params, texts):
    steps = LENGTH - PROMPT
    state = with_room(jax.jit(partial(decoder.prefill, model))(params, texts[:, :PROMPT])[0])
    expected = state
    step = jax.jit(partial(decoder.step, model))
    for _ in range(steps):
        expected, _ = step(params, expected)
    program = jax.jit(partial(decoder.decode, model, steps), donate_argnums=1).lower(params, state).compile()
    assert program.memory_analysis().alias_size_in_bytes >= serve.bytes_of(state.cache)
    got = program(params, state)
    np.testing.assert_array_equal(got.token, expected.token)
    assert harness.norm_of_difference(got.cache[-1][0], expected.cache[-1][0]) < 1e-4


@pytest.mark.parametrize("weight_format", ["bfloat16", "mxfp4"])
def test_two_devices_equal_one(weight_format, texts):
    """Also a batch of 1, which each device runs, and the bytes of weights that no device holds twice."""
    results = []
    for mesh in (None, inputs.expert_mesh(2)):
        params = in_float32(decoder.init_params(GPT_OSS, LAYERS, weight_format, mesh))
        specs, split = decoder.specs_of(LAYERS), decoder.STATE_SPECS.token
        prefill = decoder.on_mesh(mesh, partial(decoder.prefill, GPT_OSS), (specs, split), (decoder.STATE_SPECS, split))
        read, logits = prefill(params, texts)
        state = in_float32(decoder.init_state(GPT_OSS, LAYERS, 1, LENGTH, mesh))._replace(position=jnp.int32(20))
        specs = (specs, decoder.STATE_SPECS), decoder.STATE_SPECS
        decoded = decoder.on_mesh(mesh, partial(decoder.decode, GPT_OSS, 4), *specs)(params, state)
        results.append([logits, read.topk_idx, decoded.token[:1], decoded.topk_idx[:, :1], decoded.cache[-1][0][:1]])
    assert decoded.token.shape == (2,) and decoded.token[0] == decoded.token[1]
    for leaf in jax.tree.leaves(params["layers"][0][1]):
        assert leaf.addressable_shards[1].data.shape[0] == leaf.shape[0] // 2
    (logits, *others), (expected, *wanted) = results
    assert harness.norm_of_difference(logits, expected) < 1e-4
    assert harness.norm_of_difference(others.pop(), wanted.pop()) < 1e-4
    for got, want in zip(others, wanted, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("weight_format", "bits"), [("bfloat16", 16), ("fp8", 8), ("mxfp4", 4.25)])
def test_floor_counts_touched_weights_and_filled_cache(weight_format, bits):
    model = decoder.MODELS["qwen3-30b"]
    found = serve.floor_bytes(model, decoder.abstract_params(model, 48, weight_format), 16, 1024, 82.5)
    dense = 48 * (2048 * 5120 + 4096 * 2048 + 2048 * 128) + 2048 * (151_936 + 16)
    assert found["dense"] == pytest.approx(2 * dense, rel=1e-3)
    assert found["experts"] == pytest.approx(48 * 82.5 * 3 * 2048 * 768 * bits / 8, rel=1e-3)
    positions = np.mean([1024 - left for left in range(serve.STEPS)])
    assert found["cache"] == pytest.approx(48 * 16 * positions * 2 * 4 * 128 * 2)


def test_floor_of_gpt_oss_counts_windows_and_the_busiest_device():
    model = decoder.MODELS["gpt-oss-120b"]
    found = serve.floor_bytes(model, decoder.abstract_params(model, 36, "mxfp4"), 8, 1024, 20.5)
    dense = 36 * (2880 * 5120 + 4096 * 2880 + 2880 * 128) + 2880 * (201_088 + 8)
    assert found["dense"] == pytest.approx(2 * dense, rel=1e-3)
    assert found["experts"] == pytest.approx(36 * 20.5 * 3 * 2880 * 2880 * 4.25 / 8, rel=0.01)
    positions = np.mean([1024 - left for left in range(serve.STEPS)])
    assert found["cache"] == pytest.approx(18 * 8 * (positions + 128) * 2 * 8 * 64 * 2)
    chosen = np.array([[[0, 1], [4, 5], [0, 6]], [[2, 3], [2, 3], [2, 3]]])
    assert [serve.touched_experts(chosen, 8, devices) for devices in (1, 2)] == [(5 + 2) / 2, (3 + 2) / 2]


def test_figures_of_prefill_count_the_head_once():
    model = decoder.MODELS["qwen3-30b"]
    params = decoder.abstract_params(model, 1, "bfloat16")
    found = serve.figures(model, params, Case("prefill", 1, 4096), 1, 1.0, 1.0)
    layer = 2 * 2048 * 5120 + 2 * 4096 * 2048 + 2 * 4096 * 4096 + 2 * 2048 * 128 + 6 * 8 * 2048 * 768
    assert found["tflops"] == pytest.approx(1e-12 * (4096 * layer + 2 * 2048 * 151_936))
    assert found["tokens_per_s"] == 4096


def test_figures_of_prefill_are_per_device_and_count_windows():
    model = decoder.MODELS["gpt-oss-120b"]
    params = decoder.abstract_params(model, 3, "bfloat16")
    found = serve.figures(model, params, Case("prefill", 2, 4096), 2, 1.0, 1.0)
    dense = 3 * (2 * 2880 * 5120 + 2 * 4096 * 2880 + 2 * 2880 * 128 + 6 * 4 * 2880 * 2880)
    attention = 4 * 4096 * (2048 + 2 * 128)  # one layer sees half of the prompt, two see windows
    assert found["tflops"] == pytest.approx(1e-12 * (4096 * (dense + attention) + 2 * 2880 * 201_088))
    assert found["tokens_per_s"] == 2 * 4096


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


def test_serve_benchmark_without_a_gpu(monkeypatch):
    """The baseline does not run first, which may take minutes."""
    if jax.default_backend() == "gpu":
        pytest.skip("needs a machine without a GPU")
    monkeypatch.setattr(serve, "run_baseline", None)
    with pytest.raises(SystemExit, match="bench serve: needs a GPU; nothing measured"):
        serve.main([], "bench serve")


def test_serve_benchmark_layers_that_never_compile(capsys):
    with pytest.raises(SystemExit):
        serve.options().parse_args(["--layers", "1000"])
    assert "argument --layers: '1000', expected an integer from 1 to 64" in capsys.readouterr().err


def test_repeated_cases_run_once(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(serve, "measure_all", lambda args: seen.append((args.formats, serve.cases_of(args))))
    monkeypatch.setattr(serve, "show", lambda report: None)
    serve.main(["--quick", "--formats", "fp8", "fp8", "--batches", "2", "1", "2", "--phases", "decode"])
    assert seen == [(["fp8"], [Case("decode", 2, 64), Case("decode", 1, 64)])]
