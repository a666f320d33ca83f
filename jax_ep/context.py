"""The process-level context: the expert axis, and the transport over it.

The context owns everything that outlives a program: the transport, the symmetric heap and its status records. If one
process drives all devices, tracing a program that needs a context creates one with the defaults. Several processes
create it together, so each must call `init`.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from jax_ep.core import check
from jax_ep.core.check import errors_begin_with
from jax_ep.core.mesh_axes import axis_tuple, check_axes, check_mesh, mesh_in_use
from jax_ep.heap import nvshmem, peer_access, rendezvous, transports
from jax_ep.settings import file as settings_file
from jax_ep.types import AxisName
from jax_ep.values import shown

if TYPE_CHECKING:
    from jax_ep.heap.memory import Memory
    from jax_ep.heap.symmetric import SymmetricHeap
    from jax_ep.settings.operations import Setting

_log = logging.getLogger("jax_ep")
_TIMEOUT_S, _MOST_TIMEOUT_S = 30.0, 1e6  # Nanoseconds must fit in an int64.
_MOST_BYTES = 1 << 47
# Processes reach a joint step less evenly than kernels reach each other: one may load a checkpoint while another
# compiles.
_TIMEOUTS_BETWEEN_PROCESSES = 10
_LAUNCHERS = ("ffi", "jax-triton")


@dataclasses.dataclass(frozen=True)
class Context:
    """The settings of `init`.

    Attributes:
      mesh: the devices.
      axis_name: expert axis, or axes.
      transport: how tokens move between devices: "xla" (XLA's collectives), "peer" (kernels that write to peers'
        memory, among the GPUs of one process), "nvshmem" (the same kernels, several processes with one GPU each) or
        "shared_memory" (the same kernels on CPU devices in Triton's interpreter, for tests).
      num_ranks: ranks on the expert axis.
      heap_bytes: bytes of symmetric memory per device, or None to grow as needed.
      timeout_s: how long a kernel waits for a peer before it fails.
      mesh_is_given: whether the caller passed the mesh; programs may then rely on it.
      launcher: how kernels are launched: "ffi" (the package's own custom call) or "jax-triton".
    """

    mesh: jax.sharding.Mesh
    axis_name: AxisName
    transport: str
    num_ranks: int
    heap_bytes: int | None = None
    timeout_s: float = _TIMEOUT_S
    mesh_is_given: bool = dataclasses.field(default=False, compare=False)
    launcher: str = _LAUNCHERS[0]


_lock = threading.RLock()
_thread = threading.local()  # `.heap`: the heap in which this thread reserved memory for its next launch.
_current: Context | None = None
_is_implicit = False
_generation = 0  # Incremented by `init` and `finalize`.
_heap: SymmetricHeap | None = None
_comparison: rendezvous.Comparison | None = None  # With several processes, between init and finalize.
_launcher = _LAUNCHERS[0]  # The launcher of the traces in JAX's caches.
_sizes: dict[int, int] | None = None  # See SymmetricHeap.sizes; None before the first heap.
_records = jax.make_user_context(False)  # Whether kernels traced now record; part of the key of `jax.jit`.
_recording_kernels: dict[int, str] = {}  # Names of recorded kernels, by `Heap.LAUNCH`.

# Both are part of the key of `jax.jit`, so a change traces again. `_overrides` is per thread.
_tuning = jax.make_user_context(None)  # The user's choice; None uses the environment.
_overrides = jax.make_user_context(())


@errors_begin_with("init")
def init(
    mesh: jax.sharding.Mesh | None = None,
    *,
    axis_name: AxisName = "expert",
    transport: str | None = None,
    heap_bytes: int | None = None,
    timeout_s: float = _TIMEOUT_S,
    launcher: str | None = None,
) -> Context:
    """Set up the process-level context. Calling it again with the same arguments returns the same context.

    An explicit call replaces a context that was created implicitly. Programs compiled for an earlier context continue
    to work: the new context allocates what they need at once. If `heap_bytes` is less, they fail with an error.

    With several processes, all must call it with the same arguments, after `jax.distributed.initialize`. Each waits up
    to ten times `timeout_s` for the others; an error names processes that are missing, or that differ in arguments or
    versions. All must then trace the same programs on that mesh in the same order: a mismatch in the sizes of an
    all-to-all is an error. With transport "nvshmem" they also share symmetric memory: when a program needs more, all
    processes allocate it together, and wait for each other in the same way.

    Args:
      mesh: the devices. None uses the mesh of `jax.set_mesh`, or else all devices on one axis `axis_name`. An explicit
        mesh saves one all-to-all of device numbers per dispatch; programs on other devices with the same axes then
        fail.
      axis_name: mesh axis, or tuple of axes, over which experts are sharded.
      transport: "xla", "peer", "nvshmem" or "shared_memory", see `Context`; None for the best one here.
      heap_bytes: bytes of symmetric memory per device, allocated once, here; a program that needs more is an error.
        None lets it grow while programs are traced. Memory keeps its address until `finalize`, so growing stalls no
        program. In total it takes at most 4.5 times the bytes that the largest program needs, and at least 16 MiB.
      timeout_s: seconds that a kernel waits for a peer; after that the call fails with an error that names the peer.
      launcher: how Triton kernels are launched on GPUs: "ffi", the package's own custom call, or "jax-triton", which
        takes more host time per launch (docs/design/launches.md). None uses "ffi". A change clears JAX's caches, so
        that all programs use it. It has no effect on CPU devices.

    Returns:
      The context.

    Raises:
      ValueError: the mesh lacks an axis, the launcher or transport is unknown, the transport does not support the
        platform or the number of processes, `heap_bytes` is given for a transport without a heap, a number is out of
        range, `init` is called with other arguments before `finalize`, or XLA_FLAGS allows unordered launches.
      TypeError: the mesh, `heap_bytes` or `timeout_s` has a wrong type.
      ImportError: launcher is "jax-triton" and that package is missing.
      RuntimeError: there is less memory than `heap_bytes`, or than programs compiled earlier need; or jax-triton does
        not work with this JAX.
      jax.errors.JaxRuntimeError: another process is late, has other arguments or versions, or has failed; the message
        says which.

    Example:
      >>> import jax, jax_ep
      >>> context = jax_ep.init(jax.make_mesh((jax.device_count(),), ("expert",)))
      >>> context.num_ranks == jax.device_count()
      True
      >>> jax_ep.finalize()
    """
    global _current, _heap, _comparison, _generation
    wanted = _check(_resolve_mesh(mesh, axis_name), axis_name, transport, heap_bytes, timeout_s)
    wanted = dataclasses.replace(wanted, mesh_is_given=mesh is not None, launcher=_check_launcher(launcher))
    with _lock:
        if _is_implicit:
            finalize()  # An explicit call replaces the implicit context.
        if _current is not None and _current != wanted:
            raise ValueError(
                f"init: already initialized with {_current}, now called with {wanted}; call finalize() first."
            )
        if _current is None:
            together = wanted.transport == "nvshmem"  # All processes are in this call now.
            if jax.process_count() > 1 and not together:
                meetings = rendezvous.Meetings(wanted.timeout_s * _TIMEOUTS_BETWEEN_PROCESSES)
                meetings.meet("init", "setting up the context", same=_describe(wanted))
            # Kernels that use no heap also run in the worker processes that a heap brings.
            at_once = together or wanted.transport == "shared_memory"
            if at_once or (wanted.transport != "xla" and (heap_bytes is not None or _sizes is not None)):
                _heap = _outside_of_traces(lambda: _make_heap(wanted))
            if together:
                atexit.register(_finalize_at_exit)
            _current, _generation = wanted, _generation + 1
            _comparison = rendezvous.Comparison() if jax.process_count() > 1 else None
            _use_launcher(wanted.launcher)
            _log.info("transport %s", transports.describe(wanted.transport))
        return _current


def _check(
    mesh: jax.sharding.Mesh, axis_name: AxisName, transport: str | None, heap_bytes: int | None, timeout_s: float
) -> Context:
    """Check the arguments and return their context."""
    axes = _axes(axis_name)
    check_axes("init", mesh, axes, "pass as axis_name the axis that carries the experts")
    transport = transports.resolve(transport)
    if heap_bytes is not None and transport == "xla":
        raise ValueError(
            f"init: heap_bytes={shown(heap_bytes)}, but transport 'xla' owns no memory, expected None; leave heap_bytes"
            " out."
        )
    if heap_bytes is not None:
        remedy = "pass the bytes that one device can spare, or leave it out to allocate what programs need"
        heap_bytes = check.integer("init", "heap_bytes", heap_bytes, most=_MOST_BYTES, remedy=remedy)
    check.number("init", "timeout_s", timeout_s, remedy="pass seconds")
    if not 0 < timeout_s <= _MOST_TIMEOUT_S:
        raise ValueError(
            f"init: timeout_s={shown(timeout_s)}, expected more than 0 and at most {_MOST_TIMEOUT_S:g} seconds; the"
            f" default is {_TIMEOUT_S:g}."
        )
    num_ranks = math.prod(mesh.shape[name] for name in axes)
    return Context(mesh, axis_name, transport, num_ranks, heap_bytes, timeout_s)


def _describe(context: Context) -> str:
    """Describe everything that must agree between processes."""
    ids = [device.id for device in context.mesh.devices.flat]
    order = "in order" if ids == sorted(ids) else f"in the order {ids}"
    names = ("axis_name", "transport", "heap_bytes", "timeout_s", "launcher")
    parts = (
        f"mesh {dict(context.mesh.shape)} of devices {order}",
        *(f"{name}={getattr(context, name)!r}" for name in names),
        f"num_processes={rendezvous.configured_processes()} of jax.distributed.initialize",
        *(f"{name} {sys.modules[name].__version__}" for name in ("jax_ep", "jax", "jaxlib")),
        f"jax_enable_x64={jax.config.read('jax_enable_x64')}",
    )
    return "; ".join(parts)


def compare(function: str, sizes: object, wire_dtype: object, arrays: object) -> None:
    """Compare a traced all-to-all of arrays with those of the other processes, if it is on the mesh of the context.

    Raises:
      jax.errors.JaxRuntimeError: another process has traced a different one.
    """
    with _lock:
        if _comparison is None or _current is None:
            return
        if jax.sharding.get_abstract_mesh().shape_tuple == _current.mesh.shape_tuple:
            found = ", ".join(f"{array.dtype}{list(array.shape)}" for array in jax.tree.leaves(arrays))
            _comparison.compare(function, f"{sizes}, {wire_dtype=!s}, arrays {found}")


def _check_launcher(launcher: str | None) -> str:
    if launcher is None:
        return _LAUNCHERS[0]
    check.choice("init", "launcher", launcher, _LAUNCHERS, remedy="leave it None for the fastest")
    if launcher == "jax-triton":
        from jax_ep.core import jax_triton

        _outside_of_traces(jax_triton.check)
    return launcher


def _use_launcher(launcher: str) -> None:
    """Set the launcher; clear JAX's caches on a change, because traces of jitted functions contain the launches."""
    global _launcher
    if launcher != _launcher:
        jax.clear_caches()
    _launcher = launcher


def launcher() -> str:
    """Return how kernels are launched on GPUs, see `Context`."""
    return _launcher


def _resolve_mesh(mesh: jax.sharding.Mesh | None, axis_name: AxisName) -> jax.sharding.Mesh:
    if mesh is not None:
        check_mesh("init", mesh, jax.sharding.Mesh)
        return mesh
    current = mesh_in_use("init")
    if not current.empty:
        return current
    return _all_devices(axis_name)


def _axes(axis_name: AxisName) -> tuple[str, ...]:
    axes = axis_tuple(axis_name)
    if not axes:
        raise ValueError(
            "init: axis_name=() names no axis, expected at least one; pass the axis that carries the experts."
        )
    return axes


def _all_devices(axis_name: AxisName) -> jax.sharding.Mesh:
    axes = _axes(axis_name)
    return jax.make_mesh((jax.device_count(),) + (1,) * (len(axes) - 1), axes)


def transport() -> str | None:
    """Return the transport of the context, or None without a context."""
    return None if _current is None else _current.transport


def generation() -> int:
    """Return a number that changes with `init` and `finalize`; traces for one context may not fit the next."""
    return _generation


def given_mesh() -> jax.sharding.Mesh | None:
    """Return the mesh that the caller passed to `init`, or None."""
    return _current.mesh if _current is not None and _current.mesh_is_given else None


def unreachable_reason(axis: tuple[str, ...]) -> str | None:
    """Return why ranks on these axes of the surrounding mesh cannot all write to each other's memory, or None."""
    if _current is None:
        return None
    mesh, here, of_processes = _current.mesh, jax.sharding.get_abstract_mesh(), _current.transport != "nvshmem"
    if len(peer_access.domains(mesh.devices.flat, of_processes=of_processes)) == 1:
        return None
    if here.shape_tuple != mesh.shape_tuple:
        return (
            f"the mesh here, {dict(here.shape)}, is not the mesh of init, {dict(mesh.shape)}, and only for that one it"
            " is known which devices can access each other's memory"
        )
    return peer_access.unreachable_reason(mesh, axis, of_processes=of_processes)


def missing_init_reason() -> str | None:
    """Return what a program of several processes must do before its kernels can run, or None."""
    if _current is not None or jax.process_count() == 1:
        return None
    return "several processes: call jax_ep.init() in each of them first"


def heap(function: str) -> SymmetricHeap:
    """Return the symmetric heap, created on first use; for implementations, at trace time.

    Raises:
      RuntimeError: there are several processes and no context.
      jax.errors.JaxRuntimeError: a kernel has failed; the message says how.
    """
    global _current, _heap, _is_implicit
    with _lock:
        if _current is None and jax.process_count() > 1:
            raise RuntimeError(f"{function}: {missing_init_reason()}.")
        if _current is None:
            # Programs find the devices of their ep_group themselves, so any mesh works here.
            _current = _outside_of_traces(lambda: _check(_all_devices("expert"), "expert", None, None, _TIMEOUT_S))
            _is_implicit = True
        context = _current
        if _heap is None:
            _heap = _outside_of_traces(lambda: _make_heap(context))
        if (message := _heap.failure()) is not None:
            raise jax.errors.JaxRuntimeError(
                f"{function}: {message} The context is unusable after a failure: call finalize(), then init()."
            )
        return _heap


def reserve(function: str, data_bytes: int, buffer_bytes: int = 0) -> SymmetricHeap:
    """Ensure that the data area and each low-latency buffer of the newest generations are at least this large.

    Programs may be running and other threads may be tracing; their reserved memory is not affected.

    Raises:
      ValueError: `heap_bytes` of `init` is too small.
      RuntimeError: memory is insufficient. Also see `heap`.
    """
    with _lock:  # Only one thread may allocate at a time.
        the_heap = heap(function)
        _outside_of_traces(lambda: the_heap.reserve(function, data_bytes, buffer_bytes))
        _thread.heap = the_heap
        return the_heap


def reserved_heap(function: str) -> SymmetricHeap:
    """Return the heap in which this thread has just reserved memory.

    Raises:
      RuntimeError: another thread has finalized its context since. Also see `heap`.
    """
    the_heap = heap(function)
    if the_heap is not getattr(_thread, "heap", None):
        raise RuntimeError(
            f"{function}: the context was finalized by another thread while this one traced a program; trace it again."
        )
    return the_heap


def heap_bytes() -> int:
    """Return the bytes of symmetric memory that the context has allocated on each device."""
    with _lock:
        return 0 if _heap is None else _heap.num_bytes


def records(identity: int, kernel: str) -> bool:
    """Return whether a kernel that is traced now records a trace; if so, register its name."""
    is_recording = bool(_records.value)
    if is_recording:
        _recording_kernels[identity] = kernel
    return is_recording


@contextlib.contextmanager
def record(header: np.ndarray, num_words: int) -> Iterator[Recorded]:
    """Give the kernels of each device of this process int64 words to record in, starting with `header`.

    Calls of this thread inside the block are compiled again with recording kernels.

    Raises:
      ValueError: the transport has no kernels.
      RuntimeError: a recording is active, memory is insufficient, or the context ends in the block. Also see `heap`.
    """
    if (_current.transport if _current is not None else transports.best()) == "xla":
        raise ValueError(
            "record: transport 'xla' has no kernels to record, expected 'peer', 'nvshmem' or 'shared_memory'; on GPUs"
            " call jax_ep.init() without a transport, on CPU devices jax_ep.init(mesh, transport='shared_memory')."
        )
    with _lock:  # Other threads begin recordings or allocate memory.
        the_heap = heap("record")
        _outside_of_traces(lambda: the_heap.begin_traces(header, num_words))
    recorded = Recorded({}, _recording_kernels, the_heap.device_ids)
    try:
        with _records(True):
            yield recorded
    finally:
        with _lock:
            recorded.words.update(_outside_of_traces(the_heap.end_traces))


class Recorded(NamedTuple):
    """Recorded traces of kernels."""

    words: dict[int, np.ndarray]  # recorded words by device number
    kernels: dict[int, str]  # kernel names by `Heap.LAUNCH`
    device_ids: list[int]  # JAX's device ids by device number


def tuning() -> settings_file.Tuning:
    """Return the tuned settings in use, read on first use; at trace time."""
    chosen: settings_file.Tuning | None = _tuning.value
    return settings_file.read_chosen(jax.local_devices()[0].device_kind) if chosen is None else chosen


def set_tuning(chosen: settings_file.Tuning | None) -> None:
    """Set the tuned settings for all programs traced from now on; None uses those that the environment names."""
    _tuning.set_global(chosen)


def overrides() -> tuple[tuple[str, str, Setting], ...]:
    """Return (operation, setting, value) overrides of tuned settings; later entries take precedence."""
    found: tuple[tuple[str, str, Setting], ...] = _overrides.value
    return found


def overriding(more: tuple[tuple[str, str, Setting], ...]) -> AbstractContextManager[None]:
    """Return a context manager that appends `more` to the overrides of this thread."""
    inner: AbstractContextManager[None] = _overrides((*overrides(), *more))
    return inner


def _outside_of_traces[Result](make: Callable[[], Result]) -> Result:
    """Run `make` in a separate thread: JAX's traces belong to the thread that traces."""
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(make).result()


def _make_heap(context: Context) -> SymmetricHeap:
    from jax_ep.heap.memory import PeerMemory
    from jax_ep.heap.symmetric import SymmetricHeap  # Loads the FFI library.

    memory: Memory
    if context.transport == "shared_memory":
        from jax_ep.interpreter import SharedMemory

        memory = SharedMemory(context.timeout_s)
    elif context.transport == "peer":
        memory = PeerMemory()
    elif context.transport == "nvshmem":
        memory = nvshmem.NvshmemMemory(context.timeout_s * _TIMEOUTS_BETWEEN_PROCESSES, _describe(context))
    else:
        raise ValueError(
            f"transport {context.transport!r} has no symmetric heap; call finalize() and init(transport='peer')."
        )
    return SymmetricHeap(memory, context.heap_bytes, context.timeout_s, _sizes)


def finalize() -> None:
    """Wait for the devices, and release the context and everything it owns. Does nothing without a context.

    With transport "nvshmem" all processes must call it. It runs at exit if a program does not call it.

    Logs a failure that a kernel recorded, because no later launch may have raised it.

    Returns:
      None. Programs compiled before fail until a later `init`, which may use any shapes and axes, and then work again.

    Raises:
      jax.errors.JaxRuntimeError: another process is late; this process can then create no other context with transport
        "nvshmem".

    Example:
      >>> import jax_ep
      >>> jax_ep.finalize()
    """
    global _current, _heap, _is_implicit, _sizes, _comparison, _generation
    with _lock:
        the_heap = _heap
        _current, _heap, _is_implicit, _comparison = None, None, False, None
        _generation += 1
        _use_launcher(_LAUNCHERS[0])
        if the_heap is None:
            return
        try:
            message = the_heap.close()
        finally:
            _sizes = the_heap.sizes
        # If the last launch of a program failed, no check has raised it.
        if message is not None:
            _log.error("finalize: a launch has failed, and later results are wrong. %s", message)


def _forget_in_child() -> None:
    """Leave a forked child without a context: the devices, which `finalize` waits for, run in the parent only."""
    global _lock, _current, _heap, _is_implicit, _comparison
    _lock = threading.RLock()  # A thread that does not exist in the child may hold the old one.
    _current, _heap, _is_implicit, _comparison = None, None, False, None


os.register_at_fork(after_in_child=_forget_in_child)


def _finalize_at_exit() -> None:
    """Finalize a context left open at exit, unless an exception ended the program: its peers may be waiting."""
    if getattr(sys, "last_exc", None) is not None:
        return
    try:
        finalize()
    except Exception as error:  # The exit must not fail.
        _log.warning("at exit: %s", error)
