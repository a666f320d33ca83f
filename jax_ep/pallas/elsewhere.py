"""Launches lowered in processes of their own, side by side: in one process Python lowers one at a time, for seconds.

A process is asked on its standard input, answers with what `jax.export` makes of the launch, and ends. It sees no GPU:
all that a launch depends on of one is how many multiprocessors it has.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import export

VARIABLE = "JAX_EP_LOWERING_PROCESSES"
"""Environment variable: how many at a time; 0 for none."""
_FEWEST_CORES, _MOST_PROCESSES = 8, 6  # each takes a core, for three seconds before it begins, and half a gigabyte
_PATIENCE_S = 300


class Request(NamedTuple):
    """A launch, as other processes find it, and what `lowered.exported` must know of it."""

    module: str
    name: str
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    static: tuple[tuple[str, Any], ...]
    x64: bool
    cores: int | None


def most_processes() -> int:
    """How many may lower at a time beside this one: none without a GPU, with few cores, or without flatbuffers."""
    cores = len(os.sched_getaffinity(0))
    if jax.default_backend() != "gpu" or cores < _FEWEST_CORES or not sys.executable:
        return 0
    if importlib.util.find_spec("flatbuffers") is None:  # with which JAX writes what it exports
        return 0
    asked = os.environ.get(VARIABLE, str(min(cores // 2, _MOST_PROCESSES)))
    if not asked.isdecimal():
        raise ValueError(f"{VARIABLE}={asked!r}, expected how many processes may lower kernels at a time, 0 for none.")
    return int(asked)


def lower(launch: Callable[..., Any], shapes: Any, static: Any, x64: bool) -> export.Exported:
    """What `lowered.exported` makes of a launch, in a process of its own.

    Raises:
      RuntimeError: that process failed; with what it said.
    """
    cores = getattr(jax.local_devices()[0], "core_count", None)
    try:
        request = pickle.dumps(Request(launch.__module__, launch.__qualname__, shapes, static, x64, cores))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RuntimeError(f"it cannot be asked: {error}") from error
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            __spec__.name,
        ],  # -P: import nothing from the current folder that this process does not
        input=request,
        capture_output=True,
        env=environment,
        timeout=_PATIENCE_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr.decode(errors='replace').strip()[-2000:]}")
    try:
        return export.deserialize(bytearray(done.stdout))
    except Exception as error:  # whatever bytes that are no launch lead to
        raise RuntimeError(f"its {len(done.stdout)} bytes of output are no launch: {error}") from error


def main() -> None:
    """Answers one request."""
    from jax_ep.pallas import launch as launches
    from jax_ep.pallas import lowered

    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # whatever else is printed is no part of the answer
    request: Request = pickle.load(sys.stdin.buffer)
    if request.cores is not None:
        launches.assume_cores(request.cores)
    function = getattr(importlib.import_module(request.module), request.name)
    made = lowered.exported(inspect.unwrap(function), request.shapes, request.static, request.x64)
    answers.write(made.serialize())


if __name__ == "__main__":
    main()
