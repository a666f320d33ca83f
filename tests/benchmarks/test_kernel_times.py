"""`profiler` reads traces exactly, and benchmarks/kernel_times.py profiles the programs that it names."""

import gzip
import json
from types import SimpleNamespace

import jax
import pytest
from reports import arguments, check_report

import kernel_times
from jax_ep.tools.benchmark import harness, profiler
from jax_ep.tools.benchmark.inputs import expert_mesh

GPU, GPU_1, GPU_10, HOST = 1, 2, 11, 701
COMPUTE, COPIES, DERIVED = 13, 14, 99
SCALES = (3, 1, 4, 2)  # of the runs; the first one is left out


def metadata():
    processes = {GPU: "/device:GPU:0", GPU_1: "/device:GPU:1", GPU_10: "/device:GPU:10", HOST: "/host:CPU"}
    threads = {COMPUTE: "Stream #13(Compute)", COPIES: "Stream #14(MemcpyD2D)", DERIVED: "XLA Ops"}
    found = []
    for pid, name in processes.items():
        found.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        found.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})
        for tid, thread in threads.items():
            named = {"name": thread if pid != HOST else f"python {tid}"}
            found.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": named})
    return found


def event(name, start, end, *, pid=GPU, tid=COMPUTE):
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start, "dur": end - start, "args": {"hlo_op": "x"}}


def synthetic_trace():
    """Return runs of 35 us times their scale, 10 us of it a gap, with 140, 120 and 100 us between them."""
    found, start = [], 1000.0
    for i, scale in enumerate(SCALES):
        at = lambda us, start=start, scale=scale: start + scale * us  # noqa: E731
        found += [
            event("add", at(30), at(35)),
            event("MemcpyD2D", at(8), at(14), tid=COPIES),
            event("fused", at(12), at(20)),
            event("fused", at(0), at(10)),
            event("fused", at(0), at(35), tid=DERIVED),
        ]
        if i == 0:
            found.append(event("only once", at(21), at(22)))
        for pid in (GPU_1, GPU_10, HOST):  # they fill the gaps
            found.append(event("fused", at(0), at(35) + 100, pid=pid))
        found.append({"ph": "C", "pid": GPU, "tid": COMPUTE, "name": "power", "ts": at(35) + 50, "args": {"W": 1}})
        start = at(35) + 140 - 20 * i
    return [*metadata(), *found[::-1], {}]  # as jax ends them


def test_numbers_of_a_trace():
    runs = profiler.split_runs(profiler.kernels(synthetic_trace()), len(SCALES))
    names = ["fused", "MemcpyD2D", "fused", "add"]
    assert [[e.name for e in run] for run in runs] == [[*names[:3], "only once", "add"], names, names, names]
    assert [profiler.span(run) for run in runs] == [105, 35, 140, 70]
    assert [profiler.busy(run) for run in runs] == [78, 25, 100, 50]
    found = profiler.summarize(runs[1:])
    columns = ("name", "calls", "us_per_call", "us", "share")
    # Per call of the kernel that repeats: the median of 8, 10, 16, 20, 32 and 40.
    rows = [("fused", 2, 18, 36, 0.72), ("MemcpyD2D", 1, 12, 12, 0.24), ("add", 1, 10, 10, 0.2)]
    assert found.pop("kernels") == [dict(zip(columns, row, strict=True)) for row in rows]
    assert found == {"span_us": 70, "busy_us": 50, "idle_us": 20, "same_calls": True}


def test_runs_that_differ_are_said_to():
    runs = profiler.split_runs(profiler.kernels(synthetic_trace()), len(SCALES))
    found = profiler.summarize(runs)
    assert found["same_calls"] is False
    (once,) = (kernel for kernel in found["kernels"] if kernel["name"] == "only once")
    assert once == {"name": "only once", "calls": 0, "us_per_call": 3, "us": 0, "share": 0}


def test_a_kernel_that_outlasts_later_ones_bridges_their_gap():
    """Between b and c nothing starts for 80 us, but a runs; the runs part after it, where the gap is 30 us."""
    times = ("a", 0, 100), ("b", 5, 10), ("c", 90, 95), ("d", 130, 135), ("e", 145, 150)
    events = [profiler.Event(*e) for e in times]
    assert [[e.name for e in run] for run in profiler.split_runs(events, 2)] == [["a", "b", "c"], ["d", "e"]]
    assert [len(run) for run in profiler.split_runs(events, 1)] == [5]
    assert profiler.span(events[:3]) == profiler.busy(events[:3]) == 100
    assert profiler.span(events) == 150 and profiler.busy(events) == 110


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"no trace to {tmp_path}"):
        profiler.load(tmp_path)
    path = tmp_path / "plugins" / "profile" / "host.trace.json.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [{"name": "fused"}]}).encode()))
    assert profiler.load(tmp_path) == [{"name": "fused"}]
    with pytest.raises(ValueError, match=r"/device:GPU:0; .*'/device:GPU:1: Stream #13\(Compute\)'"):
        profiler.kernels([one for one in synthetic_trace() if one.get("pid") != GPU])
    with pytest.raises(ValueError, match="17 events cannot belong to 18 runs"):
        profiler.split_runs(profiler.kernels(synthetic_trace()), 18)


@pytest.mark.parametrize("what", kernel_times.BUILDERS)
def test_programs_call_kernels(what, two_ranks):
    """Nothing runs them."""
    options = {"layer": "moe"} if what.startswith("moe") else {}
    program = kernel_times.BUILDERS[what](two_ranks, "tiny", 8, **options)
    assert "jax_ep_pointer_table" in str(jax.make_jaxpr(program.fn)(*program.arguments))


def test_report(monkeypatch, tmp_path, capsys):
    """Every program has its row, and one that fails does not keep the next from its own."""
    script, ran = kernel_times, []

    def build(what, mesh, name, tokens):
        if tokens == 7:
            raise RuntimeError("out of memory")
        return script.Program(lambda: what, (), 1)

    def record(program, rounds):
        ran.append((program.fn(), rounds))
        return profiler.split_runs(profiler.kernels(synthetic_trace()), len(SCALES)), 99.0

    for what in ("low-latency", "decode"):
        monkeypatch.setitem(script.BUILDERS, what, lambda *args, what=what: build(what, *args))
    monkeypatch.setattr(script, "record", record)
    args = SimpleNamespace(rounds=len(SCALES) - 1, model="tiny")
    report = harness.Report("kernel_times", arguments(tmp_path, rounds=args.rounds, quick=True))
    cases = [("low-latency", 1), ("decode", 7), ("decode", 8)]
    script.measure(report, args, expert_mesh(2), [(*case, {}) for case in cases])
    assert ran == [("low-latency", 4), ("decode", 4)]
    content = json.loads((tmp_path / "kernel_times.json").read_text())
    check_report(content)
    assert [(row["variant"], row["shape"]["tokens_per_rank"]) for row in content["rows"]] == cases
    assert content["rows"][1]["failed"] == "RuntimeError: out of memory"
    assert content["rows"][0]["seconds"]["median"] == pytest.approx(70e-6)
    output = " ".join(capsys.readouterr().out.split())  # titles are folded
    assert "span 70.0 us, busy 50.0, idle 20.0 (29 %)" in output and "72.0%" in output
    assert "decode, 7 tokens/rank: failed: out of memory" in output
