"""What the `pallas` implementation does not support; apart from its functions, so that asking loads no compiler."""

from __future__ import annotations

import functools
import os

import jax
import jax.numpy as jnp

from jax_ep.core.facts import (
    ActivationFacts,
    ExchangeFacts,
    Facts,
    Fp8OperandFacts,
    GemmFacts,
    Portable,
)
from jax_ep.core.mesh_axes import platform
from jax_ep.types import Options
from jax_ep.xla import requirements as portable

_CAPABILITY = "9.0"
_DTYPES = (jnp.bfloat16, jnp.float16)
_NOT_ON_CPU = "it runs on GPUs; on CPU devices only for tests that name it alone"
_MOST_GROUPS = 4095  # in shared memory, 32 of them per thread
INTERPRETER_THREADS = 4
"""Cores or CPU devices that Mosaic's interpreter needs: fewer, and warpgroups wait for each other for good."""


def unsupported_reason(facts: Facts, options: Options) -> str | None:
    """Why this implementation does not support these facts, or None; see ops/registry.py."""
    on = platform()
    if on == "cpu":
        reason = _missing_on_cpu() if options.alone else _NOT_ON_CPU
    else:
        reason = missing() if on == "gpu" else f"the platform is {on}, it needs NVIDIA GPUs"
    return _reason(facts, options) if reason is None else reason


@functools.singledispatch
def _reason(facts: Facts, options: Options) -> str | None:
    return f"it has no {facts.operation}"


@_reason.register
def _of_gemm(facts: GemmFacts, options: Options) -> str | None:
    if facts.dtype not in _DTYPES:
        return f"its GEMMs support bfloat16 and float16, not {facts.dtype}"
    if facts.out_dtype not in (facts.dtype, jnp.float32):
        return Portable(f"it has no grouped GEMM of {facts.dtype} to {facts.out_dtype}")
    if facts.is_empty:
        return Portable("there is nothing to compute: an operand is empty")
    if not fits(facts.num_rows, facts.groups):
        return Portable(f"{facts.groups} groups of {facts.num_rows} rows are too many")
    return None


@_reason.register(ActivationFacts)
@_reason.register(ExchangeFacts)
@_reason.register(Fp8OperandFacts)
def _of_others(facts: ActivationFacts | ExchangeFacts | Fp8OperandFacts, options: Options) -> str | None:
    if (reason := portable.unsupported_reason(facts, options)) is not None:
        return reason
    return Portable(f"it has only GEMMs; `xla` runs the {facts.operation} next to them")


def fits(num_rows: int, num_groups: int) -> bool:
    """Whether groups have room in memory, and no sum of sizes, nor a coordinate behind the last row, leaves int32."""
    return num_groups <= _MOST_GROUPS and num_rows * (num_groups + 1) <= jnp.iinfo(jnp.int32).max


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
    """Return what these GPUs lack, or None."""
    capability = getattr(jax.local_devices()[0], "compute_capability", "unknown")
    if capability != _CAPABILITY:
        return (
            f"its kernels are for compute capability {_CAPABILITY} (Hopper), these GPUs have {capability};"
            " use `triton` or `xla`"
        )
    return None
