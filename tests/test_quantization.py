"""Quantized weights in every format: documented errors, NaN, layouts and gradients."""

import contextlib
import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
import oracle_quantized
from cases import BF16, F32, assert_same_bits, reals
from harness import make_mesh
from jax_ep import Experts, formats
from jax_ep.quantization import dequantize, dequantize_fp8, quantize, quantize_fp8, with_layout
from jax_ep.serving import serving_weights
from stored_experts import dense, quantized, relaid, stand_for

served = jax.jit(serving_weights, static_argnames=("format", "activations"))


def test_quantize_fp8_nan_fills_block():
    x = np.zeros((256, 256), F32)
    x[3, 200] = np.nan
    affected = np.isnan(np.asarray(dequantize_fp8(*quantize_fp8(jnp.asarray(x)), jnp.float32)))
    assert affected[3, 128:].all() and affected.sum() == 128


@pytest.mark.parametrize(("inner", "compiled"), [(384, False), (384, True), (192, True)])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.slow(unless={"kind": [AxisType.Auto], "inner": [192]})
def test_quantize_fp8_weights_sharded_same_bits(kind, inner, compiled, rng):
    """More than one block along both axes, experts and columns sharded over devices."""

    def fn(w_gate_up, w_down):
        pair = quantize(w_gate_up, "fp8")
        rows = quantize_fp8(jnp.swapaxes(w_gate_up, -1, -2))
        back = dequantize(pair, jnp.float32), dequantize_fp8(*rows, jnp.bfloat16)
        return pair, rows, back, serving_weights(w_gate_up, w_down, "fp8", activations="fp8")

    mesh = make_mesh((2, 2), ("expert", "tensor"), kind)
    matrices = reals(rng, 4, 256, 2 * inner), reals(rng, 4, inner, 256)
    specs = [(P("expert"), P("expert")), (P("expert", "tensor"), P("expert", None, "tensor"))]
    want = jax.tree.leaves((jax.jit(fn) if compiled else fn)(*matrices))
    for spec in specs:
        placed = [jax.device_put(w, NamedSharding(mesh, s)) for w, s in zip(matrices, spec, strict=True)]
        found = jax.tree.leaves((jax.jit(fn) if compiled else fn)(*placed))
        for got, right in zip(found, want, strict=True):
            assert_same_bits(np.asarray(got), np.asarray(right), str(spec))
            if kind == AxisType.Explicit:
                assert jax.typeof(got).sharding.spec[0] == "expert"


def test_quantize_fp8_columns_on_explicit_axes():
    """An axis may split the columns of one block or several, also outside of jit, and with `jax.set_mesh`."""
    mesh = make_mesh((2,), ("tensor",), AxisType.Explicit)
    for columns, is_set in ((8, False), (256, True)):
        w = jnp.ones((4, 128, columns))
        want = dense(quantized(w, "fp8"), dtype=jnp.float32)
        with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
            placed = quantize(jax.device_put(w, NamedSharding(mesh, P(None, None, "tensor"))), "fp8")
            np.testing.assert_array_equal(dequantize(placed, jnp.float32), want)


def test_quantize_fp8_weights_blocks_split_by_axes():
    mesh = make_mesh((2,), ("tensor",), AxisType.Explicit)
    w = jax.device_put(jnp.ones((4, 384, 256)), NamedSharding(mesh, P(None, "tensor")))
    with pytest.raises(ValueError, match=r"axis -2 of w is 384, 3 blocks of 128, .* 2 devices of .*reshard"):
        quantize(w, "fp8")
    with pytest.raises(ValueError, match=r"axis -2 of w is 384, 3 blocks of 128, .* 2 devices of .*reshard"):
        quantize(w, "int4")
    with pytest.raises(ValueError, match=r"with_layout: axis -2 of w is 384, 3 blocks of 128, .* 2 devices"):
        with_layout(quantized(w, "mxfp4"), "prepacked")
    q = quantized(w, "int4", block_size=32)  # Its scales need no steps of 128.
    back = relaid(relaid(q, layout="prepacked"), layout="transposed")
    assert_same_bits(np.asarray(back.values), np.asarray(q.values))


def test_with_layout_mxfp4_whose_k_explicit_axes_split(rng):
    """With and without `jax.set_mesh`; the one block of K = 128 must lie on one device."""
    mesh = make_mesh((2,), ("tensor",), AxisType.Explicit)
    place = partial(jax.device_put, device=NamedSharding(mesh, P(None, "tensor")))
    w = rng.standard_normal((2, 256, 8)).astype(np.float32)
    want = relaid(quantized(w, "mxfp4"), layout="prepacked")
    placed = quantized(place(w), "mxfp4")
    for is_set in (False, True):
        with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
            got = with_layout(placed, "prepacked")
            for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                assert_same_bits(np.asarray(ours), np.asarray(theirs))
    with pytest.raises(ValueError, match=r"with_layout: axis -2 of w is 128, 1 block of 128, .* 2 devices.*prepacked"):
        with_layout(quantized(place(w[:, :128]), "mxfp4"), "prepacked")


@pytest.mark.parametrize("axis", [0, 2])
@pytest.mark.parametrize("format", ["fp8", "int8", "int4", "mxfp4", "fp8_channel"])
@pytest.mark.slow(unless={"format": ["mxfp4"]})
def test_dequantize_on_explicit_axes_of_size_one(format, axis, rng):
    """As the axes of a `Topology` with one rank per node, outside of jit."""
    mesh = make_mesh((2, 1), ("node", "local"), AxisType.Explicit)
    w = reals(rng, 4, 128, 256)
    spec = P(*(None,) * axis, ("node", "local"))
    placed = quantize(jax.device_put(w, NamedSharding(mesh, spec)), format)
    assert dequantize(placed, jnp.float32).sharding.spec[axis] is not None
    np.testing.assert_array_equal(dequantize(placed, jnp.float32), dequantize(quantize(w, format), jnp.float32))


def test_quantized_weights_repr_has_no_values():
    w = quantize(jnp.zeros((4, 128, 256)), "fp8", activations="fp8")
    arrays = "values=float8_e4m3fn[4, 256, 128], scales=float32[4, 2, 1]"
    assert (
        repr(w)
        == repr(jax.eval_shape(lambda w: w, w))
        == f"QuantizedWeights({arrays}, format='fp8', activations='fp8')"
    )
    assert repr(jax_ep.lora.LoraWeights(w, scale=2.0)) == f"LoraWeights(base={w!r}, scale=2.0)"


def test_quantized_weights_orbax(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    w = jax_ep.lora.init(jax.random.key(0), quantize(jnp.ones((4, 128, 256)), "mxfp4"), rank=4, scale=2.0)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "w", w)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "w", jax.eval_shape(lambda: w))
    assert jax.tree.structure(restored) == jax.tree.structure(w)
    jax.tree.map(assert_same_bits, restored, w)


def test_serving_weights_transposed_and_padded(rng):
    w_gate_up, w_down = reals(rng, 2, 3, 128, 2 * 72), reals(rng, 2, 3, 72, 128)
    same = served(w_gate_up, w_down, None)
    np.testing.assert_array_equal(same.w_gate_up.values, np.swapaxes(w_gate_up, -1, -2))
    np.testing.assert_array_equal(same.w_down.values, np.swapaxes(w_down, -1, -2))
    pair = served(w_gate_up, w_down, "fp8", activations="fp8")[:2]
    up, down = (np.swapaxes(stand_for(w), -1, -2) for w in pair)
    assert up.shape == (2, 3, 256, 128) and down.shape == (2, 3, 128, 128)
    for half, start in ((0, 0), (1, 128)):
        want = np.swapaxes(w_gate_up[..., half * 72 : (half + 1) * 72], -1, -2)
        np.testing.assert_allclose(up[..., start : start + 72, :], want, atol=0.2)
        assert not up[..., start + 72 : start + 128, :].any()
    np.testing.assert_allclose(down[..., :72], np.swapaxes(w_down, -1, -2), atol=0.2)
    assert not down[..., 72:].any()


@pytest.mark.parametrize("format", ["fp8_channel", "mxfp4"])
def test_serving_weights_pad_for_fp8_tokens(format, rng):
    found = served(reals(rng, 3, 128, 2 * 96), reals(rng, 3, 96, 128), format, activations="fp8")
    assert (found.w_gate_up.shape, found.w_down.shape) == ((3, 128, 256), (3, 128, 128))
    assert found.w_down.activations == "fp8" and not found.w_down.is_prepacked


@pytest.mark.parametrize("format", ["int4", "mxfp4", "int8"])
def test_serving_weights_4_bits_prepacked(format, rng):
    w_gate_up, w_down = reals(rng, 3, 128, 2 * 128), reals(rng, 3, 128, 128)
    found = served(w_gate_up, w_down, format)
    for got, w in ((found.w_gate_up, w_gate_up), (found.w_down, w_down)):
        want = quantized(w, format)
        assert got.is_prepacked == (format != "int8")
        back = relaid(got, layout="transposed") if got.is_prepacked else got
        for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(want), strict=True):
            assert_same_bits(np.asarray(one), np.asarray(other))


FORMATS = pytest.mark.parametrize("expert_format", formats.FORMATS)


def options_of(expert_format, block_size):
    return {"block_size": block_size} if formats.FORMATS[expert_format].takes_block_size else {}


@FORMATS
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(("leading", "columns"), [((3,), 200), ((), 1), ((2, 2), 8)])
@pytest.mark.slow(unless={"dtype": [BF16]})
def test_quantized_experts_error(leading, columns, dtype, expert_format, rng):
    depth, options = 256, options_of(expert_format, 64)
    w = (reals(rng, *leading, depth, columns) * 10.0 ** rng.uniform(-4, 0, (*leading, depth, columns))).astype(dtype)
    q = quantized(w, expert_format, **options)
    want = np.swapaxes(w, -1, -2).astype(np.float64)
    assert q.shape == w.shape
    stands_for, found = np.swapaxes(stand_for(q), -1, -2), oracle_quantized.FORMATS[expert_format]
    scale = oracle_quantized.largest_of_block(want, expert_format, **options) / (found.limit or 1)
    error, bound = np.abs(stands_for - want), found.error(want, scale)
    assert np.all(error <= bound) and np.any(error > bound / 2)
    if found.limit is not None:
        scales = oracle_quantized.scale_of_each(np.asarray(q.scales), want.shape, expert_format)
        np.testing.assert_allclose(scales, scale, rtol=1e-6)
    for result in (F32, BF16):
        np.testing.assert_array_equal(
            np.swapaxes(dense(q, dtype=result), -1, -2), stands_for.astype(F32).astype(result)
        )
    if found.stored_bits is not None:
        assert 8 * sum(x.nbytes for x in jax.tree.leaves(q)) == found.stored_bits(64) * w.size


@pytest.mark.parametrize("scale", [1.0, 2.0**-120, 2.0**100])
def test_mxfp4_rounds_to_nearest_even(scale):
    """All codes, and the midpoints between two."""
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    nearest = np.array([0, 1, 1, 2, 2, 4, 4])
    w = np.zeros((32, 1), F32)
    w[:30, 0] = scale * np.concatenate([oracle_quantized.E2M1, middles, -middles])
    want = np.concatenate([oracle_quantized.E2M1, nearest, -nearest, [0, 0]])
    np.testing.assert_array_equal(dense(quantized(w, "mxfp4"), dtype=jnp.float32)[:, 0] / scale, want)


def test_mxfp4_saturation():
    for value, want in ((7.9, 6), (-7.9, -6), (2.0**-130, 0)):
        w = quantized(np.full((32, 1), value, F32), "mxfp4")
        assert np.all(np.abs(dense(w, dtype=jnp.float32) - np.float32(want)) < 2.0**-126)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@FORMATS
def test_quantized_experts_not_finite_fills_block(expert_format, bad, rng):
    w = reals(rng, 256, 256)
    w[3, 5] = bad
    got = np.asarray(dense(quantized(w, expert_format), dtype=jnp.float32))
    rows, depth = oracle_quantized.FORMATS[expert_format].block
    affected = np.zeros(got.shape, bool)
    affected[: depth or 256, 5 // rows * rows : (5 // rows + 1) * rows] = True
    np.testing.assert_array_equal(~np.isfinite(got), affected)


@FORMATS
def test_quantized_experts_zeros(expert_format):
    assert not np.any(dense(quantized(np.zeros((2, 128, 3), F32), expert_format), dtype=jnp.float32))


@FORMATS
def test_quantize_no_gradient(expert_format):
    """Also where JAX sees integers only, which it gives no gradient."""

    def loss(w):
        return jnp.sum(dequantize(quantize(w, expert_format), jnp.float32))

    with pytest.raises(TypeError, match="quantize has no gradient"):
        jax.jit(jax.grad(loss))(jnp.ones((1, 128, 4)))
    assert not jax.jit(jax.grad(lambda w: loss(jax.lax.stop_gradient(w))))(jnp.ones((1, 128, 4))).any()


def test_quantize_without_a_format():
    """Transposed storage, which every layer and GEMM takes."""
    w = jnp.arange(24.0).reshape(2, 3, 4)
    q = quantize(w, None)
    assert q.shape == w.shape and q.values.shape == (2, 4, 3) and len(jax.tree.leaves(q)) == 1
    np.testing.assert_array_equal(dequantize(q, jnp.float32), w)
    x, sizes = jnp.ones((5, 3)), jnp.array([2, 3])
    np.testing.assert_array_equal(jax_ep.grouped_gemm(x, q, sizes), jax_ep.grouped_gemm(x, w, sizes))
    for part in ({"activations": "fp8"}, {"scales": w}, {"layout": "prepacked"}, {"values": jnp.ones(())}):
        with pytest.raises(ValueError, match=r"^grouped_gemm: rhs (has format=None and other|stands for weights)"):
            jax_ep.grouped_gemm(x, dataclasses.replace(q, **part), sizes)
    with pytest.raises(TypeError, match=r"rhs.values has dtype float32, expected bfloat16, the dtype of lhs"):
        jax_ep.masked_grouped_gemm(jnp.ones((2, 5, 3), jnp.bfloat16), q, sizes)


def test_quantize_experts_smooth_reduces_error(rng):
    """Rows of w are multiplied before they are rounded, and divided by the same factor when they are dequantized."""
    w, smooth = reals(rng, 2, 64, 8), (2.0 ** rng.uniform(-4, 4, (2, 64))).astype(F32)
    q = quantized(w, "int8", activations="int8", smooth=smooth)
    got = np.asarray(dense(q, dtype=jnp.float32))
    step = np.abs(w * smooth[..., None]).max(axis=1, keepdims=True) / 127
    assert np.all(np.abs(got - w) <= 0.51 * step / smooth[..., None])
    assert len(jax.tree.leaves(q)) == 3


@pytest.mark.parametrize(("expert_format", "block_size"), [("mxfp4", 32), ("int4", 128), ("int4", 32), ("int4", 16)])
@pytest.mark.parametrize("depth", [128, 256, 384])
@pytest.mark.slow(unless={"depth": [384], "block_size": [32, 128]})
def test_prepack_round_trip(expert_format, block_size, depth, rng):
    q = quantized(reals(rng, 2, 3, depth, 40), expert_format, **options_of(expert_format, block_size))
    prepacked = relaid(q, layout="prepacked")
    assert prepacked.is_prepacked
    assert not q.is_prepacked
    assert prepacked.shape == q.shape
    assert sum(x.nbytes for x in jax.tree.leaves(prepacked)) == sum(x.nbytes for x in jax.tree.leaves(q))
    back = relaid(prepacked, layout="transposed")
    assert (back.format, back.activations, back.smooth) == (q.format, None, None)
    np.testing.assert_array_equal(with_layout(prepacked, "prepacked").values, prepacked.values)
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(q), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(*(dense(w, dtype=jnp.float32) for w in (prepacked, q)))


@pytest.mark.parametrize("depth", [32, 96, 160])
def test_prepack_drops_padding_exponents(depth, rng):
    q = quantized(reals(rng, 2, depth, 5), "mxfp4")
    prepacked = relaid(q, layout="prepacked")
    assert prepacked.scales.shape == (2, -(-depth // 128), 5)
    back = relaid(prepacked, layout="transposed")
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(q), strict=True):
        np.testing.assert_array_equal(got, want)


def test_prepack_nan_scale(rng):
    q = quantized(reals(rng, 1, 64, 3), "mxfp4")
    scales = np.asarray(q.scales).copy()
    scales[0, 1, 0] = 255
    prepacked = relaid(dataclasses.replace(q, scales=jnp.asarray(scales)), layout="prepacked")
    got = np.asarray(dense(prepacked, dtype=jnp.float32))
    assert np.isnan(got[0, :32, 1]).all()
    assert np.isfinite(np.delete(got[0].T.reshape(-1), np.s_[64:96])).all()


def test_quantized_experts_pytree():
    q = quantized(jnp.ones((5, 2, 64, 4)), "mxfp4")
    assert [leaf.shape for leaf in jax.tree.leaves(q)] == [(5, 2, 4, 32), (5, 2, 4, 2)]
    shapes = jax.lax.map(lambda layer: jnp.asarray(layer.shape), q)
    np.testing.assert_array_equal(shapes, [[2, 64, 4]] * 5)


def of_ones(format, *shape, **options):
    return quantize(jnp.ones(shape or (2, 128, 4)), format, **options)


def prepacked(**changes):
    return dataclasses.replace(with_layout(of_ones("mxfp4"), "prepacked"), **changes)


def int8(**changes):
    return dataclasses.replace(of_ones("int8"), **changes)


def served_ones(up, down, format="fp8", dtype=jnp.float32, **options):
    return serving_weights(jnp.ones(up), jnp.ones(down, dtype), format, **options)


IN_FP8, IN_INT8 = {"activations": "fp8"}, {"activations": "int8"}
ROWS, UP, DOWN = jnp.ones((1, 128)), (2, 128, 256), (2, 128, 128)
WRONG_TYPES = [
    (lambda: quantize_fp8([1.0]), "quantize_fp8: x is a list, not an array"),
    (lambda: dequantize_fp8(None, None, jnp.float32), "dequantize_fp8: values is a NoneType, not an array"),
    (lambda: dequantize_fp8(*quantize_fp8(ROWS), "number"), "dtype='number' is not a dtype"),
    (lambda: dequantize_fp8(*quantize_fp8(ROWS), int), "dequantize_fp8: dtype=int64, expected one"),
    (lambda: dequantize(int8(), bool), "dequantize: dtype=bool, expected one of"),
    (lambda: dequantize(ROWS, jnp.float32), "w is an array, expected QuantizedWeights"),
    (lambda: dequantize(int8(scales=jnp.ones((2, 4), jnp.float16)), jnp.float32), "float16, expected int8 and float32"),
    (lambda: jax.grad(lambda x: quantize_fp8(x)[1].sum())(ROWS), "quantize_fp8 has no gradient.*dispatch"),
    (lambda: with_layout(ROWS, "prepacked"), "w is an array, expected QuantizedWeights"),
    (lambda: with_layout(prepacked(scales=of_ones("mxfp4").scales), "transposed"), "uint8, expected uint32 and uint32"),
    (lambda: served_ones(UP, DOWN, dtype=jnp.bfloat16), "w_down has dtype bfloat16, expected float32, the dtype of w_"),
]
WRONG_VALUES = [
    (lambda: quantize_fp8(jnp.float32(1)), r"quantize_fp8: x has shape \(\), expected rank 1 or more"),
    (lambda: of_ones("int3"), "format='int3', expected one of"),
    (lambda: of_ones("int4", 2, 96, 4), "K, is 96, expected a multiple of 128"),
    (lambda: of_ones("mxfp4", 2, 48, 4), "K, is 48, expected a multiple of 32"),
    *((lambda name=name: of_ones(name, 2, 0, 4), "K, is 0, expected at least 1") for name in formats.FORMATS),
    (lambda: of_ones("int4", 2, 96, 4, block_size=3), "block_size=3, expected an even number"),
    (lambda: of_ones("mxfp4", block_size=32), r"block_size=32 .*'mxfp4', expected None; only \['int4'\] take it"),
    (lambda: of_ones(None, **IN_FP8), "format=None with activations, expected"),
    (lambda: of_ones(None, block_size=32), "format=None with block_size, expected"),
    (lambda: of_ones(None, smooth=jnp.ones((2, 128))), "format=None with smooth, expected"),
    (lambda: of_ones("int8", for_training=True), "format='int8' with for_training=True, expected format='fp8'"),
    (lambda: of_ones("mxfp4", **IN_INT8), "activations='int8' with format='mxfp4'"),
    (lambda: of_ones("int8", **IN_FP8), "activations='fp8' with format='int8'"),
    (lambda: of_ones("mxfp4", 2, 96, 4, **IN_FP8), "activations='fp8' is 96, expected a multiple of 128"),
    (lambda: of_ones("int8", activations="int4"), "activations='int4', expected 'int8', 'fp8' or None"),
    (lambda: of_ones("fp8", **IN_FP8, smooth=jnp.ones((2, 128))), "smooth without activations='int8'"),
    (lambda: of_ones("int8", smooth=jnp.ones((2, 128))), "smooth without activations='int8'"),
    (lambda: of_ones("int8", **IN_INT8, smooth=jnp.ones((2, 4))), r"shape \(2, 4\), expected \[2, 128\]"),
    (
        lambda: dequantize(int8(scales=jnp.ones((2, 3))), jnp.float32),
        r"scales \(2, 3\), expected scales \(2, 4\); make it",
    ),
    (
        lambda: dequantize(int8(layout="prepacked"), jnp.float32),
        r"layout='prepacked', expected one of \('transposed',\); make it with",
    ),
    (lambda: dequantize(int8(layout=np.zeros(3)), jnp.float32), r"layout=array\(\[0., 0., 0.\]\), expected one of"),
    (lambda: dequantize(prepacked(**IN_FP8), jnp.float32), "w is prepacked, with activations='fp8', expected None"),
    (lambda: with_layout(of_ones("mxfp4"), "packed"), "layout='packed', expected one of"),
    (lambda: with_layout(int8(), "prepacked"), "w is in format 'int8', expected 'int4' or 'mxfp4'"),
    (lambda: with_layout(of_ones("mxfp4", **IN_FP8), "prepacked"), "w has activations='fp8', expected None"),
    (lambda: with_layout(of_ones("int4", 2, 48, 4, block_size=16), "prepacked"), "48, expected a multiple of 32"),
    (
        lambda: with_layout(prepacked(scales=jnp.ones((2, 1, 3), jnp.uint32)), "transposed"),
        r"scales \(2, 1, 3\), expected scales",
    ),
    (lambda: served_ones((2, 128, 64), (2, 64, 128)), "w_gate_up has 64 columns"),
    (lambda: served_ones((2, 64, 128), (2, 64, 128)), "axis -2 of w_gate_up is 64, expected 128"),
    (lambda: served_ones((2, 96, 256), (2, 128, 96)), "serving_weights: H, axis -2 of w_gate_up, is 96"),
    (lambda: served_ones((4, 128, 384), DOWN), r"\(4, 128, 384\) and w_down \(2, 128, 128\), expected the same axes"),
    (lambda: served_ones((256,), DOWN, None), r"w_gate_up has shape \(256,\), expected rank 2 or more, \[..., K, N\]"),
    *(
        (lambda bad=bad: served_ones(UP, DOWN, activations=bad), "^serving_weights: activations=.*expected 'int8'")
        for bad in (np.ones(2), ["fp8"], "int4")
    ),
]
MISTAKES = [(TypeError, *case) for case in WRONG_TYPES] + [(ValueError, *case) for case in WRONG_VALUES]


@pytest.mark.parametrize(("error", "call", "message"), MISTAKES, ids=[message for *_, message in MISTAKES])
def test_quantization_mistakes(error, call, message):
    with pytest.raises(error, match=message):
        call()


def test_experts_fp8_padding_with_gates(rng):
    """Columns of zeros are added to gate and up, in either layout, and to biases."""
    inner, hidden = 96, 128
    w = jnp.asarray(rng.standard_normal((2, hidden, 2 * inner)), jnp.float32)
    bias = jnp.asarray(rng.standard_normal((2, 2 * inner)), jnp.float32)
    down = jnp.asarray(rng.standard_normal((2, inner, hidden)), jnp.float32)
    for experts in (Experts(), Experts(interleaved=True), Experts("relu", gated=False)):
        columns = 2 * inner if experts.gated else inner
        make = jax.jit(partial(serving_weights, format="fp8", experts=experts))
        found = make(w[..., :columns], down, biases=(bias[:, :columns], None))
        values = np.asarray(dense(found.w_gate_up, dtype=jnp.float32)).mT
        assert values.shape == (2, columns // inner * 128, hidden)
        pick = [values, np.asarray(found.b_gate_up)[..., None]]
        if experts.interleaved:
            pick = [x.reshape(2, 128, 2, -1).swapaxes(1, 2) for x in pick]
        kinds, biases = (x.reshape(2, columns // inner, 128, -1) for x in pick)
        assert not kinds[:, :, inner:].any() and not biases[:, :, inner:].any()
        assert kinds[:, :, :inner].any(axis=-1).all() and biases[:, :, :inner].all()


def test_experts_custom_activation_not_padded():
    w, down = jnp.ones((2, 128, 96)), jnp.ones((2, 96, 128))
    with pytest.raises(ValueError, match=r"96.*128"):
        serving_weights(w, down, "fp8", experts=Experts(jnp.tanh))


@pytest.mark.parametrize("part", ["values", "scales"])
def test_quantized_weights_parts_that_are_no_jax_arrays(part):
    """Errors name the part, not JAX's conversion."""
    w = quantize(jnp.ones((2, 128, 8)), "int8")
    stored = np.asarray(getattr(w, part))
    expected = "not an array; pass", "datetime64.*cast it", "object, expected numbers", "expected numbers"
    for array, words in zip(
        (np.ma.array(stored), *map(stored.astype, ("M8[s]", "O", np.longdouble))), expected, strict=True
    ):
        wrong = dataclasses.replace(w, **{part: array})
        with pytest.raises(TypeError, match=rf"^dequantize: w\.{part} .*{words}"):
            dequantize(wrong, jnp.float32)
        with pytest.raises(TypeError, match=rf"^grouped_gemm: rhs\.{part} .*{words}"):
            jax_ep.grouped_gemm(jnp.ones((3, 128)), wrong, jnp.array([1, 2]))


def test_quantized_weights_values_kn_without_a_master():
    wrong = dataclasses.replace(quantize(jnp.ones((2, 128, 8)), "int8"), values_kn={"a": 1})
    with pytest.raises(TypeError, match=r"^grouped_gemm: rhs.values_kn is a dict, not an array; make it with"):
        jax_ep.grouped_gemm(jnp.ones((3, 128)), wrong, jnp.array([1, 2]))


def test_quantize_for_training_of_a_numpy_flag():
    w = jnp.ones((2, 128, 128))
    assert quantize(w, "fp8", for_training=np.True_).master is w
    with pytest.raises(ValueError, match=r"^quantize: .*for_training=True"):
        quantize(w, "int8", for_training=np.True_)


def test_eager_calls_are_one_program_each(caplog):
    """An eager call compiles one program, and not one for each operation."""
    w = jnp.ones((3, 384, 640))
    calls = {
        "quantize": lambda: quantize(w, "mxfp4"),
        "with_layout": lambda: with_layout(made["quantize"], "prepacked"),
        "dequantize": lambda: dequantize(made["with_layout"], jnp.float32),
        "quantize for training": lambda: quantize(w, "fp8", for_training=True),
        "quantize_fp8": lambda: quantize_fp8(w),
        "dequantize_fp8": lambda: dequantize_fp8(*made["quantize_fp8"], jnp.bfloat16),
    }
    made = {}
    for name, call in calls.items():
        caplog.clear()
        with jax.log_compiles():
            made[name] = call()
        compiled = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Compiling ")]
        assert len(compiled) == 1, name
