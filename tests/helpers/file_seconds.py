"""`--seconds FILE` writes the seconds of each test file to FILE and prints the slowest ten."""

import collections
import json
from pathlib import Path

SHOWN = 10


def pytest_addoption(parser):
    parser.getgroup("jax_ep").addoption("--seconds", type=Path, help="JSON file for the seconds of each test file")


def pytest_configure(config):
    path = config.getoption("seconds")
    if path is not None and not hasattr(config, "workerinput"):  # The workers of pytest-xdist report to one process.
        config.pluginmanager.register(_Recorder(path))


class _Recorder:
    """Sums the seconds of setup, call and teardown by file."""

    def __init__(self, path):
        self._path = path
        self._seconds: collections.Counter[str] = collections.Counter()

    def pytest_runtest_logreport(self, report):
        if type(report).__name__ != "SubtestReport":  # Its test includes these seconds.
            self._seconds[report.nodeid.split("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter):
        found = {file: round(seconds, 2) for file, seconds in self._seconds.most_common()}
        total = round(self._seconds.total(), 1)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"total": total, "files": found}, indent=1) + "\n")
        terminalreporter.section(f"slowest files, of {total} s in all")
        for file, seconds in list(found.items())[:SHOWN]:
            terminalreporter.write_line(f"{seconds:8.1f} s  {file}")
