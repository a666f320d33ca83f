"""Part `exchange` of benchmarks/low_latency.py times what it says it times."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from reports import check_report, run_quickly

from jax_ep.tools.benchmark import harness, low_latency
from jax_ep.tools.benchmark.chains import on_each_rank
from jax_ep.tools.benchmark.inputs import Model, expert_mesh, make_case

RANKS, TOKENS = 4, 6
VARIANTS = {
    "dispatch, fp8",
    "dispatch, bf16",
    "dispatch of no tokens",
    "combine, fp8",
    "combine, bf16",
    "round trip, fp8 back",
    "round trip, bf16 back",
    "all_to_all, padded, bf16",
    "one word",
}


@pytest.fixture(scope="module")
def case():
    model = Model(hidden=256, intermediate=0, experts=8, top_k=3)
    return make_case(expert_mesh(RANKS), "uniform", TOKENS, model)


def test_bytes_are_those_of_the_busiest_rank(case):
    ids = np.asarray(case.ids).reshape(RANKS, TOKENS, 3)
    tokens, rows = np.zeros((RANKS, RANKS)), np.zeros((RANKS, RANKS))
    for source, token in np.ndindex(RANKS, TOKENS):
        owners = [expert // 2 for expert in ids[source, token]]
        for rank in set(owners) - {source}:
            tokens[source, rank] += 1
            rows[source, rank] += owners.count(rank)
    found = low_latency.traffic(case)
    for what, counts in (("tokens", tokens), ("rows", rows)):
        busiest = max(counts.sum(0).max(), counts.sum(1).max())
        assert found[f"{what} bf16"] == busiest * 512
        assert found[f"{what} fp8"] == busiest * (256 + 4 * 2)


def test_a_part_is_taken_away_within_rounds():
    timing = harness.Timing
    assert low_latency.less(timing((5.0, 9.0)), timing((1.0, 2.0))).samples == (4.0, 7.0)


def test_round_trips_return_the_weighted_sums(case):
    low_latency.check_round_trip(case, "xla")
    step = low_latency.round_trip(case, "xla", False, None, own_rows=True)
    back = jax.jit(on_each_rank(case.mesh, step))(case.x, case.topk_idx, case.topk_weights, case.topk_weights)
    assert harness.largest_difference([back], [case.x]) < 0.05


def check_low_latency(content: dict) -> None:
    cases: dict[tuple[int, int], dict[str, dict]] = {}
    for row in content["rows"]:
        shape = row["shape"]
        cases.setdefault((shape["ranks"], shape["tokens_per_rank"]), {})[row["variant"]] = row
    for rows in cases.values():
        word = rows["one word"]["seconds"]["median"]
        for name, row in rows.items():
            assert row["wire_bytes_per_s"] == pytest.approx(row["wire_bytes"] / row["seconds"]["median"])
            sending = row["wire_bytes"] / content["summary"]["copy_engine_bytes_per_s"]
            assert row["floor_seconds"] == pytest.approx((2 if "round trip" in name else 1) * word + sending)
    wanted = {(int(ranks), tokens) for ranks, counts in content["settings"]["tokens"].items() for tokens in counts}
    assert set(cases) == wanted
    assert all(set(rows) == VARIANTS for rows in cases.values())


@pytest.mark.slow
def test_quick_run(tmp_path):
    """On CPU devices, so in Triton's interpreter: the figures mean nothing, but every kernel is called."""
    pytest.importorskip("triton")
    output = run_quickly("low_latency.py", tmp_path, "--parts", "exchange", "--ranks", "2")
    content = json.loads((tmp_path / "low_latency.json").read_text())
    check_report(content)
    check_low_latency(content)
    assert "2 tokens/rank, 2 ranks" in output and "floor us" in output
