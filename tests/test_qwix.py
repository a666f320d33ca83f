"""The qwix integration, against the real package: arrays bit for bit, and its rules for experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

qwix = pytest.importorskip("qwix")
nnx = pytest.importorskip("flax.nnx")

import jax_ep
from cases import reals
from jax_ep.flax import MoE, SharedExperts
from jax_ep.integrations.qwix import apply_rules, from_qarray, to_qarray
from stored_experts import STORED, store

pytestmark = pytest.mark.filterwarnings(
    "ignore:MoE. no mesh is set",
    "ignore::DeprecationWarning:qwix",  # it calls what Flax deprecates
)
# How qwix quantizes `[E, K, N]`, and the format that has the same values.
KINDS = {
    "int8": (jnp.int8, (0, 2), {}, "int8"),
    "int8 of all experts": (jnp.int8, (2,), {}, "int8"),
    "int8 of a whole expert": (jnp.int8, (0,), {}, "int8"),
    "int4": (jnp.int4, (0, 2), {}, "int4"),
    "int4 in tiles": (jnp.int4, (0, 2), {1: 32}, "int4"),
    "fp8": (jnp.float8_e4m3fn, (0, 2), {}, "fp8_channel"),
    "fp8 in blocks": (jnp.float8_e4m3fn, (0,), {1: 128, 2: 128}, "fp8"),
}


def same(got, want):
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("kind", KINDS)
def test_qwix_arrays(kind, rng):
    qtype, axes, tiles, format = KINDS[kind]
    w = reals(rng, 2, 256, 128) * 10.0 ** rng.uniform(-2, 0, (2, 1, 128)).astype(np.float32)
    array = qwix.quantize(jnp.asarray(w), qtype, channelwise_axes=axes, tiled_axes=tiles)
    found = jax.jit(from_qarray)(array)
    assert (found.format, found.shape) == (format, w.shape)
    same(jax_ep.dequantize(found, jnp.float32), qwix.dequantize(array))
    back = jax.jit(to_qarray)(found)
    assert back.qvalue.dtype == array.qvalue.dtype
    same(qwix.dequantize(back), qwix.dequantize(array))
    x, sizes = reals(rng, 5, 256), np.array([2, 3], np.int32)
    y = jax_ep.grouped_gemm(x, found, sizes, implementation="xla")
    want = jax.lax.ragged_dot(x, qwix.dequantize(array), sizes)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stored", [name for name in STORED if "mxfp4" not in name])
def test_qwix_arrays_of_quantized_weights(stored, rng):
    w = store(reals(rng, 2, 128, 128), stored)
    same(qwix.dequantize(to_qarray(w)), jax_ep.dequantize(w, jnp.float32))


def test_qwix_array_errors(rng):
    w = jnp.asarray(reals(rng, 2, 64, 8))
    with pytest.raises(TypeError, match=r"from_qarray: w is .*expected a qwix.QArray"):
        from_qarray(w)
    with pytest.raises(ValueError, match=r"from_qarray: w is int8 with .* tiles \(1, 32, 1\).*channelwise_axes"):
        from_qarray(qwix.quantize(w, jnp.int8, channelwise_axes=(0, 2), tiled_axes={1: 32}))
    with pytest.raises(ValueError, match="zero point"):
        from_qarray(qwix.quantize(w, jnp.int8, channelwise_axes=(0, 2), calibration_method="minmax"))
    with pytest.raises(TypeError, match="dtype int2, expected int8, int4 or"):
        from_qarray(qwix.quantize(w, jnp.int2, channelwise_axes=(0, 2)))
    with pytest.raises(ValueError, match=r"to_qarray: w is 'mxfp4'.*jax_ep.dequantize"):
        to_qarray(jax_ep.quantize(w, "mxfp4"))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(128, 128, rngs=rngs)
        self.blocks = nnx.List([self.make(rngs), self.make(rngs)])

    def make(self, rngs):
        return MoE(128, 64, 4, 2, dtype=jnp.float32, shared_experts=SharedExperts(1), rngs=rngs)

    def __call__(self, x):
        x = self.dense(x)
        for moe in self.blocks:
            x = x + moe(x)[0]
        return x


@pytest.mark.slow
def test_qwix_rules_quantize_experts(rng):
    """Rules name layers by their path; qwix then quantizes what is left."""
    model, x = Model(nnx.Rngs(0)), jnp.asarray(reals(rng, 8, 128))
    rules = [
        qwix.QuantizationRule(
            module_path="blocks/0", op_names=("ragged_dot",), weight_qtype=jnp.int8, act_qtype=jnp.int8
        ),
        qwix.QuantizationRule(module_path="blocks/.*", op_names=("ragged_dot",), weight_qtype=jnp.int4, tile_size=128),
        qwix.QuantizationRule(module_path="blocks/.*"),  # routers and shared experts stay as they are
        qwix.QuantizationRule(module_path=".*", weight_qtype=jnp.int4, tile_size=128),
    ]
    experts = apply_rules(model, rules)
    served = [moe._served().w_gate_up for moe in experts.blocks]
    assert [(w.format, w.activations) for w in served] == [("int8", "int8"), ("int4", None)]
    for got, moe in zip(served, model.blocks, strict=True):
        want = moe.serving_weights(got.format, activations=got.activations).w_gate_up
        same(got.values, want.values)
    whole = qwix.quantize_model(experts, qwix.PtqProvider(rules), x)
    assert whole.dense.kernel.array.qvalue.dtype == jnp.int4
    assert [moe._served().w_gate_up.format for moe in whole.blocks] == ["int8", "int4"]
    got, want = nnx.jit(lambda m, x: m(x))(whole, x), model(x)
    assert 1e-4 < jnp.linalg.norm(got - want) / jnp.linalg.norm(want) < 0.5
    assert model.blocks[0].w_gate_up is not None


@pytest.mark.slow
def test_qwix_rules_add_adapters(rng):
    """One step of QLoRA changes the adapters of experts and of qwix's dense layer, and nothing else."""
    model, x = Model(nnx.Rngs(0)), jnp.asarray(reals(rng, 8, 128))
    lora = {"weight_qtype": jnp.int8, "rank": 4, "alpha": 8.0}
    rules = [
        qwix.LoraRule(module_path="blocks/.*", op_names=("ragged_dot",), **lora),
        qwix.QuantizationRule(module_path="blocks/.*"),
        qwix.LoraRule(module_path=".*", **lora),
    ]
    model = apply_rules(model, rules, rngs=nnx.Rngs(1))
    model = qwix.apply_lora_to_model(model, qwix.LoraProvider(rules), x, rngs=nnx.Rngs(2))
    assert model.blocks[0].lora_scale == 2.0

    def loss(model, x):
        return jnp.sum(jnp.sin(model(x)))

    gradients = nnx.jit(nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam)))(model, x)
    found = {"/".join(map(str, path)): g[...] for path, g in nnx.to_flat_state(gradients)}
    names = [f"blocks/{i}/{w}_lora_{part}" for i in range(2) for w in ("w_down", "w_gate_up") for part in "ab"]
    assert sorted(found) == [*names, "dense/kernel_lora_a", "dense/kernel_lora_b"]
    assert all(jnp.abs(found[name]).max() > 1e-4 for name in found if name.endswith("_b"))


def test_qwix_rule_errors():
    moe = MoE(128, 64, 4, 2, rngs=nnx.Rngs(0))
    for rule, message in (
        (qwix.QuantizationRule(module_path="mlp"), r"no rule matches the MoE layers \[''\].*check module_path"),
        (
            qwix.QuantizationRule(weight_qtype=jnp.int8, tile_size=128),
            "tile_size=128, .*expected one of int8 with tile_size=None",
        ),
        (qwix.QuantizationRule(weight_qtype=jnp.int8, weight_calibration_method="minmax"), "'minmax'"),
        (qwix.LoraRule(rank=2, alpha=1.0, dropout=0.5), "dropout=0.5"),
        (qwix.LoraRule(rank=2, alpha=1.0), "rngs=None with a LoraRule.*pass one"),
        (qwix.QuantizationRule(module_path="("), r"^apply_rules: module_path='\(' of a rule, .*unterminated"),
    ):
        with pytest.raises(ValueError, match=message):
            apply_rules(moe, [rule])
    with pytest.raises(ValueError, match=r"^apply_rules: rank=0, expected at least 1"):
        apply_rules(moe, [qwix.LoraRule(rank=0, alpha=1.0)], rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"rank": None}, TypeError, "rank=None is a NoneType, expected an int"),
        ({"alpha": "1"}, TypeError, "alpha='1' is a str, expected a number"),
        ({"alpha": None}, TypeError, "alpha=None is a NoneType, expected a number"),
        ({"alpha": np.nan}, ValueError, "alpha=nan, expected a finite float32"),
        (
            {"weight_qtype": 3},
            TypeError,
            "the rule of 'blocks/1': weight_qtype=3 is not a dtype, expected a dtype such",
        ),
        ({"weight_qtype": "int8", "act_qtype": "int4"}, ValueError, "the rule of 'blocks/1' has act_qtype='int4', exp"),
        ({"weight_qtype": "int8", "act_qtype": jnp.float8_e5m2}, ValueError, "the rule .* act_qtype='float8_e5m2', e"),
    ],
)
def test_qwix_rule_with_a_wrong_field(fields, error, text):
    """No layer changes, also not those of other rules."""
    model = Model(nnx.Rngs(0))
    right = {"rank": 2, "alpha": 1.0, "weight_qtype": jnp.int8}
    rules = [qwix.LoraRule(module_path="blocks/0", **right), qwix.LoraRule(module_path="blocks/1", **right | fields)]
    with pytest.raises(error, match=f"^apply_rules: {text}"):
        apply_rules(model, rules, rngs=nnx.Rngs(0))
    assert all(block.w_down is not None and block.lora_scale is None for block in model.blocks)


@pytest.mark.parametrize(
    ("rules", "name"),
    [
        (None, "rules is a NoneType"),
        (qwix.QuantizationRule(weight_qtype=jnp.int8), "rules is a QuantizationRule, expected a list"),
        ([3], "one of rules is an int, expected a rule"),
    ],
)
def test_qwix_rules_of_another_type(rules, name):
    with pytest.raises(TypeError, match=f"^apply_rules: {name}"):
        apply_rules(MoE(128, 64, 4, 2, rngs=nnx.Rngs(0)), rules)


def test_qwix_rule_for_quantized_training():
    """It would freeze the experts. Rules for other layers may be in the list."""
    moe, quantized = MoE(128, 64, 4, 2, rngs=nnx.Rngs(0)), qwix.QtRule(weight_qtype=jnp.int8)
    with pytest.raises(ValueError, match=r"^apply_rules: the rule of '' is a QtRule for quantized training, .*'fp8'"):
        apply_rules(moe, [quantized])
    assert apply_rules(moe, [qwix.QtRule(module_path=""), quantized]).w_down is not None
