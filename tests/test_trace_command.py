"""`jax-ep trace` as a user without a GPU runs it: tiny sizes in the interpreter."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import harness
from jax_ep import __main__, tracing

ROOT = Path(__file__).resolve().parents[1]
for package in ("triton", "rich", "matplotlib"):
    pytest.importorskip(package)

FUSED = ["--dispatch-mode", "fused", "--combine-mode", "scatter"]
CASES = {
    "dispatch": ([], {"plan", "dispatch"}),
    "combine": ([], {"combine"}),
    "moe": (FUSED, {"plan", "dispatch_gemm", "gemm_combine"}),
    "low-latency": ([], {"low_latency_dispatch", "low_latency_gemm_combine"}),
}


@pytest.mark.parametrize("what", CASES)
@pytest.mark.slow
def test_a_recording(what: str, tmp_path: Path) -> None:
    options, kernels = CASES[what]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)
    command = [*harness.STRICT_PYTHON, "-m", "jax_ep", "trace", what, "--ranks", "2", "--calls", "1", *options]
    done = subprocess.run(
        [*command, "--out", "t.json.gz", "--png"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    trace = tracing.Trace.load(tmp_path / "t.json.gz")
    assert {launch.kernel for launch in trace.launches.values()} == kernels
    assert (trace.devices, trace.is_ordered_only, sum(trace.num_dropped.values())) == ([0, 1], True, 0)
    assert all(name in done.stdout for name in kernels) and "order, no times" in done.stdout
    assert sorted(path.name for path in tmp_path.glob("*.png")) == sorted(f"t_{name}.png" for name in kernels)


def test_what_cannot_be_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["trace", "fused"])
    assert "invalid choice: 'fused'" in capsys.readouterr().err
