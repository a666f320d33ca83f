"""tools/evidence.sh: which pieces there are for so many GPUs, what is remembered, and what becomes of failures."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tools" / "evidence.sh"

if not SCRIPT.exists():  # an installation has no tools
    pytest.skip("needs a source checkout", allow_module_level=True)


def run(
    folder: Path, *arguments: str, python: str = "true", gpus: int = 1, minutes: int = 25
) -> subprocess.CompletedProcess[str]:
    """With a Python that does nothing, successfully or not."""
    environment = os.environ | {"GPUS": str(gpus), "RESULTS": str(folder), "MINUTES": str(minutes)}
    command = [str(SCRIPT), python, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def listed(folder: Path, *arguments: str, gpus: int = 1, minutes: int = 25) -> dict[str, str]:
    """Pieces, and whether they are done, or too late."""
    lines = run(folder, "--list", *arguments, gpus=gpus, minutes=minutes).stdout.splitlines()
    return {line[6:].split()[0]: line[:4].strip() for line in lines}


def test_pieces(tmp_path: Path) -> None:
    one, four = listed(tmp_path), listed(tmp_path, gpus=4)
    assert {"tests-contract", "tests-gpu", "bench-fused-moe", "bench-grouped-gemm"} <= set(one)
    of_several = {"tests-products", "tests-processes"}
    layers = ("layer-deepseek-v3", "layer-qwen3-30b", "layer-mixtral", "layer-parts", "layer-recipes")
    others = ("exchange", "exchange-graphs", "low-latency", "scaling", "scaling-training")
    assert set(four) - set(one) == of_several | {f"bench-{name}" for name in (*layers, *others)}
    assert set((one | four).values()) == {"", "late"}
    assert list(listed(tmp_path, "bench-fused-moe")) == ["bench-fused-moe"]
    scripts = run(tmp_path, "--list", gpus=4).stdout.split()
    assert all((ROOT / word).exists() for word in scripts if word.startswith(("benchmarks/", "tools/")))


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    first = run(tmp_path, "bench-grouped-gemm", "bench-decode-experts")
    assert first.returncode == 0, first.stderr
    states = listed(tmp_path)
    done = [name for name, state in states.items() if state == "done"]
    assert done == ["bench-grouped-gemm", "bench-decode-experts"]
    everything = run(tmp_path)
    assert everything.returncode == 0, everything.stderr
    assert "== bench-grouped-gemm: done at " in everything.stdout
    assert set(listed(tmp_path).values()) == {"done"}
    assert "" in listed(tmp_path, gpus=2).values(), "what one GPU has shown, two have not"


def test_a_piece_that_there_is_not(tmp_path: Path) -> None:
    for name, gpus in (("fused-moe", 1), ("bench-scaling", 1)):
        refused = run(tmp_path, "bench-grouped-gemm", name, gpus=gpus)
        assert refused.returncode == 2 and f"no piece {name} for {gpus} GPUs" in refused.stderr
    assert "done" not in listed(tmp_path).values(), "nothing has run"


def test_failures(tmp_path: Path) -> None:
    failed = run(tmp_path, "bench-fused-moe", "bench-grouped-gemm", python="false")
    assert failed.returncode == 1
    assert failed.stderr.count("exit status 1") == 2, "the second runs, too"
    assert set(listed(tmp_path, minutes=60).values()) == {""}


def seconds_of(folder: Path, gpus: int) -> dict[str, int]:
    """What pieces are thought to take."""
    lines = run(folder, "--list", gpus=gpus).stdout.splitlines()
    return {line[6:].split()[0]: int(line[6:].split()[1]) for line in lines}


def test_what_fits_into_the_time(tmp_path: Path) -> None:
    seconds, states = seconds_of(tmp_path, 4), listed(tmp_path, gpus=4)
    assert max(seconds.values()) < 600
    first = [name for name, state in states.items() if not state]
    assert sum(seconds[name] for name in first) <= 25 * 60
    wanted = ("contract", "layer-deepseek-v3", "layer-parts", "exchange-graphs", "scaling", "low-latency")
    assert {name.partition("-")[2] for name in first} >= set(wanted)
    none = run(tmp_path, gpus=4, minutes=0)
    assert none.returncode == 0
    assert none.stdout.count("left for the next run") == len(seconds)
    assert listed(tmp_path, "tests-gpu", minutes=0) == {"tests-gpu": ""}, "who names a piece gets it"


def test_what_a_piece_took_is_what_it_will_take(tmp_path: Path) -> None:
    assert run(tmp_path, "bench-fused-moe", gpus=4).returncode == 0
    stamp = tmp_path / "evidence" / "bench-fused-moe.txt"
    commit, machine, took = stamp.read_text().strip().split(", ")
    assert machine == "4 GPUs" and took.endswith(" s")
    stamp.write_text(f"{commit}, 4 GPUs, 777 s\n")
    assert seconds_of(tmp_path, 4)["bench-fused-moe"] == 777
    assert seconds_of(tmp_path, 2)["bench-fused-moe"] != 777, "that was another machine"
    stamp.write_text("another, 4 GPUs, 777 s\n")
    assert listed(tmp_path, gpus=4)["bench-fused-moe"] != "done"


def test_no_gpu(tmp_path: Path) -> None:
    nothing = run(tmp_path, gpus=0)
    assert nothing.returncode == 2
    assert "no NVIDIA GPU" in nothing.stderr
