"""`jax-ep bench` and `jax-ep scale`: the benchmarks of the source tree from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import harness
from jax_ep import __main__
from jax_ep.tools import bench

ROOT = Path(__file__).resolve().parents[1]


def run(folder: Path, *arguments: str, command: str = "bench") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)
    program = [*harness.STRICT_PYTHON, "-m", "jax_ep", command, *arguments]
    return subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_every_benchmark_is_there_and_takes_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.folder() == ROOT / "benchmarks"
    for name, (script, _) in bench.BENCHMARKS.items():
        source = (bench.folder() / script).read_text()
        assert '"--model' in source, name
        assert "harness.parser(" in source, name


def test_options_are_those_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "exchange.py"
    script.write_text(
        "import json, pathlib, sys\npathlib.Path('seen.json').write_text(json.dumps([sys.argv, sys.path[0]]))\n"
    )
    monkeypatch.setattr(bench, "folder", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    before = list(sys.argv), list(sys.path)
    assert __main__.main(["bench", "exchange", "--model", "qwen3-30b", "--tokens", "8", "16"]) == 0
    arguments, folder = json.loads((tmp_path / "seen.json").read_text())
    assert arguments == [str(script), "--model", "qwen3-30b", "--tokens", "8", "16", "--out", "runs/benchmarks"]
    assert folder == str(tmp_path)
    assert (sys.argv, sys.path) == before
    assert __main__.main(["bench", "exchange", "--out=there"]) == 0
    assert json.loads((tmp_path / "seen.json").read_text())[0][1:] == ["--out=there"]


def test_what_there_is_none_of(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["bench", "exchanges"])
    assert "invalid choice: 'exchanges'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run(tmp_path: Path) -> None:
    """As a user without a GPU tries it out."""
    done = run(tmp_path, "fused-moe", "--quick", "--tokens", "4", "--formats", "--only", "fused_moe")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tiny, 4 tokens" in done.stdout
    content = json.loads((tmp_path / "runs/benchmarks/fused_moe.json").read_text())
    assert {row["variant"] for row in content["rows"]} == {"fused_moe, bfloat16"}
    assert content["script"] == "benchmarks/fused_moe.py"


@pytest.mark.slow
def test_a_model_by_its_name(tmp_path: Path) -> None:
    """Without GPUs there is nothing to measure in the size of a model, which is said."""
    done = run(tmp_path, "moe", "--model", "qwen3-30b")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "layer: needs two or more GPUs; nothing measured\n"
    wrong = run(tmp_path, "moe", "--model", "qwen")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("jax-ep bench moe: argument --models: invalid choice: 'qwen'")
    assert wrong.stderr.count("\n") == 1
    assert run(tmp_path, "moe", "--help").stdout.startswith("usage: jax-ep bench moe ")


def test_scale_passes_every_option_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "scaling.py"
    script.write_text("import json, pathlib, sys\npathlib.Path('seen.json').write_text(json.dumps(sys.argv))\n")
    monkeypatch.setattr(bench, "folder", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    assert __main__.main(["scale", "--quick", "--ranks", "1", "2", "--help"]) == 0
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen == [str(script), "--quick", "--ranks", "1", "2", "--help", "--out", "runs/benchmarks"]


@pytest.mark.slow
def test_scale(tmp_path: Path) -> None:
    """All parts that CPU devices have, as a user without a GPU tries them out."""
    done = run(tmp_path, "--quick", "--ranks", "1", "2", "--tokens", "4", command="scale")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out, kernels: CPU devices have no kernels to profile" in done.stdout
    assert "link's theoretical rate: unknown: CPU devices have no link" in done.stdout
    content = json.loads((tmp_path / "runs/benchmarks/scaling.json").read_text())
    parts = {(row["part"], row["shape"]["scaling"], row["shape"]["ranks"]) for row in content["rows"]}
    both = {(part, mode, n) for part in ("exchange", "layer") for mode in ("weak", "strong") for n in (1, 2)}
    assert parts == both | {("training", "weak", 1), ("training", "weak", 2)}
    assert all("failed" not in row and row["shape"]["dtype"] for row in content["rows"])
    assert {row["seconds"]["rounds"] for row in content["rows"]} == {content["settings"]["rounds"]}
    sent = {row["shape"]["ranks"]: row for row in content["rows"] if row["variant"] == "triton dispatch to rows"}
    assert sent[1]["wire_bytes"] == 0 and "peak_shares" not in sent[1]
    assert sent[2]["wire_bytes"] > 0 and set(sent[2]["peak_shares"]) == set(content["summary"]["peak_bytes_per_s"])
    assert sent[2]["peak_shares"]["link"] is None and sent[2]["peak_shares"]["copy_engine"] > 0
    assert all(row["tokens_per_s"] > 0 for row in content["rows"] if row["part"] == "training")
    assert (tmp_path / "runs/benchmarks/scaling.png").exists()
