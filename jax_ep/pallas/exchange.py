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
from jax_ep.pallas.requirements import FEWEST_SLOTS, LINE, SLOT_BYTES, lines_per_step
from jax_ep.pallas.unpermute_fp8 import RESULT_SLOTS
from jax_ep.types import Array, Quantized
from jax_ep.xla import exchange as xla

_PROGRAMS_PER_CORE = 2
_MOST_SLOTS = 8


def unpermute(y: Array, index: Array, dtype: DTypeLike) -> Quantized:
    """Sum rows by `index` as in xla/exchange.py, to FP8, for sizes that `requirements.py` supports."""
    part = lines_per_step(y.shape[1], index.shape[1], y.dtype)
    if part is None or dtype != FP8:
        raise ValueError(f"combine: no kernel adds rows {y.dtype}{list(y.shape)} to {dtype}; use 'xla'.")
    return _unpermute_fp8(y, index, part=part, interpret=is_interpreted())


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
    num_slots = min(max(FEWEST_SLOTS, SLOT_BYTES // (math.prod(slot) * y.dtype.itemsize)), _MOST_SLOTS)
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
