"""These tests are of a source checkout: an installation has no benchmarks."""

from pathlib import Path

import pytest
from reports import Clock

from jax_ep.tools.benchmark import harness

if not (Path(__file__).parents[2] / "benchmarks").is_dir():
    collect_ignore_glob = ["*"]


@pytest.fixture
def clock(monkeypatch):
    """Take times from a clock that tests put forward."""
    monkeypatch.setattr(harness, "time", Clock())
    return harness.time
