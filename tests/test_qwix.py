"""The qwix integration, against the real package: arrays bit for bit, and its rules for experts."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

qwix = pytest.importorskip("qwix")
nnx = pytest.importorskip("flax.nnx")

import harness
import jax_ep
import oracle
import oracle_experts
from cases import reals, relative_error
from jax_ep import lora
from jax_ep.flax import MoE, SharedExperts
from jax_ep.integrations.qwix import apply_rules, from_qarray, to_qarray
from jax_ep.serving import ExpertWeights
from jax_ep.sharding import MeshAxes, sharded_moe
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
    "mxfp4": ("mxfp4", (0, 2), {1: 32}, "mxfp4"),
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


@pytest.mark.parametrize("stored", STORED)
def test_qwix_arrays_of_quantized_weights(stored, rng):
    w = store(reals(rng, 2, 128, 128), stored)
    same(qwix.dequantize(to_qarray(w)), jax_ep.dequantize(w, jnp.float32))


def test_qwix_array_errors(rng):
    w = jnp.asarray(reals(rng, 2, 64, 8))
    with pytest.raises(TypeError, match=r"from_qarray: w is .*expected a qwix.QArray"):
        from_qarray(w)
    with pytest.raises(ValueError, match=r"^to_qarray: w is None .*expected weights with a format.*jax_ep.dequantize"):
        to_qarray(jax_ep.quantize(w, None))
    array = qwix.quantize(w, jnp.int8, channelwise_axes=(0, 2))
    with pytest.raises(TypeError, match=r"^dequantize: w is a QArray with scales of complex64, expected floats"):
        jax_ep.dequantize(dataclasses.replace(array, scale=array.scale.astype(jnp.complex64)), jnp.float32)
    with pytest.raises(TypeError, match=r"^dequantize: w is a QArray of dtype 'xxx") as error:
        jax_ep.dequantize(dataclasses.replace(array, qtype="x" * 1000), jnp.float32)
    assert len(str(error.value)) < 500


MISTAKES = [
    ({"qtype": jnp.int8, "tiled_axes": {1: 32}}, ValueError, r"int8 with .* tiles \(1, 32, 1\).*channelwise_axes"),
    ({"qtype": jnp.int8, "calibration_method": "minmax"}, ValueError, "int8 with a zero point, .*'absmax'"),
    ({"qtype": jnp.int2}, TypeError, r"dtype int2, expected int8 or .*qwix.dequantize\(w\)"),
    ({"qtype": "nvfp4", "tiled_axes": {1: 16}}, TypeError, "dtype 'nvfp4' in float4_e2m1fn, expected"),
    ({"qtype": "mxfp8", "tiled_axes": {1: 32}}, TypeError, "dtype 'mxfp8' in float8_e4m3fn, expected"),
]


@pytest.mark.parametrize(("how", "error", "text"), MISTAKES, ids=str)
def test_qwix_arrays_that_no_layer_takes(how, error, text, rng):
    """Each function names itself and the argument."""
    array = qwix.quantize(jnp.asarray(reals(rng, 2, 64, 64)), channelwise_axes=(0, 2), **how)
    x, idx, weights, sizes = jnp.ones((2, 64)), jnp.array([[0], [1]]), jnp.ones((2, 1)), jnp.array([1, 1])
    mesh = harness.make_mesh((2,), ("expert",))
    calls = {
        "from_qarray: w": lambda w: from_qarray(w),
        "dequantize: w": lambda w: jax_ep.dequantize(w, jnp.float32),
        "moe: w_gate_up": lambda w: jax_ep.moe(x, idx, weights, w, w, num_experts=2, axis_name=()),
        "fused_moe: w_gate_up": lambda w: jax_ep.fused_moe(x, idx, weights, w, w),
        "low_latency_moe: w_gate_up": lambda w: jax_ep.low_latency_moe(
            x, idx, weights, w, w, num_experts=2, axis_name=()
        ),
        "sharded_moe: w_gate_up": lambda w: sharded_moe(mesh, num_experts=2)(x, idx, weights, w, w),
        "MoE: w_gate_up": lambda w: MoE(64, 32, 2, 1, rngs=nnx.Rngs(0))(x, ExpertWeights(w, w)),
        "grouped_gemm: rhs": lambda w: jax_ep.grouped_gemm(x, w, sizes),
        "masked_grouped_gemm: rhs": lambda w: jax_ep.masked_grouped_gemm(x[:, None], w, sizes),
        "grouped_gemm: rhs.base": lambda w: jax_ep.grouped_gemm(x, lora.LoraWeights(w), sizes),
        "lora.init: w": lambda w: lora.init(jax.random.key(0), w, 2),
    }
    for name, call in calls.items():
        with pytest.raises(error, match=f"^{name} is a QArray of {text}"):
            call(array)


def test_qwix_arrays_of_other_shapes(rng):
    array = qwix.quantize(jnp.asarray(reals(rng, 2, 64, 8)), jnp.int8, channelwise_axes=(0, 2))
    with pytest.raises(
        ValueError, match=r"^grouped_gemm: rhs is a QArray with values \(2, 64, 8\) and scales \(3, 1, 8"
    ):
        jax_ep.grouped_gemm(jnp.ones((2, 64)), array.replace(scale=jnp.ones((3, 1, 8))), jnp.array([1, 1]))
    with pytest.raises(TypeError, match=r"^grouped_gemm: rhs.scale is a NoneType, not an array"):
        jax_ep.grouped_gemm(jnp.ones((2, 64)), array.replace(scale=None), jnp.array([1, 1]))


class Layer:
    """Tokens of four ranks, and experts that qwix quantized in one way."""

    def __init__(self, rng, kind):
        qtype, axes, tiles, _ = KINDS[kind]
        self.tokens = reals(rng, 32, 128), rng.integers(-1, 8, (32, 2), np.int32), rng.random((32, 2), np.float32)
        arrays = [0.2 * reals(rng, 8, 128, size) for size in (256, 128)]
        self.weights = [qwix.quantize(jnp.asarray(w), qtype, channelwise_axes=axes, tiled_axes=tiles) for w in arrays]
        self.plain = [np.asarray(qwix.dequantize(w), np.float64) for w in self.weights]

    def want(self):
        """Return the result in float64, of the values that the arrays stand for."""
        x, idx, weights = self.tokens
        return oracle_experts.MoE(x[None], weights[None], *self.plain, oracle.layout(idx[None], 8)).forward()[0]

    def check(self, got):
        np.testing.assert_allclose(np.asarray(got, np.float64), self.want(), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_qwix_arrays_in_layers_of_one_device(kind, rng):
    layer = Layer(rng, kind)
    layer.check(jax.jit(jax_ep.fused_moe)(*layer.tokens, *layer.weights))
    low_latency = functools.partial(jax_ep.low_latency_moe, num_experts=8, axis_name=())
    layer.check(jax.jit(low_latency)(*layer.tokens, *layer.weights))


@pytest.mark.parametrize("kind", ["int8", "int8 of all experts", "fp8 in blocks", "mxfp4"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.slow(unless={"kind": ["mxfp4"], "axis_type": [AxisType.Explicit]})
def test_qwix_arrays_in_sharded_layers(kind, axis_type, rng):
    """Scales that all experts share are repeated, so that axes split them as the values."""
    layer, mesh = Layer(rng, kind), harness.make_mesh((4,), ("expert",), axis_type)
    split = jax.NamedSharding(mesh, jax.P("expert"))
    tokens = jax.device_put(layer.tokens, split)
    weights = [
        jax.tree.map(lambda part: jax.device_put(part, split if part.shape[0] == 8 else None), w) for w in layer.weights
    ]
    with jax.set_mesh(mesh):
        layer.check(jax.jit(sharded_moe(num_experts=8))(*tokens, *weights))
        layer.check(jax.jit(sharded_moe(num_experts=8, balance=jax_ep.Balance()))(*tokens, *weights))
        made = [from_qarray(w) for w in weights]
    if axis_type == AxisType.Explicit:
        assert all(part.sharding.spec[0] == "expert" for part in jax.tree.leaves(made))


@pytest.mark.parametrize("kind", ["int8", "int4 in tiles"])
@pytest.mark.slow(unless={"kind": ["int4 in tiles"]})
def test_qwix_arrays_in_shard_map(kind, rng):
    """Arrays of the experts of a rank, in every layer and GEMM between collectives."""
    layer, mesh = Layer(rng, kind), harness.make_mesh((4,), ("expert",))
    for call in (jax_ep.moe, jax_ep.low_latency_moe):
        run = jax.shard_map(
            functools.partial(call, num_experts=8), mesh=mesh, in_specs=jax.P("expert"), out_specs=jax.P("expert")
        )
        layer.check(jax.jit(run)(*layer.tokens, *layer.weights))

    @jax.shard_map(mesh=mesh, in_specs=jax.P("expert"), out_specs=jax.P("expert"))
    def parts(x, idx, weights, w_gate_up, w_down):
        d = jax_ep.dispatch(x, idx, weights, num_experts=8)
        gate, up = jnp.split(jax_ep.grouped_gemm(d.tokens, w_gate_up, d.group_sizes), 2, axis=-1)
        rows = jax_ep.grouped_gemm(jax.nn.silu(gate) * up, w_down, d.group_sizes)
        return jax_ep.combine(rows * d.weights[:, None], d.handle)

    layer.check(jax.jit(parts)(*layer.tokens, *layer.weights))


def test_qwix_arrays_in_flax(rng):
    """A layer takes them in place of its weights, with and without a mesh."""
    layer = Layer(rng, "int8")
    moe, x = MoE(128, 128, 8, 2, dtype=jnp.float32, rngs=nnx.Rngs(0)), jnp.asarray(layer.tokens[0])
    weights = ExpertWeights(*layer.weights)
    run = nnx.jit(lambda moe, x, weights: moe(x, weights))
    for mesh in (None, harness.make_mesh((4,), ("expert",))):
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            y, metrics = run(moe, x, weights)
            logits = np.asarray(x, np.float64) @ np.asarray(moe.router[...], np.float64)
            chosen = np.take_along_axis(logits, np.asarray(metrics.topk_idx), -1)
            chosen = np.exp(chosen - chosen.max(-1, keepdims=True))
            layer.tokens = np.asarray(x), np.asarray(metrics.topk_idx), chosen / chosen.sum(-1, keepdims=True)
            layer.check(y)


def test_qwix_arrays_under_adapters(rng):
    """The gradients of tokens and adapters are those of the values that the arrays stand for."""
    layer = Layer(rng, "int8")
    adapted = [lora.init(jax.random.key(i), w, 4, dtype=jnp.float32) for i, w in enumerate(layer.weights)]
    adapted = [dataclasses.replace(w, b=jnp.asarray(0.1 * reals(rng, *w.b.shape))) for w in adapted]
    x, idx, weights = layer.tokens

    def loss(x, adapters, bases):
        pair = [
            dataclasses.replace(w, base=base, a=a, b=b)
            for w, base, (a, b) in zip(adapted, bases, adapters, strict=True)
        ]
        return jnp.sum(jnp.sin(jax_ep.fused_moe(x, idx, weights, *pair)))

    adapters = [(w.a, w.b) for w in adapted]
    got, want = (
        jax.jit(jax.grad(loss, argnums=(0, 1)))(x, adapters, bases)
        for bases in (layer.weights, [qwix.dequantize(w) for w in layer.weights])
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), got, want)
    same(lora.merge(lora.LoraWeights(layer.weights[0])), qwix.dequantize(layer.weights[0]))


@pytest.mark.parametrize("scale", [3.0, -1.0])
def test_qwix_array_mxfp4_with_another_scale(scale, rng):
    """Eager calls raise an error; compiled ones return NaN, never another number."""
    array = qwix.quantize(jnp.asarray(reals(rng, 2, 64, 8)), "mxfp4", channelwise_axes=(0, 2), tiled_axes={1: 32})
    array = dataclasses.replace(array, scale=array.scale.at[0, 1, 2].set(scale))
    with pytest.raises(ValueError, match=r"^dequantize: w is a QArray of 'mxfp4' with a scale that is no power of two"):
        jax_ep.dequantize(array, jnp.float32)
    want = np.array(qwix.dequantize(array))
    want[0, 32:, 2] = np.nan
    same(jax.jit(lambda w: jax_ep.dequantize(w, jnp.float32))(array), want)


def test_qwix_arrays_on_a_tensor_axis(rng):
    """The error names the axis, also where gate and up columns have a separate axis."""
    layer, mesh = Layer(rng, "int8"), harness.make_mesh((2, 2), ("expert", "tensor"))
    w_gate_up = jax.tree.map(lambda part: part.reshape(8, -1, 2, 128), layer.weights[0])
    run = sharded_moe(mesh, num_experts=8, axes=MeshAxes(tensor="tensor"))
    with pytest.raises(ValueError, match=r"^sharded_moe: tensor='tensor', .* of MeshAxes with quantized weights"):
        run(*layer.tokens, w_gate_up, layer.weights[1])


def test_qwix_arrays_have_no_gradient_in_layers(rng):
    layer = Layer(rng, "int8")
    x, *routing = layer.tokens
    with pytest.raises(TypeError, match=r"^fused_moe with quantized weights has no gradient"):
        jax.grad(lambda x: jnp.sum(jax_ep.fused_moe(x, *routing, *layer.weights)))(x)
    with pytest.raises(TypeError, match=r"^fused_moe: w_gate_up is quantized and w_down is an array"):
        jax_ep.fused_moe(x, *routing, layer.weights[0], layer.plain[1])


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
    assert 1e-4 < relative_error(got, want) < 0.5
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
        (qwix.QuantizationRule(weight_qtype=jnp.int8, weight_calibration_method="minmax"), "'minmax', .*'absmax'"),
        (qwix.QuantizationRule(act_qtype=jnp.int8), "act_qtype='int8' with weight_qtype=None, expected None, or"),
        (qwix.QuantizationRule(act_static_scale=True), "act_static_scale=True, expected None; give experts"),
        (qwix.QuantizationRule(act_calibration_method="rms,3"), "act_calibration_method='rms,3', expected None"),
        (
            qwix.LoraRule(rank=2, alpha=1.0, lora_b_initializer=jax.nn.initializers.ones),
            "has lora_b_initializer=.*, expected the default; give",
        ),
        (qwix.LoraRule(rank=2, alpha=1.0, dropout=0.5), "dropout=0.5"),
        (qwix.LoraRule(rank=2, alpha=1.0), "rngs=None with a LoraRule.*pass one"),
        (qwix.QuantizationRule(module_path="("), r"^apply_rules: module_path='\(' of a rule, .*unterminated"),
    ):
        with pytest.raises(ValueError, match=message):
            apply_rules(moe, [rule])
    with pytest.raises(ValueError, match=r"^apply_rules: model has no jax_ep.flax.MoE, expected"):
        apply_rules(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), [qwix.QuantizationRule(weight_qtype=jnp.int8)])
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
        ({"weight_qtype": "int8", "act_qtype": "int4"}, ValueError, "the rule of 'blocks/1' has act_qtype='int4' with"),
        ({"weight_qtype": "int8", "act_qtype": jnp.float8_e5m2}, ValueError, "the rule .* act_qtype='float8_e5m2' w"),
        (
            {"weight_qtype": "float8_e4m3fn", "act_qtype": "int8"},
            ValueError,
            "the rule of 'blocks/1' has act_qtype='int8' with weight_qtype=float8_e4m3fn, expected None, or 'int8' wi",
        ),
        (
            {"weight_qtype": "int8", "act_qtype": "float8_e4m3fn"},
            ValueError,
            "the rule of 'blocks/1' has act_qtype='float8_e4m3fn' with weight_qtype=int8, expected None, or 'int8' wi",
        ),
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


class Dense(nnx.Module):
    """A dense layer, then experts, also shared ones."""

    def __init__(self, rngs, mesh):
        self.dense = nnx.Linear(128, 128, rngs=rngs)
        axes = None if mesh is None else MeshAxes(batch="data")
        self.moe = MoE(128, 64, 8, 2, shared_experts=SharedExperts(), mesh=mesh, axes=axes, rngs=rngs)

    def __call__(self, x):
        return self.moe(self.dense(x))[0]


@pytest.mark.usefixtures("implicit_promotion")
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.slow(unless={"spread": [False]})
def test_qwix_without_rules_for_experts(spread, rng):
    """A rule for everything quantizes or adapts dense layers and shared experts, but neither router nor experts."""
    mesh = harness.make_mesh((2, 2), ("data", "expert"), AxisType.Auto) if spread else None
    x, model = jnp.asarray(reals(rng, 16, 128)), Dense(nnx.Rngs(0), mesh)
    want = nnx.jit(lambda model, x: model(x))(model, x)
    for activations in (None, jnp.int8):
        rules = [qwix.QuantizationRule(weight_qtype=jnp.int8, act_qtype=activations)]
        quantized = qwix.quantize_model(Dense(nnx.Rngs(0), mesh), qwix.PtqProvider(rules), x)
        changed = {name for name, param in vars(quantized.moe).items() if type(param).__name__ == "WithAux"}
        assert changed == {"shared_gate_up", "shared_down"}
        for name in ("router", "w_gate_up", "w_down"):
            same(getattr(quantized.moe, name)[...], getattr(model.moe, name)[...])
        assert 1e-4 < relative_error(quantized(x), want) < 0.05
    rules = [qwix.LoraRule(rank=4, alpha=4.0)]
    adapted = qwix.apply_lora_to_model(Dense(nnx.Rngs(0), mesh), qwix.LoraProvider(rules), x, rngs=nnx.Rngs(1))
    adapters = {name for name in vars(adapted.moe) if "lora_a" in name}
    assert {"shared_gate_up_lora_a", "shared_down_lora_a"} == adapters
    assert relative_error(adapted(x), want) < 0.01
