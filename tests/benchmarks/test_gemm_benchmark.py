"""The benchmark of the grouped GEMMs runs whole, on small shapes, in the interpreters of Triton and Mosaic."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "grouped_gemm.py"

if not SCRIPT.is_file():
    pytest.skip("not a source checkout", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed: pip install 'triton>=3.9'", allow_module_level=True)

pytestmark = pytest.mark.slow  # a minute, most of it in Mosaic's interpreter; tests/pallas has the same kernels
DISTRIBUTIONS = ("equal", "multinomial", "zipf")
VARIANTS = (
    *((name, DISTRIBUTIONS) for name in ("triton", "pallas", "portable loop")),
    ("cuBLAS batched", None),
)


def run(folder, *options):
    # Not the virtual devices of the tests: the benchmark makes its own.
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", str(SCRIPT), "--quick", "--out", str(folder), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def rows_and_output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmarks")
    completed = run(folder, "--parts", "kernels", "sweep")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return json.loads((folder / "grouped_gemm_cpu.json").read_text())["rows"], completed.stdout


def test_every_direction_and_distribution_is_measured_beside_cublas(rows_and_output):
    rows, output = rows_and_output
    assert not [row for row in rows if "failed" in row]
    directions = ("forward", "input gradient", "weight gradient")
    for variant, expected in VARIANTS:
        measured = {(row["direction"], row["distribution"]) for row in rows if row["variant"] == variant}
        assert measured == {(x, y) for x in directions for y in expected or ("equal",)}, variant
    tried = {row["variant"] for row in rows if "tiles" in row} - {"cuBLAS batched"}
    assert tried and all(name in output for name in tried)


def test_rates_are_those_of_the_problem_and_results_are_right(rows_and_output):
    for row in rows_and_output[0]:
        shape = row["shape"]
        flop = 2 * shape["rows"] * shape["k"] * shape["n"]
        assert row["tflops"] * 1e12 == pytest.approx(flop / row["seconds"]["median"])
        assert 0 <= row["error"] < (0.4 if "FP8" in row["variant"] else 0.1)
        assert row["of_cublas"] > 0


def test_shapes_that_cublas_cannot_batch_are_refused(tmp_path):
    completed = run(tmp_path, "--sweep", "--shapes", "10,8,8,4")
    assert completed.returncode == 2
    assert "groups divide the rows" in completed.stderr
