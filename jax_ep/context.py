"""The process-level context: which mesh axis carries the experts, and what moves tokens over it.

It owns what outlives a program: the transport, the symmetric heap and its status records. Where one process drives
every device it comes into being by itself, with the defaults, when a program is traced that needs it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

from jax_ep.mesh_axes import axis_tuple
from jax_ep.types import AxisName

if TYPE_CHECKING:
    from jax_ep.heap import Memory, SymmetricHeap

_log = logging.getLogger("jax_ep")
_TIMEOUT_S = 30.0
TRANSPORTS = ("xla", "peer", "shared_memory")


@dataclasses.dataclass(frozen=True)
class Context:
    """What `init` settled.

    Attributes:
      mesh: the devices.
      axis_name: expert axis, or axes.
      transport: what moves tokens: "xla" (collectives of XLA), "peer" (kernels that write to peers' memory, one
        process) or "shared_memory" (the same kernels on CPU devices, in Triton's interpreter, for tests).
      num_ranks: ranks on the expert axis.
      heap_bytes: bytes of the symmetric heap per device, or None to grow as needed.
      timeout_s: how long a kernel waits for a peer before it gives up.
    """

    mesh: jax.sharding.Mesh
    axis_name: AxisName
    transport: str
    num_ranks: int
    heap_bytes: int | None = None
    timeout_s: float = _TIMEOUT_S


_lock = threading.RLock()
_current: Context | None = None
_is_implicit = False
_heap: SymmetricHeap | None = None


def init(
    mesh: jax.sharding.Mesh | None = None,
    *,
    axis_name: AxisName = "expert",
    transport: str | None = None,
    heap_bytes: int | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> Context:
    """Sets the process-level context up; calling it again with the same arguments returns the same context.

    It replaces a context that came into being by itself; programs compiled before it must then be compiled again.

    Args:
      mesh: the devices; None: the mesh of `jax.set_mesh`, or else all devices on one axis `axis_name`.
      axis_name: mesh axis, or tuple of axes, over which experts are spread.
      transport: "xla", "peer" or "shared_memory", see `Context`; None for the best one here.
      heap_bytes: bytes of symmetric memory per device; None: as much as the programs need.
      timeout_s: seconds that a kernel waits for a peer; then the call ends in an error that names it.

    Returns:
      The context.

    Raises:
      ValueError: an axis that the mesh lacks, an unknown transport, one that does not fit the platform, `heap_bytes`
        for a transport without a heap, or a second `init` with other arguments before `finalize`.

    Example:
      >>> import jax, jax_ep
      >>> context = jax_ep.init(jax.make_mesh((jax.device_count(),), ("expert",)))
      >>> context.num_ranks == jax.device_count()
      True
      >>> jax_ep.finalize()
    """
    global _current
    wanted = _checked(_resolve_mesh(mesh, axis_name), axis_name, transport, heap_bytes, timeout_s)
    with _lock:
        if _is_implicit:
            finalize()  # made by a program that needed one; what the user says now counts
        if _current is not None and _current != wanted:
            raise ValueError(
                f"init: already initialised with {_current}, now asked for {wanted}; call finalize() first."
            )
        if _current is None:
            _current = wanted
            _log.info("transport %s: %s", wanted.transport, _REASONS[wanted.transport])
        return _current


_REASONS = {
    "xla": "collectives of XLA, for devices whose memory kernels of a peer cannot write",
    "peer": "one process drives every GPU, and XLA enables peer access between them",
    "shared_memory": "asked for: kernels run in Triton's interpreter, one process per CPU device",
}


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
    best = "peer" if jax.default_backend() == "gpu" and jax.process_count() == 1 else "xla"
    if transport is not None and transport not in TRANSPORTS:
        raise ValueError(
            f"init: transport={transport!r}, expected one of {TRANSPORTS}; leave it None for the best one."
        )
    transport = best if transport is None else transport
    platform = {"peer": "gpu", "shared_memory": "cpu"}.get(transport, jax.default_backend())
    if platform != jax.default_backend():
        raise ValueError(
            f"init: transport={transport!r} needs {platform} devices, but this process has {jax.default_backend()};"
            " leave it None for the best one here."
        )
    if heap_bytes is not None and transport == "xla":
        raise ValueError(f"init: heap_bytes={heap_bytes}, but transport 'xla' owns no memory; leave heap_bytes out.")
    if not timeout_s > 0:
        raise ValueError(f"init: timeout_s={timeout_s}, expected a positive number of seconds; the default is 30.")
    num_ranks = 1
    for name in axis_tuple(axis_name):
        num_ranks *= mesh.shape[name]
    return Context(mesh, axis_name, transport, num_ranks, heap_bytes, timeout_s)


def _resolve_mesh(mesh: jax.sharding.Mesh | None, axis_name: AxisName) -> jax.sharding.Mesh:
    if mesh is not None:
        return mesh
    current = jax.sharding.get_mesh()
    if not current.empty:
        return current
    return _all_devices(axis_name)


def _all_devices(axis_name: AxisName) -> jax.sharding.Mesh:
    axes = axis_tuple(axis_name)
    return jax.make_mesh((jax.device_count(),) + (1,) * (len(axes) - 1), axes)


def transport() -> str | None:
    """The transport of the context, or None where there is no context yet."""
    return None if _current is None else _current.transport


def heap(function: str) -> SymmetricHeap:
    """The symmetric heap, made on first use; for implementations, at trace time.

    Raises:
      jax.errors.JaxRuntimeError: a kernel has given up on a peer; the message tells of it.
    """
    global _current, _heap, _is_implicit
    with _lock:
        if _current is None:
            # Programs find the devices of a group by themselves: which mesh stands here does not matter.
            _current = _outside_of_traces(lambda: _checked(_all_devices("expert"), "expert", None, None, _TIMEOUT_S))
            _is_implicit = True
        context = _current
        if _heap is None:
            _heap = _outside_of_traces(lambda: _make_heap(context))
        if (story := _heap.failure()) is not None:
            raise jax.errors.JaxRuntimeError(
                f"{function}: {story} The context refuses work after a failure: call finalize(), then init()."
            )
        return _heap


def reserve(function: str, data_bytes: int) -> None:
    """Makes the data area of the heap at least this large."""
    the_heap = heap(function)
    _outside_of_traces(lambda: the_heap.reserve(function, data_bytes))


def _outside_of_traces[Result](make: Callable[[], Result]) -> Result:
    """Runs `make` in a thread of its own: JAX's traces belong to the thread that traces."""
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(make).result()


def _make_heap(context: Context) -> SymmetricHeap:
    from jax_ep import heap as heaps  # loads the FFI library

    memory: Memory
    if context.transport == "shared_memory":
        from jax_ep.interpreter import SharedMemory

        memory = SharedMemory()
    elif context.transport == "peer":
        memory = heaps.PeerMemory()
    else:
        raise ValueError(
            f"transport {context.transport!r} has no symmetric heap; call finalize() and init(transport='peer')."
        )
    return heaps.SymmetricHeap(memory, context.heap_bytes, context.timeout_s)


def finalize() -> None:
    """Waits for the devices and releases the context with all it owns; calling it without one does nothing.

    Returns:
      None; a later `init` of any shapes and axes starts afresh. Programs compiled before it must be compiled again.

    Example:
      >>> import jax_ep
      >>> jax_ep.finalize()
    """
    global _current, _heap, _is_implicit
    with _lock:
        if _heap is not None:
            _heap.close()
        _current, _heap, _is_implicit = None, None, False
