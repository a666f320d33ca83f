"""Lower each launch once per process: for every tile height Mosaic lays out a loop, which takes seconds.

JAX shares the lowering of a function within one program, but not among programs, and a training has several programs
with the same GEMMs. So a launch is exported once, and programs call the export. `lowering_cache` shares exports with
other processes. While Python lowers the next launch, a thread compiles this one: XLA would start only when all are
lowered.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax import export
from jax.sharding import SingleDeviceSharding

from jax_ep.core.mesh_axes import vary_alike, vary_as
from jax_ep.pallas.lowering_cache import Shapes, cached_or_made
from jax_ep.types import Array

_MAX_LAUNCHES = 256  # of different sizes; half a megabyte each
# Mosaic's custom calls are stable within one version of JAX only; exports never leave this version.
_ALLOWED = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")

type Static = tuple[tuple[str, object], ...]
"""Static arguments of a launch, by name."""


def lowered_once[Result](launch: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap a launch `(*operands, interpret, **static) -> result` so that a process lowers it once.

    The launch may depend only on the shapes and dtypes of its operands, the static arguments, the kind of device and
    its sources. Its results vary over the mesh axes of its operands.
    """

    def exported_now(shapes: Shapes, static: Static, x64: bool) -> export.Exported:
        made = _export(launch, shapes, static, x64)
        if jax.default_backend() == "gpu" and len(os.sched_getaffinity(0)) > 1:  # two threads on one core are slower
            # Not a daemon: Python would crash if it ended while XLA compiles, so it waits a few seconds.
            threading.Thread(target=_compile_ahead, args=(made, shapes, x64)).start()
        return made

    # New threads have no mesh: the launch is one of a single device, whatever the caller's mesh is.
    @functools.lru_cache(_MAX_LAUNCHES)
    def exported_once(*key: Any) -> export.Exported:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(cached_or_made, launch, key, functools.partial(exported_now, *key)).result()

    @functools.wraps(launch)
    def run(*operands: Array, interpret: bool, **static: object) -> Result:
        if interpret:
            return launch(*operands, interpret=True, **static)
        operands = vary_alike(operands)
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
        key = shapes, tuple(static.items()), jax.config.jax_enable_x64
        result: Result = vary_as(operands[0], exported_once(*key).call(*operands))
        return result

    return run


def _export(launch: Callable[..., object], shapes: Shapes, static: Static, x64: bool) -> export.Exported:
    """Lower a launch of operands of these shapes for GPUs."""
    call = jax.jit(functools.partial(launch, interpret=False, **dict(static)))
    with jax.enable_x64(x64):
        return export.export(call, platforms=("cuda",), disabled_checks=[_ALLOWED])(*shapes)


def _compile_ahead(launch: export.Exported, shapes: Shapes, x64: bool) -> None:
    """Compile the kernels of a launch into Mosaic's cache, which lives as long as the process.

    Mosaic identifies a kernel by a hash of its lowered module, which is the same in every program with the launch. A
    program that is compiled at the same time waits for this kernel and finds it: XLA and Mosaic set different options
    of LLVM, which has one set per process, so one starts when the other has ended. If that changes, the program
    compiles the kernel a second time, in parallel, and takes as long as without this thread.
    """
    from jax._src import config  # the public name sets the limit for all threads

    # Skip the persistent cache: programs that reuse this launch are cached as a whole.
    not_cached = config.persistent_cache_min_compile_time_secs(math.inf)
    device = SingleDeviceSharding(jax.local_devices()[0])
    # XLA and Mosaic raise the same errors in the caller's program. Any other error is a bug here, which costs time and
    # no result: Python prints errors of threads.
    with contextlib.suppress(jax.errors.JaxRuntimeError), jax.enable_x64(x64), not_cached:
        jax.jit(launch.call, in_shardings=device).lower(*shapes).compile()
