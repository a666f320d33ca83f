"""INT4 and NVFP4 of compressed-tensors and ModelOpt: values against NumPy, and tensors that config.json contradicts."""

import copy

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("safetensors")

import hub_checkpoints
import oracle_quantized
from cases import BF16, F16, F32, assert_same_bits
from harness import make_mesh
from hub_checkpoints import FP8, HUB, in_int32, packed_config
from jax_ep import fused_moe
from jax_ep.checkpoints import Checkpoint, decoded
from stored_experts import dense

HIDDEN, WIDTH, LAYER = 256, 128, "model.layers.3.mlp."
NAME = f"{LAYER}experts.0.up_proj.weight"
PARTS = ("packed", "scale", "shape", "zero_point", "global_scale", "scale_2")


def draw(rng, kind, rows, depth, size, scale_dtype):
    """Draw the tensors of one matrix, and the numbers that they stand for."""
    blocks = depth // size
    codes = rng.integers(0, 16, (rows, depth))
    if kind in ("nvfp4", "modelopt"):
        scales = rng.uniform(1, 400, (rows, blocks)).astype(FP8)
        packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
        if kind == "modelopt":
            factor = np.array(rng.uniform(1e-3, 1e-2), F32)
            numbers = oracle_quantized.E2M1.astype(F32)[codes] * (scales.astype(F32) * factor).repeat(size, 1)
            return {"packed": packed, "scale": scales, "scale_2": factor}, numbers
        divisor = rng.uniform(100, 1000, 1).astype(F32)
        numbers = oracle_quantized.E2M1.astype(F32)[codes] * (scales.astype(F32) / divisor).repeat(size, 1)
        return {"packed": packed, "scale": scales, "global_scale": divisor}, numbers
    scales = rng.uniform(0.5, 2, (rows, blocks)).astype(scale_dtype)
    parts = {"packed": in_int32(codes), "scale": scales, "shape": np.array([rows, depth])}
    zeros = np.full((rows, blocks), 8)
    if kind == "asymmetric":
        zeros = rng.integers(0, 16, (rows, blocks))
        parts["zero_point"] = in_int32(np.pad(zeros.T, ((0, 0), (0, -rows % 8)))).T
    return parts, ((codes - zeros.repeat(size, 1)) * scales.astype(np.float64).repeat(size, 1)).astype(F32)


def packed_checkpoint(folder, rng, kind="symmetric", size=32, scale_dtype=BF16, change=lambda x: None):
    """Write Kimi-K2 with two experts; return stored tensors and numbers [out, in] by block and projection."""
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "n_routed_experts": 2, "n_group": 1}
    config = HUB["kimi_k2"].config | sizes | {"topk_group": 1, "quantization_config": packed_config(kind, size)}
    tensors = {f"{LAYER}gate.weight": rng.standard_normal((2, HIDDEN)).astype(BF16)}
    tensors[f"{LAYER}gate.e_score_correction_bias"] = rng.standard_normal(2).astype(F32)
    stored, numbers = {}, {}
    for block in ("experts.0", "experts.1", "shared_experts"):
        for name, rows, columns in (("gate", WIDTH, HIDDEN), ("up", WIDTH, HIDDEN), ("down", HIDDEN, WIDTH)):
            key = f"{block}.{name}"
            depth = columns if size is None else size
            stored[key], numbers[key] = draw(rng, kind, rows, columns, depth, scale_dtype)
            names = {part: "weight" if (kind, part) == ("modelopt", "packed") else f"weight_{part}" for part in PARTS}
            tensors |= {f"{LAYER}{key}_proj.{names[part]}": array for part, array in stored[key].items()}
    change(tensors)
    return Checkpoint(hub_checkpoints.write(folder, config, tensors)), stored, numbers


def parameters(parts):
    """Stack [out, in] of two experts as they are read: gate and up along `out`."""
    up = np.stack([np.concatenate([parts[f"experts.{e}.{name}"] for name in ("gate", "up")]) for e in range(2)])
    return {"w_gate_up": up, "w_down": np.stack([parts[f"experts.{e}.down"] for e in range(2)])}


@pytest.mark.parametrize(
    ("kind", "size", "scale_dtype"),
    [
        ("symmetric", 32, BF16),
        ("symmetric", 128, F16),
        ("symmetric", None, F32),
        ("asymmetric", 32, BF16),
        ("asymmetric", 128, F16),
        ("nvfp4", 16, None),
        ("modelopt", 16, None),
    ],
)
def test_packed_checkpoint_values(kind, size, scale_dtype, tmp_path, rng, expert_mesh):
    checkpoint, _, numbers = packed_checkpoint(tmp_path, rng, kind, size, scale_dtype)
    for mesh in (None, expert_mesh(2)):
        weights = checkpoint.moe_weights(3, mesh=mesh, dtype=F32)
        for name, want in parameters(numbers).items():
            assert_same_bits(np.asarray(weights[name]), want.swapaxes(1, 2), name)
        assert_same_bits(np.asarray(weights["shared_down"]), numbers["shared_experts.down"].T)
    want = numbers["experts.0.up"]
    assert_same_bits(np.asarray(checkpoint.moe_weights(3)["w_gate_up"])[0, :, WIDTH:], want.T.astype(BF16))
    sharding = NamedSharding(make_mesh((2, 4), ("a", "b")), P("a", "b"))
    assert_same_bits(np.asarray(checkpoint.read(NAME, dtype=F32, sharding=sharding)), want)


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric", "nvfp4"])
def test_packed_parts_of_blocks(kind, rng):
    """Rows in the middle of an int32 of zero points, columns in the middle of a block."""
    parts, numbers = draw(rng, kind, 21, 64, 16, F32)
    pairs = decoded.E2M1_PAIRS if kind == "nvfp4" else decoded.INT4_PAIRS
    divisor = float(parts.get("global_scale", [1.0])[0])
    values = parts["packed"].view(np.uint8)
    zeros = decoded.PackedRows(parts["zero_point"], 4) if "zero_point" in parts else None
    stored = decoded.FourBit(pairs, values, parts["scale"], (1, 16), None, zeros, divisor)
    for rows, columns in ((slice(3, 19), slice(5, 39)), (slice(0, 21), slice(0, 64)), (slice(20, 21), slice(63, 64))):
        assert_same_bits(stored[rows, columns], numbers[rows, columns])
    assert stored[slice(2, 2), slice(0, 64)].shape == (0, 64)


@pytest.mark.parametrize("size", [32, 128])
def test_packed_checkpoint_quantized(size, tmp_path, rng, expert_mesh):
    """INT4 has the bits of the file, and an expert layer computes with them."""
    checkpoint, stored, _ = packed_checkpoint(tmp_path, rng, size=size)
    for mesh in (None, expert_mesh(2)):
        weights = checkpoint.moe_weights(3, mesh=mesh, quantized=True)
        for part, dtype in (("packed", np.uint8), ("scale", F32)):
            for name, want in parameters({key: parts[part] for key, parts in stored.items()}).items():
                want = want.view(np.uint8) if part == "packed" else want.astype(dtype)
                assert_same_bits(
                    np.asarray(getattr(weights[name], {"packed": "values", "scale": "scales"}[part])), want
                )
    whole = checkpoint.moe_weights(3, dtype=F32)
    weights = checkpoint.moe_weights(3, quantized=True)
    for name in ("w_gate_up", "w_down"):
        assert weights[name].format == "int4" and weights[name].activations is None
        np.testing.assert_array_equal(np.asarray(dense(weights[name], dtype=F32)), np.asarray(whole[name]))
    x = rng.standard_normal((6, HIDDEN)).astype(F32)
    routing = np.array([[0], [1], [1], [0], [1], [0]], np.int32), np.ones((6, 1), F32)
    y, want = (jax.jit(fused_moe)(x, *routing, w["w_gate_up"], w["w_down"]) for w in (weights, whole))
    np.testing.assert_allclose(np.asarray(y), np.asarray(want), rtol=1e-4, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("kind", ["asymmetric", "nvfp4", "modelopt"])
def test_packed_checkpoint_without_a_format(kind, tmp_path, rng):
    checkpoint, _, _ = packed_checkpoint(tmp_path, rng, kind, 16)
    with pytest.raises(ValueError, match=r"is not stored in FP8 .* symmetric INT4.*serving_weights"):
        checkpoint.moe_weights(3, quantized=True)


def with_part(part, edit):
    """Change one tensor of `NAME`; None removes it."""

    def change(tensors):
        new = edit(tensors.pop(f"{NAME}_{part}", None))
        if new is not None:
            tensors[f"{NAME}_{part}"] = new

    return change


TENSORS = {
    "no shape": ("symmetric", with_part("shape", lambda x: None)),
    "another shape": ("symmetric", with_part("shape", lambda x: x[::-1].copy())),
    "8 bits": ("symmetric", with_part("shape", lambda x: x // [1, 2])),
    "a vector": ("symmetric", with_part("packed", lambda x: x.reshape(-1))),
    "floats": ("symmetric", with_part("packed", lambda x: x.view(F32))),
    "no blocks": ("symmetric", with_part("scale", lambda x: x[:, :0])),
    "blocks that do not divide": ("symmetric", with_part("scale", lambda x: x[:, :7])),
    "rows without scales": ("symmetric", with_part("scale", lambda x: x[1:])),
    "scales in integers": ("symmetric", with_part("scale", lambda x: x.astype(np.int32))),
    "activation order": ("symmetric", with_part("g_idx", lambda x: np.zeros(HIDDEN, np.int32))),
    "zero points in int8": ("asymmetric", with_part("zero_point", lambda x: np.zeros((WIDTH, 8), np.int8))),
    "no zero points": ("asymmetric", with_part("zero_point", lambda x: None)),
    "zero points": ("symmetric", with_part("zero_point", lambda x: np.zeros((WIDTH // 8, 8), np.int32))),
    "blocks of 32": ("nvfp4", with_part("scale", lambda x: x[:, ::2])),
    "no global scale": ("nvfp4", with_part("global_scale", lambda x: None)),
    "an odd width": ("modelopt", with_part("scale", lambda x: x[:, 1:])),
    "scales in floats": ("modelopt", with_part("scale", lambda x: x.astype(F32))),
    "two factors": ("modelopt", with_part("scale_2", lambda x: np.ones(2, F32))),
    "two global scales": ("nvfp4", with_part("global_scale", lambda x: np.ones(2, F32))),
}


@pytest.mark.parametrize("mistake", TENSORS)
def test_packed_tensors_that_do_not_fit(mistake, tmp_path, rng):
    kind, change = TENSORS[mistake]
    checkpoint, _, _ = packed_checkpoint(tmp_path, rng, kind, 32 if "symmetric" in kind else 16, change=change)
    for call in (lambda: checkpoint.moe_weights(3), lambda: checkpoint.read(NAME, dtype=F32)):
        with pytest.raises(ValueError, match=r"^Checkpoint: '.*up_proj.weight' is stored as .*, expected .*") as caught:
            call()
        assert len(str(caught.value)) < 1000


CONFIGS = {
    "no group": (lambda config: config.pop("config_groups"), "expected it among the config_groups"),
    "8 bits": (lambda config: weights_of(config).update(num_bits=8), "expected it among"),
    "another block": (lambda config: weights_of(config).update(group_size=64), "group_size 32, expected it among"),
    "a channel": (lambda config: weights_of(config).update(group_size=None), "expected it among"),
    "zero points": (lambda config: weights_of(config).update(symmetric=False), "expected it among"),
    "floats": (lambda config: weights_of(config).update(type="float"), "expected it among"),
    "a list": (lambda config: config.update(config_groups=[]), r"config_groups=\[\], expected an object"),
    "a group": (lambda config: config["config_groups"].update(group_0=3), r"group_0'\]=3, expected an object"),
    "bits": (lambda config: weights_of(config).update(num_bits="4"), "num_bits='4', expected an integer from 1 to 64"),
    "a size": (lambda config: weights_of(config).update(group_size=1e9), "group_size=1000000000.0, expected an int"),
    "symmetry": (lambda config: weights_of(config).update(symmetric=1), "symmetric=1, expected true or false"),
}


def weights_of(config):
    return config["config_groups"]["group_0"]["weights"]


@pytest.mark.parametrize("mistake", CONFIGS)
def test_packed_config_that_does_not_fit(mistake, tmp_path, rng):
    change, text = CONFIGS[mistake]
    checkpoint, _, _ = packed_checkpoint(tmp_path, rng)
    change(checkpoint.config["quantization_config"])
    with pytest.raises(ValueError, match=text):
        checkpoint.moe_weights(3)


def test_packed_config_of_several_formats(tmp_path, rng):
    """Attention may be stored in another format than experts."""
    checkpoint, _, numbers = packed_checkpoint(tmp_path, rng)
    groups = checkpoint.config["quantization_config"]["config_groups"]
    groups |= {"group_1": copy.deepcopy(groups["group_0"]), "group_2": {"weights": None}}
    weights_of(checkpoint.config["quantization_config"]).update(num_bits=8, group_size=None)
    assert_same_bits(np.asarray(checkpoint.read(f"{NAME}_packed", dtype=F32)), numbers["experts.0.up"])


def test_packed_parameter_of_two_formats(tmp_path, rng):
    """Gate and up in blocks of different sizes are no one array of scales."""
    wide, _ = draw(rng, "symmetric", WIDTH, HIDDEN, 64, BF16)
    checkpoint, _, _ = packed_checkpoint(tmp_path, rng, change=with_part("scale", lambda x: wide["scale"]))
    config = checkpoint.config["quantization_config"]
    config["config_groups"]["group_1"] = copy.deepcopy(config["config_groups"]["group_0"])
    weights_of(config).update(group_size=64)
    assert checkpoint.moe_weights(3)["w_gate_up"].shape == (2, HIDDEN, 2 * WIDTH)
    with pytest.raises(ValueError, match=r"w_gate_up is stored as .*, expected one format; leave quantized out"):
        checkpoint.moe_weights(3, quantized=True)
