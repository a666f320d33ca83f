"""What is launched, and how: names and numbers, so that implementations need not import Triton to speak of kernels."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel by name, so that naming it imports nothing.

    Attributes:
      module: a module of `jax_ep.megakernels.kernels`, or, in the interpreter, the absolute path of a file.
      function: the `triton.jit` function in it.
    """

    module: str
    function: str

    @property
    def path(self) -> Path:
        """The source file."""
        if Path(self.module).is_absolute():
            return Path(self.module)
        return Path(__file__).parents[1] / "megakernels" / "kernels" / f"{self.module}.py"

    def load(self) -> Any:
        """The `triton.jit` function; needs Triton."""
        return getattr(importlib.import_module(f"jax_ep.megakernels.kernels.{self.module}"), self.function)


@dataclasses.dataclass(frozen=True)
class Config:
    """How a kernel is launched.

    Attributes:
      num_programs: size of the one-dimensional grid.
      num_warps: warps per program.
      num_stages: depth of software pipelining.
      max_registers: of a thread, so that more programs fit on a multiprocessor; None: as many as the compiler likes.
    """

    num_programs: int
    num_warps: int = 8
    num_stages: int = 3
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
    """Triton's name of a NumPy dtype."""
    name = _ELEMENT_TYPES.get(dtype.name)
    if name is None:
        raise TypeError(f"kernels take no arrays of {dtype.name}, only of {', '.join(_ELEMENT_TYPES)}")
    return name


BOUND = 1 << 30
"""Most rows that a bounded descriptor can have."""

_FAR = 0x7FFF0000


class Blocks(NamedTuple):
    """What a tensor descriptor says of an array, in elements: shape, strides, and what one load or store moves."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """An operand that a kernel reads in blocks through a tensor descriptor (TMA), or a result that it writes so.

    What lies outside of the array reads as zero and is not written.

    Attributes:
      array: the array, or shape and dtype of a result; the strides of all axes but the last are whole 16-byte words.
      block_shape: what one load or store moves, with as many axes.
      bounded: an array `[M, N]` whose rows end where the kernel says (megakernels/kernels/bounded.py).
    """

    array: Any
    block_shape: tuple[int, ...]
    bounded: bool = False

    @property
    def blocks(self) -> Blocks:
        """What the kernel's descriptor says."""
        shape = tuple(self.array.shape)
        if self.bounded:
            width = shape[-1]
            strides = ((1 << 34) - width, width, width, 1)
            return Blocks((_FAR, _FAR, BOUND, width), strides, (1, 1, *self.block_shape))
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return Blocks(shape, strides, tuple(self.block_shape))


def blocks_of(argument: Any) -> Blocks | None:
    """What the descriptor of an operand or result says; None: the kernel takes a pointer."""
    return argument.blocks if isinstance(argument, Descriptor) else None


def array_of(argument: Any) -> Any:
    """An operand, or shape and dtype of a result, without its descriptor."""
    return argument.array if isinstance(argument, Descriptor) else argument


def flat(arguments: Iterable[Any]) -> list[Any]:
    """Operands or results one by one, where some of them are NamedTuples of several."""
    return [x for argument in arguments for x in (argument if isinstance(argument, tuple) else (argument,))]


def flat_arrays(arguments: Iterable[Any]) -> list[Any]:
    """Their arrays, or shapes and dtypes."""
    return [array_of(x) for x in flat(arguments)]


def type_of(argument: Any) -> Any:
    """The NamedTuple that an operand or result is; None: it is a single one."""
    return type(argument) if isinstance(argument, tuple) else None


def regrouped(values: Iterable[Any], types: Iterable[Any]) -> list[Any]:
    """The reverse of `flat`: one by one, to NamedTuples again where `type_of` said so."""
    rest = iter(values)
    return [next(rest) if kind is None else kind(*itertools.islice(rest, len(kind._fields))) for kind in types]
