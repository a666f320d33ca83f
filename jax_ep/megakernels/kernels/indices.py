"""Index tensors for functions that kernels in Triton and in Gluon share.

Triton chooses how threads share a tensor; a kernel in Gluon says so for each tensor. In one dimension a thread has up
to 8 neighboring elements. In two dimensions a warp has a row, and a thread 8 neighboring columns of it.
"""

from typing import Any

import triton.language as tl


def indices(number: Any, _semantic: Any = None, _generator: Any = None) -> Any:
    """Return 0 to `number` - 1, a power of two."""
    warps = _warps(_semantic, _generator)
    return _range(number, warps and _in_turn(number, warps), _semantic)


def indices_in_row(number: Any, _semantic: Any = None, _generator: Any = None) -> Any:
    """Return 0 to `number` - 1 as `[1, number]`."""
    from triton.experimental.gluon import language as gl

    warps = _warps(_semantic, _generator)
    found = _range(number, warps and gl.SliceLayout(0, _in_rows(warps)), _semantic)
    return tl.expand_dims(found, 0, **_given(_semantic))


def as_column(x: Any, _semantic: Any = None, _generator: Any = None) -> Any:
    """Return `x [n]` as `[n, 1]`."""
    from triton.experimental.gluon import language as gl

    if warps := _warps(_semantic, _generator):
        x = _semantic.convert_layout(x, gl.SliceLayout(1, _in_rows(warps)))
    return tl.expand_dims(x, 1, **_given(_semantic))


def _warps(semantic: Any, generator: Any) -> int:
    """Return the warps of a kernel in Gluon, or of one of its roles; 0 in Triton, and in its interpreter."""
    return semantic.num_warps(generator).value if hasattr(semantic, "num_warps") else 0


def _in_turn(number: Any, warps: int) -> Any:
    from triton.experimental.gluon import language as gl

    each = max(1, min(8, getattr(number, "value", number) // (32 * warps)))
    return gl.BlockedLayout([each], [32], [warps], [0])


def _in_rows(warps: int) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.BlockedLayout([1, 8], [1, 32], [warps, 1], [1, 0])


def _range(number: Any, layout: Any, semantic: Any) -> Any:
    end = getattr(number, "value", number)
    return semantic.arange(0, end, layout) if layout else tl.arange(0, end, **_given(semantic))


def _given(semantic: Any) -> dict[str, Any]:
    return {} if semantic is None else {"_semantic": semantic}


for _function in (indices, indices_in_row, as_column):
    setattr(_function, tl.core.TRITON_BUILTIN, True)
