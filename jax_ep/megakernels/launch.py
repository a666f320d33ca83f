"""Launches of Triton kernels from per-shard JAX code, on GPUs and, for tests, in Triton's interpreter on the CPU.

Kernels that use the symmetric heap belong to a group of devices that launch together.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep import context, ffi
from jax_ep.core.kernel import Argument, Config, Constants, Kernel, array_of, blocks_of, flat_arrays
from jax_ep.core.mesh_axes import Axis, all_gather, known_after, rank_on, varying_axes
from jax_ep.core.structs import flat, regrouped, type_of
from jax_ep.heap.memory import Generation
from jax_ep.heap.symmetric import MAX_BLOCKS, HeapLayout, SymmetricHeap
from jax_ep.megakernels import compile, pending
from jax_ep.megakernels.compile import Parameter
from jax_ep.megakernels.kernels.exchange_structs import Heap, Peers
from jax_ep.types import Array, Handle, LowLatencyHandle


def launch(
    kernel: Kernel,
    operands: Sequence[Argument | None],
    results: Sequence[Argument | None],
    config: Config,
    constants: Mapping[str, object],
    *,
    group: Array | None = None,
    buffers: Generation | None = None,
    written: Mapping[int, int] | None = None,
) -> tuple[Any, ...]:
    """Run a kernel on the device of this shard.

    The kernel's parameters that `constants` does not name are one per operand, then one per result: a pointer, or a
    NamedTuple of pointers; None is passed as it is. Results are not initialized. They vary over the mesh axes over
    which an operand does.

    With a group the kernel uses memory of the heap that `context.reserve` has reserved: the data area or the
    low-latency buffers, never both. After its operands it takes a `Peers`, and as HEAP a `Heap`.

    Args:
      kernel: what to run.
      operands: arrays of this shard, descriptors of them, NamedTuples of these, or None.
      results: shapes and dtypes of the results, descriptors of them, NamedTuples of these, or None.
      config: grid and compilation options.
      constants: `tl.constexpr` parameters.
      group: `[W + 1]` int32, see `group_on`; None: the kernel does not use the heap.
      buffers: the low-latency buffers that the kernel uses; None: it uses the data area.
      written: operands that the kernel writes in place, and the results that they become, by their positions among the
        arrays of all operands or results; negative ones count from the end. XLA may lose this: see `unsliced` for
        results that are used, and `new_counters` for scratch.

    Returns:
      One array, NamedTuple of arrays, or None per entry of `results`.
    """
    names = (name for name in kernel.body.arg_names if name not in constants)
    parameters = *operands, *(() if group is None else (group,)), *results
    constants = {**constants, **{name: None for name, x in zip(names, parameters, strict=False) if x is None}}
    operands, shapes = ([x for x in some if x is not None] for some in (operands, results))
    if group is not None:
        operands, constants = _with_heap(kernel, operands, shapes, constants, group, buffers)
    ends = len(flat(operands)), len(flat(shapes))
    written = {operand % ends[0]: result % ends[1] for operand, result in (written or {}).items()}
    outputs = _run(kernel, operands, shapes, config, constants, written)
    axes = tuple(sorted(frozenset[str]().union(*(varying_axes(x) for x in flat_arrays(operands)))))
    outputs = [lax.pcast(x, axes, to="varying") if axes else x for x in outputs]
    found = iter(regrouped(outputs, map(type_of, shapes)))
    return tuple(None if x is None else next(found) for x in results)


def unsliced[Arrays](arrays: Arrays) -> Arrays:
    """Pass operands and results of a launch that writes in place through a barrier.

    XLA's dynamic-slice fusion moves a slice of any operand, or an update with a result, into a custom call, and forgets
    which operands the call writes in place. It does not look through a barrier.
    """
    return lax.optimization_barrier(arrays)


def new_counters(number: int, x: Array) -> Array:
    """Return `number` int32 zeros that a launch on `x` may write, even if XLA forgets that it does.

    They depend on `x`, so that XLA neither keeps them as a constant nor shares them between launches.
    """
    return known_after(jnp.zeros((number,), jnp.int32), x)


def _run(
    kernel: Kernel,
    operands: Sequence[Argument],
    results: Sequence[Argument],
    config: Config,
    constants: Constants,
    written: dict[int, int],
) -> Sequence[Array]:
    """Run a kernel in the interpreter, or launch it by jax-triton or by this package's custom call."""
    if jax.default_backend() == "cpu":
        from jax_ep import interpreter

        return interpreter.call(kernel, operands, results, config, constants, written)
    capability = compile.device_capability()
    if context.launcher() == "jax-triton":
        from jax_ep.core import jax_triton

        return jax_triton.launch_kernel(
            kernel, operands, results, config, constants, capability=capability, written=written
        )
    arguments = *operands, *results
    code = compile.compile_kernel(kernel, tuple(map(_described, arguments)), config, constants, capability)
    blocks = [blocks_of(x) for x in flat(arguments)]
    return pending.launch(code, flat_arrays(operands), flat_arrays(results), blocks, config, written)


def stores_by_descriptor() -> bool:
    """Return whether results may have descriptors; jax-triton describes operands only."""
    return context.launcher() != "jax-triton"


def _described(argument: Any) -> Any:
    """Return what the compiler must know of an operand or result."""
    if isinstance(argument, tuple):
        return type(argument)(*map(_described, argument))
    blocks = blocks_of(argument)
    return Parameter(np.dtype(array_of(argument).dtype), None if blocks is None else blocks.block_shape)


def _with_heap(
    kernel: Kernel,
    operands: Sequence[Argument],
    results: Sequence[Argument],
    constants: Constants,
    group: Array,
    buffers: Generation | None,
) -> tuple[list[Argument], Constants]:
    """Return operands and constants of a launch on the heap."""
    heap = context.reserved_heap(kernel.name)
    generation = heap.data if buffers is None else buffers
    # Equal calls with an operand are one to XLA. So the launches of a program share one check of the status record,
    # which runs since the table needs it, and one table: CUDA graphs can hold the launches, and no check is between.
    checked = ffi.check_status(group, generation.id)
    table = _table(heap, generation.id, varying_axes(group), checked, generation.reserved)
    identity = launch_identity(kernel, (*operands, group, *results), constants)
    described = heap_of(heap.layout, group.shape[0] - 1, identity, context.records(identity, kernel.name))
    return [*operands, Peers(group, table)], {**constants, "HEAP": described}


def heap_of(layout: HeapLayout, num_ranks: int, identity: int, traced: bool = False) -> Heap:
    """Return what kernels know about the heap."""
    return Heap(num_ranks, layout.num_devices, layout.data, layout.flags, MAX_BLOCKS, identity, traced)


def launch_identity(kernel: Kernel, arrays: tuple[Argument, ...], constants: Mapping[str, object]) -> int:
    """Identify what ranks that launch together must have in common, in 31 bits: kernel, operation and sizes.

    The operation is in the lowest 8 bits, for messages; above it is a hash, the same in all processes.
    """
    types = [f"{x.dtype}{list(x.shape)}" for x in flat_arrays(arrays)]
    text = f"{kernel.path.name} {kernel.name} {sorted(constants.items())} {types}"
    return zlib.crc32(text.encode()) >> 9 << 8 | kernel.operation


def group_on(axis: Axis, varying: frozenset[str]) -> Array:
    """Return `[W + 1]` int32: numbers of the devices on the axis, and this rank.

    It is the same in all calls of a program, so XLA merges their collectives. Ranks that differ only in axes over which
    nothing of the call varies have different devices and the same results: its type is that of the results.
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
    """Return the group without a collective, if the mesh given to `init` has the axes of the mesh around this call.

    They may still be different meshes, and a compiled program may run on other devices than it was traced for: every
    kernel compares its device with the group's (kernels/protocol.py). None: only a collective can tell.
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
    rows = numbers.transpose(order).reshape(-1, math.prod(mesh.shape[name] for name in axis))
    groups = jnp.asarray(_one_object(rows.shape, rows.tobytes()))
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


@functools.lru_cache(maxsize=64)
def _one_object(shape: tuple[int, ...], values: bytes) -> np.ndarray:
    """Return int32 `values`: equal ones are one object, hence one constant of a traced function.

    `jax.checkpoint` hides the values of constants, so that XLA could not merge what is computed from equal ones.
    """
    return np.frombuffer(values, np.int32).reshape(shape)


def group_of(handle: Handle | LowLatencyHandle) -> Array:
    """Return the `group_on` of a handle that this implementation made."""
    if handle.group is None:
        raise ValueError("the handle was made by another implementation; use the one that made it.")
    return handle.group


_REGISTERS = 65536  # of a multiprocessor


def num_programs(num_tasks: int, per_multiprocessor: int = 1) -> int:
    """Return the number of programs for this many tasks: at least one, and at most `all_programs`."""
    if jax.default_backend() == "cpu":
        return 2
    return max(1, min(num_tasks, all_programs(per_multiprocessor)))


def all_programs(per_multiprocessor: int = 1) -> int:
    """Return the number of programs that the device runs at a time; the interpreter, which runs one, has two."""
    if jax.default_backend() == "cpu":
        return 2
    return jax.local_devices()[0].core_count * per_multiprocessor


def thread_registers(per_multiprocessor: int, num_warps: int, *, multiple: int = 1) -> int:
    """Return a thread's share of the registers; the compiler allocates them in multiples of 8."""
    return _REGISTERS // (per_multiprocessor * num_warps * 32) // multiple * multiple


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """How programs of a kernel compute tiles; subclasses add the sizes of a tile."""

    num_warps: int = 4  # warps per program
    num_stages: int = 3  # blocks in flight, the one in use included
    programs: int = 2  # programs per multiprocessor
    candidates: ClassVar[Mapping[str, tuple[int, ...]]]  # values that `jax-ep tune` searches, the simplest first


def tile_config(tiles: Programs, num_tasks: int) -> Config:
    """Return the config of a kernel of up to `num_tasks` tiles."""
    return Config(num_programs(num_tasks, tiles.programs), tiles.num_warps, tiles.num_stages)


def optional(shape: tuple[int, ...], like: Array | None) -> jax.ShapeDtypeStruct | None:
    """Return a result of this shape and the dtype of an optional operand, or None without the operand."""
    return None if like is None else jax.ShapeDtypeStruct(shape, like.dtype)


def int32(*shapes: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return int32 results of these shapes."""
    return tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
