"""The baselines of benchmarks/layer.py compute the layer, so that their times mean something."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from jax import lax

import jax_ep
from cases import BF16, F32, Shape, assert_close, probabilities, reals
from emulated_ragged import emulated_ragged_all_to_all
from harness import compiled
from jax_ep.tools.benchmark import baselines
from routings import ROUTINGS

SHAPE = Shape(num_tokens=24, top_k=3, num_experts=8, hidden=12, intermediate=10)
KINDS = ("uniform", "zipf", "one_hot_every_slot")
ALL_SLOTS = SHAPE.num_tokens * SHAPE.top_k  # of one rank
NAMES = ("y", "dx", "d_weights", "d_gate_up", "d_down")


def inputs(rng: np.random.Generator, kind: str, num_ranks: int, dtype: np.dtype = F32):
    ids = ROUTINGS[kind](rng, num_ranks, SHAPE)
    x, d_y = (reals(rng, num_ranks, SHAPE.num_tokens, SHAPE.hidden, dtype=dtype) for _ in range(2))
    num_local = SHAPE.num_experts // num_ranks
    gate_up = rng.standard_normal((num_ranks, num_local, SHAPE.hidden, 2 * SHAPE.intermediate)) / SHAPE.hidden**0.5
    down = rng.standard_normal((num_ranks, num_local, SHAPE.intermediate, SHAPE.hidden)) / SHAPE.intermediate**0.5
    return x, ids, probabilities(rng, *ids.shape), gate_up.astype(dtype), down.astype(dtype), d_y


def with_gradients(layer, mesh, **options):
    """The layer's result and gradients, compiled."""

    def fn(x, ids, weights, gate_up, down, d_y):
        call = partial(layer, num_experts=SHAPE.num_experts, **options)
        y, pull = jax.vjp(lambda x, s, w, v: call(x, ids, s, w, v), x, weights, gate_up, down)
        return y, *pull(d_y)

    return compiled(fn, mesh)


def package(mesh):
    """The package's portable implementation, which the contract suite holds to the oracle."""
    return with_gradients(jax_ep.moe, mesh, implementation="xla")


def check(got, wanted, tolerance=1e-5):
    for name, g, w in zip(NAMES, got, wanted, strict=True):
        assert g.dtype == w.dtype, name
        assert_close(g, w, name, tolerance=tolerance)


@pytest.fixture
def exchange_everywhere(monkeypatch):
    """XLA has no ragged exchange on CPU devices. On GPUs the benchmark itself compares results."""
    if jax.default_backend() == "cpu":
        monkeypatch.setattr(lax, "ragged_all_to_all", emulated_ragged_all_to_all)


@pytest.mark.usefixtures("exchange_everywhere")
@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.slow(unless={"num_ranks": [4]})
def test_results_and_gradients(num_ranks, expert_mesh, rng, subtests):
    """Where there is room for every row."""
    mesh = expert_mesh(num_ranks)
    expected = package(mesh)
    calls = {
        "capacity": with_gradients(baselines.capacity_layer, mesh, capacity=ALL_SLOTS),
        "ragged": with_gradients(baselines.ragged_layer, mesh, capacity=num_ranks * ALL_SLOTS),
    }
    for kind in KINDS:
        args = inputs(rng, kind, num_ranks)
        wanted = expected(*args)
        for name, call in calls.items():
            with subtests.test(f"{name}, {kind}"):
                check(call(*args), wanted)


@pytest.mark.parametrize("capacity", [1, 5])
@pytest.mark.slow(unless={"capacity": [5]})
def test_capacity_layer_drops_the_later_slots_of_an_expert(capacity, expert_mesh, rng):
    x, ids, *rest = inputs(rng, "zipf", 2)
    kept = ids.copy()
    for of_rank in kept.reshape(2, -1):
        for expert in range(SHAPE.num_experts):
            of_rank[np.nonzero(of_rank == expert)[0][capacity:]] = -1
    assert (kept != ids).any() and (kept != -1).any()
    layer = with_gradients(baselines.capacity_layer, expert_mesh(2), capacity=capacity)
    check(layer(x, ids, *rest), package(expert_mesh(2))(x, kept, *rest))


@pytest.mark.usefixtures("exchange_everywhere")
@pytest.mark.slow
def test_bfloat16_without_room_to_spare(expert_mesh, rng, subtests):
    """The dtype of the benchmark and its capacity: no promotion on the way, and sums in float32."""
    mesh, args = expert_mesh(2), inputs(rng, "uniform", 2, BF16)
    most_rows = int(np.bincount(args[1].reshape(-1) // (SHAPE.num_experts // 2)).max())
    wanted = package(mesh)(*args)
    for name, capacity in (("capacity_layer", ALL_SLOTS), ("ragged_layer", most_rows)):
        with subtests.test(name):
            check(with_gradients(getattr(baselines, name), mesh, capacity=capacity)(*args), wanted, 3e-2)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_routes_fit_together(num_ranks, rng):
    """Rows that NumPy moves by the routes of all ranks reach their experts in order, and come back to their places."""
    num_local = SHAPE.num_experts // num_ranks
    sizes = rng.integers(0, 6, (num_ranks, num_ranks, num_local)).astype(np.int32)
    sizes[0, :, 0] = 0  # a source that has nothing for one expert
    capacity = int(sizes.sum(axis=(0, 2)).max()) + 3
    plan = jax.jit(baselines.plan_route, static_argnums=2)
    routes = [jax.tree.map(np.asarray, plan(sizes, np.int32(rank), capacity)) for rank in range(num_ranks)]
    # A row is (source, expert, number), and each source holds its rows by expert.
    sent = [
        np.array([(s, e, i) for e, n in enumerate(sizes[s].reshape(-1)) for i in range(n)]).reshape(-1, 3)
        for s in range(num_ranks)
    ]

    def exchange(rows, way, num_rows):
        out = [np.full((n, 3), -1) for n in num_rows]
        for s, route in enumerate(routes):
            first, count, place, _ = getattr(route, way)
            for d in range(num_ranks):
                assert getattr(routes[d], way)[3][s] == count[d]
                out[d][place[d] : place[d] + count[d]] = rows[s][first[d] : first[d] + count[d]]
        return out

    arrived = exchange(sent, "there", [capacity] * num_ranks)
    for d, (rows, route) in enumerate(zip(arrived, routes, strict=True)):
        total = int(sizes[:, d].sum())
        assert (route.regroup[total:] == -1).all() and (route.ungroup[total:] == -1).all()
        grouped = rows[route.regroup[:total]]
        by_expert = sorted(map(tuple, grouped), key=lambda row: (row[1], row[0], row[2]))
        assert list(map(tuple, grouped)) == by_expert
        np.testing.assert_array_equal(route.group_sizes, sizes[:, d].sum(axis=0))
        np.testing.assert_array_equal(grouped[route.ungroup[:total]], rows[:total])
    returned = exchange(arrived, "back", [len(rows) for rows in sent])
    for before, after in zip(sent, returned, strict=True):
        np.testing.assert_array_equal(after, before)
