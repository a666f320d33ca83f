"""Launches that a process lowers once: every height of a tile is a loop for Mosaic to lay out, which takes seconds.

JAX shares the lowering of a function within one program, but not among programs, of which a training has several with
the same products. So a launch is exported, and programs call what came of that; also programs of other processes
(kept.py). While Python lowers the next one, a thread compiles it: XLA would only begin when all are lowered.
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
from jax_ep.pallas.kept import kept_or_made
from jax_ep.types import Array

_MOST = 256  # launches of different sizes, of half a megabyte each
# Mosaic promises nothing to other versions of JAX, for which exported programs may be kept: these are for this one.
_ALLOWED = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")


def lowered_once[Result](launch: Callable[..., Result]) -> Callable[..., Result]:
    """A launch `(*operands, interpret, **static) -> result`, whose results vary over the mesh axes of its operands.

    It depends on nothing but the shapes and dtypes of these, what is static, the kind of device, and its sources.
    """

    def exported_here(shapes: tuple[jax.ShapeDtypeStruct, ...], static: Any, x64: bool) -> export.Exported:
        call = jax.jit(functools.partial(launch, interpret=False, **dict(static)))
        with jax.enable_x64(x64):
            made = export.export(call, platforms=("cuda",), disabled_checks=[_ALLOWED])(*shapes)
        if jax.default_backend() == "gpu" and len(os.sched_getaffinity(0)) > 1:  # two threads of one core are slower
            # Not a daemon: an interpreter that ended while XLA compiles would crash, so it waits for it, a few seconds.
            threading.Thread(target=_compile_ahead, args=(made, shapes, x64)).start()
        return made

    @functools.lru_cache(_MOST)
    def exported(*key: Any) -> export.Exported:
        # In a thread of its own, which knows of no mesh: whoever calls it, the launch is one of a single device.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(kept_or_made, launch, key, functools.partial(exported_here, *key)).result()

    @functools.wraps(launch)
    def run(*operands: Array, interpret: bool, **static: Any) -> Result:
        if interpret:
            return launch(*operands, interpret=True, **static)
        operands = vary_alike(operands)
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
        out = exported(shapes, tuple(static.items()), jax.config.jax_enable_x64).call(*operands)
        result: Result = vary_as(operands[0], out)
        return result

    return run


def _compile_ahead(launch: export.Exported, shapes: tuple[jax.ShapeDtypeStruct, ...], x64: bool) -> None:
    """Leaves the kernels of a launch in Mosaic's cache, which keeps them for the life of the process, and nothing else.

    Mosaic knows a kernel by a hash of what it was lowered to, which is the same in every program with the launch. Where
    such a program is compiled meanwhile, it waits for this kernel and finds it: XLA and Mosaic want other options of
    LLVM, of which a process has one set, so that one begins when the other has ended. Should that change, the program
    compiles the kernel a second time, beside this thread, and takes as long as without it.
    """
    from jax._src import config  # JAX has no public name for a limit that holds in one thread

    # Who finds the launch in a file finds whole programs in the cache beside it: this one would be there for nobody.
    not_kept = config.persistent_cache_min_compile_time_secs(math.inf)
    device = SingleDeviceSharding(jax.local_devices()[0])
    # What XLA and Mosaic refuse here they also refuse in the caller's program, and the caller is told there. Any other
    # error would be a mistake here, which costs time and no result: Python prints those of threads.
    with contextlib.suppress(jax.errors.JaxRuntimeError), jax.enable_x64(x64), not_kept:
        jax.jit(launch.call, in_shardings=device).lower(*shapes).compile()
