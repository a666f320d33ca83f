"""Run tests in several processes in step, as programs of several processes run.

    python tests/helpers/run_processes.py N [--devices D] [--timeout SECONDS] [--grace SECONDS] [arguments of pytest]

Each process runs the same pytest command on the same random inputs, through `jax.distributed`, and compares all
results. The output is that of process 0, and the last lines of a failing process. With `JAX_EP_TEST_DEVICES=gpu`
process i drives GPU i, with `JAX_EP_TEST_GPUS=N` GPU i modulo N, otherwise D CPU devices, one by default.
"""

import argparse
import collections
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NUM_LAST_LINES = 60
LAST_WORDS_S = 60  # For the output of a process that is being ended.


class Process:
    """One pytest process; a thread collects its output."""

    def __init__(self, index, own, arguments):
        self.index = index
        self.lines: collections.deque[str] = collections.deque(maxlen=NUM_LAST_LINES)
        own = own | {"PROCESS": str(index)}
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
            env=os.environ | {f"JAX_EP_TEST_{name}": value for name, value in own.items()},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # So that a signal also reaches its children.
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.lines.append(line.rstrip("\n"))
            if self.index == 0:
                print(f"[0] {line}", end="", flush=True)

    def end(self):
        """End the process and its children, which first print their stacks."""
        for sign in (signal.SIGABRT, signal.SIGKILL):
            if self.popen.poll() is None:
                os.killpg(self.popen.pid, sign)
                try:
                    self.popen.wait(LAST_WORDS_S)
                except subprocess.TimeoutExpired:
                    continue
        self.finish()

    def finish(self):
        """Wait for the last of the output."""
        self._thread.join(LAST_WORDS_S)

    def counts(self):
        """Return numbers of tests by outcome, from pytest's summary."""
        pattern = re.compile(r"(\d+) (passed|failed|skipped|error|xfailed|subtests passed)")
        summary = next((line for line in reversed(self.lines) if re.search(r" in [\d.]+s", line)), "")
        return {outcome: int(number) for number, outcome in pattern.findall(summary)}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_pair(program, **environment):
    """Run a program of this folder in two processes that meet; return the JSON on the last line of each."""
    command = [sys.executable, str(Path(__file__).with_name(program))]
    own = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)} | environment
    options = {"env": own, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    address = f"127.0.0.1:{free_port()}"
    started = [subprocess.Popen([*command, str(i), address], **options) for i in range(2)]
    try:
        outputs = [process.communicate() for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], outputs
    return [json.loads(stdout.splitlines()[-1]) for stdout, _ in outputs]


def wait(processes, timeout_s, grace_s):
    """Wait until all have ended, or one has failed; return why the others must be ended, or None."""
    deadline, first = time.monotonic() + timeout_s, None
    while any(process.popen.poll() is None for process in processes):
        failed = [process.index for process in processes if process.popen.poll() not in (None, 0)]
        if failed and first is None:
            first, deadline = failed, min(deadline, time.monotonic() + grace_s)
        if time.monotonic() > deadline:
            return f"processes {first} have failed" if first else f"not done after {timeout_s:g} s"
        time.sleep(0.05)
    return None


def verdict(processes):
    """Return what is wrong with the outcome, or None."""
    codes = [process.popen.returncode for process in processes]
    if any(codes):
        return f"exit statuses {codes}"
    counts = [process.counts() for process in processes]
    if not counts[0].get("passed"):
        return f"no test has passed: {counts[0]}"
    if any(other != counts[0] for other in counts):
        return f"the processes were not in step: {counts}"
    return None


def main():
    """Run the tests; return 0 if they have passed in every process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("num_processes", type=int, metavar="N")
    parser.add_argument("--devices", type=int, default=1, metavar="D", help="CPU devices of each process (default: 1)")
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds for everything (default: 7200)")
    text = "seconds that the others have after the first failure, to report the same (default: 15)"
    parser.add_argument("--grace", type=float, default=15.0, help=text)
    options, arguments = parser.parse_known_args()
    if not any(argument.split("=")[0] == "--seed" for argument in arguments):
        arguments += ["--seed", "0" if os.environ.get("CI") else str(secrets.randbits(32))]
    count, address = options.num_processes, f"127.0.0.1:{free_port()}"
    own = {"PROCESSES": str(count), "CPU_DEVICES": str(options.devices), "COORDINATOR": address}
    # The signal of `timeout`, after which no process may remain.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    processes = [Process(index, own, arguments) for index in range(count)]
    try:
        problem = wait(processes, options.timeout, options.grace)
    finally:
        late = [process for process in processes if process.popen.poll() is None]
        for process in late:
            process.end()
    for process in processes:
        process.finish()
    problem = verdict(processes) if problem is None else problem
    if problem is None:
        return 0
    for process in processes[1:]:  # All output of process 0 is above.
        if process.popen.returncode != 0:
            ended = ", ended from here" if process in late else ""
            print(f"\n=== process {process.index}: exit status {process.popen.returncode}{ended}; its last lines:")
            print("\n".join(f"[{process.index}] {line}" for line in process.lines))
    print(f"\nrun_processes: {problem}; pytest {' '.join(arguments)}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
