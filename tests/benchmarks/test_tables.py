"""The tables of the documentation match the reports, and name them."""

from __future__ import annotations

import json
import re

import pytest

import tables

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
    assert found.endswith("From `dispatch_combine.json` (2026-02-01), `dispatch_combine_old.json` (2026-01-01).")


def test_pages_that_name_no_table(tmp_path):
    with pytest.raises(
        ValueError, match="<!-- table layers -->: unknown table, expected one of layer, exchange, grouped_gemm"
    ):
        tables.filled("<!-- table layers -->\n<!-- end -->", tables.Reports(tmp_path))
