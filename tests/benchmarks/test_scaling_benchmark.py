"""Scaling: bytes are those of the routing, warnings come where they should."""

from __future__ import annotations

import numpy as np
import pytest

from jax_ep.core.kernel import Kernel
from jax_ep.tools.benchmark import growth, harness, inputs, links, scaling


def test_places_are_measured_once():
    found = scaling.places([1, 2, 4], 8, 32)
    assert [tuple(place) for place in found] == [
        (1, 8, ("weak",)),
        (1, 32, ("strong",)),
        (2, 8, ("weak",)),
        (2, 16, ("strong",)),
        (4, 8, ("weak", "strong")),
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_what_the_most_loaded_rank_moves(rng, num_ranks):
    experts, tokens, top_k, row_bytes = 8, 11, 3, 10
    ids = np.argsort(rng.random((num_ranks * tokens, experts)), axis=1)[:, :top_k].astype(np.int32)
    rows, sent, apart = np.zeros(num_ranks), np.zeros((num_ranks, num_ranks)), np.zeros((num_ranks, num_ranks))
    for i, chosen in enumerate(ids):
        source, owners = i // tokens, [expert // (experts // num_ranks) for expert in chosen]
        for owner in owners:
            rows[owner] += 1
            apart[source, owner] += owner != source
        for owner in set(owners) - {source}:
            sent[source, owner] += 1
    busiest = [max(m.sum(0).max(), m.sum(1).max()) * row_bytes for m in (sent, apart)]
    found = growth.moved(ids, num_ranks, experts, row_bytes)
    assert found == pytest.approx((rows.max() * row_bytes, *busiest, ids.nbytes))


def test_warnings_are_for_times_that_grow_faster_than_bytes():
    moved = {n: growth.Moved(100.0, sent, 2 * sent, 8.0 * n) for n, sent in ((1, 0.0), (2, 10.0), (4, 27.0))}
    both = ("rows", "sent")
    # From one rank to two something begins to travel: any time is allowed.
    assert growth.warnings("x", both, {1: 1e-6, 2: 9e-6, 4: 9e-6 * 2.7}, moved) == []
    (line,) = growth.warnings("weak scaling, x", both, {1: 1e-6, 2: 100e-6, 4: 300e-6}, moved)
    assert line == "weak scaling, x: from 2 to 4 ranks the time goes from 100 us to 300 us, 3.00 times, its bytes 2.70"
    assert len(growth.warnings("x", ("rows",), {1: 1e-6, 2: 2e-6, 4: 2.1e-6}, moved)) == 1
    # Half the bytes, and more than half the time.
    halved = {2: growth.Moved(100.0, 0.0, 0.0, 1.0), 4: growth.Moved(50.0, 0.0, 0.0, 1.0)}
    assert "0.80 times, its bytes 0.50" in growth.warnings("x", ("rows",), {2: 1e-4, 4: 0.8e-4}, halved)[0]


def test_kernels_that_are_told_apart_have_these_names():
    """Of the package; a new name would be taken for one that moves rows alone."""
    from jax_ep.megakernels import exchange, exchange_gemm, send_order

    modules = (exchange, exchange_gemm, send_order)
    named = {value.name for module in modules for value in vars(module).values() if isinstance(value, Kernel)}
    assert set(growth.KERNELS) == named


def kernel(name, us, share=0.5):
    return {"name": name, "calls": 1.0, "us_per_call": us, "us": us, "share": share}


def test_rows_of_kernels_are_watched():
    row = {"part": "kernels", "kernels": [kernel("dispatch", 10), kernel("loop_fusion", 5), kernel("tiny", 1, 0.001)]}
    assert list(scaling.timed(row)) == [
        ("kernel dispatch", ("rows", "sent"), pytest.approx(1e-5)),
        ("kernel loop_fusion", ("rows",), pytest.approx(5e-6)),
    ]


NVLINK = """GPU 0: NVIDIA H200 (UUID: GPU-0)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H200 (UUID: GPU-1)
\t Link 0: 26.562 GB/s
\t Link 1: {}
"""


def test_theoretical_rate_of_links():
    whole, part = links.parse(NVLINK.format("26.562 GB/s")), links.parse(NVLINK.format("<inactive>"))
    assert whole.bytes_per_s == pytest.approx(2 * 26.562e9) and "2 links of 26.562 GB/s" in whole.said
    assert part.bytes_per_s == pytest.approx(26.562e9), "of the GPU that has least"
    assert links.parse("").bytes_per_s is None and links.parse("GPU 0: T4\n").bytes_per_s is None


def test_without_the_tool_the_rate_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "")
    found = links.nvlink()
    assert found.bytes_per_s is None and found.said == "unknown: there is no nvidia-smi"


def test_shares_of_peaks():
    timing = harness.Timing((1e-3, 1e-3, 1e-3))
    found = scaling.shares(3e8, timing, {"copy_engine": 4e11, "link": None})
    assert found["peak_shares"] == {"copy_engine": pytest.approx(0.75), "link": None}
    assert scaling.percent(found["peak_shares"], "copy_engine") == "75%"
    assert scaling.percent(found["peak_shares"], "link") == "unknown"
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


def test_kernels_are_reported_and_watched(tmp_path, monkeypatch, capsys):
    """What the profiler would find on GPUs; a profile that fails keeps the others."""
    args = harness.parse(scaling.options(), ["--quick", "--out", str(tmp_path)])
    args.model = "tiny"
    run = scaling.Run(args, harness.Report("scaling", args), inputs.MODELS["tiny"], {}, {})
    times = {1: 10.0, 2: 12.0}

    def profile(program, rounds):
        if program not in times:
            raise ValueError("no event on a stream")
        found = {"kernels": [kernel("weighted_activation", times[program])], "span_us": times[program]}
        return harness.Timing((times[program] * 1e-6,) * 3), found

    monkeypatch.setattr(scaling.profiler, "profile", profile)
    monkeypatch.setattr(scaling.layer_variants, "program", lambda mesh, model, tokens, backward: mesh)
    for ranks in (1, 2, 4):
        scaling.measure_kernels(run, ranks, scaling.Place(ranks, 8, ("weak",)))
        run.moved[ranks, 8] = growth.Moved(100.0, 0.0, 0.0, 1.0)
    assert [row.get("failed") for row in run.report.rows] == [None, None, "ValueError: no event on a stream"]
    (line,) = scaling.find_warnings(run)
    assert "kernel weighted_activation: from 1 to 2 ranks" in line and "1.20 times, its bytes 1.00" in line
    scaling.show(run.report)
    shown = " ".join(capsys.readouterr().out.split())
    assert "EP 2, 8 tokens" in shown and "weighted_activation" in shown and "no event on a stream" in shown
