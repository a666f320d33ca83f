"""Launches of compiled kernels, as short as the driver's own."""

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
    """Runs machine code of Triton on the CUDA device of this shard; its parameters are the operands and results.

    A per-shard function, without a derivative; `jax.vmap` launches once per element, in order. The code becomes part
    of the program, which also runs where it is only deserialized, after `load`.

    Args:
      name: of the function in the code.
      code: a cubin for the devices that run the program.
      operands: arrays of this shard.
      results: shapes and dtypes of the results, which are not initialised.
      num_programs: size of the one-dimensional grid.
      num_threads: of a program.
      shared_bytes: dynamic shared memory of a program.
      alignment: bytes that all addresses are a multiple of. Running the program fails where one is not.
      parameters: how the kernel takes each operand and each result, as `by_address()` or `by_descriptor(...)` says.
      written: operands that the kernel writes in place, by their positions, and the results that they become.

    Returns:
      One array per entry of `results`, typed as the same on all devices.
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
    """A parameter that is an array's address."""
    return (0,)


def by_descriptor(
    element_type: int,
    element_bytes: int,
    swizzle: int,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
) -> tuple[int, ...]:
    """A parameter that is a TMA descriptor, made for each launch; what lies outside of the shape reads as zero.

    Args:
      element_type: the driver's number, `CUtensorMapDataType`.
      element_bytes: of an element.
      swizzle: of the copies in shared memory, `CUtensorMapSwizzle`.
      shape: sizes of the dimensions.
      strides: of the dimensions, in elements; the last is 1.
      box: what one copy moves.
    """
    return (len(shape), element_type, element_bytes, swizzle, *shape, *strides, *box)
