"""The local steps beside each other: what each is said to move, and a quick run."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from reports import check_report, run_quickly

import local_steps
from lib import inputs


def test_bytes_of_each_step() -> None:
    """Four tokens of 256 bytes, with two rows each; in FP8 of 128, and a scale."""
    x, y, ids = jnp.zeros((4, 128), jnp.bfloat16), jnp.zeros((8, 128), jnp.bfloat16), jnp.zeros((4, 2), jnp.int32)
    found = local_steps.steps_of(local_steps.Case(x, y, ids, inputs.MODELS["tiny"]))
    moved = {variant.partition(":")[0]: step.num_bytes for variant, step in found.items()}
    assert moved == {
        local_steps.COPY: 2 * 8 * 256,
        local_steps.PERMUTE: (4 + 8) * 256,
        local_steps.PERMUTE_FP8: (4 + 8) * 132,
        local_steps.UNPERMUTE: (8 + 4) * 256,
        local_steps.TO_FP8: 4 * 256 + 8 * 132,
        local_steps.SUM_TO_FP8: 8 * 256 + 4 * 132,
    }


@pytest.mark.slow
def test_a_quick_run(tmp_path: Path) -> None:
    run_quickly("local_steps.py", tmp_path)
    content = json.loads((tmp_path / "local_steps.json").read_text())
    check_report(content)
    failed = {row["variant"]: row["failed"] for row in content["rows"] if "failed" in row}
    unresolved = "takes less than what these chains resolve"
    assert {name for name, error in failed.items() if error != unresolved} == {
        f"{step}: triton" for step in (local_steps.PERMUTE, local_steps.PERMUTE_FP8, local_steps.UNPERMUTE)
    }
    measured = {row["variant"] for row in content["rows"] if "seconds" in row}
    assert {name for name in measured if name.endswith("pallas")} == {
        f"{step}: pallas" for step in (local_steps.TO_FP8, local_steps.SUM_TO_FP8)
    }
