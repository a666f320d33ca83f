"""`jax-ep tune`: choices, output, repeated measurements, and a sweep as a user runs it."""

import fcntl
import json
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest

import harness
from jax_ep import __main__, tuning
from jax_ep.settings import file
from jax_ep.settings.operations import OPERATIONS
from jax_ep.tools import tune, tune_cases, tune_search
from jax_ep.tools.benchmark import rates as rates_of
from jax_ep.tools.benchmark.inputs import Model
from jax_ep.tools.tune_search import Case, Log, Outcome

KIND = jax.devices()[0].device_kind
FACTS = {"num_ranks": 2, "num_tokens": 9, "hidden": 100, "top_k": 2, "dtype": "float32"}
CANDIDATES = {"num_combining_programs": (8, 16, 32, 64), "num_warps": (1, 2, 4), "rows_in_flight": (2, 3)}


def make_case(**changed):
    never = Mock(side_effect=AssertionError("nothing is measured here"))
    fields = {"operation": "combine", "facts": FACTS, "title": "a case", "candidates": CANDIDATES}
    return Case(**fields | {"make_chain": never} | changed)


def relative_time(settings):
    """32 programs are best; two warps are best, only with three rows."""
    time = {None: 1.0, 8: 2.0, 16: 1.0, 32: 0.8, 64: 0.799}[settings.get("num_combining_programs")]
    return time * (0.9 if settings.get("num_warps") == 2 and settings.get("rows_in_flight") == 3 else 1.0)


class Measured:
    """A fake GPU with execution times from `time`."""

    def __init__(self, time=relative_time):
        self.asked: list[dict[str, Any]] = []
        self._time = time

    def __call__(self, trials, rounds, log):
        outcomes = []
        for trial in trials:
            log.add(make_case(), trial, "tried")
            self.asked.append(dict(trial))
            try:
                outcomes.append(Outcome(self._time(trial), 1e-6 * self._time(trial)))
                log.add(make_case(), trial, "run")
            except ArithmeticError:
                outcomes.append(Outcome(error="does not fit"))
        return outcomes


def search(case, measured, log, *, is_over=lambda: False):
    return tune_search.descend(case, measured, log, is_over, lambda text: None)


def test_tune_chooses_simplest_of_fastest(tmp_path):
    log, measured = Log(tmp_path / "a.log", {}), Measured()
    chosen, is_done = search(make_case(), measured, log)
    assert (chosen, is_done) == ({"num_combining_programs": 32}, True)
    assert len(measured.asked) == len({json.dumps(asked) for asked in measured.asked}) == 4 + 3 + 2
    started = make_case(start={"rows_in_flight": 3})
    assert search(started, measured, log)[0] == {"num_combining_programs": 32, "num_warps": 2, "rows_in_flight": 3}
    flat = Measured(lambda settings: 0.995)
    assert search(make_case(title="flat", facts=FACTS | {"top_k": 3}), flat, log)[0] == {}


def test_tune_skips_known_measurements(tmp_path):
    path, case, circumstances = tmp_path / "a.log", make_case(), {"kernels": "a"}
    first = Measured()
    over = iter([False, True])
    chosen, is_done = search(case, first, Log(path, circumstances), is_over=lambda: next(over))
    assert (chosen, is_done, len(first.asked)) == ({"num_combining_programs": 32}, False, 4)
    second = Measured()
    assert search(case, second, Log(path, circumstances)) == ({"num_combining_programs": 32}, True)
    assert len(second.asked) == 3 + 2
    assert [asked for asked in second.asked if asked in first.asked] == []
    third = Measured()
    search(case, third, Log(path, circumstances))
    assert third.asked == []
    others = Measured()
    search(case, others, Log(path, {"kernels": "b"}))
    search(make_case(facts=FACTS | {"hidden": 50}), others, Log(path, circumstances))
    assert len(others.asked) == 2 * len([*first.asked, *second.asked])


def test_tune_times_interleaved_within_budget(monkeypatch, tmp_path):
    """Fake programs on a fake clock, whose speed drifts per round as on a GPU."""
    clock, order, over, speed = [0.0], [], [False], [1.0]
    case_time = {None: 2e-3, 8: 3e-3, 16: 1e-3}

    def make_chain(settings):
        programs = settings.get("num_combining_programs")
        if programs == 64:
            raise RuntimeError("out of resource: shared memory")

        def run(n):
            order.append((programs, n))
            clock[0] += (1e-4 + n * case_time[programs]) * speed[0] ** len(order)
            return 0.0

        return lambda n: lambda: run(n)

    monkeypatch.setattr(tune_search.time, "perf_counter", lambda: clock[0])
    recovered = []
    meter = tune_search.Meter(make_case(make_chain=make_chain), lambda: recovered.append(True), lambda: over[0])
    assert {n for _, n in order} >= {1, 1 + 10}  # Of 2 ms, as many as take 20 ms.
    speed[0], rounds = 1.02, 4
    log, trials = Log(tmp_path / "a.log", {}), [{"num_combining_programs": n} for n in (8, 64, 16)]
    eight, failed, sixteen = meter.outcomes(trials, rounds, log)
    assert eight.relative == pytest.approx(1.5, rel=0.25) and sixteen.relative == pytest.approx(0.5, rel=0.25)
    assert failed.error == "RuntimeError: out of resource: shared memory" and recovered == [True]
    in_turns = [programs for programs, _ in order[-8 * rounds :: 2]]
    assert in_turns[:8] == [None, 8, 16, None, None, 16, 8, None]
    over[0] = True
    before = len(order)
    assert len(meter.outcomes(trials, 9, log)) == 1  # The first one, of few rounds.
    assert len(order) - before == 2 + 4 + tune_search.LEAST_ROUNDS * 3 * 2


@pytest.mark.parametrize("scatter", [0.0, 0.3])
def test_tune_equal_settings_not_better(scatter, monkeypatch, tmp_path):
    """Programs with noisy launches, and calls that take microseconds."""
    clock, rng = [0.0], np.random.default_rng(0)

    def make_chain(settings):
        def run(n):
            clock[0] += 2e-3 * scatter * rng.random() + n * 2e-5
            return 0.0

        return lambda n: lambda: run(n)

    monkeypatch.setattr(tune_search.time, "perf_counter", lambda: clock[0])
    meter = tune_search.Meter(make_case(make_chain=make_chain), lambda: None, lambda: False)
    trials = [{"num_combining_programs": n} for n in (8, 16, 32, 64)]
    for outcome in meter.outcomes(trials, tune_search.LAST_ROUNDS, Log(tmp_path / "a.log", {})):
        assert outcome.relative > tune_search.WORTH


def test_tune_failing_settings_skipped(tmp_path):
    def time(settings):
        if settings.get("num_combining_programs") in (32, 64):
            raise ArithmeticError
        return relative_time(settings)

    log, case = Log(tmp_path / "a.log", {}), make_case()
    assert search(case, Measured(time), log)[0] == {}
    assert log.failures(case) == 2
    assert log.failures(make_case(operation="dispatch")) == 0


def test_tune_crashing_settings_skipped(tmp_path):
    path, case = tmp_path / "a.log", make_case()

    def time(settings):
        if settings.get("num_combining_programs") == 32:
            raise KeyboardInterrupt
        return relative_time(settings)

    for _ in range(2):  # One crash may have been the user's interrupt.
        assert Log(path, {}).find(case, {"num_combining_programs": 32}) is None
        with pytest.raises(KeyboardInterrupt):
            search(case, Measured(time), Log(path, {}))
    with path.open("a") as log:
        log.write('\n{"circumstances": {}, "key": "half a li')  # The disk was full.
    again = Measured()
    assert search(case, again, Log(path, {}))[0] == {"num_combining_programs": 64}
    assert [asked for asked in again.asked if asked == {"num_combining_programs": 32}] == []
    assert {"num_combining_programs": 8} in again.asked  # It ran, and was about to be timed.


def test_tune_writes_only_faster_settings(tmp_path, monkeypatch):
    path = tmp_path / "tuned.json"
    for last, wanted in ((0.8, 1), (1.01, 0), (0.999, 0)):
        times = {tune_search.ROUNDS: relative_time, tune_search.LAST_ROUNDS: lambda _, last=last: last}

        class Meter:
            def __init__(self, case, recover, is_over):
                pass

            def outcomes(self, trials, rounds, log, times=times):
                return Measured(times[rounds])(trials, rounds, log)

        monkeypatch.setattr(tune_search, "Meter", Meter)
        results = tune._Results(path, KIND)
        log = Log(tmp_path / f"{last}.log", {})
        tune._tune_one(make_case(), log, results, tune._Clock(60.0), deadline=60.0)
        results.write()
        read = file.read(path, KIND)
        assert [dict(settings) for settings in read.entries.values()] == wanted * [{"num_combining_programs": 32}]


def test_tune_keeps_entries_of_other_sizes(tmp_path):
    path, rates = tmp_path / "tuned.json", file.Rates(memory_bytes_per_s=1e12)
    old = [file.Entry("combine", FACTS | {"hidden": n}, {"num_warps": 4}, {}) for n in (100, 300)]
    file.write(path, KIND, old, rates)
    results = tune._Results(path, KIND)
    results.outcomes.append((make_case(), {"num_warps": 2}, Outcome(0.5, 1e-6)))
    results.write()
    read = file.read(path, KIND)
    found = {n: dict(file.settings_of(read, "combine", FACTS | {"hidden": n})) for n in (100, 300)}
    assert (found, read.rates) == ({100: {"num_warps": 2}, 300: {"num_warps": 4}}, rates)


def test_tune_keeps_foreign_entries(tmp_path, capsys):
    path = tmp_path / "tuned.json"
    file.write(path, "NVIDIA Z9", [], None)
    for text, message in (
        (path.read_text(), f"is for 'NVIDIA Z9', the device here is {KIND!r}; pass another --out"),
        (path.read_text().replace('"NVIDIA Z9"', json.dumps(KIND)).replace("[]", "3"), "exists and is not a file of"),
        ('{"name": "package"}', "exists and is not a file of tuned settings; delete it, or pass another --out"),
        ("notes", "exists and is not a file of tuned settings"),
    ):
        path.write_text(text)
        assert __main__.main(["tune", "rates", "--out", str(path)]) == 2
        assert message in capsys.readouterr().err
        assert path.read_text() == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "gpt"], "--model='gpt', expected one of deepseek-v3"),
        (["--ranks", "99"], f"--ranks=99, expected at most {len(jax.local_devices())}, the devices"),
        (["--tokens", "0"], "argument --tokens: '0', expected an integer from 1 to 2147483647"),
        (["--hidden", str(10**30)], "argument --hidden: '1000000000000000000000000000000', expected an integer from 1"),
        (["--seconds", "-1"], "argument --seconds: '-1', expected a finite number of at least 0"),
        (["--seconds", "nan"], "argument --seconds: 'nan', expected a finite number"),
        (["bandwidth"], "invalid choice: 'bandwidth'"),
        (["--experts", "7", "--ranks", "1", "--top-k", "8"], "7 experts on 1 ranks, 8 per token, .* --top-k"),
    ],
)
def test_tune_invalid_arguments(options, message, tmp_path, capsys):
    try:
        status = __main__.main(["tune", *options, "--out", str(tmp_path / "tuned.json")])
    except SystemExit as end:  # Of the parser.
        status = end.code
    assert status == 2
    assert re.search(message, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_tune_one_run_at_a_time(tmp_path, monkeypatch, capsys):
    """Each run writes the entries that it found at its start, and its own."""
    pytest.importorskip("triton")
    monkeypatch.setattr(tune_cases, "is_small", lambda: False)
    monkeypatch.setattr(rates_of, "measure", lambda: file.Rates(memory_bytes_per_s=1e12))
    path = tmp_path / "tuned.json"
    with path.with_name("tuned.json.log").open("wb") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert __main__.main(["tune", "rates", "--out", str(path)]) == 2
        assert f"another run writes {path}, expected one at a time; wait" in capsys.readouterr().err
        assert not path.exists()
    assert __main__.main(["tune", "rates", "--out", str(path)]) == 0
    assert file.read(path, KIND).rates == file.Rates(memory_bytes_per_s=1e12)


def test_tune_log_beside_any_output(tmp_path, monkeypatch, capsys):
    name = "tuned.log"
    results = tune._Results(tmp_path / name, KIND)
    results.write()
    monkeypatch.setattr(tune, "_tune_one", lambda case, log, *_: log.add(make_case(), {}, "tried"))
    tune._tune([lambda: [make_case()]], "uniform", results, tune._Clock(1.0))
    tune._show(results)
    file.read(tmp_path / name, KIND)
    assert {path.name for path in tmp_path.iterdir()} == {name, f"{name}.log"}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="small arrays")
def test_tune_measures_rates():
    rates = rates_of.measure()
    assert None not in (rates.link_bytes_per_s, rates.memory_bytes_per_s, rates.product_flops_per_s)


@pytest.mark.slow
def test_tune_sweep_on_cpu_writes_nothing(tmp_path):
    """Try every setting of the all-to-all on two devices, as a user without a GPU does."""
    pytest.importorskip("triton")
    sizes = "--tokens", "16", "--hidden", "64", "--seconds", "300"
    environment = {"XDG_CACHE_HOME": str(tmp_path), "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = ["-m", "jax_ep", "tune", "exchange", "rates", *sizes, "--out", "tuned.json"]
    done = harness.run_command(*harness.STRICT_PYTHON, *command, cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(text in done.stdout for text in ("dispatch of 16 tokens", "combine of 16 tokens", "memory_bytes_per_s"))
    assert done.stdout.startswith("CPU devices: the figures mean nothing, and no settings file is written\n")
    assert list(tmp_path.iterdir()) == []


def test_tune_log_bad_lines_skipped(tmp_path):
    path, case, settings = tmp_path / "a.log", make_case(), {"num_warps": 2}
    Log(path, {}).add(case, settings, "measured", Outcome(0.5, 1e-6))
    line = path.read_text()
    damaged = [line.replace("0.5", value) for value in ('"fast"', "null", "-1", "NaN", "[]")]
    damaged += [line.replace('"measured"', "3"), line.replace("{", "[", 1), "[" * 100_000, "\0", "3", line[:40]]
    path.write_bytes(b"\xff\xfe\n" + line.encode() + "\n".join(damaged).encode())
    assert Log(path, {}).find(case, settings) == Outcome(0.5, 1e-6)
    path.write_text(line.replace("0.5", "1" + 400 * "0"))  # More than a float holds.
    assert Log(path, {}).find(case, settings) is None


def test_tune_log_after_half_a_line(tmp_path):
    path, case, settings = tmp_path / "a.log", make_case(), {"num_warps": 2}
    path.write_text('{"circumstances": {}, "key": "half a li')
    Log(path, {}).add(case, settings, "measured", Outcome(0.5, 1e-6))
    assert Log(path, {}).find(case, settings) == Outcome(0.5, 1e-6)


def test_tune_log_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(tune_search, "_MAX_BYTES", 1 << 20)
    path = tmp_path / "a.log"
    path.write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(ValueError, match=f"^tune: {path} is larger than 1 MiB; delete it to measure everything again"):
        Log(path, {})


def test_tune_without_triton(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.chdir(tmp_path)
    for arguments in (["tune", "rates"], ["trace", "moe"]):
        assert __main__.main(arguments) == 1
        assert "the kernels need Triton (import of triton halted" in capsys.readouterr().err  # why, and the remedy
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("platforms", ["", "cuda,cpu"])
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is a GPU")
def test_tune_without_gpu(platforms, tmp_path, monkeypatch, capsys):
    """Without a GPU, only a user who asks for the CPU gets it."""
    pytest.importorskip("triton")
    monkeypatch.setattr(tune, "_tune", lambda *_: pytest.fail("the interpreter is tuned"))
    path, before = tmp_path / "new" / "tuned.json", jax.config.jax_platforms
    jax.config.update("jax_platforms", platforms)
    try:
        assert __main__.main(["tune", "exchange", "--out", str(path)]) == 2
    finally:
        jax.config.update("jax_platforms", before)
    error = capsys.readouterr().err
    assert "JAX has no GPU here" in error and "JAX_PLATFORMS=cpu" in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_tune_cpu_rates_not_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(rates_of, "measure", lambda: file.Rates(memory_bytes_per_s=1e9))
    assert __main__.main(["tune", "rates"]) == 0
    assert "no settings file is written" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["low-latency", "--tokens", "4096"], "at most 1024 tokens per rank; pass --tokens"),
        (["exchange-gemm", "--hidden", "7"], "weight sizes that are multiples of 8"),
    ],
)
@pytest.mark.slow
def test_tune_says_what_is_left_out(arguments, reason, capsys):
    pytest.importorskip("triton")
    with pytest.raises(SystemExit, match="nothing measured"):
        __main__.main(["tune", *arguments])
    out = capsys.readouterr().out
    assert "left out: " in out and reason in out


def test_tune_sizes_beyond_memory_left_out(monkeypatch, capsys):
    pytest.importorskip("triton")
    make = Mock(side_effect=MemoryError("256 GiB"))
    monkeypatch.setattr(tune_cases, "makers", lambda *_: [make, make])
    with pytest.raises(SystemExit, match="jax-ep tune: nothing measured"):
        __main__.main(["tune", "exchange"])
    assert capsys.readouterr().out.count("left out: 256 GiB\n") == 2


def test_tune_checks_output_first(tmp_path, capsys):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    for out, reason in (
        (tmp_path, "not a regular file"),
        (tmp_path / "fifo", "not a regular file"),
        (tmp_path / "file" / "tuned.json", "File exists"),
        (Path("/dev/null"), "not a regular file"),
        (Path("/proc/nowhere/tuned.json"), "No such file"),
    ):
        assert __main__.main(["tune", "rates", "--out", str(out)]) == 1
        error = capsys.readouterr().err
        assert reason in error and error.count("\n") == 1


@pytest.mark.parametrize("gluon", [False, True])
def test_tune_bands_of_gluon(gluon, monkeypatch):
    """GEMMs in Gluon have fixed tiles."""
    pytest.importorskip("triton")
    kernels = tune_cases.grouped_gemm
    for name, made in {"forward_tiles": "Tiles", "weight_tiles": "WeightTiles", "fp8_tiles": "Fp8Tiles"}.items():
        monkeypatch.setattr(kernels, name, lambda *_, made=made: getattr(kernels, made)(gluon=gluon))
    monkeypatch.setattr(kernels, "fp8_weight_tiles", lambda: kernels.Fp8WeightTiles(gluon=gluon))
    sizes = tune_cases.Sizes(8, Model(hidden=256, intermediate=128, experts=4, top_k=2), 1, "uniform")
    cases = [*tune_cases._grouped_gemm(sizes), *tune_cases._grouped_gemm_fp8(sizes)]
    assert len(cases) == 8
    assert {set(case.candidates) == {"group_m"} for case in cases} == {gluon}


@pytest.mark.parametrize("gluon", [False, True])
def test_tune_settings_of_the_kernel_that_runs(gluon):
    """Prepacked weights have other tiles in Gluon than in Triton."""
    pytest.importorskip("triton")
    sizes = tune_cases.Sizes(8, Model(hidden=256, intermediate=128, experts=4, top_k=2), 1, "uniform")
    found = {}
    with tuning.override("quantized_gemm", gluon=gluon), tuning.override("fused_moe", gluon=gluon):
        for make in (tune_cases._quantized_gemm, tune_cases._fused_moe):
            found |= {case.operation: set(case.candidates) for case in make(sizes, "mxfp4_prepacked")}
    for operation, settings in found.items():
        assert settings <= set(OPERATIONS[operation].settings)
    if gluon:
        assert found["fused_moe"] == {"single_launch"} and "block_m" in found["fused_moe_gluon"]
        assert "quantized_gemm_gluon" in found and "quantized_gemm" not in found
    else:
        assert set(found) == {"quantized_gemm", "fused_moe"}
