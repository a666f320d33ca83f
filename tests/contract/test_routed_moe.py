"""The router and the expert layer of one device in one launch, against oracles and against `topk_router`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from cases import BF16, F16, F32, Shape, assert_close, assert_same_bits, reals
from harness import make_mesh, to_numpy
from jax_ep.serving import routed_moe
from layers import Layer
from stored_experts import dense, store

OPERATION = "fused_moe"
IMPLEMENTATIONS = ("xla", "triton")
ONE = jax_ep.Schedule(single_launch=True)
ROUTERS = {
    "softmax": jax_ep.Router(),
    "scores": jax_ep.Router(renormalize=False),
    "biased": jax_ep.Router(selection_bias=True),
    "sigmoid": jax_ep.Router("sigmoid", scale=2.5, selection_bias=True),
    "sigmoid scores": jax_ep.Router("sigmoid", renormalize=False, scale=-0.5),
}
SHAPE = Shape(num_tokens=9, top_k=3, num_experts=12, hidden=256, intermediate=128)
KINDS = {"bfloat16": False, "fp8": False, "mxfp4 prepacked": False, "in Gluon": True}  # stored, whether in Gluon


def call(implementation, k, **options):
    return partial(routed_moe, k=k, implementation=implementation, schedule=schedule_of(implementation), **options)


def schedule_of(implementation):
    return ONE if implementation == "triton" else None


def routing_of(logits, k, router, bias, mask):
    """Return ids and weights in float64."""
    logits = np.asarray(logits, np.float64)
    if router.score == "softmax":
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores = powers / powers.sum(axis=1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-logits))
    order = logits if bias is None else scores + np.asarray(bias, np.float64)
    ids = np.argsort(-order, axis=1, kind="stable")[:, :k]
    weights = np.take_along_axis(scores, ids, axis=1)
    barred = np.take_along_axis(order, ids, axis=1) == -np.inf
    ids, weights = np.where(barred, -1, ids), np.where(barred, 0, weights)
    if router.renormalize:
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-18)
    if mask is not None:
        ids, weights = np.where(mask[:, None], ids, -1), np.where(mask[:, None], weights, 0)
    return ids.astype(np.int32), weights * router.scale


def matrices_of(layer, kind):
    stored = "mxfp4 prepacked" if kind == "in Gluon" else kind
    return [w if stored == "bfloat16" else store(w, stored) for w in (layer.w_gate_up, layer.w_down)]


def override(kind):
    return jax_ep.tuning.override("fused_moe", gluon=KINDS[kind])


def check(implementation, operands, matrices, router, bias=None, mask=None, k=SHAPE.top_k, tolerance=1.5e-2):
    """Compare with the portable layer in float32, with a routing in float64."""
    x, logits = operands
    run = jax.jit(call(implementation, k, router=router, bias=bias, token_mask=mask))
    got, ids = run(x, logits, w_gate_up=matrices[0], w_down=matrices[1])
    want_ids, weights = routing_of(logits, k, router, bias, mask)
    np.testing.assert_array_equal(np.asarray(ids), want_ids)
    assert got.dtype == x.dtype and ids.dtype == jnp.int32
    wide = [dense(w, dtype=F32) if isinstance(w, jax_ep.QuantizedWeights) else w.astype(F32) for w in matrices]
    want = jax_ep.fused_moe(x.astype(F32), want_ids, jnp.asarray(weights, F32), *wide, implementation="xla")
    assert_close(to_numpy(got), to_numpy(want), tolerance=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.slow(unless={"kind": ["bfloat16"], "name": ["softmax", "sigmoid"]})
def test_routed_moe_routers(implementation, kind, name, rng):
    layer, router = Layer(rng, "uniform", 1, SHAPE, BF16), ROUTERS[name]
    logits = reals(rng, SHAPE.num_tokens, SHAPE.num_experts, dtype=F32)
    bias = reals(rng, SHAPE.num_experts, dtype=F32) if router.selection_bias else None
    mask = rng.random(SHAPE.num_tokens) < 0.7
    with override(kind):
        for given in (None, mask):
            operands = layer.x[0], logits if given is None else np.where(mask[:, None], logits, np.nan)
            check(implementation, operands, matrices_of(layer, kind), router, bias, given)


@pytest.mark.parametrize("kind", ["bfloat16", "in Gluon"])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"), [(1, 1, 1), (1, 5, 6), (8, 8, 130), (16, 4, 300), (40, 3, 4)]
)
@pytest.mark.slow(unless={"num_experts": [6], "kind": ["bfloat16"]})
def test_routed_moe_sizes(implementation, kind, num_tokens, top_k, num_experts, rng):
    layer = Layer(rng, "uniform", 1, Shape(num_tokens, top_k, num_experts, hidden=128, intermediate=128), BF16)
    for dtype in (F32, BF16, F16):
        logits = jnp.asarray(reals(rng, num_tokens, num_experts, dtype=F32)).astype(dtype)
        with override(kind):
            check(implementation, (layer.x[0], logits), matrices_of(layer, kind), ROUTERS["scores"], k=top_k)


@pytest.mark.parametrize("kind", ["bfloat16", "in Gluon"])
def test_routed_moe_equal_logits(implementation, kind, rng):
    """Of equal logits the first wins, both zeros are equal, and experts without a chance are chosen last."""
    layer = Layer(rng, "uniform", 1, SHAPE, BF16)
    logits = rng.choice(np.array([-0.0, 0.0, 1.0, -np.inf], np.float32), (SHAPE.num_tokens, SHAPE.num_experts))
    logits[:, 7] = 1.0
    barred = np.where(np.arange(SHAPE.num_experts) % 6 == 1, 0, -np.inf).astype(F32)
    with override(kind):
        check(implementation, (layer.x[0], logits), matrices_of(layer, kind), ROUTERS["softmax"])
        check(implementation, (layer.x[0], logits), matrices_of(layer, kind), ROUTERS["sigmoid"], bias=barred)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_routed_moe_nan(implementation, score, rng):
    """A NaN reaches the output of its token, and of no other."""
    layer = Layer(rng, "uniform", 1, SHAPE, BF16)
    logits = reals(rng, SHAPE.num_tokens, SHAPE.num_experts, dtype=F32)
    logits[2, 5], logits[4] = np.nan, -np.nan
    run = jax.jit(call(implementation, SHAPE.top_k, router=jax_ep.Router(score)))
    y = to_numpy(run(layer.x[0], logits, w_gate_up=layer.w_gate_up, w_down=layer.w_down)[0])
    np.testing.assert_array_equal(np.isnan(y.astype(F32)).all(axis=1), np.isin(np.arange(SHAPE.num_tokens), [2, 4]))


def test_routed_moe_gradient(implementation, rng):
    """Tokens, logits and weights have the gradient of the two functions."""
    layer = Layer(rng, "uniform", 1, SHAPE, BF16)
    logits = reals(rng, SHAPE.num_tokens, SHAPE.num_experts, dtype=F32)
    operands = layer.x[0], jnp.asarray(logits), layer.w_gate_up, layer.w_down

    def apart(x, logits, *weights):
        routing = jax_ep.topk_router(logits, SHAPE.top_k)
        return jax_ep.fused_moe(x, *routing[:2], *weights, implementation=implementation)

    def together(x, logits, *weights):
        return call(implementation, SHAPE.top_k)(x, logits, w_gate_up=weights[0], w_down=weights[1])[0]

    got, want = (
        jax.jit(jax.grad(lambda *args, run=run: (run(*args).astype(F32) ** 2).sum(), argnums=(0, 1, 2, 3)))(*operands)
        for run in (together, apart)
    )
    for name, a, b in zip(("x", "logits", "w_gate_up", "w_down"), got, want, strict=True):
        assert_close(to_numpy(a), to_numpy(b).astype(np.float64), name, tolerance=2e-2)
        assert np.any(to_numpy(a))


def test_routed_moe_over_devices(implementation, rng):
    """Tokens split over devices, with gradients; logits in float64."""
    mesh = make_mesh((2,), ("data",))
    layer = Layer(rng, "uniform", 1, Shape(6, 3, num_experts=12, hidden=128, intermediate=64), BF16)
    operands = layer.x[0], reals(rng, 6, 12, dtype=np.float64), layer.w_gate_up, layer.w_down

    def run(x, logits, *w):
        return call(implementation, 3)(x, logits, w_gate_up=w[0], w_down=w[1])[0]

    def loss(run, *operands):
        return (run(*operands).astype(F32) ** 2).sum()

    with jax.enable_x64(True):
        specs = P("data"), P("data"), P(), P()
        shared = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P("data"))
        assert_close(to_numpy(jax.jit(shared)(*operands)), to_numpy(run(*operands)).astype(np.float64))
        got, want = (jax.jit(jax.grad(partial(loss, f), argnums=(0, 1, 2)))(*operands) for f in (shared, run))
    for a, b in zip(got, want, strict=True):
        assert_close(to_numpy(a), to_numpy(b).astype(np.float64), tolerance=2e-2)


def test_routed_moe_in_scan(implementation, rng):
    """The same bits in a scan over layers as in one call."""
    layer = Layer(rng, "uniform", 1, SHAPE, BF16)
    logits = jnp.asarray(reals(rng, SHAPE.num_tokens, SHAPE.num_experts, dtype=F32))
    run = lambda x, *w: call(implementation, SHAPE.top_k)(x, logits, w_gate_up=w[0], w_down=w[1])  # noqa: E731
    once = jax.jit(run)(layer.x[0], layer.w_gate_up, layer.w_down)
    stacked = jax.tree.map(lambda w: jnp.stack([w, w]), (layer.w_gate_up, layer.w_down))
    scanned = jax.jit(lambda x, w: jax.lax.scan(lambda x, w: (x, run(x, *w)), x, w)[1])(layer.x[0], stacked)
    for got, want in zip(scanned, once, strict=True):
        for row in got:
            assert_same_bits(to_numpy(row), to_numpy(want))


@pytest.mark.parametrize(
    ("router", "num_tokens", "words"),
    [
        (jax_ep.Router(), 257, "more than 512"),
        (jax_ep.Router(num_groups=3), 4, "no groups"),
        (jax_ep.Router("sparsemixer"), 4, "no SparseMixer"),
    ],
)
def test_routed_moe_by_xla(implementation, router, num_tokens, words, rng):
    """What the launch does not choose, XLA does, and `explain` says so."""
    shape = Shape(num_tokens, 2, num_experts=6, hidden=64, intermediate=48)
    layer = Layer(rng, "uniform", 1, shape, BF16)
    logits = jnp.asarray(reals(rng, num_tokens, 6, dtype=F32))
    run = call(implementation, 2, router=router)
    operands = layer.x[0], logits, layer.w_gate_up, layer.w_down
    inside = lambda x, logits, *w: run(x, logits, w_gate_up=w[0], w_down=w[1])  # noqa: E731
    row = next(row for row in jax_ep.explain(inside, *operands).rows if row.part == "router")
    assert row.implementation == "xla" and (words if implementation == "triton" else "not one launch") in row.reason
    routing = jax_ep.topk_router(logits, 2, router=router)
    want = jax_ep.fused_moe(
        layer.x[0], *routing[:2], *operands[2:], implementation=implementation, schedule=schedule_of(implementation)
    )
    got, ids = jax.jit(inside)(*operands)
    np.testing.assert_array_equal(np.asarray(ids), np.asarray(routing.topk_idx))
    assert_close(to_numpy(got), to_numpy(want).astype(np.float64), tolerance=1e-2)


def test_routed_moe_in_launch(implementation, rng):
    layer = Layer(rng, "uniform", 1, SHAPE, BF16)
    logits = jnp.zeros((SHAPE.num_tokens, SHAPE.num_experts))
    found = jax_ep.explain(call(implementation, 2), layer.x[0], logits, w_gate_up=layer.w_gate_up, w_down=layer.w_down)
    rows = {row.part: row.implementation for row in found.rows}
    assert rows["router"] == implementation and ("layer in one launch" in rows) == (implementation == "triton")


@pytest.mark.filterwarnings("ignore:MoE. no mesh is set")
@pytest.mark.parametrize("stored", [None, "mxfp4"])
def test_routed_moe_in_flax(implementation, stored, rng):
    """A Flax layer without a mesh chooses experts in its launch, and has the metrics of this choice."""
    nnx = pytest.importorskip("flax.nnx")
    from jax_ep.flax import MoE

    x, mask = jnp.asarray(reals(rng, 9, 128, dtype=F32)).astype(BF16), jnp.asarray(rng.random(9) < 0.7)
    options = {"schedule": schedule_of(implementation), "implementation": implementation}
    layer, portable = (
        MoE(128, 64, 6, 2, dtype=BF16, rngs=nnx.Rngs(0), **given) for given in (options, {"implementation": "xla"})
    )
    weights = [None if stored is None else each.serving_weights(stored) for each in (layer, portable)]
    rows = {row.part: row.implementation for row in jax_ep.explain(layer, x, weights[0], token_mask=mask).rows}
    assert rows["router"] == implementation
    (got, metrics), (want, expected) = (
        nnx.jit(lambda layer, x, w: layer(x, w, token_mask=mask))(each, x, w)
        for each, w in zip((layer, portable), weights, strict=True)
    )
    assert_close(to_numpy(got), to_numpy(want).astype(np.float64), tolerance=1.5e-2)
    np.testing.assert_array_equal(np.asarray(metrics.topk_idx), np.asarray(expected.topk_idx))


def test_routed_moe_without_tokens(implementation, rng):
    w_gate_up, w_down = jnp.ones((3, 64, 32), BF16), jnp.ones((3, 16, 64), BF16)
    y, ids = jax.jit(call(implementation, 2))(
        jnp.zeros((0, 64), BF16), jnp.zeros((0, 3)), w_gate_up=w_gate_up, w_down=w_down
    )
    assert y.shape == (0, 64) and ids.shape == (0, 2)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"logits": jnp.ones((4, 6))}, ValueError, "T of logits is 4, expected 5"),
        ({"logits": jnp.ones((5, 7))}, ValueError, "7"),
        ({"logits": jnp.ones((5, 6), jnp.int32)}, TypeError, "logits"),
        ({"k": 7}, ValueError, "k=7"),
        ({"router": "softmax"}, TypeError, "router"),
        ({"router": jax_ep.Router(selection_bias=True)}, ValueError, "bias=None"),
        ({"router": jax_ep.Router(num_identity_experts=2)}, ValueError, "num_identity_experts=2"),
        ({"token_mask": jnp.ones(4, bool)}, ValueError, "token_mask"),
        ({"x": jnp.ones((5, 32))}, ValueError, "32"),
    ],
)
def test_routed_moe_errors(changes, error, words):
    operands = {"x": jnp.ones((5, 64)), "logits": jnp.ones((5, 6)), "k": 2}
    operands |= {"w_gate_up": jnp.ones((6, 64, 32)), "w_down": jnp.ones((6, 16, 64))}
    with pytest.raises(error, match=rf"^routed_moe: .*{words}"):
        routed_moe(**operands | changes)
