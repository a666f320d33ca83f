"""Launches of kernels that use the symmetric heap, and the group of devices they talk to."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import context, ffi
from jax_ep.collectives import Axis, all_gather, rank_on
from jax_ep.heap import MAX_BLOCKS, HeapLayout, SymmetricHeap
from jax_ep.kernel import Config, Descriptor, Kernel, flat_arrays
from jax_ep.megakernels.kernels.structs import Heap, Peers
from jax_ep.megakernels.launch import launch
from jax_ep.mesh_axes import varying_axes
from jax_ep.types import Array, Handle


def group_on(axis: Axis, varying: frozenset[str]) -> Array:
    """`[W + 1]` int32: numbers of the devices on the axis, and this rank.

    The same in all calls of a program, so that XLA makes one exchange of it. Ranks that differ only in axes over which
    nothing of the call varies have different devices and the same results: it is typed by the results.
    """
    heap = context.heap("dispatch")
    known = _known_group(heap, axis, varying)
    if known is not None:
        return known
    context.reserve("dispatch", 0)  # any table will do
    # The low half of a 64-bit entry comes first.
    entry = heap.layout.num_devices + 2
    number = lax.bitcast_convert_type(_table(heap, heap.data.id, varying), jnp.int32)[entry, 0]
    return jnp.concatenate([all_gather(number, axis), jnp.asarray(rank_on(axis), jnp.int32)[None]])


def _known_group(heap: SymmetricHeap, axis: Axis, varying: frozenset[str]) -> Array | None:
    """The same without an exchange, where the mesh given to `init` has the axes of the one around this call.

    They may still be different meshes, and a compiled program may run on other devices than it was traced for: every
    kernel compares its device with the group's (kernels/protocol.py). None where only an exchange can tell.
    """
    mesh, here = context.given_mesh(), jax.sharding.get_abstract_mesh()
    if mesh is None or not axis or (here.axis_names, here.axis_sizes) != (mesh.axis_names, mesh.axis_sizes):
        return None
    others = tuple(name for name in mesh.axis_names if name not in axis and mesh.shape[name] > 1)
    numbers = heap.numbers(mesh)
    if numbers is None or not set(others) <= set(here.manual_axes):
        return None
    order = [mesh.axis_names.index(name) for name in mesh.axis_names if name not in axis]
    order += [mesh.axis_names.index(name) for name in axis]
    groups = jnp.asarray(numbers.transpose(order).reshape(-1, math.prod(mesh.shape[name] for name in axis)))
    members = lax.dynamic_index_in_dim(groups, rank_on(others), keepdims=False)
    group = jnp.concatenate([members, jnp.asarray(rank_on(axis), jnp.int32)[None]])
    if not varying_axes(group) <= varying | set(axis):
        return None  # different groups, but results that are typed as the same
    missing = tuple(sorted(varying - varying_axes(group)))
    return lax.pcast(group, missing, to="varying") if missing else group


def _table(
    heap: SymmetricHeap, table_id: int, varying: frozenset[str], token: Array | None = None, num_bytes: int = 0
) -> Array:
    axes, num_entries = tuple(sorted(varying)), heap.num_table_entries
    return ffi.pointer_table(table_id, num_entries, num_bytes=num_bytes, varying=axes, token=token)


def group_of(handle: Handle) -> Array:
    """`[W + 1]` int32 of a handle that this implementation made: see `group_on`."""
    if handle.group is None:
        raise ValueError("the handle was made by another implementation; use the one that made it.")
    return handle.group


def launch_on_heap(
    kernel: Kernel,
    operands: tuple[Array | Descriptor, ...],
    group: Array,
    results: tuple[Any, ...],
    config: Config,
    constants: dict[str, Any],
    after: Array | None = None,
    *,
    uses_data: bool = True,
) -> tuple[Array, ...]:
    """Launches a kernel on the heap; which gets the group, the table and what must come earlier, if any.

    The kernel's parameter behind its own operands is a `Peers`, and HEAP a `Heap`. It uses the data area or the
    low-latency regions, never both. For what it uses there has been a `context.reserve`. `constants` has the
    `OPERATION`, one of `ffi.Operation`.
    """
    heap = context.reserved_heap(kernel.function)
    generation = heap.data if uses_data else heap.regions
    # Equal calls with an operand are one to XLA. So the launches of a program share one check of the status record,
    # which runs since the table needs it, and one table: CUDA graphs can hold the launches, and no check is between.
    checked = ffi.check_status(group, generation.id)
    table = _table(heap, generation.id, varying_axes(group), checked, generation.reserved)
    identity = launch_identity(kernel, (*operands, group, *results), constants)
    sizes = {name: value for name, value in constants.items() if name != "OPERATION"}
    sizes["HEAP"] = heap_of(heap.layout, group.shape[0] - 1, identity)
    peers = Peers(group, table, table if after is None else after)
    return launch(kernel, (*operands, peers), results, config, sizes)


def heap_of(layout: HeapLayout, num_ranks: int, identity: int) -> Heap:
    """What kernels are told of the heap."""
    return Heap(num_ranks, layout.num_devices, layout.data, layout.flags, MAX_BLOCKS, identity)


def launch_identity(kernel: Kernel, arrays: tuple[Any, ...], constants: Mapping[str, Any]) -> int:
    """What ranks that launch together must have in common, in 31 bits: kernel, operation and sizes.

    The operation is in the lowest 8 bits, for messages; above it is a hash, the same in all processes.
    """
    types = [f"{x.dtype}{list(x.shape)}" for x in flat_arrays(arrays)]
    text = f"{kernel.path.name} {kernel.function} {sorted(constants.items())} {types}"
    return zlib.crc32(text.encode()) >> 9 << 8 | constants["OPERATION"]
