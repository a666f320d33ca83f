"""Running the benchmarks' scripts, and what their reports must say."""

import argparse
import datetime
import subprocess
import threading
from pathlib import Path

from harness import ROOT, STRICT_PYTHON, run_command

BENCHMARKS = ROOT / "benchmarks"
KEYS = {"name", "script", "date", "versions", "device", "settings", "summary", "rows"}


class Clock:
    """A clock that naps alone put forward: what is measured does not depend on the machine."""

    def __init__(self) -> None:
        self._now = 0.0
        self._lock = threading.Lock()

    def perf_counter(self) -> float:
        return self._now

    def nap(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds


def arguments(out: Path, **changed: object) -> argparse.Namespace:
    """A parsed command line."""
    return argparse.Namespace(**{"out": out, "suffix": "", "script": "script", "rounds": 3, "quick": False} | changed)


def run(script: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A quick run of a script, as from the command line."""
    return run_command(*STRICT_PYTHON, str(BENCHMARKS / script), "--quick", "--out", str(folder), *arguments)


def run_quickly(script: str, folder: Path, *arguments: str) -> str:
    """What a quick run that succeeds prints."""
    completed = run(script, folder, *arguments)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def check_report(content: dict) -> None:
    """What every report must say for its figures to mean something."""
    assert set(content) == KEYS
    date = datetime.datetime.fromisoformat(content["date"])
    assert date.utcoffset() == datetime.timedelta(0)
    assert {"python", "jax", "jaxlib", "numpy"} <= set(content["versions"])
    assert {"platform", "kind", "count", "cores"} <= set(content["device"])
    assert content["device"]["kind"] and content["device"]["count"] >= 1
    assert content["settings"]["rounds"] >= 3
    assert any("seconds" in row for row in content["rows"])
    for row in content["rows"]:
        assert row["variant"] and row["shape"] and row["shape"]["dtype"]
        if "failed" in row:
            assert row["failed"]
            continue
        seconds = row["seconds"]
        # Differences of chains too short for a clock, as in a quick run, may be negative.
        assert seconds["median"] > 0 or content["settings"]["quick"]
        assert seconds["min"] <= seconds["q1"] <= seconds["median"] <= seconds["q3"]
        assert 3 <= seconds["rounds"] <= content["settings"]["rounds"]
