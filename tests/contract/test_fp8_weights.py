"""Weights quantized once per training step: the layer matches the one with their masters bit for bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
import oracle_fp8
from cases import BF16, F32, assert_same_bits, reals
from fp8_layers import SHAPE, Layer, moe
from harness import make_mesh, run, to_numpy
from jax_ep.core.expert_matrices import merge_columns
from jax_ep.quantization import dequantize, quantize
from jax_ep.sharding import MeshAxes, sharded_moe
from layers import NAMES, with_gradients
from layers import Layer as PlainLayer

for_training = functools.partial(quantize, format="fp8", for_training=True)


def test_fp8_weights_definition(rng):
    """Both orientations hold the values of the oracle, and parts of stacked layers are those of each layer."""
    w = reals(rng, 3, 2, 256, 128, dtype=BF16)
    found = jax.jit(for_training)(w)
    want = np.stack([oracle_fp8.quantized_blocks(layer.astype(F32)) for layer in w])
    scales = np.asarray(found.scales, np.float64).repeat(128, -1).repeat(128, -2)
    assert_same_bits(np.asarray(found.master), w)
    # A number next to a tie may round the other way in the oracle, which divides by scales.
    got, want = np.asarray(found.values).astype(np.float64) * scales, np.swapaxes(want, -1, -2)
    error = np.abs(got - want)
    assert (error > 1e-6 * np.abs(want)).mean() < 0.01 and (error <= np.abs(want) / 8 + scales * 2.0**-9).all()
    assert_same_bits(np.asarray(found.values_kn), np.swapaxes(np.asarray(found.values), -1, -2))
    one = quantize(jnp.asarray(w[1]), "fp8", for_training=True)
    for part in ("master", "values", "values_kn", "scales"):
        assert_same_bits(np.asarray(getattr(one, part)), np.asarray(getattr(found, part)[1]), part)


@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.slow(unless={"kinds": [2]})
def test_fp8_weights_two_column_kinds(kinds, rng):
    """As a tensor axis splits them: each kind has the values that it has alone."""
    w = reals(rng, 3, 2, 256, kinds, 128, dtype=BF16)
    found = quantize(jnp.asarray(w), "fp8", for_training=True)
    alone = [quantize(jnp.asarray(w[..., kind, :]), "fp8", for_training=True) for kind in range(kinds)]
    together = merge_columns(found)
    for part, axis in (("master", -1), ("values", -2), ("values_kn", -1), ("scales", -2)):
        want = jnp.concatenate([getattr(one, part) for one in alone], axis=axis)
        assert_same_bits(np.asarray(getattr(together, part)), np.asarray(want), part)
    assert found.shape == found.values_kn.shape == w.shape
    assert found.scales.shape == (3, 2, kinds, 1, 2)
    wide = [np.asarray(dequantize(one, jnp.float32)) for one in alone]
    np.testing.assert_array_equal(np.asarray(dequantize(found, jnp.float32)), np.stack(wide, -2))


@pytest.mark.slow
def test_fp8_weights_same_bits_as_masters(implementation, expert_mesh, rng):
    """In a mesh, with masters and gradients in float32 and tokens in bfloat16."""
    layer = Layer(rng, "duplicates", 2, dtype=BF16)
    matrices = [layer.per_rank(reals(rng, *w.shape) / 16) for w in (layer.w_gate_up, layer.w_down)]
    plain = moe(implementation=implementation)

    def quantized(x, topk_idx, weights, *matrices):
        return plain(x, topk_idx, weights, *map(for_training, matrices))

    args = (*layer.args[:3], *matrices, layer.probe)
    got, want = (run(with_gradients(fn), expert_mesh(2), *args) for fn in (quantized, plain))
    for name, g, w in zip(NAMES, got, want, strict=True):
        assert np.abs(w.astype(F32)).max() > 0
        assert_same_bits(g, w, name)
    assert [a.dtype for a in got] == [BF16, BF16, F32, F32, F32]


@pytest.mark.parametrize(
    ("explicit", "fsdp_axis"), [(False, None), (True, "data")], ids=["automatic", "explicit, fsdp"]
)
@pytest.mark.slow
def test_fp8_weights_sharded_moe(explicit, fsdp_axis, implementation, rng):
    """Global arrays are quantized in place, and gradients of masters have the same sharding."""
    if implementation != "xla":
        pytest.skip("the portable functions make them of global arrays")
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = make_mesh((2, 2), ("data", "expert"), kind)
    layer = PlainLayer(rng, "uniform", 1, dataclasses.replace(SHAPE, num_tokens=8, hidden=256), BF16)
    axes = MeshAxes(batch="data", fsdp=fsdp_axis)
    specs = axes.specs
    arrays = [
        jax.device_put(a, jax.NamedSharding(mesh, spec))
        for a, spec in zip(
            (layer.x[0], layer.topk_idx[0], layer.topk_weights[0], layer.w_gate_up, layer.w_down),
            (specs.tokens, specs.routing, specs.routing, specs.w_gate_up, specs.w_down),
            strict=True,
        )
    ]

    def gradients(make):
        call = sharded_moe(mesh, num_experts=8, axes=axes, recipe="fp8", implementation=implementation)

        def loss(up, down):
            return jnp.sum(jnp.sin(call(*arrays[:3], up, down).astype(jnp.float32)))

        def made_within(up, down):
            return loss(make(up), make(down))

        def of_all_parts(up, down):
            return tuple(getattr(g, "master", g) for g in jax.grad(loss, argnums=(0, 1))(make(up), make(down)))

        return *jax.jit(jax.grad(made_within, argnums=(0, 1)))(*arrays[3:]), *jax.jit(of_all_parts)(*arrays[3:])

    got, want = gradients(for_training), gradients(lambda w: w)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g.sharding == w.sharding or i > 1
        assert_same_bits(to_numpy(g), to_numpy(w))


def whole(**parts):
    return dataclasses.replace(quantize(jnp.ones((2, 128, 256)), "fp8", for_training=True), **parts)


MISTAKES = {
    "another recipe": (ValueError, {"recipe": None}, {}, r"QuantizedWeights with a master, which need recipe='fp8'"),
    "a part that is missing": (TypeError, {}, {"values_kn": None}, r"w_gate_up.values_kn is a NoneType, not an array"),
    "parts of others": (
        *(ValueError, {}, {"scales": jnp.ones((2, 1, 1))}),
        r"w_gate_up.scales is float32\[2, 1, 1\], expected float32\[2, 2, 1\] for a master \[2, 128, 256\]",
    ),
    "parts of another dtype": (
        *(TypeError, {}, {"values": jnp.ones((2, 256, 128))}),
        r"w_gate_up in 'fp8' has values of float32 and scales of float32, expected float8_e4m3fn",
    ),
    "no array": (TypeError, {}, {"values": [1]}, r"w_gate_up.values is a list"),
    "several layers": (*(ValueError, {}, {"master": jnp.ones((3, 2, 128, 256))}), r"weights \(3, 2, 128, 256\)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_fp8_weights_mistakes(name):
    error, options, parts, message = MISTAKES[name]
    x, ids, weights = jnp.ones((3, 128)), jnp.zeros((3, 1), jnp.int32), jnp.ones((3, 1))
    matrices = whole(**parts), quantize(jnp.ones((2, 128, 128)), "fp8", for_training=True)
    with pytest.raises(error, match=message):
        jax_ep.fused_moe(x, ids, weights, *matrices, **{"recipe": "fp8", **options})


def test_quantize_master_weights_mistakes():
    with pytest.raises(ValueError, match=r"axis -1 of w is 100, expected a multiple of 128"):
        quantize(jnp.ones((2, 128, 100)), "fp8", for_training=True)
    x, ids, weights = jnp.ones((3, 128)), jnp.zeros((3, 1), jnp.int32), jnp.ones((3, 1))
    with pytest.raises(TypeError, match=r"QuantizedWeights with a master and w_down is an array, expected two of"):
        jax_ep.fused_moe(x, ids, weights, whole(), jnp.ones((2, 128, 128)), recipe="fp8")


@pytest.mark.parametrize("policy", ["everything_saveable", "dots_saveable"])
@pytest.mark.slow
def test_fp8_weights_remat(policy, rng):
    """In a scan on the CPU, FP8 values are lost when such layers save them."""
    stacked = [jnp.asarray(reals(rng, 2, 2, *shape, dtype=F32)) / 12 for shape in ((128, 256), (128, 128))]
    x, ids = jnp.asarray(reals(rng, 6, 128, dtype=F32)), jnp.arange(6, dtype=jnp.int32)[:, None] % 2

    def gradients(policy):
        def layer(x, masters):
            w = [quantize(master, "fp8", for_training=True) for master in masters]
            return x + jax_ep.fused_moe(x, ids, jnp.ones((6, 1)), *w, recipe="fp8", implementation="xla"), None

        if policy is not None:
            layer = jax.checkpoint(layer, policy=getattr(jax.checkpoint_policies, policy))
        return jax.jit(jax.grad(lambda w: jnp.sin(jax.lax.scan(layer, x, w)[0]).sum()))(stacked)

    for got, want in zip(gradients(policy), gradients(None), strict=True):
        assert np.abs(want).max() > 0.1
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
