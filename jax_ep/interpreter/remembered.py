"""What Triton 3.9's interpreter works out anew with every operation, remembered: types and shapes, no values.

Kernels of small blocks spend most of their time there, not in NumPy. Only worker.py loads this file: it changes Triton
for the whole process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def apply() -> None:
    """Changes Triton's interpreter in place."""
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    tl.core.block_type.__init__ = _remember_block_shapes(tl.core.block_type.__init__)
    tl.core.tensor.__init__ = _remember_tensor_shapes()
    semantic = type(interpreter.interpreter_semantic)
    semantic.computation_type_impl = _remember_promotions(semantic.computation_type_impl)
    semantic.broadcast_impl_value = _leave_equal_shapes(semantic.broadcast_impl_value)


def _by_name(original: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[str, Any] = {}

    def get(dtype: Any) -> Any:
        found = known.get(dtype.name)
        if found is None:
            found = known[dtype.name] = original(dtype)
        return found

    return get


def _remember_block_shapes(original: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[int, ...], tuple[Any, int, str]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        # A bool or a NumPy integer equals an int, but is refused.
        found = known.get(sizes) if set(map(type, sizes)) == {int} else None
        if found is None:
            original(self, element_ty, shape)
            known[sizes] = (self.shape, self.numel, str(self.shape))
            return
        self.element_ty = element_ty
        self.shape, self.numel, text = found
        self.name = f"<{text}, {element_ty}>"

    return init


def _remember_tensor_shapes() -> Callable[..., None]:
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape.values) if type.is_block() else ()
        found = known.get(sizes)
        if found is None:
            numel = 1
            for size in sizes:
                numel *= size
            found = known[sizes] = (tl.constexpr(numel), tl.tuple([tl.constexpr(size) for size in sizes]))
        self.numel, self.shape = found

    return init


def _remember_promotions(original: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[Any, ...], Any] = {}

    def promote(self: Any, left: Any, left_is_number: bool, right: Any, right_is_number: bool, division: bool) -> Any:
        key = (left.name, left_is_number, right.name, right_is_number, division)
        found = known.get(key)
        if found is None:
            found = known[key] = original(self, left, left_is_number, right, right_is_number, division)
        return found

    return promote


def _leave_equal_shapes(original: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast(self: Any, left: Any, right: Any) -> Any:
        is_block = left.type.is_block()
        if is_block == right.type.is_block() and (not is_block or left.type.shape.values == right.type.shape.values):
            return left, right
        return original(self, left, right)

    return broadcast
