"""The expert layer of one device in one launch by the kernel in Gluon: the tests of all such layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_single_launch
from test_single_launch import EXPERTS, call, check, check_drawn, drawn_biases, operands_of

import harness
import jax_ep
from cases import BF16, F16, Shape
from layers import Layer
from stored_experts import PREPACKED, store

OPERATION = "fused_moe"
IMPLEMENTATIONS = ("triton",)
GATED = [name for name, experts in EXPERTS.items() if experts.gated]
in_gluon = harness.in_gluon("fused_moe")


@pytest.mark.parametrize("stored", PREPACKED)
@pytest.mark.parametrize("kind", GATED)
@pytest.mark.slow(unless={"kind": ["gpt-oss"]})
def test_single_launch_gluon_experts(implementation, stored, kind, rng):
    test_single_launch.test_single_launch_quantized(implementation, stored, kind, BF16, rng)


@pytest.mark.parametrize("stored", PREPACKED)
@pytest.mark.parametrize("block_m", [16, 32, 64])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.slow(unless={"stored": ["mxfp4 prepacked"], "splits": [4], "block_m": [16]})
def test_single_launch_gluon_tiles(implementation, stored, block_m, splits, rng):
    """Experts with several blocks, and second GEMMs in parts; some parts have no step."""
    shape = Shape(num_tokens=70, top_k=3, num_experts=4, hidden=384, intermediate=640)
    layer = Layer(rng, "some_without_expert", 1, shape, BF16)
    matrices = [store(w, stored) for w in (layer.w_gate_up, layer.w_down)]
    with jax_ep.tuning.override("fused_moe_gluon", block_m=block_m, splits=splits):
        check(implementation, operands_of(layer), matrices, biases=drawn_biases(rng, layer, lambda: True))


@pytest.mark.parametrize("stored", PREPACKED)
@pytest.mark.parametrize("block_m", [8, 16])
@pytest.mark.slow(unless={"stored": ["int4 prepacked"], "block_m": [8]})
def test_single_launch_gluon_shared_steps(implementation, stored, block_m, rng):
    """Two warpgroups share three and five steps of a tile, or its parts of two and of one."""
    shape = Shape(num_tokens=20, top_k=3, num_experts=4, hidden=384, intermediate=640)
    layer = Layer(rng, "some_without_expert", 1, shape, BF16)
    matrices = [store(w, stored) for w in (layer.w_gate_up, layer.w_down)]
    for splits in (1, 4):
        with jax_ep.tuning.override("fused_moe_gluon", block_m=block_m, splits=splits, consumers=2):
            check(implementation, operands_of(layer), matrices, biases=drawn_biases(rng, layer, lambda: True))


def test_single_launch_gluon_one_token(implementation, rng):
    test_single_launch.test_single_launch_one_token(implementation, "mxfp4 prepacked", rng)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.slow
def test_single_launch_gluon_random_sizes(implementation, seed):
    """Layers of any size and of gated experts match the portable one in float32."""
    rng = np.random.default_rng(seed)
    num_experts, top_k = int(rng.integers(1, 200)), int(rng.integers(1, 7))
    stored, unit = (("mxfp4 prepacked", 32), ("int4 prepacked", 128))[seed % 2]
    hidden, inner = (int(unit * rng.integers(1, 640 // unit)) for _ in range(2))
    shape = Shape(int(rng.integers(1, 512 // top_k)), top_k, num_experts, hidden, inner)
    check_drawn(implementation, rng, shape, stored, BF16)


@pytest.mark.parametrize(
    ("stored", "dtype", "tokens", "gated", "words"),
    [
        (("mxfp4", "mxfp4"), BF16, 5, True, "10 assignments of bfloat16 tokens to mxfp4 weights"),
        (("int4 prepacked", "mxfp4 prepacked"), BF16, 5, True, "mxfp4_prepacked weights"),
        (("mxfp4 prepacked", "mxfp4 prepacked"), F16, 5, True, "float16 tokens"),
        (("mxfp4 prepacked", "mxfp4 prepacked"), BF16, 300, True, "600 assignments"),
        (("mxfp4 prepacked", "mxfp4 prepacked"), BF16, 5, False, "mxfp4_prepacked weights"),
    ],
)
def test_single_launch_gluon_other_layers(implementation, stored, dtype, tokens, gated, words, rng):
    shapes = (2, 128, 256 if gated else 128), (2, 128, 128)
    matrices = [store(jnp.ones(shape), name) for shape, name in zip(shapes, stored, strict=True)]
    operands = jnp.ones((tokens, 128), dtype), jnp.zeros((tokens, 2), jnp.int32), jnp.ones((tokens, 2))
    run = call(implementation, experts=jax_ep.Experts("silu" if gated else "gelu", gated=gated))
    with pytest.raises(NotImplementedError, match=rf"^fused_moe: gluon=True .*{words}.*, expected at most 512"):
        jax.jit(run)(*operands, *matrices)


def test_single_launch_gluon_again(implementation, rng):
    """The same bits in each run, and in a scan over stacked weights."""
    layer = Layer(rng, "uniform", 1, Shape(num_tokens=13, top_k=3, num_experts=6, hidden=128, intermediate=128), BF16)
    w_gate_up, w_down = (store(w, "mxfp4 prepacked") for w in (layer.w_gate_up, layer.w_down))
    x, ids, weights = operands_of(layer)
    run = call(implementation)
    once = jax.jit(run)(x, ids, weights, w_gate_up, w_down)
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), (w_gate_up, w_down))
    scanned = jax.jit(lambda x, w: jax.lax.scan(lambda c, w: (c, run(c, ids, weights, *w)), x, w)[1])(x, stacked)
    for found in (jax.jit(run)(x, ids, weights, w_gate_up, w_down), *scanned):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(once))
