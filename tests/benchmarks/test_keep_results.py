"""`--results` keeps what a run of the tests has come to, however it ends, beside what earlier runs kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FIRST = """
import os, pytest
def test_good(): pass
def test_bad(): assert False
@pytest.mark.skip(reason="not today")
def test_skipped(): pass
"""
SECOND = """
import os
def test_good(): pass
def test_bad(): assert False
def test_that_ends_the_process(): os._exit(7)
"""
CONFTEST = 'pytest_plugins = ["keep_results"]\n'


def run(folder: Path, *names: str) -> dict:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1] / "helpers"), *sys.path]),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--results", "kept", *names]
    subprocess.run(command, cwd=folder, env=environment, capture_output=True)
    return json.loads((folder / "kept" / "test_gpu.json").read_text())


@pytest.mark.slow
def test_outcomes_are_kept_by_file_and_by_number_of_processes(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_first.py").write_text(FIRST)
    (tmp_path / "test_second.py").write_text(SECOND)
    kept = run(tmp_path, "test_first.py", "test_second.py")  # the second file ends the process
    ((name, found),) = kept["runs"].items()
    assert name.startswith("1 process, ")
    assert set(found["files"]) == {"test_first.py", "test_second.py"}  # the second as far as its last failure
    first = found["files"]["test_first.py"]
    assert (first["passed"], first["failed"], first["skipped"]) == (1, 1, 1)
    assert list(first["failures"]) == ["test_bad"] and "assert False" in first["failures"]["test_bad"]
    assert list(first["reasons"]) == ["Skipped: not today"]
    assert {"jax", "jaxlib", "pytest"} <= set(kept["versions"]) and kept["device"]["platform"] == "cpu"

    (tmp_path / "test_first.py").write_text("def test_good(): pass\n")
    (tmp_path / "test_second.py").write_text("def test_good(): pass\n")
    assert run(tmp_path, "test_second.py")["runs"][name]["failed"] == 1  # that of the file which did not run again
    again = run(tmp_path, "test_first.py")["runs"][name]
    assert (again["passed"], again["failed"], again["skipped"]) == (2, 0, 0)
    assert set(again["files"]) == {"test_first.py", "test_second.py"}
