"""Descriptions of kernels and launches, for code that does not import Triton."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jax_ep.core.structs import flat
from jax_ep.types import Array


@dataclasses.dataclass(frozen=True, eq=False)  # equal if identical: Triton hashes the sources of a function
class Kernel:
    """A Triton kernel, compared by identity."""

    # The `triton.jit` function. Modules that name kernels import Triton; nothing that `import jax_ep` loads does.
    body: Any
    operation: int = 0  # one of `ffi.Operation`, for errors about missing peers; 0: the kernel does not use the heap

    @property
    def name(self) -> str:
        return str(self.body.__name__)

    @property
    def path(self) -> Path:
        """The source file, from which Triton's interpreter loads the kernel in its own process."""
        return Path(self.body.fn.__code__.co_filename)


@dataclasses.dataclass(frozen=True)
class Config:
    """Grid and compilation options of a kernel launch."""

    num_programs: int  # size of the one-dimensional grid
    num_warps: int = 8  # warps per program
    num_stages: int = 3  # depth of software pipelining
    # Register limit per thread, so that more programs fit on a multiprocessor; None lets the compiler decide.
    max_registers: int | None = None


_ELEMENT_TYPES = {
    "bool": "i1",
    "int8": "i8",
    "uint8": "u8",
    "int16": "i16",
    "uint16": "u16",
    "int32": "i32",
    "uint32": "u32",
    "int64": "i64",
    "uint64": "u64",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
}


def element_type(dtype: Any) -> str:
    """Return Triton's name of a NumPy dtype."""
    name = _ELEMENT_TYPES.get(dtype.name)
    if name is None:
        raise TypeError(f"kernels do not support arrays of {dtype.name}, expected one of {', '.join(_ELEMENT_TYPES)}")
    return name


BOUND = 1 << 30
"""Maximum number of rows of a bounded descriptor."""

_FAR = 0x7FFF0000


class Blocks(NamedTuple):
    """Shape, strides and block shape of a tensor descriptor, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """An operand or result that a kernel accesses in blocks through a tensor descriptor (TMA).

    Reads outside the array return zero; writes outside are dropped.
    """

    array: Any  # the array, or shape and dtype of a result. All strides but the last must be multiples of 16 bytes.
    block_shape: tuple[int, ...]  # size of one load or store, per axis
    # The array is `[M, N]`, and the kernel chooses where its rows end (megakernels/kernels/tiles.py).
    bounded: bool = False

    @property
    def blocks(self) -> Blocks:
        """The shape, strides and block shape of the kernel's descriptor."""
        shape = tuple(self.array.shape)
        if self.bounded:
            width = shape[-1]
            strides = ((1 << 34) - width, width, width, 1)
            return Blocks((_FAR, _FAR, BOUND, width), strides, (1, 1, *self.block_shape))
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return Blocks(shape, strides, tuple(self.block_shape))


type Single = Array | jax.ShapeDtypeStruct | Descriptor
type Argument = Single | tuple[Single, ...]
"""An operand is an array or a descriptor of one, a result shape and dtype or a descriptor; or a NamedTuple of these."""
type Constants = dict[str, object]
"""`tl.constexpr` parameters by name."""


def blocks_of(argument: Single) -> Blocks | None:
    """Return the blocks of a descriptor argument, or None for a plain pointer."""
    return argument.blocks if isinstance(argument, Descriptor) else None


def array_of(argument: Single) -> Array | jax.ShapeDtypeStruct:
    """Return an operand, or shape and dtype of a result, without its descriptor."""
    return argument.array if isinstance(argument, Descriptor) else argument


def flat_arrays(arguments: Iterable[Argument]) -> list[Any]:
    """Flatten operands or results to arrays, or shapes and dtypes, without descriptors."""
    return [x.array if isinstance(x, Descriptor) else x for x in flat(arguments)]
