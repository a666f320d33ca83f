"""Patches that make Triton 3.9's interpreter compute as a GPU does, and share CPU cores with its peers.

Only worker.py loads this file, because it patches Triton for the whole process. Without the patches the interpreter
truncates float32 to bfloat16, mishandles the carry when it rounds to FP8, computes on the bits of bfloat16 as if they
were integers, and turns a scalar comparison into an integer when it broadcasts it.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_SMALL_FLOATS = {
    tl.bfloat16: np.dtype(ml_dtypes.bfloat16),
    tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
    tl.float8e5: np.dtype(ml_dtypes.float8_e5m2),
}
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 50e-6, 2e-3


class Wait(Protocol):
    """One wait; see activity.py."""

    def expired(self) -> bool:
        """Record an unsuccessful poll; return whether the wait has expired."""

    def succeeded(self) -> None:
        """Mark the end of a successful wait."""


def apply(
    begin_wait: Callable[[int | None], Wait],
    check_aborted: Callable[[], None],
    run_asm: Callable[[str, str, Sequence[np.ndarray]], Sequence[np.ndarray]],
) -> None:
    """Patch Triton's interpreter in place.

    Args:
      begin_wait: called at the start of each poll loop, with its timeout in nanoseconds.
      check_aborted: called between polls; may raise.
      run_asm: see inline_asm.py.
    """
    builder = interpreter.InterpreterBuilder
    builder.cast_impl = _cast
    builder.create_fp_to_fp = _convert_float(builder.create_fp_to_fp)
    builder.binary_op = _decoded(builder.binary_op, num_operands=2)
    builder.unary_op = _decoded(builder.unary_op, num_operands=1)
    builder.create_fma = _decoded(builder.create_fma, num_operands=3)
    builder.create_dot = _decoded(builder.create_dot, num_operands=2)
    builder.create_inline_asm = _inline_asm(run_asm)
    builder.create_splat = _keep_booleans(builder.create_splat)
    builder.create_atomic_poll = _poll(begin_wait, check_aborted)
    # Enable tl.device_assert, but not the overflow checks of Triton's debug builds.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=True, sanitize_overflow=False)
    interpreter.ReduceOps.apply_impl = _reduce_decoded(interpreter.ReduceOps.apply_impl)
    interpreter.ScanOps.apply_impl = _reduce_decoded(interpreter.ScanOps.apply_impl)
    executor = interpreter.GridExecutor
    # Arguments need neither torch nor copies.
    executor._init_args_hst = lambda self, args, kwargs: (list(args), dict(kwargs))
    executor._restore_args_dev = lambda self, *_: None
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)


def _cast(self: Any, source: Any, dtype: Any) -> Any:
    values, target = _decode(source), dtype.scalar
    if target in _SMALL_FLOATS:
        small = _SMALL_FLOATS[target]
        if target.primitive_bitwidth == 8:  # NVIDIA's conversions saturate; NaN stays NaN.
            largest = float(ml_dtypes.finfo(small).max)
            values = np.clip(values.astype(np.float32), -largest, largest)
        data = values.astype(small).view(interpreter._get_np_dtype(target))
    else:
        data = values.astype(interpreter._get_np_dtype(dtype))
    return interpreter.TensorHandle(data, target)


def _convert_float(original: Callable[..., Any]) -> Callable[..., Any]:
    to_nearest = (None, interpreter._ir.ROUNDING_MODE.RTNE)

    def convert(self: Any, source: Any, dtype: Any, rounding: Any) -> Any:
        return _cast(self, source, dtype) if rounding in to_nearest else original(self, source, dtype, rounding)

    return convert


def _decode(handle: Any) -> np.ndarray:
    small = _SMALL_FLOATS.get(handle.dtype.scalar)
    return handle.data if small is None else handle.data.view(small)


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar not in _SMALL_FLOATS:
        return handle
    return interpreter.TensorHandle(_decode(handle).astype(np.float32), tl.float32)


def _decoded(original: Callable[..., Any], num_operands: int) -> Callable[..., Any]:
    """Compute on float32 values instead of the bits of small floats, and round the result to the operands' type."""

    def operation(self: Any, *args: Any) -> Any:
        dtype = args[num_operands - 1].dtype.scalar
        if dtype not in _SMALL_FLOATS and args[0].dtype.scalar not in _SMALL_FLOATS:
            return original(self, *args)
        result = original(self, *(_widened(arg) for arg in args[:num_operands]), *args[num_operands:])
        # A comparison's result is not a float, and a dot's result has its accumulator's type.
        is_own = dtype in _SMALL_FLOATS and result.data.dtype == np.float32 and original.__name__ != "create_dot"
        return _cast(self, result, dtype) if is_own else result

    return operation


class _Results(list[Any]):
    """Results of an inline assembler call."""

    get_result = list.__getitem__


def _inline_asm(run: Callable[[str, str, Sequence[np.ndarray]], Sequence[np.ndarray]]) -> Callable[..., _Results]:
    def inline_asm(
        self: Any, asm: str, constraints: str, values: Sequence[Any], dtypes: Sequence[Any], is_pure: bool, pack: int
    ) -> _Results:
        """Run inline assembler on packs of elements, which occupy as many 32-bit registers as they need, lowest first.

        Elements of a pack are adjacent only if their results share a register, as in the operands of tensor cores.
        Other elements of a pack come from different positions, which exposes code that assumes adjacency.
        """
        if not values:
            pairs = zip(run(asm, constraints, []), dtypes, strict=True)
            return _Results(interpreter.TensorHandle(x.view(interpreter._get_np_dtype(d)), d) for x, d in pairs)
        together = min(pack, *(32 // dtype.scalar.primitive_bitwidth for dtype in dtypes))
        order = np.arange(values[0].data.size).reshape(pack // together, -1, together).swapaxes(0, 1).reshape(-1)
        packs = [value.data.reshape(-1)[order].reshape(-1, pack).view(np.uint32) for value in values]
        registers = iter(run(asm, constraints, [words[:, i] for words in packs for i in range(words.shape[1])]))
        results = _Results()
        for dtype in dtypes:
            scalar = dtype.scalar
            words = np.stack([next(registers) for _ in range(pack * scalar.primitive_bitwidth // 32)], axis=1)
            data = np.empty(order.size, interpreter._get_np_dtype(scalar))
            data[order] = words.view(data.dtype).reshape(-1)
            results.append(interpreter.TensorHandle(data.reshape(values[0].data.shape), scalar))
        return results

    return inline_asm


def _keep_booleans(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give a boolean scalar the type int1 before it is broadcast: a comparison result keeps its operands' type."""

    def splat(self: Any, result_type: Any, scalar: Any) -> Any:
        if scalar.data.dtype == np.bool_:
            scalar = interpreter.TensorHandle(scalar.data, tl.int1)
        return original(self, result_type, scalar)

    return splat


def _reduce_decoded(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(self: Any, tensors: Any) -> Any:
        if not any(tensor.dtype.scalar in _SMALL_FLOATS for tensor in tensors):
            return original(self, tensors)
        raise NotImplementedError("reductions and scans of bfloat16 or FP8: convert to float32 first")

    return reduce


def _poll(begin_wait: Callable[[int | None], Wait], check_aborted: Callable[[], None]) -> Callable[..., Any]:
    """Return a poll loop that sleeps longer after each poll: spinning would starve the peers of CPU cores."""

    def poll(self: Any, pointer: Any, expected: Any, timeout_ns: Any, sem: Any, scope: Any) -> Any:
        wait = begin_wait(None if timeout_ns is None else int(timeout_ns.data.item()))
        wanted = np.broadcast_to(expected.data, pointer.data.shape)
        matched = np.zeros(pointer.data.shape, np.bool_)
        sleep_s = _SHORTEST_SLEEP_S
        while True:
            # An element that has matched once stays matched, as on a GPU.
            matched |= self.create_load(pointer, None, True).data == wanted
            if matched.all():
                wait.succeeded()
                break
            if wait.expired():
                break
            check_aborted()
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
        return interpreter.TensorHandle(matched, tl.int1)

    return poll


class _NothingToRestore:
    def restore(self) -> None:
        pass


def _patch_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch `tl.*` once and never restore it, instead of around each call of a kernel or a device function."""
    seen: set[frozenset[int]] = set()

    @functools.cache  # A function's modules never change.
    def patch(function: Any) -> _NothingToRestore:
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        key = frozenset(id(module) for module in modules if module in (tl, tl.core))
        if key not in seen:
            original(function)
            seen.add(key)
        return _NothingToRestore()

    return patch
