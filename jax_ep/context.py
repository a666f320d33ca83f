"""The process-level context: which mesh axis carries the experts, and what moves tokens over it.

It owns what outlives a program: the transport, the symmetric heap and its status records. Where one process drives
every device it comes into being by itself, with the defaults, when a program is traced that needs it. Where there are
several, they make it together, so each must call `init`.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import dataclasses
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from jax_ep.core.mesh_axes import axis_tuple, check_mesh
from jax_ep.heap import check, nvshmem, peer_access, rendezvous, transports
from jax_ep.settings import file as settings_file
from jax_ep.types import AxisName

if TYPE_CHECKING:
    from jax_ep.heap.memory import Memory
    from jax_ep.heap.symmetric import SymmetricHeap
    from jax_ep.settings.operations import Setting

_log = logging.getLogger("jax_ep")
_TIMEOUT_S = 30.0
# Programs of several processes reach a step that they take together less evenly than kernels reach each other: one
# loads a checkpoint, another compiles.
_TIMEOUTS_BETWEEN_PROCESSES = 10
_LAUNCHERS = ("ffi", "jax-triton")


@dataclasses.dataclass(frozen=True)
class Context:
    """What `init` settled.

    Attributes:
      mesh: the devices.
      axis_name: expert axis, or axes.
      transport: what moves tokens: "xla" (collectives of XLA), "peer" (kernels that write to peers' memory, among the
        GPUs of a process), "nvshmem" (the same kernels, several processes with one GPU each) or "shared_memory" (the
        same kernels on the CPU devices of a process, in Triton's interpreter, for tests).
      num_ranks: ranks on the expert axis.
      heap_bytes: bytes of symmetric memory per device, or None to grow as needed.
      timeout_s: how long a kernel waits for a peer before it gives up.
      mesh_is_given: whether the caller named the mesh; programs may then rely on it.
      launcher: what launches kernels: "ffi" (the package's own custom call) or "jax-triton".
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
_thread = threading.local()  # `.heap`: in which this thread has reserved what it is about to launch
_current: Context | None = None
_is_implicit = False
_generation = 0  # of contexts that `init` and `finalize` began
_heap: SymmetricHeap | None = None
_comparison: rendezvous.Comparison | None = None  # of several processes, from init to finalize
_launcher = _LAUNCHERS[0]  # for which JAX's caches hold traces
_sizes: dict[int, int] | None = None  # of all heaps so far, see SymmetricHeap.sizes; None: there has been none
_records = jax.make_user_context(False)  # whether kernels of what is traced now record; part of the key of `jax.jit`
_recording_kernels: dict[int, str] = {}  # their names, by `Heap.LAUNCH`

# Both are part of what `jit` compiles for, so that a change makes it trace again; the second is of a thread.
_tuning = jax.make_user_context(None)  # what the user chose; None: what the environment says
_overrides = jax.make_user_context(())


def init(
    mesh: jax.sharding.Mesh | None = None,
    *,
    axis_name: AxisName = "expert",
    transport: str | None = None,
    heap_bytes: int | None = None,
    timeout_s: float = _TIMEOUT_S,
    launcher: str | None = None,
) -> Context:
    """Sets the process-level context up; calling it again with the same arguments returns the same context.

    It replaces a context that came into being by itself. Programs compiled for an earlier context run on in the new
    one: it allocates at once what they need, unless `heap_bytes` is less; they then end in an error that says so.

    Where there are several processes, all must call it, with the same arguments, after `jax.distributed.initialize`;
    each waits up to ten times `timeout_s` for the others, and an error names those that are missing or differ in
    arguments or versions. They must then trace the same programs on that mesh in the same order: an exchange of other
    sizes than another process has traced ends in an error. With transport "nvshmem" they also share symmetric memory:
    where a program needs more, all allocate it together, and wait for each other likewise.

    Args:
      mesh: the devices; None: the mesh of `jax.set_mesh`, or else all devices on one axis `axis_name`. A mesh that is
        given saves an exchange per dispatch; programs on other devices with the same axes then end in an error.
      axis_name: mesh axis, or tuple of axes, over which experts are spread.
      transport: "xla", "peer", "nvshmem" or "shared_memory", see `Context`; None for the best one here.
      heap_bytes: bytes of symmetric memory per device, allocated once, here; a program that needs more is refused.
        None: it grows while programs are traced. What there is stays where it is until `finalize`, so growing stops
        nothing; in all it has at most 4.5 times the bytes that the largest program needs, and at least 16 MiB.
      timeout_s: seconds that a kernel waits for a peer; then the call ends in an error that names it.
      launcher: what launches the Triton kernels on GPUs: "ffi", the package's own custom call, or "jax-triton", which
        takes the host longer per launch (docs/design/launches.md). None: "ffi". Another one than before drops what JAX
        has traced and compiled, so that all programs use it. It changes nothing on CPU devices.

    Returns:
      The context.

    Raises:
      ValueError: an axis that the mesh lacks, an unknown launcher or transport, one that does not fit the platform or
        the number of processes, `heap_bytes` for a transport without a heap, numbers out of range, a second `init` with
        other arguments before `finalize`, or XLA_FLAGS under which kernels cannot meet.
      TypeError: a mesh, `heap_bytes` or `timeout_s` of another type.
      ImportError: launcher "jax-triton" without that package.
      RuntimeError: there is not as much memory as `heap_bytes`, or as programs compiled earlier need; or jax-triton
        does not work with this JAX.
      jax.errors.JaxRuntimeError: another process has not come in time, has other arguments or versions, or has failed;
        the message says which.

    Example:
      >>> import jax, jax_ep
      >>> context = jax_ep.init(jax.make_mesh((jax.device_count(),), ("expert",)))
      >>> context.num_ranks == jax.device_count()
      True
      >>> jax_ep.finalize()
    """
    global _current, _heap, _comparison, _generation
    wanted = _checked(_resolve_mesh(mesh, axis_name), axis_name, transport, heap_bytes, timeout_s)
    wanted = dataclasses.replace(wanted, mesh_is_given=mesh is not None, launcher=_checked_launcher(launcher))
    with _lock:
        if _is_implicit:
            finalize()  # made by a program that needed one; what the user says now counts
        if _current is not None and _current != wanted:
            raise ValueError(
                f"init: already initialised with {_current}, now asked for {wanted}; call finalize() first."
            )
        if _current is None:
            together = wanted.transport == "nvshmem"  # all processes are here, now
            if jax.process_count() > 1 and not together:
                meetings = rendezvous.Meetings(wanted.timeout_s * _TIMEOUTS_BETWEEN_PROCESSES)
                meetings.meet("init", "setting the context up", same=_in_words(wanted))
            # Kernels that use no heap run in the workers that come with one, too.
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


def _checked(
    mesh: jax.sharding.Mesh, axis_name: AxisName, transport: str | None, heap_bytes: int | None, timeout_s: float
) -> Context:
    """The context for these arguments, which must make sense together."""
    missing = [name for name in axis_tuple(axis_name) if name not in mesh.shape]
    if missing:
        raise ValueError(
            f"init: the mesh has axes {tuple(mesh.shape)}, but axis_name={axis_name!r} needs {missing}; pass the axis"
            " that carries the experts."
        )
    transport = transports.resolve(transport)
    if heap_bytes is not None and transport == "xla":
        raise ValueError(f"init: heap_bytes={heap_bytes}, but transport 'xla' owns no memory; leave heap_bytes out.")
    check.heap_bytes(heap_bytes)
    check.timeout_s(timeout_s, default=_TIMEOUT_S)
    num_ranks = 1
    for name in axis_tuple(axis_name):
        num_ranks *= mesh.shape[name]
    return Context(mesh, axis_name, transport, num_ranks, heap_bytes, timeout_s)


def _in_words(context: Context) -> str:
    """All that processes must have in common."""
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


def compare(function: str, sizes: str) -> None:
    """Compares an exchange that is traced with those of the other processes, if it is on the mesh of the context.

    Raises:
      jax.errors.JaxRuntimeError: another process has traced another one.
    """
    with _lock:
        if _comparison is None or _current is None:
            return
        if jax.sharding.get_abstract_mesh().shape_tuple == _current.mesh.shape_tuple:
            _comparison.compare(function, sizes)


def _checked_launcher(launcher: str | None) -> str:
    if launcher is None:
        return _LAUNCHERS[0]
    if launcher not in _LAUNCHERS:
        raise ValueError(
            f"init: launcher={launcher!r} is unknown; choose from {_LAUNCHERS}, or leave it None for the fastest."
        )
    if launcher == "jax-triton":
        from jax_ep.core import jax_triton

        _outside_of_traces(jax_triton.check)
    return launcher


def _use_launcher(launcher: str) -> None:
    """Functions of the package are jitted, and their traces hold the launches: they are dropped with all others."""
    global _launcher
    if launcher != _launcher:
        jax.clear_caches()
    _launcher = launcher


def launcher() -> str:
    """What launches kernels on GPUs, see `Context`."""
    return _launcher


def _resolve_mesh(mesh: jax.sharding.Mesh | None, axis_name: AxisName) -> jax.sharding.Mesh:
    if mesh is not None:
        check_mesh("init", mesh, jax.sharding.Mesh)
        return mesh
    current = jax.sharding.get_mesh()
    if not current.empty:
        return current
    return _all_devices(axis_name)


def _all_devices(axis_name: AxisName) -> jax.sharding.Mesh:
    axes = axis_tuple(axis_name)
    if not axes:
        raise ValueError(
            "init: axis_name=() names no axis, expected at least one; pass the axis that carries the experts."
        )
    return jax.make_mesh((jax.device_count(),) + (1,) * (len(axes) - 1), axes)


def transport() -> str | None:
    """The transport of the context, or None where there is no context yet."""
    return None if _current is None else _current.transport


def generation() -> int:
    """A number that changes with `init` and `finalize`: what is traced for one context may not suit the next."""
    return _generation


def given_mesh() -> jax.sharding.Mesh | None:
    """The mesh that the caller gave to `init`, or None."""
    return _current.mesh if _current is not None and _current.mesh_is_given else None


def unordered_launches_reason() -> str | None:
    """Why XLA's flags forbid kernels that meet their peers, or None."""
    return check.unordered_launches_reason()


def apart(axis: tuple[str, ...]) -> str | None:
    """Why ranks on these axes of the mesh around this call cannot all write to each other's memory, or None."""
    if _current is None:
        return None
    mesh, here, of_processes = _current.mesh, jax.sharding.get_abstract_mesh(), _current.transport != "nvshmem"
    if len(peer_access.domains(mesh.devices.flat, of_processes=of_processes)) == 1:
        return None
    if here.shape_tuple != mesh.shape_tuple:
        return (
            f"the mesh here, {dict(here.shape)}, is not that of init, {dict(mesh.shape)}, of which it is known which"
            " devices reach each other's memory"
        )
    return peer_access.unreachable_reason(mesh, axis, of_processes=of_processes)


def missing_init() -> str | None:
    """What a program of several processes must do before its kernels can run, or None."""
    if _current is not None or jax.process_count() == 1:
        return None
    return "several processes: call jax_ep.init() in each of them first"


def heap(function: str) -> SymmetricHeap:
    """The symmetric heap, made on first use; for implementations, at trace time.

    Raises:
      RuntimeError: there are several processes, and no context.
      jax.errors.JaxRuntimeError: a kernel has given up on a peer; the message tells of it.
    """
    global _current, _heap, _is_implicit
    with _lock:
        if _current is None and jax.process_count() > 1:
            raise RuntimeError(f"{function}: {missing_init()}.")
        if _current is None:
            # Programs find the devices of a group by themselves: which mesh stands here does not matter.
            _current = _outside_of_traces(lambda: _checked(_all_devices("expert"), "expert", None, None, _TIMEOUT_S))
            _is_implicit = True
        context = _current
        if _heap is None:
            _heap = _outside_of_traces(lambda: _make_heap(context))
        if (message := _heap.failure()) is not None:
            raise jax.errors.JaxRuntimeError(
                f"{function}: {message} The context refuses work after a failure: call finalize(), then init()."
            )
        return _heap


def reserve(function: str, data_bytes: int, buffer_bytes: int = 0) -> SymmetricHeap:
    """Makes the data area of the newest heap, and each of the newest low-latency buffers, at least this large.

    Programs may be running meanwhile, and other threads may be tracing: what they have reserved stays theirs.

    Raises:
      ValueError: `heap_bytes` of `init` is too small for that.
      RuntimeError: there is not so much memory; and what `heap` raises.
    """
    with _lock:  # two threads that trace must not allocate at a time
        the_heap = heap(function)
        _outside_of_traces(lambda: the_heap.reserve(function, data_bytes, buffer_bytes))
        _thread.heap = the_heap
        return the_heap


def reserved_heap(function: str) -> SymmetricHeap:
    """The heap in which this thread has just reserved memory.

    Raises:
      RuntimeError: another thread has ended its context since; and what `heap` raises.
    """
    the_heap = heap(function)
    if the_heap is not getattr(_thread, "heap", None):
        raise RuntimeError(
            f"{function}: the context was finalized by another thread while this one traced a program; trace it again."
        )
    return the_heap


def records(identity: int, kernel: str) -> bool:
    """Whether a kernel that is traced now records what it does; if so, remembers its name."""
    is_recording = bool(_records.value)
    if is_recording:
        _recording_kernels[identity] = kernel
    return is_recording


@contextlib.contextmanager
def record(header: np.ndarray, num_words: int) -> Iterator[Recorded]:
    """Gives the kernels of each device of this process int64 words to record in, which begin with `header`.

    What this thread calls in the block is compiled anew, with kernels that record.

    Raises:
      ValueError: the transport has no kernels.
      RuntimeError: there is a recording already, or not so much memory, or the context ends in the block; and what
        `heap` raises.
    """
    if (_current.transport if _current is not None else transports.best()) == "xla":
        raise ValueError(
            "record: transport 'xla' has no kernels to record, expected 'peer', 'nvshmem' or 'shared_memory'; on GPUs"
            " call jax_ep.init() without a transport, on CPU devices jax_ep.init(mesh, transport='shared_memory')."
        )
    the_heap = heap("record")
    _outside_of_traces(lambda: the_heap.begin_traces(header, num_words))
    recorded = Recorded({}, _recording_kernels, the_heap.device_ids)
    try:
        with _records(True):
            yield recorded
    finally:
        recorded.words.update(_outside_of_traces(the_heap.end_traces))


class Recorded(NamedTuple):
    """What kernels have recorded.

    Attributes:
      words: by the number of the device.
      kernels: names by `Heap.LAUNCH`.
      device_ids: JAX's, by the number of the device.
    """

    words: dict[int, np.ndarray]
    kernels: dict[int, str]
    device_ids: list[int]


def tuning() -> settings_file.Tuning:
    """The tuned settings in use, read when first asked for; at trace time."""
    chosen: settings_file.Tuning | None = _tuning.value
    return settings_file.read_chosen(jax.local_devices()[0].device_kind) if chosen is None else chosen


def set_tuning(chosen: settings_file.Tuning | None) -> None:
    """Settings for all programs that are traced from now on; None: those that the environment names."""
    _tuning.set_global(chosen)


def overrides() -> tuple[tuple[str, str, Setting], ...]:
    """(operation, setting, value) that count instead of tuned ones; later ones instead of earlier ones."""
    found: tuple[tuple[str, str, Setting], ...] = _overrides.value
    return found


def overriding(more: tuple[tuple[str, str, Setting], ...]) -> AbstractContextManager[None]:
    """Within it `more` is behind what there is, for this thread."""
    inner: AbstractContextManager[None] = _overrides((*overrides(), *more))
    return inner


def _outside_of_traces[Result](make: Callable[[], Result]) -> Result:
    """Runs `make` in a thread of its own: JAX's traces belong to the thread that traces."""
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(make).result()


def _make_heap(context: Context) -> SymmetricHeap:
    from jax_ep.heap.memory import PeerMemory
    from jax_ep.heap.symmetric import SymmetricHeap  # loads the FFI library

    memory: Memory
    if context.transport == "shared_memory":
        from jax_ep.interpreter import SharedMemory

        memory = SharedMemory(context.timeout_s)
    elif context.transport == "peer":
        memory = PeerMemory()
    elif context.transport == "nvshmem":
        memory = nvshmem.NvshmemMemory(context.timeout_s * _TIMEOUTS_BETWEEN_PROCESSES, _in_words(context))
    else:
        raise ValueError(
            f"transport {context.transport!r} has no symmetric heap; call finalize() and init(transport='peer')."
        )
    return SymmetricHeap(memory, context.heap_bytes, context.timeout_s, _sizes)


def finalize() -> None:
    """Waits for the devices and releases the context with all it owns; calling it without one does nothing.

    With transport "nvshmem" all processes must call it; a program that ends without does so at its exit.

    Where a kernel has given up on a peer, it says so in the log: a check before a later launch would have raised, but
    there may have been none.

    Returns:
      None. Programs compiled before fail until a later `init`, and then run on; that may have any shapes and axes.

    Raises:
      jax.errors.JaxRuntimeError: another process has not come in time; this one can then make no other context with
        transport "nvshmem".

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
        # Where it was a program's last launch that failed, no check has told of it.
        if message is not None:
            _log.error("finalize: a launch has failed, and what programs computed since is wrong. %s", message)


def _finalize_at_exit() -> None:
    """Ends what a program has left open. One that ends by an exception leaves it: its peers wait elsewhere."""
    if getattr(sys, "last_exc", None) is not None:
        return
    try:
        finalize()
    except Exception as error:  # nothing may stand in the way of the exit
        _log.warning("at exit: %s", error)
