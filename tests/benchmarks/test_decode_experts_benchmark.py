"""Part `experts` of benchmarks/low_latency.py times what it says it times."""

from __future__ import annotations

import json

import numpy as np
import pytest
from reports import check_report, run_quickly

from jax_ep.tools.benchmark import decode_experts
from jax_ep.tools.benchmark.inputs import Model

PARTS = {"gate_up", "activation", "down", "experts", "read all of gate_up"}


@pytest.mark.slow
def test_quick_run(tmp_path):
    output = run_quickly("low_latency.py", tmp_path, "--parts", "experts")
    content = json.loads((tmp_path / "decode_experts.json").read_text())
    check_report(content)
    for dtype in ("fp8", "bf16"):
        rows = [row for row in content["rows"] if row["shape"]["dtype"] == dtype]
        assert {row["variant"] for row in rows} == PARTS
        assert not [row for row in rows if "failed" in row]
        assert all(row["error"] < 0.3 for row in rows)
    assert "2 tokens/rank of 4" in output and "TB/s of weights" in output


def test_bytes_are_those_of_experts_with_rows():
    model = Model(hidden=256, intermediate=128, experts=8, top_k=1)
    sizes, _ = decode_experts.make_rows(model, 2, 1, True)
    weights = decode_experts.make_weights(model, 4, True)
    used = int((np.asarray(sizes) > 0).sum())
    assert 0 < used + 1 <= 4  # two tokens over eight experts, of which four are here
    count = decode_experts.read_bytes
    assert count("gate_up", sizes, weights) == used * 256 * 256
    assert count("experts", sizes, weights) == used * (256 * 256 + 128 * 256)
    assert count("read all of gate_up", sizes, weights) == 4 * 256 * 256


def test_every_call_of_a_chain_is_made():
    model = Model(hidden=256, intermediate=128, experts=8, top_k=2)
    operands = *decode_experts.make_rows(model, 2, 3, False), decode_experts.make_weights(model, 4, False)
    counts = {}
    for n in (1, 3):
        fn, args = decode_experts.program(decode_experts.steps("xla")["gate_up"], *operands, n)
        counts[n] = fn.lower(*args).compile().as_text().count(" dot(")
    assert counts[3] == 3 * counts[1] > 0


def test_both_dtypes_are_checked():
    model = Model(hidden=256, intermediate=128, experts=8, top_k=2)
    for fp8 in (False, True):
        operands = *decode_experts.make_rows(model, 2, 3, fp8), decode_experts.make_weights(model, 4, fp8)
        assert decode_experts.check(*operands, "xla") < 0.01
