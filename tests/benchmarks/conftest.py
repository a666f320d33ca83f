"""These tests are of a source checkout: an installation has no benchmarks."""

from pathlib import Path

if not (Path(__file__).parents[2] / "benchmarks").is_dir():
    collect_ignore_glob = ["*"]
