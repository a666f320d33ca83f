"""Lower kernel launches in subprocesses, in parallel: one process lowers one launch at a time, which takes seconds.

A subprocess reads one request from its standard input, writes the serialized `jax.export` of the launch, and ends. It
sees no GPU: a launch depends on nothing of one except its number of multiprocessors.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import export

from jax_ep.pallas import launch as launches

type Shapes = tuple[jax.ShapeDtypeStruct, ...]
type Static = tuple[tuple[str, object], ...]
"""Static arguments of a launch, by name."""

VARIABLE = "JAX_EP_LOWERING_PROCESSES"
"""Environment variable: the number of subprocesses that lower at a time; 0 for none."""
_MIN_CORES, _MAX_PROCESSES = 8, 6  # a subprocess takes one core, three seconds to start, and half a gigabyte
_TIMEOUT_S = 300
# Mosaic's custom calls are stable within one version of JAX only; exports never leave this version.
_ALLOWED = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")


class Request(NamedTuple):
    """A launch by its module and name, and the other arguments of `export_launch`."""

    module: str
    name: str
    shapes: Shapes
    static: Static
    x64: bool
    cores: int | None


def export_launch(launch: Callable[..., object], shapes: Shapes, static: Static, x64: bool) -> export.Exported:
    """Lower a launch of operands of these shapes for GPUs, in this process."""
    call = jax.jit(functools.partial(launch, interpret=False, **dict(static)))
    with jax.enable_x64(x64):
        return export.export(call, platforms=("cuda",), disabled_checks=[_ALLOWED])(*shapes)


def most_processes() -> int:
    """Return how many subprocesses may lower at a time: none without a GPU, with few cores, or without flatbuffers."""
    cores = len(os.sched_getaffinity(0))
    if jax.default_backend() != "gpu" or cores < _MIN_CORES or not sys.executable:
        return 0
    if importlib.util.find_spec("flatbuffers") is None:  # `jax.export` serializes with it
        return 0
    asked = os.environ.get(VARIABLE, str(min(cores // 2, _MAX_PROCESSES)))
    if not asked.isdecimal():
        raise ValueError(f"{VARIABLE}={asked!r}, expected the number of processes that lower kernels, or 0 for none.")
    return int(asked)


def lower(launch: Callable[..., object], shapes: Shapes, static: Static, x64: bool) -> export.Exported:
    """Run `export_launch` in a subprocess.

    Raises:
      RuntimeError: the subprocess failed; with its error output.
    """
    cores = getattr(jax.local_devices()[0], "core_count", None)
    try:
        request = pickle.dumps(Request(launch.__module__, launch.__qualname__, shapes, static, x64, cores))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RuntimeError(f"the launch cannot be pickled: {error}") from error
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # -P: never import from the current folder what this process does not.
    command = [sys.executable, "-P", "-m", __spec__.name]
    done = subprocess.run(command, input=request, capture_output=True, env=environment, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr.decode(errors='replace').strip()[-2000:]}")
    try:
        return export.deserialize(bytearray(done.stdout))
    except Exception as error:  # invalid bytes raise errors of any type
        raise RuntimeError(f"its {len(done.stdout)} bytes of output are no launch: {error}") from error


def main() -> None:
    """Handle one request."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # other prints are not part of the answer
    request: Request = pickle.load(sys.stdin.buffer)
    if request.cores is not None:
        launches.assume_cores(request.cores)
    function = getattr(importlib.import_module(request.module), request.name)
    answers.write(export_launch(inspect.unwrap(function), request.shapes, request.static, request.x64).serialize())


if __name__ == "__main__":
    main()
