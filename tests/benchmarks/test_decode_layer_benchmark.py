"""Part `layer` of benchmarks/low_latency.py times what it says it times."""

from __future__ import annotations

import json

import pytest
from reports import check_report, run_quickly

VARIANTS = {"moe"} | {f"low latency{how}, {dtype}" for how in ("", ", separate") for dtype in ("fp8", "bf16")}


@pytest.mark.slow
def test_quick_run(tmp_path):
    output = run_quickly("low_latency.py", tmp_path, "--parts", "layer")
    content = json.loads((tmp_path / "decode_layer.json").read_text())
    check_report(content)
    assert {row["variant"] for row in content["rows"]} == VARIANTS
    for row in content["rows"]:
        assert (row["error"] > 0.01) == ("fp8" in row["variant"])
        assert row["shape"]["ranks"] == 4
    assert "2 tokens/rank, 4 ranks" in output
