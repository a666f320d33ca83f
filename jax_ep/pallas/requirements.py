"""What the `pallas` implementation refuses; apart from its functions, so that asking loads no compiler."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import jax

from jax_ep.pallas.tiling import ALIGNMENT, STEP

_CAPABILITY = "9.0"
_ROWS_PER_GROUP = 256
INTERPRETER_THREADS = 4
"""Cores or CPU devices that Mosaic's interpreter needs: fewer, and warpgroups wait for each other for good."""
_COMPILER = "jax.experimental.mosaic.gpu"


def refusal(request: Any) -> str | None:
    """Why this implementation cannot serve a request, or None; see `backends.Request`."""
    if request.platform == "cpu":
        return (
            _missing_on_cpu() if request.alone else "it runs on GPUs; on CPU devices only for tests that name it alone"
        )
    if request.platform != "gpu":
        return f"the platform is {request.platform}, it needs NVIDIA GPUs"
    return missing()


def fastest(request: Any) -> bool:
    """Whether this implementation is the fastest for a request; see `backends.Entry`."""
    known = request.operation in ("gemm", "gemm_weights") and request.product is not None
    return known and request.platform == "gpu" and is_fastest(*request.product)


def is_fastest(num_rows: int, depth: int, columns: int, groups: int) -> bool:
    """Whether these GPUs have no faster product of `[num_rows, depth]` rows and `[groups, depth, columns]` matrices.

    Nor a faster gradient of the matrices. That is so where groups have hundreds of rows (docs/performance.md), and
    nothing must be padded.
    """
    return (
        missing() is None
        and num_rows >= _ROWS_PER_GROUP * groups
        and num_rows % ALIGNMENT == 0
        and depth % STEP == 0
        and columns % STEP == 0
    )


def _missing_on_cpu() -> str | None:
    """XLA has a thread for each core or device; a kernel whose warpgroups wait for each other needs one for each."""
    threads = max(os.cpu_count() or 1, jax.local_device_count())
    if threads >= INTERPRETER_THREADS:
        return None
    return (
        f"its interpreter needs {INTERPRETER_THREADS} cores or CPU devices, here are {threads}; set"
        f" XLA_FLAGS=--xla_force_host_platform_device_count={INTERPRETER_THREADS} before Python starts"
    )


def missing() -> str | None:
    """What these GPUs, or this JAX, lack, or None."""
    capability = getattr(jax.local_devices()[0], "compute_capability", "unknown")
    if capability != _CAPABILITY:
        return (
            f"its kernels are for compute capability {_CAPABILITY} (Hopper), that of these GPUs is {capability};"
            " `triton` or `xla` multiply there"
        )
    if importlib.util.find_spec(_COMPILER) is None:
        return f"this JAX has no {_COMPILER}"
    return None
