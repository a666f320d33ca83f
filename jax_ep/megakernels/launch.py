"""Launches of Triton kernels from per-shard JAX code, on GPUs and, for tests, in Triton's interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jax_ep import context, ffi
from jax_ep.kernel import Blocks, Config, Descriptor, Kernel, array_of, blocks_of
from jax_ep.megakernels import compilation
from jax_ep.mesh_axes import varying_axes
from jax_ep.types import Array


def launch(
    kernel: Kernel,
    operands: Sequence[Array | Descriptor],
    results: Sequence[jax.ShapeDtypeStruct],
    config: Config,
    constants: Mapping[str, Any],
) -> tuple[Array, ...]:
    """Runs a kernel on the device of this shard.

    The kernel's parameters are one pointer per operand, one per result, then `constants` by name. Results are not
    initialised. They vary over the mesh axes over which an operand does.

    Args:
      kernel: what to run.
      operands: arrays of this shard, or descriptors of them.
      results: shapes and dtypes of the results. They have no descriptors: the host can describe operands only, and
        where a result is an operand's memory, XLA (JAX 0.11.2) may still let the call write elsewhere, as into the
        stacked results of a scan.
      config: grid and compilation options.
      constants: `tl.constexpr` parameters.

    Returns:
      One array per entry of `results`.
    """
    run = _interpret if jax.default_backend() == "cpu" else _run_on_gpu
    outputs = run(kernel, tuple(operands), tuple(results), config, dict(constants))
    axes = tuple(sorted(frozenset[str]().union(*(varying_axes(array_of(x)) for x in operands))))
    return tuple(lax.pcast(x, axes, to="varying") if axes else x for x in outputs)


def make_ready(function: str) -> None:
    """To be called, outside of jit, before launches that use no heap: on the CPU, workers come with the heap."""
    if jax.default_backend() == "cpu":
        from jax_ep import interpreter

        if interpreter.current_pool() is None:
            context.heap(function)


def _run_on_gpu(
    kernel: Kernel,
    operands: tuple[Array | Descriptor, ...],
    results: tuple[jax.ShapeDtypeStruct, ...],
    config: Config,
    constants: dict[str, Any],
) -> tuple[Array, ...]:
    described = any(isinstance(x, Descriptor) for x in operands)
    run = _run_with_descriptors if described else _run_with_addresses
    return run(kernel, operands, results, config, constants)


def _run_with_addresses(
    kernel: Kernel,
    operands: tuple[Any, ...],
    results: tuple[jax.ShapeDtypeStruct, ...],
    config: Config,
    constants: dict[str, Any],
) -> tuple[Array, ...]:
    """By the package's own custom call: jaxlib's, for the same kernels, takes the host longer than they run."""
    dtypes = tuple(np.dtype(x.dtype) for x in (*operands, *results))
    compiled = compilation.compile_kernel(kernel, dtypes, config, constants, compilation.device_capability())
    return ffi.launch_kernel(
        compiled.name,
        compiled.code,
        operands,
        results,
        num_programs=config.num_programs,
        num_threads=32 * config.num_warps,
        shared_bytes=compiled.shared_bytes,
        alignment=compilation.ALIGNMENT,
    )


def _run_with_descriptors(
    kernel: Kernel,
    operands: tuple[Array | Descriptor, ...],
    results: tuple[jax.ShapeDtypeStruct, ...],
    config: Config,
    constants: dict[str, Any],
) -> tuple[Array, ...]:
    """By jax-triton, which makes the descriptors for every launch."""
    import jax_triton

    def described(array: Array, blocks: Blocks | None) -> Any:
        return array if blocks is None else jax_triton.TensorDescriptor(array, *blocks)

    return jax_triton.triton_call(
        *(described(array_of(x), blocks_of(x)) for x in operands),
        kernel=kernel.load(),
        out_type=results,
        grid=(config.num_programs,),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        backend_options={} if config.max_registers is None else {"maxnreg": config.max_registers},
        **constants,
    )


def _interpret(
    kernel: Kernel,
    operands: tuple[Array | Descriptor, ...],
    results: tuple[jax.ShapeDtypeStruct, ...],
    config: Config,
    constants: dict[str, Any],
) -> tuple[Array, ...]:
    from jax_ep import interpreter

    return interpreter.call(kernel, operands, results, config, constants)
