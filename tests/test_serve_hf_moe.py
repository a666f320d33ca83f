"""serve_hf_moe.py on tiny checkpoints: logits and greedy texts match Transformers (make_golden_logits.py)."""

import dataclasses
import functools
import hashlib
import json
import os
import re
import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

for package in ("flax", "optax", "rich", "safetensors", "tokenizers"):
    pytest.importorskip(package)

from flax import nnx
from safetensors.numpy import load_file

import serve_hf_moe
from harness import ROOT, STRICT_PYTHON, run_command
from hf import make_tiny_checkpoint, training
from hf.config import DecoderConfig, stop_tokens
from hf.loading import load, save
from hf.training import train, windows_of
from hub_checkpoints import in_int32, packed_config, write
from jax_ep.checkpoints import Checkpoint
from lm.devices import make_mesh
from lm.generation import Generator, Sampling, choose

PAGE = ROOT / "docs" / "serving.md"
GOLDEN = Path(__file__).parent / "data" / "golden_logits.npz"
FAMILIES = tuple(make_tiny_checkpoint.CONFIGS)
FLOAT32 = {"dtype": jnp.float32, "param_dtype": jnp.float32}
pytestmark = pytest.mark.filterwarnings("ignore:MoE. no mesh is set")  # A decoder on one device of several.
TOLERANCE = 1e-4  # Of logits, relative to the largest.
every_family = pytest.mark.parametrize("family", FAMILIES)
needs_4_devices = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")


@dataclasses.dataclass(frozen=True)
class Golden:
    """Results of Transformers: for each prompt, its ids, its logits, and its greedy continuation."""

    prompts: list[np.ndarray]
    logits: list[np.ndarray]
    new: list[list[int]]


@functools.cache
def golden(family):
    with np.load(GOLDEN) as file:
        found = {name.removeprefix(f"{family}/"): file[name] for name in file.files if name.startswith(f"{family}/")}
    digest = hashlib.sha256(b"".join(make_tiny_checkpoint.weights(family, int(found["seed"])).values())).hexdigest()
    assert digest == found["digest"], "the weights are not those that Transformers had: run make_golden_logits.py"
    count = sum(name.startswith("prompt") for name in found)
    prompts, logits, new = ([found[f"{kind}{i}"] for i in range(count)] for kind in ("prompt", "logits", "new"))
    return Golden(prompts, logits, [row.tolist() for row in new])


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """The tiny checkpoints that Transformers ran."""
    made = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    with np.load(GOLDEN) as file:
        for family, folder in made.items():
            make_tiny_checkpoint.make(family, folder, int(file[f"{family}/seed"]))
    return made


def mesh_of(num_ranks, expert_parallel=None):
    return make_mesh(max_devices=num_ranks, num_experts=4, expert_parallel=expert_parallel or num_ranks)


def error(got, want):
    return float(np.abs(np.asarray(got) - want).max() / np.abs(want).max())


@nnx.jit
def forward(decoder, tokens, token_mask=None):
    return decoder.logits(decoder(tokens, token_mask=token_mask).hidden)


@needs_4_devices
@pytest.mark.slow
@every_family
def test_greedy_texts_are_those_of_transformers(family, folders):
    """Prompts of several lengths in one padded batch, through the cache, on a mesh of four devices."""
    want, mesh = golden(family), mesh_of(4)
    decoder = load(Checkpoint(folders[family]), mesh=mesh, **FLOAT32)
    assert decoder.model.layers[-1].mlp.w_down[...].sharding.spec[0] == "expert"
    shown = []
    out = Generator(decoder, mesh)(want.prompts, max_new=len(want.new[0]), show=lambda new: shown.append(str(new)))
    assert out.tokens == want.new
    for logits, expected in zip(out.prompt_logits, want.logits, strict=True):
        assert error(logits, expected[-1]) < TOLERANCE
    assert len(shown) > 2 and shown[-1] == str(out.tokens) and shown[0] == str([row[:1] for row in want.new])


@pytest.mark.slow
@every_family
def test_logits_are_those_of_transformers(family, folders):
    """Logits match at every position, on one device, and depend on windows and sinks."""
    want = golden(family)
    decoder = load(Checkpoint(folders[family]), **FLOAT32)
    for prompt, expected in zip(want.prompts, want.logits, strict=True):
        assert error(forward(decoder, jnp.asarray(prompt)[None])[0], expected) < TOLERANCE
    prompt, expected = max(zip(want.prompts, want.logits, strict=True), key=lambda pair: len(pair[0]))
    padded, mask = np.pad(prompt, (0, 9)), np.arange(len(prompt) + 9) < len(prompt)
    assert error(forward(decoder, padded[None], mask[None])[0, : len(prompt)], expected) < TOLERANCE

    windows = [layer.self_attn.window for layer in decoder.model.layers]
    assert any(windows) == (family != "qwen3_moe")
    if any(windows):
        assert max(window for window in windows if window) < len(prompt)
        for layer in decoder.model.layers:
            layer.self_attn.window = None
        assert error(forward(decoder, prompt[None])[0], expected) > 100 * TOLERANCE
        for layer, window in zip(decoder.model.layers, windows, strict=True):
            layer.self_attn.window = window
    if family == "gpt_oss":
        for layer in decoder.model.layers:
            layer.self_attn.sinks[...] = jnp.full_like(layer.self_attn.sinks[...], -jnp.inf)
        assert error(forward(decoder, prompt[None])[0], expected) > 100 * TOLERANCE


@needs_4_devices
@pytest.mark.slow
@every_family
def test_batches_and_low_latency_do_not_change_texts(family, folders):
    """A batch that the devices cannot share; a single text; the low-latency path; a stop token within a program."""
    want, steps = golden(family), len(golden(family).new[0])
    checkpoint = Checkpoint(folders[family])
    mesh = mesh_of(4, expert_parallel=2)
    decoder = load(checkpoint, mesh=mesh, **FLOAT32)
    assert Generator(decoder, mesh)(want.prompts[:3], max_new=steps).tokens == want.new[:3]
    alone = load(checkpoint, **FLOAT32)
    assert Generator(alone)(want.prompts[1:2], max_new=steps).tokens == want.new[1:2]
    assert Generator(alone, experts="same")(want.prompts, max_new=steps).tokens == want.new

    stop = want.new[0][5]
    ended = Generator(alone, stop_tokens=(stop, 256))(want.prompts, max_new=steps).tokens
    assert ended == [row[: row.index(stop) + 1] if stop in row else row for row in want.new]
    assert len(ended[0]) < steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "experts", "largest"), [("mixtral", "fp8", 0.2), ("gpt_oss", "int8", 0.1), ("gpt_oss", "mxfp4", 0.7)]
)
def test_quantized_experts(folders, family, experts, largest):
    """Those of gpt-oss have biases, interleaved gates and limits, and sizes that FP8 does not support."""
    want, decoder = golden(family), load(Checkpoint(folders[family]), **FLOAT32)
    logits = Generator(decoder, experts=experts)(want.prompts[:2], max_new=1).prompt_logits
    assert TOLERANCE < error(logits, np.stack([rows[-1] for rows in want.logits[:2]])) < largest
    if family == "gpt_oss":
        with pytest.raises(ValueError, match="128"):
            Generator(decoder, experts="fp8")


@needs_4_devices
@pytest.mark.slow
@pytest.mark.usefixtures("implicit_promotion")
@every_family
def test_training_lowers_the_loss_and_is_saved(family, folders, tmp_path):
    mesh, checkpoint = mesh_of(4, expert_parallel=2), Checkpoint(folders[family])
    decoder = load(checkpoint, mesh=mesh, **FLOAT32)
    before = forward(decoder, golden(family).prompts[0][None])
    text = np.array(make_tiny_checkpoint.tokenizer().encode("To be, or not to be. " * 40).ids, np.int32)
    windows = windows_of(text, batch_size=8, length=16, mesh=mesh)
    steps = list(train(decoder, windows, steps=6, learning_rate=3e-3, mesh=mesh))
    assert steps[-1].loss < steps[0].loss - 0.5
    per_token = checkpoint.moe_options()["num_experts_per_tok"]
    np.testing.assert_array_equal(steps[0].load.sum(axis=1), 8 * 16 * per_token)
    experts = decoder.model.layers[-1].mlp.w_down[...]
    assert experts.sharding.spec[0] == "expert"

    after = forward(decoder, golden(family).prompts[0][None])
    assert error(after, np.asarray(before)) > 0.1
    save(tmp_path / "trained", decoder, checkpoint.config, dtype=jnp.float32)
    saved = Checkpoint(tmp_path / "trained")
    assert saved.config == checkpoint.config and sorted(saved.names) == sorted(checkpoint.names)
    again = load(saved, **FLOAT32)
    assert error(forward(again, golden(family).prompts[0][None]), np.asarray(after)) < TOLERANCE


def test_sampling(rng):
    """Token frequencies within top_p follow the softmax at a temperature; the others never occur."""
    share = np.array([0.05, 0.4, 0.15, 0.3, 0.1])
    logits = jnp.broadcast_to(jnp.log(jnp.array(share, jnp.float32)), (20_000, 5))
    key = jax.random.key(rng.integers(2**31))
    assert set(np.asarray(choose(logits, Sampling.of(0, 1), key))) == {1}
    for temperature, top_p, kept in [(1.0, 1.0, [0, 1, 2, 3, 4]), (1.0, 0.8, [1, 2, 3]), (2.0, 0.3, [1])]:
        counts = np.bincount(choose(logits, Sampling.of(temperature, top_p), key), minlength=5)
        expected = np.where(np.isin(np.arange(5), kept), share ** (1 / temperature), 0)
        np.testing.assert_allclose(counts / counts.sum(), expected / expected.sum(), atol=0.02)
        assert (counts > 0).tolist() == (expected > 0).tolist()
    with pytest.raises(ValueError, match="top_p"):
        Sampling.of(0.5, 0.0)


def test_config():
    """Read both versions of the rotary entries; unknown values are errors."""
    config = make_tiny_checkpoint.config_of("gpt_oss")
    newer = {name: value for name, value in config.items() if name not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = config["rope_scaling"] | {"rope_theta": config["rope_theta"]}
    assert DecoderConfig.from_json(newer) == DecoderConfig.from_json(config)
    rope = DecoderConfig.from_json(config).rope
    assert rope.scale == pytest.approx(0.1 * np.log(32) + 1)
    plain = 1.5e5 ** (-np.arange(16) / 16)
    # Fast channels stay, and slow ones are stretched by the factor.
    np.testing.assert_allclose(rope.frequencies[0], plain[0])
    np.testing.assert_allclose(rope.frequencies[5:], plain[5:] / 32)
    for change, message in [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"vocab_size": "x"}, "vocab_size='x', expected an integer from 1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "rope_scaling.factor=0, expected a number"),
    ]:
        with pytest.raises(ValueError, match=f"^config.json: {message}"):
            DecoderConfig.from_json(config | change)


@pytest.mark.parametrize("method", ["compressed-tensors", "gptq"])
def test_packed_weights_load_as_their_numbers(method, folders, tmp_path):
    """INT4 in attention and experts, as models in "w4a16" store them."""
    folder = folders["qwen3_moe"]
    dense, packed = {}, {}
    for name, w in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            dense[name] = packed[name] = w
            continue
        groups = w.astype(np.float32).reshape(len(w), -1, 32)
        scales = np.abs(groups).max(-1) / 7
        numbers = np.rint(groups / scales[..., None])
        dense[name] = (numbers * scales[..., None]).reshape(w.shape)
        words = in_int32((numbers + 8).astype(np.uint8).reshape(w.shape))
        if method == "gptq":
            base, zeros = name.removesuffix("weight"), np.full((scales.shape[1], len(w) // 8), 0x77777777, np.int32)
            packed |= {f"{base}qweight": words.T, f"{base}scales": scales.T, f"{base}qzeros": zeros}
        else:
            packed |= {f"{name}_packed": words, f"{name}_scale": scales, f"{name}_shape": np.array(w.shape)}
    config = json.loads((folder / "config.json").read_text())
    want = load(Checkpoint(write(tmp_path / "dense", config, dense)), **FLOAT32)
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    config["quantization_config"] = gptq if method == "gptq" else packed_config("symmetric", 32)
    got = load(Checkpoint(write(tmp_path / "packed", config, packed)), **FLOAT32)
    assert len(packed) > len(dense) + 40
    jax.tree.map(np.testing.assert_array_equal, *(nnx.to_pure_dict(nnx.state(decoder)) for decoder in (got, want)))


def test_damaged_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a valid tokenizer \(.*: download it again"):
        serve_hf_moe.read_tokenizer(tmp_path / "tokenizer.json")


def test_tiny_checkpoint_does_not_overwrite(tmp_path, capsys):
    (tmp_path / "config.json").write_text("theirs")
    with pytest.raises(SystemExit):
        make_tiny_checkpoint.main(["mixtral", str(tmp_path)])
    assert "has a checkpoint already" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["theirs"]


def test_stop_tokens(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert stop_tokens(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert stop_tokens(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert stop_tokens(tmp_path) == (7, 9)
    for content in ("{", "[]", '{"eos_token_id": "x"}'):
        (tmp_path / "generation_config.json").write_text(content)
        with pytest.raises(ValueError, match=r"generation_config\.json: "):
            stop_tokens(tmp_path)


def test_what_does_not_fit_is_refused(folders):
    checkpoint = Checkpoint(folders["qwen3_moe"])
    checkpoint.config = checkpoint.config | {"tie_word_embeddings": False}
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        load(checkpoint)
    checkpoint = Checkpoint(folders["gpt_oss"])
    checkpoint.config = checkpoint.config | {"attention_bias": False}
    with pytest.raises(ValueError, match=r"does not describe, such as model\.layers\.0\.self_attn\.\w_proj\.bias"):
        load(checkpoint)
    checkpoint.config = checkpoint.config | {"attention_bias": True, "vocab_size": 300}
    with pytest.raises(ValueError, match=r"lm_head.kernel is \w+\[96, 257\] .* makes it \w+\[96, 300\]"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("--top-p 2", "top_p=2.0, expected"),
        ("--prompt=", r"prompts of \[0\] tokens, expected"),
        ("--experts fp8", "is 96, expected a multiple of 128"),
        ("--max-new 2147483647", "max_new=2147483647, expected"),
        ("--train 1 --batch-size 3 --expert-parallel 2", "batch_size=3 must be"),
        ("--train 1 --length 999", "the text has 2 bytes, too few"),
    ],
)
def test_options_are_checked_before_weights_are_read(options, error, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(serve_hf_moe, "load", lambda *args, **options: pytest.fail("read"))
    (tmp_path / "text").write_text("ab")
    of_training = ["--text", str(tmp_path / "text"), "--save", str(tmp_path)] if "--train" in options else []
    with pytest.raises(ValueError, match=error):
        serve_hf_moe.main([str(folders["gpt_oss"]), *options.split(), *of_training])


@pytest.mark.usefixtures("implicit_promotion")
def test_training_that_is_not_finite_saves_nothing(folders, tmp_path, monkeypatch):
    (text := tmp_path / "text").write_text("To be, or not to be. " * 40)
    options = ["--train", "9", "--text", str(text), "--save", str(tmp_path / "trained"), "--length", "16"]
    options += [str(folders["mixtral"]), "--learning-rate", "1e37"]
    with pytest.raises(
        ValueError, match=r"^--train 9: loss nan or weights after step [2-9] are not finite, so nothing "
    ):
        serve_hf_moe.main(options)

    def train(decoder, *_, **options):
        decoder.model.norm.scale[...] = decoder.model.norm.scale[...] * np.nan
        yield training.Step(1.0, np.ones((2, 8)))

    monkeypatch.setattr(training, "train", train)
    with pytest.raises(ValueError, match=r"loss 1\.0 or weights after step 1 are not finite"):
        serve_hf_moe.main(options)
    assert list((tmp_path / "trained").iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("implicit_promotion")
def test_command_line(folders, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("To be, or not to be. " * 40)
    sizes = (
        "--train 3 --batch-size 2 --length 16 --learning-rate 1e-3 --max-new 9 --prompt To --prompt not --temperature 1"
    )
    options = [*sizes.split(), "--text", str(text), "--save", str(tmp_path / "trained")]
    result = serve_hf_moe.main([str(folders["mixtral"]), *options, "--expert-parallel", "2"])
    assert len(result["losses"]) == 3 and result["losses"][-1] < result["losses"][0]
    out = capsys.readouterr().out
    assert "2 prompts: prefill" in out and "tokens/s" in out and "on 2 cpu device(s)" in out
    assert all(prompt + made in out for prompt, made in zip(("To", "not"), result["texts"], strict=True))
    again = serve_hf_moe.main([str(tmp_path / "trained"), "--max-new", "9", "--prompt", "To", "--prompt", "not"])
    assert again["texts"] != result["texts"]  # Greedy, with the same weights.
    with pytest.raises(SystemExit):
        serve_hf_moe.main([str(tmp_path / "nowhere")])
    assert "there is no" in capsys.readouterr().err


@pytest.mark.slow
def test_commands_of_the_page_run(tmp_path):
    """The page's commands of examples/ run one after another, on CPU devices; its benchmark needs GPUs."""
    commands = re.findall(r"^python (examples/.*)$", PAGE.read_text(), re.MULTILINE)
    assert len(commands) >= 4
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "README.md").symlink_to(ROOT / "README.md")
    for command in commands:
        done = run_command(*STRICT_PYTHON, *shlex.split(command), cwd=tmp_path, XLA_FLAGS=os.environ["XLA_FLAGS"])
        assert done.returncode == 0, done.stderr
        assert "tokens/s" in done.stdout or "wrote a tiny" in done.stdout
