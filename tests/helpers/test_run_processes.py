"""The launcher of tests in several processes: it passes only if all processes pass in step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LAUNCHER = Path(__file__).parent / "run_processes.py"
CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--seed")
"""
HEAD = """
import os, time, pathlib, pytest
ME = int(os.environ["JAX_EP_TEST_PROCESS"])
def test_passes():
    assert os.environ["JAX_EP_TEST_PROCESSES"] == "2"
def hang():
    pathlib.Path(__file__).with_name(f"hangs{ME}").write_text(str(os.getpid()))
    time.sleep(1000)
"""
# A launcher whose clock stands still until the given file exists, and then runs fast.
STAGED = """
import itertools, sys, time, types
from pathlib import Path
import run_processes
file, clock = Path(sys.argv.pop(1)), itertools.count(step=10)
now = lambda: next(clock) if file.exists() else 0
run_processes.time = types.SimpleNamespace(monotonic=now, sleep=time.sleep)
sys.exit(run_processes.main())
"""


def launch(*arguments: str, late: str | None = None) -> tuple[int, str]:
    """Run the launcher; with `late`, its clock starts once that file exists."""
    staged = [str(LAUNCHER)] if late is None else ["-c", STAGED, late]
    command = [sys.executable, *staged, "2", "-q", "-rN", *arguments]
    # On CPU devices, even if the suite runs on GPUs, whose memory this process holds.
    environment = os.environ | {
        "JAX_EP_TEST_DEVICES": "cpu",
        "PYTHONPATH": os.pathsep.join([str(LAUNCHER.parent), *sys.path]),
    }
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=environment, **streams, check=False)
    return done.returncode, done.stdout


CASES = {
    "passes": ("def test_more(): pass", 0, ["[0] 2 passed"]),
    "fails everywhere": ("def test_more(): assert ME == 7", 1, ["assert 0 == 7", "[1] ", "assert 1 == 7", "[1, 1]"]),
    "fails in one": (
        "def test_more():\n    assert ME == 0\ndef test_hangs():\n    ME == 1 or hang()",
        1,
        ["assert 1 == 0", "processes [1] have failed", "in test_hangs"],
    ),
    "hangs": ("def test_more(): ME == 0 or hang()", 1, ["not done after 5 s", "in test_more"]),
    "not in step": ("def test_more():\n    if ME: pytest.skip('why')", 1, ["were not in step", "'skipped': 1"]),
    "skips": ("def test_more(): pass\npytestmark = pytest.mark.skip", 1, ["no test has passed"]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow(unless={"name": ["fails in one"]})
def test_outcomes(name: str, tmp_path: Path) -> None:
    body, expected, texts = CASES[name]
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_case.py").write_text(HEAD + body + "\n")
    late = {"hangs": "hangs1", "fails in one": "hangs0"}.get(name, "never")
    timeout = "5" if name == "hangs" else "1e9"
    code, output = launch(str(tmp_path), "--timeout", timeout, "--grace", "1", late=str(tmp_path / late))
    assert code == expected, output
    for text in texts:
        assert text in output
