"""What the `pallas` implementation does not support; apart from its functions, so that asking loads no compiler."""

from __future__ import annotations

import functools
import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep.core.facts import (
    ActivationFacts,
    ExchangeFacts,
    Facts,
    Fp8OperandFacts,
    GemmActivationFacts,
    GemmFacts,
    Portable,
)
from jax_ep.core.mesh_axes import platform
from jax_ep.pallas.tiling import ALIGNMENT, STEP
from jax_ep.types import Experts, Options
from jax_ep.xla import requirements as portable

_CAPABILITY = "9.0"
_GEMM_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")
_FP8_RESULTS = (jnp.bfloat16, jnp.float16, jnp.float32)
_OTHER_DTYPES = (*_GEMM_DTYPES, "float32")  # of rows that are moved, added and activated
_SUPPORTED = ExchangeFacts | GemmFacts | GemmActivationFacts | ActivationFacts | Fp8OperandFacts
_NOT_ON_CPU = "it runs on GPUs; on CPU devices only for tests that name it alone"
_MOST_GROUPS = 4095  # in shared memory, 32 of them per thread
_ROWS_PER_GROUP = 256
_MOST_DEPTH_OF_ACTIVATED = 2048
_ACTIVATIONS = ("silu", "gelu", "relu", "relu_squared")  # "gelu_exact" has no instruction
_MOST_ROWS = 1 << 30  # row indices of combine have 32 bits
_MOST_PART = 16  # lines of a sum of combine, which are held in registers
_MOST_BYTES = 192 << 10  # a program of combine that needs more than `SLOT_BYTES` runs alone on a multiprocessor
SLOT_BYTES = 96 << 10
"""Shared memory of a program of combine: two programs then fit on a multiprocessor of Hopper."""
FEWEST_SLOTS = 2
LINE = 128
"""Columns of a sum of combine that share a scale."""
WARPS = 4
"""Warps of a warpgroup; each one adds lines."""
INTERPRETER_THREADS = 4
"""Cores or CPU devices that Mosaic's interpreter needs: fewer, and warpgroups wait for each other for good."""
_COMPILER = "jax.experimental.mosaic.gpu"


def unsupported_reason(facts: Facts, options: Options) -> str | None:
    """Why this implementation does not support these facts, or None; see ops/registry.py."""
    if not isinstance(facts, _SUPPORTED):
        return f"it has no {facts.operation}"
    dtypes = _GEMM_DTYPES if isinstance(facts, GemmFacts | GemmActivationFacts) else _OTHER_DTYPES
    if facts.dtype.name not in dtypes:
        return f"it supports {dtypes}, not {facts.dtype.name}"
    if isinstance(facts, ExchangeFacts) and (reason := portable.unsupported_reason(facts, options)) is not None:
        return reason  # what is not fused there is not here
    on = platform()
    if on == "cpu":
        reason = _missing_on_cpu() if options.alone else _NOT_ON_CPU
    else:
        reason = missing() if on == "gpu" else f"the platform is {on}, it needs NVIDIA GPUs"
    if reason is None and isinstance(facts, ExchangeFacts) and facts.is_combine:
        return _of_combine(facts, options)
    return _reason(facts) if reason is None else reason


def _of_combine(facts: ExchangeFacts, options: Options) -> str | None:
    layout = facts.layout
    sums = layout.num_ranks * layout.num_tokens * layout.top_k
    if options.wire_dtype is None or facts.dtype not in _FP8_RESULTS:
        return Portable("its kernel for combine quantizes sums of 16 or 32 bits; XLA adds others as fast")
    if 0 in (layout.capacity, facts.hidden, sums):
        return Portable("there is nothing to add")
    if max(layout.capacity, sums) >= _MOST_ROWS or lines_per_step(facts.hidden, layout.top_k, facts.dtype) is None:
        return Portable(f"its kernel does not add {layout.top_k} of {layout.capacity} rows of {facts.hidden} columns")
    return None


def lines_per_step(hidden: int, top_k: int, dtype: np.dtype) -> int | None:
    """Return how many lines of a sum are added at a time, a divisor of a row's lines; None: the kernel does not fit."""
    if hidden % LINE:
        return None
    lines, bytes_per_line = hidden // LINE, top_k * LINE * dtype.itemsize
    most = min(max(SLOT_BYTES // 3, WARPS * bytes_per_line), _MOST_BYTES // FEWEST_SLOTS)
    # A warp computes the scale of a line: parts are whole multiples of WARPS lines.
    parts = [n for n in range(WARPS, _MOST_PART + 1, WARPS) if lines % n == 0 and n * bytes_per_line <= most]
    return max(parts, default=None)


@functools.singledispatch
def _reason(facts: Facts) -> str | None:
    return None


@_reason.register
def _of_gemm(facts: GemmFacts) -> str | None:
    out_dtypes = _FP8_RESULTS if facts.in_fp8 else (facts.dtype, jnp.float32)
    if facts.out_dtype not in out_dtypes:
        return Portable(f"it has no grouped GEMM of {facts.dtype} to {facts.out_dtype}")
    if facts.is_empty:
        return Portable("there is nothing to compute: an operand is empty")
    if not fits(facts.num_rows, facts.groups):
        return Portable(f"{facts.groups} groups of {facts.num_rows} rows are too many")
    return None


@_reason.register
def _of_gemm_activation(facts: GemmActivationFacts) -> str | None:
    if not activates(facts.experts, facts.gemm.depth):
        return "its GEMM does not activate rows of these experts, or K is too large for that to be faster"
    return _reason(facts.gemm)


@_reason.register(ActivationFacts)
@_reason.register(Fp8OperandFacts)
def _of_activation(facts: ActivationFacts | Fp8OperandFacts) -> str | None:
    return Portable("it has no activation kernel; XLA fuses the activation")


def supports_dtype(dtype: DTypeLike) -> bool:
    """Whether there are machines where it multiplies these operands."""
    return jnp.dtype(dtype).name in _GEMM_DTYPES


def is_preferred(facts: Facts) -> bool:
    """Whether these GPUs have no faster grouped GEMM, nor a faster gradient of its weights.

    That is so where groups have hundreds of rows, and nothing must be padded (docs/design/grouped_gemm.md). In FP8
    `triton` is faster (docs/design/gluon.md).
    """
    return (
        isinstance(facts, GemmFacts)
        and platform() == "gpu"
        and supports_dtype(facts.dtype)
        and missing() is None
        and not facts.in_fp8
        and facts.num_rows >= _ROWS_PER_GROUP * facts.groups
        and facts.num_rows % ALIGNMENT == 0
        and facts.depth % STEP == 0
        and facts.columns % STEP == 0
    )


def fits(num_rows: int, num_groups: int) -> bool:
    """Whether groups have room in memory, and no sum of sizes, nor a coordinate behind the last row, leaves int32."""
    return num_groups <= _MOST_GROUPS and num_rows * (num_groups + 1) <= jnp.iinfo(jnp.int32).max


def activates(experts: Experts, depth: int) -> bool:
    """Whether the first GEMM of these experts, without biases, should store activated rows.

    Its `block_m` is half as large, which costs more the larger K is; the saved traffic stays the same
    (docs/design/grouped_gemm.md).
    """
    of_halves = experts.gated and not experts.interleaved
    taken = of_halves and experts.activation in _ACTIVATIONS and experts.weight_on == "output"
    return taken and depth <= _MOST_DEPTH_OF_ACTIVATED


def _missing_on_cpu() -> str | None:
    """XLA has a thread for each core or device; a kernel whose warpgroups wait for each other needs one for each."""
    threads = max(os.cpu_count() or 1, jax.local_device_count())
    if threads >= INTERPRETER_THREADS:
        return None
    return (
        f"its interpreter needs {INTERPRETER_THREADS} cores or CPU devices, there are {threads}; set"
        f" XLA_FLAGS=--xla_force_host_platform_device_count={INTERPRETER_THREADS} before Python starts"
    )


def missing() -> str | None:
    """Return what these GPUs, or this JAX, lack, or None."""
    capability = getattr(jax.local_devices()[0], "compute_capability", "unknown")
    if capability != _CAPABILITY:
        return (
            f"its kernels are for compute capability {_CAPABILITY} (Hopper), these GPUs have {capability};"
            " use `triton` or `xla`"
        )
    if importlib.util.find_spec(_COMPILER) is None:
        return f"this JAX has no {_COMPILER}"
    return None
