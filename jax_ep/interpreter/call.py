"""Kernels on CPU devices, for tests: Triton's interpreter runs them, in one process per device.

`call` corresponds to `jax_ep.ffi.launch_kernel` on a GPU. XLA's CPU runtime runs independent calls of a device in any
order, different on each device, but communication kernels need one order, which a GPU's stream gives them. So a launch
on the symmetric heap starts when all devices of the mesh have reached it (pool.py). Other launches start at once: each
wait holds one of XLA's few threads.

`jax.pure_callback` does not work here, for two reasons. It copies operands on XLA's own threads, which may all be
waiting in callbacks. And it creates one callback per trace, but launches are identified by their place in the compiled
program.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import math
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_ep import ffi
from jax_ep.core.autodiff import in_order
from jax_ep.core.kernel import Blocks, Config, Kernel, blocks_of, element_type, flat_arrays
from jax_ep.core.mesh_axes import automatic_axes, numbers_in_processes
from jax_ep.core.structs import code_digest, flat, type_of
from jax_ep.interpreter.pool import Pool
from jax_ep.interpreter.process import Launch
from jax_ep.types import Array

__all__ = ["Pool", "SharedMemory", "call", "current_pool", "set_pool"]

_DEVICE_NUMBERS = 1 << 62  # A pointer table outside the ids of heaps, from which a program reads its device number.

_pool: Pool | None = None
_sites = itertools.count()


def current_pool() -> Pool | None:
    """Return the pool on which this process runs kernels."""
    return _pool


def set_pool(pool: Pool | None) -> None:
    """Set the pool on which kernels run, including those of programs compiled before."""
    global _pool
    _pool = pool


class SharedMemory:
    """Heaps of this process's CPU devices in the shared memory of a pool; implements `jax_ep.heap.memory.Memory`."""

    def __init__(self, timeout_s: float) -> None:
        self.devices = _devices()
        self.numbers = numbers_in_processes(jax.devices("cpu"))
        self.pool = Pool(len(self.devices), timeout_s=timeout_s)
        set_pool(self.pool)
        atexit.register(self._close_at_exit)

    def allocate(self, num_bytes: int, function: str) -> dict[int, list[int]]:
        """Allocate memory as `Memory.allocate` describes; each device sees the addresses of its worker."""
        try:
            return dict(enumerate(self.pool.allocate(num_bytes)))
        except MemoryError as error:
            free = os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
            raise RuntimeError(
                f"{function}: {num_bytes} bytes of shared memory for each of {len(self.devices)} devices are not"
                f" available; this machine has {free} bytes free; pass a smaller heap_bytes, or leave it out."
                f" ({error})"
            ) from error

    def status_address(self, device: int) -> int:
        return self.pool.status_addresses(device)[device]

    def statuses(self) -> list[ffi.StatusBuffer]:
        """Return the status records as this process sees them; do not free them."""
        return [
            ffi.StatusBuffer(*ffi.device_key(device), self.pool.status(number).ctypes.data, self.status_address(number))
            for number, device in enumerate(self.devices)
        ]

    def trace_area(self, header: np.ndarray, num_words: int) -> _PoolTraceArea:
        return _PoolTraceArea(self.pool, header, num_words)

    def close(self) -> None:
        """End the worker processes."""
        atexit.unregister(self._close_at_exit)
        if current_pool() is self.pool:
            set_pool(None)
        if self.pool.close() is not None:
            _settle(self.devices)

    def _close_at_exit(self) -> None:
        """End the workers, and with them programs that are still running, for example after a KeyboardInterrupt."""
        self.pool.close()
        _settle(self.devices)


class _PoolTraceArea:
    """Trace areas in memory shared with the workers; implements `jax_ep.heap.memory.TraceArea`."""

    def __init__(self, pool: Pool, header: np.ndarray, num_words: int) -> None:
        self._pool = pool
        self.addresses = dict(enumerate(pool.allocate_traces(header, num_words)))

    def read(self, device: int) -> np.ndarray:
        return self._pool.traces(device)


def _settle(devices: Sequence[jax.Device]) -> None:
    """Wait for the devices, and clear the error of a failed callback.

    JAX raises the failure of a device's last callback again at exit, and Python must not exit during a callback.
    """
    mesh = jax.sharding.Mesh(np.array(devices), ("device",))
    spec = jax.sharding.PartitionSpec("device")
    same = jax.shard_map(lambda x: jax.pure_callback(np.asarray, x, x), mesh=mesh, in_specs=spec, out_specs=spec)
    jax.block_until_ready(jax.jit(same)(np.zeros(len(devices), np.float32)))
    jax.effects_barrier()


def call(
    kernel: Kernel,
    operands: Sequence[Any],
    results: Sequence[Any],
    config: Config,
    constants: Mapping[str, Any],
    written: Mapping[int, int],
) -> tuple[Array, ...]:
    """Run a kernel on the worker of this shard's device, under `jit`, `shard_map`, both or neither.

    Arguments are those of `megakernels.launch.launch`; the kernel's module may also be the absolute path of a file. Of
    `config` only `num_programs` matters: programs run one after another. Unwritten bytes of results are 0xFF.
    """
    _number_devices()
    mesh_size, shapes = _mesh_size(), flat_arrays(results)
    outputs = _interpret_p.bind(
        ffi.pointer_table(_DEVICE_NUMBERS, 1),
        *flat_arrays(operands),
        path=str(kernel.path),
        function=kernel.name,
        code=code_digest(kernel.body.fn),
        parameters=tuple(type_of(x) for x in (*operands, *results)),
        descriptors=tuple(blocks_of(x) for x in flat((*operands, *results))),
        results=tuple(_as_words(shape) for shape in shapes),
        element_types=tuple(element_type(np.dtype(shape.dtype)) for shape in shapes),
        num_programs=config.num_programs,
        constants=tuple(sorted(constants.items())),
        written=tuple(written.items()),
        num_devices=mesh_size if kernel.operation else 1,
    )
    return tuple(
        x if x.dtype == shape.dtype else lax.bitcast_convert_type(x, shape.dtype)
        for x, shape in zip(outputs, shapes, strict=True)
    )


def _as_words(result: jax.ShapeDtypeStruct) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and dtype of a result, with 64-bit elements as pairs of 32-bit words for 32-bit mode threads."""
    dtype = np.dtype(result.dtype)
    return ((*result.shape, 2), np.dtype(np.uint32)) if dtype.itemsize == 8 else (tuple(result.shape), dtype)


def _mesh_size() -> int:
    """Return how many devices of this process run this call."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return 1
    if automatic := automatic_axes():
        raise NotImplementedError(
            f"Triton's interpreter runs kernels only where every mesh axis is manual, but {automatic} are not; "
            "name them in axis_names of jax.shard_map as well."
        )
    return max(1, math.prod(mesh.shape[name] for name in mesh.axis_names) // jax.process_count())


@functools.cache
def _number_devices() -> None:
    for number, device in enumerate(_devices()):
        ffi.register_table(_DEVICE_NUMBERS, device, [number])


def _devices() -> list[jax.Device]:
    return jax.local_devices(backend="cpu")


def _callback(
    site: int,
    path: str,
    function: str,
    code: str,
    parameters: tuple[type | None, ...],
    descriptors: tuple[Blocks | None, ...],
    results: tuple[tuple[tuple[int, ...], np.dtype], ...],
    element_types: tuple[str, ...],
    num_programs: int,
    constants: tuple[tuple[str, Any], ...],
    written: tuple[tuple[int, int], ...],
    num_devices: int,
) -> Callable[..., tuple[np.ndarray, ...]]:
    def run(number: Any, *operands: Any) -> tuple[np.ndarray, ...]:
        pool = _pool
        if pool is None:
            raise RuntimeError(f"kernel {function}: there is no interpreter pool in this process; call jax_ep.init.")
        arrays = [np.asarray(operand) for operand in operands]
        launch = Launch(
            path=path,
            function=function,
            code=code,
            operands=tuple((element_type(array.dtype), array.tobytes()) for array in arrays),
            results=tuple(
                (element, math.prod(shape) * dtype.itemsize)
                for element, (shape, dtype) in zip(element_types, results, strict=True)
            ),
            num_programs=num_programs,
            constants=dict(constants),
            parameters=parameters,
            descriptors=tuple(blocks and tuple(blocks) for blocks in descriptors),
            written=written,
        )
        outputs = pool.launch(launch, worker=int(np.asarray(number)[0]), group_size=num_devices, site=site)
        return tuple(
            np.frombuffer(data, dtype).reshape(shape) for data, (shape, dtype) in zip(outputs, results, strict=True)
        )

    return run


def _abstract(*_: Any, results: tuple[tuple[tuple[int, ...], np.dtype], ...], **__: Any) -> list[Any]:
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in results]


def _implementation(*operands: Any, **params: Any) -> Any:
    with jax.disable_jit(False):  # eager calls under `jax.disable_jit` get here, too
        return jax.jit(lambda *args: _interpret_p.bind(*args, **params))(*operands)


def _lower(context: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
    values, _, _ = mlir.emit_python_callback(
        context,
        _callback(next(_sites), **params),
        None,
        list(operands),
        cast(Any, context.avals_in),
        cast(Any, context.avals_out),
        has_side_effect=False,
        returns_token=False,
    )
    return values


_interpret_p = Primitive("jax_ep_interpret")
_interpret_p.multiple_results = True
_interpret_p.def_impl(_implementation)
_interpret_p.def_abstract_eval(_abstract)
batching.primitive_batchers[_interpret_p] = in_order(_interpret_p)
mlir.register_lowering(_interpret_p, _lower, platform="cpu", cacheable=False)
