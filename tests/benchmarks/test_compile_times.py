"""benchmarks/compile_times.py compiles each program twice, the second time from what the first has left."""

from __future__ import annotations

import json

import pytest
from reports import check_report, run_quickly


@pytest.mark.slow
def test_compile_times(tmp_path):
    output = run_quickly("compile_times.py", tmp_path, "--recipe", "fp8")
    content = json.loads((tmp_path / "compile_times.json").read_text())
    check_report(content)
    rows = {(row["variant"], row["direction"]): row for row in content["rows"]}
    assert set(rows) == {(c, d) for c in ("cold", "cached") for d in ("forward", "forward + backward")}
    for row in rows.values():
        assert min(row["trace_s"], row["lower_s"], row["compile_s"]) > 0
    assert {row["shape"]["recipe"] for row in content["rows"]} == {"fp8"}
    # What is compiled is found again; programs are traced again.
    both = [rows[cache, "forward + backward"]["compile_s"] for cache in ("cold", "cached")]
    assert both[1] < both[0]
    assert "seconds to compile" in output
