"""The process-level context: which mesh axis carries the experts, and what moves tokens over it.

The `xla` transport is XLA's own collectives: it owns no memory and needs no set-up, so calling `init` is optional
there, and worth it for its early errors.
"""

from __future__ import annotations

import dataclasses
import threading

import jax

from jax_ep.mesh_axes import axis_tuple
from jax_ep.types import AxisName

TRANSPORTS = ("xla",)


@dataclasses.dataclass(frozen=True)
class Context:
    """What `init` settled.

    Attributes:
      mesh: the devices.
      axis_name: expert axis, or axes.
      transport: what moves tokens: "xla".
      num_ranks: ranks on the expert axis.
    """

    mesh: jax.sharding.Mesh
    axis_name: AxisName
    transport: str
    num_ranks: int


_lock = threading.Lock()
_current: Context | None = None


def init(
    mesh: jax.sharding.Mesh | None = None,
    *,
    axis_name: AxisName = "expert",
    transport: str | None = None,
    heap_bytes: int | None = None,
) -> Context:
    """Sets the process-level context up; calling it again with the same arguments returns the same context.

    Args:
      mesh: the devices; None: the mesh of `jax.set_mesh`, or else all devices on one axis `axis_name`.
      axis_name: mesh axis, or tuple of axes, over which experts are spread.
      transport: "xla" (collectives of XLA), or None for the best one here.
      heap_bytes: bytes of symmetric memory per device, for transports that own some; "xla" owns none.

    Returns:
      The context.

    Raises:
      ValueError: an axis that the mesh lacks, an unknown transport, `heap_bytes` for a transport without a heap, or a
        second `init` with other arguments before `finalize`.

    Example:
      >>> import jax, jax_ep
      >>> context = jax_ep.init(jax.make_mesh((jax.device_count(),), ("expert",)))
      >>> context.num_ranks == jax.device_count()
      True
      >>> jax_ep.finalize()
    """
    global _current
    mesh = _resolve_mesh(mesh, axis_name)
    missing = [name for name in axis_tuple(axis_name) if name not in mesh.shape]
    if missing:
        raise ValueError(
            f"init: the mesh has axes {tuple(mesh.shape)}, but axis_name={axis_name!r} needs {missing}; pass the"
            " axis that"
            " carries the experts."
        )
    if transport is not None and transport not in TRANSPORTS:
        raise ValueError(
            f"init: transport={transport!r}, expected one of {TRANSPORTS}; leave it None for the best one."
        )
    if heap_bytes is not None:
        raise ValueError(f"init: heap_bytes={heap_bytes}, but transport 'xla' owns no memory; leave heap_bytes out.")
    num_ranks = 1
    for name in axis_tuple(axis_name):
        num_ranks *= mesh.shape[name]
    wanted = Context(mesh, axis_name, transport or TRANSPORTS[0], num_ranks)
    with _lock:
        if _current is not None and _current != wanted:
            raise ValueError(
                f"init: already initialised with {_current}, now asked for {wanted}; call finalize() first."
            )
        if _current is None:
            _current = wanted
        return _current


def _resolve_mesh(mesh: jax.sharding.Mesh | None, axis_name: AxisName) -> jax.sharding.Mesh:
    if mesh is not None:
        return mesh
    current = jax.sharding.get_mesh()
    if not current.empty:
        return current
    axes = axis_tuple(axis_name)
    return jax.make_mesh((jax.device_count(),) + (1,) * (len(axes) - 1), axes)


def finalize() -> None:
    """Releases the context; calling it without one does nothing.

    Returns:
      None; a later `init` of any shapes and axes starts afresh.

    Example:
      >>> import jax_ep
      >>> jax_ep.finalize()
    """
    global _current
    with _lock:
        _current = None
