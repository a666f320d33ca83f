"""`--results FOLDER` writes the results of a run, and measurements of tests, to FOLDER/test_gpu.json.

Runs with other numbers of processes, and of other tests, write to the same file: a run replaces the entries of the
files that it ran. The file is written after every test file, so that a killed run keeps the others.
"""

import collections
import datetime
import json
import os
from pathlib import Path
from typing import Any

import jax

from jax_ep.tools.command import versions

NAME = "test_gpu"
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "triton", "nvshmem4py-cu13", "numpy", "pytest")
_MOST_REASONS = 20
_MOST_TEXT = 2000


def pytest_addoption(parser):
    parser.getgroup("jax_ep").addoption("--results", type=Path, help="folder that keeps outcomes and measurements")


def pytest_configure(config):
    """One process writes: the first of several, and not the workers of pytest-xdist."""
    process = int(os.environ.get("JAX_EP_TEST_PROCESS", "0"))
    folder = config.getoption("results")
    if folder is not None and process == 0 and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(folder))


def header():
    """Return the time, versions and devices."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(_PACKAGES),
        "device": {"platform": device.platform, "kind": device.device_kind, "count": jax.device_count()},
    }


def write(folder, name, content):
    """Store a measurement of a test."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"name": name, **header(), **content}, indent=1)
    (folder / f"{name}.json").write_text(text + "\n")


class _Recorder:
    """Counts outcomes by file."""

    def __init__(self, folder):
        self._folder = folder
        path = folder / f"{NAME}.json"
        self._runs: dict[str, Any] = json.loads(path.read_text())["runs"] if path.exists() else {}
        self._files: dict[str, dict[str, Any]] = {}
        self._current = ""

    def pytest_runtest_logreport(self, report):
        file = report.nodeid.split("::")[0]
        if file != self._current and self._current:
            self._write()
        self._current = file
        found = self._files.setdefault(file, {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0})
        found["seconds"] = round(found["seconds"] + report.duration, 2)
        # A subtest counts if it fails; its test counts in any case.
        is_part = type(report).__name__ == "SubtestReport"
        if report.failed:
            found["failed"] += 1
            found.setdefault("failures", {})[report.nodeid.split("::", 1)[-1]] = report.longreprtext[-_MOST_TEXT:]
            self._write()  # A stopped run does not print why its tests failed.
        elif report.skipped and not is_part:
            found["skipped"] += 1
            reasons = collections.Counter(found.get("reasons", {}))
            reasons[report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)] += 1
            found["reasons"] = dict(reasons.most_common(_MOST_REASONS))
        elif report.when == "call" and not is_part:
            found["passed"] += 1

    def pytest_sessionfinish(self):
        self._write()

    def _write(self):
        count = jax.process_count()
        shared = int(os.environ.get("JAX_EP_TEST_GPUS", count))
        total = jax.device_count()
        own = f"{total} device{'s' * (total > 1)}"
        devices = f"sharing {shared} GPU{'s' * (shared > 1)}" if shared < count else own
        run = self._runs.setdefault(f"{count} process{'es' * (count > 1)}, {devices}", {})
        files = run.get("files", {}) | self._files
        run.update(date=header()["date"], files=files)
        for outcome in ("passed", "failed", "skipped", "seconds"):
            run[outcome] = round(sum(file[outcome] for file in files.values()), 1)
        write(self._folder, NAME, {"runs": self._runs})
