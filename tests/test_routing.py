"""topk_router, sparsemixer_router and identity_experts against plain NumPy versions of the published models."""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import finite_differences
import jax_ep
from harness import make_mesh
from jax_ep.routing import identity_experts

ON_GPU = jax.default_backend() == "gpu"  # Sums over experts can have another order in another program there.
STATIC = ("k", "router")
topk_router = jax.jit(jax_ep.topk_router, static_argnames=STATIC)  # One compilation instead of one per operation.
sparsemixer_router = jax.jit(jax_ep.routing.sparsemixer_router)


def _softmax(logits):
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def _sigmoid(logits):
    return 1.0 / (1.0 + np.exp(-logits))


def _largest(values, k):
    """Return positions of the k largest values of each row, best first; ties go to the lower position."""
    return np.argsort(-values, axis=-1, kind="stable")[..., :k]


def published(logits, k, score=_softmax, groups=(1, 1, 1), scale=1.0, is_normalized=True, bias=0.0):
    """Return ids, weights and scores; `groups`: number, chosen ones, and experts whose scores rank a group."""
    scores, (num_groups, num_chosen, num_best) = score(logits), groups
    width = logits.shape[1] // num_groups
    idx = np.empty((len(logits), k), np.int64)
    for t, row in enumerate(scores + bias):
        ranks = [sum(sorted(row[width * g : width * (g + 1)])[-num_best:]) for g in range(num_groups)]
        chosen = sorted(_largest(np.array(ranks), num_chosen))
        allowed = np.array([e for g in chosen for e in range(width * g, width * (g + 1))])
        idx[t] = allowed[_largest(row[allowed], k)]
    weights = np.take_along_axis(scores, idx, axis=-1)
    return idx, scale * weights / (weights.sum(axis=-1, keepdims=True) if is_normalized else 1), scores


deepseek_v3 = partial(published, k=8, score=_sigmoid, groups=(8, 4, 2), scale=2.5)
PLAIN = jax_ep.Router(renormalize=False)
DEEPSEEK_V2 = jax_ep.Router(renormalize=False, num_groups=8, topk_groups=3, group_score="max", scale=16.0)
DEEPSEEK_V3 = jax_ep.Router("sigmoid", num_groups=8, topk_groups=4, group_score="top2_sum", scale=2.5)
V3_ROUTER = partial(topk_router, k=8, router=DEEPSEEK_V3)
V2 = partial(published, k=6, groups=(8, 3, 1), scale=16.0, is_normalized=False)
LLAMA4 = partial(published, k=1, score=_sigmoid, is_normalized=False)
# name: (number of experts, the call under test, the NumPy model); each is called with logits alone
MODELS = {
    "mixtral": (8, partial(topk_router, k=2), partial(published, k=2)),
    "qwen3": (128, partial(topk_router, k=8), partial(published, k=8)),
    "qwen3-unnormalised": (128, partial(topk_router, k=8, router=PLAIN), partial(published, k=8, is_normalized=False)),
    "deepseek-v2": (160, partial(topk_router, k=6, router=DEEPSEEK_V2), V2),
    "deepseek-v3-no-bias": (256, V3_ROUTER, deepseek_v3),
    "gpt-oss": (32, partial(topk_router, k=4), partial(published, k=4)),
    "llama4": (16, partial(topk_router, k=1, router=jax_ep.Router("sigmoid", renormalize=False)), LLAMA4),
}


def _logits(kind, num_tokens, num_experts, seed=0):
    """Draw logits: with `ties` most rows have equal ones; `normal` ones differ by more than the rounding of scores."""
    rng = np.random.default_rng(seed)
    step = {"normal": 64.0, "ties": 2.0}[kind]
    return (np.round(rng.normal(size=(num_tokens, num_experts)) * 2.0 * step) / step).astype(np.float32)


def _check(routing, expected):
    idx, weights, scores = expected
    assert routing.topk_idx.dtype == jnp.int32
    assert routing.topk_weights.dtype == jnp.float32
    assert routing.scores.dtype == jnp.float32
    np.testing.assert_array_equal(routing.topk_idx, idx)
    np.testing.assert_allclose(routing.topk_weights, weights, rtol=3e-6, atol=1e-12)
    np.testing.assert_allclose(routing.scores, scores, rtol=3e-6, atol=1e-12)


@pytest.mark.parametrize("kind", ["normal", "ties"])
@pytest.mark.parametrize("name", MODELS)
def test_router_equals_the_published_model(name, kind):
    num_experts, router, model = MODELS[name]
    logits = _logits(kind, 48, num_experts)
    _check(router(jnp.asarray(logits)), model(logits.astype(np.float64)))


@pytest.mark.parametrize("bias_scale", [0.05, 1.0, -30.0], ids=["small", "large", "all-negative"])
def test_bias_selects_but_does_not_weigh(bias_scale):
    # All negative: biased scores below zero must still beat experts of groups that were not chosen.
    logits = _logits("normal", 48, 64)
    bias = (bias_scale * np.random.default_rng(1).uniform(size=64)).astype(np.float32)
    expected = deepseek_v3(logits.astype(np.float64), bias=bias.astype(np.float64))
    unbiased, _, _ = deepseek_v3(logits.astype(np.float64))
    assert (expected[0] != unbiased).any(), "the bias must change the selection for this test to mean anything"
    _check(V3_ROUTER(jnp.asarray(logits), bias=jnp.asarray(bias)), expected)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("group_score", ["top2_sum", "max"])
def test_experts_whose_bias_is_minus_infinity_are_never_chosen(group_score, explicit):
    """Where groups of a token have fewer than k others, they alone are chosen, and the other places are empty."""
    logits, bias = _logits("normal", 8, 12), np.full(12, -np.inf, np.float32)
    bias[[4, 10, 11]] = -2.0, -3.0, -3.0
    if explicit:
        mesh = make_mesh((2,), ("data",), jax.sharding.AxisType.Explicit)
        logits = jax.device_put(logits, jax.NamedSharding(mesh, jax.P("data")))
    router = jax_ep.Router("sigmoid", num_groups=4, topk_groups=3, group_score=group_score)
    gradient, routing = jax.jit(
        jax.grad(
            lambda v: ((r := topk_router(v, 4, router=router, bias=bias)).topk_weights[:, 0].sum(), r), has_aux=True
        )
    )(logits)
    idx, weights, scores = map(np.asarray, routing)
    allowed = np.array([4, 10, 11])
    want = allowed[_largest((scores + bias)[:, allowed], 3)]
    np.testing.assert_array_equal(idx, np.c_[want, np.full(8, -1)])
    chosen = np.take_along_axis(scores, want, axis=1)
    np.testing.assert_allclose(weights[:, :3], chosen / chosen.sum(axis=1, keepdims=True), rtol=3e-6)
    np.testing.assert_array_equal(weights[:, 3], np.zeros(8))
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(np.asarray(gradient)[:, np.isinf(bias)], 0)
    best_group = dataclasses.replace(router, topk_groups=1)
    wanted = np.where(want[:, 0] == 4, 4, 10) if group_score == "max" else np.full(8, 10)
    alone = np.asarray(topk_router(logits, 2, router=best_group, bias=bias).topk_idx)
    np.testing.assert_array_equal(alone.max(axis=1) // 3, wanted // 3)
    nothing = topk_router(logits, 2, router=best_group, bias=np.full(12, -np.inf, np.float32))
    np.testing.assert_array_equal(nothing.topk_idx, np.full((8, 2), -1))
    np.testing.assert_array_equal(nothing.topk_weights, np.zeros((8, 2)))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_scores_that_round_to_the_same_number_keep_the_order_of_their_logits(score):
    logits = jnp.asarray([[30.0, 200.0, 40.0, 35.0], [-300.0, -290.0, 0.0, -280.0]], jnp.float32)
    routing = topk_router(logits, 3, router=jax_ep.Router(score))
    assert len(np.unique(routing.scores[int(score == "softmax")])) < 4, "the scores must be equal somewhere"
    np.testing.assert_array_equal(routing.topk_idx, [[1, 2, 3], [2, 3, 1]])


def test_groups_of_one_expert_sum_the_one_they_have():
    # E == num_groups: a group has no second best expert, so top2_sum and max agree.
    logits = jnp.asarray(_logits("normal", 9, 6))
    plain = topk_router(logits, 2)
    for score in ("top2_sum", "max"):
        routing = topk_router(logits, 2, router=jax_ep.Router(num_groups=6, topk_groups=3, group_score=score))
        np.testing.assert_array_equal(routing.topk_idx, plain.topk_idx)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow(unless={"name": ["deepseek-v3-no-bias"]})
def test_bfloat16_logits_are_computed_in_float32(name):
    num_experts, router, _ = MODELS[name]
    logits = jnp.asarray(_logits("normal", 48, num_experts)).astype(jnp.bfloat16)
    narrow, wide = router(logits), router(logits.astype(jnp.float32))
    np.testing.assert_array_equal(narrow.topk_idx, wide.topk_idx)
    for field in ("topk_idx", "topk_weights", "scores"):
        np.testing.assert_allclose(getattr(narrow, field), getattr(wide, field), rtol=ON_GPU * 1e-6, atol=0)
        assert getattr(narrow, field).dtype == getattr(wide, field).dtype


@pytest.mark.parametrize("router", [partial(jax_ep.topk_router, k=2), jax_ep.routing.sparsemixer_router])
def test_numpy_logits_of_float64_are_taken_like_float32(router):
    """Without `jax_enable_x64`, JAX arrays of them are float32; warnings are errors here."""
    logits = _logits("normal", 6, 8).astype(np.float64)
    for got, want in zip(router(logits), router(logits.astype(np.float32)), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_extreme_logits_stay_finite(score):
    logits = jnp.asarray([[1e30, -1e30, 3e4, 0.0], [-1e30, -1e30, -1e30, -1e30]], jnp.float32)
    routing = topk_router(logits, 2, router=jax_ep.Router(score))
    assert np.isfinite(routing.topk_weights).all()
    assert np.isfinite(routing.scores).all()
    route = partial(topk_router, k=2, router=jax_ep.Router(score))
    gradient = jax.jit(jax.grad(lambda values: route(values).topk_weights[:, 0].sum()))(logits)
    assert np.isfinite(gradient).all()


def test_router_under_vmap_and_jit():
    logits = jnp.asarray(_logits("ties", 24, 64)).reshape(3, 8, 64)
    together = jax.jit(jax.vmap(V3_ROUTER))(logits)
    for i in range(3):
        alone = V3_ROUTER(logits[i])
        np.testing.assert_array_equal(together.topk_idx[i], alone.topk_idx)
        np.testing.assert_allclose(together.topk_weights[i], alone.topk_weights, rtol=2e-6)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.slow(unless={"renormalize": [True]})
def test_weights_and_scores_are_differentiable_in_the_logits(score, renormalize):
    num_tokens, num_experts, k, scale = 5, 12, 3, 2.5
    logits = _logits("normal", num_tokens, num_experts)
    d_weights, d_scores = (
        np.random.default_rng(2).normal(size=(num_tokens, size)).astype(np.float32) for size in (k, num_experts)
    )
    router = jax_ep.Router(score, renormalize=renormalize, num_groups=4, topk_groups=2, scale=scale)
    routing = partial(topk_router, k=k, router=router)
    chosen = np.asarray(routing(jnp.asarray(logits)).topk_idx)

    def objective(values):  # The selection is piecewise constant, so it stays fixed here.
        scores = _softmax(values) if score == "softmax" else _sigmoid(values)
        weights = np.take_along_axis(scores, chosen, axis=1)
        if renormalize:
            weights = weights / weights.sum(axis=1, keepdims=True)
        return float((scale * weights * d_weights).sum() + (scores * d_scores).sum())

    def differentiated(values):
        weights, scores = routing(values)[1:]
        return jnp.sum(weights * d_weights) + jnp.sum(scores * d_scores)

    (expected,) = finite_differences.gradients(objective, [logits])
    actual = jax.jit(jax.grad(differentiated))(logits)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("renormalize", [True, False])
def test_no_gradient_reaches_the_bias(renormalize):
    logits = jnp.asarray(_logits("normal", 8, 64))

    def objective(bias):
        routing = V3_ROUTER(logits, bias=bias, router=dataclasses.replace(DEEPSEEK_V3, renormalize=renormalize))
        # Every float output, so that none of them leaks a gradient.
        return jnp.sum(routing.topk_weights**2) + jnp.sum(routing.scores**2)

    gradient = jax.jit(jax.grad(objective))(np.linspace(-0.1, 0.1, 64, dtype=np.float32))
    np.testing.assert_array_equal(gradient, np.zeros(64, np.float32))


def test_gradient_in_the_logits_ignores_the_bias_values():
    logits = jnp.asarray(_logits("normal", 8, 16))

    route = partial(topk_router, k=16, router=jax_ep.Router("sigmoid"))
    gradient = jax.jit(jax.grad(lambda values, bias: jnp.sum(route(values, bias=bias).topk_weights ** 2)))
    # k == E: the selected set is the same for every bias, only the order changes.
    biased = gradient(logits, np.linspace(-3.0, 3.0, 16, dtype=np.float32))
    np.testing.assert_allclose(biased, gradient(logits, None), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v2", "deepseek-v3-no-bias"])
@pytest.mark.slow(unless={"name": ["deepseek-v2"]})
def test_masked_tokens_have_no_experts_and_no_gradient(name):
    num_experts, router, _ = MODELS[name]
    logits = _logits("normal", 12, num_experts)
    mask = np.random.default_rng(4).uniform(size=12) < 0.6
    padded = np.where(mask[:, None], logits, np.float32(np.nan))
    padded[np.argmin(mask)] = np.inf
    alone = router(logits[mask])
    routing = jax.tree.map(np.asarray, router(padded, token_mask=mask))
    for got, want, nothing in zip(routing, alone, (-1, 0, 0), strict=True):
        np.testing.assert_array_equal(got[mask], want)
        np.testing.assert_array_equal(got[~mask], np.full_like(got[~mask], nothing))

    def objective(values, **options):
        routing = router(values, **options)
        return jnp.sum(routing.topk_weights**2) + jnp.sum(routing.scores**3)

    gradients = jax.jit(jax.grad(objective))
    gradient = np.asarray(gradients(padded, token_mask=mask))
    np.testing.assert_array_equal(gradient[~mask], np.zeros_like(gradient[~mask]))
    np.testing.assert_allclose(gradient[mask], gradients(logits[mask]), rtol=5e-6 if ON_GPU else 1e-6, atol=1e-9)


def sparsemixer(logits, jitter_eps, chosen=None):
    """Phi-3.5-MoE: two rounds of best or given experts; return ids, softmax of each round, and the best ids."""
    num_tokens, num_experts = logits.shape
    idx, best_idx, gates = np.empty((num_tokens, 2), int), np.empty((num_tokens, 2), int), []
    for t, row in enumerate(logits):
        free = list(range(num_experts))
        for r in range(2):
            best = max(free, key=lambda e: row[e])
            scale = {e: max(abs(row[e]), row[best]) for e in free}
            near = [e for e in free if row[best] - row[e] <= 2 * jitter_eps * scale[e]]
            gates.append(np.zeros(num_experts))
            gates[-1][near] = _softmax(row[near])
            best_idx[t, r], idx[t, r] = best, best if chosen is None else chosen[t, r]
            free.remove(idx[t, r])
    return idx, np.reshape(gates, (num_tokens, 2, num_experts)), best_idx


def sparsemixer_weights(idx, gates):
    return np.take_along_axis(gates, idx[:, :, None], axis=-1)[:, :, 0]


def sparsemixer_gradient(idx, gates, d_weights):
    """Return the gradient of weights before division: p_i (1 - p_i) at the expert, -p_i p_j at the others."""
    one_hot = np.eye(gates.shape[-1])[idx]
    return ((d_weights * sparsemixer_weights(idx, gates))[:, :, None] * (one_hot - gates)).sum(axis=1)


def _sparsemixer_logits(num_tokens):
    """Draw rows with positive and negative maxima, equal and zero logits, many of them near the best."""
    logits = _logits("normal", num_tokens, 16, seed=5)
    logits[::4] -= 9.0
    logits[1::4] = _logits("ties", num_tokens, 16, seed=6)[1::4]
    logits[0], logits[1] = 0.0, np.minimum(logits[1], 0.0)
    return logits


@pytest.mark.parametrize("jitter_eps", [2.0**-5, 0.25])
def test_sparsemixer_equals_the_published_model(jitter_eps):
    logits = _sparsemixer_logits(64)
    d_weights = np.random.default_rng(7).normal(size=(64, 2)).astype(np.float32)
    idx, gates, _ = sparsemixer(logits.astype(np.float64), jitter_eps)
    weights = sparsemixer_weights(idx, gates)
    assert (weights < 0.99).any(axis=0).all() and (weights > 0.99).any(axis=0).all()
    routing = sparsemixer_router(jnp.asarray(logits), jitter_eps=jitter_eps)
    _check(routing, (idx, weights, _softmax(logits.astype(np.float64))))
    gradient = jax.grad(lambda v: jnp.sum(sparsemixer_router(v, jitter_eps=jitter_eps).topk_weights * d_weights))
    gradient = jax.jit(gradient)
    want = sparsemixer_gradient(idx, gates, d_weights)
    np.testing.assert_allclose(gradient(jnp.asarray(logits)), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("key", [None, 4], ids=["best", "drawn"])
def test_sparsemixer_with_masked_experts(key):
    """A single remaining expert gets all weight in the first round and leaves 0 for the second; then both are 0."""
    logits = jnp.full((4, 5), -jnp.inf).at[0, 0].set(-3.0).at[1, 3].set(2.0).at[2, 1:3].set(jnp.array([1.0, 0.9]))
    key = None if key is None else jax.random.key(key)

    def objective(values):
        routing = sparsemixer_router(values, jitter_eps=0.25, key=key)
        return jnp.sum(routing.topk_weights * jnp.array([[3.0, 5.0]])), routing

    gradient, routing = jax.jit(jax.grad(objective, has_aux=True))(logits)
    idx, weights = np.asarray(routing.topk_idx), np.asarray(routing.topk_weights)
    np.testing.assert_array_equal(idx[[0, 1, 3]], [[0, -1], [3, -1], [-1, -1]])
    np.testing.assert_array_equal(weights[[0, 1, 3]], [[1, 0], [1, 0], [0, 0]])
    assert sorted(idx[2]) == [1, 2] and weights[2, 1] == 1
    share = 1 / (1 + np.exp(-0.1)) * (1 - 1 / (1 + np.exp(-0.1)))
    want = np.zeros((4, 5))
    want[2, idx[2]] = 3 * share, -3 * share
    np.testing.assert_allclose(gradient, want, rtol=1e-5, atol=1e-7)


def test_sparsemixer_draws_have_the_values_and_gradients_of_the_published_model():
    logits, jitter_eps = _sparsemixer_logits(256), 0.25
    d_weights = np.random.default_rng(8).normal(size=(256, 2)).astype(np.float32)

    def objective(values):
        routing = sparsemixer_router(values, jitter_eps=jitter_eps, key=jax.random.key(1))
        return jnp.sum(routing.topk_weights * d_weights), routing

    gradient, routing = jax.jit(jax.grad(objective, has_aux=True))(logits)
    chosen = np.asarray(routing.topk_idx)
    assert (chosen[:, 0] != chosen[:, 1]).all()
    _, gates, best_idx = sparsemixer(logits.astype(np.float64), jitter_eps, chosen)
    weights = sparsemixer_weights(chosen, gates)
    assert (weights > 0).all(), "an expert far from the best was drawn"
    share = np.asarray(routing.topk_weights) / weights
    whole, third = np.isclose(share, 1, rtol=1e-5), np.isclose(share, 1 / 3, rtol=1e-5)
    assert (whole | third).all() and whole[chosen == best_idx].all()
    for r in range(2):
        others = (chosen != best_idx)[:, r]
        assert (chosen == best_idx)[:, r].any() and whole[others, r].any() and third[others, r].any()
    np.testing.assert_allclose(gradient, sparsemixer_gradient(chosen, gates, d_weights), rtol=1e-4, atol=1e-6)


def test_sparsemixer_draws_experts_by_their_softmax():
    row, num_draws = np.array([1.0, 0.9, -2.0, 0.6, 0.2]), 20_000
    logits = jnp.tile(jnp.asarray(row, jnp.float32)[None], (num_draws, 1))
    routing = sparsemixer_router(logits, jitter_eps=0.25, key=jax.random.key(2))
    first, second = np.asarray(routing.topk_idx).T
    _, gates, _ = sparsemixer(row[None], 0.25)
    assert gates[0, 0, 2] == gates[0, 0, 4] == 0

    def is_share(events, probability):
        deviation = np.sqrt(probability * (1 - probability) / len(events))
        return abs(events.mean() - probability) <= 5 * deviation

    for expert in range(5):
        assert is_share(first == expert, gates[0, 0, expert])
        after_third = sparsemixer(row[None], 0.25, np.array([[3, 0]]))[1][0, 1]
        assert is_share(second[first == 3] == expert, after_third[expert])
    for round_weights, chosen, best in zip(routing.topk_weights.T, (first, second), (0, 1), strict=True):
        others = np.asarray(round_weights)[(chosen == 3) & (first != best)]
        assert is_share(others == others.max(), 0.25)


def test_sparsemixer_draws_of_the_published_code_have_these_values_and_gradients():
    """Values of the oracle above for draws of Hugging Face's router in training mode (`data/make_golden_blocks.py`)."""
    golden = np.load(Path(__file__).parent / "data" / "golden_blocks.npz")
    names = ("logits", "dw", "topk_idx", "topk_weights", "dlogits")
    logits, d_weights, chosen, topk_weights, d_logits = (golden[f"phimoe_training/{name}"] for name in names)
    _, gates, best_idx = sparsemixer(logits.astype(np.float64), 0.25, chosen)
    share = topk_weights / sparsemixer_weights(chosen, gates)
    whole, third = np.isclose(share, 1, rtol=1e-5), np.isclose(share, 0.3333, rtol=1e-5)
    assert (whole | third).all() and whole[chosen == best_idx].all()
    assert whole[chosen != best_idx].any() and third.any()
    np.testing.assert_allclose(d_logits, sparsemixer_gradient(chosen, gates, d_weights), rtol=1e-5, atol=1e-6)


def test_sparsemixer_in_other_precisions_and_transformations():
    logits = jnp.asarray(_sparsemixer_logits(24)).astype(jnp.bfloat16)
    narrow, wide = sparsemixer_router(logits), sparsemixer_router(logits.astype(jnp.float32))
    for got, want in zip(narrow, wide, strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.dtype == want.dtype
    together = jax.vmap(sparsemixer_router)(logits.reshape(3, 8, 16))
    np.testing.assert_array_equal(together.topk_idx.reshape(24, 2), wide.topk_idx)
    same = [sparsemixer_router(logits, key=jax.random.key(seed)).topk_weights for seed in (3, 3)]
    np.testing.assert_array_equal(*same)


def test_topk_router_with_sparsemixer():
    """It equals `sparsemixer_router` without draws, and accepts a mask."""
    logits, mask = jnp.asarray(_sparsemixer_logits(24)), jnp.arange(24) % 5 > 0
    router, want = jax_ep.Router("sparsemixer"), sparsemixer_router(logits)
    for got, expected in zip(topk_router(logits, 2, router=router), want, strict=True):
        np.testing.assert_array_equal(got, expected)
    masked = topk_router(jnp.where(mask[:, None], logits, jnp.nan), 2, router=router, token_mask=mask)
    for got, expected, nothing in zip(masked, want, (-1, 0, 0), strict=True):
        np.testing.assert_array_equal(got, np.where(mask[:, None], expected, nothing))
    with pytest.raises(ValueError, match=r"topk_router: k=3 of 16 experts with Router\('sparsemixer'\), expected 2"):
        topk_router(logits, 3, router=router)
    with pytest.raises(ValueError, match=r"topk_router: bias with Router\('sparsemixer'\), expected none"):
        topk_router(logits, 2, router=router, bias=jnp.zeros(16))


@pytest.mark.parametrize("num_experts", [1, 5, 8])
def test_identity_experts_are_taken_out(num_experts):
    rng = np.random.default_rng(9)
    router, mask = jax_ep.Router(renormalize=False, scale=6.0), jnp.arange(32) < 29  # The others have no experts.
    routing = topk_router(jnp.asarray(_logits("normal", 32, 8)), 3, router=router, token_mask=mask)
    idx, weights, scores = map(np.asarray, routing)
    is_identity = idx >= num_experts
    d_weights, d_weight = (rng.normal(size=shape).astype(np.float32) for shape in ((32, 3), (32,)))

    def call(weights):
        rest, weight = identity_experts(routing._replace(topk_weights=weights), num_experts)
        return (rest.topk_weights, weight), rest

    (rest_weights, weight), pull, rest = jax.vjp(call, routing.topk_weights, has_aux=True)
    np.testing.assert_array_equal(rest.topk_idx, np.where(is_identity, -1, idx))
    np.testing.assert_array_equal(rest_weights, np.where(is_identity, 0, weights))
    np.testing.assert_array_equal(rest.scores, scores)
    assert weight.dtype == jnp.float32
    np.testing.assert_allclose(weight, (weights.astype(np.float64) * is_identity).sum(axis=1), rtol=1e-6)
    (gradient,) = pull((jnp.asarray(d_weights), jnp.asarray(d_weight)))
    np.testing.assert_array_equal(gradient, np.where(is_identity, d_weight[:, None], d_weights))


def _weight_gradient(router):
    return jax.grad(lambda logits: jnp.sum(jnp.sin(router(logits).topk_weights)))(jnp.asarray(_logits("normal", 6, 8)))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_one_renormalized_expert_has_no_gradient(score):
    """The weight is constant, so differentiating it is an error; inference and the losses work."""
    with pytest.raises(TypeError, match=r"topk_router: renormalize=True with one expert .*renormalize=False"):
        _weight_gradient(lambda logits: topk_router(logits, 1, router=jax_ep.Router(score)))
    free = jax_ep.Router(score, renormalize=False)
    assert np.abs(_weight_gradient(lambda logits: topk_router(logits, 1, router=free))).max() > 0
    logits = jnp.asarray(_logits("normal", 6, 8))
    weights = topk_router(logits, 1, router=jax_ep.Router(scale=2.0)).topk_weights
    np.testing.assert_allclose(weights, 2.0, rtol=1e-6)

    def loss(logits):
        scores = topk_router(logits, 1, router=jax_ep.Router(score)).scores
        return jax_ep.router_z_loss(logits) + jnp.sum(scores**2)

    assert np.abs(jax.jit(jax.grad(loss))(logits)).max() > 0


@pytest.mark.parametrize("renormalize", [True, False])
def test_router_of_one_expert_without_gradient(renormalize):
    """A softmax over one logit is always 1; a sigmoid has a gradient."""
    router = jax_ep.Router(renormalize=renormalize)
    with pytest.raises(TypeError, match=r"topk_router: (renormalize=True with one expert|the softmax over one expert)"):
        _weight_gradient(lambda logits: topk_router(logits[:, :1], 1, router=router))
    sigmoid = jax_ep.Router("sigmoid", renormalize=False)
    assert np.abs(_weight_gradient(lambda logits: topk_router(logits[:, :1], 1, router=sigmoid))).max() > 0


@pytest.mark.parametrize("jitter_eps", [0, 1e-9])
def test_sparsemixer_without_rivals_has_no_gradient(jitter_eps):
    with pytest.raises(TypeError, match=r"sparsemixer_router: jitter_eps below .*pass a larger one"):
        _weight_gradient(lambda logits: jax_ep.routing.sparsemixer_router(logits, jitter_eps=jitter_eps))
    _weight_gradient(jax_ep.routing.sparsemixer_router)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
@pytest.mark.parametrize("num_experts", [7, 60, 384])
def test_update_router_bias_mean_load(num_experts, dtype, rng):
    """Experts with exactly the mean load keep their bias."""
    load = np.full((2, num_experts), 3)
    load[1, rng.permutation(num_experts)[:3]] = 1, 4, 4
    bias = jax_ep.update_router_bias(jnp.zeros(load.shape), jnp.asarray(load, dtype), rate=0.5)
    np.testing.assert_array_equal(np.asarray(bias), 0.5 * np.sign(3 - load))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        *(
            ({"bias": jnp.zeros(3, dtype)}, TypeError, "bias has dtype .*, expected float32 or float64")
            for dtype in (jnp.int32, jnp.bfloat16, jnp.float16, bool)
        ),
        *(({"load": np.ones(3, dtype)}, TypeError, "load has dtype .*, expected") for dtype in (bool, complex)),
        ({"load": [6, 2, 1]}, TypeError, "load is a list"),
        *(
            ({"bias": jnp.zeros(bias), "load": jnp.ones(load, jnp.int32)}, ValueError, "load has shape")
            for bias, load in (((4,), (3,)), ((4,), (3, 4)), ((2, 4), (4,)), ((4,), (1,)))
        ),
        *(({"rate": rate}, TypeError, "rate is .*, expected") for rate in (True, np.complex64(1))),
        *(
            ({"rate": rate}, ValueError, "rate=.*, expected a finite number from 0 on")
            for rate in (-1e-3, float("nan"), float("inf"))
        ),
    ],
)
def test_update_router_bias_mistakes(changes, error, message):
    with pytest.raises(error, match=f"^update_router_bias: {message}"):
        jax_ep.update_router_bias(**{"bias": jnp.zeros(3), "load": np.array([6, 2, 1])} | changes)
