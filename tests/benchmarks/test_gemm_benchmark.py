"""The benchmark of the grouped GEMMs runs whole, on small shapes, in the interpreters of Triton and Mosaic."""

from __future__ import annotations

import importlib.util
import json

import jax.numpy as jnp
import pytest
from reports import check_report, run, run_quickly

from jax_ep.tools.benchmark import grouped_gemm

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed: pip install 'triton>=3.9'", allow_module_level=True)

pytestmark = pytest.mark.slow  # a minute, most of it in Mosaic's interpreter; tests/pallas has the same kernels
DISTRIBUTIONS = ("equal", "multinomial", "zipf")
VARIANTS = (*((name, DISTRIBUTIONS) for name in ("triton", "pallas", "portable loop")), ("cuBLAS batched", None))


@pytest.fixture(scope="module")
def rows_and_output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmarks")
    output = run_quickly("grouped_gemm.py", folder)
    content = json.loads((folder / "grouped_gemm_cpu.json").read_text())
    check_report(content)
    return content["rows"], output


def test_every_direction_and_distribution_is_measured_beside_cublas(rows_and_output):
    rows, output = rows_and_output
    assert not [row for row in rows if "failed" in row]
    directions = ("forward", "input gradient", "weight gradient")
    for variant, expected in VARIANTS:
        measured = {(row["direction"], row["distribution"]) for row in rows if row["variant"] == variant}
        assert measured == {(x, y) for x in directions for y in expected or ("equal",)}, variant
    assert "72x128x24 in 2, weight gradient, zipf" in output


def test_rates_are_those_of_the_problem_and_results_are_right(rows_and_output):
    for row in rows_and_output[0]:
        shape = row["shape"]
        flop = 2 * shape["rows"] * shape["k"] * shape["n"]
        assert row["tflops"] * 1e12 == pytest.approx(flop / row["seconds"]["median"])
        assert 0 <= row["error"] < (0.4 if "FP8" in row["variant"] else 0.1)
        assert row["of_cublas"] > 0


def test_wrong_results_are_not_timed():
    right = jnp.ones((2, 4, 3))
    assert grouped_gemm.check("right", right, right) == 0
    for wrong in (right.at[1, 3, 2].add(0.2), right.at[0, 0, 0].set(jnp.nan)):
        with pytest.raises(RuntimeError, match="variant is wrong"):
            grouped_gemm.check("variant", wrong, right)


def test_shapes_that_cublas_cannot_batch_are_refused(tmp_path):
    completed = run("grouped_gemm.py", tmp_path, "--shapes", "10,8,8,4")
    assert completed.returncode == 2
    assert "groups divide the rows" in completed.stderr
