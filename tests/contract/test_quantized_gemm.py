"""GEMMs with weights in 8 and 4 bits, and layers with them."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
import oracle
import oracle_quantized
from cases import BF16, F16, F32, Shape, assert_close, assert_same_bits, reals, relative_error
from harness import compiled, to_numpy
from jax_ep import formats
from jax_ep.quantization import quantize_fp8
from layers import Layer
from stored_experts import STORED, dense, quantized, relaid, stand_for, store

OPERATION = "quantized_gemm"
in_fp8_blocks = jax.jit(quantize_fp8)
IN_EVERY_WAY = pytest.mark.parametrize("stored", STORED)
# Rows, sizes of groups: empty groups, partial tiles, rows past the groups.
GROUPS = {"uneven": (70, [3, 0, 41, 17]), "one": (20, [20]), "none used": (9, [0, 0]), "few": (3, [1, 2])}


class Problem:
    """Rows that are NaN outside of groups, and quantized weights with their float64 values."""

    def __init__(self, rng, name, stored, dtype, depth, columns):
        rows, sizes = GROUPS[name]
        self.used, self.sizes = sum(sizes), np.array(sizes, np.int32)
        self.lhs = reals(rng, rows, depth, dtype=dtype)
        self.lhs[self.used :] = np.nan
        w = reals(rng, len(sizes), depth, columns) * 10.0 ** rng.uniform(-2, 0, (len(sizes), 1, columns))
        self.rhs = store(w.astype(np.float32), stored)
        self.matrices = stand_for(self.rhs)

    def want(self):
        return oracle.grouped_gemm(np.nan_to_num(self.lhs.astype(np.float64)), self.matrices, self.sizes)


def tolerance(dtype):
    """Return the tolerance: elements are rounded to the dtype of rows, which sums of many average out."""
    return {BF16: 8e-3, F16: 2e-3}.get(np.dtype(dtype))


@IN_EVERY_WAY
@pytest.mark.parametrize(
    ("groups", "dtype"), [*((groups, BF16) for groups in GROUPS), ("uneven", F16), ("uneven", F32)], ids=str
)
@pytest.mark.slow(unless={"groups": ["uneven"], "dtype": [BF16]})
def test_quantized_gemm_grouped(implementation, groups, dtype, stored, rng):
    depth = 256 if oracle_quantized.FORMATS[stored.split()[0]].block[1] == 128 else 160
    problem = Problem(rng, groups, stored, dtype, depth, columns=72)
    call = partial(jax_ep.grouped_gemm, preferred_element_type=jnp.float32, implementation=implementation)
    got = to_numpy(jax.jit(call)(problem.lhs, problem.rhs, problem.sizes))
    assert got.dtype == F32
    assert_close(got, problem.want(), tolerance=tolerance(dtype))
    assert not np.any(got[problem.used :])


@IN_EVERY_WAY
@pytest.mark.slow(unless={"stored": ["fp8", "int8", "mxfp4 prepacked"]})
def test_quantized_gemm_dequantized_first(implementation, stored, rng):
    with jax_ep.tuning.override("quantized_gemm", dequantize=True):
        test_quantized_gemm_grouped(implementation, "uneven", BF16, stored, rng)


@pytest.mark.slow
def test_quantized_gemm_dequantized_one_after_another(two_ranks):
    """A loop holds the 16-bit weights of one GEMM at a time, though they are the same in each step."""
    del two_ranks
    x, sizes = jnp.ones((64, 256), BF16), jnp.full(4, 16, jnp.int32)
    weights = [quantized(jnp.ones((4, 256, 256)), "fp8") for _ in range(6)]

    def layers(_, x):
        for w in weights:
            x = jax_ep.grouped_gemm(x, w, sizes, implementation="triton")
        return x

    with jax_ep.tuning.override("quantized_gemm", dequantize=True):
        compiled_loop = jax.jit(lambda x: jax.lax.fori_loop(0, 3, layers, x)).lower(x).compile()
    assert compiled_loop.memory_analysis().temp_size_in_bytes < 2 * 2 * weights[0].values.size


@IN_EVERY_WAY
@pytest.mark.parametrize("expected_rows", [None, 40])
@pytest.mark.slow(
    unless={"expected_rows": [None], "stored": [name for name in STORED if name not in ("int4", "mxfp4")]}
)
def test_quantized_gemm_masked(implementation, expected_rows, stored, rng):
    problem = Problem(rng, "uneven", stored, BF16, 256, columns=40)
    counts = np.array([5, 0, 33, 40], np.int32)
    lhs = reals(rng, 4, 40, 256, dtype=BF16)
    real = np.arange(40) < counts[:, None]
    lhs[~real] = np.nan
    call = partial(jax_ep.masked_grouped_gemm, implementation=implementation, expected_rows=expected_rows)
    got = to_numpy(jax.jit(partial(call, preferred_element_type=jnp.float32))(lhs, problem.rhs, counts))
    want = np.einsum("gmk,gkn->gmn", np.nan_to_num(lhs.astype(np.float64)), problem.matrices)
    assert_close(got[real], want[real], tolerance=tolerance(BF16))


@pytest.mark.parametrize("stored", ["int4", "int4 prepacked"])
@pytest.mark.parametrize("block_size", [16, 32, 256])
@pytest.mark.slow(unless={"block_size": [16]})
def test_quantized_gemm_int4_blocks(implementation, block_size, stored, rng):
    lhs, w = reals(rng, 9, 256, dtype=BF16), reals(rng, 2, 256, 24)
    q = store(w, stored, block_size=block_size)
    sizes = np.array([4, 5], np.int32)
    got = to_numpy(jax.jit(partial(jax_ep.grouped_gemm, implementation=implementation))(lhs, q, sizes))
    want = oracle.grouped_gemm(lhs.astype(np.float64), stand_for(q), sizes)
    assert got.dtype == BF16
    assert_close(got, want)


@pytest.mark.parametrize("prepacked", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.slow(unless={"dtype": [BF16]})
def test_quantized_gemm_mxfp4_scales(implementation, dtype, prepacked, rng):
    """Scales far from one, one per column; too large values are not finite, and NaN stays in its column."""
    exponents = np.array([63, 64, 100, 127, 128, 129, 130, 140, 160, 161, 254, 255], np.uint8)
    lhs, columns = reals(rng, 6, 64, dtype=dtype), len(exponents)
    q = quantized(reals(rng, 1, 64, columns), "mxfp4")
    scales = np.broadcast_to(exponents[None, :, None], q.scales.shape)
    q = dataclasses.replace(q, scales=jnp.asarray(scales))
    call = partial(jax_ep.grouped_gemm, preferred_element_type=jnp.float32, implementation=implementation)
    rhs = relaid(q, layout="prepacked") if prepacked else q
    got = to_numpy(jax.jit(call)(lhs, rhs, np.array([6], np.int32))).astype(np.float64)
    matrix = oracle_quantized.dequantize(np.asarray(q.values), scales, "mxfp4")[0]
    want = lhs.astype(np.float64) @ matrix.T
    units = 2.0 ** (np.minimum(exponents, 254) - 127.0)
    got, want, exact = (got / units).astype(F32), want / units, exponents < 161
    assert_close(got[:, exact], want[:, exact])
    right = np.abs(got - want) <= 1e-5 * np.abs(want).max(axis=0)
    assert (right | ~np.isfinite(got))[:, ~exact].all()
    assert np.isnan(got[:, exponents == 255]).all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("smoothed", [False, True])
def test_quantized_gemm_int8_tokens(implementation, masked, smoothed, rng):
    """Integer GEMMs: only the roundings of rows and weights remain, which match the oracle."""
    sizes, depth = np.array([5, 0, 30], np.int32), 160
    w = reals(rng, 3, depth, 40)
    smooth = (2.0 ** rng.uniform(-3, 3, (3, depth))).astype(F32) if smoothed else None
    q = quantized(w, "int8", activations="int8", smooth=smooth)
    groups = np.repeat(np.arange(3), sizes)
    rows = reals(rng, 35, depth, dtype=BF16) * (4 * np.arange(depth) % 7).astype(BF16)
    wide = rows.astype(np.float64) / (smooth[groups].astype(np.float64) if smoothed else 1)
    scales = np.abs(wide).max(axis=1, keepdims=True) / 127
    matrices = oracle_quantized.dequantize(np.asarray(q.values), np.asarray(q.scales), "int8")
    want = oracle.grouped_gemm(np.round(wide / scales) * scales, np.swapaxes(matrices, -1, -2), sizes)
    # float32 may round an element that lies between two integers to either of them.
    either = (np.abs(wide / scales % 1 - 0.5) < 1e-4) * scales
    slack = oracle.grouped_gemm(either, np.abs(np.swapaxes(matrices, -1, -2)), sizes)
    options = {"preferred_element_type": jnp.float32, "implementation": implementation}
    if masked:
        lhs = np.full((3, 32, depth), np.nan, BF16)
        real = np.arange(32) < sizes[:, None]
        lhs[real] = rows
        got = to_numpy(jax.jit(partial(jax_ep.masked_grouped_gemm, **options))(lhs, q, sizes))[real]
    else:
        got = to_numpy(jax.jit(partial(jax_ep.grouped_gemm, **options))(rows, q, sizes))
    assert_close(got + np.clip(want - got, -slack, slack).astype(F32), want)
    if smooth is None:
        exact = oracle.grouped_gemm(rows.astype(np.float64), w, sizes)
        assert relative_error(got, exact) < 0.05


@pytest.mark.slow_interpreted
def test_quantized_gemm_smooth_outlier_columns(implementation, rng):
    """Some columns of the tokens are a hundred times the others, as SmoothQuant finds them in models."""
    x, w, sizes = reals(rng, 64, 256), reals(rng, 2, 256, 32), np.array([40, 24], np.int32)
    x[:, ::32] *= 100
    smooth = np.broadcast_to(np.sqrt(np.abs(x).max(0)) / np.sqrt(np.abs(w).max((0, 2))), (2, 256)).astype(F32)
    want = oracle.grouped_gemm(x.astype(np.float64), w, sizes)
    call, errors = jax.jit(partial(jax_ep.grouped_gemm, implementation=implementation)), []
    for factors in (None, smooth):
        q = quantized(w, "int8", activations="int8", smooth=factors)
        got = to_numpy(call(x.astype(BF16), q, sizes))
        errors.append(relative_error(got, want))
    assert errors[1] < 0.7 * errors[0]


def test_quantized_layer_int8_tokens(implementation, rng):
    layer = Layer(rng, "uniform", 1, Shape(num_tokens=9, hidden=128, intermediate=128), BF16)
    want = layer.oracle().forward()[0]
    q = [quantized(w, "int8", activations="int8") for w in (layer.w_gate_up, layer.w_down)]
    operands = layer.x[0], layer.topk_idx[0], layer.topk_weights[0]
    for call in (jax_ep.fused_moe, partial(jax_ep.low_latency_moe, num_experts=8, axis_name=())):
        got = to_numpy(jax.jit(partial(call, implementation=implementation))(*operands, *q))
        assert got.dtype == BF16
        assert relative_error(got, want) < 0.05


@pytest.mark.parametrize("masked", [False, True])
def test_quantized_gemm_fp8_tokens(implementation, masked, rng):
    """Results match GEMMs of the two FP8 operands bit for bit."""
    sizes, depth = np.array([5, 0, 30], np.int32), 256
    q = quantized(reals(rng, 3, depth, 40), "fp8", activations="fp8")
    rows = reals(rng, 35, depth, dtype=BF16)
    if masked:
        rows, real = np.full((3, 32, depth), np.nan, BF16), np.arange(32) < sizes[:, None]
        rows[real] = reals(rng, 35, depth, dtype=BF16)
    product = partial(jax_ep.masked_grouped_gemm if masked else jax_ep.grouped_gemm, implementation=implementation)
    values, scales = in_fp8_blocks(rows)
    want = to_numpy(jax.jit(product)(values, q, sizes, lhs_scales=scales))
    got = to_numpy(jax.jit(product)(rows, q, sizes))
    assert_same_bits(got[real] if masked else got, want[real] if masked else want)


FP8_FORMATS = pytest.mark.parametrize(
    "expert_format",
    [name for name, found in formats.FORMATS.items() if found.activations == "fp8" and not found.is_fp8_operand],
)


def in_fp8(rows):
    """Return rows after rounding to FP8, in float64."""
    values, scales = (to_numpy(a).astype(np.float64) for a in in_fp8_blocks(rows.astype(F32)))
    return values * scales.repeat(128, -1)


@FP8_FORMATS
@pytest.mark.parametrize("given", ["rows", "masked", "masked in FP8"])
@pytest.mark.parametrize("block_size", [128, 32])
@pytest.mark.slow(unless={"given": ["masked in FP8"], "block_size": [128]})
def test_quantized_gemm_fp8_tokens_other_formats(implementation, given, block_size, expert_format, rng):
    """Sums of products of the rounded rows and the dequantized weights, whose elements are not rounded again."""
    sizes, depth = np.array([5, 0, 30], np.int32), 256
    w = reals(rng, 3, depth, 40) * 2.0 ** rng.integers(-9, 1, (3, depth // 32, 40)).repeat(32, axis=1)
    sizes_of_blocks = {"block_size": block_size} if formats.FORMATS[expert_format].takes_block_size else {}
    q = quantized(w.astype(F32), expert_format, activations="fp8", **sizes_of_blocks)
    matrices = np.swapaxes(stand_for(q), -1, -2)
    rows = reals(rng, 35, depth, dtype=BF16)
    want = oracle.grouped_gemm(in_fp8(rows), np.swapaxes(matrices, -1, -2), sizes)
    options = {"preferred_element_type": jnp.float32, "implementation": implementation}
    if given == "rows":
        got = to_numpy(jax.jit(partial(jax_ep.grouped_gemm, **options))(rows, q, sizes))
    else:
        lhs, real = np.full((3, 32, depth), np.nan, BF16), np.arange(32) < sizes[:, None]
        lhs[real] = rows
        call = jax.jit(partial(jax_ep.masked_grouped_gemm, **options))
        if given == "masked":
            got = to_numpy(call(lhs, q, sizes))[real]
        else:
            values, scales = in_fp8_blocks(lhs)
            got = to_numpy(call(values, q, sizes, lhs_scales=scales))[real]
    # Hopper's tensor cores add FP8 products in about 14 bits, until 128 are scaled and added in float32.
    in_float32 = 2e-3 if jax.default_backend() == "gpu" else 2e-5
    exact = not sizes_of_blocks or block_size == 128 or implementation == "xla"
    assert_close(got, want, tolerance=in_float32 if exact else 1e-2)


@FP8_FORMATS
@pytest.mark.parametrize("which", ["one launch", "several launches", "low latency"])
@pytest.mark.slow(unless={"which": ["low latency"], "expert_format": ["mxfp4"]})
def test_quantized_layers_fp8_tokens(implementation, which, expert_format, rng):
    layer = Layer(rng, "uniform", 1, Shape(num_tokens=9, hidden=256, intermediate=128), BF16)
    x, ids, weights = layer.x[0], layer.topk_idx[0], layer.topk_weights[0]
    pair = [quantized(w, expert_format, activations="fp8") for w in (layer.w_gate_up, layer.w_down)]
    matrices = [np.swapaxes(stand_for(q), -1, -2) for q in pair]
    want = np.zeros(x.shape)
    tokens = in_fp8(x)
    for token, slot in np.ndindex(*ids.shape):
        gate, up = np.split(matrices[0][ids[token, slot]] @ tokens[token], 2)
        hidden = gate / (1 + np.exp(-gate)) * up
        scaled = hidden if which == "low latency" else hidden * weights[token, slot]
        row = matrices[1][ids[token, slot]] @ in_fp8(scaled[None])[0]
        want[token] += row * weights[token, slot] if which == "low latency" else row
    if which == "low latency":
        call = partial(jax_ep.low_latency_moe, num_experts=8, axis_name=())
    elif which == "one launch" and implementation == "xla":
        pytest.skip("xla has no such launch")
    else:
        call = partial(jax_ep.fused_moe, schedule=jax_ep.Schedule(single_launch=which == "one launch"))
    got = to_numpy(jax.jit(partial(call, implementation=implementation))(x, ids, weights, *pair))
    # Rows between the GEMMs are rounded to bfloat16, after which FP8 rounds some of them the other way.
    assert_close(got, want, tolerance=0.1)
    assert relative_error(got, want) < 4e-2


@pytest.mark.parametrize(
    ("kind", "num_ranks"), [("silu", 2), ("silu", 1), ("weights on the input", 2), ("function", 2)]
)
@pytest.mark.slow(unless={"kind": ["silu"], "num_ranks": [2]})
def test_quantized_layer_fp8_tokens(implementation, kind, num_ranks, expert_mesh, rng):
    """Results match the layer that quantizes its weights in each call, except for FP8 sums, if it exists."""
    layer = Layer(rng, "duplicates", num_ranks, Shape(num_tokens=9, hidden=128, intermediate=128), BF16)
    own = jax_ep.Experts(lambda hidden: jnp.maximum(hidden[..., :128], 0) * hidden[..., 128:])
    experts = {"silu": jax_ep.Experts(), "weights on the input": jax_ep.Experts(weight_on="input"), "function": own}[
        kind
    ]
    options = {"num_experts": 8, "implementation": implementation, "experts": experts}

    def stored(x, ids, weights, *matrices):
        pair = [quantized(w, "fp8", activations="fp8") for w in matrices]
        return jax_ep.moe(x, ids, weights, *pair, **options)

    def in_each_call(*operands):
        return jax_ep.moe(*operands, recipe="fp8", **options)

    got = compiled(stored, expert_mesh(num_ranks))(*layer.args)
    assert got.dtype == BF16
    if kind == "function":
        with pytest.raises(ValueError, match="a custom activation"):
            compiled(in_each_call, expert_mesh(num_ranks))(*layer.args)
        want = layer.oracle("relu").forward()
        assert relative_error(got, want) < 0.08
    else:
        want = compiled(in_each_call, expert_mesh(num_ranks))(*layer.args)
        assert relative_error(got, want) < 0.05


def stands_for(layer, stored, dtype):
    """Return the layer with dequantized weights."""
    for name in ("w_gate_up", "w_down"):
        setattr(layer, name, stand_for(store(getattr(layer, name), stored)).astype(F32))
    return layer


@IN_EVERY_WAY
@pytest.mark.parametrize("which", ["moe", "low latency"])
@pytest.mark.slow(unless={"stored": ["mxfp4 prepacked"]})
def test_quantized_layers(implementation, which, stored, expert_mesh, rng):
    shape = Shape(num_tokens=5, hidden=128, intermediate=128)
    layer = Layer(rng, "duplicates" if which == "moe" else "uniform", 2, shape, BF16)
    x, ids, weights, w_gate_up, w_down = layer.args

    def fn(x, ids, weights, w_gate_up, w_down):
        matrices = (store(w, stored) for w in (w_gate_up, w_down))
        call = jax_ep.moe if which == "moe" else jax_ep.low_latency_moe
        return call(x, ids, weights, *matrices, num_experts=8, implementation=implementation)

    got = compiled(fn, expert_mesh(2))(x, ids, weights, w_gate_up, w_down)
    assert got.dtype == BF16
    assert_close(got, stands_for(layer, stored, BF16).oracle().forward(), tolerance=2.5e-2)


def test_quantized_layers_biases_and_padding(implementation, rng):
    """As in `fused_moe` with other weights."""
    w = [reals(rng, 4, 128, n, dtype=BF16) / 11 for n in (256, 128)]
    x, ids = reals(rng, 6, 128, dtype=BF16), rng.integers(-1, 4, (6, 2), dtype=np.int32)
    ids[4:] = -1
    biases = reals(rng, 4, 256, dtype=BF16), reals(rng, 4, 128, dtype=BF16)
    experts = jax_ep.Experts("silu", clamp=7.0, alpha=1.702, up_offset=1.0, interleaved=True)
    call = partial(jax_ep.fused_moe, implementation=implementation, experts=experts, biases=biases)
    in_int8 = [quantized(a, "int8") for a in w]
    wide = [dense(q, dtype=jnp.bfloat16) for q in in_int8]
    weights = np.full((6, 2), 0.5, F32)
    got, want = (to_numpy(jax.jit(call)(x, ids, weights, *matrices)) for matrices in (in_int8, wide))
    assert_close(got, want.astype(np.float64), tolerance=2e-2)
    assert not np.any(got[4:])


def test_quantized_gemm_prepacked_needs_16_bit_tokens(implementation):
    w = store(jnp.ones((2, 128, 256)), "mxfp4 prepacked")
    in_fp8 = dataclasses.replace(w, activations="fp8")
    gemm = partial(jax_ep.grouped_gemm, implementation=implementation)
    with pytest.raises(ValueError, match="rhs is prepacked, with activations='fp8', expected None"):
        gemm(jnp.ones((3, 128)), in_fp8, jnp.array([1, 2]))
    down = store(jnp.ones((2, 128, 128)), "mxfp4 prepacked")
    operands = jnp.ones((3, 128)), jnp.zeros((3, 1), jnp.int32), jnp.ones((3, 1))
    with pytest.raises(ValueError, match="w_gate_up is prepacked, with activations='fp8'"):
        jax_ep.fused_moe(*operands, in_fp8, down, implementation=implementation)


def test_quantized_gemm_mistakes(implementation):
    q = quantized(jnp.ones((2, 128, 256)), "int8")
    x, ids, weights = jnp.ones((3, 128)), jnp.zeros((3, 1), jnp.int32), jnp.ones((3, 1))
    down = quantized(jnp.ones((2, 128, 128)), "int8")
    layer = partial(jax_ep.fused_moe, implementation=implementation)
    with pytest.raises(TypeError, match="w_gate_up is quantized and w_down is an array, expected two of a kind"):
        layer(x, ids, weights, q, jnp.ones((2, 128, 128)))
    with pytest.raises(ValueError, match=r"mode='fused' with quantized weights"):
        layer(x, ids, weights, q, down, schedule=jax_ep.Schedule(dispatch_mode="fused"))
    with pytest.raises(ValueError, match="recipe='fp8' with quantized weights for inference"):
        layer(x, ids, weights, q, down, recipe="fp8")
    with pytest.raises(TypeError, match=r"with quantized weights has no gradient: .*jax_ep\.lora\.LoraWeights"):
        jax.eval_shape(jax.grad(lambda x: layer(x, ids, weights, q, down).sum()), x)
    both = (quantized(jnp.ones(shape), "fp8", activations="fp8") for shape in ((2, 128, 256), (2, 128, 128)))
    with pytest.raises(TypeError, match="with quantized weights has no gradient"):
        jax.eval_shape(jax.grad(lambda x, *both: layer(x, ids, weights, *both).sum()), x, *both)
    gemm = partial(jax_ep.grouped_gemm, implementation=implementation)
    with pytest.raises(TypeError, match="lhs_scales are given but lhs has dtype float32"):
        gemm(x, q, jnp.array([1, 2]), lhs_scales=jnp.ones((3, 1)))
    with pytest.raises(TypeError, match="lhs has dtype float8_e4m3fn, so rhs must be QuantizedWeights with act"):
        gemm(x.astype(jnp.float8_e4m3fn), q, jnp.array([1, 2]), lhs_scales=jnp.ones((3, 1)))
    with pytest.raises(ValueError, match="which only moe"):
        gemm(x, quantized(jnp.ones((2, 128, 256)), "fp8", for_training=True), jnp.array([1, 2]))
    with pytest.raises(ValueError, match="axis 1 of rhs, K,"):
        gemm(x[:, :64], q, jnp.array([1, 2]))
