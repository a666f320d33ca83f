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
from jax_ep.core.collectives import Axis, all_gather, rank_on
from jax_ep.core.kernel import Config, Descriptor, Kernel, array_of
from jax_ep.core.mesh_axes import varying_axes
from jax_ep.heap.symmetric import MAX_BLOCKS, SymmetricHeap
from jax_ep.megakernels.launch import launch
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
    results: tuple[jax.ShapeDtypeStruct | Descriptor, ...],
    config: Config,
    constants: dict[str, int],
    after: Array | None = None,
    *,
    uses_data: bool = True,
) -> tuple[Array, ...]:
    """Launches a kernel on the heap; its last operands are the group, the table and what must come earlier, if any.

    Kernels use the data area, and get to know where it and its flags lie, or the low-latency regions, never both. For
    what they use there has been a `context.reserve`. `constants` has the `OPERATION`, one of `ffi.Operation`.
    """
    heap = context.reserved_heap(kernel.function)
    generation = heap.data if uses_data else heap.regions
    # Equal calls with an operand are one to XLA. So the launches of a program share one check of the status record,
    # which runs since the table needs it, and one table: CUDA graphs can hold the launches, and no check is between.
    checked = ffi.check_status(group, generation.id)
    table = _table(heap, generation.id, varying_axes(group), checked, generation.reserved)
    places = {"D": heap.layout.num_devices}
    if uses_data:
        places |= {"DATA": heap.layout.data, "FLAGS": heap.layout.flags, "MAX_BLOCKS": MAX_BLOCKS}
    places["LAUNCH"] = launch_identity(kernel, (*operands, *results), constants)
    sizes = {name: value for name, value in constants.items() if name != "OPERATION"}
    operands = (*operands, group, table, table if after is None else after)
    return launch(kernel, operands, results, config, {**places, **sizes})


def launch_identity(kernel: Kernel, arrays: tuple[Any, ...], constants: Mapping[str, Any]) -> int:
    """What ranks that launch together must have in common, in 31 bits: kernel, operation and sizes.

    The operation is in the lowest 8 bits, for messages; above it is a hash, the same in all processes.
    """
    types = [f"{array_of(x).dtype}{list(array_of(x).shape)}" for x in arrays]
    text = f"{kernel.path.name} {kernel.function} {sorted(constants.items())} {types}"
    return zlib.crc32(text.encode()) >> 9 << 8 | constants["OPERATION"]
