"""topk_router against plain NumPy versions of the published models."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import finite_differences
import jax_ep

STATIC = ("k", "score", "renormalize", "num_groups", "topk_groups", "group_score", "scale")
topk_router = jax.jit(jax_ep.topk_router, static_argnames=STATIC)  # one compilation instead of one per operation

# --- the models, each written out in NumPy float64 from its own definition -----------------------------------------


def _softmax(logits):
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def _sigmoid(logits):
    return 1.0 / (1.0 + np.exp(-logits))


def _largest(values, k):
    """Positions of the k largest values of each row, best first, the lower position first among equals."""
    return np.argsort(-values, axis=-1, kind="stable")[..., :k]


def mixtral(logits):
    """Mixtral 8x7B: softmax over all experts, the two best, weights renormalised."""
    probabilities = _softmax(logits)
    idx = _largest(probabilities, 2)
    weights = np.take_along_axis(probabilities, idx, axis=-1)
    return idx, weights / weights.sum(axis=-1, keepdims=True), probabilities


def qwen3(logits, renormalize=True):
    """Qwen3-MoE: softmax, top 8 of 128, `norm_topk_prob`."""
    probabilities = _softmax(logits)
    idx = _largest(probabilities, 8)
    weights = np.take_along_axis(probabilities, idx, axis=-1)
    return idx, weights / weights.sum(axis=-1, keepdims=True) if renormalize else weights, probabilities


def deepseek_v2(logits):
    """DeepSeek-V2: 160 experts in 8 groups, 3 groups by their best expert, top 6, no renormalisation, times 16."""
    scores = _softmax(logits)
    idx = np.empty((len(logits), 6), np.int64)
    for t, row in enumerate(scores):
        groups = _largest(np.array([row[20 * g : 20 * g + 20].max() for g in range(8)]), 3)
        allowed = np.array([e for g in sorted(groups) for e in range(20 * g, 20 * g + 20)])
        idx[t] = allowed[_largest(row[allowed], 6)]
    return idx, np.take_along_axis(scores, idx, axis=-1) * 16.0, scores


def deepseek_v3(logits, bias):
    """DeepSeek-V3: sigmoid, selection by biased scores in the 4 of 8 groups with the best pairs, top 8, times 2.5."""
    scores = _sigmoid(logits)
    width = logits.shape[1] // 8
    idx = np.empty((len(logits), 8), np.int64)
    for t, row in enumerate(scores + bias):
        group_scores = [sum(sorted(row[width * g : width * (g + 1)])[-2:]) for g in range(8)]
        groups = _largest(np.array(group_scores), 4)
        allowed = np.array([e for g in sorted(groups) for e in range(width * g, width * (g + 1))])
        idx[t] = allowed[_largest(row[allowed], 8)]
    weights = np.take_along_axis(scores, idx, axis=-1)
    return idx, 2.5 * weights / (weights.sum(axis=-1, keepdims=True) + 1e-20), scores


V3_ROUTER = partial(topk_router, k=8, score="sigmoid", num_groups=8, topk_groups=4, group_score="top2_sum", scale=2.5)
V2_ROUTER = partial(topk_router, k=6, renormalize=False, num_groups=8, topk_groups=3, group_score="max", scale=16.0)
# name: (number of experts, the call under test, the NumPy model); each is called with logits alone
MODELS = {
    "mixtral": (8, partial(topk_router, k=2), mixtral),
    "qwen3": (128, partial(topk_router, k=8), qwen3),
    "qwen3-unnormalised": (128, partial(topk_router, k=8, renormalize=False), partial(qwen3, renormalize=False)),
    "deepseek-v2": (160, V2_ROUTER, deepseek_v2),
    "deepseek-v3-no-bias": (256, V3_ROUTER, partial(deepseek_v3, bias=0.0)),
}


def _logits(kind, num_tokens, num_experts, seed=0):
    """`ties`: multiples of 1/2, so that most rows have equal logits; `normal`: multiples of 1/64, so that logits
    which differ do so by more than the rounding of float32 scores."""
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
    # all-negative: biased scores below zero must still beat the experts of the groups that were not chosen
    logits = _logits("normal", 48, 64)
    bias = (bias_scale * np.random.default_rng(1).uniform(size=64)).astype(np.float32)
    expected = deepseek_v3(logits.astype(np.float64), bias.astype(np.float64))
    unbiased, _, _ = deepseek_v3(logits.astype(np.float64), 0.0)
    assert (expected[0] != unbiased).any(), "the bias must change the selection for this test to mean anything"
    _check(V3_ROUTER(jnp.asarray(logits), bias=jnp.asarray(bias)), expected)


def test_softmax_router_takes_a_bias_too():
    logits = jnp.zeros((3, 6), jnp.float32)
    bias = jnp.asarray([0.0, 0.0, 3.0, 0.0, 2.0, 1.0], jnp.float32)
    routing = topk_router(logits, 2, bias=bias)
    np.testing.assert_array_equal(routing.topk_idx, [[2, 4]] * 3)
    np.testing.assert_allclose(routing.topk_weights, np.full((3, 2), 0.5), rtol=1e-6)


def test_equal_logits_take_the_lowest_indices():
    routing = topk_router(jnp.full((4, 12), 0.25, jnp.float32), 5)
    np.testing.assert_array_equal(routing.topk_idx, [[0, 1, 2, 3, 4]] * 4)
    limited = topk_router(jnp.full((4, 12), 0.25, jnp.float32), 5, num_groups=4, topk_groups=2)
    np.testing.assert_array_equal(limited.topk_idx, [[0, 1, 2, 3, 4]] * 4)


def test_every_expert_may_be_chosen():
    logits = _logits("normal", 7, 5)
    routing = topk_router(jnp.asarray(logits), 5)
    np.testing.assert_array_equal(routing.topk_idx, _largest(logits, 5))
    np.testing.assert_allclose(np.sum(routing.topk_weights, axis=1), np.ones(7), rtol=1e-6)


def test_groups_of_one_expert_sum_the_one_they_have():
    # E == num_groups: a group has no second best expert, so top2_sum and max agree
    logits = jnp.asarray(_logits("normal", 9, 6))
    both = [
        topk_router(logits, 2, num_groups=6, topk_groups=3, group_score=group_score)
        for group_score in ("top2_sum", "max")
    ]
    plain = topk_router(logits, 2)
    for routing in both:
        np.testing.assert_array_equal(routing.topk_idx, plain.topk_idx)


def test_the_two_group_scores_differ_where_they_should():
    # group 0 holds the best expert, group 1 the best pair
    logits = jnp.log(jnp.asarray([[0.40, 0.02, 0.30, 0.28]], jnp.float32))
    by_sum = topk_router(logits, 2, num_groups=2, topk_groups=1, group_score="top2_sum")
    by_max = topk_router(logits, 2, num_groups=2, topk_groups=1, group_score="max")
    np.testing.assert_array_equal(by_sum.topk_idx, [[2, 3]])
    np.testing.assert_array_equal(by_max.topk_idx, [[0, 1]])


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_logits_are_computed_in_float32(name):
    num_experts, router, _ = MODELS[name]
    logits = jnp.asarray(_logits("normal", 16, num_experts)).astype(jnp.bfloat16)
    narrow, wide = router(logits), router(logits.astype(jnp.float32))
    for field in ("topk_idx", "topk_weights", "scores"):
        np.testing.assert_array_equal(getattr(narrow, field), getattr(wide, field))
        assert getattr(narrow, field).dtype == getattr(wide, field).dtype


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_extreme_logits_stay_finite(score):
    logits = jnp.asarray([[1e30, -1e30, 3e4, 0.0], [-1e30, -1e30, -1e30, -1e30]], jnp.float32)
    routing = topk_router(logits, 2, score=score)
    assert np.isfinite(routing.topk_weights).all()
    assert np.isfinite(routing.scores).all()
    gradient = jax.grad(lambda values: topk_router(values, 2, score=score).topk_weights[:, 0].sum())(logits)
    assert np.isfinite(gradient).all()


def test_router_under_vmap_and_jit():
    logits = jnp.asarray(_logits("ties", 24, 64)).reshape(3, 8, 64)
    together = jax.jit(jax.vmap(V3_ROUTER))(logits)
    for i in range(3):
        alone = V3_ROUTER(logits[i])
        np.testing.assert_array_equal(together.topk_idx[i], alone.topk_idx)
        np.testing.assert_allclose(together.topk_weights[i], alone.topk_weights, rtol=2e-6)


# --- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_weights_are_differentiable_in_the_logits(score, renormalize):
    num_tokens, num_experts, k, scale = 5, 12, 3, 2.5
    logits = _logits("normal", num_tokens, num_experts)
    cotangent = np.random.default_rng(2).normal(size=(num_tokens, k)).astype(np.float32)
    routing = partial(topk_router, k=k, score=score, renormalize=renormalize, num_groups=4, topk_groups=2, scale=scale)
    chosen = np.asarray(routing(jnp.asarray(logits)).topk_idx)

    def objective(values):  # the selection is piecewise constant, so it stays fixed here
        scores = _softmax(values) if score == "softmax" else _sigmoid(values)
        weights = np.take_along_axis(scores, chosen, axis=1)
        if renormalize:
            weights = weights / weights.sum(axis=1, keepdims=True)
        return float((scale * weights * cotangent).sum())

    (expected,) = finite_differences.gradients(objective, [logits])
    actual = jax.grad(lambda values: jnp.sum(routing(values).topk_weights * cotangent))(jnp.asarray(logits))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-6)


def test_scores_are_differentiable_in_the_logits():
    logits = _logits("normal", 4, 6)
    cotangent = np.random.default_rng(3).normal(size=logits.shape).astype(np.float32)
    (expected,) = finite_differences.gradients(lambda v: float((_softmax(v) * cotangent).sum()), [logits])
    actual = jax.grad(lambda values: jnp.sum(topk_router(values, 2).scores * cotangent))(jnp.asarray(logits))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("renormalize", [True, False])
def test_no_gradient_reaches_the_bias(renormalize):
    logits = jnp.asarray(_logits("normal", 8, 64))

    def objective(bias):
        routing = V3_ROUTER(logits, bias=bias, renormalize=renormalize)
        # every float output, so that none of them leaks a gradient
        return jnp.sum(routing.topk_weights**2) + jnp.sum(routing.scores**2)

    gradient = jax.grad(objective)(jnp.linspace(-0.1, 0.1, 64, dtype=jnp.float32))
    np.testing.assert_array_equal(gradient, np.zeros(64, np.float32))


def test_gradient_in_the_logits_ignores_the_bias_values():
    logits = jnp.asarray(_logits("normal", 8, 16))

    def gradient(bias):
        return jax.grad(lambda values: jnp.sum(topk_router(values, 16, score="sigmoid", bias=bias).topk_weights ** 2))(
            logits
        )

    # k == E: the selected set is the same whatever the bias, only the order changes
    np.testing.assert_allclose(
        gradient(jnp.linspace(-3.0, 3.0, 16, dtype=jnp.float32)), gradient(None), rtol=1e-4, atol=1e-7
    )


@pytest.mark.parametrize("scale", [None, "2", jnp.ones(3), [1.0]], ids=str)
def test_scale_is_a_number(scale):
    with pytest.raises(TypeError, match=r"topk_router: scale is a .*, expected a number"):
        jax_ep.topk_router(jnp.ones((2, 4)), 2, scale=scale)
