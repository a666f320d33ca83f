"""tools/evidence.sh: its pieces per number of GPUs, its records, and failures."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tools" / "evidence.sh"

if not SCRIPT.exists():  # An installed package has no tools.
    pytest.skip("needs a source checkout", allow_module_level=True)


def run(folder, *arguments, python="true", gpus=1, minutes=25):
    """With a Python that does nothing, successfully or not."""
    environment = os.environ | {"GPUS": str(gpus), "RESULTS": str(folder), "MINUTES": str(minutes)}
    command = [str(SCRIPT), python, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def listed(folder, *arguments, gpus=1, minutes=25):
    """Return the pieces, and whether they are done, or too late."""
    lines = run(folder, "--list", *arguments, gpus=gpus, minutes=minutes).stdout.splitlines()
    return {line[6:].split()[0]: line[:4].strip() for line in lines}


def test_scripts_of_pieces_exist(tmp_path):
    words = run(tmp_path, "--list", gpus=4).stdout.split()
    scripts = [word for word in words if word.startswith(("benchmarks/", "tools/"))]
    assert scripts and all((ROOT / script).exists() for script in scripts)


def test_what_is_done_is_not_done_again(tmp_path):
    first = run(tmp_path, "bench-grouped-gemm", "bench-compile-times")
    assert first.returncode == 0, first.stderr
    states = listed(tmp_path)
    done = [name for name, state in states.items() if state == "done"]
    assert done == ["bench-compile-times", "bench-grouped-gemm"]
    everything = run(tmp_path)
    assert everything.returncode == 0, everything.stderr
    assert "== bench-grouped-gemm: done at " in everything.stdout
    assert set(listed(tmp_path).values()) == {"done"}
    assert "" in listed(tmp_path, gpus=2).values(), "what one GPU has shown, two have not"


def test_failures(tmp_path):
    failed = run(tmp_path, "bench-fused-moe", "bench-grouped-gemm", python="false")
    assert failed.returncode == 1
    assert failed.stderr.count("exit status 1") == 2, "the second runs, too"
    assert set(listed(tmp_path, minutes=60).values()) == {""}
