"""benchmarks/scaling.py measures each case once, and relates rates to the peaks."""

from __future__ import annotations

import pytest

from jax_ep.tools.benchmark import harness, scaling


def test_places_are_measured_once():
    found = scaling.places([1, 2, 4], 8, 32)
    assert [tuple(place) for place in found] == [
        (1, 8, ("weak",)),
        (1, 32, ("strong",)),
        (2, 8, ("weak",)),
        (2, 16, ("strong",)),
        (4, 8, ("weak", "strong")),
    ]


def test_shares_of_peaks():
    timing = harness.Timing((1e-3, 1e-3, 1e-3))
    found = scaling.shares(3e8, timing, {"copy_engine": 4e11, "copy_engines_together": None})
    assert found["peak_shares"] == {"copy_engine": pytest.approx(0.75), "copy_engines_together": None}
    assert found["peak_share"] is None
    assert scaling.shares(0.0, timing, {"copy_engine": 4e11}) == {"wire_bytes": 0.0}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "64"], "--ranks 64: this machine has 8 devices"),
        (["--ranks", "3"], "--ranks 3: it must divide the 8 experts of tiny"),
        (["--ranks", "2", "--total-tokens", "7"], "--total-tokens 7: must be a multiple of the 2 ranks"),
    ],
)
def test_ranks_that_the_machine_does_not_have(monkeypatch, capsys, arguments, said):
    parser = scaling.options()
    with pytest.raises(SystemExit):
        scaling.complete(harness.parse(parser, ["--quick", *arguments]), parser)
    assert said in capsys.readouterr().err
