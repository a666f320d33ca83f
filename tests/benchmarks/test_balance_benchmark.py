"""The simulation of balanced layers: a quick run reports, and bounds hold."""

from __future__ import annotations

import json
from pathlib import Path

from reports import check_report, run_quickly


def test_quick_run(tmp_path: Path) -> None:
    run_quickly("balance.py", tmp_path, "--exponents", "1", "--spare", "1")
    content = json.loads((tmp_path / "balance.json").read_text())
    check_report(content)
    assert [row["shape"]["ranks"] for row in content["rows"]] == [2, 4]
    for row in content["rows"]:
        assert row["most_loaded_over_mean"] > 1 and row["most_passes"] >= 1
        assert row["copies_of_fullest_rank"] <= 1 and row["copies"] <= row["shape"]["ranks"]
