"""Lower each launch once: for every `block_m` Mosaic lays out a loop, which takes seconds.

JAX shares the lowering of a function within one program only, and its persistent compilation cache saves the time to
compile, not to lower. So a process exports a launch once, and programs call the export. If that cache is in use,
exports are also files in a folder of it, which other processes read. While Python lowers the next launch, a thread
compiles this one: XLA would start only when all are lowered.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax import export
from jax.sharding import SingleDeviceSharding

from jax_ep.core.files import sources_digest
from jax_ep.core.json_files import cut
from jax_ep.core.mesh_axes import vary_alike, vary_as
from jax_ep.types import Array

_MAX_LAUNCHES = 256  # of different sizes; half a megabyte each
# Mosaic's custom calls are stable within one version of JAX only; exports never leave this version.
_ALLOWED = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")

_PACKAGE = Path(__file__).resolve().parents[1]
_DIGEST_BYTES = 32

type Shapes = tuple[jax.ShapeDtypeStruct, ...]
type Static = tuple[tuple[str, object], ...]
"""Static arguments of a launch, by name."""


def lowered_once[Result](launch: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap a launch `(*operands, interpret, **static) -> result` so that a process lowers it once.

    The launch may depend only on the shapes and dtypes of its operands, the static arguments, the kind of device and
    its sources. Its results vary over the mesh axes of its operands.
    """

    def made_now(shapes: Shapes, static: Static, x64: bool) -> export.Exported:
        made = _export(launch, shapes, static, x64)
        if jax.default_backend() == "gpu" and len(os.sched_getaffinity(0)) > 1:  # two threads on one core are slower
            # Not a daemon: Python would crash if it ended while XLA compiles, so it waits a few seconds.
            threading.Thread(target=_compile_ahead, args=(made, shapes, x64)).start()
        return made

    # New threads have no mesh: the launch is one of a single device, whatever the caller's mesh is.
    @functools.lru_cache(_MAX_LAUNCHES)
    def exported_once(*key: Any) -> export.Exported:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_read_or_made, launch, key, functools.partial(made_now, *key)).result()

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


def _read_or_made(launch: Callable[..., object], facts: object, make: Callable[[], export.Exported]) -> export.Exported:
    """Read a launch of these facts, which their `repr` identifies, from its file, or make it and write the file."""
    folder, cache, content = jax.config.jax_compilation_cache_dir, None, b""
    # `jax.export` serializes with flatbuffers.
    if not folder or not jax.config.jax_enable_compilation_cache or importlib.util.find_spec("flatbuffers") is None:
        return make()
    from jax._src.lru_cache import LRUCache  # what JAX keeps programs in, without a public name

    name = _name(launch, facts)
    with _warning_of_errors():
        cache = LRUCache(f"{folder}/jax_ep_lowered", max_size=jax.config.jax_compilation_cache_max_size)
        content = cache.get(name) or b""
    payload = content[_DIGEST_BYTES:]
    if content[:_DIGEST_BYTES] == hashlib.sha256(payload).digest():  # else another process is writing it
        return export.deserialize(bytearray(payload))
    made = make()
    if cache is not None:
        payload = bytes(made.serialize())
        with _warning_of_errors():
            cache.put(name, hashlib.sha256(payload).digest() + payload)
    return made


@contextlib.contextmanager
def _warning_of_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:  # of files, missing packages, and paths that cannot exist
        warnings.warn(f"a lowered kernel is not cached for other processes: {cut(error, 200)}", stacklevel=2)


def _name(launch: Callable[..., object], facts: object) -> str:
    """Name the file of a launch by all that it depends on. Mosaic is not stable across versions of JAX."""
    device = jax.local_devices()[0]
    machine = jax.default_backend(), device.device_kind, getattr(device, "core_count", None)
    versions = jax.__version__, jaxlib.__version__, sources_digest(_PACKAGE)
    key = repr((launch.__module__, launch.__qualname__, facts, machine, versions))
    return f"{launch.__name__.strip('_')}-{hashlib.sha256(key.encode()).hexdigest()}"


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
