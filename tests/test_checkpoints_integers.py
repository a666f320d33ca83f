"""INT4, INT8 and NVFP4 of AutoAWQ, GPTQ, compressed-tensors and ModelOpt: values against NumPy, and hostile files."""

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
NAME = f"{LAYER}experts.0.up_proj."
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True}
ASYMMETRIC = GPTQ | {"sym": False}
GROUPED = {
    "awq": AWQ,
    "awq, one group": AWQ | {"group_size": -1},
    "gptq": GPTQ,
    "gptq, version 2": GPTQ | {"checkpoint_format": "gptq_v2"},
    "gptq, one group": GPTQ | {"group_size": -1},
    "gptq, asymmetric": ASYMMETRIC,
    "gptq, asymmetric, version 2": ASYMMETRIC | {"checkpoint_format": "gptq_v2"},
    "gptq, 8 bits": GPTQ | {"bits": 8, "checkpoint_format": "gptq"},
    "gptq, 8 bits, asymmetric": ASYMMETRIC | {"bits": 8},
    "gptq, activation order": ASYMMETRIC | {"desc_act": True},
    "gptq, symmetric, activation order": GPTQ | {"desc_act": True},
    "gptq, a last group that is short": ASYMMETRIC | {"group_size": 40},
}
PACKED = {  # The kind of `packed_config`, the size of its blocks, and the dtype of the scales.
    "int4": ("symmetric", 32, BF16),
    "int4, float16": ("symmetric", 128, F16),
    "int4, channels": ("symmetric", None, F32),
    "int4, asymmetric": ("asymmetric", 32, BF16),
    "int4, asymmetric, float16": ("asymmetric", 128, F16),
    "nvfp4": ("nvfp4", 16, None),
    "modelopt": ("modelopt", 16, None),
}
KINDS = GROUPED | PACKED


def draw_grouped(rng, config, rows, depth, scale_dtype=F16):
    """Draw the tensors of one matrix, and the numbers `[out, in]` that they stand for."""
    bits, size = config["bits"], depth if config["group_size"] == -1 else config["group_size"]
    groups = -(-depth // size)
    of_depth = np.arange(depth) // size
    codes, zeros = (rng.integers(0, 1 << bits, (length, rows)) for length in (depth, groups))
    scales = rng.uniform(0.5, 2, (groups, rows)).astype(scale_dtype)
    parts = {"scales": scales}
    if config["quant_method"] == "awq":
        words, points = in_int32(codes, 4, AWQ_ORDER), in_int32(zeros, 4, AWQ_ORDER)
    else:
        zeros = np.full_like(zeros, 1 << bits - 1) if config["sym"] else zeros
        of_depth = rng.permutation(of_depth) if config["desc_act"] else of_depth
        ones = 0 if config.get("checkpoint_format") == "gptq_v2" else in_int32(np.ones(32 // bits), bits)
        words, points = in_int32(codes.T, bits).T, in_int32(zeros, bits) - ones
        parts["g_idx"] = of_depth.astype(np.int32)
    parts |= {"qweight": words, "qzeros": points}
    numbers = (codes - zeros[of_depth]) * scales.astype(np.float64)[of_depth]
    return parts, numbers.astype(F32).T


def draw_packed(rng, kind, rows, depth, size, scale_dtype):
    """Draw the tensors of one matrix, and the numbers `[out, in]` that they stand for."""
    size = depth if size is None else size
    blocks = depth // size
    codes = rng.integers(0, 16, (rows, depth))
    if kind in ("nvfp4", "modelopt"):
        scales = rng.uniform(1, 400, (rows, blocks)).astype(FP8)
        packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
        if kind == "modelopt":
            factor = np.array(rng.uniform(1e-3, 1e-2), F32)
            numbers = oracle_quantized.E2M1.astype(F32)[codes] * (scales.astype(F32) * factor).repeat(size, 1)
            return {"weight": packed, "weight_scale": scales, "weight_scale_2": factor}, numbers
        divisor = rng.uniform(100, 1000, 1).astype(F32)
        numbers = oracle_quantized.E2M1.astype(F32)[codes] * (scales.astype(F32) / divisor).repeat(size, 1)
        return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": divisor}, numbers
    scales = rng.uniform(0.5, 2, (rows, blocks)).astype(scale_dtype)
    parts = {"weight_packed": in_int32(codes), "weight_scale": scales, "weight_shape": np.array([rows, depth])}
    zeros = np.full((rows, blocks), 8)
    if kind == "asymmetric":
        zeros = rng.integers(0, 16, (rows, blocks))
        parts["weight_zero_point"] = in_int32(np.pad(zeros.T, ((0, 0), (0, -rows % 8)))).T
    return parts, ((codes - zeros.repeat(size, 1)) * scales.astype(np.float64).repeat(size, 1)).astype(F32)


def checkpoint_of(folder, rng, kind, change=lambda x: None):
    """Write Kimi-K2 with two experts; return stored tensors and numbers `[out, in]` by block and projection."""
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "n_routed_experts": 2, "n_group": 1}
    quantization = GROUPED[kind] if kind in GROUPED else packed_config(*PACKED[kind][:2])
    config = HUB["kimi_k2"].config | sizes | {"topk_group": 1, "quantization_config": quantization}
    tensors = {f"{LAYER}gate.weight": rng.standard_normal((2, HIDDEN)).astype(BF16)}
    tensors[f"{LAYER}gate.e_score_correction_bias"] = rng.standard_normal(2).astype(F32)
    stored, numbers = {}, {}
    for block in ("experts.0", "experts.1", "shared_experts"):
        for name, rows, depth in (("gate", WIDTH, HIDDEN), ("up", WIDTH, HIDDEN), ("down", HIDDEN, WIDTH)):
            key = f"{block}.{name}"
            if kind in GROUPED:
                stored[key], numbers[key] = draw_grouped(rng, GROUPED[kind], rows, depth)
            else:
                stored[key], numbers[key] = draw_packed(rng, PACKED[kind][0], rows, depth, *PACKED[kind][1:])
            tensors |= {f"{LAYER}{key}_proj.{part}": array for part, array in stored[key].items()}
    change(tensors)
    return Checkpoint(hub_checkpoints.write(folder, config, tensors)), stored, numbers


def parameters(parts):
    """Stack [out, in] of two experts as they are read: gate and up along `out`."""
    up = np.stack([np.concatenate([parts[f"experts.{e}.{name}"] for name in ("gate", "up")]) for e in range(2)])
    return {"w_gate_up": up, "w_down": np.stack([parts[f"experts.{e}.down"] for e in range(2)])}


@pytest.mark.parametrize("kind", KINDS)
def test_integer_checkpoint_values(kind, tmp_path, rng, expert_mesh):
    checkpoint, _, numbers = checkpoint_of(tmp_path, rng, kind)
    for mesh in (None, expert_mesh(2)):
        weights = checkpoint.moe_weights(3, mesh=mesh, dtype=F32)
        for name, want in parameters(numbers).items():
            assert_same_bits(np.asarray(weights[name]), want.swapaxes(1, 2), name)
        assert_same_bits(np.asarray(weights["shared_down"]), numbers["shared_experts.down"].T)
    want = numbers["experts.0.up"]
    assert_same_bits(np.asarray(checkpoint.moe_weights(3)["w_gate_up"])[0, :, WIDTH:], want.T.astype(BF16))
    sharding = NamedSharding(make_mesh((2, 4), ("a", "b")), P("a", "b"))
    for name in {"weight", "qweight" if kind in GROUPED else "weight" if kind == "modelopt" else "weight_packed"}:
        assert_same_bits(np.asarray(checkpoint.read(NAME + name, dtype=F32, sharding=sharding)), want)
    assert_same_bits(np.asarray(checkpoint.read(f"{NAME}weight", dtype=F32, transpose=True)), want.T)


@pytest.mark.parametrize("kind", ["awq", "gptq, 8 bits, asymmetric", "gptq, activation order"])
def test_grouped_parts_of_words(kind, rng):
    """Rows and columns in the middle of an int32 and of a group."""
    config = GROUPED[kind]
    parts, numbers = draw_grouped(rng, config, 40, 48, F32)
    bits, is_awq = config["bits"], kind == "awq"
    places = decoded.AWQ if is_awq else decoded.PLAIN
    codes = decoded.PackedColumns(parts["qweight"], 4, places) if is_awq else decoded.PackedRows(parts["qweight"], bits)
    offset = 0 if is_awq else in_int32(np.ones(32 // bits), bits).item()
    zeros = decoded.PackedColumns(parts["qzeros"], bits, places, offset)
    stored = decoded.Grouped(codes, zeros, parts["scales"], 16, parts.get("g_idx"))
    assert stored.shape == numbers.T.shape
    for rows, columns in ((slice(3, 19), slice(5, 39)), (slice(0, 48), slice(0, 40)), (slice(47, 48), slice(39, 40))):
        assert_same_bits(stored[rows, columns], numbers.T[rows, columns])


def test_grouped_order_of_awq():
    """The int32 that the interleaved order spells out."""
    words = np.array([[0x75316420]], np.uint32).view(np.int32)
    assert decoded.PackedColumns(words, 4, decoded.AWQ)[slice(0, 1), slice(0, 8)].tolist() == [list(range(8))]


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric", "nvfp4"])
def test_packed_parts_of_blocks(kind, rng):
    """Rows in the middle of an int32 of zero points, columns in the middle of a block."""
    parts, numbers = draw_packed(rng, kind, 21, 64, 16, F32)
    pairs = decoded.E2M1_PAIRS if kind == "nvfp4" else decoded.INT4_PAIRS
    divisor = float(parts.get("weight_global_scale", [1.0])[0])
    values = parts["weight_packed"].view(np.uint8)
    zeros = decoded.PackedRows(parts["weight_zero_point"], 4) if kind == "asymmetric" else None
    stored = decoded.FourBit(pairs, values, parts["weight_scale"], (1, 16), None, zeros, divisor)
    for rows, columns in ((slice(3, 19), slice(5, 39)), (slice(0, 21), slice(0, 64)), (slice(20, 21), slice(63, 64))):
        assert_same_bits(stored[rows, columns], numbers[rows, columns])
    assert stored[slice(2, 2), slice(0, 64)].shape == (0, 64)


def words_and_scales(parts):
    """Return words and scales of INT4 `[out, in]`."""
    if "qweight" in parts:
        return parts["qweight"].T, parts["scales"].T
    return parts["weight_packed"], parts["weight_scale"]


def edit_orders(edit):
    """Change the order of every matrix; None removes it."""

    def change(tensors):
        for name in [name for name in tensors if name.endswith("g_idx")]:
            order = edit(tensors.pop(name))
            tensors |= {} if order is None else {name: order}

    return change


INT4 = {name: (name, lambda tensors: None) for name in ("gptq", "gptq, version 2", "int4", "int4, float16")}
INT4 |= {"no order": ("gptq", edit_orders(lambda x: None)), "an order of zeros": ("gptq", edit_orders(np.zeros_like))}


@pytest.mark.parametrize("name", INT4)
def test_integer_checkpoint_quantized(name, tmp_path, rng, expert_mesh):
    """Symmetric INT4 has the bits of the file, and an expert layer computes with them."""
    checkpoint, stored, _ = checkpoint_of(tmp_path, rng, *INT4[name])
    pairs = {key: words_and_scales(parts) for key, parts in stored.items()}
    words, scales = (parameters({key: pair[i] for key, pair in pairs.items()}) for i in range(2))
    for mesh in (None, expert_mesh(2)):
        weights = checkpoint.moe_weights(3, mesh=mesh, quantized=True)
        for name in words:
            assert weights[name].format == "int4" and weights[name].activations is None
            assert_same_bits(np.asarray(weights[name].values), np.ascontiguousarray(words[name]).view(np.uint8))
            assert_same_bits(np.asarray(weights[name].scales), scales[name].astype(F32))
    whole, weights = checkpoint.moe_weights(3, dtype=F32), checkpoint.moe_weights(3, quantized=True)
    for name in words:
        np.testing.assert_array_equal(np.asarray(dense(weights[name], dtype=F32)), np.asarray(whole[name]))
    x = rng.standard_normal((6, HIDDEN)).astype(F32)
    routing = np.array([[0], [1], [1], [0], [1], [0]], np.int32), np.ones((6, 1), F32)
    y, want = (jax.jit(fused_moe)(x, *routing, w["w_gate_up"], w["w_down"]) for w in (weights, whole))
    np.testing.assert_allclose(np.asarray(y), np.asarray(want), rtol=1e-4, atol=1e-4 * np.abs(want).max())


OTHERS = ["awq", "int4, asymmetric", "nvfp4", "modelopt"]
OTHERS += [f"gptq, {kind}" for kind in ("asymmetric", "8 bits", "activation order", "symmetric, activation order")]


@pytest.mark.parametrize("kind", OTHERS)
def test_integer_checkpoint_without_a_format(kind, tmp_path, rng):
    checkpoint, _, _ = checkpoint_of(tmp_path, rng, kind)
    with pytest.raises(ValueError, match=r"is not stored in FP8 .* symmetric INT4.*serving_weights"):
        checkpoint.moe_weights(3, quantized=True)


def with_part(part, edit):
    """Change one tensor of `NAME`; None removes it."""

    def change(tensors):
        new = edit(tensors.pop(NAME + part, None))
        if new is not None:
            tensors[NAME + part] = new

    return change


def changed(place, value):
    def edit(x):
        x[place] = value
        return x

    return edit


TENSORS = {  # By kind and mistake: a tensor, and its change.
    "gptq, asymmetric: no zero points": ("qzeros", lambda x: None),
    "awq: no scales": ("scales", lambda x: None),
    "gptq, activation order: no order": ("g_idx", lambda x: None),
    "awq: an order": ("g_idx", lambda x: np.zeros(HIDDEN, np.int64)),
    "gptq, activation order: a group too many": ("g_idx", changed(5, HIDDEN // 16)),
    "gptq, asymmetric: a negative group": ("g_idx", changed(5, -1)),
    "gptq, asymmetric: a short order": ("g_idx", lambda x: x[1:]),
    "awq: a vector": ("qweight", lambda x: x.reshape(-1)),
    "gptq, asymmetric: no columns": ("qweight", lambda x: x[:, :0]),
    "gptq, asymmetric: columns in part of an int32": ("qweight", lambda x: x[:, 1:]),
    "awq: floats": ("qweight", lambda x: x.view(F32)),
    "gptq, 8 bits: half of the rows": ("qweight", lambda x: x[::2]),
    "awq: scales in integers": ("scales", lambda x: x.astype(np.int16)),
    "gptq, asymmetric: another group size": ("scales", lambda x: x[::2]),
    "awq: zero points of other columns": ("qzeros", lambda x: x[:, 1:]),
    "int4: no scales": ("weight_scale", lambda x: None),
    "int4, asymmetric: no scales": ("weight_scale", lambda x: None),
    "int4: no shape": ("weight_shape", lambda x: None),
    "int4: another shape": ("weight_shape", lambda x: x[::-1].copy()),
    "int4: 8 bits": ("weight_shape", lambda x: x // [1, 2]),
    "int4: a vector": ("weight_packed", lambda x: x.reshape(-1)),
    "int4: floats": ("weight_packed", lambda x: x.view(F32)),
    "int4: no blocks": ("weight_scale", lambda x: x[:, :0]),
    "int4: blocks that do not divide": ("weight_scale", lambda x: x[:, :7]),
    "int4: rows without scales": ("weight_scale", lambda x: x[1:]),
    "int4: scales in integers": ("weight_scale", lambda x: x.astype(np.int32)),
    "int4: activation order": ("weight_g_idx", lambda x: np.zeros(HIDDEN, np.int32)),
    "int4, asymmetric: zero points in int8": ("weight_zero_point", lambda x: np.zeros((WIDTH, 8), np.int8)),
    "int4, asymmetric: no zero points": ("weight_zero_point", lambda x: None),
    "int4: zero points": ("weight_zero_point", lambda x: np.zeros((WIDTH // 8, 8), np.int32)),
    "nvfp4: blocks of 32": ("weight_scale", lambda x: x[:, ::2]),
    "nvfp4: no global scale": ("weight_global_scale", lambda x: None),
    "modelopt: an odd width": ("weight_scale", lambda x: x[:, 1:]),
    "modelopt: scales in floats": ("weight_scale", lambda x: x.astype(F32)),
    "modelopt: two factors": ("weight_scale_2", lambda x: np.ones(2, F32)),
    "nvfp4: two global scales": ("weight_global_scale", lambda x: np.ones(2, F32)),
}


@pytest.mark.parametrize("mistake", TENSORS)
def test_integer_tensors_that_do_not_fit(mistake, tmp_path, rng):
    kind = mistake.split(": ")[0]
    checkpoint, _, _ = checkpoint_of(tmp_path, rng, kind, with_part(*TENSORS[mistake]))
    text = "' is stored as .*, expected qweight," if kind in GROUPED else "weight' is stored as .*, expected .*"
    for call in (lambda: checkpoint.moe_weights(3), lambda: checkpoint.read(f"{NAME}weight", dtype=F32)):
        with pytest.raises(ValueError, match=rf"^Checkpoint: '.*up_proj.{text}") as caught:
            call()
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("kind", "more", "text"),
    [
        ("int4", "weight", r"up_proj\.weight' and .*up_proj\.weight_packed', expected the tensor once"),
        ("awq", "weight", r"up_proj\.weight' and .*up_proj\.qweight', expected the tensor once"),
        ("modelopt", "pre_quant_scale", "pre_quant_scale' multiplies the tokens of .*, expected weights alone"),
    ],
)
def test_integer_tensors_of_two_checkpoints(kind, more, text, tmp_path, rng):
    checkpoint, _, _ = checkpoint_of(tmp_path, rng, kind, with_part(more, lambda x: np.ones((WIDTH, HIDDEN), F32)))
    with pytest.raises(ValueError, match=text):
        checkpoint.read(f"{NAME}weight", dtype=F32)


def test_integer_checkpoint_with_a_bias(tmp_path, rng):
    """GPTQ stores biases of zeros."""
    bias = with_part("bias", lambda x: np.zeros(WIDTH, F16))
    checkpoint, _, numbers = checkpoint_of(tmp_path / "zeros", rng, "gptq", bias)
    assert_same_bits(np.asarray(checkpoint.moe_weights(3, dtype=F32)["w_down"])[0], numbers["experts.0.down"].T)
    bias = with_part("bias", lambda x: np.eye(1, WIDTH, dtype=BF16)[0])
    checkpoint, _, _ = checkpoint_of(tmp_path / "one", rng, "int4", bias)
    with pytest.raises(
        NotImplementedError, match=r"up_proj\.bias' is not zero, expected no bias of .*up_proj\.weight'"
    ):
        checkpoint.moe_weights(3)


def with_fields(**fields):
    return lambda config: config["quantization_config"].update(fields)


def with_weights(**fields):
    return lambda config: weights_of(config).update(fields)


def weights_of(config):
    return config["quantization_config"]["config_groups"]["group_0"]["weights"]


CONFIGS = {  # By kind and mistake: a change of the config, and the message.
    "awq: none": (
        lambda config: config.update(quantization_config=None),
        "has a qweight, and quantization_config has .*, expected 'awq'",
    ),
    "awq: another method": (with_fields(quant_method="aqlm"), "expected 'awq'"),
    "awq: gemv": (with_fields(version="gemv"), "expected 'awq'"),
    "awq: no zero points": (with_fields(zero_point=False), "expected 'awq'"),
    "awq: 3 bits": (with_fields(quant_method="gptq", bits=3), "expected 'awq' .* or 'gptq' .4 or 8 bits"),
    "awq: marlin": (with_fields(quant_method="gptq", checkpoint_format="marlin"), "expected 'awq'"),
    "awq: no size": (with_fields(group_size=None), "expected 'awq'"),
    "awq: a size of 0": (with_fields(group_size=0), "expected 'awq'"),
    "awq: another size": (with_fields(group_size=32), "expected qweight, qzeros and scales of groups of 32"),
    "awq: bits in a str": (with_fields(bits="4"), "bits='4', expected an integer"),
    "awq: a version in a list": (with_fields(version=["gemm"]), "version=.*, expected a str"),
    "int4: no group": (
        lambda config: config["quantization_config"].pop("config_groups"),
        "expected it among the config_groups",
    ),
    "int4: 8 bits": (with_weights(num_bits=8), "expected it among"),
    "int4: another block": (with_weights(group_size=64), "group_size 32, expected it among"),
    "int4: a channel": (with_weights(group_size=None), "expected it among"),
    "int4: zero points": (with_weights(symmetric=False), "expected it among"),
    "int4: floats": (with_weights(type="float"), "expected it among"),
    "int4: a list": (with_fields(config_groups=[]), r"config_groups=\[\], expected an object"),
    "int4: a group": (with_fields(config_groups={"group_0": 3}), r"group_0'\]=3, expected an object"),
    "int4: bits": (with_weights(num_bits="4"), "num_bits='4', expected an integer from 1 to 64"),
    "int4: a size": (with_weights(group_size=1e9), "group_size=1000000000.0, expected an int"),
    "int4: symmetry": (with_weights(symmetric=1), "symmetric=1, expected true or false"),
    "int4: transforms": (with_fields(transform_config={"config_groups": {"u": {"apply": [1]}}}), "expected an object"),
}


@pytest.mark.parametrize("mistake", CONFIGS)
def test_integer_config_that_does_not_fit(mistake, tmp_path, rng):
    change, text = CONFIGS[mistake]
    checkpoint, _, _ = checkpoint_of(tmp_path, rng, mistake.split(": ")[0])
    change(checkpoint.config)
    with pytest.raises(ValueError, match=text):
        checkpoint.moe_weights(3)


@pytest.mark.parametrize("location", ["input", "output"])
def test_packed_config_with_a_transform(location, tmp_path, rng):
    """Transforms of weights are stored in these; those of tokens are computed in the layer."""
    checkpoint, _, numbers = checkpoint_of(tmp_path, rng, "int4")
    transforms = {"R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_input"}]}}
    for known in ({}, {"config_groups": {}}, {"config_groups": transforms}, {"config_groups": {"R2": {}}}):
        checkpoint.config["quantization_config"]["transform_config"] = known
        assert_same_bits(np.asarray(checkpoint.read(f"{NAME}weight", dtype=F32)), numbers["experts.0.up"])
    transforms["R4"] = {"apply": [{"location": "weight_input"}, {"location": location}]}
    checkpoint.config["quantization_config"]["transform_config"] = {"config_groups": transforms}
    for call in (lambda: checkpoint.moe_weights(3), lambda: checkpoint.read(f"{NAME}weight", dtype=F32)):
        with pytest.raises(NotImplementedError, match=r"the transform 'R4' of tokens, expected weights alone"):
            call()


@pytest.mark.parametrize("kind", ["gptq", "gptq, 8 bits", "gptq, version 2"])
def test_grouped_version_that_is_not_declared(kind, tmp_path, rng):
    """Of symmetric weights, the zero points say which version stored them."""
    checkpoint, _, _ = checkpoint_of(tmp_path, rng, kind)
    declared = checkpoint.config["quantization_config"]
    declared["checkpoint_format"] = None if "checkpoint_format" in declared and "2" in kind else "gptq_v2"
    with pytest.raises(ValueError, match=r"sym=True and checkpoint_format=.*, expected zero points of (8|128);"):
        checkpoint.moe_weights(3)


def test_grouped_huge_header(tmp_path, rng):
    """A shape without elements does not make the reader allocate its rows."""
    empty = with_part("qweight", lambda x: np.zeros((1 << 40, 0), np.int32))
    checkpoint, _, _ = checkpoint_of(tmp_path, rng, "awq, one group", empty)
    with pytest.raises(ValueError, match="expected qweight"):
        checkpoint.moe_weights(3)


def test_packed_config_of_several_formats(tmp_path, rng):
    """Attention may be stored in another format than experts."""
    checkpoint, _, numbers = checkpoint_of(tmp_path, rng, "int4")
    groups = checkpoint.config["quantization_config"]["config_groups"]
    groups |= {"group_1": copy.deepcopy(groups["group_0"]), "group_2": {"weights": None}}
    weights_of(checkpoint.config).update(num_bits=8, group_size=None)
    assert_same_bits(np.asarray(checkpoint.read(f"{NAME}weight_packed", dtype=F32)), numbers["experts.0.up"])


def test_packed_parameter_of_two_formats(tmp_path, rng):
    """Gate and up in blocks of different sizes are no one array of scales."""
    wide, _ = draw_packed(rng, "symmetric", WIDTH, HIDDEN, 64, BF16)
    checkpoint, _, _ = checkpoint_of(tmp_path, rng, "int4", with_part("weight_scale", lambda x: wide["weight_scale"]))
    groups = checkpoint.config["quantization_config"]["config_groups"]
    groups["group_1"] = copy.deepcopy(groups["group_0"])
    weights_of(checkpoint.config).update(group_size=64)
    assert checkpoint.moe_weights(3)["w_gate_up"].shape == (2, HIDDEN, 2 * WIDTH)
    with pytest.raises(ValueError, match=r"w_gate_up is stored as .*, expected one format; leave quantized out"):
        checkpoint.moe_weights(3, quantized=True)
