"""Run Gluon kernels on NumPy arrays, with their asynchronous operations and barriers checked.

Triton's interpreter does not know Gluon. This emulator executes the Python body of a kernel once per program and
partition, with the language's operations replaced. Programs run one after another, so a kernel that finishes needs only
one resident program. The partitions of a program are threads, and one runs at a time; a seeded scheduler switches
between them at barriers and asynchronous operations.

Asynchronous operations take effect as late as their waits allow, and their targets hold NaN until then: a TMA load
writes when its barrier is about to complete, a wgmma reads its operands when it is waited for, a TMA store reads shared
memory when it is waited for. So a missing or misplaced wait gives NaN or wrong numbers instead of right ones by luck.
Deadlocks, memory accesses outside of an array, and TMA stores of shared memory without a fence are errors.
"""

from __future__ import annotations

import math
import operator
import random
import re
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

_DTYPES = {
    "int1": np.dtype(np.bool_),
    "int8": np.dtype(np.int8),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "uint8": np.dtype(np.uint8),
    "uint32": np.dtype(np.uint32),
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
}


class EmulationError(RuntimeError):
    """A kernel broke a rule of the memory model, or waits forever."""


def _numpy_dtype(dtype: Any) -> np.dtype:
    return dtype if isinstance(dtype, np.dtype) else _DTYPES[str(dtype)]


def _values(x: Any) -> Any:
    return x.values if isinstance(x, Tensor) else x


class Tensor:
    """Values in registers. Layouts are not modeled."""

    __array_ufunc__ = None  # NumPy scalars leave arithmetic to the methods below.

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    def to(self, dtype: Any) -> Tensor:
        """Convert to a dtype of Gluon or NumPy."""
        return Tensor(self.values.astype(_numpy_dtype(dtype)))


def _binary(name: str) -> Callable[[Any, Any], Any]:
    apply = getattr(operator, name)

    def run(self: Tensor, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        return Tensor(np.asarray(apply(self.values, _values(other))))

    return run


def _reflected(name: str) -> Callable[[Any, Any], Any]:
    apply = getattr(operator, name)
    return lambda self, other: Tensor(np.asarray(apply(other, self.values)))


for _name in ("add", "sub", "mul", "floordiv", "mod", "and_", "or_", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Tensor, f"__{_name.strip('_')}__", _binary(_name))
for _name in ("add", "sub", "mul"):
    setattr(Tensor, f"__r{_name}__", _reflected(_name))


class Pointer:
    """An element, or a tensor of elements, of an array in global memory."""

    __array_ufunc__ = None

    def __init__(self, array: np.ndarray, offset: Any = 0) -> None:
        self.array, self.offset = array, offset

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.array, self.offset + _values(other))

    __radd__ = __add__

    def load(self, mask: Any = None, other: Any = 0) -> Any:
        used = np.asarray(True if mask is None else _values(mask))
        offsets, used = np.broadcast_arrays(np.asarray(self.offset), used)
        wrong = used & ((offsets < 0) | (offsets >= self.array.size))
        if wrong.any():
            raise EmulationError(f"element {offsets[wrong].flat[0]} of an array of {self.array.size} elements")
        found = np.where(used, self.array.reshape(-1)[np.where(used, offsets, 0)], np.asarray(other, self.array.dtype))
        return Tensor(found) if found.ndim else found[()]

    def add(self, value: Any) -> Any:
        """Add atomically, and return the value before."""
        before = self.load()
        self.array.reshape(-1)[self.offset] += self.array.dtype.type(value)
        return before


class Shared:
    """A view of shared memory. Views of one allocation share `state`, which knows of stores without a fence."""

    def __init__(self, values: np.ndarray, state: dict[str, bool]) -> None:
        self.values, self.state, self.dtype = values, state, values.dtype

    def index(self, i: Any) -> Shared:
        """Return element i of the first axis."""
        return Shared(self.values[int(i)], self.state)

    def slice(self, start: Any, length: Any, dim: int = 0) -> Shared:
        """Return `length` elements of an axis."""
        if not 0 <= start <= start + length <= self.values.shape[dim]:
            raise EmulationError(f"slice {start} + {length} of an axis of {self.values.shape[dim]}")
        where = [slice(None)] * self.values.ndim
        where[dim] = slice(int(start), int(start + length))
        return Shared(self.values[tuple(where)], self.state)

    def permute(self, order: Sequence[int]) -> Shared:
        """Return the view with its axes in another order."""
        return Shared(self.values.transpose(order), self.state)

    def reshape(self, shape: Sequence[int]) -> Shared:
        """Return the view with another shape."""
        return Shared(self.values.reshape(shape), self.state)

    def load(self, layout: Any) -> Tensor:
        """Read into registers."""
        del layout
        return Tensor(self.values.copy())

    def store(self, value: Any) -> None:
        """Write from registers; TMA and wgmma see it after a fence."""
        self.values[...] = _values(value)
        self.state["fenced"] = False


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


class _Barriers(list):
    def index(self, i: Any) -> Barrier:  # type: ignore[override]
        """Return barrier i."""
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


class _Product:
    """A wgmma in flight; its operands are read when it is waited for."""

    def __init__(self, a: Shared, b: Shared, total: Any) -> None:
        self.operands, self.total = (a, b), total
        self.value: Tensor | None = None

    def finish(self) -> Tensor:
        """Read the operands, after the product that gives the accumulator."""
        total = self.total.value if isinstance(self.total, _Product) else self.total
        a, b = (operand.values.astype(np.float32) for operand in self.operands)
        product = a @ b
        self.value = Tensor(product if self.total is None else _values(total) + product)
        return self.value


class _Partition:
    """One partition of a program: a thread, which runs when the scheduler lets it."""

    def __init__(self, number: int, num_warps: int) -> None:
        self.number, self.num_warps = number, num_warps
        self.stores: list[Callable[[], None]] = []
        self.products: list[_Product] = []
        self.waits_for: tuple[Callable[[], bool], str] | None = None
        self.may_run = threading.Event()
        self.is_finished = False


class _Program:
    """One program: its partitions, and the asynchronous operations in flight."""

    def __init__(self, number: int, count: int, num_warps: int, seed: int) -> None:
        self.number, self.count, self.num_warps = number, count, num_warps
        self.random = random.Random(seed)
        self.loads: list[Callable[[], None]] = []
        self.states: list[dict[str, bool]] = []
        self.current = _Partition(0, num_warps)
        self.partitions = [self.current]
        self.error: BaseException | None = None

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Let others run until a condition holds."""
        me = self.current
        me.waits_for = condition, what
        self.switch()
        me.waits_for = None

    def switch(self) -> None:
        """Let any partition that can go on run next, this one included."""
        me = self.current
        self._choose()
        if self.current is not me:
            self.current.may_run.set()
            me.may_run.wait()
        me.may_run.clear()
        if self.error is not None:
            raise EmulationError("another partition failed")

    def _choose(self) -> None:
        while self.loads and self.random.random() < 0.3:
            self._finish_load()
        while self.error is None:
            ready = [p for p in self.partitions if not p.is_finished and (p.waits_for is None or p.waits_for[0]())]
            if ready:
                self.current = self.random.choice(ready)
                return
            if self.loads:
                self._finish_load()
                continue
            waits = (f"partition {p.number} waits for {p.waits_for[1]}" for p in self.partitions if p.waits_for)
            self.error = EmulationError(f"program {self.number} is deadlocked: {'; '.join(waits) or 'no partition'}")
        self.current = self.partitions[0]

    def _finish_load(self) -> None:
        self.loads.pop(self.random.randrange(len(self.loads)))()

    def specialize(self, functions: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], warps: Sequence[int]) -> None:
        """Run the partitions of `warp_specialize`; the first one has the warps of the program."""
        main = self.current
        sizes = (self.num_warps, *warps)
        parts = [_Partition(i, size) for i, size in enumerate(sizes)]
        self.partitions = parts
        threads = [
            threading.Thread(target=self._run, args=(part, function, arguments, main), daemon=True)
            for part, (function, arguments) in zip(parts, functions, strict=True)
        ]
        for thread in threads:
            thread.start()
        self._choose()
        self.current.may_run.set()
        main.may_run.wait()
        main.may_run.clear()
        self.partitions, self.current = [main], main
        main.stores = [store for part in parts for store in part.stores]
        if self.error is not None:
            raise self.error

    def _run(
        self, part: _Partition, function: Callable[..., Any], arguments: tuple[Any, ...], main: _Partition
    ) -> None:
        part.may_run.wait()
        part.may_run.clear()
        _active.program = self
        try:
            if self.error is None:
                function(*arguments)
        except BaseException as error:
            self.error = self.error or error
        part.is_finished = True
        left = [p for p in self.partitions if not p.is_finished]
        if not left:
            main.may_run.set()
            return
        if self.error is None:
            self._choose()
        if self.error is not None:
            self.current = left[0]
        self.current.may_run.set()


class _Active(threading.local):
    program: _Program


_active = _Active()


def _program() -> _Program:
    return _active.program


# --- operations -------------------------------------------------------------------------------------------------------


def _allocate(dtype: Any, shape: Sequence[int], layout: Any = None) -> Shared:
    kind = _numpy_dtype(dtype)
    values = np.full(np.prod([*map(int, shape), kind.itemsize]), 0xFF, np.uint8).view(kind).reshape(shape)
    state = {"fenced": True}
    _program().states.append(state)
    return Shared(values, state)


def _allocate_mbarrier(batch: int = 1) -> _Barriers:
    number = len(_program().states)
    _program().states.append({"fenced": True})
    return _Barriers(Barrier(f"barrier {i} of allocation {number}") for i in range(int(batch)))


def _wait(barrier: Barrier, parity: Any) -> None:
    _program().until(lambda: barrier.is_done(parity), f"phase {int(parity) % 2} of {barrier.name}")


def _arrive(barrier: Barrier, count: int = 1) -> None:
    barrier.arrive(int(count))
    _program().switch()


def _async_load(descriptor: Descriptor, coordinates: Sequence[Any], barrier: Barrier, target: Shared) -> None:
    inside, within = descriptor.block(coordinates)
    values = target.values
    values.view(np.uint8)[...] = 0xFF  # NaN until the load is done

    def finish() -> None:
        values[...] = np.zeros((), values.dtype)
        values[within] = inside
        barrier.deliver(values.nbytes)

    _program().loads.append(finish)
    _program().switch()


def _async_store(descriptor: Descriptor, coordinates: Sequence[Any], source: Shared) -> None:
    if not source.state["fenced"]:
        raise EmulationError("TMA stores shared memory that was written without fence_async_shared")
    inside, within = descriptor.block(coordinates)

    def finish() -> None:
        inside[...] = source.values[within]

    _program().current.stores.append(finish)
    _program().switch()


def _store_wait(pendings: int) -> None:
    stores = _program().current.stores
    while len(stores) > int(pendings):
        stores.pop(0)()


def _fence() -> None:
    for state in _program().states:
        state["fenced"] = True


def _mma(a: Shared, b: Shared, total: Any, *, use_acc: Any = True, is_async: bool = False, **_: Any) -> Any:
    if not (a.state["fenced"] and b.state["fenced"]):
        raise EmulationError("wgmma reads shared memory that was written without fence_async_shared")
    product = _Product(a, b, total if use_acc else None)
    if not is_async:
        return product.finish()
    _program().current.products.append(product)
    _program().switch()
    return product


def _mma_wait(num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
    """Finish all but the newest products of this partition; what is still in flight stays in `deps`."""
    _program().switch()
    products = _program().current.products
    while len(products) > int(num_outstanding):
        products.pop(0).finish()
    found = [dep.value if isinstance(dep, _Product) and dep.value is not None else dep for dep in deps]
    return found[0] if len(found) == 1 else tuple(found)


_STATEMENTS = [
    (re.compile(r"mbarrier\.try_wait\.parity\S* \w+, \[\$(\d+)\], \$(\d+)"), "wait"),
    (re.compile(r"mbarrier\.arrive\S* _, \[\$(\d+)\]"), "arrive"),
    (re.compile(r"st\.shared\.v4\.b32 \[\$(\d+)\], \{(.+)\}"), "store"),
    (re.compile(r"ld\.shared\.v4\.b32 \{(.+)\}, \[\$(\d+)\]"), "load"),
    (re.compile(r"shfl\.sync\.idx\.b32 \$(\d+), (\w+), 0, 31, -1"), "broadcast"),
    (re.compile(r"\.reg |mov\.u32 lane, %laneid|setp\.eq\.u32 p, lane, 0|bra \w+|^$"), "skip"),
]


def _inline_asm(asm: str, constraints: str, arguments: Sequence[Any], dtypes: Any = ()) -> Any:
    """Run assembly of a warp whose lanes agree, statement by statement: barriers, and words in shared memory."""
    del constraints
    kinds = dtypes if isinstance(dtypes, list | tuple) else (dtypes,)
    places: list[Any] = [None] * len(kinds) + list(arguments)
    registers: dict[str, Any] = {}
    for statement in re.sub(r"\}\s*$|^\s*\{", "", asm.strip()).split(";"):
        text = re.sub(r"^(?:\w+: )?(?:@!?\w+ )?", "", statement.strip())
        kind, match = next(((k, m) for pattern, k in _STATEMENTS if (m := pattern.match(text))), ("", None))
        if kind == "wait" and match:
            _wait(places[int(match[1])], places[int(match[2])])
        elif kind == "arrive" and match:
            _arrive(places[int(match[1])], _program().current.num_warps)
        elif kind == "store" and match:
            places[int(match[1])].values[...] = [places[int(i)] for i in re.findall(r"\$(\d+)", match[2])]
        elif kind == "load" and match:
            registers |= dict(zip(re.findall(r"\w+", match[1]), places[int(match[2])].values.tolist(), strict=True))
        elif kind == "broadcast" and match:
            places[int(match[1])] = registers[match[2]]
        elif kind != "skip":
            raise NotImplementedError(f"the emulator does not know the instruction {text!r}")
    results = tuple(places[: len(kinds)])
    return results if len(results) != 1 else results[0]


def _warp_specialize(parts: Sequence[Any], warps: Sequence[int], registers: Sequence[int] = ()) -> None:
    del registers
    _program().specialize(parts, warps)


def _load(pointer: Pointer, mask: Any = None, other: Any = 0, **_: Any) -> Any:
    return pointer.load(mask, other)


_LANGUAGE: dict[str, Any] = {
    "allocate_shared_memory": _allocate,
    "arange": lambda start, end, layout=None: Tensor(np.arange(start, end, dtype=np.int32)),
    "atomic_add": lambda pointer, value, **_: pointer.add(value),
    "expand_dims": lambda x, axis: Tensor(np.expand_dims(x.values, axis)),
    "inline_asm": _inline_asm,
    "load": _load,
    "num_programs": lambda axis: _program().count,
    "program_id": lambda axis: _program().number,
    "static_range": range,
    "warp_specialize": _warp_specialize,
    "zeros": lambda shape, dtype, layout=None: Tensor(np.zeros(shape, _numpy_dtype(dtype))),
}
_MBARRIER: dict[str, Any] = {
    "allocate_mbarrier": _allocate_mbarrier,
    "init": lambda barrier, count: barrier.init(count),
    "expect": lambda barrier, num_bytes: barrier.arrive(1, int(num_bytes)),
}
_TMA = {"async_load": _async_load, "async_store": _async_store, "store_wait": _store_wait}
_FUNCTIONS = {hopper.fence_async_shared: _fence, hopper.warpgroup_mma: _mma, hopper.warpgroup_mma_wait: _mma_wait}


class _Module:
    """A module of the language with its operations replaced; layouts and dtypes are its own."""

    def __init__(self, module: types.ModuleType, functions: dict[str, Any]) -> None:
        self._module, self._functions = module, functions

    def __getattr__(self, name: str) -> Any:
        if name in self._functions:
            return self._functions[name]
        found = getattr(self._module, name)
        if callable(found) and not isinstance(found, type):
            raise NotImplementedError(f"the emulator does not know {self._module.__name__}.{name}")
        return found


_MODULES = {gl: _LANGUAGE, hopper.mbarrier: _MBARRIER, hopper.tma: _TMA}


def _replaced(value: Any) -> Any:
    """Return what stands for a global of a kernel's module."""
    if isinstance(value, gluon._runtime.GluonJITFunction):
        return _emulated(value)
    if isinstance(value, gl.constexpr):
        return value.value
    if isinstance(value, types.ModuleType) and value in _MODULES:
        return _Module(value, _MODULES[value])
    return _FUNCTIONS.get(value, value) if callable(value) else value


_known: dict[Any, Callable[..., Any]] = {}


def _emulated(function: Any) -> Callable[..., Any]:
    """Return the Python function of a `gluon.jit` function, with its globals replaced."""
    if function not in _known:
        inner = function.fn
        names: dict[str, Any] = {"__builtins__": __builtins__}
        emulated = types.FunctionType(inner.__code__, names, inner.__name__, inner.__defaults__, inner.__closure__)
        _known[function] = emulated  # before its globals, which may name it
        used = set(inner.__code__.co_names) & inner.__globals__.keys() - names.keys()
        names |= {name: _replaced(inner.__globals__[name]) for name in used}
    return _known[function]


def argument(buffer: Any, blocks: tuple[tuple[int, ...], ...] | None) -> Any:
    """Return an argument of a kernel; `blocks` are shape, strides and block shape of its descriptor."""
    array = buffer.bytes.view(_numpy_dtype(tl.str_to_ty(buffer.dtype, None)))
    if blocks is None:
        return Pointer(array)
    shape, strides, block_shape = blocks
    return Descriptor(array, block_shape, shape, strides)


def run(kernel: Any, num_programs: int, *arguments: Any, num_warps: int = 4, seed: int = 0, **constants: Any) -> None:
    """Run a kernel in place on its arrays.

    Args:
      kernel: a `gluon.jit` function.
      num_programs: size of the grid.
      *arguments: NumPy arrays, which become pointers, `Descriptor`s, and numbers.
      num_warps: warps of the first partition.
      seed: of the order in which partitions and TMA loads take turns.
      **constants: `gl.constexpr` parameters.

    Raises:
      EmulationError: a deadlock, an access outside of an array, a missing fence, or stores that are never waited for.
      NotImplementedError: an operation that the emulator does not know.
    """
    given = [Pointer(x) if isinstance(x, np.ndarray) else x for x in arguments]
    for number in range(num_programs):
        program = _active.program = _Program(number, num_programs, num_warps, seed * 65537 + number)
        _emulated(kernel)(*given, **constants)
        if program.current.stores or program.loads:
            raise EmulationError(f"program {number} ends with TMA operations in flight; wait for them")
