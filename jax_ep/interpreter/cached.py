"""Caches for types and shapes that Triton 3.9's interpreter recomputes with every operation.

Kernels with small blocks spend most of their time there, not in NumPy. Only worker.py loads this file, because it
patches Triton for the whole process.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def apply() -> None:
    """Patch Triton's interpreter in place."""
    interpreter._get_np_dtype = _cache(interpreter._get_np_dtype, lambda dtype: dtype.name)
    tl.core.block_type.__init__ = _cache_shapes(tl.core.block_type.__init__)
    tl.core.tensor.__init__ = _init_tensor
    semantic = type(interpreter.interpreter_semantic)
    semantic.computation_type_impl = _cache(
        semantic.computation_type_impl,
        lambda _, left, left_is_number, right, *rest: (left.name, left_is_number, right.name, *rest),
    )
    semantic.broadcast_impl_value = _leave_equal_shapes(semantic.broadcast_impl_value)


def _cache(original: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """Cache `original` by `key` of its arguments, because Triton creates types repeatedly and hashes them slowly."""
    known: dict[Any, Any] = {}

    def cached(*args: Any) -> Any:
        at = key(*args)
        if at not in known:
            known[at] = original(*args)
        return known[at]

    return cached


def _cache_shapes(original: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[int, ...], tuple[Any, int, str]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        # A bool or a NumPy integer equals an int, but Triton rejects it.
        found = known.get(sizes) if set(map(type, sizes)) == {int} else None
        if found is None:
            original(self, element_ty, shape)
            known[sizes] = (self.shape, self.numel, str(self.shape))
            return
        self.element_ty = element_ty
        self.shape, self.numel, text = found
        self.name = f"<{text}, {element_ty}>"

    return init


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _constants_of(tuple(type.shape.values) if type.is_block() else ())


@functools.cache
def _constants_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])


def _leave_equal_shapes(original: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast(self: Any, left: Any, right: Any) -> Any:
        is_block = left.type.is_block()
        if is_block == right.type.is_block() and (not is_block or left.type.shape.values == right.type.shape.values):
            return left, right
        return original(self, left, right)

    return broadcast
