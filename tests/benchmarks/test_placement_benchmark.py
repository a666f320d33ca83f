"""The simulation of placements: drift is what it says, and a quick run reports."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from reports import check_report, run_quickly

import placement
from jax_ep.tools.benchmark import inputs


def test_drift_exchanges_popularity_of_a_share(rng: np.random.Generator) -> None:
    before = inputs.popularity("zipf", 40, rng, 0.8)
    for share in (0.0, 0.25, 1.0):
        later = placement.drifted(before, share, rng)
        assert sorted(later) == sorted(before)
        assert (later != before).sum() <= 40 * share
    assert (placement.drifted(before, 1.0, rng) != before).sum() > 20


def test_loads_are_those_of_the_law(rng: np.random.Generator) -> None:
    """One expert per token: shares are popularities themselves."""
    popularity = inputs.popularity("zipf", 8, rng, 0.7)
    model = inputs.Model(1, 1, 8, 1)
    loads = placement.sampled_loads(popularity, model, 40000, rng)
    want = np.exp(popularity) / np.exp(popularity).sum()
    assert loads.sum() == 40000
    assert np.abs(loads / 40000 - want).max() < 0.02


def test_a_quick_run(tmp_path: Path) -> None:
    run_quickly("placement.py", tmp_path, "--exponents", "1", "--drifts", "0", "0.5")
    content = json.loads((tmp_path / "placement.json").read_text())
    check_report(content)
    assert {row["variant"] for row in content["rows"]} == {"contiguous", "packed", "global"}
    assert all([found["drift"] for found in row["most_loaded_over_mean"]] == [0, 0.5] for row in content["rows"])
