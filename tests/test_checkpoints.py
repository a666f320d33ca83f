"""Checkpoints of every family, read into shards of global arrays: values against NumPy, bit for bit."""

import itertools
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

save_file = pytest.importorskip("safetensors.numpy").save_file

import hub_checkpoints
import oracle_quantized
from cases import BF16, F16, F32, assert_same_bits
from harness import make_mesh
from hub_checkpoints import EXPERTS, FP8, HIDDEN, HUB, WIDTH, assert_equal, fp8_checkpoint, written
from jax_ep import Router
from jax_ep.checkpoints import Checkpoint, download, push, save, shards
from jax_ep.checkpoints.decoded import E2M1_PAIRS, FourBit
from jax_ep.checkpoints.families import ACTIVATIONS
from jax_ep.checkpoints.files import StoredArray, TensorFiles
from jax_ep.core.router import SharedExperts
from jax_ep.types import Experts
from stored_experts import dense

every_family = pytest.mark.parametrize("name", HUB)


@every_family
def test_checkpoint_values(name, tmp_path, rng, expert_mesh):
    """With the names of published checkpoints, on one device and over four."""
    checkpoint, want = written(name, tmp_path, rng)
    assert checkpoint.moe_layers == HUB[name].layers
    mesh = expert_mesh(4)
    for number in HUB[name].layers:
        assert_equal(checkpoint.moe_weights(number), want[number])
        weights = checkpoint.moe_weights(number, mesh=mesh)
        assert_equal(weights, want[number])
        for parameter, array in weights.items():
            spread = parameter in ("w_gate_up", "w_down", "b_gate_up", "b_down")
            assert array.sharding == NamedSharding(mesh, P("expert") if spread else P())


@every_family
def test_checkpoint_options(name, tmp_path, rng):
    checkpoint, _ = written(name, tmp_path, rng)
    hub = HUB[name]
    sizes = {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_experts": EXPERTS, "num_experts_per_tok": 2}
    want = sizes | dict(hub.options) | {"experts": Experts("silu", **hub.experts)}
    assert checkpoint.moe_options() == {key: value for key, value in want.items() if value is not None}


@pytest.mark.parametrize("name", [name for name, hub in HUB.items() if not hub.fused])
def test_checkpoint_fused_expert_tensors(name, tmp_path, rng):
    """As in Hugging Face's own code: `[E, out, in]`, gates first."""
    hub = HUB[name]
    tensors, want = hub_checkpoints.layer(hub, hub.layers[0], rng)
    prefix = f"model.layers.{hub.layers[0]}.mlp."
    fused = {prefix + "experts.gate_up_proj": want["w_gate_up"].swapaxes(1, 2)}
    fused[prefix + "experts.down_proj"] = want["w_down"].swapaxes(1, 2)
    for tensor, value in tensors.items():
        if ".experts." not in tensor:
            key = tensor.replace("block_sparse_moe.", "mlp.").replace("mlp.moe_statics", "mlp.gate.moe_statics")
            fused[key.replace("mlp.gate.", "mlp.router.") if name == "phimoe" else key] = value
    checkpoint = Checkpoint(hub_checkpoints.write(tmp_path, hub.config, fused))
    assert_equal(checkpoint.moe_weights(hub.layers[0]), want)


@pytest.mark.parametrize(
    ("name", "changes", "layers"),
    [
        ("qwen2_moe", {"mlp_only_layers": None, "decoder_sparse_step": None}, (0, 1, 2, 3)),
        ("qwen3_moe", {"decoder_sparse_step": 1, "mlp_only_layers": [0, 2]}, (1, 3)),
        ("deepseek_v2", {"first_k_dense_replace": 0}, (0, 1, 2, 3)),
        ("ernie4_5_moe", {"moe_layer_end_index": -1, "moe_layer_interval": 2}, (1, 3)),
        ("ernie4_5_moe", {"moe_layer_start_index": 2, "moe_layer_end_index": 9}, (2, 3)),
        ("llama4_text", {"moe_layers": [0, 3]}, (0, 3)),
        ("llama4_text", {"interleave_moe_layer_step": None}, (0, 1, 2, 3)),
        ("longcat_flash", {"num_layers": 2}, (0, 1)),
    ],
)
def test_checkpoint_moe_layers(name, changes, layers, tmp_path, rng):
    assert written(name, tmp_path, rng, **changes)[0].moe_layers == layers


@pytest.mark.parametrize(
    ("name", "changes", "wanted"),
    [
        ("deepseek_v2", {"topk_method": "greedy"}, {"router": Router(renormalize=False, scale=2.5)}),
        ("deepseek_v3", {"n_shared_experts": 3}, {"shared_experts": SharedExperts(3)}),
        ("qwen3_moe", {"norm_topk_prob": None}, {"router": Router(renormalize=False)}),
        ("qwen3_moe", {"num_experts": None, "num_local_experts": 16}, {"num_experts": 16}),
        ("gpt_oss", {"swiglu_limit": None, "hidden_act": None}, {"experts": Experts(**HUB["gpt_oss"].experts)}),
        *(("mixtral", {"hidden_act": theirs}, {"experts": Experts(ours)}) for theirs, ours in ACTIVATIONS.items()),
    ],
)
def test_checkpoint_options_follow_config(name, changes, wanted, tmp_path, rng):
    options = written(name, tmp_path, rng, **changes)[0].moe_options()
    assert {key: options[key] for key in wanted} == wanted


@pytest.mark.parametrize("name", [name for name, hub in HUB.items() if "shared_experts." in hub.shared_prefix])
def test_checkpoint_without_shared_experts(name, tmp_path, rng):
    """Without them in the config, their tensors are an error."""
    config, number = dict(HUB[name].config), HUB[name].layers[0]
    config.pop("n_shared_experts", None)
    config.pop("moe_num_shared_experts", None)
    tensors, want = hub_checkpoints.layer(HUB[name], number, rng)
    with pytest.raises(ValueError, match=r"shared_experts\..* is a tensor of shared_.*, expected none by config.json"):
        Checkpoint(hub_checkpoints.write(tmp_path / "all", config, tensors)).moe_weights(number)
    routed = {key: value for key, value in tensors.items() if "shared" not in key}
    checkpoint = Checkpoint(hub_checkpoints.write(tmp_path, config, routed))
    assert "shared_experts" not in checkpoint.moe_options()
    got = checkpoint.moe_weights(number)
    assert_equal(got, {key: value for key, value in want.items() if "shared" not in key})


def test_checkpoint_identity_expert_router_columns(tmp_path, rng):
    """LongCat's identity experts."""
    hub = HUB["longcat_flash"]
    tensors, want = hub_checkpoints.layer(hub, 0, rng)
    wider = rng.standard_normal((EXPERTS + 3, HIDDEN)).astype(F32)
    tensors["model.layers.0.mlp.router.classifier.weight"] = wider
    tensors["model.layers.0.mlp.router.e_score_correction_bias"] = wider[:, 0]
    config = dict(hub.config) | {"zero_expert_num": 3}
    checkpoint = Checkpoint(hub_checkpoints.write(tmp_path, config, tensors))
    assert_equal(checkpoint.moe_weights(0), want | {"router": wider.T, "router_bias": wider[:, 0]})
    assert checkpoint.moe_options()["router"].num_identity_experts == 3


@pytest.mark.parametrize("name", ["gpt_oss", "mixtral"])
def test_checkpoint_experts_that_ranks_do_not_divide(name, tmp_path, rng, expert_mesh):
    """Zeros follow the experts, on their own rank or next to others; `save` takes the experts alone."""
    checkpoint, want = written(name, tmp_path, rng)
    layer, num_experts = HUB[name].layers[0], want[HUB[name].layers[0]]["w_down"].shape[0]
    assert num_experts % 3
    weights = checkpoint.moe_weights(layer, mesh=expert_mesh(3))
    for parameter, array in weights.items():
        own = array
        if parameter in ("w_gate_up", "w_down", "b_gate_up", "b_down"):
            assert array.shape[0] == num_experts + -num_experts % 3 and not np.asarray(array)[num_experts:].any()
            own = array[:num_experts]
        np.testing.assert_array_equal(own, want[layer][parameter])
    config = {**checkpoint.config, "num_hidden_layers": 1}
    with pytest.raises(ValueError, match=rf"^save: w_\w+ of layer 0 has .*; pass its first {num_experts} rows"):
        save(tmp_path / "again", config, {0: weights})


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_checkpoint_meshes(axis_type, tmp_path, rng):
    """Meshes of several axes with replicas, and the mesh of `jax.set_mesh`."""
    checkpoint, want = written("gpt_oss", tmp_path, rng)
    mesh = make_mesh((2, 2, 2), ("data", "node", "expert"), axis_type)
    weights = checkpoint.moe_weights(0, mesh=mesh, axis_name=("node", "expert"))
    assert weights["w_down"].sharding == NamedSharding(mesh, P(("node", "expert")))
    assert_equal(weights, want[0])
    with jax.set_mesh(mesh):
        weights = checkpoint.moe_weights(0)
        assert weights["b_down"].sharding == NamedSharding(mesh, P("expert"))
        assert_equal(weights, want[0])
        save(tmp_path / "again", {**checkpoint.config, "num_hidden_layers": 1}, {0: weights})
    assert_equal(Checkpoint(tmp_path / "again").moe_weights(0), want[0])


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_checkpoint_dtype(dtype, tmp_path, rng, mesh):
    checkpoint, want = written("deepseek_v3", tmp_path, rng, BF16)
    kept = ("router", "router_bias")
    converted = {name: value if name in kept else value.astype(dtype) for name, value in want[3].items()}
    assert_equal(checkpoint.moe_weights(3, mesh=mesh, dtype=dtype), converted)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("spec", [P(), P("a"), P("a", "b"), P(None, ("b", "a"))], ids=str)
def test_checkpoint_read_shardings(spec, transpose, tmp_path, rng):
    values = rng.standard_normal((16, 24)).astype(BF16)
    checkpoint = Checkpoint(hub_checkpoints.write(tmp_path, {"model_type": "dense"}, {"w": values, "other": values[0]}))
    sharding = NamedSharding(make_mesh((4, 2), ("a", "b")), spec)
    array = checkpoint.read("w", sharding=sharding, dtype=F32, transpose=transpose)
    assert array.sharding == sharding
    assert_same_bits(np.asarray(array), (values.T if transpose else values).astype(F32))


@pytest.mark.parametrize("kind", ["device", "pinned_host", "unpinned_host"])
def test_checkpoint_read_memory_kinds(kind, tmp_path, rng):
    if jax.default_backend() != "cpu" and kind == "unpinned_host":
        pytest.skip("of CPU devices")
    values = rng.standard_normal((16, 24)).astype(BF16)
    checkpoint = Checkpoint(hub_checkpoints.write(tmp_path, {"model_type": "dense"}, {"w": values}))
    array = checkpoint.read("w", sharding=NamedSharding(make_mesh((2,), ("a",)), P("a"), memory_kind=kind))
    assert array.sharding.memory_kind == kind
    assert_same_bits(np.asarray(array), values)


def test_checkpoint_read_stored_dtypes(tmp_path, rng):
    tensors = {
        "scalar": np.asarray(2.5, F16),
        "vector": np.arange(5, dtype=np.int32),
        "empty": np.zeros((2, 0, 3), F32),
        "four": rng.standard_normal((3, 2, 5, 4)).astype(BF16),
        "eight bits": rng.integers(0, 255, (3, 4), np.uint8).view(FP8),
        "bool": np.array([True, False]),
    }
    checkpoint = Checkpoint(hub_checkpoints.write(tmp_path, {}, tensors))
    assert set(checkpoint.names) == set(tensors) and checkpoint.config == {}
    for name, value in tensors.items():
        assert_same_bits(np.asarray(checkpoint.read(name)), value, name)
    four = checkpoint.read("four", transpose=True)
    assert_same_bits(np.asarray(four), tensors["four"].swapaxes(-1, -2))


@pytest.mark.parametrize("shape", [(7, 33000), (700, 1000), (2, 300, 1001)])
def test_stored_array_parts_of_rows(shape, tmp_path, rng):
    """Rows that are far apart are read one by one; others in blocks of whole rows."""
    expected = rng.integers(0, 1 << 30, shape, np.int32)
    save_file({"a": expected}, tmp_path / "model.safetensors")
    source = TensorFiles("test", tmp_path, {})["a"]
    columns, whole = slice(3, 700), shards.whole(shape)
    np.testing.assert_array_equal(source[whole], expected)
    for rows in slice(0, 2), slice(1, shape[-2]), slice(1, 1):
        index = (*whole[:-2], rows, columns)
        part = source[index] if len(shape) == 2 else np.stack([source[i][rows, columns] for i in range(shape[0])])
        np.testing.assert_array_equal(part, expected[index])


@pytest.fixture
def taken(monkeypatch):
    """Record the shapes of the parts that are read from tensors."""
    shapes = []
    read = StoredArray.read_into

    def counting(source, part, index):
        shapes.append(part.shape)
        read(source, part, index)

    monkeypatch.setattr(StoredArray, "read_into", counting)
    return shapes


def test_checkpoint_reads_each_part_once(taken, tmp_path, rng):
    """For any number of devices, replicas share what is read."""
    values = rng.standard_normal((16, 24)).astype(F32)
    checkpoint = Checkpoint(hub_checkpoints.write(tmp_path, {}, {"w": values}))
    sharding = NamedSharding(make_mesh((4, 2), ("a", "b")), P("a"))
    np.testing.assert_array_equal(checkpoint.read("w", sharding=sharding), values)
    assert taken == [(4, 24)] * 4

    taken.clear()
    name = "mixtral"
    checkpoint, want = written(name, tmp_path / name, rng)
    checkpoint.moe_weights(0, mesh=make_mesh((4, 2), ("expert", "copies")))
    assert sum(rows * columns for rows, columns in taken) == sum(value.size for value in want[0].values())


def bytes_of(rng, dtype, *shape):
    """Draw finite numbers of any dtype."""
    small = rng.integers(0, 64, (*shape, np.dtype(dtype).itemsize), np.uint8)
    return small.view(dtype).reshape(shape)


def large_checkpoint(kind, folder, rng):
    """Write four experts whose weights are at least a megabyte each, in one of the formats."""
    experts, hidden, width = 4, 1024, 512
    sizes = {"hidden_size": hidden, "intermediate_size": width, "num_local_experts": experts, "num_hidden_layers": 1}
    if kind == "mxfp4":
        config = HUB["gpt_oss"].config | sizes
        tensors = {"model.layers.0.mlp.router.weight": bytes_of(rng, BF16, experts, hidden)}
        tensors["model.layers.0.mlp.router.bias"] = bytes_of(rng, BF16, experts)
        for name, rows, columns in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
            prefix = f"model.layers.0.mlp.experts.{name}"
            tensors[f"{prefix}_blocks"] = rng.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8)
            tensors[f"{prefix}_scales"] = rng.integers(110, 130, (experts, rows, columns // 32), np.uint8)
            tensors[f"{prefix}_bias"] = bytes_of(rng, BF16, experts, rows)
        return Checkpoint(hub_checkpoints.write(folder, config, tensors))
    config = HUB["mixtral"].config | sizes
    dtype = FP8 if kind == "fp8" else BF16
    tensors = {"model.layers.0.block_sparse_moe.gate.weight": bytes_of(rng, BF16, experts, hidden)}
    for expert, (name, rows, columns) in itertools.product(
        range(experts), (("w1", width, hidden), ("w3", width, hidden), ("w2", hidden, width))
    ):
        prefix = f"model.layers.0.block_sparse_moe.experts.{expert}.{name}.weight"
        tensors[prefix] = bytes_of(rng, dtype, rows, columns)
        if kind == "fp8":
            tensors[f"{prefix}_scale_inv"] = rng.random((rows // 128, columns // 128), F32)
    return Checkpoint(hub_checkpoints.write(folder, config, tensors))


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("bf16", {}), ("bf16", {"dtype": F32}), ("fp8", {"quantized": True}), ("fp8", {}), ("mxfp4", {})],
    ids=["bf16", "float32", "fp8", "fp8-dequantized", "mxfp4"],
)
def test_checkpoint_memory(kind, options, num_ranks, tmp_path, rng, expert_mesh, monkeypatch):
    """The host holds one shard of one array at a time, and some memory for decoding; values are the same."""
    checkpoint = large_checkpoint(kind, tmp_path, rng)
    load = lambda: checkpoint.moe_weights(0, mesh=expert_mesh(num_ranks), **options)  # noqa: E731
    want = jax.tree.map(np.asarray, load())
    # As on accelerators with their own memory, so that nothing that is traced is the result.
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, device=None: jnp.copy(put(x, device)))
    monkeypatch.setattr(shards, "_has_host_memory", lambda device: False)
    load()  # Exclude what Python and JAX cache on first use.
    tracemalloc.start()
    try:
        weights = load()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    leaves = jax.tree.leaves(weights)
    largest = max(shard.data.nbytes for array in leaves for shard in array.addressable_shards)
    assert largest >= 2**20
    assert largest < peak <= 1.3 * largest, (peak, largest)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, weights), want)


def dequantized(values, scales):
    """Dequantize [out, in] blocks to [in, out] in float32, with one rounding."""
    return oracle_quantized.dequantize(values, scales, "fp8").astype(F32).T


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_checkpoint_fp8_as_stored(num_ranks, tmp_path, rng, expert_mesh):
    checkpoint, pairs = fp8_checkpoint(tmp_path, rng)
    weights = checkpoint.moe_weights(3, mesh=expert_mesh(num_ranks), dtype=F32, quantized=True)
    for i, (part, dtype) in enumerate((("values", FP8), ("scales", F32))):
        up = [np.concatenate([pairs[f"experts.{e}.{n}"][i] for n in ("gate", "up")]) for e in range(2)]
        assert_same_bits(np.asarray(getattr(weights["w_gate_up"], part)), np.stack(up).astype(dtype), "w_gate_up")
        down = np.stack([pairs[f"experts.{e}.down"][i] for e in range(2)])
        assert_same_bits(np.asarray(getattr(weights["w_down"], part)), down.astype(dtype), "w_down")
        assert getattr(weights["w_down"], part).sharding.spec == P("expert")
    assert_same_bits(np.asarray(weights["shared_down"]), dequantized(*pairs["shared_experts.down"]))
    # The package computes with these weights.
    whole = checkpoint.moe_weights(3, dtype=F32)["w_gate_up"]
    same = dense(weights["w_gate_up"], dtype=F32)
    np.testing.assert_array_equal(np.asarray(same), np.asarray(whole))


@pytest.mark.parametrize(("hidden", "width"), [(256, 384), (200, 72)])
@pytest.mark.parametrize("scale_dtype", [F32, BF16, np.dtype(ml_dtypes.float8_e8m0fnu)], ids=str)
def test_checkpoint_fp8_dequantized(hidden, width, scale_dtype, tmp_path, rng):
    """Also for blocks cut at the edge, and to bfloat16 by default."""
    checkpoint, pairs = fp8_checkpoint(tmp_path, rng, hidden, width, scale_dtype)
    halves = [[dequantized(*pairs[f"experts.{e}.{n}"]) for n in ("gate", "up")] for e in range(2)]
    want = np.stack([np.concatenate(two, axis=-1) for two in halves])
    got = checkpoint.moe_weights(3, mesh=make_mesh((2,), ("expert",)), dtype=F32)
    assert_same_bits(np.asarray(got["w_gate_up"]), want)
    assert_same_bits(np.asarray(checkpoint.moe_weights(3)["w_gate_up"]), want.astype(BF16))


def test_checkpoint_fp8_shards_within_blocks(tmp_path, rng):
    checkpoint, pairs = fp8_checkpoint(tmp_path, rng, 200, 72)
    name = "model.layers.3.mlp.shared_experts.down_proj.weight"
    sharding = NamedSharding(make_mesh((2, 4), ("a", "b")), P("a", "b"))
    got = checkpoint.read(name, sharding=sharding, dtype=F32, transpose=True)
    assert_same_bits(np.asarray(got), dequantized(*pairs["shared_experts.down"]))
    assert_same_bits(np.asarray(checkpoint.read(name)), pairs["shared_experts.down"][0])


def test_checkpoint_mxfp4_all_codes():
    """All bytes of two values with all scales, by the definition of the formats in float64."""
    magnitudes = [(m / 2 if e == 0 else (1 + m / 2) * 2.0 ** (e - 1)) for e in range(4) for m in range(2)]
    values = np.array(magnitudes + [-m for m in magnitudes])
    codes = np.arange(256, dtype=np.uint8)
    pairs = np.stack([values[codes % 16], values[codes // 16]], axis=-1).reshape(-1)  # [512]
    powers = np.append(2.0 ** (np.arange(255) - 127.0), np.nan)
    want = pairs[None, :] * powers[:, None]
    scales = np.repeat(codes[:, None], 16, axis=1)
    got = FourBit(E2M1_PAIRS, np.tile(codes, (256, 1)), scales, (1, 32), None)[slice(0, 256), slice(0, 512)]
    with np.errstate(over="ignore"):
        assert_same_bits(np.abs(got), np.abs(want).astype(F32))
        np.testing.assert_array_equal(np.signbit(got[:255]), np.signbit(want[:255]))
        # bfloat16 represents all of them exactly.
        np.testing.assert_array_equal(got.astype(BF16).astype(F32), got)


def test_checkpoint_mxfp4(tmp_path, rng, expert_mesh):
    """gpt-oss as published: [E, out, in] in blocks of 32 along `in`, and everything else in bfloat16."""
    hub = HUB["gpt_oss"]
    tensors, want = hub_checkpoints.layer(hub, 0, rng, BF16)
    config = hub.config | {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1}
    prefix = "model.layers.0.mlp."
    want["router"] = np.zeros((64, EXPERTS), F32)
    tensors[prefix + "router.weight"] = want["router"].T
    for parameter, name, rows, columns in (("gate_up", "gate_up_proj", 64, 64), ("down", "down_proj", 64, 32)):
        del tensors[f"{prefix}experts.{name}"]
        blocks = rng.integers(0, 256, (EXPERTS, rows, columns // 32, 16), np.uint8)
        scales = rng.integers(0, 253, (EXPERTS, rows, columns // 32), np.uint8)
        bias = rng.standard_normal((EXPERTS, rows)).astype(BF16)
        tensors |= {f"{prefix}experts.{name}_{part}": value for part, value in (("blocks", blocks), ("scales", scales))}
        tensors[f"{prefix}experts.{name}_bias"] = want[f"b_{parameter}"] = bias
        numbers = oracle_quantized.dequantize(blocks.reshape(EXPERTS, rows, -1), scales, "mxfp4")
        want[f"w_{parameter}"] = numbers.swapaxes(1, 2).astype(F32).astype(BF16)
    checkpoint = Checkpoint(hub_checkpoints.write(tmp_path, config, tensors))
    for mesh in (None, expert_mesh(8)):
        assert_equal(checkpoint.moe_weights(0, mesh=mesh), want)
    up = checkpoint.read(f"{prefix}experts.gate_up_proj_blocks", dtype=F32)
    np.testing.assert_array_equal(np.asarray(up), want["w_gate_up"].swapaxes(1, 2).astype(F32))
    for mesh in (None, expert_mesh(2)):
        as_stored = checkpoint.moe_weights(0, mesh=mesh, quantized=True)
        for parameter, name in (("w_gate_up", "gate_up_proj"), ("w_down", "down_proj")):
            matrices = as_stored[parameter]
            assert matrices.format == "mxfp4"
            blocks, scales = (tensors[f"{prefix}experts.{name}_{part}"] for part in ("blocks", "scales"))
            assert_same_bits(np.asarray(matrices.values), blocks.reshape(*blocks.shape[:2], -1))
            assert_same_bits(np.asarray(matrices.scales), scales)
            same = np.asarray(dense(matrices, dtype=BF16))
            # XLA's CPU matmuls flush the others to zero.
            normal = np.abs(want[parameter].astype(F32)) >= np.finfo(F32).tiny
            np.testing.assert_array_equal(same[normal], want[parameter][normal])
            assert mesh is None or matrices.values.sharding.spec == P("expert")
        assert_same_bits(np.asarray(as_stored["b_down"]), want["b_down"])


def test_checkpoint_downloaded_files(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    from huggingface_hub.utils import filter_repo_objects

    calls = []

    def snapshot_download(*args, **options):
        calls.append((args, options))
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    assert download("owner/name", revision="v1", folder=tmp_path / "here") == tmp_path
    assert download("owner/name") == tmp_path
    (args, options), (_, defaults) = calls
    assert (defaults["revision"], defaults["local_dir"]) == (None, None)
    patterns = {key: options.pop(key) for key in ("allow_patterns", "ignore_patterns")}
    assert (args, options) == (("owner/name",), {"revision": "v1", "local_dir": tmp_path / "here"})
    wanted = ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    wanted += ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt"]
    wanted += ["added_tokens.json", "tiktoken.model"]
    others = [
        "README.md",
        "optimizer.pt",
        "pytorch_model.bin",
        "original/model.safetensors",
        "metal/model.bin",
        "modeling_x.py",
    ]
    others += ["optimizer.pt", "consolidated.safetensors", "model.gguf", "onnx/model.onnx", ".gitattributes"]
    assert sorted(filter_repo_objects(wanted + others, **patterns)) == sorted(wanted)


def test_checkpoint_missing_packages(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"save: needs safetensors \(.* halted.*\): pip install safetensors"):
        save(tmp_path, {}, {})
    for call in (lambda: download("owner/name"), lambda: push(tmp_path, "owner/name")):
        with pytest.raises(
            ImportError, match=r"(download|push): needs huggingface_hub \(.* halted.*\): pip install huggingface_hub"
        ):
            call()
