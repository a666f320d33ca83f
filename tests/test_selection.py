"""Which tests run: those marked slow on GPUs, or on CPU devices with `--slow`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parent / "contract" / "test_low_latency.py"


def collected(*options: str, devices: str = "cpu") -> set[str]:
    environment = os.environ | {"JAX_EP_TEST_DEVICES": devices}
    arguments = ["-q", "--collect-only", "-p", "no:cacheprovider", "-k", "test_routings", *options, str(FILE)]
    command = [sys.executable, "-m", "pytest", "--implementation=xla,triton", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.split("[")[1].rstrip("]") for line in done.stdout.splitlines() if "::" in line}


def test_slow_tests_need_the_option_or_a_gpu():
    pytest.importorskip("triton")
    every = {f"ranks{n}-{implementation}" for n in (1, 2, 4, 8) for implementation in ("xla", "triton")}
    slow = {"ranks1-triton", "ranks4-triton", "ranks8-triton"}
    assert collected() == every - slow
    assert collected("--only-slow") == slow
    assert collected("--slow") == every
    assert collected(devices="gpu") == every
