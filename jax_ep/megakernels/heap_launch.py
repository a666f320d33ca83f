"""Launches of kernels that use the symmetric heap, and the group of devices they talk to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import context, ffi
from jax_ep.collectives import Axis, all_gather, rank_on
from jax_ep.heap import MAX_BLOCKS, SymmetricHeap
from jax_ep.kernel import Config, Kernel
from jax_ep.megakernels.launch import launch
from jax_ep.mesh_axes import varying_axes
from jax_ep.types import Array, Handle


def group_on(axis: Axis, varying: frozenset[str]) -> Array:
    """`[W + 1]` int32: numbers of the devices on the axis, and this rank.

    The same in all calls of a program, so that XLA makes one exchange of it. Ranks that differ only in axes over which
    nothing of the call varies have different devices and the same results: it is typed by the results.
    """
    heap = context.heap("dispatch")
    # The table's last entry is this device's number; its low half comes first.
    number = lax.bitcast_convert_type(_table(heap, tuple(sorted(varying))), jnp.int32)[-1, 0]
    return jnp.concatenate([all_gather(number, axis), jnp.asarray(rank_on(axis), jnp.int32)[None]])


def _table(heap: SymmetricHeap, varying: tuple[str, ...]) -> Array:
    return ffi.pointer_table(heap.id, heap.num_table_entries, varying=varying)


def group_of(handle: Handle) -> Array:
    """`[W + 1]` int32 of a handle that this implementation made: see `group_on`."""
    if handle.group is None:
        raise ValueError("the handle was made by another implementation; use the one that made it.")
    return handle.group


def launch_on_heap(
    kernel: Kernel,
    operands: tuple[Array, ...],
    group: Array,
    result: jax.ShapeDtypeStruct,
    config: Config,
    constants: dict[str, int],
    after: Array | None = None,
) -> Array:
    """Launches a kernel on the heap; its last operands are the group, the table and a check of the status record."""
    heap = context.heap(kernel.function)
    table = _table(heap, tuple(sorted(varying_axes(group))))
    # The check is an operand, so that it runs, and before the kernel; and it waits for what must come earlier.
    checked = ffi.check_status(group if after is None else after, heap.id)
    places = {
        "D": heap.layout.num_devices,
        "DATA": heap.layout.data,
        "FLAGS": heap.layout.flags,
        "MAX_BLOCKS": MAX_BLOCKS,
    }
    return launch(kernel, (*operands, group, table, checked), (result,), config, {**places, **constants})[0]
