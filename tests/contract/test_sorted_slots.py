"""The sort of one device's assignments, of all experts and of those of one rank."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
import oracle_serving
from cases import BASE, Shape, assert_same_bits, probabilities
from routings import ROUTINGS

OPERATION = "moe_sort"
SHAPES = [(BASE, 1), (BASE, 8), (Shape(37, 2, 6), 16), (Shape(1, 1, 64), 4), (Shape(200, 6, 40), 8)]


def check(got, want):
    for name in ("slots", "weights", "block_expert", "group_sizes"):
        assert_same_bits(np.asarray(getattr(got, name)), getattr(want, name), name)
    assert got.num_rows == want.num_rows


@pytest.mark.parametrize(("shape", "block_size"), SHAPES)
def test_moe_sort_routings(implementation, shape, block_size, rng, subtests):
    call = partial(jax_ep.moe_sort, num_experts=shape.num_experts, block_size=block_size, implementation=implementation)
    with_weights, without = jax.jit(call), jax.jit(lambda ids: call(ids))
    for name, routing in ROUTINGS.items():
        with subtests.test(name):
            ids = routing(rng, 1, shape)[0]
            weights = probabilities(rng, *ids.shape)
            want = oracle_serving.moe_sort(ids, weights, shape.num_experts, block_size)
            check(with_weights(ids, weights), want)
            bare = without(ids)
            assert bare.weights is None
            assert_same_bits(np.asarray(bare.slots), want.slots, "slots without weights")


@pytest.mark.parametrize(("first_expert", "num_local_experts"), [(0, 3), (5, None), (2, 1)])
def test_moe_sort_local_experts(implementation, first_expert, num_local_experts, rng):
    """Results match the sort of ids relative to the first expert, with -1 for other experts."""
    shape = Shape(num_tokens=41, top_k=3, num_experts=8)
    ids, options = ROUTINGS["out_of_range"](rng, 1, shape)[0], {"first_expert": first_expert}
    num_local = num_local_experts or 8 - first_expert
    weights = probabilities(rng, *ids.shape)
    call = partial(jax_ep.moe_sort, num_experts=8, block_size=4, implementation=implementation, **options)
    got = jax.jit(partial(call, num_local_experts=num_local_experts))(ids, weights)
    local = ids.astype(np.int64) - first_expert
    local = np.where((ids >= 0) & (ids < 8) & (local >= 0) & (local < num_local), local, -1).astype(np.int32)
    check(got, oracle_serving.moe_sort(local, weights, num_local, 4))


@pytest.mark.parametrize("count", [0, 1, 9, 50, -3])
def test_moe_sort_num_tokens(implementation, count, rng):
    shape = Shape(num_tokens=40, top_k=2, num_experts=6)
    ids = ROUTINGS["uniform"](rng, 1, shape)[0]
    weights = probabilities(rng, *ids.shape)
    call = partial(jax_ep.moe_sort, num_experts=6, block_size=8, implementation=implementation)
    got = jax.jit(lambda ids, weights, count: call(ids, weights, num_tokens=count))(ids, weights, jnp.int32(count))
    ids = np.where(np.arange(40)[:, None] < count, ids, -1).astype(np.int32)
    check(got, oracle_serving.moe_sort(ids, weights, 6, 8))


def test_moe_sort_weight_gradient(implementation, rng):
    ids = ROUTINGS["some_without_expert"](rng, 1, BASE)[0]
    weights = probabilities(rng, *ids.shape)

    def loss(weights):
        found = jax_ep.moe_sort(ids, weights, num_experts=8, block_size=4, implementation=implementation)
        return jnp.sum(found.weights * jnp.arange(found.weights.size, dtype=jnp.float32))

    rows = jax_ep.moe_sort(ids, weights, num_experts=8, block_size=4, implementation=implementation).slots
    want = np.zeros(ids.size, np.float32)
    for row, slot in enumerate(np.asarray(rows)):
        if slot >= 0:
            want[slot] = row
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(weights), want.reshape(ids.shape))


def test_moe_sort_mistakes(implementation):
    ids = jnp.zeros((3, 1), jnp.int32)
    call = partial(jax_ep.moe_sort, ids, num_experts=4, block_size=2, implementation=implementation)
    with pytest.raises(ValueError, match="first_expert=3 and num_local_experts=2 reach past num_experts=4"):
        call(first_expert=3, num_local_experts=2)
    with pytest.raises(ValueError, match="first_expert=-1"):
        call(first_expert=-1)
