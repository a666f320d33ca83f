"""Launches of Triton kernels from per-shard JAX code, on GPUs and, for tests, in Triton's interpreter on the CPU.

Most use the symmetric heap, and so belong to a group of devices that launch together.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep import context, ffi
from jax_ep.core.collectives import Axis, all_gather, rank_on
from jax_ep.core.kernel import Argument, Config, Descriptor, Kernel, blocks_of, flat, flat_arrays, regrouped, type_of
from jax_ep.core.mesh_axes import varying_axes
from jax_ep.heap.memory import Generation
from jax_ep.heap.symmetric import MAX_BLOCKS, HeapLayout, SymmetricHeap
from jax_ep.megakernels import compile, pending
from jax_ep.megakernels.compile import Parameter
from jax_ep.megakernels.kernels.exchange_structs import Heap, Peers
from jax_ep.types import Array, Handle, LowLatencyHandle


def launch(
    kernel: Kernel,
    operands: Sequence[Argument],
    results: Sequence[Argument],
    config: Config,
    constants: Mapping[str, object],
    *,
    group: Array | None = None,
    buffers: Generation | None = None,
    written: dict[int, int] | None = None,
) -> tuple[Any, ...]:
    """Runs a kernel on the device of this shard.

    The kernel's parameters that `constants` does not name are one per operand, then one per result: a pointer, or a
    NamedTuple of pointers. Results are not initialised. They vary over the mesh axes over which an operand does.

    With a group the kernel uses the heap: the data area or the low-latency buffers, never both. For what it uses there
    has been a `context.reserve`. `constants` has the `OPERATION` then, one of `ffi.Operation`, which the kernel does
    not get; behind its own operands it takes a `Peers`, and as HEAP a `Heap`.

    Args:
      kernel: what to run.
      operands: arrays of this shard, descriptors of them, or NamedTuples of these.
      results: shapes and dtypes of the results, descriptors of them, or NamedTuples of these.
      config: grid and compilation options.
      constants: `tl.constexpr` parameters, and None for pointers that the kernel does without.
      group: `[W + 1]` int32, see `group_on`; None: the kernel does not use the heap.
      buffers: the low-latency buffers that the kernel uses; None: it uses the data area.
      written: arrays among the operands, by their positions, that the kernel writes in place, and among the results
        what they become, which nobody must read: the interpreter's kernels write a copy.

    Returns:
      One array, or NamedTuple of arrays, per entry of `results`.
    """
    if group is not None:
        operands, constants = _with_heap(kernel, operands, results, constants, group, buffers)
    if jax.default_backend() == "cpu":
        from jax_ep import interpreter

        outputs = interpreter.call(kernel, tuple(operands), tuple(results), config, dict(constants))
    elif context.launcher() == "jax-triton":
        from jax_ep.core import jax_triton

        capability = compile.device_capability()
        outputs = jax_triton.launch_kernel(
            kernel, operands, results, config, constants, capability=capability, written=written
        )
    else:
        arguments = *operands, *results
        parameters = tuple(_described(x) for x in arguments)
        code = compile.compile_kernel(kernel, parameters, config, dict(constants), compile.device_capability())
        blocks = [blocks_of(x) for x in flat(arguments)]
        outputs = pending.launch(code, flat_arrays(operands), flat_arrays(results), blocks, config, written or {})
    axes = tuple(sorted(frozenset[str]().union(*(varying_axes(x) for x in flat_arrays(operands)))))
    outputs = tuple(lax.pcast(x, axes, to="varying") if axes else x for x in outputs)
    return tuple(regrouped(outputs, map(type_of, results)))


def stores_by_descriptor() -> bool:
    """Whether results may have descriptors; jax-triton describes operands only."""
    return context.launcher() != "jax-triton"


def _described(argument: Any) -> Any:
    """What the compiler must know of an operand or result."""
    if isinstance(argument, tuple):
        return type(argument)(*map(_described, argument))
    blocks, array = blocks_of(argument), argument.array if isinstance(argument, Descriptor) else argument
    return Parameter(np.dtype(array.dtype), None if blocks is None else blocks.block_shape)


def _with_heap(
    kernel: Kernel,
    operands: Sequence[Argument],
    results: Sequence[Argument],
    constants: Mapping[str, object],
    group: Array,
    buffers: Generation | None,
) -> tuple[tuple[Argument, ...], dict[str, object]]:
    """Operands and constants of a launch on the heap."""
    heap = context.reserved_heap(kernel.name)
    generation = heap.data if buffers is None else buffers
    # Equal calls with an operand are one to XLA. So the launches of a program share one check of the status record,
    # which runs since the table needs it, and one table: CUDA graphs can hold the launches, and no check is between.
    checked = ffi.check_status(group, generation.id)
    table = _table(heap, generation.id, varying_axes(group), checked, generation.reserved)
    identity = launch_identity(kernel, (*operands, group, *results), constants)
    sizes = {name: value for name, value in constants.items() if name != "OPERATION"}
    traced = context.records(identity, kernel.name)
    sizes["HEAP"] = heap_of(heap.layout, group.shape[0] - 1, identity, traced)
    return (*operands, Peers(group, table)), sizes


def heap_of(layout: HeapLayout, num_ranks: int, identity: int, traced: bool = False) -> Heap:
    """What kernels are told of the heap."""
    return Heap(num_ranks, layout.num_devices, layout.data, layout.flags, MAX_BLOCKS, identity, traced)


def launch_identity(kernel: Kernel, arrays: tuple[Argument, ...], constants: Mapping[str, object]) -> int:
    """What ranks that launch together must have in common, in 31 bits: kernel, operation and sizes.

    The operation is in the lowest 8 bits, for messages; above it is a hash, the same in all processes.
    """
    types = [f"{x.dtype}{list(x.shape)}" for x in flat_arrays(arrays)]
    text = f"{kernel.path.name} {kernel.name} {sorted(constants.items())} {types}"
    return zlib.crc32(text.encode()) >> 9 << 8 | int(str(constants["OPERATION"]))


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


def group_of(handle: Handle | LowLatencyHandle) -> Array:
    """`[W + 1]` int32 of a handle that this implementation made: see `group_on`."""
    if handle.group is None:
        raise ValueError("the handle was made by another implementation; use the one that made it.")
    return handle.group
