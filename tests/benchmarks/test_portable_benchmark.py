"""The ways of the portable exchange beside each other: what each is said to send, and a quick run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from reports import check_report, run_quickly

import portable


def test_bytes_of_each_way() -> None:
    pairs = np.array([[7, 9, 0, 3], [1, 1, 1, 1], [0, 0, 0, 0], [5, 5, 5, 5]])
    assert portable.sent_bytes(portable.ALL, pairs, tokens=20, row_bytes=2) == 3 * 20 * 2
    assert portable.sent_bytes(portable.RAGGED, pairs, tokens=20, row_bytes=2) == 15 * 2
    assert portable.sent_bytes(portable.ROUNDS, pairs, tokens=20, row_bytes=2) == 3 * 10 * 2  # five rounds of two


@pytest.mark.slow
def test_a_quick_run(tmp_path: Path) -> None:
    run_quickly("portable.py", tmp_path)
    content = json.loads((tmp_path / "portable.json").read_text())
    check_report(content)
    measured = {(row["shape"]["path"], row["variant"]) for row in content["rows"] if "seconds" in row}
    assert measured == {(path, way) for path in portable.PATHS for way in (portable.ALL, portable.ROUNDS)}
    failed = [row["failed"] for row in content["rows"] if "failed" in row]
    assert failed == ["CPU devices have none"] * 4
    assert content["summary"]["ragged_cost"] == []
