"""Run Gluon kernels on NumPy arrays, with their asynchronous operations and barriers checked.

Triton's interpreter does not know Gluon. This emulator executes the Python body of a kernel once per program and
partition, with the language's operations replaced. Programs run one after another, so a kernel that finishes needs only
one resident program. The partitions of a program are threads, and one runs at a time; a seeded scheduler switches
between them at barriers and asynchronous operations.

Asynchronous operations take effect as late as their waits allow, and their targets hold NaN until then: a TMA load
writes when its barrier is about to complete, cp.async when its group is waited for, a wgmma reads shared memory when it
is waited for, and so does a TMA store. So a missing or misplaced wait gives NaN or wrong numbers instead of right ones
by luck. Deadlocks, accesses outside of an array, and TMA stores and wgmmas of shared memory without a fence are errors.
"""

from __future__ import annotations

import math
import random
import re
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.runtime.jit import KernelInterface

from . import inline_asm
from .gluon_memory import Barrier, Barriers, Descriptor, EmulationError, Pointer, Shared, Tensor, numpy_dtype, values_of


class _Product:
    """A wgmma in flight; operands in shared memory are read when it is waited for, and registers never change."""

    def __init__(self, a: Shared | Tensor, b: Shared, total: Any) -> None:
        self.operands, self.total = (a, b), total
        self.value: Tensor | None = None

    @property
    def values(self) -> np.ndarray:
        """Raise an error: no kernel may use registers of a product in flight."""
        raise EmulationError("registers of a wgmma are used before it is waited for")

    def finish(self) -> Tensor:
        """Read the operands, after the product that gives the accumulator."""
        total = self.total.value if isinstance(self.total, _Product) else self.total
        a, b = (operand.values.astype(np.float32) for operand in self.operands)
        product = a @ b
        self.value = Tensor(product if self.total is None else values_of(total) + product)
        return self.value


class _Partition:
    """One partition of a program: a thread, which runs when the scheduler lets it."""

    def __init__(self, number: int, num_warps: int) -> None:
        self.number, self.num_warps = number, num_warps
        self.stores: list[Callable[[], None]] = []
        self.copies: list[Callable[[], None]] = []
        self.groups: list[list[Callable[[], None]]] = []
        self.products: list[_Product] = []
        self.waits_for: tuple[Callable[[], bool], str] | None = None
        self.timeout_ns: int | None = None  # of a wait for another device
        self.gave_up = False
        self.may_run = threading.Event()
        self.is_finished = False


class _Program:
    """One program: its partitions, and the asynchronous operations in flight."""

    def __init__(self, number: int, count: int, num_warps: int, seed: int) -> None:
        self.number, self.count, self.num_warps = number, count, num_warps
        self.random = random.Random(seed)
        self.bias = self.random.choice((0, 0.95))  # how often the favorite runs, if it can; 0: all take turns
        self.loads: list[Callable[[], None]] = []
        self.unfenced: list[np.ndarray] = []
        self.num_barriers = 0
        self.current = _Partition(0, num_warps)
        self.favorite, self.partitions = self.current, [self.current]
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
        while self.error is None and self.loads and self.random.random() < 0.3:
            self._finish_load()
        while self.error is None:
            if ready := self._ready():
                favored = self.favorite in ready and self.random.random() < self.bias
                self.current = self.favorite if favored else self.random.choice(ready)
                return
            if self.loads:
                self._finish_load()
                continue
            if outside := [p for p in self.partitions if p.timeout_ns is not None]:
                self._await_others(outside)
                continue
            waits = (f"partition {p.number} waits for {p.waits_for[1]}" for p in self.partitions if p.waits_for)
            self.error = EmulationError(f"program {self.number} is deadlocked: {'; '.join(waits) or 'no partition'}")
        self.current = next(p for p in self.partitions if not p.is_finished)

    def _ready(self) -> list[_Partition]:
        """Return the partitions that can go on."""
        return [p for p in self.partitions if not p.is_finished and (p.waits_for is None or p.waits_for[0]())]

    def _await_others(self, partitions: Sequence[_Partition]) -> None:
        """Wait until a partition that waits for another device can go on, or its wait expires."""
        begin_wait, check_aborted = cast("_Waits", _waits)
        wait = begin_wait(min(p.timeout_ns for p in partitions if p.timeout_ns is not None))
        while not self._ready():
            if wait.expired():
                for part in partitions:
                    part.gave_up = True
                return
            check_aborted()
            time.sleep(_POLL_S)
        wait.succeeded()

    def _finish_load(self) -> None:
        try:
            self.loads.pop(self.random.randrange(len(self.loads)))()
        except EmulationError as error:  # of whichever partition began it
            self.error = error

    def specialize(self, functions: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], warps: Sequence[int]) -> None:
        """Run the partitions of `warp_specialize`; the first one has the warps of the program."""
        main = self.current
        sizes = (self.num_warps, *warps)
        parts = [_Partition(i, size) for i, size in enumerate(sizes)]
        self.favorite, self.partitions = self.random.choice(parts), parts
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
        main.groups = [group for part in parts for group in (*part.groups, part.copies) if group]
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
                with np.errstate(all="ignore"):  # As on a GPU.
                    function(*arguments)
        except BaseException as error:
            self.error = self.error or error
        part.is_finished = True
        if all(p.is_finished for p in self.partitions):
            main.may_run.set()
            return
        self._choose()
        self.current.may_run.set()


class _Active(threading.local):
    program: _Program


_active = _Active()
_POLL_S = 2e-4
type _Waits = tuple[Callable[[int | None], Any], Callable[[], None]]
_waits: _Waits | None = None


def wait_by(begin_wait: Callable[[int | None], Any], check_aborted: Callable[[], None]) -> None:
    """Let polls wait for other devices, as those of Triton's interpreter do; see patches.py."""
    global _waits
    _waits = begin_wait, check_aborted


def _program() -> _Program:
    return _active.program


# --- operations -------------------------------------------------------------------------------------------------------


def _allocate(dtype: Any, shape: Sequence[int], layout: Any = None) -> Shared:
    kind = numpy_dtype(dtype)
    values = np.full(np.prod([*map(int, shape), kind.itemsize]), 0xFF, np.uint8).view(kind).reshape(shape)
    return Shared(values, _program().unfenced)


def _allocate_mbarrier(batch: int = 1) -> Barriers:
    program = _program()
    program.num_barriers += 1
    return Barriers(Barrier(f"barrier {i} of allocation {program.num_barriers}") for i in range(int(batch)))


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
    if not source.is_fenced:
        raise EmulationError("TMA stores shared memory that was written without fence_async_shared")
    inside, within = descriptor.block(coordinates)

    def finish() -> None:
        inside[...] = source.values[within]

    _program().current.stores.append(finish)
    _program().switch()


def _store_wait(pendings: int, *, read_only: bool = True) -> None:
    del read_only
    stores = _program().current.stores
    while len(stores) > int(pendings):
        stores.pop(0)()


def _copy(target: Shared, source: Pointer, mask: Any = None) -> None:
    """Copy by cp.async; the copies of a group end when it is waited for."""
    target.values.view(np.uint8)[...] = 0xFF  # NaN until the copy is done
    _program().current.copies.append(lambda: target.store(source.load(mask)))


def _commit_copies() -> None:
    part = _program().current
    part.groups.append(part.copies)
    part.copies = []
    _program().switch()


def _arrive_after_copies(barrier: Barrier) -> None:
    """Let all threads of this partition arrive once its copies have ended."""
    part = _program().current
    copies, part.copies = part.copies, []

    def finish() -> None:
        for copy in copies:
            copy()
        barrier.arrive(32 * part.num_warps)

    _program().loads.append(finish)
    _program().switch()


def _wait_for_copies(num_outstanding: int) -> None:
    """Finish all but the newest groups of this partition."""
    _program().switch()
    groups = _program().current.groups
    while len(groups) > int(num_outstanding):
        for copy in groups.pop(0):
            copy()


def _poll(pointer: Pointer, expected: Any, *, timeout_ns: Any = None, **_: Any) -> Tensor:
    """Wait for values; there is no timeout without other devices, since a wait for nothing is a deadlock."""
    part, arrived = _program().current, np.zeros(np.shape(pointer.offset), np.bool_)

    def is_done() -> bool:
        arrived[...] |= pointer.load().values == values_of(expected)  # what has arrived once stays
        return bool(arrived.all()) or part.gave_up

    part.timeout_ns = int(timeout_ns) if _waits and timeout_ns is not None else None
    _program().until(is_done, f"{values_of(expected)} in global memory")
    part.timeout_ns, part.gave_up = None, False
    return Tensor(arrived)


def _fence() -> None:
    _program().unfenced.clear()


def _mma(a: Shared | Tensor, b: Shared, total: Any, *, use_acc: Any = True, is_async: bool = False, **_: Any) -> Any:
    if not all(operand.is_fenced for operand in (a, b) if isinstance(operand, Shared)):
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
    (re.compile(r"cp\.async\.mbarrier\.arrive\.noinc\S* \[\$(\d+)\]"), "arrive later"),
    (re.compile(r"red\.release\.gpu\.global\.add\.u32 \[\$(\d+)\], 1"), "count"),
    (re.compile(r"st\.shared\.v4\.b32 \[\$(\d+)\], \{(.+)\}"), "store"),
    (re.compile(r"ld\.shared\.v4\.b32 \{(.+)\}, \[\$(\d+)\]"), "load"),
    (re.compile(r"shfl\.sync\.idx\.b32 \$(\d+), (\w+), 0, 31, -1"), "broadcast"),
    (re.compile(r"\.reg |mov\.u32 lane, %laneid|setp\.eq\.u32 p, lane, 0|bar\.warp\.sync -1|bra \w+|^$"), "skip"),
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
        elif kind == "arrive later" and match:
            _arrive_after_copies(places[int(match[1])])
        elif kind == "count" and match:
            places[int(match[1])].add(_program().current.num_warps)
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


def _inline_asm_elementwise(
    asm: str, constraints: str, arguments: Sequence[Tensor], dtypes: Any, is_pure: bool, pack: int
) -> Any:
    """Run assembly for each element: 32-bit registers, one per element."""
    if pack != 1:
        raise NotImplementedError(f"the emulator does not know pack={pack}, expected 1")
    del is_pure
    values = np.broadcast_arrays(*(x.values for x in arguments))
    registers = inline_asm.run(asm, constraints, [x.reshape(-1).view(np.uint32) for x in values])
    shape = values[0].shape
    found = (Tensor(x.view(numpy_dtype(dtype)).reshape(shape)) for x, dtype in zip(registers, dtypes, strict=True))
    return tuple(found)


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: Tensor(np.asarray(function(*map(values_of, operands))))


def _arange(start: int, end: int, layout: Any = None) -> Tensor:
    del layout
    return Tensor(np.arange(int(start), int(end), dtype=np.int32))


_LANGUAGE: dict[str, Any] = {
    "allocate_shared_memory": _allocate,
    "arange": _arange,
    "atomic_add": lambda pointer, value, **_: pointer.add(value),
    "atomic_load": lambda pointer, **_: pointer.load(),
    "atomic_poll": _poll,
    "atomic_store": lambda pointer, value, **_: pointer.store(value),
    "barrier": lambda: None,
    "cast": lambda x, dtype: Tensor(np.asarray(values_of(x), numpy_dtype(dtype))),
    "convert_layout": lambda x, layout: x,
    "cumsum": lambda x, axis: Tensor(np.cumsum(x.values, axis, x.dtype)),
    "debug_barrier": lambda: None,
    "erf": _elementwise(np.vectorize(math.erf, otypes=[np.float32])),
    "exp2": _elementwise(np.exp2),
    "expand_dims": lambda x, axis: Tensor(np.expand_dims(x.values, axis)),
    "full": lambda shape, value, dtype, layout=None: Tensor(np.full(shape, value, numpy_dtype(dtype))),
    "inline_asm": _inline_asm,
    "inline_asm_elementwise": _inline_asm_elementwise,
    "join": lambda a, b: Tensor(np.stack((a.values, b.values), -1)),
    "load": lambda pointer, mask=None, other=0, **_: pointer.load(mask, other),
    "max": lambda x, axis: Tensor(np.asarray(x.values.max(axis))),
    "max_contiguous": lambda x, _: x,
    "maximum": _elementwise(np.maximum),
    "min": lambda x, axis: Tensor(np.asarray(x.values.min(axis))),
    "minimum": _elementwise(np.minimum),
    "multiple_of": lambda x, _: x,
    "num_programs": lambda axis: _program().count,
    "permute": lambda x, order: Tensor(x.values.transpose(order)),
    "program_id": lambda axis: _program().number,
    "reshape": lambda x, shape: Tensor(x.values.reshape(shape)),
    "sigmoid": _elementwise(lambda x: 1 / (1 + np.exp(-x))),
    "split": lambda x: (Tensor(x.values[..., 0]), Tensor(x.values[..., 1])),
    "static_assert": lambda condition: None,
    "static_range": range,
    "store": lambda pointer, value, mask=None: pointer.store(value, mask),
    "sum": lambda x, axis: Tensor(np.asarray(x.values.sum(axis, x.dtype))),
    "warp_specialize": lambda parts, warps, registers=(): _program().specialize(parts, warps),
    "where": _elementwise(np.where),
    "zeros": lambda shape, dtype, layout=None: Tensor(np.zeros(shape, numpy_dtype(dtype))),
}
_MBARRIER: dict[str, Any] = {
    "allocate_mbarrier": _allocate_mbarrier,
    "init": lambda barrier, count: barrier.init(count),
    "expect": lambda barrier, num_bytes: barrier.arrive(1, int(num_bytes)),
}
_TMA = {"async_load": _async_load, "async_store": _async_store, "store_wait": _store_wait}
_ASYNC_COPY = {"async_load": _copy, "commit_group": _commit_copies, "wait_group": _wait_for_copies}
_INDICES: dict[str, Any] = {  # the functions of indices.py
    "indices": lambda number: _arange(0, number),
    "indices_in_row": lambda number: Tensor(_arange(0, number).values[None, :]),
    "as_column": lambda x: Tensor(x.values[:, None]),
}
_FUNCTIONS = {
    mma_v2: lambda a, b, total: Tensor(total.values + a.values.astype(np.float32) @ b.values.astype(np.float32)),
    hopper.fence_async_shared: _fence,
    hopper.warpgroup_mma: _mma,
    hopper.warpgroup_mma_init: lambda total: total,
    hopper.warpgroup_mma_wait: _mma_wait,
}


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


class _Kernels:
    """A module of kernels, whose functions are emulated."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return _replaced(getattr(self._module, name))


_MODULES = {gl: _LANGUAGE, tl: _LANGUAGE, hopper.mbarrier: _MBARRIER, hopper.tma: _TMA, async_copy: _ASYNC_COPY}


def _replaced(value: Any) -> Any:
    """Return what stands for a global of a kernel's module."""
    if isinstance(value, KernelInterface):  # also a function of Triton, which Gluon calls
        return emulated(value)
    if isinstance(value, gl.constexpr):
        return value.value
    if isinstance(value, types.ModuleType) and value in _MODULES:
        return _Module(value, _MODULES[value])
    if isinstance(value, types.ModuleType) and (value.__package__ or "").endswith(".kernels"):
        return _Kernels(value)
    if getattr(value, "__module__", "").endswith(".kernels.indices"):
        return _INDICES[value.__name__]
    return _FUNCTIONS.get(value, value) if callable(value) else value


_known: dict[Any, Callable[..., Any]] = {}


def emulated(function: Any) -> Callable[..., Any]:
    """Return the Python function of a jitted one, with its globals replaced."""
    inner = function.fn
    if inner not in _known:
        names: dict[str, Any] = {"__builtins__": __builtins__}
        emulated = types.FunctionType(inner.__code__, names, inner.__name__, inner.__defaults__, inner.__closure__)
        _known[inner] = emulated  # before its globals, which may name it
        used = set(inner.__code__.co_names) & inner.__globals__.keys() - names.keys()
        names |= {name: _replaced(inner.__globals__[name]) for name in used}
    return _known[inner]


def argument(buffer: Any, blocks: tuple[tuple[int, ...], ...] | None) -> Any:
    """Return an argument of a kernel; `blocks` are shape, strides and block shape of its descriptor."""
    array = buffer.bytes.view(numpy_dtype(tl.str_to_ty(buffer.dtype, None)))
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
        emulated(kernel)(*given, **constants)
        if program.current.stores or program.current.groups or program.loads:
            raise EmulationError(f"program {number} ends with asynchronous operations in flight; wait for them")
