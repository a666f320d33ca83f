"""A missing rank leads to a Python error that names it, and the devices stay usable."""

import json
import re
import signal
import subprocess
import sys
import time

import jax
import programs
import pytest
from lateness import ON_GPU

from run_processes import free_port

DISPATCH_OR_COMBINE = ("dispatch", "combine")
LOW_LATENCY = tuple(f"low_latency_{name}" for name in ("dispatch", "combine", "gemm_combine"))


def check_story(failure, timeout_s, operations, missing=None):
    """Check that the error names the operation, both ranks and how long one of them waited."""
    assert failure["kind"] == "JaxRuntimeError" or not ON_GPU, failure
    assert "jax_ep.finalize() and jax_ep.init()" in failure["text"]
    wait = f"rank (\\d+) timed out after {timeout_s:g} s in (\\w+) .*waiting for rank (\\d+)"
    story = re.search(wait, failure["text"])
    assert story, failure
    assert story[2] in operations
    assert story[1] != story[3] and (missing is None or int(story[3]) == missing), story[0]


def check_absence(failure, timeout_s, kernels, missing):
    """In the interpreter no rank starts before all are there, so the error names the missing launch."""
    story = re.search(rf"kernel (\w+): device (\d+) waited {timeout_s:g} s for .*\b{missing}\b.*:", failure["text"])
    assert story, failure
    assert story[1] in kernels and int(story[2]) != missing


@pytest.mark.parametrize(
    ("scenario", "operation"),
    [("never", "dispatch"), *(("late", operation) for operation in ("dispatch", *LOW_LATENCY))],
)
def test_failures_missing_rank(scenario, operation, one_process):
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    found = programs.run("missing_peer.py", scenario, operation)
    last, timeout_s = found["ranks"] - 1, found["timeout_s"]
    assert found["right before"] is True, found
    is_in_kernel = scenario == "never" or ON_GPU
    if is_in_kernel:
        operations = DISPATCH_OR_COMBINE if operation == "dispatch" else LOW_LATENCY
        check_story(found["failure"], timeout_s, operations, missing=last if scenario == "never" else None)
    else:
        check_absence(found["failure"], timeout_s, (operation, "dispatch_tokens"), last)
    assert found["failure"]["seconds"] > 0.9 * timeout_s
    # In between the context is unusable: compiled programs fail in their check, new ones when they are traced.
    for what in ("same program after it", "new program after it"):
        assert found[what]["kind"] != "no error", found
    if is_in_kernel:
        assert "is unusable after a failure: call finalize(), then init()" in found["new program after it"]["text"]
    assert found["right again"] == [True] * 3, found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", ["throughput", "low_latency"])
def test_failures_killed_process(path, on_gpu, one_process):
    """With one process per GPU, the last one kills itself between two calls."""
    count = min(4, jax.device_count())
    if count < 2:
        pytest.skip("needs two GPUs")
    pytest.importorskip("nvshmem")
    processes = run_processes(count, path, victim=count - 1)
    assert processes[-1]["status"] == -signal.SIGKILL, processes[-1]
    for process in processes[:-1]:
        assert process["status"] == 0, process["output"]
        assert process["right"], process
        operations = DISPATCH_OR_COMBINE if path == "throughput" else LOW_LATENCY
        check_story(process["failure"], process["timeout_s"], operations)
    # All of them wait for the dead process, or for one that does.
    assert f"waiting for rank {count - 1}" in "".join(process["failure"]["text"] for process in processes[:-1])
    # The GPUs stay usable.
    for process in run_processes(count, path, victim=-1):
        assert process["status"] == 0 and process["right"], process["output"]
        assert process["failure"]["kind"] == "no error", process


def run_processes(count, path, victim):
    """Run killed_peer.py in `count` processes; return what each printed, its exit status and its output."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, str(programs.FOLDER / "killed_peer.py"), str(count), address, str(victim), path]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    streams["env"] = programs.environment()
    started = [subprocess.Popen([*command, str(i)], **streams) for i in range(count)]
    deadline, found = time.monotonic() + 400, []
    for process in started:
        try:
            output = process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0] + "\nkilled after the time limit"
        last = next((line for line in reversed(output.splitlines()) if line.startswith("{")), "{}")
        found.append(json.loads(last) | {"status": process.returncode, "output": output[-3000:]})
    return found
