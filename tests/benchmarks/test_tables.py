"""Tables of docs/performance.md are those that the reports make, and say which reports."""

from __future__ import annotations

import json
import re

import pytest

from lib import tables

DISPATCH, COMBINE = "triton dispatch to rows", "triton combine"


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


def test_the_page_has_the_tables_of_the_reports():
    page = tables.PAGE.read_text()
    assert tables.filled(page, tables.Reports(tables.RESULTS)) == page, "run make tables"
    assert set(re.findall(r"<!-- table (\w+) -->", page)) == set(tables.TABLES)


def test_a_changed_figure_is_seen(tmp_path):
    page = tables.PAGE.read_text()
    for path in tables.RESULTS.glob("dispatch_combine_2_gpus.json"):
        content = json.loads(path.read_text())
        for one in content["rows"]:
            one["seconds"]["median"] *= 2
        (tmp_path / path.name).write_text(json.dumps(content))
    before = cells(tables.made("exchange", tables.Reports(tables.RESULTS)))
    after = cells(tables.made("exchange", tables.Reports(tmp_path)))
    for mine, theirs in zip(after["combine"], before["combine"][:4], strict=True):
        assert int(mine) == pytest.approx(2 * int(theirs), abs=1)
    assert tables.filled(page, tables.Reports(tmp_path)) != page


def test_the_newest_report_that_has_most_columns_counts(tmp_path):
    old = [row(COMBINE, 10 * n, tokens=n) for n in (128, 1024)] + [row(COMBINE, 99, tokens=1024, ranks=4)]
    report(tmp_path, "dispatch_combine_old", old)
    report(tmp_path, "dispatch_combine", [row(COMBINE, 7, tokens=n) for n in (128, 1024)], date="2026-02-01")
    report(tmp_path, "dispatch_combine_part", [row(COMBINE, 3, tokens=128)], date="2026-03-01")
    found = tables.made("exchange", tables.Reports(tmp_path))
    assert cells(found)["us; tokens per rank:"] == ["2 GPUs: 128", "1024", "4 GPUs: 1024"]
    assert cells(found)["combine"] == ["7", "7", "99"]
    assert "dispatch to rows" not in cells(found), "a line without figures"
    assert found.endswith("From `dispatch_combine.json` (2026-02-01), `dispatch_combine_old.json` (2026-01-01).")


def test_what_does_not_count(tmp_path):
    """Quick runs, failures, other routings, and several processes; runs in CUDA graphs have a table of their own."""
    report(tmp_path, "dispatch_combine_quick", [row(COMBINE, 1, tokens=4096)], quick=True)
    report(
        tmp_path, "dispatch_combine_graphs", [row(COMBINE, 2, tokens=4096), row(DISPATCH, 5, tokens=4096)], graphs=True
    )
    rows = [row(COMBINE, 3, tokens=4096, routing="zipf"), row(COMBINE, 4, tokens=4096, processes=4)]
    failed = {"variant": COMBINE, "shape": rows[0]["shape"] | {"routing": "uniform"}, "failed": "out of memory"}
    report(tmp_path, "dispatch_combine", [*rows, failed])
    (tmp_path / "test_gpu.json").write_text(json.dumps({"runs": {}}))
    reports = tables.Reports(tmp_path)
    assert tables.made("exchange", reports).startswith("Not measured yet")
    assert cells(tables.made("graphs", reports))["combine"] == ["2"]


def test_other_gpus_do_not_count(tmp_path):
    for kind, took, date in (("NVIDIA H200", 5, "2026-01-01"), ("NVIDIA H100 80GB HBM3", 3, "2026-02-01")):
        name = f"dispatch_combine_{kind[-4:]}"
        report(tmp_path, name, [row(COMBINE, took, tokens=4096)], date=date)
        content = json.loads((tmp_path / f"{name}.json").read_text()) | {"device": {"platform": "gpu", "kind": kind}}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert cells(tables.made("exchange", tables.Reports(tmp_path)))["combine"] == ["5"]


def test_layers_are_of_one_report(tmp_path):
    def layers(factor):
        names = (tables.OURS, tables.THEIRS)
        rows = [
            row(name, factor * (i + 1), tokens=4096, direction=direction)
            for direction in (tables.FORWARD, tables.BOTH)
            for i, name in enumerate(names)
        ]
        for one in rows:
            one["shape"]["model"] = "deepseek-v3"
        return rows

    report(tmp_path, "moe_layer", layers(100))
    report(tmp_path, "moe_layer_forward", layers(7)[:2], date="2026-02-01")
    reports = tables.Reports(tmp_path)
    assert tables.made("layer", reports).startswith("Not measured yet"), "directions of two runs"
    report(tmp_path, "moe_layer_new", layers(50), date="2026-03-01")
    found = cells(tables.made("layer", tables.Reports(tmp_path)))
    assert found["DeepSeek-V3, 4096"] == ["2", "50, 100", "50, 100", "`moe_layer_new.json`"]


def test_scaling(tmp_path):
    scaled = [
        row(COMBINE, 10, tokens=8, peak_shares={"copy_engine": 0.9}),
        row("training step", 5, tokens=8, tokens_per_s=7e4),
    ]
    for one in scaled:
        one["shape"]["scaling"] = "weak"
    report(tmp_path, "scaling", scaled)
    found = cells(tables.made("scaling", tables.Reports(tmp_path)))
    assert found["triton combine, us"] == ["", "10, 90 %", "", ""]
    assert found["training, tokens/s"] == ["", "70000", "", ""]


def test_pages_that_name_no_table(tmp_path):
    with pytest.raises(
        ValueError, match="<!-- table layers -->: there is no such table, only layer, recipes, exchange"
    ):
        tables.filled("<!-- table layers -->\n<!-- end -->", tables.Reports(tmp_path))
