"""Local steps of an exchange by kernels: which arrays they take, and how those lie in memory.

The kernels move rows by TMA, which any GPU from Hopper on has, and are written for Pallas's Mosaic GPU backend: the one
for Triton is deprecated. XLA's own gathers serve what they do not take: rows that are no whole lines of 128 bytes, such
as scales and router weights, and rows that are too long for shared memory.
"""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jax_ep.core import fp8
from jax_ep.core.dtypes import FP8
from jax_ep.core.layout import gather_rows
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.pallas import permute as permuting
from jax_ep.pallas import unpermute as adding
from jax_ep.pallas.launch import is_interpreted, launch, num_programs
from jax_ep.pallas.lowered import lowered_once
from jax_ep.pallas.memory import line
from jax_ep.pallas.streams import PROGRAMS_PER_CORE, SLOT_BYTES
from jax_ep.pallas.unpermute import LINE, RESULT_SLOTS, WARPS
from jax_ep.types import Array, Quantized
from jax_ep.xla import local_steps as xla
from jax_ep.xla.local_steps import LocalSteps

_SUMMED = (jnp.bfloat16, jnp.float16, jnp.float32)
_MOVED = (*_SUMMED, FP8)
_MOST_ROWS = 1 << 30  # their numbers are 32 bits wide
_MOST_BYTES = 192 << 10  # of slots; a program that needs more than `SLOT_BYTES` has a multiprocessor to itself
_BOX = 256  # most lines, and most columns, of a copy by TMA
_FEWEST_SLOTS, _MOST_SLOTS = 2, 8
_MOST_HEIGHT = 8  # rows of a block
_MOST_PART = 16  # lines of a sum: as many numbers in registers


def _num_slots(slot_bytes: int) -> int:
    return min(max(_FEWEST_SLOTS, SLOT_BYTES // slot_bytes), _MOST_SLOTS)


# --- permute ----------------------------------------------------------------------------------------------------------


def permute(x: Array, index: Array) -> Array:
    """See xla/local_steps.py."""
    if not _moves(x, index):
        return gather_rows(x, index)
    return _permute(x, index, interpret=is_interpreted())


def _moves(x: Array, index: Array) -> bool:
    if x.ndim != 2 or index.ndim != 1 or x.dtype not in _MOVED or 0 in (x.size, index.size):
        return False
    columns = x.shape[1]
    return (
        columns % line(x.dtype) == 0
        and columns // _line_length(columns, x.dtype) <= _BOX
        and _FEWEST_SLOTS * columns * x.dtype.itemsize <= _MOST_BYTES
        and max(*x.shape, index.shape[0]) < _MOST_ROWS
    )


def _line_length(columns: int, dtype: DTypeLike) -> int:
    """Columns of the longest lines of a row that TMA takes, which are whole pieces of 16 bytes."""
    piece = line(dtype) // 8
    return max(length for length in range(piece, _BOX + 1, piece) if columns % length == 0)


def _block_height(num_rows: int, row_bytes: int) -> int:
    """Rows that leave together: a power of two that divides all, and leaves room for other blocks on their way."""
    height = min(num_rows & -num_rows, _MOST_HEIGHT)
    while height > 1 and 2 * _FEWEST_SLOTS * height * row_bytes > SLOT_BYTES:
        height //= 2
    return height


@functools.partial(jax.jit, static_argnames=("interpret",))  # one compilation for eager callers
def _permute(x: Array, index: Array, *, interpret: bool) -> Array:
    run = sequential_vmap(functools.partial(_launch_permute, interpret=interpret))
    out: Array = run(*vary_alike((index, x)))
    return out


@lowered_once
def _launch_permute(*operands: Array, interpret: bool) -> Array:
    index, x = operands
    length = _line_length(x.shape[1], x.dtype)
    row = (x.shape[1] // length, length)
    row_bytes = x.shape[1] * x.dtype.itemsize
    height = _block_height(index.shape[0], row_bytes)
    num_slots = _num_slots(height * row_bytes)
    programs = num_programs(index.shape[0] // height, interpret, per_core=PROGRAMS_PER_CORE)
    scratch = {
        "slots": plgpu.SMEM((num_slots, height, *row), x.dtype),
        "full": plgpu.Barrier(num_arrivals=height, num_barriers=num_slots),
    }
    body = functools.partial(permuting.permute, programs=programs)
    result = jax.ShapeDtypeStruct((index.shape[0], *row), x.dtype)
    rows: Array = launch("permute", body, (index, x.reshape(-1, *row)), result, scratch, programs, interpret)
    return rows.reshape(-1, x.shape[1])


# --- unpermute --------------------------------------------------------------------------------------------------------


def unpermute(y: Array, index: Array, dtype: DTypeLike) -> Array | Quantized:
    """See xla/local_steps.py."""
    dtype = jnp.dtype(dtype)
    if _part(y, index, dtype) is None:
        if dtype != FP8 or _part(y, index, jnp.float32) is None:
            return xla.unpermute(y, index, dtype)
        return fp8.quantize_rows(cast(Array, unpermute(y, index, jnp.float32)))
    out: Any = _unpermute(y, index, dtype=dtype, interpret=is_interpreted())
    return out


def _part(y: Array, index: Array, dtype: DTypeLike) -> int | None:
    """Lines that are added at a time, a divisor of those of a row; None: the kernel does not take these operands."""
    if y.dtype not in _SUMMED or dtype not in _MOVED or y.shape[1] % LINE or 0 in (y.size, index.size):
        return None
    if max(y.shape[0], index.size) >= _MOST_ROWS:
        return None
    lines, bytes_per_line = y.shape[1] // LINE, index.shape[1] * LINE * y.dtype.itemsize
    smallest = WARPS if dtype == FP8 else 1  # scales are found by whole warps
    parts = [n for n in range(smallest, _MOST_PART + 1, smallest) if lines % n == 0]
    most = max(SLOT_BYTES // 3, smallest * bytes_per_line)
    fitting = [n for n in parts if n * bytes_per_line <= min(most, _MOST_BYTES // _FEWEST_SLOTS)]
    return max(fitting, default=None)


@functools.partial(jax.jit, static_argnames=("dtype", "interpret"))
def _unpermute(y: Array, index: Array, *, dtype: jnp.dtype, interpret: bool) -> Any:
    part = _part(y, index, dtype)
    launched = functools.partial(_launch_unpermute, top_k=index.shape[1], part=part, dtype=dtype, interpret=interpret)
    return sequential_vmap(launched)(*vary_alike((index.reshape(-1), y)))


@lowered_once
def _launch_unpermute(*operands: Array, top_k: int, part: int, dtype: jnp.dtype, interpret: bool) -> Any:
    index, y = operands
    lines, num_rows = y.shape[1] // LINE, index.shape[0] // top_k
    num_slots = _num_slots(math.prod((top_k, part, LINE, y.dtype.itemsize)))
    programs = num_programs(num_rows * (lines // part), interpret, per_core=PROGRAMS_PER_CORE)
    shapes = {dtype: (LINE,), jnp.dtype(jnp.float32): ()} if dtype == FP8 else {dtype: (LINE,)}
    scratch = {
        "slots": plgpu.SMEM((num_slots, top_k, part, LINE), y.dtype),
        "full": plgpu.Barrier(num_arrivals=top_k, num_barriers=num_slots),
        "results": [plgpu.SMEM((RESULT_SLOTS, part, *shape), kind) for kind, shape in shapes.items()],
    }
    body = functools.partial(adding.unpermute, programs=programs)
    result = [jax.ShapeDtypeStruct((num_rows, lines, *shape), kind) for kind, shape in shapes.items()]
    operands = (index, y.reshape(-1, lines, LINE))
    sums, *scales = launch("unpermute", body, operands, result, scratch, programs, interpret)
    sums = sums.reshape(num_rows, -1)
    return (sums, *scales) if scales else sums


KERNELS = LocalSteps(permute, unpermute)
