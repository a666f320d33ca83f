"""What the `pallas` implementation refuses; apart from its functions, so that asking loads no compiler."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep.core.mesh_axes import platform
from jax_ep.pallas.tiling import ALIGNMENT, STEP
from jax_ep.types import Experts, Options
from jax_ep.xla import requirements as portable

_CAPABILITY = "9.0"
_DTYPES = {"grouped_gemm": ("bfloat16", "float16", "float8_e4m3fn")}
_OTHER_DTYPES = (*_DTYPES["grouped_gemm"], "float32")  # of rows that are moved, added and activated
_ROWS_PER_GROUP = 256
_MOST_DEPTH_OF_ACTIVATED = 2048
_ACTIVATIONS = ("silu", "gelu", "relu", "relu_squared")  # "gelu_exact" has no instruction of its own
INTERPRETER_THREADS = 4
"""Cores or CPU devices that Mosaic's interpreter needs: fewer, and warpgroups wait for each other for good."""
_COMPILER = "jax.experimental.mosaic.gpu"


def refusal(options: Options, operation: str, dtype: DTypeLike, *facts: Any) -> str | None:
    """Why this implementation cannot serve a request, or None; see ops/registry.py."""
    dtypes = _DTYPES.get(operation, _OTHER_DTYPES)
    if jnp.dtype(dtype).name not in dtypes:
        return f"it was made for {dtypes}, not for {jnp.dtype(dtype).name}"
    if (reason := portable.refusal(options, operation, dtype, *facts)) is not None:
        return reason  # what is not fused there is not here
    on = platform()
    if on == "cpu":
        return (
            _missing_on_cpu() if options.alone else "it runs on GPUs; on CPU devices only for tests that name it alone"
        )
    if on != "gpu":
        return f"the platform is {on}, it needs NVIDIA GPUs"
    return missing()


def is_made_for(dtype: DTypeLike) -> bool:
    """Whether there are machines where it multiplies these operands."""
    return jnp.dtype(dtype).name in _DTYPES["grouped_gemm"]


def is_fastest(options: Options, operation: str, dtype: DTypeLike, *product: int) -> bool:
    """Whether it serves a product of `num_rows, depth, columns, groups`, or its weight gradient, faster than others."""
    can = operation == "grouped_gemm" and bool(product) and platform() == "gpu" and is_made_for(dtype)
    return can and multiplies_fastest(*product)


def multiplies_fastest(num_rows: int, depth: int, columns: int, groups: int) -> bool:
    """Whether these GPUs have no faster product of `[num_rows, depth]` rows and `[groups, depth, columns]` matrices.

    Nor a faster gradient of the matrices. That is so where groups have hundreds of rows, and nothing must be padded
    (docs/design/grouped_gemm.md).
    """
    return (
        missing() is None
        and num_rows >= _ROWS_PER_GROUP * groups
        and num_rows % ALIGNMENT == 0
        and depth % STEP == 0
        and columns % STEP == 0
    )


def activates(experts: Experts, depth: int) -> bool:
    """Whether the first product of these experts, without biases, should store activated rows.

    Its tiles are half as high, which costs more the deeper it is; what is saved stays the same
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
        f"its interpreter needs {INTERPRETER_THREADS} cores or CPU devices, here are {threads}; set"
        f" XLA_FLAGS=--xla_force_host_platform_device_count={INTERPRETER_THREADS} before Python starts"
    )


def missing() -> str | None:
    """What these GPUs, or this JAX, lack, or None."""
    capability = getattr(jax.local_devices()[0], "compute_capability", "unknown")
    if capability != _CAPABILITY:
        return (
            f"its kernels are for compute capability {_CAPABILITY} (Hopper), that of these GPUs is {capability};"
            " `triton` or `xla` serve there"
        )
    if importlib.util.find_spec(_COMPILER) is None:
        return f"this JAX has no {_COMPILER}"
    return None
