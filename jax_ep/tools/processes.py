"""Tools with one process per GPU: `--processes N` runs this command N times; the first process reports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

_PROCESS, _COORDINATOR = (f"JAX_EP_TOOL_{name}" for name in ("PROCESS", "COORDINATOR"))


def enter(count: int) -> bool:
    """Make this process one of `count` processes; False: it has only started the others, which have ended.

    Call it before JAX initializes.
    """
    if count == 1:
        return True
    if _PROCESS not in os.environ:
        on_gpus = os.environ.get("JAX_PLATFORMS") != "cpu"
        most = len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) if on_gpus else os.cpu_count() or 1
        if count > most:
            raise ValueError(f"--processes {count}: there are {most} {'GPUs' if on_gpus else 'cores'}, one per process")
        _run_copies(count)
        return False
    import jax_ep

    process = int(os.environ[_PROCESS])
    jax.distributed.initialize(os.environ[_COORDINATOR], count, process, local_device_ids=[process])
    # With the mesh, plans need no all-to-all of device numbers.
    jax_ep.init(jax.make_mesh((count,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,)))
    return True


def _run_copies(count: int) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # the copies must end too
        if signal.getsignal(number) is signal.SIG_DFL:  # not under nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    with socket.socket() as probe, tempfile.TemporaryDirectory() as unused:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        probe.close()
        copies = [_start(i, address, unused) for i in range(count)]
        try:
            while None in (codes := [copy.poll() for copy in copies]) and not any(codes):
                time.sleep(0.1)
        finally:
            for copy in copies:
                copy.kill()
    if any(codes):
        sys.exit(f"{Path(sys.argv[0]).name}: exit statuses of the processes: {codes}")


def _start(process: int, address: str, unused: str) -> subprocess.Popen[bytes]:
    """Start a copy of this command; all but the first write their report to the folder `unused`."""
    own = {_PROCESS: str(process), _COORDINATOR: address}
    quiet = ["--out", unused] if process else []
    output = subprocess.DEVNULL if process else None
    # In another session, which Ctrl-C does not reach: this process ends it.
    command = [sys.executable, *sys.orig_argv[1:], *quiet]
    return subprocess.Popen(command, env=os.environ | own, stdout=output, start_new_session=True)
