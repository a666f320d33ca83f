"""`jax-ep bench` and `jax-ep trace` from the command line."""

import json

import pytest

import harness
from jax_ep import __main__, tracing
from jax_ep.tools import benchmark


def run(folder, *arguments):
    return harness.run_command(*harness.STRICT_PYTHON, "-m", "jax_ep", "bench", *arguments, cwd=folder)


@pytest.mark.parametrize("name", benchmark.BENCHMARKS)
def test_bench_help_names_the_command_and_a_model(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        __main__.main(["bench", name, "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: jax-ep bench {name} ")
    assert "--model" in shown


def test_bench_passes_options_on_and_names_a_folder(monkeypatch):
    seen = []
    monkeypatch.setattr(benchmark, "_main", lambda name: lambda *arguments: seen.append((name, *arguments)))
    assert __main__.main(["bench", "exchange", "--model", "qwen3-30b", "--tokens", "8", "16"]) == 0
    assert __main__.main(["bench", "moe", "--ou", "there"]) == 0  # an abbreviation
    out = ["--out", "runs/benchmarks"]
    assert seen == [
        ("exchange", [*out, "--model", "qwen3-30b", "--tokens", "8", "16"], "jax-ep bench exchange"),
        ("moe", [*out, "--ou", "there"], "jax-ep bench moe"),
    ]


@pytest.mark.slow
def test_bench_runs_without_a_gpu(tmp_path):
    done = run(tmp_path, "fused-moe", "--quick", "--tokens", "4", "--formats", "--only", "routed_moe")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tiny, 4 tokens" in done.stdout
    content = json.loads((tmp_path / "runs/benchmarks/fused_moe.json").read_text())
    assert {row["variant"] for row in content["rows"]} == {"routed_moe, bfloat16"}
    assert content["script"] == "benchmarks/fused_moe.py"


@pytest.mark.slow
def test_bench_of_a_model_needs_gpus(tmp_path):
    done = run(tmp_path, "moe", "--model", "qwen3-30b")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "jax-ep bench moe: needs two or more GPUs; nothing measured\n"
    wrong = run(tmp_path, "moe", "--model", "qwen")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("jax-ep bench moe: argument --models: invalid choice: 'qwen'")
    assert wrong.stderr.count("\n") == 1


FUSED = ["--dispatch-mode", "fused", "--combine-mode", "scatter"]
CASES = {
    "dispatch": ([], {"plan", "dispatch"}),
    "combine": ([], {"combine"}),
    "moe": (FUSED, {"plan", "dispatch_gemm", "gemm_combine"}),
    "low-latency": ([], {"low_latency_dispatch", "low_latency_gemm_combine"}),
}


@pytest.mark.parametrize("what", CASES)
@pytest.mark.slow
def test_a_recording(what, tmp_path):
    for package in ("triton", "rich", "matplotlib"):
        pytest.importorskip(package)
    options, kernels = CASES[what]
    command = ["-m", "jax_ep", "trace", what, "--ranks", "2", "--calls", "1", *options, "--out", "t.json.gz", "--png"]
    done = harness.run_command(*harness.STRICT_PYTHON, *command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    trace = tracing.Trace.load(tmp_path / "t.json.gz")
    assert {launch.kernel for launch in trace.launches.values()} == kernels
    assert (trace.devices, trace.is_ordered_only, sum(trace.num_dropped.values())) == ([0, 1], True, 0)
    assert all(name in done.stdout for name in kernels) and "order, no times" in done.stdout
    assert sorted(path.name for path in tmp_path.glob("*.png")) == sorted(f"t_{name}.png" for name in kernels)
