"""load_balancing_loss and router_z_loss: values, gradients, and the same loss over a mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import finite_differences
import harness
import jax_ep


def _logits(num_tokens, num_experts):
    return (2.0 * np.random.default_rng(0).normal(size=(num_tokens, num_experts))).astype(np.float32)


def _balancing_loss(scores, topk_idx):
    """Compute E * sum_e (share of the valid assignments) * (mean probability), in float64."""
    num_experts = scores.shape[1]
    valid = topk_idx[topk_idx >= 0]
    share = np.bincount(valid, minlength=num_experts) / max(len(valid), 1)
    probabilities = scores / scores.sum(axis=1, keepdims=True)
    return num_experts * float(share @ probabilities.mean(axis=0))


def _random_assignments(num_tokens=24, num_experts=8, k=3, invalid=0.0, seed=0):
    rng = np.random.default_rng(seed)
    scores = rng.uniform(0.05, 1.0, size=(num_tokens, num_experts)).astype(np.float32)
    topk_idx = np.argsort(-scores, axis=1)[:, :k].astype(np.int32)
    topk_idx[rng.uniform(size=topk_idx.shape) < invalid] = -1
    return scores, topk_idx


@pytest.mark.parametrize("invalid", [0.0, 0.4])
def test_load_balancing_loss_value(invalid):
    scores, topk_idx = _random_assignments(invalid=invalid)
    expected = _balancing_loss(scores.astype(np.float64), topk_idx)
    np.testing.assert_allclose(
        jax_ep.load_balancing_loss(jnp.asarray(scores), jnp.asarray(topk_idx)), expected, rtol=1e-5
    )


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
def test_load_balancing_loss_over_a_mesh_equals_the_global_value(axes, invalid):
    mesh = harness.make_mesh((2, 4), ("data", "expert"))
    scores, topk_idx = _random_assignments(num_tokens=32, invalid=invalid, seed=4)
    name = axes[0] if len(axes) == 1 else axes
    spec = P(name)
    over_mesh = jax.jit(
        jax.shard_map(
            partial(jax_ep.load_balancing_loss, axis_name=name), mesh=mesh, in_specs=(spec, spec), out_specs=P()
        )
    )
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


def test_losses_of_bfloat16_inputs_are_float32():
    logits = jnp.asarray(_logits(64, 32)).astype(jnp.bfloat16)
    topk_idx = jax_ep.topk_router(logits, 4).topk_idx
    scores = jax_ep.topk_router(logits, 4).scores.astype(jnp.bfloat16)
    wide = logits.astype(jnp.float32)
    for narrow, expected in [
        (jax_ep.router_z_loss(logits), jax_ep.router_z_loss(wide)),
        (
            jax_ep.load_balancing_loss(scores, topk_idx),
            jax_ep.load_balancing_loss(scores.astype(jnp.float32), topk_idx),
        ),
    ]:
        assert narrow.dtype == jnp.float32
        np.testing.assert_array_equal(narrow, expected)


# --- a mask of tokens -----------------------------------------------------------------------------------------------


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
    for loss, inputs, want in (
        (balance, scores, lambda kept: _balancing_loss(kept, topk_idx[mask])),
        (z_loss, logits, _z_loss),
    ):
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


def test_ids_of_minus_one_alone_leave_their_tokens_in_the_mean_score():
    """As documented: the router has scored them."""
    scores, topk_idx = _random_assignments()
    topk_idx[:6] = -1
    got = jax_ep.load_balancing_loss(jnp.asarray(scores), jnp.asarray(topk_idx))
    np.testing.assert_allclose(got, _balancing_loss(scores.astype(np.float64), topk_idx), rtol=1e-5)
