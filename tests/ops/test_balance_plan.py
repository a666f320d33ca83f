"""The plan of a balanced pass: every assignment is placed once, within the bounds, also for adversarial loads."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep.xla.balance_plan import place_assignments, plan_pass

TOKENS, TOP_K = 32, 4


def loads(rng, num_ranks, num_local):
    """Return probabilities of the experts, `[E]`."""
    num_experts = num_ranks * num_local
    by_rank = np.zeros((num_ranks, num_local))
    hot = rng.permutation(num_ranks)
    found = {
        "uniform": np.ones(num_experts),
        "zipf": rng.permutation(np.arange(1, num_experts + 1) ** -rng.uniform(0.6, 2)),
        "peaks": rng.random(num_experts) ** 8,
        "one_expert": np.arange(num_experts) == rng.integers(num_experts),
    }
    for name, count in (("one_rank", 1), ("most_ranks", round(0.7 * num_ranks)), ("all_but_one", num_ranks - 1)):
        by_rank[:] = 0
        by_rank[hot[: max(1, count)]] = 1
        found[name] = by_rank.ravel().copy()
    return {name: p / p.sum() for name, p in found.items()}


def count(topk_idx, num_experts):
    return np.stack([np.bincount(ids[ids >= 0], minlength=num_experts) for ids in topk_idx]).astype(np.int32)


def planner(rows, spare):
    """Return the plan of a pass, and `place_assignments` on every rank."""

    def run(topk_idx, counts):
        plan = plan_pass(counts, rows, spare)
        ranks = jnp.arange(len(topk_idx), dtype=jnp.int32)
        return plan, jax.vmap(lambda ids, rank: place_assignments(ids, counts, plan, rank))(topk_idx, ranks)

    return jax.jit(run)


def check_pass(topk_idx, counts, plan, placed, rows, spare):
    """Check one pass against its guarantees, and return the ids that it leaves."""
    slots, left = placed
    num_ranks, num_experts = counts.shape
    num_local = num_experts // num_ranks
    is_now = slots >= 0
    np.testing.assert_array_equal(np.where(is_now, -1, topk_idx), left)
    holder, slot = slots // (num_local + spare), slots % (num_local + spare)
    assert (np.bincount(holder[is_now], minlength=num_ranks) <= rows).all(), "a rank computes more than its rows"
    copied = plan.copies[holder, np.maximum(slot - num_local, 0)]
    expert = np.where(slot < num_local, holder * num_local + slot, copied)
    np.testing.assert_array_equal(expert[is_now], topk_idx[is_now])
    np.testing.assert_array_equal(plan.left, count(left, num_experts))
    used = plan.copies >= 0
    assert (np.sort(used, axis=1)[:, ::-1] == used).all(), "a free slot comes before a used one"
    return left


@pytest.mark.parametrize(("num_ranks", "num_local"), [(2, 8), (4, 4), (8, 1), (8, 4), (16, 2), (64, 1)])
@pytest.mark.slow(unless={"num_ranks": [4]})
def test_plan_random_loads(num_ranks, num_local, rng, subtests):
    """Spare slots for all experts at home suffice for one pass; with fewer there are at most W passes."""
    num_experts = num_ranks * num_local
    for slack in (1.0, 1.1):
        rows = math.ceil(slack * TOKENS * TOP_K)
        for spare in sorted({1, 2, num_local}):
            run = planner(rows, spare)
            for name, p in loads(rng, num_ranks, num_local).items():
                with subtests.test(f"{name}, {slack}, {spare}"):
                    left = rng.choice(num_experts, (num_ranks, TOKENS, TOP_K), p=p).astype(np.int32)
                    left[rng.random(left.shape) < rng.choice([0, 0.3])] = -1
                    passes = 0
                    while (left >= 0).any():
                        counts = count(left, num_experts)
                        plan, placed = jax.device_get(run(left, counts))
                        left = check_pass(left, counts, plan, placed, rows, spare)
                        passes += 1
                    assert passes <= (1 if spare >= num_local else num_ranks)


def test_plan_balanced_loads_move_nothing(rng):
    topk_idx = rng.permuted(np.tile(np.arange(8, dtype=np.int32), (2, 4, 2)), axis=-1)
    plan, (slots, _) = jax.device_get(planner(64, 2)(topk_idx, count(topk_idx, 8)))
    assert (plan.copies == -1).all()
    np.testing.assert_array_equal(slots, topk_idx + 2 * (topk_idx // 4))


def test_plan_own_tokens_stay(rng):
    """A rank that holds a copy computes its own tokens of that expert first."""
    topk_idx = np.zeros((2, 16, 1), np.int32)
    plan, (slots, _) = jax.device_get(planner(16, 1)(topk_idx, count(topk_idx, 2)))
    assert plan.copies.tolist() == [[-1], [0]]
    assert slots[..., 0].tolist() == [[0] * 16, [3] * 16]


def test_plan_moves_down_to_the_mean(rng):
    """A rank that gives rows keeps the mean, not the most that fits."""
    topk_idx = np.concatenate([np.zeros((2, 12, 1)), np.full((2, 4, 1), 2)], axis=1).astype(np.int32)
    plan, (slots, _) = jax.device_get(planner(20, 1)(topk_idx, count(topk_idx, 4)))
    assert plan.copies.tolist() == [[-1], [0]]
    assert np.bincount(slots.ravel() // 3).tolist() == [16, 16]
