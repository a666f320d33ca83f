"""Files of AutoAWQ and GPTQ: values against NumPy, exact INT4 where the layout allows it, and hostile files."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("safetensors")

import hub_checkpoints
from cases import BF16, F16, F32, assert_same_bits
from harness import make_mesh
from hub_checkpoints import HUB
from jax_ep import fused_moe
from jax_ep.checkpoints import Checkpoint, decoded
from stored_experts import dense

HIDDEN, WIDTH, LAYER = 64, 96, "model.layers.0.mlp.experts."
NAME = f"{LAYER}0.up_proj."
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True}
ASYMMETRIC = GPTQ | {"sym": False}
KINDS = {
    "awq": AWQ,
    "awq, one group": AWQ | {"group_size": -1},
    "symmetric": GPTQ,
    "symmetric, version 2": GPTQ | {"checkpoint_format": "gptq_v2"},
    "symmetric, one group": GPTQ | {"group_size": -1},
    "asymmetric": ASYMMETRIC,
    "asymmetric, version 2": ASYMMETRIC | {"checkpoint_format": "gptq_v2"},
    "8 bits": GPTQ | {"bits": 8, "checkpoint_format": "gptq"},
    "8 bits, asymmetric": ASYMMETRIC | {"bits": 8},
    "activation order": ASYMMETRIC | {"desc_act": True},
    "a last group that is short": ASYMMETRIC | {"group_size": 40},
}


def packed(codes, bits, order=None):
    """Pack numbers of the last axis in int32: the lowest bits have the first one, or that of `order`."""
    per = 32 // bits
    words = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, per)[..., order or list(range(per))]
    return (words << np.arange(0, 32, bits, dtype=np.uint32)).sum(-1, dtype=np.uint32)


def draw(rng, config, depth, width, scale_dtype=F16):
    """Draw the tensors of one matrix, and the numbers `[in, out]` that they stand for."""
    bits, size = config["bits"], depth if config["group_size"] == -1 else config["group_size"]
    groups = -(-depth // size)
    of_rows = np.arange(depth) // size
    codes, zeros = (rng.integers(0, 1 << bits, (rows, width)) for rows in (depth, groups))
    scales = rng.uniform(0.5, 2, (groups, width)).astype(scale_dtype)
    parts = {"scales": scales}
    if config["quant_method"] == "awq":
        words, points = packed(codes, 4, AWQ_ORDER), packed(zeros, 4, AWQ_ORDER)
    else:
        zeros = np.full_like(zeros, 1 << bits - 1) if config["sym"] else zeros
        of_rows = rng.permutation(of_rows) if config["desc_act"] else of_rows
        ones = 0 if config.get("checkpoint_format") == "gptq_v2" else packed(np.ones(32 // bits), bits)
        words, points = packed(codes.T, bits).T, packed(zeros, bits) - ones
        parts["g_idx"] = of_rows.astype(np.int32)
    parts |= {"qweight": words.view(np.int32), "qzeros": points.view(np.int32)}
    numbers = (codes - zeros[of_rows]) * scales.astype(np.float64)[of_rows]
    return parts, numbers.astype(F32)


def checkpoint_of(folder, rng, config, change=lambda x: None, **options):
    """Write a Qwen3-MoE of two experts; return stored tensors and numbers by expert and projection."""
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "num_experts": 2, "num_hidden_layers": 1}
    hub = HUB["qwen3_moe"].config | sizes | {"decoder_sparse_step": 1, "quantization_config": config}
    tensors = {"model.layers.0.mlp.gate.weight": rng.standard_normal((2, HIDDEN)).astype(BF16)}
    stored, numbers = {}, {}
    for expert, name in itertools.product(range(2), ("gate", "up", "down")):
        sizes = (WIDTH, HIDDEN) if name == "down" else (HIDDEN, WIDTH)
        stored[expert, name], numbers[expert, name] = draw(rng, config, *sizes, **options)
        tensors |= {f"{LAYER}{expert}.{name}_proj.{part}": x for part, x in stored[expert, name].items()}
    change(tensors)
    return Checkpoint(hub_checkpoints.write(folder, hub, tensors)), stored, numbers


def parameters(parts):
    """Stack both experts' matrices `[in, out]`: gate and up along `out`."""
    up = np.stack([np.concatenate([parts[e, "gate"], parts[e, "up"]], 1) for e in range(2)])
    return {"w_gate_up": up, "w_down": np.stack([parts[e, "down"] for e in range(2)])}


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_checkpoint_values(kind, tmp_path, rng, expert_mesh):
    checkpoint, _, numbers = checkpoint_of(tmp_path, rng, KINDS[kind])
    for mesh in (None, expert_mesh(2)):
        weights = checkpoint.moe_weights(0, mesh=mesh, dtype=F32)
        for name, want in parameters(numbers).items():
            assert_same_bits(np.asarray(weights[name]), want, name)
    up = numbers[0, "up"]
    assert_same_bits(np.asarray(checkpoint.moe_weights(0)["w_gate_up"])[0, :, WIDTH:], up.astype(BF16))
    sharding = NamedSharding(make_mesh((2, 4), ("a", "b")), P("a", "b"))
    for name in ("weight", "qweight"):
        assert_same_bits(np.asarray(checkpoint.read(NAME + name, dtype=F32, sharding=sharding)), up.T)
    assert_same_bits(np.asarray(checkpoint.read(f"{NAME}weight", dtype=F32, transpose=True)), up)


@pytest.mark.parametrize("kind", ["awq", "8 bits, asymmetric", "activation order"])
def test_grouped_parts_of_words(kind, rng):
    """Rows and columns in the middle of an int32 and of a group."""
    config = KINDS[kind]
    parts, numbers = draw(rng, config, 48, 40, F32)
    bits, is_awq = config["bits"], kind == "awq"
    places = decoded.AWQ if is_awq else decoded.PLAIN
    codes = decoded.PackedColumns(parts["qweight"], 4, places) if is_awq else decoded.PackedRows(parts["qweight"], bits)
    zeros = decoded.PackedColumns(
        parts["qzeros"], bits, places, 0 if is_awq else packed(np.ones(32 // bits), bits).item()
    )
    stored = decoded.Grouped(codes, zeros, parts["scales"], 16, parts.get("g_idx"))
    assert stored.shape == numbers.shape
    for rows, columns in ((slice(3, 19), slice(5, 39)), (slice(0, 48), slice(0, 40)), (slice(47, 48), slice(39, 40))):
        assert_same_bits(stored[rows, columns], numbers[rows, columns])


def test_grouped_order_of_awq():
    """The int32 that the interleaved order spells out."""
    words = np.array([[0x75316420]], np.uint32).view(np.int32)
    assert decoded.PackedColumns(words, 4, decoded.AWQ)[slice(0, 1), slice(0, 8)].tolist() == [list(range(8))]


@pytest.mark.parametrize("kind", ["symmetric", "symmetric, version 2", "no order", "an order of zeros"])
def test_grouped_checkpoint_quantized(kind, tmp_path, rng, expert_mesh):
    """Symmetric INT4 has the bits of the file, and an expert layer computes with them."""

    def change(tensors):
        for name in [name for name in tensors if name.endswith("g_idx")]:
            if kind == "no order":
                del tensors[name]
            elif kind == "an order of zeros":
                tensors[name] = np.zeros_like(tensors[name])

    checkpoint, stored, _ = checkpoint_of(tmp_path, rng, KINDS.get(kind, GPTQ), change)
    for mesh in (None, expert_mesh(2)):
        weights = checkpoint.moe_weights(0, mesh=mesh, quantized=True)
        words, scales = (parameters({key: x[part] for key, x in stored.items()}) for part in ("qweight", "scales"))
        for name in words:
            assert weights[name].format == "int4" and weights[name].activations is None
            octets = np.ascontiguousarray(words[name].swapaxes(1, 2)).view(np.uint8)
            assert_same_bits(np.asarray(weights[name].values), octets)
            assert_same_bits(np.asarray(weights[name].scales), scales[name].swapaxes(1, 2).astype(F32))
    whole, weights = checkpoint.moe_weights(0, dtype=F32), checkpoint.moe_weights(0, quantized=True)
    for name in words:
        np.testing.assert_array_equal(np.asarray(dense(weights[name], dtype=F32)), np.asarray(whole[name]))
    x = rng.standard_normal((6, HIDDEN)).astype(F32)
    routing = np.array([[0], [1], [1], [0], [1], [0]], np.int32), np.ones((6, 1), F32)
    y, want = (jax.jit(fused_moe)(x, *routing, w["w_gate_up"], w["w_down"]) for w in (weights, whole))
    np.testing.assert_allclose(np.asarray(y), np.asarray(want), rtol=1e-4, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("kind", ["awq", "asymmetric", "8 bits", "activation order"])
def test_grouped_checkpoint_without_a_format(kind, tmp_path, rng):
    checkpoint, _, _ = checkpoint_of(tmp_path, rng, KINDS[kind])
    with pytest.raises(ValueError, match=r"is not stored in FP8 .* symmetric INT4.*serving_weights"):
        checkpoint.moe_weights(0, quantized=True)


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


TENSORS = {
    "no zero points": ("asymmetric", with_part("qzeros", lambda x: None)),
    "no scales": ("awq", with_part("scales", lambda x: None)),
    "no order": ("activation order", with_part("g_idx", lambda x: None)),
    "an order for AWQ": ("awq", with_part("g_idx", lambda x: np.zeros(HIDDEN, np.int64))),
    "a group too many": ("activation order", with_part("g_idx", changed(5, HIDDEN // 16))),
    "a negative group": ("asymmetric", with_part("g_idx", changed(5, -1))),
    "a short order": ("asymmetric", with_part("g_idx", lambda x: x[1:])),
    "a vector": ("awq", with_part("qweight", lambda x: x.reshape(-1))),
    "no columns": ("asymmetric", with_part("qweight", lambda x: x[:, :0])),
    "columns in part of an int32": ("asymmetric", with_part("qweight", lambda x: x[:, 1:])),
    "floats": ("awq", with_part("qweight", lambda x: x.view(F32))),
    "8 bits": ("8 bits", with_part("qweight", lambda x: x[::2])),
    "scales in integers": ("awq", with_part("scales", lambda x: x.astype(np.int16))),
    "another group size": ("asymmetric", with_part("scales", lambda x: x[::2])),
    "zero points of other columns": ("awq", with_part("qzeros", lambda x: x[:, 1:])),
}


@pytest.mark.parametrize("mistake", TENSORS)
def test_grouped_tensors_that_do_not_fit(mistake, tmp_path, rng):
    kind, change = TENSORS[mistake]
    checkpoint, _, _ = checkpoint_of(tmp_path, rng, KINDS[kind], change)
    for call in (lambda: checkpoint.moe_weights(0), lambda: checkpoint.read(f"{NAME}weight", dtype=F32)):
        with pytest.raises(ValueError, match=r"^Checkpoint: '.*up_proj.' is stored as .*, expected qweight,") as caught:
            call()
        assert len(str(caught.value)) < 1000


CONFIGS = {
    "none": (None, "has a qweight, and quantization_config has .*, expected 'awq'"),
    "another method": ({"quant_method": "aqlm"}, "expected 'awq'"),
    "gemv": ({"version": "gemv"}, "expected 'awq'"),
    "no zero points": ({"zero_point": False}, "expected 'awq'"),
    "3 bits": ({"quant_method": "gptq", "bits": 3}, "expected 'awq' .* or 'gptq' .4 or 8 bits"),
    "marlin": ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "expected 'awq'"),
    "no size": ({"group_size": None}, "expected 'awq'"),
    "a size of 0": ({"group_size": 0}, "expected 'awq'"),
    "another size": ({"group_size": 32}, "expected qweight, qzeros and scales of groups of 32"),
    "bits in a str": ({"bits": "4"}, "bits='4', expected an integer"),
    "a version in a list": ({"version": ["gemm"]}, "version=.*, expected a str"),
}


@pytest.mark.parametrize("mistake", CONFIGS)
def test_grouped_config_that_does_not_fit(mistake, tmp_path, rng):
    change, text = CONFIGS[mistake]
    checkpoint, _, _ = checkpoint_of(tmp_path, rng, AWQ)
    checkpoint.config["quantization_config"] = None if change is None else AWQ | change
    with pytest.raises(ValueError, match=text):
        checkpoint.moe_weights(0)


def test_grouped_huge_header(tmp_path, rng):
    """A shape without elements does not make the reader allocate its rows."""
    empty = with_part("qweight", lambda x: np.zeros((1 << 40, 0), np.int32))
    checkpoint, _, _ = checkpoint_of(tmp_path, rng, AWQ | {"group_size": -1}, empty)
    with pytest.raises(ValueError, match="expected qweight"):
        checkpoint.moe_weights(0)
