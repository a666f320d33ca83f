"""Launches of compiled kernels with little more host time than the driver needs."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jax_ep.ffi import library


def launch_kernel(
    name: str,
    code: bytes,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    num_programs: int,
    num_threads: int,
    shared_bytes: int,
    alignment: int,
    parameters: Sequence[Sequence[int]],
    written: dict[int, int] | None = None,
) -> tuple[jax.Array, ...]:
    """Run Triton machine code on the CUDA device of this shard; its parameters are the operands and results.

    A per-shard function without a derivative; `jax.vmap` launches once per element, in order. The code becomes part of
    the program. A process that only deserializes the program must call `load` first.

    Args:
      name: name of the function in the code.
      code: a cubin for the devices that run the program.
      operands: arrays of this shard.
      results: shapes and dtypes of the results, which are not initialized.
      num_programs: size of the one-dimensional grid.
      num_threads: threads per program.
      shared_bytes: dynamic shared memory per program.
      alignment: required alignment of all addresses, in bytes; a misaligned address is an error at run time.
      parameters: how each operand and each result is passed, from `by_address()` or `by_descriptor(...)`.
      written: maps operands that the kernel updates in place to results, by position.

    Returns:
      One array per entry of `results`, typed as replicated.
    """
    library.load()
    call = jax.ffi.ffi_call(
        library.LAUNCH_KERNEL, tuple(results), vmap_method="sequential", input_output_aliases=written
    )
    numbers = {"num_programs": num_programs, "num_threads": num_threads}
    numbers |= {"shared_bytes": shared_bytes, "alignment": alignment}
    attributes = {key: np.int32(value) for key, value in numbers.items()}
    flat = np.array([number for parameter in parameters for number in parameter], np.int64)
    return tuple(call(*operands, name=name, code=code, parameters=flat, **attributes))


def by_address() -> tuple[int, ...]:
    """Return the encoding of a parameter that is an array's address."""
    return (0,)


def by_descriptor(
    element_type: int,
    element_bytes: int,
    swizzle: int,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
) -> tuple[int, ...]:
    """Return the encoding of a TMA descriptor parameter, built at each launch; reads outside the shape return zero.

    Args:
      element_type: `CUtensorMapDataType` of the driver.
      element_bytes: bytes per element.
      swizzle: `CUtensorMapSwizzle` of the copies in shared memory.
      shape: sizes of the dimensions.
      strides: strides of the dimensions, in elements; the last is 1.
      box: size of one copy, per dimension.
    """
    return (len(shape), element_type, element_bytes, swizzle, *shape, *strides, *box)
