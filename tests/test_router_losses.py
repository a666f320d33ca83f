"""Losses of routers, replay of another routing, and the value `Router`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import finite_differences
import harness
import jax_ep
from jax_ep import Router
from jax_ep.flax import MoE
from jax_ep.routing import MoEMetrics
from jax_ep.sharding import MeshAxes
from oracle_experts import sigmoid_layer


def _logits(num_tokens, num_experts):
    return (2.0 * np.random.default_rng(0).normal(size=(num_tokens, num_experts))).astype(np.float32)


def _balancing_loss(scores, topk_idx):
    """Compute E * sum_e (share of the valid assignments) * (mean probability), in float64."""
    num_experts = scores.shape[1]
    valid = topk_idx[topk_idx >= 0]
    share = np.bincount(valid, minlength=num_experts) / max(len(valid), 1)
    probabilities = scores / scores.sum(axis=1, keepdims=True)
    return num_experts * float(share @ probabilities.mean(axis=0))


def _random_assignments(num_tokens=24, invalid=0.0, seed=0):
    rng = np.random.default_rng(seed)
    scores = rng.uniform(0.05, 1.0, size=(num_tokens, 8)).astype(np.float32)
    topk_idx = np.argsort(-scores, axis=1)[:, :3].astype(np.int32)
    topk_idx[rng.uniform(size=topk_idx.shape) < invalid] = -1
    return scores, topk_idx


@pytest.mark.parametrize("invalid", [0.0, 0.4])
def test_load_balancing_loss_value(invalid):
    """The router has scored tokens without any expert, so they are in the mean score."""
    scores, topk_idx = _random_assignments(invalid=invalid)
    assert (topk_idx < 0).all(axis=1).any() == (invalid > 0)
    expected = _balancing_loss(scores.astype(np.float64), topk_idx)
    got = jax_ep.load_balancing_loss(jnp.asarray(scores), jnp.asarray(topk_idx))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_load_balancing_loss_without_any_valid_assignment_is_finite():
    scores, _ = _random_assignments()
    topk_idx = jnp.full((24, 3), -1, jnp.int32)
    value, gradient = jax.value_and_grad(jax_ep.load_balancing_loss)(jnp.asarray(scores), topk_idx)
    np.testing.assert_allclose(value, 0.0, atol=0.0)
    np.testing.assert_array_equal(gradient, np.zeros_like(scores))


def test_load_balancing_loss_gradient():
    scores, topk_idx = _random_assignments(invalid=0.3)
    (expected,) = finite_differences.gradients(lambda s: _balancing_loss(s, topk_idx), [scores])
    actual = jax.grad(jax_ep.load_balancing_loss)(jnp.asarray(scores), jnp.asarray(topk_idx))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("axes", [("data",), ("expert",), ("data", "expert")])
@pytest.mark.parametrize("invalid", [0.0, 0.4])
@pytest.mark.slow(unless={"axes": [("data", "expert")]})
def test_load_balancing_loss_over_a_mesh_equals_the_global_value(axes, invalid):
    mesh = harness.make_mesh((2, 4), ("data", "expert"))
    scores, topk_idx = _random_assignments(num_tokens=32, invalid=invalid, seed=4)
    name = axes[0] if len(axes) == 1 else axes
    spec = P(name)
    loss = partial(jax_ep.load_balancing_loss, axis_name=name)
    over_mesh = jax.jit(jax.shard_map(loss, mesh=mesh, in_specs=(spec, spec), out_specs=P()))
    arguments = jnp.asarray(scores), jnp.asarray(topk_idx)
    value, gradient = jax.value_and_grad(over_mesh)(*arguments)
    np.testing.assert_allclose(value, _balancing_loss(scores.astype(np.float64), topk_idx), rtol=1e-5)
    np.testing.assert_allclose(gradient, jax.grad(jax_ep.load_balancing_loss)(*arguments), rtol=1e-4, atol=1e-7)


def test_router_z_loss_value_and_gradient():
    logits = _logits(6, 10)
    shifted = logits.astype(np.float64)
    logsumexp = np.log(np.exp(shifted).sum(axis=1))
    value, gradient = jax.value_and_grad(jax_ep.router_z_loss)(jnp.asarray(logits))
    assert value.shape == ()
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, np.mean(logsumexp**2), rtol=1e-5)
    np.testing.assert_allclose(
        gradient, 2.0 * logsumexp[:, None] * np.exp(shifted - logsumexp[:, None]) / 6.0, rtol=1e-4, atol=1e-7
    )


@pytest.mark.parametrize("size", [300.0, 1e4, -1e4])
def test_router_z_loss_does_not_overflow(size):
    # exp(300) overflows float32, so a naive logsumexp gives inf and a gradient of nan.
    logits = jnp.full((4, 8), size, jnp.float32)
    value, gradient = jax.value_and_grad(jax_ep.router_z_loss)(logits)
    np.testing.assert_allclose(value, (size + np.log(8.0)) ** 2, rtol=1e-5)
    np.testing.assert_allclose(gradient, np.full((4, 8), 2.0 * (size + np.log(8.0)) / 32.0), rtol=1e-5)


def test_losses_of_more_tokens_than_int32_counts():
    """Only shapes, as `jax-ep doctor --plan` takes them."""
    logits, ids = jax.ShapeDtypeStruct((2**31, 2), jnp.float32), jax.ShapeDtypeStruct((2**31, 1), jnp.int32)
    assert jax.eval_shape(jax_ep.router_z_loss, logits).shape == ()
    assert jax.eval_shape(jax_ep.load_balancing_loss, logits, ids).shape == ()


def test_losses_of_bfloat16_inputs_are_float32():
    logits = jnp.asarray(_logits(64, 32)).astype(jnp.bfloat16)
    topk_idx = jax_ep.topk_router(logits, 4).topk_idx
    scores = jax_ep.topk_router(logits, 4).scores.astype(jnp.bfloat16)
    wide = logits.astype(jnp.float32)
    for narrow, expected in [
        (jax_ep.router_z_loss(logits), jax_ep.router_z_loss(wide)),
        tuple(jax_ep.load_balancing_loss(s, topk_idx) for s in (scores, scores.astype(jnp.float32))),
    ]:
        assert narrow.dtype == jnp.float32
        np.testing.assert_array_equal(narrow, expected)


def _masked_case(num_tokens=24):
    """Return scores, ids, logits and a mask; padding holds NaN and arbitrary ids, because it must not matter."""
    scores, topk_idx = _random_assignments(num_tokens, invalid=0.2, seed=7)
    logits, mask = _logits(num_tokens, 8), np.random.default_rng(8).uniform(size=num_tokens) < 0.6
    scores[~mask], logits[~mask], topk_idx[~mask] = np.nan, np.nan, 5
    return scores, topk_idx, logits, mask


def _z_loss(logits):
    return float(np.mean(np.log(np.exp(logits.astype(np.float64)).sum(axis=1)) ** 2))


def test_masked_tokens_are_as_good_as_dropped():
    """Values and gradients of both losses match those without these tokens."""
    scores, topk_idx, logits, mask = _masked_case()
    balance = partial(jax_ep.load_balancing_loss, topk_idx=jnp.asarray(topk_idx), token_mask=jnp.asarray(mask))
    z_loss = partial(jax_ep.router_z_loss, token_mask=jnp.asarray(mask))
    of_kept = lambda kept: _balancing_loss(kept, topk_idx[mask])  # noqa: E731
    for loss, inputs, want in ((balance, scores, of_kept), (z_loss, logits, _z_loss)):
        value, gradient = jax.value_and_grad(loss)(jnp.asarray(inputs))
        kept = inputs[mask].astype(np.float64)
        np.testing.assert_allclose(value, want(kept), rtol=1e-5)
        (expected,) = finite_differences.gradients(want, [kept])
        np.testing.assert_allclose(gradient[mask], expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(gradient[~mask], 0)


def test_a_mask_over_a_mesh_weighs_ranks_by_their_tokens():
    """Ranks have different numbers of valid tokens, one of them none."""
    mesh = harness.make_mesh((4,), ("expert",))
    scores, topk_idx, logits, mask = _masked_case(32)
    mask[8:16] = False

    def losses(scores, topk_idx, logits, mask):
        options = {"token_mask": mask, "axis_name": "expert"}
        return jax_ep.load_balancing_loss(scores, topk_idx, **options), jax_ep.router_z_loss(logits, **options)

    over_mesh = jax.jit(jax.shard_map(losses, mesh=mesh, in_specs=P("expert"), out_specs=P()))
    balance, z_loss = over_mesh(scores, topk_idx, logits, mask)
    np.testing.assert_allclose(balance, _balancing_loss(scores[mask].astype(np.float64), topk_idx[mask]), rtol=1e-5)
    np.testing.assert_allclose(z_loss, _z_loss(logits[mask]), rtol=1e-5)


def test_a_mask_that_counts_all_or_none():
    scores, topk_idx = _random_assignments()
    logits = jnp.asarray(_logits(24, 8))
    for loss in (partial(jax_ep.load_balancing_loss, jnp.asarray(scores), jnp.asarray(topk_idx)),
                 partial(jax_ep.router_z_loss, logits)):  # fmt: skip
        np.testing.assert_allclose(loss(token_mask=jnp.ones(24, bool)), loss(), rtol=1e-6)
        assert float(loss(token_mask=jnp.zeros(24, bool))) == 0


ROUTERS = [
    Router(),
    Router("sigmoid", renormalize=False, scale=2.5),
    Router("sigmoid", num_groups=4, topk_groups=2, selection_bias=True),
]


@pytest.mark.parametrize("router", ROUTERS)
def test_topk_router_replays_its_own_choice(router, rng):
    logits = rng.standard_normal((9, 8)).astype(np.float32)
    bias = rng.standard_normal(8).astype(np.float32) if router.selection_bias else None

    def run(logits, topk_idx):
        routing = jax_ep.topk_router(logits, 3, router=router, bias=bias, topk_idx=topk_idx)
        return jnp.sum(jnp.sin(routing.topk_weights)), routing

    (_, want), want_gradient = jax.value_and_grad(run, has_aux=True)(logits, None)
    (_, got), gradient = jax.value_and_grad(run, has_aux=True)(logits, want.topk_idx)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    np.testing.assert_array_equal(gradient, want_gradient)


def test_topk_router_replay_weights_of_other_experts(rng):
    logits = rng.standard_normal((5, 4)).astype(np.float32)
    topk_idx = np.array([[0, 1], [3, -1], [-1, -1], [2, 0], [1, 3]], np.int32)
    scores = np.exp(logits.astype(np.float64))
    taken = np.where(topk_idx < 0, 0, np.take_along_axis(scores, np.maximum(topk_idx, 0), 1))
    want = taken / np.maximum(taken.sum(1, keepdims=True), 1e-30)
    routing = jax_ep.topk_router(logits, 2, topk_idx=topk_idx)
    np.testing.assert_array_equal(routing.topk_idx, topk_idx)
    np.testing.assert_allclose(routing.topk_weights, want, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int16, jnp.uint8, jnp.uint32])
def test_load_balancing_loss_ids_of_other_integers(dtype):
    scores, ids = jnp.ones((4, 40_000)), jnp.array([[0], [1], [2], [100]])
    want = jax_ep.load_balancing_loss(scores, ids)
    assert jax_ep.load_balancing_loss(scores, ids.astype(dtype)) == want


def test_topk_router_replay_ids_out_of_range():
    """Traced ids cannot be checked; they count as no expert, as in every operation."""
    logits, bad, none = jnp.ones((3, 4)), np.array([[0, 9], [4, -5], [2, 1]]), np.array([[0, -1], [-1, -1], [2, 1]])

    @jax.jit
    def weights(logits, topk_idx):
        return jax_ep.topk_router(logits, 2, topk_idx=topk_idx).topk_weights

    pulls = []
    for ids in (bad, none):
        found, pull = jax.vjp(weights, logits, ids.astype(np.int32))
        pulls.append((found, pull(found)[0]))
    jax.tree.map(np.testing.assert_array_equal, *pulls)
    assert np.isfinite(pulls[0][1]).all()


@pytest.mark.parametrize(
    ("router", "topk_idx", "message"),
    [
        (Router(), np.zeros((5, 3), np.int32), "K of topk_idx"),
        (Router(), np.zeros((4, 2), np.int32), "topk_idx"),
        (Router(), np.full((5, 2), 9, np.int32), "topk_idx"),
        (Router("sparsemixer"), np.zeros((5, 2), np.int32), "leave topk_idx out"),
    ],
)
def test_topk_router_replay_errors(router, topk_idx, message):
    with pytest.raises(ValueError, match=message):
        jax_ep.topk_router(np.zeros((5, 4), np.float32), 2, router=router, topk_idx=topk_idx)


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.slow(unless={"num_ranks": [4]})
def test_moe_replays_the_routing_of_another_pass(num_ranks, rng):
    mesh = harness.make_mesh((num_ranks,), ("expert",))
    router = Router(renormalize=False, num_identity_experts=4)
    layer = MoE(16, 8, 4, 2, router=router, dtype=jnp.float32, mesh=mesh, rngs=nnx.Rngs(0))
    x, other = (rng.standard_normal((3, 5, 16)).astype(np.float32) for _ in range(2))
    y, metrics = layer(x)
    assert metrics.topk_idx.shape == (3, 5, 2)
    again, same = layer(x, topk_idx=metrics.topk_idx)
    np.testing.assert_array_equal(again, y)
    moved, replayed = layer(other, topk_idx=metrics.topk_idx)
    np.testing.assert_array_equal(replayed.topk_idx, metrics.topk_idx)
    np.testing.assert_array_equal(replayed.load, same.load)
    assert not np.array_equal(moved, layer(other)[0])
    with pytest.raises(ValueError, match=r"MoE: topk_idx has shape \(5, 2\), expected rank 3, \[3, 5, 2\]"):
        layer(x, topk_idx=metrics.topk_idx[0])
    with pytest.raises(TypeError, match="MoE: topk_idx has dtype int8, expected int32"):
        layer(x, topk_idx=metrics.topk_idx.astype(jnp.int8))
    for bad in (8, 2**33, -2):  # int64 ids of NumPy do not wrap.
        with pytest.raises(ValueError, match=r"MoE: topk_idx contains .*, expected ids in \[0, 8\)"):
            layer(x, topk_idx=np.full((3, 5, 2), bad))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("balance", [None, jax_ep.Balance(1.0, 1)])
@pytest.mark.parametrize("num_tokens", [16, 11])  # the layer pads 11
@pytest.mark.slow(unless={"num_tokens": [11], "kind": ["Explicit"]})
def test_moe_replays_other_experts_on_a_mesh(kind, balance, num_tokens, rng):
    """Output, losses and gradients of a rematerialized layer equal those in float64; most tokens go to two experts."""
    mesh = harness.make_mesh((2, 2), ("data", "expert"), getattr(jax.sharding.AxisType, kind))
    x = rng.standard_normal((num_tokens, 16))
    topk_idx = np.argsort(rng.random((num_tokens, 8)) - 2 * (np.arange(8) < 2), axis=1)[:, :3].astype(np.int32)
    topk_idx[rng.random(topk_idx.shape) < 0.1] = -1
    topk_idx[0] = 0, 1, 2

    @nnx.remat
    def run(layer, x):
        return layer(x, topk_idx=topk_idx)

    def loss(layer, x):
        y, metrics = run(layer, x)
        return jnp.sum(jnp.sin(y)) + metrics.load_balancing_loss + metrics.router_z_loss, (y, metrics)

    with jax.set_mesh(mesh):
        options = {"router": Router("sigmoid"), "balance": balance, "axes": MeshAxes(batch="data")}
        layer = MoE(16, 24, 8, 3, dtype=jnp.float32, **options, rngs=nnx.Rngs(0))
        run_both = nnx.jit(nnx.grad(loss, argnums=(0, 1), has_aux=True))
        gradients, (y, metrics) = run_both(layer, jnp.asarray(x, jnp.float32))
    names = ("router", "w_gate_up", "w_down")
    weights = {name: np.asarray(getattr(layer, name)[...], np.float64) for name in names}
    x = x.astype(np.float32).astype(np.float64)
    want = sigmoid_layer(x, topk_idx, **weights)
    for got, exact in zip((y, metrics.load_balancing_loss, metrics.router_z_loss), want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(metrics.topk_idx, topk_idx)

    def exact_loss(x, *weights):
        y, balance, z_loss = sigmoid_layer(x, topk_idx, *weights)
        return np.sin(y).sum() + balance + z_loss

    found = [gradients[1], *(gradients[0][name][...] for name in names)]
    arrays = [x, *weights.values()]
    for i, (got, array) in enumerate(zip(found, arrays, strict=True)):
        step = 1e-6 * rng.standard_normal(array.shape)
        high, low = (exact_loss(*arrays[:i], array + sign * step, *arrays[i + 1 :]) for sign in (1, -1))
        np.testing.assert_allclose(np.sum(np.asarray(got) * step) / 1e-6, (high - low) / 2e-6, rtol=2e-3, atol=2e-3)


def test_moe_names_itself_in_errors_of_its_router():
    mesh = harness.make_mesh((1,), ("expert",))
    layer = MoE(16, 8, 4, 2, router=Router("sparsemixer"), mesh=mesh, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^MoE: .*leave topk_idx out"):
        layer(jnp.ones((2, 16)), topk_idx=jnp.zeros((2, 2), jnp.int32))
    layer = MoE(16, 8, 4, 2, router=Router(selection_bias=True), mesh=mesh, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^MoE: load has shape \(5,\)"):
        layer.update_bias(jnp.ones(5))


def test_moe_metrics_summary():
    load = jnp.array([[4, 4, 4, 4], [16, 0, 0, 0], [8, 8, 0, 0]])
    nothing = jnp.zeros(3)
    metrics = MoEMetrics(load=load, dropped=jnp.array([0, 4, 0]), load_balancing_loss=nothing, router_z_loss=nothing)
    found = {name: np.asarray(value).tolist() for name, value in metrics.summary(num_ranks=2).items()}
    assert found["load"] == [1, 4, 2] and found["rank_load"] == [1, 2, 2]
    assert found["dead_experts"] == [0, 3, 2] and found["dropped_share"] == [0, 0.25, 0]
    np.testing.assert_allclose(found["entropy"], [1, 0, 0.5], atol=1e-6)
    assert "rank_load" not in metrics.summary()
    found = metrics.summary(num_ranks=3, num_identity_experts=1)  # of loads 4 4 4, 16 0 0 and 8 8 0
    np.testing.assert_allclose(found["rank_load"], [1, 3, 1.5])
    found = metrics.summary(num_ranks=2, num_identity_experts=1, num_stored_experts=4)  # two, and one of three
    np.testing.assert_allclose(found["rank_load"], [4 / 3, 2, 2])
    for stored in (2, 5):
        with pytest.raises(ValueError, match=rf"num_stored_experts={stored}, expected .*num_stored_experts=moe.num"):
            metrics.summary(2, num_identity_experts=1, num_stored_experts=stored)
    for num_ranks, num_identity_experts in ((3, 0), (2, 1), (1, 4), (1, 5)):
        with pytest.raises(
            ValueError, match=r"MoEMetrics.summary: num_ranks=. of 4 experts with num_identity_experts="
        ):
            metrics.summary(num_ranks, num_identity_experts=num_identity_experts)
    for wrong, kind in ((-1, ValueError), (1.0, TypeError), (None, TypeError)):
        with pytest.raises(kind, match=r"^MoEMetrics.summary: num_identity_experts=.*expected"):
            metrics.summary(num_identity_experts=wrong)


@pytest.mark.parametrize("num_experts", [1, 2, 4])
def test_identity_experts_leave_one_that_computes(num_experts):
    router = Router(num_identity_experts=num_experts)
    with pytest.raises(ValueError, match=f"topk_router: {num_experts} experts with num_identity_experts={num_experts}"):
        jax_ep.topk_router(jnp.ones((2, num_experts)), 1, router=router)
