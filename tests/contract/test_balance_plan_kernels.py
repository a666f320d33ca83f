"""The kernels that plan a balanced pass agree with plain JAX, bit for bit, for random and adversarial loads."""

import jax
import numpy as np
import pytest

from harness import run
from jax_ep.core.balance import Balance
from jax_ep.ops import registry

IMPLEMENTATIONS = ("triton",)


def routing(rng, kind, num_ranks, tokens, top_k, experts):
    """Return ids `[W, T, K]`, some -1."""
    popularity = {
        "uniform": np.ones(experts),
        "zipf": rng.permutation(1 / np.arange(1, experts + 1)),
        "one_rank": np.where(np.arange(experts) < experts // num_ranks, 1.0, 1e-9),
        "one_expert": np.where(np.arange(experts) == experts - 1, 1.0, 1e-9),
    }[kind]
    noise = rng.gumbel(size=(num_ranks, tokens, experts))
    ids = np.argsort(-(np.log(popularity) + noise), axis=-1)[..., :top_k].astype(np.int32)
    return np.where(rng.random(ids.shape) < 0.1, -1, ids)


def compare(implementation, mesh, topk_idx, experts, spare):
    """Compare plans and slots of ids `[W, T, K]` with those of plain JAX."""
    num_ranks, tokens, top_k = topk_idx.shape
    rows = Balance(1.0).rows_per_rank(tokens * top_k)
    counts = np.stack([np.bincount(ids[ids >= 0], minlength=experts) for ids in topk_idx]).astype(np.int32)
    everywhere = np.broadcast_to(counts, (num_ranks, *counts.shape))
    found = {}
    for name in (implementation, "xla"):
        planner = registry.BALANCE_PLAN.by(name)

        def fn(topk_idx, counts, rank, planner=planner):
            plan = planner.plan_pass(counts, rows, spare)
            return plan, planner.place_assignments(topk_idx, counts, plan, rank)

        found[name] = run(fn, mesh, topk_idx, everywhere, np.arange(num_ranks))
    jax.tree.map(np.testing.assert_array_equal, found[implementation], found["xla"])


@pytest.mark.parametrize("kind", ["uniform", "zipf", "one_rank", "one_expert"])
@pytest.mark.parametrize(("experts", "spare"), [(8, 1), (24, 3), (24, 12)])
@pytest.mark.slow(unless={"kind": ["zipf"]})
def test_balance_plan_kernels(implementation, kind, experts, spare, expert_mesh, rng):
    num_ranks, tokens, top_k = 2, 301, 2
    topk_idx = routing(rng, kind, num_ranks, tokens, top_k, experts)
    compare(implementation, expert_mesh(num_ranks), topk_idx, experts, spare)


def test_balance_plan_many_programs(implementation, expert_mesh, rng, monkeypatch):
    """Programs add up the counts of all shares before their own, some at a time."""
    balance_plan = pytest.importorskip("jax_ep.megakernels.balance_plan")
    monkeypatch.setattr(balance_plan, "num_programs", lambda num_tasks: num_tasks)
    monkeypatch.setattr(balance_plan, "_MOST_COUNTS", 128)  # of four shares
    num_ranks, tokens, top_k, experts = 2, 1501, 2, 24
    topk_idx = routing(rng, "zipf", num_ranks, tokens, top_k, experts)
    compare(implementation, expert_mesh(num_ranks), topk_idx, experts, 3)
