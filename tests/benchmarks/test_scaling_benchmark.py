"""The scaling report: its bytes are those of random routing, its model returns what it was made from."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

import scaling


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_bytes_are_those_of_random_routing(rng, num_ranks):
    experts, top_k, hidden, num_tokens = 64, 6, 256, 20000
    chosen = np.argsort(rng.random((num_tokens, experts)), axis=1)[:, :top_k] // (experts // num_ranks)
    pairs = sum((chosen == rank).any(axis=1).mean() for rank in range(1, num_ranks))
    sizes = {"experts": experts, "top_k": top_k, "hidden": hidden}
    assert scaling.bytes_per_token(num_ranks, **sizes, fp8=False) == pytest.approx(pairs * 2 * hidden, rel=0.02)
    assert scaling.bytes_per_token(num_ranks, **sizes, fp8=True) == pytest.approx(pairs * (hidden + 8), rel=0.02)


def test_model():
    line = scaling.fit({tokens: 20e-6 + tokens * 3e-9 for tokens in (128, 1024, 32768)})
    assert line == pytest.approx((20e-6, 3e-9))
    assert scaling.fit({128: 1e-6, 1024: 9e-6}).start == 0  # no time before time
    lines, link_bytes = {2: scaling.Line(10e-6, 4e-9), 4: scaling.Line(20e-6, 10e-9)}, {2: 1.0, 4: 3.0, 8: 6.0}
    # Twice the bytes of four ranks; and with two ranks the link would take less than the rows do.
    assert scaling.predict(lines, link_bytes, 8, 1000) == pytest.approx(20e-6 + 1000 * 20e-9)
    assert scaling.predict(lines, link_bytes, 2, 1000) == pytest.approx(20e-6 + 1000 * 4e-9)


def test_published_times_are_near_the_model(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--ranks", "4", "8", "--variants", "triton dispatch to rows"])
    scaling.main()
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]
    if not rows:
        pytest.skip("rich is not installed: the table has another form")
    measured = {int(row[1]): (float(row[4]), float(row[5])) for row in rows if row[0] == "4"}
    assert len(measured) >= 3 and all(abs(model / time - 1) < 0.25 for time, model in measured.values())
    assert all(row[4] == "" for row in rows if row[0] == "8")


def test_ranks_must_divide_the_experts(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--ranks", "3"])
    with pytest.raises(SystemExit):
        scaling.main()
    assert "--ranks 3: 256 experts" in capsys.readouterr().err


def test_reports_of_different_models_do_not_mix(tmp_path, monkeypatch, capsys):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, experts in zip(paths, (256, 128), strict=True):
        path.write_text(json.dumps({"settings": {"experts": experts, "top_k": 8}, "rows": []}))
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--results", *map(str, paths)])
    with pytest.raises(SystemExit):
        scaling.main()
    assert "[(128, 8), (256, 8)]; pass those of one model" in capsys.readouterr().err
