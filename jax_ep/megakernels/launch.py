"""Launches of Triton kernels from per-shard JAX code, on GPUs and, for tests, in Triton's interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jax_ep import context, ffi
from jax_ep.kernel import Blocks, Config, Descriptor, Kernel, blocks_of, flat, flat_arrays, regrouped, type_of
from jax_ep.megakernels import compilation
from jax_ep.megakernels.compilation import Copies, Parameter
from jax_ep.mesh_axes import varying_axes
from jax_ep.types import Array


def launch(
    kernel: Kernel,
    operands: Sequence[Any],
    results: Sequence[Any],
    config: Config,
    constants: Mapping[str, Any],
) -> tuple[Any, ...]:
    """Runs a kernel on the device of this shard.

    The kernel's parameters that `constants` does not name are one per operand, then one per result: a pointer, or a
    NamedTuple of pointers. Results are not initialised. They vary over the mesh axes over which an operand does.

    Args:
      kernel: what to run.
      operands: arrays of this shard, descriptors of them, or NamedTuples of these.
      results: shapes and dtypes of the results, descriptors of them, or NamedTuples of these.
      config: grid and compilation options.
      constants: `tl.constexpr` parameters, and None for pointers that the kernel does without.

    Returns:
      One array, or NamedTuple of arrays, per entry of `results`.
    """
    run = _interpret if jax.default_backend() == "cpu" else _run_on_gpu
    outputs = run(kernel, tuple(operands), tuple(results), config, dict(constants))
    axes = tuple(sorted(frozenset[str]().union(*(varying_axes(x) for x in flat_arrays(operands)))))
    outputs = tuple(lax.pcast(x, axes, to="varying") if axes else x for x in outputs)
    return tuple(regrouped(outputs, map(type_of, results)))


def make_ready(function: str) -> None:
    """To be called, outside of jit, before launches that use no heap: on the CPU, workers come with the heap."""
    if jax.default_backend() == "cpu":
        from jax_ep import interpreter

        if interpreter.current_pool() is None:
            context.heap(function)


def _run_on_gpu(
    kernel: Kernel,
    operands: tuple[Any, ...],
    results: tuple[Any, ...],
    config: Config,
    constants: dict[str, Any],
) -> tuple[Array, ...]:
    arguments = (*operands, *results)
    parameters = tuple(_described(x) for x in arguments)
    compiled = compilation.compile_kernel(kernel, parameters, config, constants, compilation.device_capability())
    copies = iter(compiled.copies)
    return ffi.launch_kernel(
        compiled.name,
        compiled.code,
        flat_arrays(operands),
        flat_arrays(results),
        num_programs=config.num_programs,
        num_threads=32 * config.num_warps,
        shared_bytes=compiled.shared_bytes,
        alignment=compilation.ALIGNMENT,
        parameters=[_parameter(blocks_of(x), copies) for x in flat(arguments)],
    )


def _described(argument: Any) -> Any:
    """What the compiler must know of an operand or result."""
    if isinstance(argument, tuple):
        return type(argument)(*map(_described, argument))
    blocks, array = blocks_of(argument), argument.array if isinstance(argument, Descriptor) else argument
    return Parameter(np.dtype(array.dtype), None if blocks is None else blocks.block_shape)


def _parameter(blocks: Blocks | None, copies: Iterator[Copies]) -> tuple[int, ...]:
    if blocks is None:
        return ffi.by_address()
    element_type, element_bytes, swizzle, box = next(copies)
    return ffi.by_descriptor(element_type, element_bytes, swizzle, blocks.shape, blocks.strides, box)


def _interpret(
    kernel: Kernel,
    operands: tuple[Any, ...],
    results: tuple[Any, ...],
    config: Config,
    constants: dict[str, Any],
) -> tuple[Array, ...]:
    from jax_ep import interpreter

    return interpreter.call(kernel, operands, results, config, constants)
