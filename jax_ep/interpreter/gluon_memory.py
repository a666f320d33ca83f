"""Registers, pointers, shared memory, barriers and tensor descriptors of the Gluon emulator, on NumPy arrays."""

from __future__ import annotations

import ctypes
import math
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl

_DTYPES = {
    "int1": np.dtype(np.bool_),
    "int8": np.dtype(np.int8),
    "int16": np.dtype(np.int16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "uint8": np.dtype(np.uint8),
    "uint16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
}


class EmulationError(RuntimeError):
    """A kernel broke a rule of the memory model, or waits forever."""


def numpy_dtype(dtype: Any) -> np.dtype:
    """Return the NumPy dtype of one of Gluon."""
    return dtype if isinstance(dtype, np.dtype) else _DTYPES[str(dtype)]


_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_NO_ADDRESS = 1 << 20  # up to here
_MEMORY = ctypes.c_uint8 * (1 << 47)  # from an address on; where it ends is not known


def values_of(x: Any) -> Any:
    """Return the array of a tensor, or the number itself."""
    return x.values if isinstance(x, Tensor) else x


class Tensor:
    """Values in registers. Layouts are not modeled."""

    __array_ufunc__ = None  # NumPy scalars leave arithmetic to the methods below.

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __index__(self) -> int:
        return int(self.values)

    __int__ = __index__

    def __bool__(self) -> bool:
        return bool(self.values)

    def __neg__(self) -> Tensor:
        return Tensor(-self.values)

    def to(self, dtype: Any, *, bitcast: bool = False) -> Any:
        """Convert to a dtype of Gluon or NumPy, take the bits as one, or an address as a pointer."""
        if isinstance(dtype, tl.pointer_type):
            element = numpy_dtype(dtype.element_ty)
            used = self.values[self.values > _NO_ADDRESS]
            if not used.size:
                return Pointer(np.zeros(1, element), np.full(self.shape, -1))
            memory = np.frombuffer(_MEMORY.from_address(int(used.min())), np.uint8).view(element)
            return Pointer(memory, (self.values - used.min()) // element.itemsize)
        wanted = numpy_dtype(dtype)
        return Tensor(self.values.view(wanted) if bitcast else self.values.astype(wanted))


def _binary(name: str) -> Callable[[Any, Any], Any]:
    apply = getattr(operator, name)

    def run(self: Tensor, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        return Tensor(np.asarray(apply(self.values, values_of(other))))

    return run


def _reflected(name: str) -> Callable[[Any, Any], Any]:
    apply = getattr(operator, name)
    return lambda self, other: Tensor(np.asarray(apply(other, self.values)))


for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "and_",
    "or_",
    "xor",
    "lshift",
    "rshift",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
):
    setattr(Tensor, f"__{_name.strip('_')}__", _binary(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_"):
    setattr(Tensor, f"__r{_name.strip('_')}__", _reflected(_name))


class Pointer:
    """An element, or a tensor of elements, of an array in global memory."""

    __array_ufunc__ = None

    def __init__(self, array: np.ndarray, offset: Any = 0) -> None:
        self.array, self.offset = array, offset

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.array, self.offset + values_of(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return self + -values_of(other)

    @property
    def dtype(self) -> Any:
        """The pointer's dtype, as far as kernels ask."""
        return types.SimpleNamespace(element_ty=tl.str_to_ty(_NAMES[self.array.dtype], None))

    def to(self, dtype: Any, *, bitcast: bool = False) -> Any:
        """Return a pointer to elements of another dtype, or the address."""
        del bitcast
        if not isinstance(dtype, tl.pointer_type):
            return Tensor(np.asarray(self.array.ctypes.data + np.int64(self.offset) * self.array.itemsize))
        wanted = numpy_dtype(dtype.element_ty)
        return Pointer(self.array.reshape(-1).view(wanted), self.offset * self.array.itemsize // wanted.itemsize)

    def _offsets(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return offsets and which of them are used, after a check of these."""
        used = np.asarray(True if mask is None else values_of(mask))
        offsets, used = np.broadcast_arrays(np.asarray(self.offset), used)
        wrong = used & ((offsets < 0) | (offsets >= self.array.size))
        if wrong.any():
            raise EmulationError(f"element {offsets[wrong].flat[0]} of an array of {self.array.size} elements")
        return offsets, used

    def load(self, mask: Any = None, other: Any = 0) -> Any:
        offsets, used = self._offsets(mask)
        found = np.where(used, self.array.reshape(-1)[np.where(used, offsets, 0)], np.asarray(other, self.array.dtype))
        return Tensor(found)

    def store(self, value: Any, mask: Any = None) -> None:
        offsets, used = self._offsets(mask)
        self.array.reshape(-1)[offsets[used]] = np.broadcast_to(values_of(value), used.shape)[used]

    def add(self, value: Any) -> Any:
        """Add atomically, and return the value before."""
        before = self.load()
        self.array.reshape(-1)[self.offset] += self.array.dtype.type(value)
        return before


class Shared:
    """A view of shared memory. All views share `unfenced`: what was written without a fence after it."""

    def __init__(self, values: np.ndarray, unfenced: list[np.ndarray]) -> None:
        self.values, self.unfenced, self.dtype = values, unfenced, values.dtype

    @property
    def is_fenced(self) -> bool:
        """Whether TMA and wgmma see all that was written."""
        return not any(np.may_share_memory(self.values, written) for written in self.unfenced)

    def index(self, i: Any) -> Shared:
        """Return element i of the first axis."""
        return Shared(self.values[int(i)], self.unfenced)

    def slice(self, start: Any, length: Any, dim: int = 0) -> Shared:
        """Return `length` elements of an axis."""
        if not 0 <= start <= start + length <= self.values.shape[dim]:
            raise EmulationError(f"slice {start} + {length} of an axis of {self.values.shape[dim]}")
        where = [slice(None)] * self.values.ndim
        where[dim] = slice(int(start), int(start + length))
        return Shared(self.values[tuple(where)], self.unfenced)

    def permute(self, order: Sequence[int]) -> Shared:
        """Return the view with its axes in another order."""
        return Shared(self.values.transpose(order), self.unfenced)

    def reshape(self, shape: Sequence[int]) -> Shared:
        """Return the view with another shape."""
        return Shared(self.values.reshape(shape), self.unfenced)

    def reinterpret(self, dtype: Any = None, shape: Sequence[int] = (), layout: Any = None) -> Shared:
        """Return the view as `[n, rows, width]`: wider rows are blocks side by side, as in swizzled memory."""
        del dtype, layout
        *_, rows, columns = self.values.shape
        number, _, width = map(int, shape)
        panels = self.values.reshape(number, width // columns, rows, columns)
        return _Panels(panels, self.unfenced)

    def load(self, layout: Any) -> Tensor:
        """Read into registers."""
        del layout
        return Tensor(self.values.copy())

    def store(self, value: Any) -> None:
        """Write from registers; TMA and wgmma see it after a fence."""
        self.values[...] = values_of(value)
        self.unfenced.append(self.values)

    def scatter(self, values: Tensor, indices: Tensor, axis: int) -> None:
        """Write values at indices of the only axis."""
        self.values[indices.values] = values.values
        self.unfenced.append(self.values)

    def atomic_scatter_add(self, values: Tensor, indices: Tensor, axis: int, mask: Tensor) -> None:
        np.add.at(self.values, indices.values[mask.values], values.values[mask.values])
        self.unfenced.append(self.values)


class _Panels(Shared):
    """Blocks of shared memory, `[..., panels, rows, columns]`, that are read as `[..., rows, panels * columns]`."""

    def __init__(self, panels: np.ndarray, unfenced: list[np.ndarray]) -> None:
        self.panels, self.unfenced, self.dtype = panels, unfenced, panels.dtype

    @property
    def values(self) -> np.ndarray:  # type: ignore[override]
        """A copy of what the memory holds now."""
        swapped = self.panels.swapaxes(-3, -2)
        return swapped.reshape(*swapped.shape[:-2], -1)

    @property
    def is_fenced(self) -> bool:
        return not any(np.may_share_memory(self.panels, written) for written in self.unfenced)

    def index(self, i: Any) -> Shared:
        return _Panels(self.panels[int(i)], self.unfenced)


class Barrier:
    """An mbarrier: a phase completes when all arrivals and all expected bytes have come."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = self.pending = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.pending = int(count)

    def arrive(self, count: int = 1, num_bytes: int = 0) -> None:
        if not self.count:
            raise EmulationError(f"{self.name} is used before it is initialized")
        if count > self.pending:
            raise EmulationError(f"{count} arrivals at {self.name}, which expects {self.pending} more in this phase")
        self.pending -= count
        self.bytes += num_bytes
        self._complete()

    def deliver(self, num_bytes: int) -> None:
        """Count bytes that a TMA load has written."""
        self.bytes -= num_bytes
        self._complete()

    def _complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def is_done(self, parity: Any) -> bool:
        """Whether the phase of this parity has completed."""
        return self.phase % 2 != int(parity) % 2


class Barriers(list):
    """Barriers of one allocation."""

    def index(self, i: Any) -> Barrier:  # type: ignore[override]
        return self[int(i)]


class Descriptor:
    """A tensor descriptor of a global array: blocks are read and written by TMA.

    Shape and strides are those of the array, unless given as in `jax_ep.core.kernel.Blocks`.
    """

    def __init__(
        self,
        array: np.ndarray,
        block_shape: Sequence[int],
        shape: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        layout: Any = None,
    ) -> None:
        self.array, self.block_shape, self.layout = array.reshape(-1), tuple(block_shape), layout
        self.shape = array.shape if shape is None else tuple(shape)
        self.strides = strides or [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def block(self, coordinates: Sequence[Any]) -> tuple[np.ndarray, tuple[slice, ...]]:
        """Return the part of the array that a block covers, as a view, and where this lies in the block."""
        starts = [int(x) for x in coordinates]
        ranges = [
            (min(max(start, 0), size), min(max(start + length, 0), size))
            for start, length, size in zip(starts, self.block_shape, self.shape, strict=True)
        ]
        within = tuple(slice(first - x, last - x) for (first, last), x in zip(ranges, starts, strict=True))
        sizes = [last - first for first, last in ranges]
        if 0 in sizes:
            return np.empty(sizes, self.dtype), within
        offset = sum(first * stride for (first, _), stride in zip(ranges, self.strides, strict=True)) % 2**64
        steps = [0 if size == 1 else stride for size, stride in zip(sizes, self.strides, strict=True)]
        last = offset + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
        if last >= self.array.size:
            raise EmulationError(f"TMA reaches element {last} of an array of {self.array.size} elements")
        steps = [step * self.dtype.itemsize for step in steps]
        return np.lib.stride_tricks.as_strided(self.array[offset:], sizes, steps), within
