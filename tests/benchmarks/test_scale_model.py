"""The model of scale: rows of a routing are those counted one by one, and expected ones are their mean."""

from __future__ import annotations

import numpy as np
import pytest

import scale_model
from jax_ep.tools.benchmark import inputs
from scale_model import Rates, Topology

TOPOLOGIES = [Topology(4, 4, 8), Topology(8, 2, 16), Topology(8, 4, 8), Topology(16, 4, 8)]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_rows_are_counted_one_by_one(topology: Topology, rng: np.random.Generator) -> None:
    gpus, per_rank = topology.gpus_per_node, topology.num_slots // topology.num_ranks
    slots = rng.integers(-1, topology.num_slots, (topology.num_ranks, 7, 3))
    want = {way: np.zeros((4, topology.num_ranks), int) for way in scale_model.WAYS}  # in the order of Rows

    def send(way: str, source: int, target: int) -> None:
        if source != target:
            leg = 2 if source // gpus == target // gpus else 0
            want[way][leg, source] += 1
            want[way][leg + 1, target] += 1

    for source, tokens in enumerate(slots):
        for token in tokens:
            ranks = {int(slot) // per_rank for slot in token if slot >= 0}
            for rank in ranks:
                send("flat", source, rank)
            for node in {rank // gpus for rank in ranks}:
                landing = node * gpus + source % gpus
                send("hierarchical", source, landing)
                for rank in ranks:
                    if rank // gpus == node:
                        send("hierarchical", landing, rank)
    for way, rows in scale_model.counted(slots, topology).items():
        assert (np.stack(rows) == want[way]).all(), way


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_expected_rows_are_the_mean(topology: Topology, rng: np.random.Generator) -> None:
    """Of uniform routings in closed form, and of Zipf's from the shares of other tokens."""
    tokens, top_k = 4000, 3
    for kind in ("uniform", "zipf"):
        popularity = inputs.popularity(kind, topology.num_experts, rng)

        def slots(number: int, popularity: np.ndarray = popularity) -> np.ndarray:
            ids = inputs.choose(popularity, number, top_k, rng)
            return scale_model.spread(ids, topology, rng)

        shares = scale_model.sampled_shares(slots(40000), topology)
        if kind == "uniform":
            shares = scale_model.uniform_shares(topology, top_k)
        routing = slots(topology.num_ranks * tokens).reshape(topology.num_ranks, tokens, top_k)
        found = scale_model.counted(routing, topology)
        for way, rows in scale_model.expected(*shares, topology).items():
            for name, got, want in zip(rows._fields, found[way], rows, strict=True):
                # Variances of sums of shares are below their means times the ranks that a token has.
                error = 6 * np.sqrt(top_k * np.maximum(want, 1) / tokens) + 0.05 * want * (kind == "zipf")
                assert (np.abs(got / tokens - want) <= error).all(), (kind, way, name)


def test_times() -> None:
    topology = Topology(16, 8, 256)
    rates = Rates(link=100.0, nic=10.0, start=1.0, message=0.5, blocks=4)
    rows = scale_model.Rows(*(np.full(16, value) for value in (3.0, 2.0, 20.0, 30.0)))
    sizes = {"tokens": 10, "row_bytes": 2, "topology": topology, "rates": rates}
    assert scale_model.seconds(rows, "flat", **sizes) == pytest.approx(1 + max(6 + 8 * 0.5, 6))
    assert scale_model.seconds(rows, "hierarchical", **sizes) == pytest.approx(2 + 6.5 + 6 / 4)
