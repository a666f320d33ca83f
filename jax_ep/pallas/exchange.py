"""Dispatch and combine by XLA's collectives, with a kernel for sums that are quantized before they travel.

They need no access to the memory of peers. Handles are those of `xla`. XLA moves rows at memory bandwidth, but takes
longer if it quantizes on the way (docs/design/exchange.md); its gathers and sums do all other local steps.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jax_ep.core.dtypes import FP8
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.pallas import unpermute_fp8
from jax_ep.pallas.export_cache import lowered_once
from jax_ep.pallas.launch import is_interpreted, launch, num_programs
from jax_ep.pallas.unpermute_fp8 import LINE, RESULT_SLOTS, WARPS
from jax_ep.types import Array, Quantized
from jax_ep.xla import exchange as xla
from jax_ep.xla import local_steps

_PROGRAMS_PER_CORE = 2
_SLOT_BYTES = 96 << 10  # per program: two programs then fit on a multiprocessor of Hopper
_MOST_BYTES = 192 << 10  # a program that needs more than `_SLOT_BYTES` runs alone on a multiprocessor
_FEWEST_SLOTS, _MOST_SLOTS = 2, 8
_MOST_PART = 16  # lines of a sum, which are held in registers
_MOST_ROWS = 1 << 30  # row indices have 32 bits


def unpermute(y: Array, index: Array, dtype: DTypeLike) -> Array | Quantized:
    """Sum rows by `index`, see xla/local_steps.py."""
    part = _part(y, index) if dtype == FP8 else None
    if part is None:
        return local_steps.unpermute(y, index, dtype)
    return _unpermute_fp8(y, index, part=part, interpret=is_interpreted())


def _part(y: Array, index: Array) -> int | None:
    """Return how many lines are added at a time, a divisor of a row's lines; None: the kernel does not apply."""
    if y.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32) or y.shape[1] % LINE or 0 in (y.size, index.size):
        return None
    if max(y.shape[0], index.size) >= _MOST_ROWS:
        return None
    lines, bytes_per_line = y.shape[1] // LINE, index.shape[1] * LINE * y.dtype.itemsize
    most = min(max(_SLOT_BYTES // 3, WARPS * bytes_per_line), _MOST_BYTES // _FEWEST_SLOTS)
    # A warp computes the scale of a line: parts are whole multiples of WARPS lines.
    parts = [n for n in range(WARPS, _MOST_PART + 1, WARPS) if lines % n == 0 and n * bytes_per_line <= most]
    return max(parts, default=None)


@functools.partial(jax.jit, static_argnames=("part", "interpret"))  # one compilation for eager callers
def _unpermute_fp8(y: Array, index: Array, *, part: int, interpret: bool) -> Quantized:
    launched = functools.partial(_launch, top_k=index.shape[1], part=part, interpret=interpret)
    values, scales = sequential_vmap(launched)(*vary_alike((index.reshape(-1), y)))
    return values, scales


@lowered_once
def _launch(*operands: Array, top_k: int, part: int, interpret: bool) -> Any:
    index, y = operands
    lines, num_rows = y.shape[1] // LINE, index.shape[0] // top_k
    slot = top_k, part, LINE
    num_slots = min(max(_FEWEST_SLOTS, _SLOT_BYTES // (math.prod(slot) * y.dtype.itemsize)), _MOST_SLOTS)
    programs = num_programs(num_rows * (lines // part), interpret, per_core=_PROGRAMS_PER_CORE)
    scratch = {
        "slots": plgpu.SMEM((num_slots, *slot), y.dtype),
        "full": plgpu.Barrier(num_arrivals=top_k, num_barriers=num_slots),
        "out_slots": plgpu.SMEM((RESULT_SLOTS, part, LINE), FP8),
        "scale_slots": plgpu.SMEM((RESULT_SLOTS, part), jnp.float32),
    }
    body = functools.partial(unpermute_fp8.unpermute, programs=programs)
    result = (jax.ShapeDtypeStruct((num_rows, lines, LINE), FP8), jax.ShapeDtypeStruct((num_rows, lines), jnp.float32))
    inputs = index, y.reshape(-1, lines, LINE)
    values, scales = launch("unpermute_fp8", body, inputs, result, scratch, programs, interpret)
    return values.reshape(num_rows, -1), scales


plan = xla.plan
dispatch_rows = xla.dispatch_rows
dispatch_tokens = xla.dispatch_tokens
dispatch_quantized = xla.dispatch_quantized
combine_tokens = functools.partial(xla.combine_tokens, unpermute=unpermute)
