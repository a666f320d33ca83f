"""Parts of benchmarks that compute: FLOPs, bytes, shares of peaks, tables, and checks of results."""

import dataclasses
import json
import re
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from reports import arguments, check_report

import compare
import placement
import tables
from jax_ep.tools.benchmark import fused_moe, inputs, low_latency, train
from jax_ep.tools.benchmark.fused_moe import Variant
from jax_ep.tools.benchmark.inputs import Model, expert_mesh, make_case

COMBINE = "triton combine"


def report(folder, name, rows, *, date="2026-01-01", **settings):
    content = {"name": name, "date": f"{date}T00:00:00+00:00", "settings": {"quick": False, **settings}, "rows": rows}
    (folder / f"{name}.json").write_text(json.dumps(content))


def row(variant, microseconds, *, tokens, ranks=2, routing="uniform", **details):
    shape = {"tokens_per_rank": tokens, "ranks": ranks, "routing": routing}
    return {"variant": variant, "shape": shape, "seconds": {"median": 1e-6 * microseconds}, **details}


def cells(markdown):
    """By the first cell of each line."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines() if "|" in line]
    return {line[0]: line[1:] for line in lines}


def test_tables_match_the_reports():
    pages = [page.read_text() for page in tables.PAGES]
    assert [tables.filled(page, tables.Reports(tables.RESULTS)) for page in pages] == pages, "run make tables"
    assert set(re.findall(r"<!-- table (\w+) -->", "".join(pages))) == set(tables.TABLES)


def test_the_newest_report_that_has_most_columns_counts(tmp_path):
    old = [row(COMBINE, 10 * n, tokens=n) for n in (128, 1024)] + [row(COMBINE, 99, tokens=1024, ranks=4)]
    report(tmp_path, "dispatch_combine_old", old)
    report(tmp_path, "dispatch_combine", [row(COMBINE, 7, tokens=n) for n in (128, 1024)], date="2026-02-01")
    report(tmp_path, "dispatch_combine_part", [row(COMBINE, 3, tokens=128)], date="2026-03-01")
    found = tables.made("exchange", tables.Reports(tmp_path))
    assert cells(found)["us; tokens per rank:"] == ["2 GPUs: 128", "1024", "4 GPUs: 1024"]
    assert cells(found)["combine"] == ["7", "7", "99"]
    assert "dispatch to rows" not in cells(found), "a line without figures"
    assert found.endswith("From `dispatch_combine.json`, `dispatch_combine_old.json`.")


def test_pages_that_name_no_table(tmp_path):
    with pytest.raises(ValueError, match="<!-- table layers -->: unknown table, expected one of layer"):
        tables.filled("<!-- table layers -->\n<!-- end -->", tables.Reports(tmp_path))


def report_of(folder, other, *, quick=False):
    """Two operations of 1 s here; `other` seconds in the other checkout, and 1 s."""
    args = arguments(folder, against=Path("before"), tolerance=1.05, quick=quick)
    samples = {"this": [{"a": [1.0] * 3, "b": [1.0] * 3}] * 2, "other": [{"a": [other] * 3, "b": [1.0] * 3}] * 2}
    return compare.report(args, compare.QUICK, samples)


@pytest.mark.parametrize(("other", "status"), [(1.2, 0), (0.96, 0), (0.9, 1)])
def test_slower_operations_are_named(tmp_path, capsys, other, status):
    assert report_of(tmp_path, other) == status
    assert ("1 slower by 5% or more\n  a" in capsys.readouterr().out) == bool(status)
    content = json.loads((tmp_path / "compare.json").read_text())
    check_report(content)
    assert content["summary"] == {"a": pytest.approx(1 / other, rel=1e-3), "b": 1}
    assert content["settings"]["against"] == "before"


def test_quick_figures_fail_nothing(tmp_path):
    assert report_of(tmp_path, 0.5, quick=True) == 0


def test_train_benchmark_flops():
    model = train.Architecture(inputs.Model(8, 4, 2, 1), 2, 1, 4, 16, 1, shared=3)
    gemms = 2 * 8 * (8 + 2 * 4) + 2 * 8 * 8 + 2 * 8 * 2 + 6 * 8 * 4 + 6 * 8 * 3
    scores = 2 * 2 * 8 * 10 / 2  # two GEMMs over half of the 10 positions
    assert train.flops_per_token(model, 5, 10) == 3 * (5 * (gemms + scores) + 2 * 8 * 16)


def test_train_benchmark_groups_kernels():
    kernels = [
        {"name": "dispatch_gemm", "us": 1000.0},
        {"name": "nvjet_sm90_tst_256x128", "us": 2000.0},
        {"name": "ncclDevKernel_AllReduce_Sum_bf16", "us": 3000.0},
        {"name": "cudnn_generated_fort_native_sdpa", "us": 4000.0},
        {"name": "MemcpyD2D", "us": 5000.0},
        {"name": "loop_add_fusion", "us": 6000.0},
    ]
    found = train.time_by_group(kernels)
    names = ["experts", "dense GEMMs", "collectives", "attention", "copies", "other"]
    assert found == dict(zip(names, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], strict=True))


def test_drift_exchanges_popularity_of_a_share(rng):
    before = inputs.popularity("zipf", 40, rng, 0.8)
    for share in (0.0, 0.25, 1.0):
        later = placement.drifted(before, share, rng)
        assert sorted(later) == sorted(before)
        assert (later != before).sum() <= 40 * share
    assert (placement.drifted(before, 1.0, rng) != before).sum() > 20


def test_loads_are_those_of_the_law(rng):
    """One expert per token: shares are popularities themselves."""
    popularity = inputs.popularity("zipf", 8, rng, 0.7)
    model = inputs.Model(1, 1, 8, 1)
    loads = placement.sampled_loads(popularity, model, 40000, rng)
    want = np.exp(popularity) / np.exp(popularity).sum()
    assert loads.sum() == 40000
    assert np.abs(loads / 40000 - want).max() < 0.02


def test_wrong_layers_are_not_timed():
    right = Variant(lambda: jnp.ones(4), ())
    names = ["fused_moe, bfloat16", "fused_moe, mxfp4"]
    found = {"ragged_dot": right} | dict.fromkeys(names, right)
    fused_moe.check(found, ["mxfp4"], names)
    for name in names:
        wrong = Variant(partial(jnp.full, 4, 1.1 if name == names[0] else 1.4), ())
        with pytest.raises(RuntimeError, match=rf"{name} is wrong: error 0\.[14]"):
            fused_moe.check(found | {name: wrong}, ["mxfp4"], names)


RANKS, TOKENS = 4, 6


@pytest.fixture(scope="module")
def case():
    model = Model(hidden=256, intermediate=0, experts=8, top_k=3)
    return make_case(expert_mesh(RANKS), "uniform", TOKENS, model)


def test_bytes_are_those_of_the_busiest_rank(case):
    found = low_latency.traffic(case)
    for what, counts in (("tokens", case.remote), ("rows", case.remote_rows)):
        busiest = max(counts.sum(0).max(), counts.sum(1).max())
        assert found[f"{what} bf16"] == busiest * 512
        assert found[f"{what} fp8"] == busiest * (256 + 4 * 2)


def test_round_trips_return_the_weighted_sums(case):
    low_latency.check_round_trip(case, "xla")
    with pytest.raises(RuntimeError, match=r"the round trip of .* is wrong by"):
        low_latency.check_round_trip(dataclasses.replace(case, topk_weights=2 * case.topk_weights), "xla")
