"""`jax-ep bench train` runs whole steps on CPU devices, and counts the FLOPs that its documentation says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from reports import run_quickly

from jax_ep.tools.benchmark import inputs, train


@pytest.mark.slow
def test_train_benchmark_steps_of_all_layers_agree(tmp_path: Path) -> None:
    variants = ["jax_ep", "jax_ep balance", "xla", "padded"]
    run_quickly("train.py", tmp_path, "--variants", *variants)
    rows = json.loads((tmp_path / "train.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == variants
    for row in rows:
        assert row["donated_bytes"] == row["state_bytes"]
        # The padded layer drops some tokens.
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=5e-3)
    assert abs(rows[0]["losses"][0] - math.log(256)) < 2


def test_train_benchmark_flops() -> None:
    model = train.Architecture(inputs.Model(8, 4, 2, 1), 2, 1, 4, 16, 1, shared=3)
    gemms = 2 * 8 * (8 + 2 * 4) + 2 * 8 * 8 + 2 * 8 * 2 + 6 * 8 * 4 + 6 * 8 * 3
    scores = 2 * 2 * 8 * 10 / 2  # two GEMMs over half of the 10 positions
    assert train.flops_per_token(model, 5, 10) == 3 * (5 * (gemms + scores) + 2 * 8 * 16)


def test_train_benchmark_groups_kernels() -> None:
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
