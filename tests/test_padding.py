"""Ranks with different numbers of tokens, padded to one T: padding sends no rows and changes no bits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from cases import assert_same_bits, probabilities, reals
from harness import compiled, make_mesh
from layers import with_gradients

W, H, INNER, E, K = 4, 16, 12, 8, 2
COUNTS = np.array([5, 3, 1, 0])
OPTIONS = {"num_experts": E, "implementation": "xla", "schedule": jax_ep.Schedule(reproducible=True)}


class Batch:
    """Arrays `[W, T, ...]` with the tokens of each rank first, and expert weights; `rows(...)` counts rows sent."""

    def __init__(self, seed, num_tokens, fill):
        rng = np.random.default_rng(seed)
        sizes = (W, COUNTS.max())
        self.is_token = np.arange(num_tokens) < COUNTS[:, None]
        self.weights = reals(rng, E, H, 2 * INNER), reals(rng, E, INNER, H)

        def padded(a, fill):
            a = np.pad(a, ((0, 0), (0, num_tokens - a.shape[1]), (0, 0)))
            return np.where(self.is_token[..., None], a, np.array(fill, a.dtype))

        self.x, self.d_out = (padded(reals(rng, *sizes, H), fill) for _ in range(2))
        self.topk_weights = padded(probabilities(rng, *sizes, K), fill)
        self.topk_idx = padded(rng.integers(0, E, (*sizes, K)).astype(np.int32), -1)
        self.other_idx = padded(self.topk_idx, 3)  # Padding that names an expert, to be masked.

    def by_rank(self, w):
        return w.reshape(W, E // W, *w.shape[1:])


def dispatched(mesh, batch):
    def call(x, idx, topk_weights, count, d_out):
        def layer(x, topk_weights):
            d = jax_ep.dispatch(x, idx, topk_weights, num_tokens=count, num_experts=E, implementation="xla")
            return jax_ep.combine(d.tokens * d.weights[:, None], d.handle), d.group_sizes.sum()

        y, pull, rows = jax.vjp(layer, x, topk_weights, has_aux=True)
        return rows, y, *pull(d_out)

    return compiled(call, mesh)(batch.x, batch.other_idx, batch.topk_weights, COUNTS.astype(np.int32), batch.d_out)


def moe(mesh, batch):
    rows, experts = (batch.topk_idx >= 0).sum(), map(batch.by_rank, batch.weights)
    call = compiled(with_gradients(partial(jax_ep.moe, **OPTIONS)), mesh)
    return rows, *call(batch.x, batch.topk_idx, batch.topk_weights, *experts, batch.d_out)


def of_ranks(rows, y, dx, *others):
    return rows, y.reshape(W, -1, H), dx.reshape(W, -1, H), *others


def sharded_moe(mesh, batch):
    x, idx, topk_weights, d_out = (
        a.reshape(-1, a.shape[-1]) for a in (batch.x, batch.other_idx, batch.topk_weights, batch.d_out)
    )
    call = partial(jax_ep.sharding.sharded_moe(mesh, **OPTIONS), token_mask=batch.is_token.reshape(-1))
    found = jax.jit(with_gradients(call))(x, idx, topk_weights, *batch.weights, d_out)
    return of_ranks(None, *map(np.asarray, found))


def flax_moe(mesh, batch, num_identity_experts=0):
    nnx = pytest.importorskip("flax.nnx")
    from jax_ep.flax import MoE

    sizes = {"hidden_size": H, "intermediate_size": INNER, "num_experts_per_tok": K, "dtype": jnp.float32}
    router = jax_ep.Router(logit_bias=True, num_identity_experts=num_identity_experts)
    layer = MoE(**OPTIONS, **sizes, mesh=mesh, router=router, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)

    @jax.jit
    def call(state, x, mask, d_out):
        def loss(x, state):
            y, metrics = nnx.merge(graph, state)(x, token_mask=mask)
            losses = metrics.load_balancing_loss + metrics.router_z_loss
            return jnp.sum(jnp.where(mask[..., None], y * d_out, 0)) + losses, (metrics.load.sum(), y)

        (dx, dw), (rows, y) = jax.grad(loss, (0, 1), has_aux=True)(x, state)
        return rows, y, dx, *jax.tree.leaves(dw)

    return of_ranks(*map(np.asarray, call(state, batch.x, batch.is_token, batch.d_out)))


def flax_identity_experts(mesh, batch):
    return flax_moe(mesh, batch, num_identity_experts=2)


@pytest.mark.parametrize("function", [dispatched, moe, sharded_moe, flax_moe, flax_identity_experts])
def test_padding_changes_nothing(function, rng):
    """NaN in padding, and more of it, next to zeros: the same bits, and rows of the tokens alone."""
    mesh, seed = make_mesh((W,), ("expert",)), rng.integers(1 << 30)
    short, long = Batch(seed, 5, 0), Batch(seed, 9, np.nan)
    rows, *want = function(mesh, short)
    same_rows, *same = function(mesh, Batch(seed, 5, np.nan))
    assert rows is None or np.sum(rows) == np.sum(same_rows) == COUNTS.sum() * K
    for got, wanted in zip(same, want, strict=True):
        assert_same_bits(got, wanted)
    more_rows, *more = function(mesh, long)
    assert rows is None or np.sum(more_rows) == np.sum(rows)
    for got, wanted in zip(more[:2], want[:2], strict=True):  # The result and the gradient of the tokens.
        assert not got[~long.is_token].any() and np.abs(wanted[short.is_token]).min(-1).max() > 0
        if function in (
            flax_moe,
            flax_identity_experts,
        ):  # Their router is XLA's matmul, whose bits depend on the number of rows.
            np.testing.assert_allclose(got[long.is_token], wanted[short.is_token], rtol=1e-4, atol=1e-4)
        else:
            assert_same_bits(got[long.is_token], wanted[short.is_token])
