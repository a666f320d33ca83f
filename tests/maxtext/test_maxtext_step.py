"""benchmarks/maxtext_step.py trains the same model with each expert layer. `make test-maxtext` runs it."""

import json
import os
import runpy
from pathlib import Path

import pytest

if "maxtext" not in os.environ.get("JAX_EP_TESTS_OF", ""):
    pytest.skip("runs in the environment of `make test-maxtext`", allow_module_level=True)

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "maxtext_step.py"


def test_maxtext_step(tmp_path):
    runpy.run_path(str(SCRIPT))["main"](["--quick", "--rounds", "3", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "maxtext_step.json").read_text())["rows"]
    measured = {row["variant"]: row for row in rows if "seconds" in row}
    # MaxText's own layer needs `ragged_all_to_all` for experts on several devices, which CPUs do not have.
    assert set(measured) == {"MaxText, capacity 1.25, drops tokens", "jax_ep", "jax_ep, fp8"}, rows
    for name in ("loss", "raw_grad_norm"):
        of_maxtext, *others = (row[name] for row in measured.values())
        assert others == pytest.approx([of_maxtext] * 2, rel=0.01)
