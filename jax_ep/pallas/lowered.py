"""Launches that a process lowers once: every height of a tile is a loop for Mosaic to lay out, which takes seconds.

JAX shares the lowering of a function within one program, but not among programs, of which a training has several with
the same products. So a launch is exported, and programs call what came of that; also programs of other processes
(kept.py). While Python lowers the next one, a thread compiles it: XLA would only begin when all are lowered. Where
there are cores enough, a program is traced with calls of launches that are still being lowered, one of them here and
others in processes of their own (elsewhere.py), and waits for them where it is lowered itself.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax import export
from jax.sharding import SingleDeviceSharding

from jax_ep.core.mesh_axes import vary_alike, vary_as
from jax_ep.core.primitives import deferred, shaped
from jax_ep.pallas import elsewhere
from jax_ep.pallas.kept import kept_or_made
from jax_ep.pallas.launch import shapes_alone
from jax_ep.types import Array

_MOST = 256  # launches of different sizes, of half a megabyte each
# Mosaic promises nothing to other versions of JAX, for which exported programs may be kept: these are for this one.
_ALLOWED = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")


def lowered_once[Result](launch: Callable[..., Result]) -> Callable[..., Result]:
    """A launch `(*operands, interpret, **static) -> result`, whose results vary over the mesh axes of its operands.

    It depends on nothing but the shapes and dtypes of these, what is static, the kind of device, and its sources.
    """

    def exported_now(shapes: tuple[jax.ShapeDtypeStruct, ...], static: Any, x64: bool) -> export.Exported:
        made = _exported_somewhere(launch, shapes, static, x64)
        if jax.default_backend() == "gpu" and len(os.sched_getaffinity(0)) > 1:  # two threads of one core are slower
            # Not a daemon: an interpreter that ended while XLA compiles would crash, so it waits for it, a few seconds.
            threading.Thread(target=_compile_ahead, args=(made, shapes, x64)).start()
        return made

    # In threads of their own, which know of no mesh: whoever calls it, the launch is one of a single device.
    @functools.lru_cache(_MOST)
    def exported_once(*key: Any) -> export.Exported:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(kept_or_made, launch, key, functools.partial(exported_now, *key)).result()

    @functools.lru_cache(_MOST)
    def begun(*key: Any) -> _Begun:
        with ThreadPoolExecutor(1) as thread:
            results = thread.submit(_results, launch, *key)
        return _Begun(launch.__name__, functools.partial(exported_once, *key), results.result())

    @functools.wraps(launch)
    def run(*operands: Array, interpret: bool, **static: Any) -> Result:
        if interpret:
            return launch(*operands, interpret=True, **static)
        operands = vary_alike(operands)
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
        key = shapes, tuple(static.items()), jax.config.jax_enable_x64
        out = begun(*key).call(*operands) if elsewhere.most_processes() else exported_once(*key).call(*operands)
        result: Result = vary_as(operands[0], out)
        return result

    return run


def exported(launch: Callable[..., Any], shapes: Any, static: Any, x64: bool) -> export.Exported:
    """Lowers a launch of operands of these shapes for GPUs, in this process."""
    call = jax.jit(functools.partial(launch, interpret=False, **dict(static)))
    with jax.enable_x64(x64):
        return export.export(call, platforms=("cuda",), disabled_checks=[_ALLOWED])(*shapes)


class _Places:
    """Where launches are lowered: one in this process, as Python runs no two at once, and others in their own."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_free, self._elsewhere = True, 0

    @contextlib.contextmanager
    def one(self, most_elsewhere: int) -> Iterator[bool]:
        """Waits for a place, and says whether it is in this process."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_free or self._elsewhere < most_elsewhere)
            is_here, self._is_free = self._is_free, False
            self._elsewhere += not is_here
        try:
            yield is_here
        finally:
            with self._changed:
                self._is_free |= is_here
                self._elsewhere -= not is_here
                self._changed.notify_all()


_places = _Places()


def _exported_somewhere(launch: Callable[..., Any], shapes: Any, static: Any, x64: bool) -> export.Exported:
    """The same, or, where this process is busy with another launch, in one of its own."""
    most_elsewhere = elsewhere.most_processes()
    if not most_elsewhere:
        return exported(launch, shapes, static, x64)
    with _places.one(most_elsewhere) as is_here:
        if is_here:
            return exported(launch, shapes, static, x64)
        try:
            return elsewhere.lower(launch, shapes, static, x64)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            warnings.warn(
                f"a process that was to lower the kernel of {launch.__name__} failed, so this one does; "
                f"{elsewhere.VARIABLE}=0 begins none: {error}",
                stacklevel=2,
            )
    with _places.one(0):
        return exported(launch, shapes, static, x64)


class _Begun:
    """A launch that is being lowered in a thread.

    Attributes:
      results: shapes and dtypes, in the launch's structure.
    """

    def __init__(self, name: str, make: Callable[[], export.Exported], results: Any) -> None:
        self.results = results
        self._name, self._make = name, make
        self._thread = threading.Thread(target=self._try)
        self._thread.start()

    def __repr__(self) -> str:
        """What printed programs have of it."""
        return self._name

    def _try(self) -> None:
        with contextlib.suppress(Exception):  # `made` raises it where a program needs the launch
            self._make()

    def made(self) -> export.Exported:
        self._thread.join()
        return self._make()

    def call(self, *operands: Array) -> Any:
        leaves, structure = jax.tree.flatten(self.results)
        found = _call_p.bind(*operands, launch=self, results=tuple(map(shaped, leaves)))
        return jax.tree.unflatten(structure, found)


def _call(*operands: Array, launch: _Begun, results: Any) -> list[Array]:
    return jax.tree.leaves(launch.made().call(*operands))


_call_p = deferred("jax_ep_lowered", _call)


def _results(launch: Callable[..., Any], shapes: Any, static: Any, x64: bool) -> Any:
    with jax.enable_x64(x64), shapes_alone():
        return jax.eval_shape(functools.partial(launch, interpret=False, **dict(static)), *shapes)


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
