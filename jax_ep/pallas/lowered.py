"""Launches that a process lowers once: every height of a tile is a loop for Mosaic to lay out, which takes seconds.

JAX shares the lowering of a function within one program, but not among programs, of which a training has several with
the same products. So a launch is exported, and programs call what came of that; also programs of other processes
(kept.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax import export

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
            return export.export(call, platforms=("cuda",), disabled_checks=[_ALLOWED])(*shapes)

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
