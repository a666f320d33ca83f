"""A rank that does not come ends in a Python error that names it, in time, and the devices stay usable."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from typing import Any

import jax
import programs
import pytest
from lateness import ON_GPU
from run_processes import free_port

from jax_ep import context

SLACK_S = 5.0


def check_story(failure: dict[str, Any], timeout_s: float, missing: int | None = None) -> None:
    """The error names the operation and both ranks, and came in time."""
    assert failure["kind"] == "JaxRuntimeError" or not ON_GPU, failure
    story = re.search(r"rank (\d+) timed out after [\d.]+ s in (\w+) .*waiting for rank (\d+)", failure["text"])
    assert story, failure
    assert story[2] in ("dispatch", "combine")
    assert story[1] != story[3] and (missing is None or int(story[3]) == missing), story[0]
    assert "jax_ep.finalize() and jax_ep.init()" in failure["text"]
    assert failure["seconds"] < timeout_s + SLACK_S


@pytest.mark.parametrize("scenario", ["never", "late"])
def test_a_rank_that_does_not_come(scenario: str, one_process: None) -> None:
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    if scenario == "late" and not ON_GPU:
        pytest.skip("in the interpreter no rank starts before all are there")
    found = programs.run("missing_peer.py", scenario)
    last, timeout_s = found["ranks"] - 1, found["timeout_s"]
    assert found["right before"] is True, found
    check_story(found["failure"], timeout_s, missing=last if scenario == "never" else None)
    assert found["failure"]["seconds"] > 0.9 * timeout_s
    # In between the context refuses work, at once: compiled programs by their check, new ones when they are traced.
    for what in ("same program after it", "new program after it"):
        assert found[what]["kind"] != "no error", found
        assert found[what]["seconds"] < SLACK_S, found[what]
    assert "refuses work after a failure: call finalize(), then init()" in found["new program after it"]["text"]
    assert found["right again"] == [True] * 3, found


@pytest.mark.timeout(240)
def test_a_process_that_is_killed(on_gpu: None, one_process: None) -> None:
    """One process per GPU: the last one kills itself between two calls."""
    if "nvshmem" not in context.TRANSPORTS:
        pytest.skip("there is no transport for several processes")
    count = min(4, jax.device_count())
    if count < 2:
        pytest.skip("needs two GPUs")
    pytest.importorskip("nvshmem")
    processes = run_processes(count, victim=count - 1)
    assert processes[-1]["status"] == -signal.SIGKILL, processes[-1]
    for process in processes[:-1]:
        assert process["status"] == 0, process["output"]
        assert process["right"], process
        check_story(process["failure"], process["timeout_s"])
    # All of them wait for the one that is gone, or for one that does.
    assert f"waiting for rank {count - 1}" in "".join(process["failure"]["text"] for process in processes[:-1])
    # The GPUs are as usable as before.
    for process in run_processes(count, victim=-1):
        assert process["status"] == 0 and process["right"], process["output"]
        assert process["failure"]["kind"] == "no error", process


def run_processes(count: int, victim: int) -> list[dict[str, Any]]:
    """Runs killed_peer.py in `count` processes; what each printed, its exit status and its output."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, str(programs.FOLDER / "killed_peer.py"), str(count), address, str(victim)]
    started = [
        subprocess.Popen(
            [*command, str(i)],
            env=programs.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for i in range(count)
    ]
    deadline, found = time.monotonic() + 100, []
    for process in started:
        try:
            output = process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0] + "\nkilled after the time limit"
        last = next((line for line in reversed(output.splitlines()) if line.startswith("{")), "{}")
        found.append(json.loads(last) | {"status": process.returncode, "output": output[-3000:]})
    return found
