"""Running the benchmarks' scripts, and what their reports must say."""

import argparse
import datetime
import threading

from harness import ROOT, STRICT_PYTHON, run_command

BENCHMARKS = ROOT / "benchmarks"
KEYS = {"name", "script", "date", "versions", "device", "settings", "summary", "rows"}


class Clock:
    """A clock that naps alone put forward: what is measured does not depend on the machine."""

    def __init__(self):
        self._now = 0.0
        self._lock = threading.Lock()

    def perf_counter(self):
        return self._now

    def nap(self, seconds):
        with self._lock:
            self._now += seconds


def arguments(out, **changed):
    """A parsed command line."""
    return argparse.Namespace(**{"out": out, "suffix": "", "script": "script", "rounds": 3, "quick": False} | changed)


def run(script, folder, *arguments):
    """A quick run of a script, as from the command line."""
    return run_command(*STRICT_PYTHON, str(BENCHMARKS / script), "--quick", "--out", str(folder), *arguments)


def run_quickly(script, folder, *arguments):
    """What a quick run that succeeds prints."""
    completed = run(script, folder, *arguments)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def check_report(content):
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
