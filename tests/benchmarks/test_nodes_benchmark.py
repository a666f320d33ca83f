"""The prediction of scale: the package sends what the model counts, and what is published is what the page says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from reports import check_report, run, run_quickly

import jax_ep
import nodes
import portable_ways
import scale_model
from cases import F32
from harness import compiled, make_mesh
from jax_ep.tools.benchmark import inputs
from scale_model import Topology


@pytest.mark.parametrize("way", scale_model.WAYS)
def test_the_exchange_sends_the_rows_of_the_model(way: str, rng: np.random.Generator, monkeypatch: Any) -> None:
    """Tokens that each rank hands to the ragged exchange, over nodes and inside them."""
    if jax.default_backend() != "cpu":
        pytest.skip("counts by an emulation")
    mesh, topology = make_mesh((2, 4), ("node", "expert")), Topology(8, 4, 16)
    sent: list[tuple[str, int, list[int]]] = []
    note = lambda call, rank, sizes: sent.append((call[1], int(rank), sizes.tolist()))  # noqa: E731
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


def test_routers_are_limited(rng: np.random.Generator) -> None:
    """At most four nodes, or groups; and shares of a limited router are those of its tokens."""
    model = inputs.MODELS["deepseek-v3"]
    logits = rng.standard_normal((500, model.experts), np.float32)
    for kind, num_ranks, groups in (
        ("4 of 8 groups", 256, 8),
        ("at most 4 nodes", 256, 32),
        ("at most 4 nodes", 16, 2),
    ):
        topology = Topology(num_ranks, 8, model.experts)
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


@pytest.mark.slow
def test_a_quick_run(tmp_path: Path) -> None:
    printed = run_quickly("nodes.py", tmp_path)
    assert "uniform: a dispatch, predicted" in printed
    content = json.loads((tmp_path / "nodes.json").read_text())
    check_report(content)
    assert {row["shape"]["routing"] for row in content["rows"]} == {"uniform", "zipf", "at most 4 nodes"}
    refused = run("nodes.py", tmp_path, "--ranks", "6")
    assert "--ranks 6: expected a multiple of the 4 GPUs of a node" in refused.stderr
    assert refused.returncode != 0
