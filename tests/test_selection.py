"""Which tests run: those marked slow on GPUs, with `--slow`, alone with `--only-slow`; the others show everything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONTRACT = Path(__file__).parent / "contract"
LOW_LATENCY = CONTRACT / "test_low_latency.py"
EVERY = {f"ranks{n}-{implementation}" for n in (1, 2, 4, 8) for implementation in ("xla", "triton")}
SLOW = {"ranks1-triton", "ranks4-triton", "ranks8-triton", "ranks1-xla", "ranks4-xla"}
# Of every operation a test, then of every VJP, in files that `make test` runs with `xla` and on the kernels.
SHOWN = {
    "dispatch_combine": ["test_routings", "test_shapes", "test_capacity_and_alignment", "test_fp8_wire"],
    "fused": ["test_forward_and_gradients", "test_capacity", "test_dispatch_modes"],
    "fused_gradients": ["test_gradients_of_the_layer", "test_dispatch_grouped_gemm", "test_second_derivative"],
    "grouped_gemm_fp8": ["test_groups", "test_quantised_operands"],
    "low_latency": ["test_routings", "test_quantised", "test_gradients"],
    "low_latency_gemm_combine": ["test_routings", "test_fp8"],
    "low_latency_moe": ["test_routings"],
    "masked": ["test_fp8", "test_other_dtypes", "test_activation"],
    "moe_fp8": ["test_forward", "test_fused_moe"],
}
SHOWN_BY_XLA = {
    "gradients": ["test_moe_routings", "test_transposes", "test_halves_finite_differences", "test_fused_moe"],
    "grouped_gemm": ["test_groups", "test_finite_differences"],
    "moe": ["test_routings"],
    "moe_fp8": ["test_gradients_are_near_the_exact_ones"],
}


def collected(*arguments: str | Path, devices: str = "cpu") -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *map(str, arguments)]
    environment = os.environ | {"JAX_EP_TEST_DEVICES": devices}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.parametrize(
    ("options", "devices", "wanted"),
    [
        ([], "cpu", EVERY - SLOW),
        (["--slow"], "cpu", EVERY),
        (["--only-slow"], "cpu", SLOW),
        ([], "gpu", EVERY),
    ],
    ids=["make test", "make test-all", "make test-rest", "on GPUs"],
)
@pytest.mark.slow(unless={"options": [[]], "devices": ["cpu"]})
def test_slow_tests_need_an_option_or_a_gpu(options: list[str], devices: str, wanted: set[str]) -> None:
    pytest.importorskip("triton")
    arguments = ["--implementation=xla,triton", "-k", "test_routings", *options, LOW_LATENCY]
    assert {line.split("[")[1].rstrip("]") for line in collected(*arguments, devices=devices)} == wanted


def test_what_is_not_slow_shows_every_operation_and_gradient() -> None:
    """With both implementations: a mark takes cases away, and never the last one."""
    pytest.importorskip("triton")
    shown = [(name, test, run) for name, tests in SHOWN.items() for test in tests for run in ("xla", "triton")]
    shown += [(name, test, "xla") for name, tests in SHOWN_BY_XLA.items() for test in tests]
    files = sorted({CONTRACT / f"test_{name}.py" for name, _, _ in shown})
    found = set()
    for line in collected("--implementation=xla,triton", *files):
        file, test, case = f"{line}[".replace("[", "::", 1).split("::")[:3]
        found |= {(Path(file).stem.removeprefix("test_"), test, run) for run in ("xla", "triton") if run in case}
    assert [one for one in shown if one not in found] == []
