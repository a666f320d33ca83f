"""The expert layer of one device in one launch, against the oracle and against the layer in several."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from cases import BF16, F16, F32, Shape, assert_close, assert_same_bits, reals
from harness import to_numpy
from jax_ep.megakernels import fused_moe
from jax_ep.quantization import quantize
from layers import Layer, first_tokens
from oracle_experts import GPT_OSS
from oracle_quantized import FORMATS
from routings import ROUTINGS
from stored_experts import STORED, dense, store

OPERATION = "fused_moe"
ONE, SEVERAL = (jax_ep.Schedule(single_launch=one) for one in (True, False))
SHAPES = {
    "one token": Shape(num_tokens=1, top_k=2, num_experts=4, hidden=64, intermediate=48),
    "cut tiles": Shape(num_tokens=13, top_k=3, num_experts=6, hidden=72, intermediate=40),
    "several blocks": Shape(num_tokens=60, top_k=4, num_experts=16, hidden=136, intermediate=80),
    "sorted": Shape(num_tokens=90, top_k=6, num_experts=64, hidden=72, intermediate=40),
    "wide blocks": Shape(num_tokens=260, top_k=2, num_experts=3, hidden=136, intermediate=80),
}
EXPERTS = {
    "silu": jax_ep.Experts(),
    "up only": jax_ep.Experts("gelu", gated=False),
    "gpt-oss": GPT_OSS,
    "weights on the input": jax_ep.Experts(weight_on="input"),
}

FEW = [name for name in STORED if name not in ("int4", "mxfp4")]  # Serving uses these prepacked.


def call(implementation, **options):
    return partial(jax_ep.fused_moe, schedule=ONE, implementation=implementation, **options)


def operands_of(layer):
    return layer.x[0], layer.topk_idx[0], layer.topk_weights[0]


def check(implementation, operands, matrices, experts=EXPERTS["silu"], biases=(None, None), tolerance=1.5e-2):
    """Compare with the portable layer in float32, with dequantized weights."""
    got = to_numpy(jax.jit(call(implementation, experts=experts, biases=biases))(*operands, *matrices))
    assert got.dtype == operands[0].dtype
    wide = [dense(w, dtype=F32) if isinstance(w, jax_ep.QuantizedWeights) else w.astype(F32) for w in matrices]
    biases = tuple(None if b is None else b.astype(F32) for b in biases)
    portable = jax.jit(partial(jax_ep.fused_moe, experts=experts, implementation="xla", biases=biases))
    assert_close(got, to_numpy(portable(operands[0].astype(F32), *operands[1:], *wide)), tolerance=tolerance)


def drawn_biases(rng, layer, is_given):
    shapes = (layer.w_gate_up[:, 0].shape, layer.w_down[:, 0].shape)
    return tuple(reals(rng, *shape, dtype=layer.x.dtype) if is_given() else None for shape in shapes)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.slow(unless={"name": ["cut tiles", "one token"]})
def test_single_launch_routings(implementation, name, rng, subtests):
    run = jax.jit(call(implementation))
    for routing in ROUTINGS:
        with subtests.test(routing):
            layer = Layer(rng, routing, 1, SHAPES[name], BF16)
            operands = *operands_of(layer), layer.w_gate_up, layer.w_down
            got = to_numpy(run(*operands))
            assert_close(got, layer.oracle().forward()[0], "layer")
            assert_same_bits(to_numpy(run(*operands)), got, "again")


@pytest.mark.parametrize("stored", [None, "mxfp4 prepacked", "fp8"])
@pytest.mark.slow(unless={"stored": [None]})
def test_single_launch_one_token(implementation, stored, rng):
    """One token whose ids repeat, or are no expert; the second GEMM in parts."""
    layer = Layer(rng, "some_without_expert", 1, Shape(1, 5, num_experts=6, hidden=256, intermediate=384), BF16)
    x, _, weights = operands_of(layer)
    matrices = [store(w, stored) if stored else w for w in (layer.w_gate_up, layer.w_down)]
    biases = drawn_biases(rng, layer, lambda: True)
    with jax_ep.tuning.override("fused_moe", splits=2):
        for ids in ([3, 0, 3, -1, 5], [-1, -1, 6, -1, -1]):
            check(implementation, (x, jnp.array([ids], jnp.int32), weights), matrices, biases=biases)


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.slow(unless={"dtype": [BF16], "biased": [True]})
def test_single_launch_experts(implementation, kind, biased, dtype, rng):
    experts = EXPERTS[kind]
    layer = Layer(rng, "some_without_expert", 1, SHAPES["cut tiles"], dtype, gated=experts.gated)
    biases = drawn_biases(rng, layer, lambda: biased)
    check(implementation, operands_of(layer), (layer.w_gate_up, layer.w_down), experts, biases, tolerance=None)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.slow(unless={"kind": ["silu"], "dtype": [BF16], "stored": FEW})
def test_single_launch_quantized(implementation, stored, kind, dtype, rng):
    experts, shape = EXPERTS[kind], Shape(num_tokens=13, top_k=3, num_experts=6, hidden=256, intermediate=128)
    layer = Layer(rng, "some_without_expert", 1, shape, dtype, gated=experts.gated)
    operands, matrices = operands_of(layer), [store(w, stored) for w in (layer.w_gate_up, layer.w_down)]
    check(implementation, operands, matrices, experts, drawn_biases(rng, layer, lambda: True))
    with pytest.raises(TypeError, match="with quantized weights has no gradient"):
        jax.grad(lambda x: call(implementation, experts=experts)(x, *operands[1:], *matrices).sum())(operands[0])


@pytest.mark.parametrize("stored", [name for name in STORED if name.endswith(" prepacked")])
@pytest.mark.slow
def test_single_launch_prepacked_steps(implementation, stored, rng):
    """Split K in two or four pieces, where the last one may lie past the end of the weights."""
    shape = Shape(num_tokens=13, top_k=3, num_experts=6, hidden=384, intermediate=640)
    layer = Layer(rng, "some_without_expert", 1, shape, BF16)
    matrices = [store(w, stored) for w in (layer.w_gate_up, layer.w_down)]
    for depth in (128, 256):
        with jax_ep.tuning.override("fused_moe", depth=depth, num_stages=2):
            check(implementation, operands_of(layer), matrices)


@pytest.mark.parametrize("num_tokens", [24, 60])
@pytest.mark.parametrize("stored", ["fp8", "fp8_channel"])
@pytest.mark.parametrize("kind", ["silu", "gpt-oss"])
@pytest.mark.slow(unless={"kind": ["silu"], "stored": ["fp8"], "num_tokens": [60]})
def test_single_launch_fp8_blocks(implementation, kind, stored, num_tokens, rng):
    """Tiles of 32 rows and of 64, which use swap_ab."""
    experts, shape = EXPERTS[kind], Shape(num_tokens, top_k=2, num_experts=2, hidden=256, intermediate=384)
    layer = Layer(rng, "uniform", 1, shape, BF16, gated=experts.gated)
    operands, matrices = operands_of(layer), [store(w, stored) for w in (layer.w_gate_up, layer.w_down)]
    _, sizes = fused_moe.fused_sizes(experts, operands[0].shape, shape.top_k, *matrices)
    assert {sizes.gate_up.tile.block_m, sizes.down.tile.block_m} == {32 if num_tokens == 24 else 64}
    assert sizes.gate_up.tile.swap_ab and sizes.down.tile.swap_ab
    check(implementation, operands, matrices, experts)


def test_single_launch_num_tokens_and_dtypes(implementation, rng):
    layer = Layer(rng, "uniform", 1, SHAPES["cut tiles"], BF16)
    operands = *operands_of(layer), layer.w_gate_up, layer.w_down
    layer_of = call(implementation, preferred_element_type=F32)
    run = jax.jit(lambda count, x, ids, *operands: layer_of(x, first_tokens(ids, count), *operands))
    some, everything = (to_numpy(run(jnp.int32(count), *operands)) for count in (5, 99))
    assert some.dtype == F32
    assert_same_bits(some[:5], everything[:5])
    assert not np.any(some[5:])
    assert_close(everything, layer.oracle().forward()[0], tolerance=1.2e-2)


def test_single_launch_gradients_match_several(implementation, rng):
    layer = Layer(rng, "duplicates", 1, SHAPES["cut tiles"], BF16)
    ids, d_y = layer.topk_idx[0], reals(rng, *layer.x[0].shape, dtype=BF16)

    def gradients(schedule):
        def fn(x, weights, *matrices):
            return jax_ep.fused_moe(x, ids, weights, *matrices, schedule=schedule, implementation=implementation)

        return jax.jit(lambda *operands: jax.vjp(fn, *operands)[1](d_y))

    operands = layer.x[0], layer.topk_weights[0], layer.w_gate_up, layer.w_down
    for got, want in zip(gradients(ONE)(*operands), gradients(SEVERAL)(*operands), strict=True):
        assert_same_bits(to_numpy(got), to_numpy(want))


def check_drawn(implementation, rng, shape, stored, dtype, *, gated=True):
    """Check a layer of this shape with experts, ids and biases drawn at random."""
    experts = jax_ep.Experts(
        str(rng.choice(["silu", "gelu", "gelu_exact", "relu", "relu_squared"])),
        gated=gated,
        interleaved=gated and bool(rng.integers(2)),
        clamp=rng.choice([None, 1.5]),
        weight_on=str(rng.choice(["input", "output"])),
    )
    layer = Layer(rng, "uniform", 1, shape, dtype, gated=gated)
    ids = rng.integers(-1, shape.num_experts + 1, layer.topk_idx[0].shape, dtype=np.int32)
    matrices = [w if stored is None else store(w, stored) for w in (layer.w_gate_up, layer.w_down)]
    biases = drawn_biases(rng, layer, lambda: rng.integers(2))
    check(implementation, (layer.x[0], ids, layer.topk_weights[0]), matrices, experts, biases)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.slow(unless={"seed": [0]})
def test_single_launch_random_sizes(implementation, seed):
    """Layers of any size, experts, format and dtype match the portable one in float32."""
    rng = np.random.default_rng(seed)
    num_experts, top_k = int(rng.integers(1, 24)), int(rng.integers(1, 7))
    stored = rng.choice([None, *STORED])
    unit = 8 if stored is None else FORMATS[stored.split()[0]].block[1] or 128
    hidden, inner = (int(unit * rng.integers(1, 20 if unit == 8 else 512 // unit)) for _ in range(2))
    shape = Shape(int(rng.integers(1, 90)), top_k, num_experts, hidden, inner)
    dtype = (BF16, F16)[rng.integers(2)]
    check_drawn(implementation, rng, shape, stored, dtype, gated=bool(rng.integers(2)))


@pytest.mark.parametrize("schedule", [ONE, SEVERAL], ids=["one", "several"])
def test_single_launch_float16_overflow(implementation, schedule, rng):
    """Gate times up may overflow float16, at 65504; a large number never looks small."""
    layer = Layer(rng, "uniform", 1, SHAPES["cut tiles"], F16)
    call = jax.jit(
        partial(jax_ep.fused_moe, experts=jax_ep.Experts("relu"), schedule=schedule, implementation=implementation)
    )
    large = np.abs(layer.w_gate_up) * 100
    for dtype, is_finite in ((F16, False), (BF16, True)):
        ids = layer.topk_idx[0]
        operands = [np.abs(layer.x[0]) * 10, ids, np.ones(ids.shape, F32), large, layer.w_down]
        operands = [a.astype(dtype) if a.dtype == F16 else a for a in operands]
        got = to_numpy(call(*operands)).astype(np.float32)
        assert np.array_equal(np.isfinite(got), np.full(got.shape, is_finite))


def test_single_launch_workspace(implementation, rng):
    """The workspace has the hidden rows, those of the result, and some counters, but no gathered tokens."""
    tokens, top_k, hidden, inner = 1200, 4, 1024, 512
    shapes = [(tokens, hidden), (tokens, top_k), (tokens, top_k), (4, hidden, 2 * inner), (4, inner, hidden)]
    dtypes = [BF16, np.int32, F32, BF16, BF16]
    operands = [jax.ShapeDtypeStruct(*both) for both in zip(shapes, dtypes, strict=True)]
    found = jax.jit(call(implementation)).lower(*operands).compile().memory_analysis()
    rows = tokens * top_k * 2 * (inner + hidden)
    assert found.temp_size_in_bytes < 1.02 * rows + (1 << 17)


def test_single_launch_unsupported(implementation, rng):
    layer = Layer(rng, "uniform", 1, SHAPES["cut tiles"], BF16)
    operands = *operands_of(layer), layer.w_gate_up, layer.w_down
    wide = [a.astype(F32) if a.dtype == BF16 else a for a in operands]
    odd = [operands[0][:, :68], *operands[1:3], operands[3][:, :68], operands[4][..., :68]]
    with pytest.raises(ValueError, match=r"single_launch=True, but .* float32 tokens"):
        call(implementation)(*wide)
    in_int8 = [quantize(jnp.ones((6, 128, 128)), "int8", activations="int8")] * 2
    with pytest.raises(ValueError, match="no tokens in int8"):
        call(implementation)(jnp.ones((13, 128), BF16), *operands[1:3], *in_int8, experts=EXPERTS["up only"])
    with pytest.raises(ValueError, match="sizes that are multiples of 8"):
        call(implementation)(*odd)
    for schedule, ids in itertools.product((ONE, None), (None, [[0], [1]])):
        run = partial(jax_ep.fused_moe, schedule=schedule, implementation=implementation)
        with pytest.raises(TypeError, match=r"topk_idx is a (NoneType|list), not an array"):
            run(operands[0], ids, *operands[2:])
    with pytest.raises(ValueError, match="no such kernel exists with capacity"):
        partial(jax_ep.moe, schedule=ONE, num_experts=6, axis_name=(), capacity=4)(*operands)
    if implementation == "triton":
        pair = [store(jnp.ones(shape), "mxfp4 prepacked") for shape in ((6, 128, 256), (6, 128, 128))]
        with (
            jax_ep.tuning.override("fused_moe", depth=64),
            pytest.raises(ValueError, match="depth=64 with prepacked weights, expected 128 or 256"),
        ):
            call(implementation)(jnp.ones((13, 128), BF16), *operands[1:3], *pair)
    with pytest.raises(NotImplementedError, match="xla: it has no fused_moe"):
        call("xla")(*operands)


@pytest.mark.parametrize("loop", ["unrolled", "scan"])
def test_single_launch_layers_of_stacked_weights(loop, implementation, rng):
    """Slices of stacked weights, which XLA can move into a launch, give the bits of separate arrays."""
    layers = [Layer(rng, "some_without_expert", 1, SHAPES["cut tiles"], BF16) for _ in range(3)]
    x, topk_idx, topk_weights = operands_of(layers[0])
    layer = call(implementation)
    want = x
    for w in layers:
        want = jax.jit(layer)(want, topk_idx, topk_weights, w.w_gate_up, w.w_down)
    stacked = [np.stack([getattr(w, name) for w in layers]) for name in ("w_gate_up", "w_down")]

    def model(x, w_gate_up, w_down):
        if loop == "scan":
            step = lambda x, w: (layer(x, topk_idx, topk_weights, *w), None)  # noqa: E731
            return jax.lax.scan(step, x, (w_gate_up, w_down))[0]
        for i in range(len(layers)):
            x = layer(x, topk_idx, topk_weights, w_gate_up[i], w_down[i])
        return x

    assert_same_bits(to_numpy(jax.jit(model)(x, *stacked)), to_numpy(want))
