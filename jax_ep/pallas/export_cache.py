"""Lower each launch once per process: for every tile height Mosaic lays out a loop, which takes seconds.

JAX shares the lowering of a function within one program, but not among programs, and a training has several programs
with the same GEMMs. So a launch is exported once, and programs call the export. `lowering_cache` shares exports with
other processes. While Python lowers the next launch, a thread compiles this one: XLA would start only when all are
lowered. With enough cores, tracing does not wait for the lowering: one launch is lowered here and the others in
subprocesses (`subprocess_lowering`), and a program waits for its launches when it is lowered itself.
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

from jax_ep.core.autodiff import deferred, shaped
from jax_ep.core.mesh_axes import vary_alike, vary_as
from jax_ep.pallas import subprocess_lowering
from jax_ep.pallas.launch import shapes_alone
from jax_ep.pallas.lowering_cache import cached_or_made
from jax_ep.pallas.subprocess_lowering import Shapes, Static, export_launch
from jax_ep.types import Array

_MAX_LAUNCHES = 256  # of different sizes; half a megabyte each


def lowered_once[Result](launch: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap a launch `(*operands, interpret, **static) -> result` so that a process lowers it once.

    The launch may depend only on the shapes and dtypes of its operands, the static arguments, the kind of device and
    its sources. Its results vary over the mesh axes of its operands.
    """

    def exported_now(shapes: Shapes, static: Static, x64: bool) -> export.Exported:
        made = _exported_somewhere(launch, shapes, static, x64)
        if jax.default_backend() == "gpu" and len(os.sched_getaffinity(0)) > 1:  # two threads on one core are slower
            # Not a daemon: Python would crash if it ended while XLA compiles, so it waits a few seconds.
            threading.Thread(target=_compile_ahead, args=(made, shapes, x64)).start()
        return made

    # New threads have no mesh: the launch is one of a single device, whatever the caller's mesh is.
    @functools.lru_cache(_MAX_LAUNCHES)
    def exported_once(*key: Any) -> export.Exported:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(cached_or_made, launch, key, functools.partial(exported_now, *key)).result()

    @functools.lru_cache(_MAX_LAUNCHES)
    def begun(*key: Any) -> _Begun:
        with ThreadPoolExecutor(1) as thread:
            results = thread.submit(_results, launch, *key)
        return _Begun(launch.__name__, functools.partial(exported_once, *key), results.result())

    @functools.wraps(launch)
    def run(*operands: Array, interpret: bool, **static: object) -> Result:
        if interpret:
            return launch(*operands, interpret=True, **static)
        operands = vary_alike(operands)
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
        key = shapes, tuple(static.items()), jax.config.jax_enable_x64
        out = (
            begun(*key).call(*operands) if subprocess_lowering.most_processes() else exported_once(*key).call(*operands)
        )
        result: Result = vary_as(operands[0], out)
        return result

    return run


class _Places:
    """Places to lower launches: one in this process, since Python runs one thread at a time, and one per subprocess."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_free, self._num_subprocesses = True, 0

    @contextlib.contextmanager
    def one(self, max_subprocesses: int) -> Iterator[bool]:
        """Wait for a place; yields whether it is in this process."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_free or self._num_subprocesses < max_subprocesses)
            is_here, self._is_free = self._is_free, False
            self._num_subprocesses += not is_here
        try:
            yield is_here
        finally:
            with self._changed:
                self._is_free |= is_here
                self._num_subprocesses -= not is_here
                self._changed.notify_all()


_places = _Places()


def _exported_somewhere(launch: Callable[..., object], shapes: Shapes, static: Static, x64: bool) -> export.Exported:
    """Export a launch in this process, or in a subprocess while this one is busy with another launch."""
    max_subprocesses = subprocess_lowering.most_processes()
    if not max_subprocesses:
        return export_launch(launch, shapes, static, x64)
    with _places.one(max_subprocesses) as is_here:
        if is_here:
            return export_launch(launch, shapes, static, x64)
        try:
            return subprocess_lowering.lower(launch, shapes, static, x64)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            warnings.warn(
                f"the subprocess that lowers the kernel of {launch.__name__} failed, so this process lowers it; "
                f"set {subprocess_lowering.VARIABLE}=0 to use no subprocesses: {error}",
                stacklevel=2,
            )
    with _places.one(0):
        return export_launch(launch, shapes, static, x64)


class _Begun:
    """A launch that is being lowered in a thread.

    Attributes:
      results: shapes and dtypes, in the launch's structure.
    """

    def __init__(self, name: str, make: Callable[[], export.Exported], results: object) -> None:
        self.results = results
        self._name, self._make = name, make
        self._thread = threading.Thread(target=self._try)
        self._thread.start()

    def __repr__(self) -> str:
        """Show the name in printed programs."""
        return self._name

    def _try(self) -> None:
        with contextlib.suppress(Exception):  # `made` raises it again
            self._make()

    def made(self) -> export.Exported:
        self._thread.join()
        return self._make()

    def call(self, *operands: Array) -> Any:
        leaves, structure = jax.tree.flatten(self.results)
        found = _call_p.bind(*operands, launch=self, results=tuple(map(shaped, leaves)))
        return jax.tree.unflatten(structure, found)


def _call(*operands: Array, launch: _Begun, results: object) -> list[Array]:
    return jax.tree.leaves(launch.made().call(*operands))


_call_p = deferred("jax_ep_lowered", _call)


def _results(launch: Callable[..., object], shapes: Shapes, static: Static, x64: bool) -> Any:
    with jax.enable_x64(x64), shapes_alone():
        return jax.eval_shape(functools.partial(launch, interpret=False, **dict(static)), *shapes)


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
