"""Several real processes on loopback: the same results as in one, and errors for differing or missing processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from run_processes import free_port, run_pair

HELPERS = Path(__file__).parent / "helpers"
CONTRACT = Path(__file__).parent / "contract"
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def environment(num_devices):
    """Return the environment of a process with `num_devices` CPU devices."""
    own = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}"}
    return os.environ | own | {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.parametrize(
    ("num_processes", "num_devices", "over", "count"),
    [(2, 4, "flat or nodes or topology", 9), (4, 2, "flat or topology", 6)],
    ids=["2x4", "4x2"],
)
@pytest.mark.slow
def test_processes_exchange_and_layer(num_processes, num_devices, over, count):
    """Dispatch, combine, the layer and its gradient over the devices of all processes match the oracle."""
    contract_passes(num_processes, num_devices, count, "test_nodes.py", "--slow", "-k", over)


def contract_passes(num_processes, num_devices, count, file, *options):
    run = [sys.executable, str(HELPERS / "run_processes.py"), str(num_processes), "--devices", str(num_devices)]
    command = [*run, "-q", str(CONTRACT / file), *options, "--implementation", "xla"]
    done = subprocess.run(command, env=os.environ | {"JAX_EP_TEST_DEVICES": "cpu"}, **PIPES, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"\[0\] {count} passed", done.stdout)


@pytest.mark.slow
def test_processes_kernels_inside():
    """Two nodes of two devices, each a process with kernels in Triton's interpreter."""
    pytest.importorskip("triton")
    contract_passes(2, 2, 3, "test_process_per_node.py")


@pytest.mark.slow
def test_processes_mismatch():
    """Each difference is an error that names it; differing_processes.py is the program."""
    both = run_pair("differing_processes.py", XLA_FLAGS="--xla_force_host_platform_device_count=2")
    for found in both:
        assert found["devices"] == 4
        for name, zero, one in (
            ("world", "num_processes=2 of jax.distributed.initialize", "num_processes=3 of jax.distributed.initialize"),
            ("argument", "timeout_s=100.0", "timeout_s=101.0"),
        ):
            mesh = "init: setting up the context, mesh {'expert': 4} of devices in order, "
            assert f"process 0: {mesh}{zero}; process 1: {mesh}{one}." in found[name]
        assert "process 1: init: setting up the context, mesh {'expert': 4} of devices in the order [" in found["order"]
        for name in ("before init", "agree", "same", "same again", "new context", "same in it"):
            assert found[name] == "no error", name
    for name, zero, one in (
        ("tokens", "num_tokens=5", "num_tokens=6"),
        ("experts", "num_experts=16", "num_experts=32"),
        ("hidden", "arrays float32[4, 6]", "arrays float32[4, 7]"),
        ("wire", "wire_dtype=float8_e4m3fn", "wire_dtype=None"),
        ("recipe", "wire_dtype=float8_e4m3fn", "wire_dtype=None"),
        ("weights", "arrays float32[4, 4], float32[4, 2]", "arrays float32[4, 4]"),
        ("combine", "arrays bfloat16[", "arrays float32["),
        ("low latency", "dispatch, Layout", "low_latency_dispatch, Layout"),
        ("node tokens", "num_tokens=5", "num_tokens=6"),
        ("node experts", "num_experts=16, K=2", "num_experts=32, K=2"),
        ("node K", "num_experts=8, K=1", "num_experts=8, K=2"),
        ("node hidden", "float32[4, 6]", "float32[4, 7]"),
        ("node capacity", "node_capacity=3", "node_capacity=None"),
        ("node blocks", "num_blocks=2", "num_blocks=1"),
        ("node layer", "moe, over nodes", "dispatch, over nodes"),
        ("node wire", "wire_dtype=float8_e4m3fn", "wire_dtype=None"),
        ("node or flat", "dispatch, over nodes", "dispatch, Layout"),
    ):
        # The first process continues; the later one, or both, detect the difference.
        errors = [found[name] for found in both if found[name] != "no error"]
        assert errors, name
        pattern = rf"process 0: .*{re.escape(zero)}.*; process 1: .*{re.escape(one)}"
        assert all(re.search(pattern, text) for text in errors)
        assert all("the processes run different programs: as all-to-all number" in text for text in errors)
    assert both[0]["on its own devices"] == "no error"
    assert "processes [1] have not arrived within 2 s" in both[0]["missing"]


EXAMPLE = Path(__file__).parent.parent / "examples" / "multi_process.py"


def example(*arguments):
    if not EXAMPLE.exists():
        pytest.skip("not a source checkout")
    return subprocess.run([sys.executable, str(EXAMPLE), *arguments], env=environment(2), **PIPES, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "nodes"), [(2, ["--nodes"]), (4, ["--nodes", "2"])])
def test_processes_example(processes, nodes):
    """Processes that one command starts train on a mesh of two nodes."""
    sizes = ["--devices", "2", "--tokens", "64", "--hidden", "32", "--intermediate", "32", "--experts", "8"]
    done = example("--local", str(processes), *nodes, "--steps", "6", *sizes)
    assert done.returncode == 0, done.stdout + done.stderr
    mesh = {"node": 2, "expert": processes}
    assert f"{processes} processes with 2 cpu each, mesh {mesh}, transport xla" in done.stdout
    losses = list(map(float, re.findall(r"^step \d: loss ([\d.]+), [\d,]+ tokens/s", done.stdout, re.MULTILINE)))
    assert len(losses) == 6 and losses[-1] < 0.97 * losses[0], losses


MISTAKES = {
    "alone": ("--timeout 1", 2, "Pass --local N or --coordinator"),  # JAX's own error does not name the options.
    "too many": ("--local 100000", 1, "--local 100000 needs a GPU for each process"),
    "experts": (
        "--local 2 --experts 10",
        1,
        "--experts 10 is not divisible by the 4 devices of 2 processes: expected a multiple of 4",
    ),
    "nodes": ("--local 2 --nodes 3", 1, "--nodes 3 does not divide the 2 processes"),
    "no coordinator": (
        "--coordinator 127.0.0.1:{port} --num-processes 2 --process-id 1 --timeout 1",
        1,
        r"nothing answers at 127.0.0.1:\d+ within 1 s",
    ),
    "number": ("--coordinator 127.0.0.1:{port} --num-processes 2 --process-id 2", 1, "--process-id 2, expected 0 to 1"),
    "incomplete": ("--coordinator 127.0.0.1:{port} --num-processes 2", 2, "go together"),
    "no port": ("--coordinator x --num-processes 2 --process-id 1", 2, "'x', expected HOST:PORT"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_processes_example_invalid_arguments(mistake):
    arguments, status, text = MISTAKES[mistake]
    done = example(*arguments.format(port=free_port()).split())
    assert done.returncode == status and re.search(text, done.stderr), done.stderr
