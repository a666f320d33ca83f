"""The benchmarks run on small shapes, time what they say they time, and the published figures are complete."""

import argparse
import collections
import datetime
import errno
import io
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reports import BENCHMARKS, arguments, run

from jax_ep.tools.benchmark import exchange, grouped_gemm, harness, inputs


def test_variants_run_in_turns_and_every_other_round_backwards():
    calls = []
    times = harness.measure_interleaved({name: lambda name=name: calls.append(name) for name in "abc"}, 4, warmup=1)
    assert "".join(calls) == "abc" + "abc" + "cba" + "abc" + "cba"
    assert [len(timing.samples) for timing in times.values()] == [4, 4, 4]


def test_slow_variants_stop_at_their_budget_and_times_are_those_of_the_calls(clock):
    naps = {"slow": 0.04, "fast": 0.002}
    runs = {name: lambda nap=nap: clock.nap(nap) for name, nap in naps.items()}
    times = harness.measure_interleaved(runs, 8, warmup=0, budget_s=0.1)
    assert (len(times["slow"].samples), len(times["fast"].samples)) == (3, 8)
    assert all(times[name].samples == pytest.approx([nap] * len(times[name].samples)) for name, nap in naps.items())
    assert times["slow"].ratio_to(times["fast"]) == pytest.approx(20)


def test_chains_leave_out_what_runs_once(clock):
    once, each = 0.06, 0.02

    def make(n):
        def nap(x):
            clock.nap(once + n * each)
            return np.asarray(x)

        return lambda x: jax.pure_callback(nap, jax.ShapeDtypeStruct(x.shape, x.dtype), x), (jnp.ones(4),)

    timing = harness.measure_chained({"nap": make}, 5, lengths=(1, 4))["nap"]
    assert len(timing.samples) == 5
    assert timing.median == pytest.approx(each)


def test_chains_whose_long_one_is_faster_have_no_negative_times(clock):
    naps = {1: 0.02, 3: 0.01}

    def make(n):
        def nap(x):
            clock.nap(naps[n])
            return np.asarray(x)

        return lambda x: jax.pure_callback(nap, jax.ShapeDtypeStruct(x.shape, x.dtype), x), (jnp.ones(4),)

    timing = harness.measure_chained({"nap": make}, 3)["nap"]
    assert timing.samples == (1e-9,) * 3
    assert timing.microseconds() == ["0.0", "0.0 to 0.0"]
    failures = {}
    assert harness.measure_chained({"nap": make}, 3, failures=failures, resolve=True) == {}
    assert failures == {"nap": "takes less than what these chains resolve"}


def test_chains_that_fail_are_left_out_where_that_is_asked_for():
    def fail(n):
        if n == 3:
            raise NotImplementedError("no such thing")
        return lambda x: x + n, (jnp.ones(4),)

    def add(n):
        return jax.jit(lambda x: x + n), (jnp.ones(4),)

    failures = {}
    times = harness.measure_chained({"fail": fail, "add": add}, 3, failures=failures)
    assert (set(times), failures) == ({"add"}, {"fail": "NotImplementedError: no such thing"})
    with pytest.raises(NotImplementedError, match="no such thing"):
        harness.measure_chained({"fail": fail, "add": add}, 3)


def test_a_chain_that_fails_when_it_runs_again_is_left_out():
    """Leave out a chain that runs once only, as one that no CUDA graph can capture."""
    calls = collections.Counter()

    def once(n):
        def run(x):
            calls[n] += 1
            if calls[n] > 1:
                raise RuntimeError("no graph")
            return np.asarray(x)

        return lambda x: jax.pure_callback(run, jax.ShapeDtypeStruct(x.shape, x.dtype), x), (jnp.ones(4),)

    failures = {}
    assert harness.measure_chained({"once": once}, 3, failures=failures) == {}
    assert "no graph" in failures["once"]


def test_summary_and_ratio_of_known_samples():
    timing = harness.Timing((4.0, 1.0, 3.0, 2.0, 5.0))
    assert timing.summary() == {"median": 3.0, "q1": 2.0, "q3": 4.0, "min": 1.0, "rounds": 5}
    # The median of the ratios within rounds (2, 2, 3), not the ratio of the medians (8 and 3).
    assert harness.Timing((8.0, 2.0, 9.0)).ratio_to(timing) == 2.0
    assert timing.microseconds() == ["3000000", "2000000 to 4000000"]
    assert harness.Timing((2e-6,) * 3).microseconds() == ["2.0", "2.0 to 2.0"]


def test_report_is_on_disk_after_every_row(tmp_path):
    report = harness.Report("name", arguments(tmp_path / "new"))
    report.add("a", {"rows": 4}, harness.Timing((1.0, 2.0, 3.0)), part="p")
    first = json.loads(report.path.read_text())
    assert first["rows"] == [
        {
            "variant": "a",
            "shape": {"rows": 4},
            "seconds": {"median": 2.0, "q1": 1.5, "q3": 2.5, "min": 1.0, "rounds": 3},
            "part": "p",
        }
    ]
    report.failed("b", {"rows": 4}, "out of memory")
    report.summarize(ratio=1.5)
    second = json.loads((tmp_path / "new" / "name.json").read_text())
    assert (second["rows"][1]["failed"], second["summary"]) == ("out of memory", {"ratio": 1.5})
    assert second["versions"]["jax"] == jax.__version__
    assert second["device"]["count"] == jax.device_count()
    assert second["device"]["kind"] == jax.devices()[0].device_kind
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(second["date"])
    assert datetime.timedelta(0) <= age < datetime.timedelta(hours=1)


def test_report_has_no_rates_of_unresolved_times(tmp_path):
    report = harness.Report("name", arguments(tmp_path))
    figures = {"wire_bytes": 6, "peak_share": 946.07, "tflops": 3.0, "floor_seconds": 0.9, "error": 0.1}
    report.add("a", {"rows": 4}, harness.Timing((-1.0, 2.0, -3.0)), **figures)
    assert {"wire_bytes", "floor_seconds", "error"} == report.rows[0].keys() & figures
    report.add("a", {"rows": 4}, harness.Timing((1.0, 2.0, 3.0)), **figures)
    assert report.rows[1].keys() > figures.keys()


def test_report_keeps_its_rows_on_a_full_disk(tmp_path, monkeypatch):
    report = harness.Report("name", arguments(tmp_path))
    report.add("a", {"rows": 4}, harness.Timing((1.0, 2.0, 3.0)))

    class Full(io.FileIO):
        def write(self, content):
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode: Full(path, mode.replace("b", "")))
        with pytest.raises(OSError, match="No space"):
            report.summarize(ratio=1.5)
    assert len(json.loads(report.path.read_text())["rows"]) == 1
    assert os.listdir(tmp_path) == ["name.json"]


@pytest.mark.parametrize("text", ["4,4,4", "4,4,4,3", "0,1,1,1", "4,4,x,1", "2147483648,1,1,1", "\u0663,1,1,1", ""])
def test_shapes_that_are_none(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected "):
        grouped_gemm.shape(text)
    assert grouped_gemm.shape("6,5,4,3") == (6, 5, 4, 3)


def test_quick_runs_never_replace_published_figures():
    options = harness.parser("", "script", rounds=15)
    quick, full = harness.parse(options, ["--quick"]), harness.parse(options, [])
    assert full.out == BENCHMARKS / "results"
    assert full.out not in (quick.out.resolve(), *quick.out.resolve().parents)
    assert (quick.rounds < full.rounds, full.rounds) == (True, 15)
    assert harness.parse(options, ["--rounds", "7", "--out", "x"]).rounds == 7


@pytest.mark.parametrize("distribution", ["equal", "multinomial", "zipf"])
@pytest.mark.parametrize("groups", [1, 7, 64])
def test_group_sizes_cover_the_rows(distribution, groups):
    sizes = np.asarray(inputs.group_sizes(distribution, 4096, groups))
    assert (sizes.shape, sizes.sum(), sizes.min() >= 0) == ((groups,), 4096, True)
    if groups == 64:
        spread = {"equal": (0, 1), "multinomial": (2, 60), "zipf": (400, 1500)}[distribution]
        assert spread[0] <= np.ptp(sizes) <= spread[1]


def test_differences():
    expected = np.array([3.0, 4.0, 0.0, 0.0])
    assert harness.norm_of_difference([3.0, 4.0, 0.5, 0.0], expected) == pytest.approx(0.1)
    assert harness.largest_difference([[3.0, 4.0, 0.5, 0.0]], [expected]) == pytest.approx(0.2)
    assert not harness.largest_difference([[np.nan, 4.0, 0.0, 0.0]], [expected]) < 1e9


MODEL = inputs.Model(hidden=256, intermediate=0, experts=8, top_k=3)


def exchange_case(kind, num_ranks=4):
    mesh = inputs.expert_mesh(num_ranks)
    return inputs.make_case(mesh, kind, 10, MODEL)


@pytest.mark.parametrize("kind", ["uniform", "zipf"])
def test_cases_count_the_tokens_that_travel(kind):
    case = exchange_case(kind)
    np.testing.assert_array_equal(case.ids, case.topk_idx)
    ids = case.ids.reshape(4, 10, 3)
    assert all(len(set(token)) == 3 for token in ids.reshape(-1, 3)), "the experts of a token must differ"
    tokens, travelling = np.zeros((4, 4), int), np.zeros((4, 4), int)
    for source, token in np.ndindex(4, 10):
        owners = [expert // 2 for expert in ids[source, token]]
        for rank in set(owners) - {source}:
            tokens[source, rank] += 1
            travelling[source, rank] += owners.count(rank)
    np.testing.assert_array_equal(case.remote, tokens)
    np.testing.assert_array_equal(case.remote_rows, travelling)
    rows = [np.count_nonzero(ids // 2 == rank) for rank in range(4)]
    assert case.rows.tolist() == rows
    assert case.layout.capacity == -(-max(rows) // 128) * 128


def test_ranks_that_do_not_divide_the_experts():
    with pytest.raises(ValueError, match="--ranks 3: it must divide the 8 experts of the model"):
        exchange_case("uniform", num_ranks=3)


def test_bytes_follow_from_the_tokens_that_travel():
    case = exchange_case("zipf")
    remote, peak = case.remote, 1e9
    busiest = max(remote.sum(0).max(), remote.sum(1).max())
    row = {"bf16": 2 * 256, "fp8": 256 + 4 * 2}
    for wire in ("bf16", "fp8"):
        found = exchange.traffic(case, wire, peak)
        wanted = (remote.sum() / 4 * 512, remote.sum() / 4 * row[wire], busiest * row[wire] / peak)
        assert tuple(found.values()) == pytest.approx(wanted)
    padded = exchange.traffic(case, "padded", peak)
    assert tuple(padded.values()) == pytest.approx((remote.sum() / 4 * 512, 3 * 10 * 512, 3 * 10 * 512 / peak))
    assert exchange.traffic(case, None, peak) == {}


def test_grouped_gemm_wrong_results_not_timed():
    right = jnp.ones((2, 4, 3))
    assert grouped_gemm.check("right", right, right) == 0
    for wrong in (right.at[1, 3, 2].add(0.2), right.at[0, 0, 0].set(jnp.nan)):
        with pytest.raises(RuntimeError, match="variant is wrong"):
            grouped_gemm.check("variant", wrong, right)


@pytest.mark.parametrize("script", ["balance.py", "placement.py"])
def test_simulation_ranks_divide_no_experts(script, tmp_path):
    done = run(script, tmp_path, "--ranks", "3")
    assert (done.returncode, os.listdir(tmp_path)) == (2, [])
    assert done.stderr.strip() == f"{script}: --ranks 3: none divides the 8 experts of tiny; pass others."


def test_maxtext_step_without_maxtext(tmp_path):
    done = run("maxtext_step.py", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("maxtext_step.py: needs MaxText (No module named 'maxtext'); `make test-maxtext`")
