"""Mistakes in a checkpoint or a call: errors state the actual value, the expected value, and the remedy."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("safetensors")

from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import hub_checkpoints
from cases import BF16, F16, F32
from harness import make_mesh
from hub_checkpoints import FP8, FP8_CONFIG, HUB, NO_LAYERS, assert_equal, fp8_checkpoint, written
from jax_ep.checkpoints import Checkpoint, save
from jax_ep.quantization import QuantizedWeights, quantize

INDEX = "model.safetensors.index.json"


def reading(change, call=lambda checkpoint: None):
    return lambda folder: (change(folder), call(Checkpoint(folder)))


def call(function):
    return lambda folder: function(Checkpoint(folder))


def config(**changes):
    def change(folder):
        path = folder / "config.json"
        new = {key: value for key, value in (json.loads(path.read_text()) | changes).items() if value is not None}
        path.write_text(json.dumps(new))

    return change


def index(change):
    def write(folder):
        path = folder / INDEX
        content = json.loads(path.read_text())
        change(content["weight_map"])
        path.write_text(json.dumps(content))

    return write


def load(checkpoint, **options):
    return checkpoint.moe_weights(0, **options)


EXPERT = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
MISTAKES = {
    "folder": (lambda folder: Checkpoint(folder / "nowhere"), FileNotFoundError, "cannot read .*nowhere/config.json"),
    "kind of folder": (lambda folder: Checkpoint(None), TypeError, "Checkpoint: folder is a NoneType, expected a str"),
    "index": (reading(lambda folder: (folder / INDEX).unlink()), FileNotFoundError, "has no tensors, expected either"),
    "weight_map": (
        reading(lambda folder: (folder / INDEX).write_text("{}")),
        ValueError,
        "the file lacks 'weight_map'",
    ),
    "tensor": (reading(index(lambda entries: entries.pop(EXPERT)), load), ValueError, r"no tensor '.*3.w2"),
    "sharding": (call(lambda c: c.read("other", sharding=P("expert"))), TypeError, "sharding is a P.*, expected a jax"),
    "axes of the sharding": (
        call(lambda c: c.read("other", sharding=NamedSharding(make_mesh((2,), ("a",)), P(*[None] * 4, "a")))),
        ValueError,
        r"other' has shape \(2, 3\), expected axes that NamedSharding.* divides over devices",
    ),
    "axes of the sharding without devices": (
        call(lambda c: c.read("other", sharding=NamedSharding(make_mesh((2,), ("a",)), P("a", None, None)))),
        ValueError,
        r"^Checkpoint.read: 'other' has shape \(2, 3\), expected axes .*; pass another sharding",
    ),
    "uneven sharding": (
        call(lambda c: c.read("other", sharding=NamedSharding(make_mesh((2,), ("a",)), P(None, "a")))),
        ValueError,
        r"^Checkpoint.read: 'other' has shape \(2, 3\), expected axes .*divide.*; pass another sharding",
    ),
    "sharding of an abstract mesh": (
        call(lambda c: c.read("other", sharding=NamedSharding(make_mesh((2,), ("a",)).abstract_mesh, P("a")))),
        ValueError,
        r"^Checkpoint.read: 'other' has shape \(2, 3\), expected axes .*AbstractMesh",
    ),
    "layer as text": (call(lambda c: c.moe_weights("0")), ValueError, "layer='0' is not an MoE layer"),
    "name": (call(lambda c: c.read("othre")), ValueError, r"no tensor 'othre' \(similar: 'other'\); Checkpoint.names"),
    "name of another type": (call(lambda c: c.read([])), TypeError, "name is a list, expected a str"),
    "transpose as text": (call(lambda c: c.read("other", transpose="no")), TypeError, "read: transpose='no' is a str"),
    "quantized as text": (call(lambda c: load(c, quantized="no")), TypeError, "moe_weights: quantized='no' is a str"),
    "activation of gpt-oss": (
        reading(config(model_type="gpt_oss", hidden_act="gelu"), Checkpoint.moe_options),
        NotImplementedError,
        "moe_options: config.json has hidden_act='gelu', expected 'silu'",
    ),
    "layer of another type": (call(lambda c: c.moe_weights(True)), ValueError, "layer=True is not an MoE layer"),
    "model_type": (
        reading(config(model_type="llama"), lambda checkpoint: checkpoint.moe_layers),
        ValueError,
        "model_type is 'llama', expected",
    ),
    "model_type missing": (reading(config(model_type=None), load), ValueError, "model_type is None"),
    "key": (reading(config(num_local_experts=None), load), ValueError, "no 'num_local_experts' or 'num_experts'"),
    "activation": (reading(config(hidden_act="tanh"), Checkpoint.moe_options), NotImplementedError, "'tanh', expected"),
    "experts": (reading(config(num_local_experts=4), load), ValueError, r"\(8, 12\), expected \(4, 12\)"),
    "shape": (reading(config(intermediate_size=7), load), ValueError, r"\(10, 12\), expected \(7, 12\) for w_gate_up"),
    "layer": (call(lambda c: c.moe_weights(4)), ValueError, r"layer=4 is not an MoE layer.*\(0, 1, 2"),
    "dtype": (call(lambda c: load(c, dtype=jnp.int8)), TypeError, "dtype=int8, expected one of bfl"),
    "no dtype": (call(lambda c: c.read("other", dtype="half-ish")), TypeError, "is not a dtype, expected bfloat16"),
    "quantized": (call(lambda c: load(c, quantized=True)), ValueError, "not stored in FP8.*serving_weights"),
    "mesh": (call(lambda c: load(c, mesh="gpu")), TypeError, "mesh is a str"),
    "read under jit": (
        call(lambda c: jax.jit(lambda: c.read("other"))()),
        ValueError,
        "read: called while jax.jit trac",
    ),
    "weights under jit": (call(lambda c: jax.eval_shape(lambda: load(c))), ValueError, "weights: called while jax.jit"),
    "no mesh under grad": (
        call(lambda c: jax.grad(lambda x: x * load(c)["router"][0, 0])(1.0)),
        ValueError,
        "mesh=None while JAX traces a function, expected a mesh",
    ),
    "axis": (call(lambda c: load(c, mesh=make_mesh((2,), ("data",)))), ValueError, r"axes \('data',\), exp"),
    "name of the axis": (call(lambda c: load(c, axis_name=1)), TypeError, r"^Checkpoint.moe_weights: axis_name=1 is"),
    "transpose": (call(lambda c: c.read("bias", transpose=True)), ValueError, r"\(3,\), expected at least two"),
    "eight bits": (call(lambda c: c.read("bytes", dtype=F32)), ValueError, "stored as uint8, without scales"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_checkpoint_read_mistakes(mistake, tmp_path, rng):
    call, error, text = MISTAKES[mistake]
    tensors, _ = hub_checkpoints.layer(HUB["mixtral"], 0, rng)
    others = {"other": np.ones((2, 3), F32), "bias": np.ones(3, F32), "bytes": np.ones((2, 2), np.uint8)}
    half = len(tensors) // 2
    parts = dict(list(tensors.items())[:half]), dict(list(tensors.items())[half:]) | others
    hub_checkpoints.write(tmp_path, HUB["mixtral"].config, *parts)
    with pytest.raises(error, match=text):
        call(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias=True, expected False: biases of shared experts"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2, expected 1"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias=True"),
        ("longcat_flash", {"router_bias": True}, "router_bias=True"),
    ],
)
def test_checkpoint_unsupported_weights(name, changes, text, tmp_path, rng):
    checkpoint, _ = written(name, tmp_path, rng, **changes)
    for call in (checkpoint.moe_options, lambda: checkpoint.moe_weights(HUB[name].layers[0])):
        with pytest.raises(NotImplementedError, match=text):
            call()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deepseek_v2", {"topk_method": "other"}),
        ("deepseek_v2", {"norm_topk_prob": True}),
        ("deepseek_v3", {"topk_method": "greedy"}),
        ("deepseek_v3", {"scoring_func": "softmax"}),
        ("minimax_m2", {"scoring_func": "softmax"}),
        ("phimoe", {"router_jitter_noise": 0.02}),
    ],
)
def test_checkpoint_unsupported_routers(name, changes, tmp_path, rng):
    checkpoint, want = written(name, tmp_path, rng, **changes)
    ((key, value),) = changes.items()
    with pytest.raises(NotImplementedError, match=f"{key}={value!r}, expected .*moe_weights"):
        checkpoint.moe_options()
    number = HUB[name].layers[0]
    assert_equal(checkpoint.moe_weights(number), want[number])


def test_checkpoint_experts_in_several_dtypes(tmp_path, rng):
    tensors, _ = hub_checkpoints.layer(HUB["mixtral"], 0, rng, BF16)
    tensors[EXPERT] = tensors[EXPERT].astype(F16)
    checkpoint = Checkpoint(hub_checkpoints.write(tmp_path, HUB["mixtral"].config, tensors))
    with pytest.raises(ValueError, match=r"experts.0.w2.weight' in bfloat16 and .*experts.3.w2.weight' in float16"):
        checkpoint.moe_weights(0)
    assert checkpoint.moe_weights(0, dtype=F32)["w_down"].dtype == F32


def test_checkpoint_experts_in_two_forms(tmp_path, rng):
    tensors, weights = hub_checkpoints.layer(HUB["mixtral"], 0, rng)
    tensors["model.layers.0.mlp.experts.down_proj"] = np.zeros_like(weights["w_down"]).swapaxes(1, 2)
    checkpoint = Checkpoint(hub_checkpoints.write(tmp_path, HUB["mixtral"].config, tensors))
    with pytest.raises(ValueError, match=r"layer 0 has '.*experts.0.w2.weight' and '.*experts.down_proj', expected"):
        checkpoint.moe_weights(0)


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.uint8, FP8], ids=str)
def test_checkpoint_integer_weights(dtype, tmp_path, rng):
    tensors, _ = hub_checkpoints.layer(HUB["mixtral"], 0, rng)
    tensors[EXPERT] = tensors[EXPERT].astype(dtype)
    checkpoint = Checkpoint(hub_checkpoints.write(tmp_path, HUB["mixtral"].config, tensors))
    with pytest.raises(ValueError, match=rf"experts.3.w2.weight' is stored as {np.dtype(dtype)}"):
        checkpoint.moe_weights(0, dtype=F32)


@pytest.mark.parametrize(
    ("values", "scales"),
    [("w", np.ones((1, 1), np.int32)), ("w", np.ones((1, 1), bool)), ("w_blocks", np.ones(1, FP8))],
)
def test_checkpoint_scale_dtype(values, scales, tmp_path):
    stored = np.ones((3, 4), FP8) if values == "w" else np.ones((1, 16), np.uint8)
    tensors = {values: stored, "w_scale_inv" if values == "w" else "w_scales": scales}
    with pytest.raises(ValueError, match=rf"{scales.dtype}.*, expected"):
        Checkpoint(hub_checkpoints.write(tmp_path, {}, tensors)).read(values, dtype=F32)


def test_checkpoint_fp8_mismatched_scales(tmp_path, rng):
    checkpoint, _ = fp8_checkpoint(tmp_path / "odd", rng, 256, 192)
    with pytest.raises(ValueError, match=r"w_gate_up has shape \(2, 256, 384\), expected I and H that are multiples"):
        checkpoint.moe_weights(3, quantized=True)

    checkpoint, _ = fp8_checkpoint(tmp_path / "whole", rng)
    tensors = {name: np.asarray(checkpoint.read(name)) for name in checkpoint.names}
    name = "model.layers.3.mlp.experts.1.up_proj.weight_scale_inv"
    other_blocks = tensors | {name: np.ones((3, 4), F32)}
    with pytest.raises(ValueError, match=r"weight_scale_inv' has shape \(3, 4\) and dtype float32, expected \(3, 2\)"):
        Checkpoint(hub_checkpoints.write(tmp_path / "blocks", checkpoint.config, other_blocks)).moe_weights(3)
    del tensors[name]
    with pytest.raises(ValueError, match=r"up_proj.weight' is stored as float8_e4m3fn, without scales"):
        Checkpoint(hub_checkpoints.write(tmp_path / "none", checkpoint.config, tensors)).moe_weights(3)


def test_checkpoint_unknown_quantization(tmp_path):
    folder = hub_checkpoints.write(tmp_path, {}, {"t": np.zeros((2, 2), np.uint8)})
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content.replace(b"[2,2]", b"[2,4]").replace(b'"U8"', b'"F4"'))
    with pytest.raises(NotImplementedError, match="'t' has dtype 'F4', expected one of"):
        Checkpoint(folder).read("t")


def without(weights, name):
    return {key: value for key, value in weights.items() if key != name}


def fp8_weights(array):
    values = array.swapaxes(1, 2).astype(FP8)
    scales = np.ones((array.shape[0], *(-(-size // 128) for size in values.shape[1:])), F32)
    return QuantizedWeights(values, scales, "fp8")


def deleted():
    array = jnp.ones(3)
    array.delete()
    return array


SAVING = {
    "layers": (lambda w: {"layers": {1: w}}, ValueError, r"layers has \[1\], expected the MoE layers .* \[0\]"),
    "bool as layer": (lambda w: {"layers": {False: w}}, ValueError, r"layers has \[False\], expected the MoE .* \[0\]"),
    "missing": (lambda w: {"layers": {0: without(w, "router")}}, ValueError, r"has \['w_down', 'w_gate_up'\]"),
    "unknown": (lambda w: {"layers": {0: w | {"b_down": w["router"]}}}, ValueError, "layer 0 has .*b_down.*expected"),
    "shape": (
        lambda w: {"layers": {0: w | {"w_down": w["w_down"].swapaxes(1, 2)}}},
        ValueError,
        r"has shape \(8, 12, 10\), expected \(8, 10",
    ),
    "kind": (lambda w: {"layers": {0: w | {"router": [1.0]}}}, TypeError, "router of layer 0 is a list, expected"),
    "masked": (
        lambda w: {"layers": {0: w | {"router": np.ma.array(w["router"], mask=w["router"] > 0)}}},
        TypeError,
        "router of layer 0 is a MaskedArray, expected a JAX",
    ),
    "name twice": (lambda w: {"others": {EXPERT: w["router"]}}, ValueError, "others has '.*experts.3.w2.weight'"),
    "name of another form": (
        lambda w: {"others": {"model.layers.0.mlp.experts.down_proj": w["w_down"]}},
        ValueError,
        "which belongs to a layer",
    ),
    "integers": (
        lambda w: {"layers": {0: w | {"w_down": w["w_down"].astype(np.int32)}}},
        TypeError,
        "save: w_down of layer 0 has dtype int32",
    ),
    "FP8 without scales": (
        lambda w: {"layers": {0: w | {"w_down": w["w_down"].astype(FP8)}}},
        TypeError,
        "w_down of layer 0 has dtype float8_e4m3fn, expected floats",
    ),
    "list of layers": (lambda w: {"layers": [w]}, TypeError, "layers is a list, expected a dict; pass {number"),
    "dtype": (lambda w: {"others": {"norm": np.ones(3, np.complex64)}}, TypeError, r"has dtype complex64, exp"),
    "key": (lambda w: {"others": {"key": jax.random.key(0)}}, TypeError, r"others\['key'\] has dtype key"),
    "others": (lambda w: {"others": [w]}, TypeError, "others is a list, expected a dict"),
    "parameters": (lambda w: {"layers": {0: [w]}}, TypeError, r"layers\[0\] is a list, expected a dict"),
    "reserved name": (lambda w: {"others": {"__metadata__": w["router"]}}, ValueError, "other than '__metadata__'"),
    "long name": (lambda w: {"others": {"n" * 1001: w["router"]}}, ValueError, "a str of at most 1000 printable"),
    "number as a name": (lambda w: {"others": {1: w["router"]}}, ValueError, "others has 1, expected a str"),
    "deleted": (lambda w: {"others": {"norm": deleted()}}, ValueError, r"others\['norm'\] is a deleted array"),
    "set": (lambda w: {"config": {"x": {1}}}, TypeError, "config cannot be written as JSON .*set.*, expected dicts"),
    "NaN": (lambda w: {"config": {"x": float("nan")}}, ValueError, "config cannot be written as JSON .*nan"),
    "key twice": (lambda w: {"config": {"1": 0, 1: 0}}, ValueError, "config cannot be .*'1' occurs twice"),
    "range": (lambda w: {"config": {"num_experts_per_tok": 9}}, ValueError, "save: config.json has 9 for 'num_experts"),
    "other": (lambda w: {"others": {"norm": None}}, TypeError, r"others\['norm'\] is a NoneType"),
    "fp8": (lambda w: {"others": {"norm": np.ones(3, FP8)}}, ValueError, "tensors in FP8, but config has no quant"),
    "no fp8": (lambda w: {"config": {"quantization_config": FP8_CONFIG}}, ValueError, "has a quantization_config"),
    "blocks": (
        lambda w: {"layers": {0: w | {"w_down": fp8_weights(w["w_down"])}}},
        ValueError,
        "w_down of layer 0 is QuantizedWeights, expected an array",
    ),
    "another format": (
        lambda w: {"layers": {0: w | {"w_down": quantize(jnp.asarray(w["w_down"]), "int8")}}},
        TypeError,
        "w_down of layer 0 is QuantizedWeights in format 'int8', expected an array",
    ),
    "bytes": (lambda w: {"max_shard_bytes": 0}, ValueError, "max_shard_bytes=0, expected a positive int"),
    "overwrite": (lambda w: {"overwrite": "no"}, TypeError, "overwrite='no' is a str, expected True or False"),
    "model_type": (lambda w: {"config": {"model_type": "gpt2"}}, ValueError, "save: model_type is 'gpt2'"),
}


@pytest.mark.parametrize("mistake", SAVING)
def test_checkpoint_save_mistakes(mistake, tmp_path, rng):
    changes, error, text = SAVING[mistake]
    _, weights = hub_checkpoints.layer(HUB["mixtral"], 0, rng)
    arguments = {"layers": {0: weights}, "others": {}} | changes(weights)
    arguments["config"] = dict(HUB["mixtral"].config) | {"num_hidden_layers": 1} | arguments.get("config", {})
    with pytest.raises(error, match=text):
        save(tmp_path / "new", **arguments)
    assert not (tmp_path / "new").exists()


def test_checkpoint_save_traced_arrays(tmp_path):
    with pytest.raises(TypeError, match=r"others\['x'\] is a traced array, expected .* outside of jax.jit"):
        jax.jit(lambda x: save(tmp_path / "new", NO_LAYERS, {}, {"x": x}))(jnp.ones(3))


def test_checkpoint_save_pair_dtypes(tmp_path, rng):
    original, _ = fp8_checkpoint(tmp_path / "original", rng)
    weights = original.moe_weights(3, quantized=True)
    w_down = weights["w_down"]
    other = dataclasses.replace(w_down, scales=w_down.scales.astype(BF16))
    with pytest.raises(TypeError, match="w_down of layer 3 has values of float8_e4m3fn and scales of bfloat16"):
        save(tmp_path / "new", original.config, {3: weights | {"w_down": other}})


@pytest.mark.parametrize(
    ("dtype", "values"), [(np.int64, [2**40 + 7, 1]), (np.uint64, [2**63]), (np.int64, [-(2**31) - 1])]
)
def test_checkpoint_integers_beyond_32_bits(dtype, values, tmp_path):
    """They would silently become other integers."""
    others = {"many": np.array(values, dtype), "few": np.array([3, 2**31 - 1], dtype)}
    save(tmp_path / "new", NO_LAYERS, {}, others)
    checkpoint = Checkpoint(tmp_path / "new")
    with pytest.raises(ValueError, match=r"'many' has u?int64 from .*jax_enable_x64"):
        checkpoint.read("many")
    assert checkpoint.read("few").tolist() == [3, 2**31 - 1]
    with jax.enable_x64(True):
        assert checkpoint.read("many").tolist() == values


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_checkpoint_floats_beyond_the_dtype(dtype, tmp_path, rng):
    """They would become infinite."""
    tensors, _ = hub_checkpoints.layer(HUB["mixtral"], 0, rng)
    tensors = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    tensors |= {"scalar": np.array(-7e4, dtype), "inf": np.array([-np.inf, np.nan, 65504], F32)}
    tensors[EXPERT][1, 0] = 7e4
    checkpoint = Checkpoint(hub_checkpoints.write(tmp_path, HUB["mixtral"].config, tensors))
    beyond = "has a number beyond the range of float16, expected .* finite; pass a dtype .* bfloat16"
    with pytest.raises(ValueError, match=f"^Checkpoint.moe_weights: 'w_(gate_up|down)' {beyond}"):
        checkpoint.moe_weights(0, dtype=F16)
    for name in (EXPERT, "scalar"):
        with pytest.raises(ValueError, match=f"^Checkpoint.read: '{name}' {beyond}"):
            checkpoint.read(name, dtype=F16)
    assert float(checkpoint.read(EXPERT, dtype=F32)[1, 0]) == tensors[EXPERT][1, 0]
    np.testing.assert_array_equal(checkpoint.read("inf", dtype=F16), tensors["inf"])


def test_checkpoint_largest_float32_in_bfloat16(tmp_path):
    """Numbers from 3.396e38 on would round to infinity."""
    numbers = {"largest": np.finfo(F32).max, "less": 3.389e38, "infinite": -np.inf}
    save(tmp_path / "new", NO_LAYERS, {}, {name: np.full((3, 2), number, F32) for name, number in numbers.items()})
    checkpoint = Checkpoint(tmp_path / "new")
    with pytest.raises(ValueError, match=r"^Checkpoint.read: 'largest' .* range of bfloat16, .*float32 in place of"):
        checkpoint.read("largest", dtype=BF16)
    for name in ("less", "infinite"):
        np.testing.assert_allclose(checkpoint.read(name, dtype=BF16).astype(F32), numbers[name], rtol=1e-2)
