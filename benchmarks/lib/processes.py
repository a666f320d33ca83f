"""Benchmarks with one process per GPU: `--processes N` starts N copies of the script, of which the first reports."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax

_PROCESS, _COORDINATOR, _FIGURE = (f"JAX_EP_BENCHMARK_{name}" for name in ("PROCESS", "COORDINATOR", "FIGURE"))


def add_option(options: argparse.ArgumentParser) -> None:
    """Adds `--processes`."""
    options.add_argument("--processes", type=int, default=1, metavar="N", help="one process for each of N GPUs")


def enter(count: int, figure: Callable[[], float]) -> float | None:
    """Makes this process one of `count`, or starts those and ends with their exit status.

    Args:
      count: processes, as of `--processes`.
      figure: measures something that one process must measure, which drives every GPU; a function of a module of lib.

    Returns:
      The figure, or None where this process has only started the others.
    """
    if count == 1:
        return figure()
    if _PROCESS not in os.environ:
        on_gpus = os.environ.get("JAX_PLATFORMS") != "cpu"
        if on_gpus and count > (gpus := len(list(Path("/proc/driver/nvidia/gpus").glob("*")))):
            raise ValueError(f"--processes {count}: there are {gpus} GPUs, expected one for each process")
        os.environ[_FIGURE] = str(_alone(figure))
        _run_copies(count)
        return None
    import jax_ep

    process = int(os.environ[_PROCESS])
    jax.distributed.initialize(os.environ[_COORDINATOR], count, process, local_device_ids=[process])
    # With the mesh, plans need no exchange of device numbers.
    jax_ep.init(jax.make_mesh((count,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,)))
    return float(os.environ[_FIGURE])


def _run_copies(count: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the copies must end too
    with socket.socket() as probe, tempfile.TemporaryDirectory() as elsewhere:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        probe.close()
        copies = [_start(i, address, elsewhere) for i in range(count)]
        try:
            while None in (codes := [copy.poll() for copy in copies]) and not any(codes):
                time.sleep(0.1)
        finally:
            for copy in copies:
                copy.kill()
    if any(codes):
        sys.exit(f"{Path(sys.argv[0]).name}: exit statuses of the processes: {codes}")


def _start(process: int, address: str, elsewhere: str) -> subprocess.Popen[bytes]:
    """A copy of this script; those that do not report write to a folder that goes away."""
    own = {_PROCESS: str(process), _COORDINATOR: address}
    quiet = ["--out", elsewhere] if process else []
    output = subprocess.DEVNULL if process else None
    # In a session of its own, where Ctrl-C does not reach it: this process ends it.
    command = [sys.executable, *sys.argv, *quiet]
    return subprocess.Popen(command, env=os.environ | own, stdout=output, start_new_session=True)


def _alone(figure: Callable[[], float]) -> float:
    """The number that a function returns in a process of its own, which has ended when this returns."""
    code = f"import {figure.__module__} as m; print('result', m.{figure.__name__}())"
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split("result")[-1])
