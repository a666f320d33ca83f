"""The launcher of tests in several processes: it passes only if all processes pass in step."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

LAUNCHER = Path(__file__).parent / "run_processes.py"
CONTRACT = LAUNCHER.parents[1] / "contract" / "test_dispatch_combine.py"
CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--seed")
"""
HEAD = """
import os, time, pathlib, pytest
ME = int(os.environ["JAX_EP_TEST_PROCESS"])
def test_passes():
    assert os.environ["JAX_EP_TEST_PROCESSES"] == "2"
def hang():
    pathlib.Path(__file__).with_name(f"hangs{ME}").write_text(str(os.getpid()))
    time.sleep(1000)
"""
# A launcher whose clock stands still until the given file exists, and then runs fast.
STAGED = """
import itertools, sys, time, types
from pathlib import Path
import run_processes
file, clock = Path(sys.argv.pop(1)), itertools.count(step=10)
now = lambda: next(clock) if file.exists() else 0
run_processes.time = types.SimpleNamespace(monotonic=now, sleep=time.sleep)
sys.exit(run_processes.main())
"""


def launch(*arguments: str, late: str | None = None) -> tuple[int, str]:
    """Run the launcher; with `late`, its clock starts once that file exists."""
    staged = [str(LAUNCHER)] if late is None else ["-c", STAGED, late]
    command = [sys.executable, *staged, "2", "-q", "-rN", *arguments]
    # On CPU devices, even if the suite runs on GPUs, whose memory this process holds.
    environment = os.environ | {
        "JAX_EP_TEST_DEVICES": "cpu",
        "PYTHONPATH": os.pathsep.join([str(LAUNCHER.parent), *sys.path]),
    }
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=environment, **streams, check=False)
    return done.returncode, done.stdout


@pytest.mark.slow
def test_contract_tests_in_two_processes() -> None:
    """Use jax.distributed and collectives between processes, on real contract tests."""
    names = "test_dispatch_combine_routings or test_dispatch_combine_handle_reuse or test_dispatch_quantized"
    options = ["--implementation", "xla", "-o", "verbosity_subtests=1", "--slow", "-k", names]
    code, output = launch(str(CONTRACT), *options)
    assert code == 0, output
    assert re.search(r"\[0\] 3 passed, 3 skipped, .*12 subtests passed", output)


CASES = {
    "passes": ("def test_more(): pass", 0, ["[0] 2 passed"]),
    "fails everywhere": ("def test_more(): assert ME == 7", 1, ["assert 0 == 7", "[1] ", "assert 1 == 7", "[1, 1]"]),
    "fails in one": (
        "def test_more():\n    assert ME == 0\ndef test_hangs():\n    ME == 1 or hang()",
        1,
        ["assert 1 == 0", "processes [1] have failed", "in test_hangs"],
    ),
    "hangs": ("def test_more(): ME == 0 or hang()", 1, ["not done after 5 s", "in test_more"]),
    "not in step": ("def test_more():\n    if ME: pytest.skip('why')", 1, ["were not in step", "'skipped': 1"]),
    "skips": ("def test_more(): pass\npytestmark = pytest.mark.skip", 1, ["no test has passed"]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow(unless={"name": ["fails in one"]})
def test_outcomes(name: str, tmp_path: Path) -> None:
    body, expected, texts = CASES[name]
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_case.py").write_text(HEAD + body + "\n")
    late = {"hangs": "hangs1", "fails in one": "hangs0"}.get(name, "never")
    timeout = "5" if name == "hangs" else "1e9"
    code, output = launch(str(tmp_path), "--timeout", timeout, "--grace", "1", late=str(tmp_path / late))
    assert code == expected, output
    for text in texts:
        assert text in output


def test_nobody_stays_behind_when_it_is_ended(tmp_path: Path) -> None:
    """After the signal of `timeout`, orphans would keep the GPUs."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_case.py").write_text(HEAD + "def test_hangs(): hang()\n")
    environment = os.environ | {"JAX_EP_TEST_DEVICES": "cpu"}
    command = [sys.executable, str(LAUNCHER), "2", "-q", str(tmp_path)]
    launcher = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    files = [tmp_path / "hangs0", tmp_path / "hangs1"]
    while not all(file.exists() and file.read_text() for file in files):
        assert launcher.poll() is None
        time.sleep(0.1)
    launcher.terminate()
    assert launcher.wait() == 128 + signal.SIGTERM
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


BENCHMARK = """
import json, os, sys, time
import jax
from jax_ep.tools import processes
from jax_ep.tools.benchmark import harness

if __name__ == "__main__":
    options = harness.parser("", "script", rounds=3)
    processes.add_option(options)
    args = harness.parse(options)
    if processes.enter(args.processes):
        if args.rounds == 4 and jax.process_index() == 1:
            print("failed here", file=sys.stderr, flush=True)
            os._exit(3)  # at once: jax.distributed would first wait for the others
        sum_of_all = jax.jit(jax.shard_map(lambda: jax.lax.psum(jax.lax.axis_index("x"), "x"), in_specs=(),
            out_specs=jax.P(), mesh=jax.make_mesh((jax.device_count(),), ("x",))))
        ends, starts = [], []
        def nap():
            time.sleep(0.1 * jax.process_index())
            ends.append(time.monotonic())
        def sum_now():
            starts.append(time.monotonic())
            return sum_of_all()
        naps = {{"nap": nap, "sum": sum_now}}
        times = harness.measure_interleaved(naps, args.rounds, budget_s=0)
        with open(f"times{{jax.process_index()}}.json", "w") as file:
            json.dump({{"ends of naps": ends, "starts of sums": starts}}, file)
        report = harness.Report("rows", args)
        found = {{"processes": jax.process_count(), "process": jax.process_index(), "sum": int(sum_of_all())}}
        for name, timing in times.items():
            report.add(name, {{}}, timing, **found)
    else:
        print("started", args.processes)
"""


@pytest.mark.slow
def test_benchmarks_in_two_processes(tmp_path: Path) -> None:
    """The copies run together, and the report is that of the first."""
    script = tmp_path / "script.py"
    script.write_text(BENCHMARK.format())
    flags = "--xla_force_host_platform_device_count=1"
    path = os.pathsep.join([str(LAUNCHER.parents[2]), str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

    def start(rounds: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), "--out", str(tmp_path), "--processes", "2", "--rounds", rounds]
        return subprocess.run(command, env=environment, cwd=tmp_path, **streams, check=False)

    done = start("3")
    assert done.returncode == 0 and "started 2" in done.stdout, done.stdout
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["variant"], row["processes"], row["process"], row["sum"]) for row in rows] == [
        ("nap", 2, 0, 1),
        ("sum", 2, 0, 1),
    ]
    # Process 1 comes from its nap 0.1 s later: the samples begin together all the same, after two calls to warm up.
    zero, one = (json.loads((tmp_path / f"times{process}.json").read_text()) for process in range(2))
    for sample in (2, 4):  # the one between is that of the round backwards
        assert zero["starts of sums"][sample] >= one["ends of naps"][sample]
    assert [row["seconds"]["rounds"] for row in rows] == [3, 3]
    failed = start("4")
    assert failed.returncode != 0 and "failed here" in failed.stdout and "exit statuses" in failed.stdout
