"""The prediction of scale: the package sends the rows that the model counts."""

import jax
import numpy as np
import pytest

import jax_ep
import nodes
import portable_ways
import scale_model
from cases import F32
from harness import compiled, make_mesh
from jax_ep.tools.benchmark import inputs
from scale_model import Rates, Topology


@pytest.mark.parametrize("way", scale_model.WAYS)
def test_the_exchange_sends_the_rows_of_the_model(way, rng, monkeypatch):
    """Tokens that each rank sends, over nodes and inside them."""
    if jax.default_backend() != "cpu":
        pytest.skip("counts what `xla` sends on CPU devices")
    mesh, topology = make_mesh((2, 4), ("node", "expert")), Topology(8, 4, 16)
    sent = []
    note = lambda axis, rank, sizes: sent.append((axis, int(rank), sizes.tolist()))  # noqa: E731
    portable_ways.record_sizes(monkeypatch, note, axis=("node", "expert"))
    axes = ("node", "expert") if way == "flat" else jax_ep.Topology(node="node", local="expert")

    def dispatch(x, ids):
        return jax_ep.dispatch(x, ids, num_experts=16, axis_name=axes, implementation="xla").tokens

    slots = rng.integers(-1, 16, (8, 7, 3)).astype(np.int32)
    compiled(dispatch, mesh, axes=(("node", "expert"),))(rng.random((8, 7, 4), F32), slots)
    jax.effects_barrier()
    rows, place = scale_model.counted(slots, topology)[way], {}
    for axis, rank, sizes in sent:
        node, local = divmod(rank, 4)
        if axis == "('node', 'expert')":
            pairs = np.array(sizes).reshape(2, 4)
            place["nic", rank] = int(pairs[1 - node].sum())
            place["link", rank] = int(pairs[node].sum() - pairs[node, local])
        else:
            leg, own = ("nic", node) if axis == "('node',)" else ("link", local)
            place[leg, rank] = sum(sizes) - sizes[own]
    assert [place["nic", rank] for rank in range(8)] == rows.nic_sent.tolist()
    assert [place["link", rank] for rank in range(8)] == rows.link_sent.tolist()


def test_routers_are_limited(rng):
    """At most four nodes, or groups; and shares of a limited router are those of its tokens."""
    model = inputs.MODELS["deepseek-v3"]
    logits = rng.standard_normal((500, model.experts), np.float32)
    for kind, ranks, groups in (("4 of 8 groups", 256, 8), ("at most 4 nodes", 256, 32), ("at most 4 nodes", 16, 2)):
        topology = Topology(ranks, 8, model.experts)
        assert nodes.num_groups(kind, topology) == groups
        ids = np.asarray(nodes.limited_router(model.top_k, groups)(logits))
        used = [len(set(token // (model.experts // groups))) for token in ids]
        assert max(used) == min(4, groups)
        of_ranks, of_nodes = nodes.shares(kind, model, topology, rng)
        if kind == "at most 4 nodes":
            assert of_nodes.sum() == pytest.approx(np.mean(used), rel=0.02)
        assert np.ptp(of_ranks) == np.ptp(of_nodes) == 0
    # DeepSeek-V3 on eight nodes, for which it was made.
    on_eight = [nodes.shares(kind, model, Topology(64, 8, 256), np.random.default_rng(1)) for kind in nodes.LIMITED]
    np.testing.assert_array_equal(*(of_nodes for _, of_nodes in on_eight))


TOPOLOGIES = [Topology(4, 4, 8), Topology(8, 2, 16), Topology(8, 4, 8), Topology(16, 4, 8)]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_rows_are_counted_one_by_one(topology, rng):
    gpus, per_rank = topology.gpus_per_node, topology.num_slots // topology.num_ranks
    slots = rng.integers(-1, topology.num_slots, (topology.num_ranks, 7, 3))
    want = {way: np.zeros((4, topology.num_ranks), int) for way in scale_model.WAYS}  # in the order of Rows

    def send(way, source, target):
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
def test_expected_rows_are_the_mean(topology, rng):
    """Of uniform routings in closed form, and of Zipf's from the shares of other tokens."""
    tokens, top_k = 4000, 3
    for kind in ("uniform", "zipf"):
        popularity = inputs.popularity(kind, topology.num_experts, rng)

        def slots(number, popularity=popularity):
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


def test_times():
    topology = Topology(16, 8, 256)
    rates = Rates(link=100.0, nic=10.0, start=1.0, message=0.5, blocks=4)
    rows = scale_model.Rows(*(np.full(16, value) for value in (3.0, 2.0, 20.0, 30.0)))
    sizes = {"tokens": 10, "row_bytes": 2, "topology": topology, "rates": rates}
    assert scale_model.seconds(rows, "flat", **sizes) == pytest.approx(1 + max(6 + 8 * 0.5, 6))
    assert scale_model.seconds(rows, "hierarchical", **sizes) == pytest.approx(2 + 6.5 + 6 / 4)
