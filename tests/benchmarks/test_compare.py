"""The benchmark that compares this checkout with another."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from reports import ROOT, arguments, check_report, run

import compare


def report_of(folder: Path, other: float, *, quick: bool = False) -> int:
    """Two operations of 1 s here; `other` seconds in the other checkout, and 1 s."""
    args = arguments(folder, against=Path("before"), label=None, tolerance=1.05, quick=quick)
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


def test_a_folder_without_the_package_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare.py", "--quick", "--out", str(tmp_path), "--against", str(tmp_path)])
    with pytest.raises(SystemExit):
        compare.main()
    assert "it contains no jax_ep" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_quick_run_against_itself(tmp_path):
    completed = run("compare.py", tmp_path, "--against", str(ROOT))
    assert completed.returncode == 0, completed.stdout + completed.stderr
    content = json.loads((tmp_path / "compare.json").read_text())
    check_report(content)
    assert {"grouped_gemm", "moe, gradients", "low_latency_moe, FP8", "fused_moe"} <= set(content["summary"])
    assert "this checkout against" in completed.stdout
